"""Runs of element-wise kernels fused into one, as a compiler of pointwise operations does."""

from __future__ import annotations

import re

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, TaskGraph, TaskKind, matching
from daydream.passes import Outcome, what_if
from daydream.passes.basis.checks import at_least, one_of, pattern, phase_named
from daydream.passes.basis.idioms import ELEMENTWISE, Mask, host_of, operands, renamed, tensors
from daydream.trace.trace import NONE, Floats, Ints, argument


@what_if("pointwise-fusion")
def pointwise_fusion(
    graph: TaskGraph,
    *,
    match: str = "",
    phase: str = "all",
    min_run: int = 2,
    max_run: int = 8,
    keep_intermediates: bool = False,
    host: str = "operator",
) -> Outcome:
    """Element-wise kernels that follow each other on a stream become one kernel each run.

    A run has between `min_run` and `max_run` kernels of one step and phase with no other task of the stream in
    between and no dependency from or to another stream or a waiting CPU inside. `match` is a regular expression
    for their names (by default those of ATen, Triton and older PyTorch).

    Element-wise kernels are bound by traffic, so a kernel that moves n tensors spends 1/n of its time on each. n is
    the number of recorded tensor inputs and one output, else what ATen's kernel name says, else 3 for sums and
    products of two tensors and 2 for the rest. Between two neighbours of the same size the intermediate is
    neither written nor read again: each loses that share, and only operands from outside and the last result stay.
    That neighbours of one size pass data on is assumed; a trace does not say. Size is the number of recorded
    elements, else the recorded grid; of neighbours that differ only the launch is saved, not traffic, and without
    either all are taken to be alike. With `keep_intermediates` they are still written, as what the backward pass
    needs must be, only not read again.

    Launches of the removed kernels go, with ``host=operator`` also the CPU time of their operators.

    Raises:
        InputError: a number out of range or a malformed choice.
    """
    one_of("host", host, ("launch", "operator"))
    at_least("min-run", min_run, 2)
    at_least("max-run", max_run, min_run)
    wanted = phase_named("phase", phase)
    fits = matching(graph.names, pattern("match", match) or ELEMENTWISE)[graph.name]
    fits &= graph.on_gpu & (graph.kind == TaskKind.KERNEL)
    if wanted is not None:
        fits &= graph.phase == wanted
    rows, run = _runs(graph, fits, max_run)
    length = np.bincount(run, minlength=1)
    keep = length[run] >= min_run
    rows, run = rows[keep], run[keep]
    if not len(rows):
        return Outcome(graph, ("no element-wise kernels follow each other: nothing is fused",))
    is_first = np.append(True, run[1:] != run[:-1])
    first, number = rows[is_first], np.cumsum(is_first) - 1
    moved, linked = _moved(graph, rows, number, keep_intermediates)
    duration: Floats = np.zeros(len(first))
    np.add.at(duration, number, graph.duration_us[rows] * moved)
    gone = rows[~is_first]
    edit = Edit(renamed(graph.with_durations(first, duration), first, "fused pointwise kernel"))
    edit.remove(gone, launches=True)
    if host == "operator":
        edit.remove(host_of(graph, gone))
    before, after = graph.duration_us[rows].sum() / 1000, duration.sum() / 1000
    notes = (
        f"{len(rows)} element-wise kernels became {len(first)}: {before:.3f} ms of GPU time became {after:.3f} ms",
        f"{int(linked.sum())} of {len(gone)} intermediates stay in registers, the rest differ in size",
    )
    return Outcome(edit.apply(), notes)


def _runs(graph: TaskGraph, fits: Mask, max_run: int) -> tuple[Ints, Ints]:
    """The chosen tasks in stream order, and for each the number of its run."""
    lane = graph.by_thread
    rows = lane[fits[lane]]
    if not len(rows):
        return rows, rows
    before, after = rows[:-1], rows[1:]
    separated = graph.following[before] != after
    for column in (graph.step, graph.phase):
        separated |= column[before] != column[after]
    outside = graph.edge_kind != Dependency.LAUNCH
    gives, takes = np.zeros(len(graph), np.bool_), np.zeros(len(graph), np.bool_)
    gives[graph.edge_source[outside]] = True
    takes[graph.edge_target[outside]] = True
    separated |= gives[before] | takes[after]
    fresh = np.append(True, separated)
    start = np.maximum.accumulate(np.where(fresh, np.arange(len(rows)), 0))
    fresh |= (np.arange(len(rows)) - start) % max_run == 0
    return rows, np.cumsum(fresh) - 1


def _moved(graph: TaskGraph, rows: Ints, run: Ints, stored: bool) -> tuple[Floats, Mask]:
    """The share of its tensors that each kernel still moves, and for all but the first of each run whether it
    takes over what the one before it made."""
    size, slack, count = _sizes(graph, rows)
    differ = np.abs(np.diff(size)) > np.maximum(slack[1:], slack[:-1])
    same_run = run[1:] == run[:-1]
    # A kernel with one tensor fills it and reads nothing.
    linked = same_run & ~differ & (count[1:] > 1)
    read_less = np.append(False, linked).astype(np.int64)
    written_less = np.zeros(len(rows), np.int64) if stored else np.append(linked, False).astype(np.int64)
    return np.maximum(count - read_less - written_less, 0) / count, linked[same_run]


def _sizes(graph: TaskGraph, rows: Ints) -> tuple[Floats, Floats, Ints]:
    """For each kernel the elements of its tensors (NaN where unknown), how many it may be off, and how many
    tensors it moves."""
    by_name = [operands(name) for name in graph.names]
    recorded: dict[int, tuple[int, int]] = {}
    size, slack, count = np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows), np.int64)
    for place, row in enumerate(rows.tolist()):
        operator = int(graph.operator[row])
        if operator not in recorded:
            elements = [tensor.elements for tensor in tensors(graph, operator)]
            # A number that is added or multiplied is recorded as a tensor without dimensions: it moves nothing.
            recorded[operator] = (max(elements, default=0), elements.count(max(elements, default=0)))
        largest, inputs = recorded[operator]
        # The operator's sizes say nothing about a kernel that is not its only one; the name of the kernel does.
        stated = largest == 0 or "Array<char" in graph.text(row)
        count[place] = by_name[graph.name[row]] if stated else inputs + 1
        size[place], slack[place] = (largest, 0.0) if largest else _from_grid(graph, row)
    return size, slack, count


def _from_grid(graph: TaskGraph, row: int) -> tuple[float, float]:
    """Elements from the recorded grid, as ATen cuts its work: 4 elements a thread, or as many as the name says."""
    event = int(graph.event[row])
    recorded = graph.trace.arguments[event] if graph.trace is not None and event != NONE else {}
    grid, block = argument(recorded, "grid"), argument(recorded, "block")
    if not (isinstance(grid, list) and isinstance(block, list) and grid and block):
        return np.nan, 0.0
    stated = re.search(r"::elementwise_kernel<\d+, (\d+)", graph.text(row))
    share = float(np.prod(block)) * (int(stated[1]) if stated else 4)
    return float(np.prod(grid)) * share, share
