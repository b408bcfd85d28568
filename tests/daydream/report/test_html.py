"""The HTML report: well formed, self-contained, escaped, bounded, and with the right numbers in it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Mark, Phase, TaskGraph, TaskKind, TrainingStep
from daydream.graph.simulate import simulate
from daydream.report.analysis import analyse
from daydream.report.html import report, write_report
from daydream.report.picture import BINS, MOST_LANES, picture
from daydream.whatif import AppliedPass
from tests.daydream.graphs import CHANNEL, MAIN, STREAM, Thread, ThreadKind, graph, launched, pairs, task
from tests.daydream.recorded import operator, recorded

_EMPTY = {"meta", "br", "line", "rect"}


class _Page(HTMLParser):
    """Checks that every tag is closed, and collects text, tags and classes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in _EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def one_step(name: str = "a", measured_us: float = 20.0, **fields: object) -> TaskGraph:
    """Launch 0-2, kernel 2-12, a call that waits for it 12-13."""
    tasks = [
        task("step begins", MAIN, 0, mark=Mark.STEP_BEGIN),
        task("cudaLaunchKernel", MAIN, 2, phase=Phase.FORWARD),
        task(name, STREAM, 10, phase=Phase.FORWARD, layer=f"layer {name}"),
        task("cudaDeviceSynchronize", MAIN, 1),
        task("step ends", MAIN, 0, mark=Mark.STEP_END),
    ]
    edges = [(1, 2, Dependency.LAUNCH), (2, 3, Dependency.SYNC)]
    return graph(tasks, edges, steps=(TrainingStep("ProfilerStep#3", measured_us),), **fields)


def page_of(before: TaskGraph, after: TaskGraph | None = None, applied: tuple[AppliedPass, ...] = ()) -> _Page:
    old = analyse(simulate(before), [0])
    new = analyse(simulate(after), [0]) if after is not None else None
    page = _Page(report(old, new, applied))
    assert page.open == []
    return page


def test_a_single_timeline_has_its_numbers() -> None:
    page = page_of(one_step(measured_us=12_500.0))
    for text in ("measured step", "12.50 ms", "simulated step", "0.013 ms", "GPU compute", "77 % of the critical path"):
        assert text in page.text
    for text in ("predicted", "speed-up", "What was changed", "Warnings"):
        assert text not in page.text


def test_before_and_after_stand_side_by_side() -> None:
    before = one_step()
    after = before.scaled(np.array([2]), 0.1)
    applied = (AppliedPass("scale", {"factor": 0.1, "deep": True}, ("1 kernel takes a tenth",)),)
    page = page_of(before, after, applied)
    # 13 before, 2 + 1 + 1 after: CPU for 3 of 4.
    for text in ("3.25 ×", "bottleneck after", "CPU", "1. scale", "(factor=0.1, deep=yes)", "1 kernel takes a tenth"):
        assert text in page.text
    assert page.tags.count("svg") == 2


def test_it_loads_nothing() -> None:
    text = report(analyse(simulate(one_step()), [0]))
    assert not {"script", "link", "img", "iframe", "object"} & set(_Page(text).tags)
    assert not re.search(r"https?:|url\(|@import|src=", text)


def test_all_text_is_escaped() -> None:
    evil = "<script>alert(1)</script>&\"'\x00\x1b[31m"
    before = one_step(evil, warnings=(evil,))
    page = page_of(before, before, (AppliedPass(evil, {"match": evil}, (evil,)),))
    assert "script" not in page.tags
    assert "<script>alert(1)</script>&\"'" in page.text
    assert "\x00" not in page.text and "\x1b" not in page.text


def test_warnings_are_shown_once() -> None:
    before = one_step(warnings=("half of it is missing",))
    assert page_of(before, before).text.count("half of it is missing") == 1


def test_a_pass_that_adds_a_channel_shows_it() -> None:
    before = one_step()
    edit = Edit(before)
    sent = edit.add("allreduce", TaskKind.COMMUNICATION, 30, thread=edit.thread(CHANNEL), step=0)
    edit.depend(2, sent, Dependency.COMMUNICATION)
    edit.depend(sent, 3, Dependency.COMMUNICATION)
    page = page_of(before, edit.apply())
    for text in ("network", "only the network", "path: communication"):
        assert text in page.text


def test_utilisation_is_shown_where_it_was_asked_for() -> None:
    call = operator("aten::mm", [[1000, 1000], [1000, 1000]], kernels=[("<sgemm>", 200.0)])
    relu = operator("aten::relu", [[1000, 1000]], kernels=[("elementwise", 100.0)])
    timeline = simulate(recorded([call, relu]))
    page = _Page(report(analyse(timeline, [0], device="auto", batch=3)))
    assert page.open == []
    # 2e9 FLOPs at 15.667e12 take 127.7 of 200 us; with 1e6 more, 127.7 of 300.
    for text in (
        "Utilisation",
        "Longest kernels below the average of 42.6 %",
        "elementwise",
        "0.1 %",
        "of 1 thread seen",
    ):
        assert text in page.text
    assert "Utilisation" not in _Page(report(analyse(timeline, [0]))).text


def test_pictures_stay_small_whatever_the_number_of_tasks() -> None:
    generator = np.random.default_rng(7)
    tasks = []
    for _ in range(4000):
        tasks += launched("k", float(generator.uniform(0.1, 9)), phase=int(generator.integers(0, 3)))
    drawn = picture(simulate(graph(tasks, pairs(4000))), 0, 40_000)
    assert drawn.count("<rect") < 3 * 2 * (BINS + 2)
    assert len(drawn) < 500_000


def test_many_streams_are_cut_down_to_the_busiest() -> None:
    streams = [Thread(kind=ThreadKind.STREAM, label=f"stream {i}", number=i, device=0) for i in range(40)]
    drawn = picture(simulate(graph([task("k", stream, 1 + stream.number) for stream in streams])), 0, 40)
    assert drawn.count('text-anchor="end">stream') == MOST_LANES
    assert f"{40 - MOST_LANES} more threads and streams with less to do are not shown" in drawn
    assert "stream 39<" in drawn and "stream 0<" not in drawn


def test_rectangles_say_what_when_and_how_busy() -> None:
    drawn = picture(simulate(one_step()), 0, 13)
    assert "forward, 0.002 to 0.012 ms, 100 % busy" in drawn
    assert "critical path: GPU compute, 0.002 to 0.012 ms" in drawn


@pytest.mark.parametrize("tasks", [[], [task("op", MAIN, 0)], [task("op", MAIN, 5)]])
def test_next_to_nothing_is_still_a_page(tasks: list[dict[str, object]], tmp_path: Path) -> None:
    analysis = analyse(simulate(graph(tasks)), [0], device="auto")
    write_report(tmp_path / "report.html", analysis, analysis)
    assert "Who works" in _Page((tmp_path / "report.html").read_text()).text


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        write_report(tmp_path / "missing" / "report.html", analyse(simulate(one_step()), [0]), None)
    assert list(tmp_path.iterdir()) == []
