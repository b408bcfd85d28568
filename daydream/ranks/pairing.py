"""Who meets whom: the n-th collective of a process group is the same on all of its ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from daydream.ranks.collectives import Collectives, Group, Kind
from daydream.trace.trace import NONE, Flags, Floats, Ints
from hal.support.errors import InputError

#: Collectives may be left alone at both ends of a recording; if more than this share of a rank's are, nothing fits.
MOST_ALONE = 0.5


@dataclass(frozen=True, eq=False, kw_only=True)
class Meetings:
    """Collectives paired across ranks, a row for every member of every meeting, meeting by meeting.

    Attributes:
        groups: the process groups; a message between two ranks has one of its own, by sender and receiver.
        group: of every meeting, index into `groups`.
        kind: of every meeting, a :class:`Kind`; a message is a :data:`Kind.SEND`.
        number: of every meeting, which of its group it is, from 0.
        step: of every meeting, index of the first member's step; -1 without.
        meeting: of every row, index of the meeting.
        rank: of every row, index of the rank among those given.
        place: of every row, index into the rank's :class:`Collectives`.
        sends: of every row, whether the others wait for it.
        waits: of every row, whether it waits for those that send.
        start_us, end_us: of every row, in the rank's own clock.
        alone: collectives of every rank that met no other.
    """

    groups: tuple[Group, ...]
    group: Ints
    kind: Ints
    number: Ints
    step: Ints
    meeting: Ints
    rank: Ints
    place: Ints
    sends: Flags
    waits: Flags
    start_us: Floats
    end_us: Floats
    alone: Ints

    @property
    def count(self) -> int:
        """Number of meetings."""
        return len(self.group)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Label of every group: its name, with its ranks where several share one."""
        count = Counter(group.name for group in self.groups)
        labels: dict[str, int] = {}
        for number, group in enumerate(self.groups):
            shown = ", ".join(map(str, group.ranks[:8])) + (", ..." if len(group.ranks) > 8 else "")
            label = group.name if count[group.name] == 1 else f"{group.name} ({shown})"
            labels[label if label not in labels else f"{label} {number}"] = number
        return tuple(labels)

    def name(self, meeting: int) -> str:
        """Name of a meeting, the same on every rank.

        Names of collectives would be taken for more of them.
        """
        return f"meeting {self.number[meeting]}"


@dataclass(frozen=True)
class _Entry:
    """A collective by what it must share with those it meets."""

    place: int
    kind: Kind
    bytes: float
    sequence: int
    step: str

    def fits(self, other: _Entry) -> bool:
        """True if both may be the same collective: parts of ranks may differ in size, what they reduce may not."""
        if {self.kind, other.kind} == {Kind.SEND, Kind.RECV}:
            return True
        same_size = self.bytes == other.bytes or self.bytes != self.bytes or other.bytes != other.bytes
        return self.kind == other.kind and (same_size or self.kind is not Kind.ALL_REDUCE)


def pair(
    ranks: Sequence[int], collectives: Sequence[Collectives], steps: Sequence[Sequence[str]], paths: Sequence[Path]
) -> Meetings:
    """Every meeting of these ranks.

    By sequence number where all have one, else by position where the lists of all members agree, else by position
    within a step. What one recording has and another lacks is left alone.

    Args:
        ranks: number of every rank.
        collectives: of every rank.
        steps: names of every rank's steps.
        paths: files of the ranks, for errors.

    Raises:
        InputError: most collectives of a group fit none of another rank's; names the file.
    """
    members: dict[Group, dict[int, list[_Entry]]] = {}
    for index, of_rank in enumerate(collectives):
        for place in range(len(of_rank)):
            kind = Kind(of_rank.kind[place])
            if kind is Kind.OTHER or (kind.point_to_point and of_rank.peer[place] == NONE):
                continue
            group = of_rank.groups[of_rank.group[place]]
            if kind.point_to_point:
                ends = (ranks[index], int(of_rank.peer[place]))
                ends = ends if kind is Kind.SEND else ends[::-1]
                group = Group(f"{group.name}: {ends[0]} to {ends[1]}", ends)
            step = steps[index][of_rank.step[place]] if of_rank.step[place] != NONE else ""
            entry = _Entry(place, kind, float(of_rank.bytes[place]), int(of_rank.sequence[place]), step)
            members.setdefault(group, {}).setdefault(index, []).append(entry)
    rows: list[tuple[int, int, int]] = []
    meetings: list[tuple[int, int, int, int]] = []
    for number, (group, lists) in enumerate(members.items()):
        for count, meeting in enumerate(_met(group, lists, paths)):
            first, entry = next(iter(meeting.items()))
            kind = Kind.SEND if entry.kind.point_to_point else entry.kind
            rows += [(len(meetings), index, member.place) for index, member in meeting.items()]
            meetings.append((number, kind, count, int(collectives[first].step[entry.place])))
    return _meetings(tuple(members), meetings, rows, collectives, ranks)


