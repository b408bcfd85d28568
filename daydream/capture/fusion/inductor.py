"""Fusion of a captured step as TorchInductor would do it, an assumption and declared as one.

The rules are those of its scheduler (``torch/_inductor/scheduler.py``, ``codegen/simd.py``), which joins loops

- one of which reads what the other writes, or which read the same tensor,
- that run over the same elements: equal numbers of them, or a reduction of rows and loops over all its elements before
  or behind it (a softmax or a norm takes in what its input is made of and what is made of its result); a reduction of
  columns takes in a loop before it whose result no other reads,
- where no operator between them needs one and makes what the other needs.

Views vanish. Products, convolutions, attention, scatters and sorts stay calls of libraries or kernels as they are.
Products keep the biases that they add, those of convolutions become loops, and images lie with their channels last
where Inductor's rule says so (:mod:`daydream.capture.fusion.convolutions`). A kernel of fused loops reads what lies
outside and writes what is read outside, later, or after the step. Masks of dropout are written, a byte each, as
Inductor does by default.

A loop of few tensors is made again in each kernel that reads it rather than written (``realize_reads_threshold``), and
AOTAutograd's partitioner computes cheap results again in the backward pass instead of keeping them. Here one is
computed again if only fused loops read it there, and if what it is made of, as far as it is not kept anyway, takes no
more memory than it does; of a softmax the largest element and the sum of each row are kept. The real partitioner solves
a minimum cut over the whole graph.

Fused updates of parameters are one kernel; Inductor cuts it where it has too many arguments. Kernels of a phase stay in
it: the loss is part of the forward pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from daydream.capture.captured import Capture, CapturedOperator
from daydream.capture.fusion.convolutions import lowered
from daydream.capture.fusion.groups import Group, groups_of
from daydream.capture.fusion.kinds import Kind
from daydream.capture.fusion.values import Node, Value, nodes_of
from daydream.graph.graph import Phase
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.trace.trace import NONE

#: Tensors that a loop may read to be made again wherever it is read in its phase (``realize_reads_threshold``).
_READS = 4
#: Tensors as which values are read or written.
Reads = dict[Value, list[RecordedTensor]]
#: Names of operators in a kernel's name.
_NAMES = 10

ASSUMED = (
    "compiled as TorchInductor's rules fuse loops: kernels cost the bytes that they read and write, cheap results are"
    " computed again in the backward pass, products and convolutions stay calls of libraries"
)


def fused(capture: Capture, regions: Sequence[int] | None = None) -> Capture:
    """The step with the kernels that TorchInductor would generate, ``inductor::triton_..._fused_NAMES``.

    Their inputs are the distinct tensors that they read, their outputs those that they write: what they cost is the sum
    of both. Axes that are broadcast have one element.

    Args:
        capture: the step.
        regions: of every operator, where blocks are compiled each by itself, -1 where it is not compiled; None compiles
            the step as a whole.
    """
    capture, regions = lowered(capture, regions)
    nodes = nodes_of(capture, regions)
    groups = groups_of(nodes)
    group_of = {node: group for group in groups for node in group.nodes}
    values = list(dict.fromkeys(value for node in nodes for value in (*node.reads, *node.writes)))
    stored = _Stored(capture, values, group_of)
    remaining = [group for group in _ordered(groups, group_of) if group.is_whole or stored.outputs(group)]
    numbers: dict[int, int] = {}
    for number, group in enumerate(remaining):
        for node in group.nodes:
            numbers.setdefault(node.index, number)
    operators = [_operator(capture, group, stored, numbers) for group in remaining]
    return replace(
        capture,
        operators=tuple(_with_lives(capture, operators)),
        assumed=(*capture.assumed, ASSUMED),
    )


def _ordered(groups: list[Group], group_of: dict[Node, Group]) -> Iterator[Group]:
    """Groups in an order in which they can run, each as soon as its last member could."""
    after: dict[Group, set[Group]] = {
        group: {group_of[each] for node in group.nodes for each in node.after} - {group} for group in groups
    }
    followers: dict[Group, list[Group]] = {}
    for group, befores in after.items():
        for before in befores:
            followers.setdefault(before, []).append(group)
    ready = [(group.last, number, group) for number, group in enumerate(groups) if not after[group]]
    heapq.heapify(ready)
    number = len(groups)
    while ready:
        _, _, group = heapq.heappop(ready)
        yield group
        for follower in followers.get(group, ()):
            after[follower].discard(group)
            if not after[follower]:
                number += 1
                heapq.heappush(ready, (follower.last, number, follower))


class _Stored:
    """Which values are written to memory, and what kernels read."""

    def __init__(self, capture: Capture, values: list[Value], group_of: dict[Node, Group]) -> None:
        self._capture = capture
        self._group_of = group_of
        freed = {storage for operator in capture.operators for storage in operator.freed}
        self._kept = {value for value in values if value.last and value.storage not in freed}
        #: What is made again where it is read, from what.
        self._again: dict[Value, Reads] = {}
        for value in values:
            leaves = self._leaves_again(value)
            if leaves is not None:
                self._again[value] = leaves
        # A value that others are made from again is written, of a softmax what it has found of each row.
        self._needed = {leaf: tensors for leaves in self._again.values() for leaf, tensors in leaves.items()}

    def _outside(self, value: Value) -> list[Node]:
        group = self._group_of[value.writer] if value.writer is not None else None
        return [node for node in value.readers if self._group_of[node] is not group]

    def _leaves_again(self, value: Value) -> Reads | None:
        """Values from which its readers compute a value again; None where it is written."""
        writer = value.writer
        if writer is None or value in self._kept or value.tensor is None or not self._can_be_made_again(value):
            return None
        outside = self._outside(value)
        if not outside or any(self._group_of[node].is_whole or node.part.gathers for node in outside):
            return None
        if writer.part.constant:
            return {}
        leaves = self._leaves(value)
        dense = [node for node in outside if not node.part.sparse]
        if any(node.phase == writer.phase for node in dense) and (
            writer.part.kind is Kind.ROWS or len(leaves) > _READS
        ):
            return None
        if writer.phase == Phase.FORWARD and any(node.phase == Phase.BACKWARD for node in outside):
            more = [_bytes(self._capture, *leaf) for leaf in leaves.items() if not self._lives(leaf[0], value)]
            return leaves if sum(more) <= value.tensor.bytes else None
        return leaves

    def _can_be_made_again(self, value: Value) -> bool:
        writer = value.writer
        assert writer is not None and value.tensor is not None
        if any(node.region != writer.region for node in value.readers):
            return False
        part = writer.part
        is_loop = part.kind is Kind.ROWS or (part.kind is Kind.POINT and (part.picks or not part.gathers))
        # A part of a storage that is written in place needs what was there.
        is_all = value.tensor.elements == part.rows * part.columns
        return is_loop and is_all and not _is_random(self._capture, writer)

    def _lives(self, leaf: Value, value: Value) -> bool:
        """True if a value is there in the backward pass anyway."""
        return (
            leaf is value
            or leaf in self._kept
            or self._capture.storages[leaf.storage].kind != "step"
            or any(node.phase == Phase.BACKWARD for node in leaf.readers)
        )

    def _leaves(self, value: Value) -> Reads:
        """Values in memory that a value is computed from."""
        writer = value.writer
        assert writer is not None
        group = self._group_of[writer]
        leaves: Reads = {}
        for read, tensors in writer.reads.items():
            if read in self._again:
                leaves.update(self._again[read])
            elif (
                read.writer is not None
                and self._group_of[read.writer] is group
                and read not in self._kept
                and not self._outside(read)
                and self._can_be_made_again(read)
            ):
                leaves.update(self._leaves(read))
            else:
                leaves[read] = [_picked(part, writer) for part in tensors]
        if writer.part.kind is Kind.ROWS:
            siblings = {other: [other.tensor] for other in writer.writes if other is not value and other.tensor}
            leaves.update(siblings or {value: [RecordedTensor((writer.part.rows, 2), "float")]})
        return leaves

    def outputs(self, group: Group) -> Reads:
        """Values of a group that are written, and as what tensors."""
        written: Reads = {}
        for node in group.nodes:
            for value in node.writes:
                if value in self._again:
                    if value in self._needed:
                        written[value] = self._needed[value]
                elif self._is_written(value) and value.tensor is not None:
                    written[value] = [value.tensor]
        return written

    def _is_written(self, value: Value) -> bool:
        # A value without readers is a result of the model, or statistics of one.
        is_result = not value.readers and value.position == 0
        return value in self._kept or value in self._needed or bool(self._outside(value)) or is_result

    def inputs(self, group: Group) -> Reads:
        """Values that a group reads from memory, and as what tensors."""
        reads: Reads = {}
        for node in group.nodes:
            for value, tensors in node.reads.items():
                if value.writer is not None and self._group_of[value.writer] is group:
                    continue
                for source, parts in self._again.get(value, {value: tensors}).items():
                    parts_of_source = reads.setdefault(source, [])
                    parts = [_one_of_each_row(part) if node.part.sparse else _picked(part, node) for part in parts]
                    parts_of_source.extend(part for part in parts if part not in parts_of_source or len(parts) > 1)
        return reads


def _picked(tensor: RecordedTensor, node: Node) -> RecordedTensor:
    """Elements read of a tensor whose elements an index picks: no more than are made."""
    if not node.part.picks or tensor.elements <= node.part.rows:
        return tensor
    return RecordedTensor((node.part.rows,), tensor.dtype)


def _one_of_each_row(tensor: RecordedTensor) -> RecordedTensor:
    return RecordedTensor(tensor.dims[:-1], tensor.dtype) if len(tensor.dims) > 1 else tensor


def _is_random(capture: Capture, node: Node) -> bool:
    return any(
        word in capture.operators[node.index].name for word in ("dropout", "bernoulli", "rand", "normal_", "uniform")
    )


def _bytes(capture: Capture, value: Value, tensors: Iterable[RecordedTensor]) -> int:
    return min(sum(_distinct(tensor).bytes for tensor in tensors), capture.storages[value.storage].bytes)


def _distinct(tensor: RecordedTensor) -> RecordedTensor:
    """A tensor without its broadcast axes."""
    if 0 not in tensor.strides:
        return tensor
    dims = tuple(1 if step == 0 else size for size, step in zip(tensor.dims, tensor.strides, strict=True))
    return RecordedTensor(dims, tensor.dtype, tensor.strides)


def _tensors(capture: Capture, value: Value, tensors: list[RecordedTensor]) -> list[RecordedTensor]:
    """Distinct tensors read of a value: views of one storage that are more than it are read as the largest of them."""
    parts = [_distinct(tensor) for tensor in tensors]
    if sum(part.bytes for part in parts) <= capture.storages[value.storage].bytes:
        return parts
    return [max(parts, key=lambda part: part.bytes)]


def _operator(capture: Capture, group: Group, stored: _Stored, numbers: dict[int, int]) -> CapturedOperator:
    """The call of a group."""
    first = capture.operators[group.nodes[0].index]
    members = [capture.operators[index] for index in dict.fromkeys(node.index for node in group.nodes)]
    forward = next((numbers[each.forward] for each in members if each.forward in numbers), NONE)
    if group.is_whole:
        return replace(first, forward=forward, made=(), freed=())
    reads = stored.inputs(group)
    writes = stored.outputs(group)
    tensors = tuple(tensor for value, parts in reads.items() for tensor in _tensors(capture, value, parts))
    return CapturedOperator(
        name=f"inductor::triton_{group.kind.value}_fused_{_title(members)}",
        overload="default",
        inputs=Inputs(tensors, ("",) * len(tensors)),
        outputs=tuple(tensor for parts in writes.values() for tensor in parts),
        module=next((each.module for each in members if each.module != NONE), NONE),
        phase=first.phase,
        forward=forward,
        read=tuple(dict.fromkeys(value.storage for value in reads)),
        written=tuple(dict.fromkeys(value.storage for value in writes)),
    )


def _title(members: Iterable[CapturedOperator]) -> str:
    names = sorted({each.name.partition("::")[2].removesuffix("_").removeprefix("_foreach_") for each in members})
    return "_".join(names[:_NAMES])


def _with_lives(capture: Capture, operators: list[CapturedOperator]) -> Iterator[CapturedOperator]:
    """The operators with the storages that each makes and frees, now that some never come to be."""
    freed = {storage for operator in capture.operators for storage in operator.freed}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, operator in enumerate(operators):
        for storage in (*operator.read, *operator.written):
            last[storage] = index
        for storage in operator.written:
            if capture.storages[storage].kind == "step":
                first.setdefault(storage, index)
    for index, operator in enumerate(operators):
        yield replace(
            operator,
            made=tuple(storage for storage in operator.written if first.get(storage) == index),
            freed=tuple(
                storage
                for storage in dict.fromkeys((*operator.read, *operator.written))
                if last[storage] == index and storage in freed
            ),
        )
