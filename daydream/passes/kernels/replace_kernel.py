"""Replace kernels by others that Roller predicts or that a bundle has measured (thesis 4.4.4, "replace").

The paper takes the durations of a better implementation from elsewhere (MetaFlow's, restructured batch norm's); here
they come from Roller, for what an operator computes by its recorded sizes, or for an operator of the user's own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Mark, TaskGraph, matching
from daydream.operators.families import algorithm_of
from daydream.operators.part_prices import Implementation
from daydream.operators.pricing import CallPrice, device_of, heavy_rows, price
from daydream.passes import Outcome, what_if
from daydream.trace.trace import NONE, Ints
from hal.support.errors import InputError


@dataclass(frozen=True)
class Change:
    """One call made one kernel: its main task takes `microseconds`, the other tasks of `rows` go."""

    main: int
    rows: Ints
    microseconds: float
    source: str


@what_if("replace-kernel")
def replace_kernel(
    graph: TaskGraph,
    *,
    match: str = "",
    op: str = "auto",
    device: str = "auto",
    implementation: str = "best",
    bundle: str = "",
    search: str = "roller",
) -> Outcome:
    """Other kernels for operators: durations predicted by Roller, or taken from a compiled bundle.

    With ``op=auto`` every convolution, matrix product and fused attention of the trace is priced by its recorded
    sizes. All kernels of one operator call count together: the main one takes the price; index tables, changes of
    layout, Winograd's transforms and sums of split-K go, with the calls that launch them. Calls without a price stay
    as they are.
    With ``op=FILE`` or ``bundle`` alone the kernels that `match` names take that operator's time.

    Assumptions: the price is that of the operator on an otherwise idle device; a call's CPU work but for the launches
    that go stays the same; what surrounds a convolution needs no other layout.

    Args:
        graph: the baseline, built from a trace with recorded input sizes for ``op=auto``.
        match: regular expression over kernel names; a call counts when one of its kernels fits. Empty is all.
        op: ``auto``, or a file with one operator.
        device: the board to price for; ``auto`` is the one recorded on.
        implementation: ``best`` is the best kernel that Roller can build, ``library`` cuBLAS and cuDNN as modelled.
        bundle: a compiled operator's folder, or one of several. Measured times count where a manifest has them
            ("profiled_seconds" of a kernel), predicted ones otherwise. With ``op=auto`` forward calls take the time
            of the bundle that is named as Roller names their operator.
        search: how the best kernels are found: ``roller``, ``sokoban`` or ``both``.

    Raises:
        InputError: a file, folder, board or regular expression is of no use, or nothing fits `match`.
    """
    if implementation not in ("best", "library"):
        raise InputError("implementation", f"there is no {implementation!r}", "use best or library")
    chosen = cast(Implementation, implementation)
    if op == "auto" and (not bundle or not match):
        return _auto(graph, match, device, chosen, bundle, search)
    if not match:
        raise InputError("match", "is missing", "give a regular expression that finds the kernels to replace")
    if op != "auto" and bundle:
        raise InputError("bundle", "was given together with op", "give one of them")
    seconds, source = _of_bundle(Path(bundle)) if bundle else _of_file(graph, op, device, chosen, search)
    calls = _matched_calls(graph, match)
    changes = [Change(main, rows, seconds * 1e6, source) for main, rows in calls]
    return Outcome(applied(graph, changes), (summary(graph, changes), f"each takes {source}"))


def _auto(
    graph: TaskGraph, match: str, device: str, implementation: Implementation, bundle: str, search: str
) -> Outcome:
    """Every call that `match` finds takes its own price, or its bundle's time."""
    spec, stands_in = device_of(graph, device)
    compiled = _bundles(Path(bundle)) if bundle else {}
    prices = price(graph, heavy_rows(graph), spec, implementation, search=search)
    calls = [call for call in prices.calls if _fits(graph, call, match)]
    if not calls:
        problem = f"no kernel of a convolution or matrix product fits {match!r}" if match else _nothing(graph)
        raise InputError("match" if match else "op", problem, "name an operator file and kernels with op and match")
    changes, unpriced = _priced_changes(calls, compiled)
    whose = "the best kernels of Roller" if implementation == "best" else "cuBLAS and cuDNN as modelled"
    notes = [summary(graph, changes), f"priced for {spec.title}: {whose}", *([stands_in] if stands_in else [])]
    if compiled:
        sources = Counter(change.source for change in changes)
        notes.append("times from " + ", ".join(f"{source}: {count} calls" for source, count in sources.items()))
    notes += [*_doubts(graph, calls), *_unpriced_notes(unpriced)]
    return Outcome(applied(graph, changes), tuple(notes))


def _priced_changes(
    calls: Sequence[CallPrice], compiled: Mapping[str, tuple[float, str]]
) -> tuple[list[Change], Counter[str]]:
    """A change for every call with a price, and how many calls have none, by the reason."""
    changes, unpriced = [], Counter[str]()
    for call in calls:
        seconds, source = call.price_us / 1e6, "estimates"
        if call.work is not None and call.work.direction == "forward" and call.text in compiled:
            seconds, source = compiled[call.text]
        if np.isfinite(seconds):
            changes.append(Change(call.main, call.rows, seconds * 1e6, source))
        else:
            unpriced[call.reason] += 1
    return changes, unpriced


