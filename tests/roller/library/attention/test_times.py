"""The library model for attention: what must hold whatever the constants are, and how near it is to measured calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hal
from hal.support.errors import InputError
from roller.library.attention.constants import CONSTANTS
from roller.library.attention.tiles import Calls, attention_launch, family
from roller.library.attention.times import AttentionSizes, attention_seconds
from roller.library.streaming.elementwise import LibraryTime

DATA = Path(__file__).parents[4].parent / "shared" / "data" / "tensor_core"

A100, L40S, H100, H200, B200 = (
    hal.load_device(name) for name in ("a100-sxm-80gb", "l40s", "h100-sxm-80gb", "h200", "b200")
)
BOARDS = [A100, L40S, H100, H200, B200, *(hal.load_device(name) for name in ("rtx-3090", "rtx-4090", "rtx-pro-6000"))]
MEASURED = {"a100_sxm": A100, "l40s": L40S, "h100_sxm": H100, "b200_sxm": B200}

#: Tokens of a page in the measurements.
PAGE = 64


def sizes(**changed: Any) -> AttentionSizes:
    """Four thousand tokens attending to themselves, unless told otherwise."""
    given: dict[str, Any] = {
        "b": 2, "heads": 32, "kv_heads": 8, "queries": 4096, "keys": 4096, "head_dim": 128, "causal": 1, "window": 0,
        "page": 0,
    }  # fmt: skip
    given |= changed
    return AttentionSizes(**{"value_dim": given["head_dim"]} | given)


def estimate(device: hal.DeviceSpec, dtype: str = "bfloat16", **changed: Any) -> LibraryTime:
    return attention_seconds(sizes(**changed), device, dtype=dtype)


def seconds(device: hal.DeviceSpec, **changed: Any) -> Any:
    return estimate(device, **changed).kernel_seconds


def launch(device: hal.DeviceSpec, **changed: Any) -> Any:
    calls = Calls.of(sizes(**changed))
    return attention_launch(calls, str(family(calls, device)[0]), device)  # type: ignore[arg-type]


def named(device: hal.DeviceSpec) -> str:
    return device.name


@pytest.mark.parametrize("device", BOARDS, ids=named)
def test_every_board_gives_finite_times_for_odd_sizes(device: hal.DeviceSpec) -> None:
    grid = np.meshgrid([1, 300], [1, 7, 5000], [1, 33, 70_000], [64, 80, 192, 256], [0, 64], [0, 100], indexing="ij")
    b, queries, keys, head_dim, page, window = (axis.ravel() for axis in grid)
    times = estimate(device, b=b, queries=queries, keys=keys, head_dim=head_dim, page=page, window=window)
    assert np.isfinite(times.kernel_seconds).all()
    assert (times.kernel_seconds > 0).all()
    assert (times.kernels >= 1 + (page > 0)).all()


def test_the_result_has_the_shape_of_the_sizes() -> None:
    times = attention_seconds(sizes(b=np.array([[1], [2]]), queries=np.array([128, 256, 512])), B200)
    assert times.kernel_seconds.shape == times.algorithm.shape == times.stages["dram"].shape == (2, 3)


@pytest.mark.parametrize(
    ("device", "page", "queries", "expected"),
    [
        (A100, 64, 512, "FlashAttention 2"),
        (L40S, 0, 512, "FlashAttention 2"),
        (H100, 64, 1, "FlashAttention 3"),
        (B200, 64, 512, "TensorRT-LLM"),
        (B200, 0, 1, "TensorRT-LLM"),
        (B200, 0, 512, "FlashAttention 4"),
    ],
)
def test_each_generation_has_its_kernels(device: hal.DeviceSpec, page: int, queries: int, expected: str) -> None:
    assert str(estimate(device, page=page, queries=queries).algorithm) == expected


def test_a_causal_call_skips_the_tiles_that_nobody_sees() -> None:
    # 4096 queries in blocks of 128 rows walk 1 to 32 tiles of 128 keys: 16.5 in the mean of all, 17 of the 16 sampled.
    walk = launch(H100, causal=1, page=PAGE, kv_heads=32, b=8).walk
    assert walk.steps[0] == pytest.approx(16.5, abs=1)
    assert walk.longest[0] in (31, 32)
    assert 1.6 < seconds(H100, causal=0, b=8) / seconds(H100, causal=1, b=8) < 2


def test_a_window_bounds_the_work() -> None:
    keys = np.array([8192, 16_384, 32_768])
    times = seconds(H100, queries=1, keys=keys, b=64, window=1024, page=PAGE)
    assert times == pytest.approx(times[0], rel=0.03)
    assert seconds(L40S, window=128) < 0.3 * seconds(L40S)


def test_heads_that_share_keys_are_rows_of_one_block_when_decoding() -> None:
    shared = launch(A100, queries=1, keys=4096, page=PAGE)
    assert bool(shared.tile.packed[0])
    assert shared.walk.blocks[0] == 2 * 8 * shared.walk.splits[0]
    alone = launch(A100, queries=1, keys=4096, page=PAGE, kv_heads=32)
    assert alone.walk.blocks[0] == 2 * 32
    assert seconds(A100, queries=1, keys=65_536, b=32) < seconds(A100, queries=1, keys=65_536, b=32, kv_heads=32) / 3


def test_few_long_sequences_split_their_keys() -> None:
    # 8 key heads, 216 slots of two blocks each unit: the fewest splits of 256 tiles that fill 85 % of the best round.
    walk = launch(A100, b=1, queries=1, keys=32_768, page=PAGE).walk
    assert 0.85 * 216 / 8 <= walk.splits[0] <= 216 / 8
    assert bool(walk.combined[0])
    assert walk.steps[0] * walk.splits[0] == 256
    for device in (A100, L40S, H100, B200):
        one, eight = seconds(device, b=np.array([1, 8]), kv_heads=1, queries=1, keys=16_384, page=PAGE)
        assert eight < 3 * one, device.name


def test_decoding_long_caches_runs_at_the_rate_of_dram() -> None:
    for device in (A100, L40S, H100, B200):
        moved = 64 * 32_768 * 8 * 2 * 128 * 2
        rate = moved / seconds(device, b=64, queries=1, keys=32_768, page=PAGE)
        assert 0.75 < rate / device.dram.bandwidth_bytes_per_second <= 1, device.name


def test_caches_that_fit_in_l2_are_faster_than_dram() -> None:
    moved = 8 * 2048 * 8 * 2 * 128 * 2  # 67 MB
    assert moved / seconds(L40S, b=8, queries=1, keys=2048, page=PAGE) > L40S.dram.bandwidth_bytes_per_second


def test_exponentials_bind_where_the_matrix_rate_grew_and_they_did_not() -> None:
    stages = estimate(B200, head_dim=64, causal=0, kv_heads=32).stages
    assert stages["softmax"] > stages["products"]
    stages = estimate(A100, head_dim=128, causal=0, kv_heads=32).stages
    assert stages["softmax"] < stages["products"]


def test_a_larger_call_never_takes_less() -> None:
    for device in (A100, L40S, H100, B200):
        for changing in ({"b": 2.0 ** np.arange(9)}, {"heads": 8 * 2.0 ** np.arange(5)}):
            assert (np.diff(seconds(device, queries=1024, keys=1024, page=PAGE, **changing)) > 0).all(), device.name


def test_a_call_never_beats_its_products_at_the_best_rate() -> None:
    for device in BOARDS:
        instruction = device.best_matrix_instruction("bfloat16")
        assert instruction is not None
        rate = 4 * 8 * 32 * 8192**2 * 128 / seconds(device, b=8, queries=8192, keys=8192, causal=0, kv_heads=32)
        best = instruction.best_flops or instruction.sustained_flops
        assert 0.3 * best < rate < 0.95 * best, device.name


def test_new_keys_and_values_are_written_into_pages_by_a_kernel_of_their_own() -> None:
    paged, contiguous = (estimate(H100, page=page, queries=256, keys=256) for page in (PAGE, 0))
    assert paged.stages["update"] > H100.launch_overhead_seconds
    assert contiguous.stages["update"] == 0
    assert paged.kernels == contiguous.kernels + 1


def test_a_token_of_a_cache_is_no_token_on_its_own() -> None:
    assert bool(Calls.of(sizes(queries=1, keys=2)).decoding[0])
    assert not bool(Calls.of(sizes(queries=1, keys=1)).decoding[0])


def test_the_backward_pass_takes_two_to_four_times_the_forward_pass() -> None:
    for device in BOARDS:
        forward, backward = (
            attention_seconds(sizes(b=8), device, direction=direction).kernel_seconds
            for direction in ("forward", "backward")
        )
        assert 2 < backward / forward < 4, device.name
    assert str(attention_seconds(sizes(queries=1), B200, direction="backward").algorithm) == "FlashAttention 4"


def test_eight_bit_floats_halve_the_products_and_not_the_exponentials() -> None:
    half, byte = (estimate(H100, dtype, b=8).stages for dtype in ("bfloat16", "float8_e4m3fn"))
    assert byte["products"] == pytest.approx(half["products"] / 2)
    assert byte["softmax"] == half["softmax"]
    assert estimate(H100, "float16").kernel_seconds == estimate(H100).kernel_seconds


def test_boards_without_the_instruction_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="t4 has no FlashAttention for bfloat16") as refused:
        estimate(hal.load_device("t4"))
    assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match="a100-sxm-80gb has no FlashAttention for float8_e4m3fn"):
        estimate(A100, "float8_e4m3fn")


def test_constants_are_those_of_seven_families() -> None:
    families = [
        "FlashAttention 2", "FlashAttention 3", "cuDNN", "FlashAttention 4", "cuDNN, unit pairs", "TensorRT-LLM",
        "Triton",
    ]  # fmt: skip
    assert list(CONSTANTS.kernels) == families
    assert CONSTANTS.reuse_full < CONSTANTS.reuse_none


def test_blackwell_ultra_takes_exponentials_twice_as_fast() -> None:
    slow, fast = hal.load_device("gb200"), hal.load_device("gb300")
    shape = sizes(queries=4096, keys=4096)
    for direction in ("forward", "backward"):
        one, two = (
            attention_seconds(shape, board, direction=direction, kernels="cuDNN, unit pairs") for board in (slow, fast)
        )
        softmax = float(two.stages["softmax"] / one.stages["softmax"])
        assert 0.5 <= softmax < 0.6
        assert two.kernel_seconds < one.kernel_seconds


def measured(kind: str) -> dict[str, Any]:
    """The columns of a file of measured calls."""
    parquet = pytest.importorskip("pyarrow.parquet")
    path = DATA / f"attention_{kind}.parquet"
    if not path.exists():
        pytest.skip("no measured attention")
    table = parquet.read_table(path)
    return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}


@pytest.mark.parametrize("kind", ["prefill", "decode", "encoder"])
def test_measured_calls_are_within_a_tenth_in_the_mean_on_every_board(kind: str) -> None:
    rows = measured(kind)
    for board, device in MEASURED.items():
        some = {name: column[rows["board"] == board] for name, column in rows.items()}
        if not len(some["board"]):
            continue
        keys = some["cache_length"] + 1 if kind == "decode" else some["query_length"]
        times = seconds(
            device,
            b=some["batch_size"],
            heads=some["num_heads"],
            kv_heads=some.get("num_key_value_heads", some["num_heads"]),
            queries=1 if kind == "decode" else keys,
            keys=keys,
            head_dim=some["head_dim"],
            causal=int(kind != "encoder"),
            window=some.get("window_size", 0),
            page=0 if kind == "encoder" else PAGE,
        )
        error = np.abs(times / (some["latency_ms"] * 1e-3) - 1)
        assert error.mean() < 0.1, f"{board}: {error.mean():.1%}"


def test_blocks_of_flash_attention_2_follow_the_memory_of_a_unit() -> None:
    wanted = {A100: (128, 128), H100: (128, 64), L40S: (64, 64)}  # of 128 and 256 elements, causal
    for device, expected in wanted.items():
        for head_dim, rows in zip((128, 256), expected, strict=True):
            calls = Calls.of(sizes(head_dim=head_dim))
            assert attention_launch(calls, "FlashAttention 2", device).tile.rows == rows


def test_backward_blocks_hold_keys_and_walk_the_queries_that_see_them() -> None:
    calls = Calls.of(sizes(queries=1024, keys=4096, causal=0))
    backward = attention_launch(calls, "FlashAttention 3", H100, backward=True)
    assert (backward.tile.rows, backward.tile.keys) == (128, 80)
    assert (backward.walk.blocks, backward.walk.steps) == (2 * 32 * 4096 / 128, np.ceil(1024 / 80))
    causal = attention_launch(Calls.of(sizes()), "FlashAttention 3", H100, backward=True)
    assert causal.walk.steps == pytest.approx(4096 / 64 / 2, rel=0.1)
    assert causal.walk.splits == 1 and not causal.walk.combined


def test_shared_memory_bounds_wide_heads_of_flash_attention_2() -> None:
    def rate(head_dim: int) -> float:
        given = sizes(head_dim=head_dim, heads=4096 // head_dim, kv_heads=4096 // head_dim, causal=0)
        return 1 / float(attention_seconds(given, H100, kernels="FlashAttention 2").kernel_seconds)

    assert rate(256) < rate(128)  # the same work, of which more passes the port
