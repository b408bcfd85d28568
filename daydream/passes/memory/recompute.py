"""Recomputation of feature maps (Chen et al. 2016; dPRO, section 4): ``torch.utils.checkpoint`` around modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from daydream.graph.edit import Edit
from daydream.graph.graph import Mark, Phase, TaskGraph, TaskKind
from daydream.graph.memory import Held, HeldMemory, MemoryKind
from daydream.operators.inputs import inputs_of
from daydream.passes import Outcome, what_if
from daydream.passes.basis.bytes import changed_memory, memory_of
from daydream.passes.basis.checks import at_least, pattern
from daydream.passes.basis.copies import copied
from daydream.passes.basis.saved import SAVES_ARGUMENTS, SAVES_MORE, SAVES_RESULTS
from daydream.trace.nesting import outermost
from daydream.trace.trace import NONE, Category, Ints
from hal.support.errors import InputError

#: What calling ``torch.utils.checkpoint`` adds to a block on the host, forward and backward together, microseconds, and
#: the forward pass's share: the states of random numbers, contexts and hooks (PyTorch 2.13, 2.5 GHz Xeon).
HOST_US, _FORWARD_SHARE = 200.0, 0.3


@what_if("recompute")
def recompute(
    graph: TaskGraph,
    *,
    modules: str = "",
    every: int = 1,
    segments: int = 0,
    early_stop: bool = True,
    host_us: float = HOST_US,
) -> Outcome:
    """Forward tasks of blocks run again right before their backward tasks; their feature maps are not held between.

    That is ``torch.utils.checkpoint`` (without reentrance) around each block: what enters a block is kept, what it
    makes for its gradients is freed and made anew. Launches and host time come again, too, on the thread that runs the
    backward pass. Each block costs `host_us` more on the host, 30 % of it forward.

    With `early_stop`, PyTorch's default, a block's second run ends with the last tensor that its gradients need: sums
    and views behind it are not repeated, nor is a last product or convolution, which needs its arguments alone.

    Assumptions: kernels take as long as the first time; a block's modules run one after the other, once a step.

    Args:
        graph: the baseline.
        modules: regular expression; a block is the shortest beginning of a module's path that it matches wholly, such
            as ``layer[12]``. Empty: repeated blocks, the outermost numbered modules (``layer1.0``, ``h.11``).
        every: only every so manieth block, the first one included.
        segments: instead, the forward pass cut into so many stretches of layers of about equal time, the last of which
            stays as it is (``checkpoint_sequential``); for recordings without modules.
        early_stop: as said.
        host_us: as said; measured on a 2.5 GHz Xeon.

    Raises:
        InputError: a number out of range, or no block.
    """
    at_least("every", every, 1)
    at_least("host-us", host_us, 0.0)
    at_least("segments", segments, 0)
    chosen = _segments(graph, segments) if segments else blocks_of(graph, modules)
    chosen = dict(list(chosen.items())[::every])
    if not chosen:
        problem = "no module of the forward pass fits" if modules else "the trace names no repeated modules"
        raise InputError("modules", problem, "name modules, or give segments=8; `daydream record` names modules")
    blocks = _Calls(graph, early_stop)
    edit = Edit(graph)
    before = after = memory_of(graph)
    added: list[Ints] = []
    for layers in chosen.values():
        spans = [span for step in range(len(graph.steps)) if (span := blocks.of(layers, step)) is not None]
        for span in spans:
            _again(edit, span, host_us)
            added.append(span.repeated)
        if after is not None and spans:
            after = _forgotten(graph, after, layers)
    if not added:
        raise InputError("modules", "no block has forward and backward tasks", "record a step of training")
    rows = np.concatenate(added)
    steps = max(len(set(graph.step[rows].tolist())), 1)
    gpu, cpu = rows[graph.on_gpu[rows]], rows[graph.on_cpu[rows]]
    host = float(graph.duration_us[cpu].sum() + graph.gap_us[cpu].sum()) + host_us * len(added)
    note = (
        f"{len(added) / steps:g} of {len(chosen)} blocks a step run forward again: {len(gpu) / steps:g} GPU tasks of "
        f"{graph.duration_us[gpu].sum() / steps / 1e3:.3f} ms, {host / steps / 1e3:.3f} ms of host time"
    )
    changed, told, gain = changed_memory(edit.apply(), before, after)
    return Outcome(changed, (note, *told), gain)


# Blocks


def blocks_of(graph: TaskGraph, modules: str = "") -> dict[str, frozenset[int]]:
    """Indices of layers by the block that they are part of, in order of the layers."""
    wanted = pattern("modules", modules)
    blocks: dict[str, set[int]] = {}
    for index, name in enumerate(graph.layers):
        block = _matched(name, wanted) if wanted else repeated_block(name)
        if block:
            blocks.setdefault(block, set()).add(index)
    if not wanted:
        # A number alone does not make a block repeated.
        siblings = [block.rpartition(".")[0] for block in blocks]
        blocks = {block: layers for block, layers in blocks.items() if siblings.count(block.rpartition(".")[0]) > 1}
    return {block: frozenset(layers) for block, layers in blocks.items()}


def repeated_block(name: str) -> str:
    """The outermost numbered module on a path; empty without.

    >>> repeated_block("layer1.0.conv1"), repeated_block("h.11.attn"), repeated_block("fc")
    ('layer1.0', 'h.11', '')
    """
    parts = name.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: place + 1]) if place is not None else ""


def _matched(name: str, wanted: str) -> str:
    parts = name.split(".")
    beginnings = (".".join(parts[: count + 1]) for count in range(len(parts)))
    return next((path for path in beginnings if re.fullmatch(wanted, path)), "")


def _segments(graph: TaskGraph, count: int) -> dict[str, frozenset[int]]:
    """The layers of a step's forward pass in their order, cut where the time so far passes each share of the whole."""
    rows = np.flatnonzero((graph.phase == Phase.FORWARD) & (graph.layer != NONE) & (graph.mark == Mark.NONE))
    if not len(rows):
        return {}
    rows = rows[graph.step[rows] == np.bincount(np.maximum(graph.step[rows], 0)).argmax()]
    timed = rows[graph.on_gpu[rows]] if graph.on_gpu[rows].any() else rows
    spent: dict[int, float] = {}
    for row in timed.tolist():
        spent[int(graph.layer[row])] = spent.get(int(graph.layer[row]), 0.0) + float(graph.duration_us[row])
    ends = np.cumsum(list(spent.values()))
    places = np.minimum(((ends - 1e-9) / ends[-1] * count).astype(int), count - 1)
    stretches: dict[str, set[int]] = {}
    for layer, place in zip(spent, places.tolist(), strict=True):
        if place < count - 1:
            stretches.setdefault(f"segment {place}", set()).add(layer)
    return {name: frozenset(layers) for name, layers in stretches.items()}


