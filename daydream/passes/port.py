"""Another board: what a recorded step would take on it (Habitat, Yu et al., USENIX ATC 2021)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from daydream.graph.graph import Mark, TaskGraph, TaskKind
from daydream.operators.families import algorithm_of
from daydream.operators.pricing import CallPrice, describe_calls, device_of, is_auxiliary, price
from daydream.operators.wave_scaling import Launch, habitat_ratio, launch_of, memory_share, sustained_rate, wave_ratio
from daydream.operators.work import PRODUCT_KINDS, Work
from daydream.passes import Outcome, what_if
from daydream.passes.basis.communication import collective_arguments, collective_kind, message_bytes
from daydream.passes.basis.idioms import is_compute_bound, is_within_device, named
from daydream.passes.basis.narrow import is_narrow
from daydream.passes.kernels.amp import TF32
from daydream.trace.trace import NONE, Floats, Ints
from hal.support.errors import InputError

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: Collectives of roller.library by NCCL's words.
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "alltoall",
    "broadcast": "broadcast",
}

#: Reasons why calls have no price that the notes tell.
_MOST_REASONS = 4


@dataclass(frozen=True)
class _Change:
    """Factors of the durations of some tasks, by the words that the notes say of the rule they follow."""

    rule: str
    rows: Ints
    factor: Floats


@dataclass(frozen=True)
class _Scaled:
    """Tasks that follow wave scaling, the rule of each and its factor, in lists that grow together."""

    rows: list[int] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)


@what_if("port")
def port(graph: TaskGraph, *, device: str, from_: str = "auto", whole_waves: bool = False) -> Outcome:
    """Another board: recorded kernels take the time that they, or the library's kernels in their place, take there.

    GPU tasks are looked at by operator call. Where Roller's library models price a call on both boards, its tasks take
    recorded time x price there / price here: what a model has wrong on both cancels. Other kernels take Habitat's wave
    scaling: the ratio of memory bandwidths and of arithmetic rates, weighed by the operator's FLOP a byte, and the
    blocks that the fullest unit gets of the recorded grid. Rates are sustained ones, not those of data sheets. Without
    sizes a matrix product, a convolution or attention, by name, is taken to be bound by arithmetic, any other kernel by
    memory. What an empty kernel takes is the board's, a microsecond and two trips to memory, and does not scale.

    Copies within the device and sets take the ratio of bandwidths. Collectives take the ratio of modelled times in
    the usual nodes of both boards; where one has none, or a message's size was not recorded, they stay. Host times
    stay, and so do copies to and from the host, as no board's file tells its bus. Kernels keep names and grids, though
    the library would choose others on the other board. The graph then counts as recorded on that board: later
    passes with ``device=auto`` mean it.

    Assumptions: the other board's host is as fast as this one's; the step fits into its memory; a recorded wait for
    other ranks within a collective shrinks or grows with it; what was recorded with TF32 has it there too where the
    board knows it, and what was not has not.

    Args:
        graph: the baseline.
        device: the board to port to, by name or file.
        from_: the board of the recording, by name or file; ``auto`` is the one that the trace names.
        whole_waves: Habitat's equation (1) as it is, for kernels with a recorded launch: waves of as many blocks as
            registers, shared memory and threads let run at once, and clocks. It is further from measured products.

    Raises:
        InputError: a board is unknown or no GPU, the trace names none, or the graph has no GPU task.
    """
    source, target, notes = _boards(graph, device, from_)
    if not np.any(graph.on_gpu & (graph.mark == Mark.NONE)):
        raise InputError("port", "the graph has no task on a GPU", "record a step that runs on one")
    changes, unpriced = _kernels(graph, source, target, whole_waves)
    changes.append(_copies(graph, source, target))
    collectives, kept = _collectives(graph, source, target)
    changes.append(collectives)
    durations = graph.duration_us.copy()
    for change in changes:
        durations[change.rows] *= change.factor
    changed = graph.with_durations(np.arange(len(graph)), durations)
    notes += [*_told(graph, changed, changes), *kept]
    notes += [f"{count} calls have no prices: {reason}" for reason, count in unpriced.most_common(_MOST_REASONS)]
    notes.append("host times, copies to and from the host, names and grids of kernels stay as recorded")
    return Outcome(_as_recorded_on(changed, target, device), tuple(notes))


def _boards(graph: TaskGraph, device: str, origin: str) -> tuple[DeviceSpec, DeviceSpec, list[str]]:
    """The board of the recording, the one to port to, and what to say about them."""
    try:
        source, stands_in = device_of(graph, origin)
    except InputError as error:
        raise InputError("from", error.problem, error.remedy.replace("device=", "from=")) from None
    from hal.catalog import load_device

    target = load_device(device)
    for name, board in (("from", source), ("device", target)):
        if board.kind != "gpu":
            raise InputError(name, f"{board.title} is no GPU", "name a GPU; `roller devices` lists them")
    notes = [f"from {source.title} to {target.title}"]
    return source, target, [*notes, stands_in] if stands_in else notes


def _as_recorded_on(graph: TaskGraph, board: DeviceSpec, asked: str) -> TaskGraph:
    """The graph with this board in the place of those that its trace names."""
    from hal.catalog import load_device

    if graph.trace is None:
        return graph
    # A board from a file is known by its path, even where it has the name of a shipped one.
    try:
        name = board.name if load_device(board.name) == board else asked
    except InputError:
        name = asked
    numbers = [entry.get("id", place) for place, entry in enumerate(graph.trace.devices)] or [0]
    devices = tuple({"id": number, "name": name} for number in numbers)
    return replace(graph, trace=replace(graph.trace, devices=devices))


# Kernels and sets


def _kernels(
    graph: TaskGraph, source: DeviceSpec, target: DeviceSpec, whole_waves: bool
) -> tuple[list[_Change], Counter[str]]:
    """Changes of kernels and sets, rule by rule, and how many calls have no prices, by the reason."""
    kinds = (graph.kind == TaskKind.KERNEL) | (graph.kind == TaskKind.MEMSET)
    rows = np.flatnonzero(kinds & graph.on_gpu & (graph.mark == Mark.NONE))
    no_library = ""
    try:
        here, there = price(graph, rows, source, "library"), price(graph, rows, target, "library")
    except InputError as error:
        no_library = error.problem
        here = there = describe_calls(graph, rows, source)
    priced_rows: list[Ints] = []
    ratios: list[float] = []
    unpriced = Counter[str]()
    scaled = _Scaled()
    for before, after in zip(here.calls, there.calls, strict=True):
        ratio = no_library or _price_ratio(graph, before, after)
        if isinstance(ratio, float):
            priced_rows.append(before.rows)
            ratios.append(ratio)
            continue
        unpriced[ratio] += 1
        _scale_call(graph, before, (source, target), whole_waves, scaled)
    by_price = _Change(
        "recorded time x price there / price here by the library models",
        np.concatenate(priced_rows) if priced_rows else np.empty(0, np.int64),
        np.repeat(ratios, [len(each) for each in priced_rows]) if priced_rows else np.empty(0),
    )
    rules, of_rule = np.unique(np.array(scaled.rules, np.str_), return_inverse=True)
    every, factors = np.array(scaled.rows, np.int64), np.array(scaled.factors)
    waves = [_Change(str(rule), every[of_rule == place], factors[of_rule == place]) for place, rule in enumerate(rules)]
    return [by_price, *waves], unpriced


def _price_ratio(graph: TaskGraph, before: CallPrice, after: CallPrice) -> float | str:
    """Price there over price here, or why there is none."""
    if _uses_tf32(graph, before):
        return "recorded with TF32, which no price supposes"
    if not (before.price_us > 0 and after.price_us > 0):
        return before.reason or after.reason or "the library launches nothing for it"
    return float(after.price_us / before.price_us)


def _uses_tf32(graph: TaskGraph, call: CallPrice) -> bool:
    products = call.work is not None and call.work.kind in PRODUCT_KINDS and call.work.dtype == "float32"
    return products and algorithm_of([graph.text(row) for row in call.rows.tolist()]) == "TF32"


def _scale_call(
    graph: TaskGraph, call: CallPrice, boards: tuple[DeviceSpec, DeviceSpec], whole_waves: bool, scaled: _Scaled
) -> None:
    """Adds every task of a call with the factor that wave scaling gives it."""
    source, target = boards
    for row in call.rows.tolist():
        name, event = graph.text(row), int(graph.event[row])
        launch = launch_of(graph.trace.arguments[event]) if graph.trace is not None and event != NONE else None
        share, dtype, products, known = _boundedness(name, call.work, source)
        if whole_waves and launch is not None:
            ratio = habitat_ratio(source, target, launch, share=share)
        else:
            ratio = wave_ratio(source, target, share=share, dtype=dtype, products=products, launch=launch)
        scaled.rows.append(row)
        scaled.rules.append(_rule(known, launch, share))
        scaled.factors.append(_factor(float(graph.duration_us[row]), ratio, source, target))


def _boundedness(name: str, work: Work | None, source: DeviceSpec) -> tuple[float, str, bool, bool]:
    """How far bandwidth decides a kernel, its type, whether it multiplies matrices, and whether sizes say so."""
    dtype = "float16" if is_narrow(name) else "tfloat32" if TF32.search(name) else "float32"
    if is_auxiliary(name):
        return 1.0, dtype, False, work is not None
    if work is None:
        products = is_compute_bound(name)
        return float(not products), dtype, products, False
    products = work.kind in PRODUCT_KINDS
    dtype = work.dtype if work.dtype != "float32" or dtype == "float16" or not products else dtype
    ridge = sustained_rate(source, dtype, products=products) / source.dram.bandwidth_bytes_per_second
    return memory_share(work.flops / max(work.bytes, 1.0), ridge), dtype, products, True


def _rule(known: bool, launch: Launch | None, share: float) -> str:
    bound = (
        "by their operators' FLOP a byte" if known else "bound by memory" if share else "bound by arithmetic by name"
    )
    return f"wave scaling, {bound}" + ("" if launch is not None else ", launch not recorded")


def _factor(duration_us: float, ratio: float, source: DeviceSpec, target: DeviceSpec) -> float:
    """Time there over time here of a task whose part beyond that of an empty kernel takes `ratio` times as long."""
    from roller.library.streaming.elementwise import kernel_seconds_floor

    here, there = (kernel_seconds_floor(board) * 1e6 for board in (source, target))
    if duration_us <= here:
        return there / here
    # Exactly 1 where nothing differs: a recording ported to its own board stays as it is to the bit.
    return (duration_us + (there - here) + (duration_us - here) * (ratio - 1)) / duration_us


# Copies and collectives


def _copies(graph: TaskGraph, source: DeviceSpec, target: DeviceSpec) -> _Change:
    copies = graph.on_gpu & (graph.kind == TaskKind.MEMCPY) & (graph.mark == Mark.NONE)
    rows = np.flatnonzero(copies & named(graph, is_within_device))
    ratio = wave_ratio(source, target)
    factor = np.array([_factor(each, ratio, source, target) for each in graph.duration_us[rows].tolist()], np.float64)
    return _Change("ratio of memory bandwidths, being copies within the device", rows, factor)


def _collectives(graph: TaskGraph, source: DeviceSpec, target: DeviceSpec) -> tuple[_Change, list[str]]:
    """The collectives of streams that both boards' usual nodes have a time for, and why others stay."""
    rows = np.flatnonzero((graph.kind == TaskKind.COMMUNICATION) & graph.on_gpu & (graph.mark == Mark.NONE))
    factors, chosen, kept = [], [], Counter[str]()
    for row, size in zip(rows.tolist(), message_bytes(graph, rows).tolist(), strict=True):
        try:
            factors.append(_collective_ratio(graph, row, size, source, target))
            chosen.append(row)
        except InputError as error:
            kept[error.problem] += 1
    notes = [f"{count} collectives stay: {reason}" for reason, count in kept.most_common(_MOST_REASONS)]
    rule = "ratio of modelled times in the boards' usual nodes, being collectives"
    return _Change(rule, np.array(chosen, np.int64), np.array(factors, np.float64)), notes


