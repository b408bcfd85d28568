"""What is said of a recording's memory: tables, JSON, a picture, counters."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

from daydream.answers import replay
from daydream.cli import main
from daydream.memory.recorded import recorded_memory
from daydream.memory.report import memory_counters, memory_record, memory_section, sentences
from daydream.report.timeline import PROCESS_OFFSET
from daydream.trace.files import read_trace
from hal.support.errors import InputError
from tests.daydream.memory.test_recorded import MIB, training
from tests.daydream.recorded import recorded_trace
from tests.daydream.trace.test_garbage import mutated
from tests.daydream.traces import Builder


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return training().write(tmp_path / "trace.json")


def output_of(*arguments: object) -> str:
    result = CliRunner().invoke(main, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_tables(trace: Path) -> None:
    text = output_of("report", trace)
    lines = text[text.index("Memory of GPU 0, MB, by kind at the peak") :].splitlines()
    header = "step            at start  peak  above start  at ms  weight gradients  optimizer states  inputs  temporary"
    assert lines[1].strip() == header
    assert lines[2].split() == ["ProfilerStep#0", "0.0", "0.0", "0.0", "0.21", "0.0", "0.0", "0.0", "0.0"]
    assert "Memory at the peak of ProfilerStep#0, MB, by layer" in text
    assert lines[-1].split()[:2] == ["Linear_0", "0.0"]


def test_no_tables_without_memory(tmp_path: Path) -> None:
    path = Builder().step(0, 0, 100).operator("aten::mm", 10, 20).write(tmp_path / "trace.json")
    assert "Memory" not in output_of("report", path)
    assert json.loads(output_of("report", path, "--json"))["memory"] == []


def test_one_step_is_asked_for(trace: Path) -> None:
    (memory,) = json.loads(output_of("report", trace, "--json", "--step", 1))["memory"]
    assert [step["name"] for step in memory["steps"]] == ["ProfilerStep#1"]
    (step,) = memory["steps"]
    assert (step["start_bytes"], step["peak_bytes"], step["above_start_bytes"]) == (14000, 22500, 8500)
    assert step["kinds"]["weight gradients"] == 6000
    assert {layer["name"]: layer["bytes"] for layer in memory["layers"]} == {"": 16500, "Linear_0": 6000}
    assert (memory["device"], memory["before_bytes"], memory["paired_by_address"]) == (0, None, True)


def test_recorded_and_replayed_reserves_are_compared(tmp_path: Path) -> None:
    builder = Builder().operator("aten::mm", 0, 90)
    builder.memory(10, 4 * MIB, address=1, allocated=5 * MIB, reserved=25 * MIB)
    (memory,) = recorded_memory(read_trace(builder.write(tmp_path / "trace.json")))
    whole, reserves = sentences(memory)
    assert whole.startswith("1.0 MB on top are there throughout")
    # A small segment for what was there, and one of 20 MiB.
    assert reserves.endswith("reserves 23.1 MB for this; recorded were 26.2 MB, -12.0 % with the replay.")
    assert memory_record(memory, [0], 5)["replayed_peak_reserved_bytes"] == 22 * MIB


def test_the_section_of_the_report(trace: Path) -> None:
    memories = recorded_memory(read_trace(trace))
    section = memory_section(memories, [0, 1])
    svg = section[section.index("<svg") : section.index("</svg>") + 6]
    titles = [each.text for each in ElementTree.fromstring(svg).iter("title")]
    # Feature maps are freed before the peak, and the update's states are there.
    assert "optimizer states: 0.0 MB at the peak, 0.0 at most" in titles
    assert len(titles) == 6
    assert "<code>" not in section and "By layer at the peak of ProfilerStep#0" in section
    assert memory_section(memories, []) == ""


def test_the_report_holds_the_section(trace: Path, tmp_path: Path) -> None:
    output_of("report", trace, "--html", tmp_path / "report.html")
    assert "<h2>Memory of GPU 0, ProfilerStep#0</h2>" in (tmp_path / "report.html").read_text()


def test_counters_keep_to_the_operators_that_made_them(trace: Path) -> None:
    timeline = replay(trace).timeline
    memories = recorded_memory(read_trace(trace))
    (counter,) = memory_counters(memories, timeline)
    assert counter.series["allocated"].tolist() == memories[0].footprint.allocated.tolist()
    assert sum(series for name, series in counter.series.items() if name != "allocated").tolist() == (
        counter.series["allocated"].tolist()
    )
    # Nothing was changed, so the timeline is the recording but for what the copy's call is taken to wait.
    assert np.abs(counter.time_us - memories[0].time_us).max() <= 2.0
    assert (np.diff(counter.time_us) >= 0).all()


def test_counters_stand_in_the_timeline(trace: Path, tmp_path: Path) -> None:
    for command in ("report", "simulate"):
        output_of(command, trace, "--out", tmp_path / "out.json")
        events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
        counters = [event for event in events if event["ph"] == "C"]
        assert [event["pid"] for event in counters] == [PROCESS_OFFSET] * 28
        assert [event["ts"] for event in counters] == sorted(event["ts"] for event in counters)
        assert counters[0]["args"]["allocated"] == counters[0]["args"]["inputs"] == 1000
        # The file is a trace that can be read again.
        assert len(read_trace(tmp_path / "out.json")) > 0


@pytest.mark.parametrize("generation", ["2021", "2022", "2026"])
def test_damaged_recordings_are_reported_as_far_as_they_go(generation: str, tmp_path: Path, new_seed: int) -> None:
    shown = 0
    for seed in range(new_seed, new_seed + 10):
        path = tmp_path / "trace.json"
        path.write_bytes(mutated(training(generation).document(), seed))
        try:
            replayed = replay(path)
        except InputError:
            continue
        assert replayed.graph.trace is not None
        memories = recorded_memory(replayed.graph.trace)
        memory_section(memories, replayed.steps)
        for memory, counter in zip(memories, memory_counters(memories, replayed.timeline), strict=True):
            assert (memory.footprint.allocated >= 0).all()
            assert (np.diff(counter.time_us) >= 0).all()
            shown += bool(memory_record(memory, replayed.steps, 5)["steps"])
    assert shown


def test_the_recorded_training_on_a_v100() -> None:
    text = output_of("report", recorded_trace("resnet50_v100_nw0"), "--rows", 3)
    memory = text[text.index("Memory of GPU 0") :]
    assert "ProfilerStep#5        0.0  2791.6       2791.6" in memory
    assert "The trace holds no addresses" in memory