@dataclass(frozen=True, kw_only=True)
class _Block:
    """One block in one step.

    Attributes:
        first: its first forward CPU task.
        repeated: rows that run again.
        before: for each of their threads the row of the backward pass that they run before.
    """

    first: int
    repeated: Ints
    before: dict[int, int]


class _Calls:
    """The tasks of blocks, and of each the operator call that it belongs to."""

    def __init__(self, graph: TaskGraph, early_stop: bool) -> None:
        self._graph, self._early_stop = graph, early_stop
        usual = (graph.mark == Mark.NONE) & (graph.kind != TaskKind.COMMUNICATION) & (graph.layer != NONE)
        self._forward = np.flatnonzero(usual & (graph.phase == Phase.FORWARD))
        self._backward = np.flatnonzero(usual & (graph.phase == Phase.BACKWARD))
        if graph.trace is not None:
            self._owner = outermost(graph.enclosing, graph.trace.category == Category.OPERATOR)

    def of(self, layers: frozenset[int], step: int) -> _Block | None:
        """The block's tasks in a step; None where it has no forward or no backward ones."""
        graph, wanted = self._graph, list(layers)
        forward, backward = (
            rows[np.isin(graph.layer[rows], wanted) & (graph.step[rows] == step)]
            for rows in (self._forward, self._backward)
        )
        hosts, callers = forward[graph.on_cpu[forward]], backward[graph.on_cpu[backward]]
        if not len(hosts) or not len(callers):
            return None
        repeated = self._needed(forward) if self._early_stop else forward
        threads = graph.thread[callers]
        caller = int(callers[threads == np.bincount(threads).argmax()].min())
        gpu = backward[graph.on_gpu[backward]]
        before = {int(thread): caller for thread in np.unique(graph.thread[forward[graph.on_cpu[forward]]])}
        for thread in np.unique(graph.thread[repeated[graph.on_gpu[repeated]]]).tolist():
            same = gpu[graph.thread[gpu] == thread]
            if not len(gpu):
                return None
            before[thread] = int((same if len(same) else gpu).min())
        return _Block(first=int(hosts.min()), repeated=repeated, before=before)

    def _needed(self, rows: Ints) -> Ints:
        """These forward tasks up to the last tensor that gradients need."""
        trace = self._graph.trace
        if trace is None:
            return rows
        operator = self._graph.operator[rows]
        owners = np.where(operator == NONE, NONE, self._owner[operator])
        gone: list[int] = []
        for owner in sorted(set(owners[owners != NONE].tolist()), reverse=True):
            stem = trace.text(owner).rpartition("::")[2].removesuffix("_")
            # Counters of batch norms stand between operators.
            if stem in SAVES_RESULTS or stem in SAVES_MORE or (stem in _NEEDS_RESULTS):
                break
            gone.append(owner)
            if stem in SAVES_ARGUMENTS:
                break
        return rows[~np.isin(owners, gone)]


