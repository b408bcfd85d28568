"""Allocations and frees read from recordings of every generation."""

from __future__ import annotations

from pathlib import Path

import pytest

from daydream.trace.files import read_trace
from daydream.trace.trace import NONE
from daydream.trace.writer import write_trace
from tests.daydream.recorded import recorded_trace
from tests.daydream.traces import GENERATIONS, Builder, event, written


def small(generation: str) -> Builder:
    """Two operators on two threads, with memory of a GPU and of the host."""
    builder = Builder(generation=generation)
    builder.operator("aten::mm", 10, 20).operator("aten::add", 40, 20, thread=101)
    builder.memory(45, -512, address=4096, allocated=0, reserved=2 << 20, thread=101)
    builder.memory(12, 512, address=4096, allocated=512, reserved=2 << 20)
    return builder.memory(13, 7, address=90, device=-1, allocated=7, reserved=0)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_columns_in_the_order_of_time(generation: str, tmp_path: Path) -> None:
    trace = read_trace(small(generation).write(tmp_path / "trace.json"))
    memory = trace.memory
    assert memory is not None
    assert len(memory) == 3
    assert memory.time_us.tolist() == [2, 3, 35]
    assert memory.bytes.tolist() == [512, 7, -512]
    assert memory.device.tolist() == [0, NONE, 0]
    assert [trace.threads[thread].number for thread in memory.thread] == [100, 100, 101]
    old = generation == "2021"
    assert memory.address.tolist() == ([NONE] * 3 if old else [4096, 90, 4096])
    assert memory.allocated.tolist() == ([NONE] * 3 if old else [512, 7, 0])
    assert memory.reserved.tolist() == ([NONE] * 3 if old else [2 << 20, 0, 2 << 20])
    assert trace.warnings == ()


def test_none_without_such_events(tmp_path: Path) -> None:
    builder = Builder().operator("aten::mm", 10, 20)
    assert read_trace(builder.write(tmp_path / "trace.json")).memory is None


def test_damaged_events_are_left_out_and_counted(tmp_path: Path) -> None:
    instant = {"ph": "i", "name": "[memory]", "dur": None}
    args = {"Device Type": 1, "Device Id": 0}
    trace = written(
        tmp_path / "trace.json",
        {
            "traceEvents": [
                event(),
                event(**instant, args={**args, "Bytes": 64, "Addr": "0x40"}),
                event(**instant, args={**args, "Bytes": "much"}),
                event(**instant, args={**args, "Bytes": 2**63}),
                event(**instant, args={**args, "Bytes": 2**51}),
                event(**instant, args={**args, "Bytes": True}),
                event(**instant, args=None),
                event(**{**instant, "ts": None}, args={**args, "Bytes": 64}),
            ]
        },
    )
    assert trace.memory is not None
    assert (trace.memory.bytes.tolist(), trace.memory.address.tolist()) == ([64], [64])
    assert "6 events of memory without a usable time or size, left out" in trace.warnings


def test_memory_alone_is_no_trace_of_work(tmp_path: Path) -> None:
    builder = Builder().operator("aten::mm", 10, 20).memory(12, 0)
    trace = read_trace(builder.write(tmp_path / "trace.json"))
    assert trace.memory is None
    assert trace.warnings == ("1 event of memory without a usable time or size, left out",)


def test_a_written_trace_is_read_with_its_memory(tmp_path: Path) -> None:
    first = read_trace(small("2026").write(tmp_path / "first.json"))
    write_trace(first, tmp_path / "second.json")
    second = read_trace(tmp_path / "second.json")
    assert first.memory is not None and second.memory is not None
    for name in ("time_us", "thread", "device", "bytes", "address", "allocated", "reserved"):
        assert getattr(second.memory, name).tolist() == getattr(first.memory, name).tolist(), name


def test_the_recorded_training_on_a_v100() -> None:
    memory = read_trace(recorded_trace("resnet50_v100_nw0")).memory
    assert memory is not None
    assert len(memory) == 12838
    assert memory.bytes[memory.device == 0].sum() == 0
    assert (memory.device == 0).sum() == 8220
