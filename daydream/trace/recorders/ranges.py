"""Ranges that a program named, read as training steps and as operators of ``torch.autograd.profiler.emit_nvtx``.

A recorder other than PyTorch's knows no step. A loop that is marked at all has a range around each iteration, with a
number (``iteration 7``) or the same name every time (``train_step``); of all such groups of ranges that follow one
another, the steps are the one that holds the most launches, and of several with as many the longest.
"""

from __future__ import annotations

import contextlib
import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from daydream.trace.recorders.events import Range, Recording
from daydream.trace.text import Notes

_NUMBER = re.compile(r"\d+")
_OPERATOR = re.compile(r"^(?P<name>[^,]+?)(?:, seq = (?P<seq>\d+))?(?:, op_id = \d+)?(?:, sizes = (?P<sizes>\[.*?\]))?"
                       r"(?:, input_op_ids = .*)?$")  # fmt: skip
_OPERATOR_NAME = re.compile(r"^(aten|torch|c10d|prims|autograd|[a-z_0-9]+)::\w|^[A-Z]\w*Backward\d*$")

#: Parts of a step that are numbered or repeated, too.
_PARTS = re.compile(r"layer|block|bucket|micro|stage|head|chunk|shard|expert", re.IGNORECASE)

#: Share of the launches that the ranges of steps hold at least; groups with fewer mark something else.
MOST_LAUNCHES = 0.5


def add_ranges(recording: Recording, notes: Notes) -> None:
    """The ranges of a recording as user annotations and operators, and steps around those that mark them."""
    for each in recording.ranges:
        operator = _operator_arguments(each.name)
        category, name, arguments = ("user_annotation", each.name, {}) if operator is None else operator
        recording.add(category, name, each.begin_ns, each.end_ns, thread=each.thread, arguments=arguments)
    if any(each.name.startswith("ProfilerStep#") for each in recording.ranges):
        return
    steps = step_ranges(recording.ranges, recording.launches)
    for number, each in enumerate(steps):
        label = f"ProfilerStep#{number}"
        recording.add("user_annotation", label, each.begin_ns, each.end_ns, thread=each.thread)
    if steps:
        first = steps[0].name.replace("{", "(").replace("}", ")")
        last = steps[-1].name.replace("{", "(").replace("}", ")")
        named = f"{first} to {last}" if last != first else first
        notes.add(f"Steps are the {len(steps)} ranges {named}")


def step_ranges(ranges: Sequence[Range], launches: Sequence[tuple[int, int]]) -> list[Range]:
    """The ranges that mark training steps, in order of time; empty where none do.

    Args:
        ranges: of all threads.
        launches: begins of calls that set off work on a device, nanoseconds, with their threads.
    """
    groups: dict[tuple[int, str], list[Range]] = defaultdict(list)
    for each in ranges:
        if _operator_arguments(each.name) is None and not _PARTS.search(each.name):
            groups[each.thread, _NUMBER.sub("#", each.name)].append(each)
    begins = sorted(begin for begin, _ in launches)
    best: tuple[int, int, list[Range]] = (0, 0, [])
    for group in groups.values():
        group.sort(key=lambda each: each.begin_ns)
        if len(group) < 2 or not _follow(group) or not _count_on(group):
            continue
        launch_count = sum(bisect_left(begins, each.end_ns) - bisect_left(begins, each.begin_ns) for each in group)
        candidate = (launch_count, sum(each.end_ns - each.begin_ns for each in group), group)
        if candidate[:2] > best[:2]:
            best = candidate
    return best[2] if best[0] >= MOST_LAUNCHES * len(begins) and best[0] else []


def _follow(group: Sequence[Range]) -> bool:
    """True where each ends before the next one begins."""
    return all(before.end_ns <= after.begin_ns for before, after in pairwise(group))


def _count_on(group: Sequence[Range]) -> bool:
    """True where the names are all the same, or one number in them grows by as much every time."""
    if len({each.name for each in group}) == 1:
        return True
    numbers = [[int(text) for text in _NUMBER.findall(each.name)[:8]] for each in group]
    by_place = list(zip(*numbers, strict=False))
    varying = [place for place in by_place if len(set(place)) > 1]
    return any(len({after - before for before, after in pairwise(p)} - {0}) == 1 for p in varying)


def _operator_arguments(text: str) -> tuple[str, str, dict[str, Any]] | None:
    """Category, name and arguments of an operator that ``emit_nvtx`` wrote as a range; None for other ranges."""
    if "::" not in text and ", seq = " not in text and ", op_id = " not in text:
        return None
    written = _OPERATOR.match(text)
    if written is None or not _OPERATOR_NAME.match(written["name"]):
        return None
    arguments: dict[str, Any] = {}
    if written["seq"]:
        arguments["Sequence number"] = int(written["seq"])
    if written["sizes"]:
        with contextlib.suppress(ValueError):
            arguments["Input Dims"] = json.loads(written["sizes"])
    return "cpu_op", written["name"], arguments