#: Operators that keep arguments, and statistics that their kernels make.
_NEEDS_RESULTS = frozenset({"batch_norm", "layer_norm", "group_norm", "instance_norm", "native_layer_norm", "rms_norm"})


def _again(edit: Edit, block: _Block, host_us: float) -> None:
    graph = edit.graph
    caller = block.before[int(graph.thread[block.first])]
    parts = ((block.first, Phase.FORWARD, _FORWARD_SHARE), (caller, Phase.BACKWARD, 1 - _FORWARD_SHARE))
    for row, phase, share in parts:
        if host_us:
            layer, step = int(graph.layer[block.first]), int(graph.step[block.first])
            name = "checkpoint"
            edit.add(name, TaskKind.CPU, host_us * share, before=row, phase=phase, layer=layer, step=step)
    copied(edit, block.repeated, block.before, int(graph.thread[caller]), Phase.BACKWARD)


# Memory


def _forgotten(graph: TaskGraph, memory: HeldMemory, layers: frozenset[int]) -> HeldMemory:
    """The step's memory with a block's feature maps freed at its end and made anew before its backward pass."""
    forward, backward = memory.moments(Phase.FORWARD, layers), memory.moments(Phase.BACKWARD, layers)
    if not len(forward) or not len(backward):
        return memory
    end, again = int(forward.max()), int(backward.min())
    inside = set(forward.tolist())
    maps = [
        each for each in memory.held
        if each.kind is MemoryKind.FEATURE_MAPS and each.born in inside and each.died > end
    ]  # fmt: skip
    result = _result(graph, memory, maps, end, again)
    forgotten = {id(each) for each in maps}
    held = [each for each in memory.held if id(each) not in forgotten]
    for each in maps:
        held += _twice(each, end=again - 1 if each is result else end, again=again)
    return replace(memory, held=tuple(held))


def _twice(each: Held, end: int, again: int) -> Iterator[Held]:
    yield replace(each, died=min(each.died, end))
    if each.died >= again:
        yield replace(each, born=again)


def _result(graph: TaskGraph, memory: HeldMemory, maps: list[Held], end: int, again: int) -> Held | None:
    """What the block hands on: what others free before its own gradients begin, else what the next operator reads."""
    passed = [each for each in maps if each.died < again]
    if passed or not maps:
        return max(passed, key=lambda each: each.bytes, default=None)
    assert graph.trace is not None
    following = memory.events[end + 1 : end + 4].tolist()
    sizes = {
        tensor.bytes
        for row in following
        if (inputs := inputs_of(graph.trace, row)) is not None
        for tensor in inputs.tensors
        if tensor is not None
    }
    last = sorted(maps, key=lambda each: each.born)
    return next((each for each in reversed(last) if each.bytes in sizes), last[-1])
