"""RATIONAL for attention: walks of blocks, what a step waits for, the kernel that brings slices together."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hal.catalog import load_device
from sokoban.kernel.attention import SliceSum, attention_flops, seen_pairs
from sokoban.kernel.instructions import Instruction
from sokoban.language.expression import Tensor
from sokoban.model.gpu.kinds.attention import _tail, estimate_attention, estimate_slice_sum, lookups, walks
from sokoban.schedule.attention import SliceSumSchedule, problem_band
from tests.codegen.attention_kernels import by_matrices, by_multiply_adds, kernel_of

A100 = load_device("a100")
LONG = {"queries": 4096, "head_dim": 128, "heads": 32}


@pytest.mark.parametrize(
    ("keys", "window", "causal"), [(7, 0, True), (7, 3, True), (12, 0, True), (12, 5, True), (9, 0, False)]
)
def test_pairs_are_those_that_the_mask_leaves(keys: int, window: int, causal: bool) -> None:
    attention = kernel_of(queries=7, keys=keys, causal=causal, window=window).attention
    ahead = keys - 7
    seen = [
        (query, key)
        for query in range(7)
        for key in range(keys)
        if not causal or (key <= query + ahead and (not window or key > query + ahead - window))
    ]
    assert seen_pairs(attention) == len(seen)
    assert attention_flops(attention) == 4 * 16 * len(seen)


def test_blocks_walk_the_tiles_that_any_of_their_rows_sees() -> None:
    schedule = by_matrices(rows=64, keys=32, warps=4)
    # Rows 0 to 63 see two tiles, the next ones four, and so on to eight.
    causal = walks(kernel_of(queries=256, causal=True), schedule)
    assert (causal.mean, causal.longest, causal.edges) == (5, 8, 2)
    assert walks(kernel_of(queries=256), schedule).mean == 8
    # A window of 32 keys, of 64 rows: three tiles, two for the first rows.
    windowed = walks(kernel_of(queries=256, causal=True, window=32), schedule)
    assert windowed.longest == 3
    assert walks(kernel_of(2, queries=256), schedule).longest == 4


def test_longer_takes_longer_and_registers_decide_what_fits() -> None:
    schedule = by_matrices(rows=64, keys=64, warps=4)
    short, long = (estimate_attention(kernel_of(**LONG | {"queries": size}), schedule, A100) for size in (2048, 8192))
    assert 12 < long.seconds / short.seconds < 17
    of_registers = estimate_attention(kernel_of(**LONG), schedule, A100, registers=255)
    assert of_registers.blocks_per_unit < estimate_attention(kernel_of(**LONG), schedule, A100).blocks_per_unit
    assert estimate_attention(kernel_of(**LONG), schedule, A100, registers=256).seconds == math.inf


def test_multiply_adds_are_an_order_of_magnitude_slower() -> None:
    kernel = kernel_of(**LONG)
    matrix = estimate_attention(kernel, by_matrices(rows=64, keys=64, warps=4), A100)
    scalar = estimate_attention(kernel, by_multiply_adds(rows=64, keys=64, warps=4, lanes=16), A100)
    assert 8 < scalar.seconds / matrix.seconds < 40
    lanes = A100.peak_flops("float32")
    assert scalar.seconds > attention_flops(kernel.attention) / lanes


def test_narrow_tiles_of_threads_load_more_than_they_multiply() -> None:
    """Sixteen rows by a key a thread share nothing; four by four share both."""
    kernel = kernel_of(dtype="float32", **LONG)
    narrow, square = (
        by_multiply_adds(rows=8, keys=16, warps=4, lanes=16),
        by_multiply_adds(rows=32, keys=64, warps=4, lanes=16),
    )
    shares = [estimate_attention(kernel, each, A100).stage_seconds["shared"] for each in (narrow, square)]
    assert shares[0] > 1.5 * shares[1]


def test_bringing_slices_together_grows_with_their_number() -> None:
    def seconds(slices: int, rows: int) -> float:
        source = Tensor("Parts", (slices, rows, 130), "float32")
        kernel = SliceSum(name="", source=source, output=Tensor("Y", (rows, 128), "float16"))
        return estimate_slice_sum(kernel, SliceSumSchedule(128), A100).seconds

    assert seconds(4, 64) < seconds(32, 64)
    assert seconds(4, 64) < seconds(4, 1 << 20)


def test_instructions_without_rates_are_multiply_adds() -> None:
    schedule = replace(by_matrices(), instruction=Instruction.FMA, lanes=8)
    assert estimate_attention(kernel_of(**LONG), schedule, A100).seconds > 0


DECODED = {"b": 8, "queries": 1, "keys": 4096, "head_dim": 128, "heads": 32, "kv_heads": 8}


def test_pages_cost_the_bytes_of_their_table_and_the_wait_for_it() -> None:
    schedule = by_matrices(rows=64, keys=64, warps=4)
    pages = [{}, {"page": 64, "pool": 64}, {"page": 16, "pool": 256}, {"page": 1, "pool": 4096}]
    kernels = [kernel_of(**LONG | {"heads": 1} | each) for each in pages]
    seconds = [estimate_attention(kernel, schedule, A100).seconds for kernel in kernels]
    assert seconds == sorted(seconds) and seconds[0] < seconds[1] < 1.1 * seconds[0]
    tables = [kernel.walked_bytes - kernels[0].walked_bytes for kernel in kernels]
    assert tables == [0, 4 * 64, 4 * 256, 4 * 4096]


def test_a_pool_that_no_sequence_reads_costs_nothing() -> None:
    schedule = by_matrices(rows=16, keys=16, warps=1, stages=2)
    small, large = (kernel_of(6, **DECODED, page=16, pool=pool) for pool in (2048, 8192))
    assert estimate_attention(small, schedule, A100) == estimate_attention(large, schedule, A100)


def test_threads_look_for_pages_as_often_as_their_text_does() -> None:
    kernel = kernel_of(head_dim=128, page=16, pool=3)
    # 128 threads, keys and values, four pages a step; four elements at a time; one thread copies for warp groups.
    assert lookups(kernel, by_matrices(rows=64, keys=64, warps=4)) == 128 * 2 * 4
    assert lookups(kernel, by_multiply_adds(keys=16)) == 2 * 16 * 32
    assert lookups(kernel_of(head_dim=128), by_matrices()) == 0


def test_units_end_together_where_problems_start_side_by_side() -> None:
    """Walks of 1 to 64 tiles, four problems on 132 units: in turns they leave half of the longest walk behind."""
    lengths = tuple(number / 64 for number in range(64, 0, -1))
    one, all_four = (_tail(lengths, 4, band, 132) for band in (1, 4))
    assert one == pytest.approx(0.5, abs=0.01)
    assert all_four == pytest.approx(1.0 - 4 * sum(lengths) / 132, abs=1e-9)
    # Many problems: what the last of them leave.
    assert [round(_tail(lengths, 32, band, 132), 2) for band in (1, 4, 8)] == [0.47, 0.01, 0.01]


def test_bands_are_of_masks_and_of_what_the_cache_holds() -> None:
    causal = kernel_of(queries=4096, head_dim=128, heads=32, causal=True)
    assert problem_band(causal, 32) == 16  # 24 by their blocks, 16 by their bytes
    assert problem_band(causal, 256) == 2  # of 3 that 32 is no multiple of
    assert problem_band(kernel_of(queries=4096, head_dim=128, heads=32), 32) == 1
