"""Values of a captured step: what each operator reads and writes, one value for each time that a storage is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from daydream.capture.captured import Capture, CapturedOperator
from daydream.capture.fusion.kinds import WHOLE, Part, parts_of
from daydream.graph.graph import Phase
from daydream.operators.inputs import RecordedTensor
from daydream.trace.trace import NONE

#: Operators that write their first argument without reading it.
_OVERWRITES = frozenset({"aten::copy_", "aten::fill_", "aten::zero_", "aten::bernoulli_", "aten::normal_"})


@dataclass(eq=False, slots=True, kw_only=True)
class Value:
    """What a storage holds from one writing to the next.

    Attributes:
        storage: its number.
        tensor: as it was written; None for what was there before the step.
        writer: the node that makes it.
        position: among the results of its operator.
        readers: nodes that read it.
        last: whether the storage holds it at the end of the step.
    """

    storage: int
    tensor: RecordedTensor | None = None
    writer: Node | None = None
    position: int = 0
    readers: list[Node] = field(default_factory=list)
    last: bool = True


@dataclass(eq=False, slots=True, kw_only=True)
class Node:
    """A loop of an operator, or the whole operator.

    Attributes:
        index: of the operator in the capture.
        part: what it runs.
        phase: of the step.
        reads: tensors of the values that it reads.
        writes: values that it makes.
        after: nodes that must have run before it.
        region: of the step that is compiled by itself; -1 outside all, where nothing is.
    """

    index: int
    part: Part
    phase: Phase
    reads: dict[Value, list[RecordedTensor]]
    writes: list[Value]
    after: set[Node]
    region: int = 0


def nodes_of(capture: Capture, regions: Sequence[int] | None = None) -> list[Node]:
    """The nodes of a step in order; operators that launch nothing have none.

    Args:
        capture: the step.
        regions: of every operator, -1 where it is not compiled; None for one region.
    """
    current: dict[int, Value] = {}
    nodes: list[Node] = []
    for index, operator in enumerate(capture.operators):
        if operator.launches:
            region = 0 if regions is None else regions[index]
            parts = parts_of(operator) if region != NONE else WHOLE
            nodes.extend(_nodes(index, operator, parts, current, region))
    return nodes


def _nodes(
    index: int, operator: CapturedOperator, parts: Sequence[Part], current: dict[int, Value], region: int
) -> Iterator[Node]:
    read = tensors_by_storage(arguments_of(operator), operator.read)
    if operator.name in _OVERWRITES and operator.read and operator.read[0] in operator.written:
        read[operator.read[0]] = read[operator.read[0]][1:]
    reads = {current.setdefault(storage, Value(storage=storage)): tensors for storage, tensors in read.items()}
    written = tensors_by_storage(operator.outputs, operator.written)
    made: list[Node] = []
    results: dict[int, Value] = {}
    for storage, tensors in written.items():
        position = next((place for place, tensor in enumerate(operator.outputs) if tensor is tensors[0]), 0)
        results[position] = Value(storage=storage, tensor=tensors[0], position=position)
    for storage in operator.written:
        if storage not in written:  # written in place by an operator that returns nothing
            tensors = read.get(storage) or [None]  # type: ignore[list-item]
            results[len(results) + len(operator.outputs)] = Value(storage=storage, tensor=tensors[0])
    if operator.name.startswith("aten::_foreach_") and operator.name.endswith("_") and not operator.outputs:
        # Lists updated in place come back as nothing: the first list is what is written.
        count = len(operator.inputs.lists[0]) if operator.inputs.lists else 0
        for position, (storage, tensors) in enumerate(list(read.items())[:count]):
            results.setdefault(position, Value(storage=storage, tensor=tensors[0]))
    for part in parts:
        node = Node(index=index, part=part, phase=operator.phase, reads={}, writes=[], after=set(), region=region)
        if not part.constant:
            node.reads = {value: list(tensors) for value, tensors in reads.items() if tensors}
        node.writes = [value for position, value in results.items() if part.writes is None or position in part.writes]
        for earlier in made:  # the statistics that the elements need
            node.reads.update({value: [value.tensor] for value in earlier.writes if value.tensor is not None})
            node.after.add(earlier)
        made.append(node)
        for value in node.reads:
            value.readers.append(node)
            if value.writer is not None:
                node.after.add(value.writer)
        for value in node.writes:
            value.writer = node
            _replace(value, node, current)
        yield node


def _replace(value: Value, node: Node, current: dict[int, Value]) -> None:
    before = current.get(value.storage)
    if before is not None:
        before.last = False
        node.after.update(each for each in before.readers if each is not node)
        if before.writer is not None and before.writer is not node:
            node.after.add(before.writer)
    current[value.storage] = value


def arguments_of(operator: CapturedOperator) -> list[RecordedTensor]:
    """The tensors among the arguments in order, those of lists one after the other."""
    tensors: list[RecordedTensor] = []
    lists = operator.inputs.lists
    for position, tensor in enumerate(operator.inputs.tensors):
        if tensor is not None:
            tensors.append(tensor)
        elif position < len(lists):
            tensors.extend(lists[position])
    return tensors


def tensors_by_storage(tensors: Sequence[RecordedTensor], storages: Sequence[int]) -> dict[int, list[RecordedTensor]]:
    """Which of the tensors lie in which storage.

    Storages are named once each, in the order in which tensors first use them: where there are fewer storages than
    tensors, a tensor like one before it lies where that one does.

    >>> a, b = RecordedTensor((2, 3), "float"), RecordedTensor((3,), "float")
    >>> [len(tensors) for tensors in tensors_by_storage([a, a, b], [7, 8]).values()]
    [2, 1]
    """
    known: dict[RecordedTensor, int] = {}
    by_storage: dict[int, list[RecordedTensor]] = {}
    waiting = list(storages)
    for place, tensor in enumerate(tensors):
        spare = len(tensors) - place > len(waiting)
        if (tensor in known and spare) or not waiting:
            storage = known.get(tensor, storages[-1] if storages else -1)
        else:
            storage = waiting.pop(0)
        known[tensor] = storage
        by_storage.setdefault(storage, []).append(tensor)
    by_storage.pop(-1, None)
    return by_storage