def _met(group: Group, lists: dict[int, list[_Entry]], paths: Sequence[Path]) -> list[dict[int, _Entry]]:
    """Meetings of a group: for each the members' entries by index of the rank. Those of one rank alone are left out."""
    if len(lists) < 2:
        return []
    by = _identity(lists)
    keyed = [_keyed(entries, by) for entries in lists.values()]
    indices = list(lists)
    reference = keyed[0]
    met: list[dict[int, _Entry]] = []
    fitting: list[int] = []
    for key, entry in reference.items():
        meeting = {indices[0]: entry}
        for index, entries in zip(indices[1:], keyed[1:], strict=True):
            other = entries.get(key)
            if other is not None and entry.fits(other):
                meeting[index] = other
                fitting.append(index)
        if len(meeting) == len(lists):
            met.append(meeting)
    if len(met) < (1 - MOST_ALONE) * min(map(len, lists.values())):
        worst = min(indices[1:], key=fitting.count)
        raise InputError(
            str(paths[worst]),
            f"its {len(lists[worst])} collectives of group {group.name} do not fit the {len(reference)} of "
            f"{paths[indices[0]]}",
            "give traces of the same steps of one job",
        )
    return met


def _identity(lists: dict[int, list[_Entry]]) -> Callable[[_Entry], object]:
    """Key by which entries match: nothing but their order where all lists agree."""
    if all(entry.sequence != NONE for entries in lists.values() for entry in entries):
        return lambda entry: entry.sequence
    first, *others = lists.values()
    if all(
        len(first) == len(entries_of_rank) and all(map(_Entry.fits, first, entries_of_rank))
        for entries_of_rank in others
    ):
        return lambda entry: None
    # Threads that run collectives side by side may begin two of them in either order.
    return lambda entry: (
        entry.step,
        Kind.SEND if entry.kind.point_to_point else entry.kind,
        entry.bytes if entry.kind is Kind.ALL_REDUCE else 0.0,
    )


def _keyed(entries: list[_Entry], identity: Callable[[_Entry], object]) -> dict[tuple[object, int], _Entry]:
    """Entries by what tells them apart, and by which of several that share it they are."""
    count: dict[object, int] = {}
    keyed = {}
    for entry in entries:
        key = identity(entry)
        count[key] = count.get(key, -1) + 1
        keyed[key, count[key]] = entry
    return keyed


def _meetings(
    groups: tuple[Group, ...],
    meetings: list[tuple[int, int, int, int]],
    rows: list[tuple[int, int, int]],
    collectives: Sequence[Collectives],
    ranks: Sequence[int],
) -> Meetings:
    group, kind, number, step = np.array(meetings, np.int64).reshape(-1, 4).T
    meeting, rank, place = np.array(rows, np.int64).reshape(-1, 3).T
    start, end, root = np.empty(len(rows)), np.empty(len(rows)), np.full(len(rows), NONE)
    kind_of_row = np.empty(len(rows), np.int64)
    for index, of_index in enumerate(collectives):
        of_rank = np.flatnonzero(rank == index)
        places = place[of_rank]
        start[of_rank], end[of_rank] = of_index.start_us[places], of_index.end_us[places]
        root[of_rank], kind_of_row[of_rank] = of_index.root[places], of_index.kind[places]
    sends, waits = _roles(groups, group[meeting], np.array(ranks, np.int64)[rank], kind_of_row, root)
    met = np.bincount(rank, minlength=len(collectives))
    return Meetings(
        groups=groups,
        group=group,
        kind=kind,
        number=number,
        step=step,
        meeting=meeting,
        rank=rank,
        place=place,
        sends=sends,
        waits=waits,
        start_us=start,
        end_us=end,
        alone=np.array([len(of_index) for of_index in collectives], np.int64) - met,
    )


def _roles(groups: tuple[Group, ...], group: Ints, rank: Ints, kind: Ints, root: Ints) -> tuple[Flags, Flags]:
    """Which rows send to the others, and which wait for those that send.

    Where the root is unknown, no rank is taken to wait.
    """
    symmetric = kind <= Kind.BARRIER
    position = np.array(
        [
            groups[g].ranks.index(r) if r in groups[g].ranks else r
            for g, r in zip(group.tolist(), rank.tolist(), strict=True)
        ],
        np.int64,
    )
    is_root = (root != NONE) & (position == root)
    from_root = np.isin(kind, [k for k in Kind if k.from_root])
    to_root = np.isin(kind, [k for k in Kind if k.to_root])
    has_root = root != NONE
    sends = symmetric | (from_root & is_root) | (to_root & has_root & ~is_root) | (kind == Kind.SEND)
    waits = symmetric | (from_root & has_root & ~is_root) | (to_root & is_root) | (kind == Kind.RECV)
    return sends, waits