def _collective_ratio(graph: TaskGraph, row: int, size: float, source: DeviceSpec, target: DeviceSpec) -> float:
    """Time there over time here of a recorded collective.

    Raises:
        InputError: its kind, size or ranks are not known, or a board has no node for it.
    """
    from roller.library.collectives import collective_seconds, node_for

    kind = _COLLECTIVES.get(collective_kind(graph, row), "")
    ranks = _ranks(graph, row)
    if not kind or not ranks or not size >= 1:
        raise InputError("collective", "kind, size or ranks not recorded", "record with a newer profiler")
    whole = size * ranks if kind == "all_gather" else size
    times = [
        float(collective_seconds(kind, whole, ranks, node_for(board)).kernel_seconds) for board in (source, target)
    ]
    return times[1] / times[0]


def _ranks(graph: TaskGraph, row: int) -> int:
    """How many ranks take part: the kernel's group, else all of the training; 0 where nothing says."""
    if graph.trace is None:
        return 0
    count = collective_arguments(graph, row).get("Group size") or graph.trace.distributed.get("world_size")
    return count if isinstance(count, int) and count > 0 else 0


# Notes


def _told(graph: TaskGraph, changed: TaskGraph, changes: Sequence[_Change]) -> list[str]:
    """For each rule how many tasks follow it, their share of the GPU's time, and what they take before and after."""
    whole = float(graph.duration_us[graph.on_gpu].sum())
    notes = []
    for change in changes:
        if len(change.rows):
            before, after = (float(each.duration_us[change.rows].sum()) for each in (graph, changed))
            share = f", {before / whole:.1%} of the GPU's time," if whole > 0 else ""
            notes.append(
                f"{len(change.rows)} tasks of {before / 1e3:.1f} ms{share} take {after / 1e3:.1f} ms: {change.rule}"
            )
    return notes