def _doubts(graph: TaskGraph, calls: Sequence[CallPrice]) -> list[str]:
    """Assumptions of prices that the trace does not confirm, or contradicts."""
    guessed = Counter(call.work.assumed for call in calls if call.work is not None and call.work.assumed)
    notes = [f"{count} calls: {assumed}" for assumed, count in guessed.items()]
    tf32 = sum(algorithm_of([graph.text(row) for row in call.rows.tolist()]) == "TF32" for call in calls)
    if tf32:
        notes.append(f"{tf32} calls were recorded with TF32, which no price supposes: theirs are those of float32")
    return notes


def _unpriced_notes(unpriced: Counter[str]) -> list[str]:
    return [f"{count} calls kept, unpriced: {reason}" for reason, count in unpriced.most_common(8)]


def _nothing(graph: TaskGraph) -> str:
    if graph.trace is None or not any(set(args) & {"Input Dims"} for args in graph.trace.arguments):
        return "the trace has no input sizes to price operators by"
    return "the trace has no convolution and no matrix product on a GPU"


def _fits(graph: TaskGraph, call: CallPrice, match: str) -> bool:
    if not match:
        return True
    search = _pattern(match).search
    return any(search(graph.text(row)) for row in call.rows.tolist())


def _pattern(match: str) -> re.Pattern[str]:
    try:
        return re.compile(match, re.IGNORECASE)
    except re.error as error:
        raise InputError("match", f"is no regular expression: {error}", "correct it") from None


def _matched_calls(graph: TaskGraph, match: str) -> list[tuple[int, Ints]]:
    """GPU tasks of fitting names by operator call: the longest, and all of them. Tasks without operator are alone."""
    _pattern(match)
    fits = matching(graph.names, match)[graph.name] & graph.on_gpu & (graph.mark == Mark.NONE)
    rows = np.flatnonzero(fits)
    if not len(rows):
        raise InputError("match", f"no GPU task's name fits {match!r}", "correct the regular expression")
    key = np.where(graph.operator[rows] == NONE, -rows - 2, graph.operator[rows])
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order])) + 1
    return [(int(each[np.argmax(graph.duration_us[each])]), each) for each in np.split(rows[order], starts)]


def applied(graph: TaskGraph, changes: Sequence[Change]) -> TaskGraph:
    """The graph with calls of one kernel each."""
    edit = Edit(graph)
    if changes:
        mains = np.array([change.main for change in changes], np.int64)
        edit.set("duration_us", mains, np.array([change.microseconds for change in changes]))
        edit.remove(np.setdiff1d(np.concatenate([change.rows for change in changes]), mains), launches=True)
    return edit.apply()


def summary(graph: TaskGraph, changes: Sequence[Change]) -> str:
    """The times of calls before and after, in a sentence."""
    recorded = sum(float(graph.duration_us[change.rows].sum()) for change in changes)
    priced = sum(change.microseconds for change in changes)
    kernels = sum(len(change.rows) for change in changes)
    gone = kernels - len(changes)
    text = f"{len(changes)} operator calls ({kernels} GPU tasks) of {recorded / 1e3:.1f} ms take {priced / 1e3:.1f} ms"
    return text + (f"; {gone} auxiliary tasks removed with their launches" if gone else "")


# Operators and bundles of the user's


def _of_file(graph: TaskGraph, op: str, device: str, implementation: Implementation, search: str) -> tuple[float, str]:
    from roller.estimate.operators import estimate_items, load_items

    items = load_items(op)
    if len(items) != 1:
        raise InputError(op, f"holds {len(items)} operators", "write exactly one")
    spec, stands_in = device_of(graph, device)
    result = estimate_items(items, spec, implementation, search)[0]
    whose = "Roller's best kernels" if implementation == "best" else "the library as modelled"
    text = f"{result.seconds * 1e6:.1f} µs, {whose} for {result.name} ({result.direction}) on {spec.title}"
    return result.seconds, text + (f" ({stands_in})" if stands_in else "")


def _of_bundle(folder: Path) -> tuple[float, str]:
    operators = _bundles(folder)
    if len(operators) != 1:
        raise InputError("bundle", f"{folder} holds {len(operators)} operators", "name the folder of one of them")
    ((name, (seconds, source)),) = operators.items()
    return seconds, f"{seconds * 1e6:.1f} µs, {source} for {name}"


def _bundles(folder: Path) -> dict[str, tuple[float, str]]:
    """Name of each operator compiled into this folder -> seconds of its best kernel, and where they come from."""
    manifests = [folder / "manifest.json", *sorted(folder.glob("*/manifest.json"))]
    operators = dict(_manifest(path) for path in manifests if path.is_file())
    if not operators:
        raise InputError("bundle", f"{folder} holds no manifest.json", "give a folder that roller compile wrote")
    return operators


def _manifest(path: Path) -> tuple[str, tuple[float, str]]:
    try:
        manifest = msgspec.json.decode(path.read_bytes())
        name, kernels = str(manifest["name"]), list(manifest["kernels"])
        profiled = _fastest(kernels, "profiled_seconds")
        predicted = _fastest(kernels, "seconds")
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise InputError(str(path), f"is no manifest: {error}", "give a folder that roller compile wrote") from None
    if profiled is not None:
        return name, (profiled, "profiled in its bundle")
    if predicted is not None:
        return name, (predicted, "predicted in its bundle, which has no profiled times")
    raise InputError(str(path), "has no kernel with a time", "compile the operator again")


def _fastest(kernels: Iterable[Any], key: str) -> float | None:
    seconds = [kernel[key] for kernel in kernels if isinstance(kernel.get(key), int | float) and kernel[key] > 0]
    return float(min(seconds)) if seconds else None
