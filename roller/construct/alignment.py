"""The alignment rules of an rTile (thesis 6.3.1), each a rule of its own.

A rule says which sizes of an axis a tile may have at a memory layer, or adds storage padding. Another rule is another
class in the tuple that :func:`default_rules` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from hal.spec.device import DeviceSpec
from roller.construct.rtile import TileSpace
from sokoban.search.padding import formula_padding


class AlignmentRule(Protocol):
    """One alignment requirement."""

    @property
    def name(self) -> str:
        """Hardware feature or shape that the rule aligns with, for people."""
        ...

    def allowed(self, space: TileSpace, layer: str, axis: int, sizes: Sequence[int]) -> Sequence[int]:
        """Those of ``sizes`` that a tile at ``layer`` ("registers" or "shared") may have on axis number ``axis``."""
        ...


@dataclass(frozen=True)
class ExecutionUnitRule:
    """Rule 1: whole TEUs. A block's threads fill warps; a matrix instruction's axes come in its own multiples.

    ``multiples`` gives the smallest multiple by axis position (16 for the three axes of WMMA), 1 elsewhere.

    >>> ExecutionUnitRule(lanes=32).fills(threads=60, epsilon=0.1), ExecutionUnitRule(lanes=32).fills(33, 0.1)
    (True, False)
    """

    lanes: int
    multiples: tuple[tuple[int, int], ...] = ()
    name: str = "execution unit"

    def allowed(self, space: TileSpace, layer: str, axis: int, sizes: Sequence[int]) -> Sequence[int]:
        for position, multiple in self.multiples:
            if position == axis:
                sizes = [size for size in sizes if size % multiple == 0]
        return sizes

    def fills(self, threads: int, epsilon: float) -> bool:
        """``threads`` are whole warps, or waste at most ``epsilon`` of the last one's lanes."""
        warps = -(-threads // self.lanes)
        return warps * self.lanes - threads <= epsilon * warps * self.lanes


@dataclass(frozen=True)
class TransactionRule:
    """Rule 2: the leading dimension of a data tile is a multiple of the memory transaction.

    It binds where that dimension is one plain axis and the tile does not cover it: a tile of whole rows is contiguous
    whatever its width, and the rows of a sliding window overlap at any offset.
    """

    transaction_bytes: int
    name: str = "memory transaction"

    def allowed(self, space: TileSpace, layer: str, axis: int, sizes: Sequence[int]) -> Sequence[int]:
        if layer == "shared":
            axis_size, transaction = space.sizes[axis], self.transaction_bytes
            for element_bytes in space.innermost.get(axis, ()):
                sizes = [size for size in sizes if size >= axis_size or size * element_bytes % transaction == 0]
        return sizes


@dataclass(frozen=True)
class BankRule:
    """Rule 3: storage padding against bank conflicts, the thesis's printed formula.

    Padding = (B L - N % (B L) + L ceil(n / L)) % (B L), with B banks of L elements, N the leading dimension of the
    stored tile and n that of the tile that reads it.
    """

    bank_count: int
    bank_width_bytes: int
    name: str = "memory bank"

    def allowed(self, space: TileSpace, layer: str, axis: int, sizes: Sequence[int]) -> Sequence[int]:
        return sizes

    def padding(self, stored: int, read: int, element_bytes: int) -> int:
        """Elements to add to a leading dimension of ``stored`` elements that is read ``read`` elements at a time.

        >>> BankRule(bank_count=32, bank_width_bytes=4).padding(stored=64, read=4, element_bytes=4)
        4
        """
        width = max(1, self.bank_width_bytes // element_bytes)
        return formula_padding(stored, read, banks=self.bank_count, width=width)


@dataclass(frozen=True)
class TensorShapeRule:
    """Rule 4: padding an axis of N to whole tiles of S wastes at most epsilon: (S - N % S) / N <= epsilon.

    Where S divides N nothing is wasted; the printed formula would charge a whole tile there. An axis of 100 in tiles
    of 48 is padded by 44.
    """

    epsilon: float
    name: str = "tensor shape"

    def allowed(self, space: TileSpace, layer: str, axis: int, sizes: Sequence[int]) -> Sequence[int]:
        axis_size = space.sizes[axis]
        most_padding = self.epsilon * axis_size
        return [size for size in sizes if -axis_size % size <= most_padding]


def default_rules(
    device: DeviceSpec, epsilon: float, multiples: tuple[tuple[int, int], ...] = ()
) -> tuple[ExecutionUnitRule, TransactionRule, BankRule, TensorShapeRule]:
    """The four rules of 6.3.1 for a device."""
    shared = device.shared
    return (
        ExecutionUnitRule(device.warp_lanes, multiples),
        TransactionRule(device.dram.transaction_bytes),
        BankRule(shared.bank_count or device.warp_lanes, shared.bank_width_bytes or 4),
        TensorShapeRule(epsilon),
    )


def aligned_axis_sizes(
    space: TileSpace, rules: Sequence[AlignmentRule], layer: str, axis: int, base: int, largest: int
) -> tuple[int, ...]:
    """All aligned sizes of one axis at a layer, ascending: multiples of ``base`` up to ``largest`` that every rule
    allows. GetNextAlignedAxisSize of a tile is the next larger entry.

    Candidates are ``base`` times a power of two, ``base`` times a divisor of what remains where that is at most 256,
    and the whole axis: other multiples waste lanes or tensor elements wherever these do not.
    """
    sizes: Sequence[int] = _multiples(space.sizes[axis], base, largest)
    for rule in rules:
        sizes = rule.allowed(space, layer, axis, sizes)
    return tuple(sizes)


@lru_cache(maxsize=4096)
def _multiples(size: int, base: int, largest: int) -> tuple[int, ...]:
    """Multiples of ``base`` worth asking about for an axis of ``size``; see :func:`aligned_axis_sizes`."""
    remaining = -(-size // base)
    factors = {1 << bit for bit in range(12)} | {remaining}
    if remaining <= 256:
        factors.update(f for f in range(1, remaining + 1) if remaining % f == 0)
    candidates = sorted(base * factor for factor in factors)
    return tuple(c for c in candidates if c <= largest and (c < size + base or c == base))
