"""Loops of a step joined into kernels by the rules of TorchInductor's scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from daydream.capture.fusion.kinds import Kind
from daydream.capture.fusion.values import Node, Value
from daydream.graph.graph import Phase

#: Loops of one kernel (``max_fusion_size``).
_LARGEST = 64


@dataclass(eq=False, slots=True, kw_only=True)
class Group:
    """A kernel.

    Attributes:
        kind: that of its reduction, else ``POINT``.
        rows: elements, those that a reduction keeps.
        columns: elements that it reduces into one.
        phase: of the step.
        nodes: its loops in order.
        region: of the step that it is compiled in.
    """

    kind: Kind
    rows: int
    columns: int
    phase: Phase
    nodes: list[Node] = field(default_factory=list)
    region: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it is an operator that stays as it is."""
        return self.kind is Kind.WHOLE

    @property
    def first(self) -> int:
        """Index of its first operator."""
        return self.nodes[0].index

    @property
    def last(self) -> int:
        """Index of its last operator."""
        return self.nodes[-1].index


def groups_of(nodes: list[Node]) -> list[Group]:
    """The kernels of a step: each loop joins what makes its data, else what reads the same."""
    return _Grouping(nodes).groups


class _Grouping:
    def __init__(self, nodes: list[Node]) -> None:
        self.groups: list[Group] = []
        self._of: dict[Node, Group] = {}
        for node in nodes:
            part = node.part
            group = Group(
                kind=part.kind, rows=part.rows, columns=part.columns, phase=node.phase, nodes=[node], region=node.region
            )
            self.groups.append(group)
            self._of[node] = group
            if part.kind is Kind.WHOLE:
                continue
            if part.kind is Kind.LIST:
                self._join_list(group)
                continue
            for candidate in self._candidates(node):
                current = self._of[node]
                if candidate is not current and candidate.nodes and self._may_join(candidate, current):
                    self._merge(candidate, current)
        self.groups = [group for group in self.groups if group.nodes]

    def _join_list(self, group: Group) -> None:
        before = next((each for each in reversed(self.groups[:-1]) if each.nodes), None)
        if before is not None and before.kind is Kind.LIST and before.phase == group.phase:
            self._merge(before, group)

    def _candidates(self, node: Node) -> list[Group]:
        """Groups that make what a loop reads, the latest first, then those that read the same."""
        makers = [] if node.part.gathers else [value.writer for value in node.reads if value.writer is not None]
        readers = [
            reader for value in node.reads for reader in value.readers
            if reader is not node and reader in self._of and _is_whole_read(value, node, reader)
        ]  # fmt: skip
        ordered = [*sorted(makers, key=_index, reverse=True), *sorted(readers, key=_index, reverse=True)]
        return list(dict.fromkeys(self._of[each] for each in ordered))

    def _may_join(self, one: Group, other: Group) -> bool:
        if (one.phase, one.region) != (other.phase, other.region) or one.kind in (Kind.WHOLE, Kind.LIST):
            return False
        if len(one.nodes) + len(other.nodes) > _LARGEST:
            return False
        if not self._fits(one, other) or self._gathers_from(one, other):
            return False
        return not self._is_between(one, other) and not self._is_between(other, one)

    def _gathers_from(self, one: Group, other: Group) -> bool:
        """Whether a loop of one group reads other elements of what the other group makes."""
        for reader, maker in ((one, other), (other, one)):
            made = {value for node in maker.nodes for value in node.writes}
            if any(node.part.gathers and not made.isdisjoint(node.reads) for node in reader.nodes):
                return True
        return False

    def _fits(self, one: Group, other: Group) -> bool:
        """Whether two groups run over the same elements."""
        point, reduction = (one, other) if one.kind is Kind.POINT else (other, one)
        if point.kind is not Kind.POINT:
            return (one.kind, one.rows, one.columns) == (other.kind, other.rows, other.columns)
        if reduction.kind is Kind.POINT:
            return point.rows == reduction.rows
        if reduction.kind is Kind.ROWS:
            return point.rows in (reduction.rows, reduction.rows * reduction.columns)
        if point.rows == reduction.rows:
            return self._of_all(point, reduction)
        return point.rows == reduction.rows * reduction.columns and self._feeds_alone(point, reduction)

    def _of_all(self, point: Group, reduction: Group) -> bool:
        """Whether a loop runs over the results of a reduction, behind it."""
        made = {value for node in reduction.nodes for value in node.writes}
        return any(not made.isdisjoint(node.reads) for node in point.nodes)

    def _feeds_alone(self, point: Group, reduction: Group) -> bool:
        """Whether nobody else reads what a group makes for a reduction of columns."""
        return all(
            reader in reduction.nodes or reader in point.nodes
            for node in point.nodes for value in node.writes for reader in value.readers
        ) and all(not value.last or value.readers for node in point.nodes for value in node.writes)  # fmt: skip

    def _is_between(self, one: Group, other: Group) -> bool:
        """Whether a third group needs what the first makes, and the second needs what that one makes."""
        waiting = [
            group for node in other.nodes for each in node.after
            if (group := self._of[each]) is not one and group is not other
        ]  # fmt: skip
        seen: set[Group] = set()
        while waiting:
            group = waiting.pop()
            if group is one:
                return True
            if group in seen or group.last < one.first:
                continue
            seen.add(group)
            waiting.extend(self._of[each] for node in group.nodes for each in node.after)
        return False

    def _merge(self, into: Group, group: Group) -> None:
        if into.kind is Kind.POINT:
            into.kind, into.rows, into.columns = group.kind, group.rows, group.columns
        into.nodes = sorted([*into.nodes, *group.nodes], key=_index)
        for node in group.nodes:
            self._of[node] = into
        group.nodes = []


def _index(node: Node) -> int:
    return node.index


def _is_whole_read(value: Value, one: Node, other: Node) -> bool:
    """Whether two loops read a value as the same tensor, so that its elements are read once."""
    return one.reads[value] == other.reads.get(value)
