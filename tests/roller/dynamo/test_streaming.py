"""Products of few rows, whose weights come from memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hal.catalog import load_device
from sokoban.language.operators import operator_from_data

pytest.importorskip("torch")

from roller.dynamo.kernels import KernelShelf
from roller.dynamo.streaming import reading_bandwidth, streams_weights, with_empty_caches

DEVICE = load_device("epyc-7763")


def product(rows: int, packed: int = 0) -> Any:
    index, sizes = ("p,k,n", {"p": 1024 // packed, "n": packed}) if packed else ("k,n", {"n": 1024})
    axes = "m,p,n" if packed else "m,n"
    text = f"Y[{axes}] = sum(k, A[m,k] * B[{index}])"
    return operator_from_data({"expr": text, "sizes": {"m": rows, "k": 1024} | sizes, "dtype": "float32"})


def test_weights_of_few_rows_are_streamed() -> None:
    assert streams_weights(product(1), DEVICE)
    assert streams_weights(product(8), DEVICE)
    assert not streams_weights(product(256), DEVICE)
    equal = operator_from_data({"expr": "Y[i] = A[i] + B[i]", "sizes": {"i": 4096}, "dtype": "float32"})
    assert not streams_weights(equal, DEVICE)


def test_a_product_of_one_row_takes_as_long_as_memory_gives_its_weights(tmp_path: Path) -> None:
    shelf = KernelShelf.of(DEVICE, tmp_path, 1)
    least = 4 * 1024 * 1024 / reading_bandwidth(DEVICE)
    assert least < shelf.seconds(product(1, 64)) < 1.3 * least
    assert shelf.device_for(product(256)) is DEVICE


def test_shared_caches_are_as_slow_as_memory() -> None:
    emptied = with_empty_caches(DEVICE)
    shared = {layer.name: layer for layer in emptied.layers if layer.shared_by == "device"}
    assert shared["l3"].bandwidth_bytes_per_second == reading_bandwidth(DEVICE)
    assert emptied.dram == DEVICE.dram


def test_memory_whose_reads_alone_are_slower_than_reads_and_writes() -> None:
    """Writes of an EPYC have wires of their own, so that sums of two arrays move more bytes a second."""
    memory = DEVICE.dram
    reads = 0.9 * memory.bandwidth_bytes_per_second
    emptied = with_empty_caches(
        replace(DEVICE, layers=(*DEVICE.layers[:-1], replace(memory, read_bytes_per_second=reads)))
    )
    assert [layer.bandwidth_bytes_per_second for layer in emptied.layers[-2:]] == [reads, reads]


def test_weights_in_panels_are_read_in_one_go(tmp_path: Path) -> None:
    """Rows of a panel that follow each other are one piece, which is prefetched: nothing waits."""
    from roller.programs import find_programs, form_on

    device = with_empty_caches(DEVICE)
    programs = find_programs(form_on(product(1, 32), device), device, 400, "roller").direct
    in_one_go = [each for each in programs if each.schedule.thread_of["n"] == 32 and each.schedule.thread_of["p"] == 1]
    assert any(each.estimate.stage_seconds["latency"] == 0.0 for each in in_one_go)


def waiting(seconds: float) -> Any:
    """The processor with memory whose pages begin with a wait, as a device that streams weights."""
    memory = replace(DEVICE.dram, read_bytes_per_second=2e11, page_start_seconds=seconds)
    return with_empty_caches(replace(DEVICE, layers=(*DEVICE.layers[:-1], memory)))


def test_pages_begin_in_as_many_places_as_registers_allow() -> None:
    from roller.programs import find_programs, form_on

    def best(device: Any) -> Any:
        return find_programs(form_on(product(1, 16), device), device, 1, "roller").direct[0]

    few = {"unit_count": 4}
    in_one, apart = best(replace(with_empty_caches(DEVICE), **few)), best(replace(waiting(1e-7), **few))
    # Four panels of two vectors are eight sums of 15 registers, and six do not divide 64.
    assert in_one.schedule.thread_of["p"] < 4 == apart.schedule.thread_of["p"]
    assert in_one.schedule.thread_of["n"] == apart.schedule.thread_of["n"] == 16


def test_a_page_begins_while_other_places_are_read() -> None:
    """Of four panels at a time a quarter of the waits is seen, by each core for its share of the pages."""
    from roller.programs import find_programs, form_on

    device = waiting(1e-7)
    programs = find_programs(form_on(product(1, 16), device), device, 400, "roller").direct
    panels = next(
        each for each in programs if each.schedule.thread_of == {"p": 4, "n": 16} and not each.schedule.cached
    )
    pages = 4 * 1024 * 1024 / 4096
    expected = 4 * 1024 * 1024 / 2e11 + pages / 4 * 1e-7 / DEVICE.unit_count
    assert panels.estimate.stage_seconds["l3"] == pytest.approx(expected, rel=0.01)
    assert reading_bandwidth(waiting(1e-7)) == 2e11
