"""PyTorch's caching allocator replayed: which segments a sequence of allocations and frees reserves.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` on one stream. Sizes are rounded up to 512 bytes. Requests
of at most 1 MiB are cut from segments of 2 MiB, larger ones below 10 MiB from segments of 20 MiB, others get segments
of their own size in steps of 2 MiB. The smallest free block that fits serves a request; what is too much of it stays a
free block of its own, and free neighbours are joined. With expandable segments each pool is one segment that grows at
its end by whole pages, 2 MiB or 20 MiB.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

ROUNDING = 512
SMALL_REQUEST = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
SINGLE_SEGMENT = 10 << 20
SINGLE_ROUNDING = 2 << 20


class OutOfMemoryError(Exception):
    """The device has no room for a segment; ``needed`` bytes more are asked for than there are."""

    def __init__(self, request: int, needed: int) -> None:
        super().__init__(f"{request} bytes do not fit: {needed} are missing")
        self.request = request
        self.needed = needed


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment.

    Attributes:
        segment: number of the segment.
        offset: bytes from the segment's begin.
        size: bytes.
        requested: bytes that were asked for, 0 while it is free.
        before, after: its neighbours in the segment.
    """

    segment: int
    offset: int
    size: int
    requested: int = 0
    before: Block | None = None
    after: Block | None = None
    free: bool = False

    @property
    def address(self) -> int:
        """One number for its place; segments are 2**40 bytes apart."""
        return (self.segment << 40) + self.offset

    @property
    def key(self) -> tuple[int, int, int]:
        """Order among free blocks: by size, then by address."""
        return self.size, self.segment, self.offset


@dataclass(eq=False, slots=True)
class _Pool:
    """Free blocks of one kind, sorted by :attr:`Block.key`."""

    small: bool
    keys: list[tuple[int, int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int, int], Block] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        block.free = True
        insort(self.keys, block.key)
        self.blocks[block.key] = block

    def remove(self, block: Block) -> None:
        del self.keys[bisect_left(self.keys, block.key)]
        del self.blocks[block.key]
        block.free = False

    def smallest(self, size: int) -> Block | None:
        """The smallest free block of at least this size."""
        place = bisect_left(self.keys, (size, 0, 0))
        return self.blocks[self.keys[place]] if place < len(self.keys) else None


class CachingAllocator:
    """The allocator of one device.

    Args:
        capacity: bytes that segments may take together; None is no limit.
        expandable: whether ``expandable_segments`` is set.

    Attributes:
        allocated: bytes of blocks in use (``torch.cuda.memory_allocated``).
        reserved: bytes of segments (``torch.cuda.memory_reserved``).
    """

    def __init__(self, capacity: int | None = None, *, expandable: bool = False) -> None:
        self.allocated = 0
        self.reserved = 0
        self._capacity = capacity
        self._expandable = expandable
        self._pools = (_Pool(small=True), _Pool(small=False))
        self._segments: dict[int, int] = {}
        # The last block of the expandable segment of each pool.
        self._ends: dict[bool, Block] = {}
        self._numbers = 0

    def allocate(self, size: int) -> Block:
        """A block for a request of so many bytes.

        Raises:
            OutOfMemoryError: it does not fit, even after all free segments are given back.
        """
        rounded = rounded_size(size)
        pool = self._pools[rounded > SMALL_REQUEST]
        block = pool.smallest(rounded)
        if block is not None:
            pool.remove(block)
        else:
            block = self._grown(pool, rounded) if self._expandable else self._segment(pool, rounded)
        self._split(pool, block, rounded)
        block.requested = size
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Gives a block back to its pool, joined with free neighbours.

        Raises:
            ValueError: it is free already.
        """
        if block.free:
            raise ValueError("the block is free already")
        pool = self._pool_of(block)
        self.allocated -= block.size
        block.requested = 0
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                pool.remove(neighbour)
                self._join(block, neighbour)
        pool.add(block)

    def empty_cache(self) -> None:
        """Gives segments back of which no block is in use."""
        for pool in self._pools:
            for block in list(pool.blocks.values()):
                if block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved -= block.size
                    del self._segments[block.segment]
                    if self._ends.get(pool.small) is block:
                        del self._ends[pool.small]

    def segments(self) -> dict[int, int]:
        """Bytes of every segment by its number."""
        return dict(self._segments)

    # Parts

    def _pool_of(self, block: Block) -> _Pool:
        return self._pools[block.segment % 2]

    def _number(self, pool: _Pool) -> int:
        """Numbers of segments are even in the pool of small blocks."""
        self._numbers += 1
        return 2 * self._numbers + (not pool.small)

    def _reserve(self, size: int, request: int) -> None:
        if self._capacity is not None and self.reserved + size > self._capacity:
            self.empty_cache()
            if self.reserved + size > self._capacity:
                raise OutOfMemoryError(request, self.reserved + size - self._capacity)
        self.reserved += size

    def _segment(self, pool: _Pool, rounded: int) -> Block:
        size = segment_size(rounded)
        self._reserve(size, rounded)
        number = self._number(pool)
        self._segments[number] = size
        return Block(number, 0, size)

    def _grown(self, pool: _Pool, rounded: int) -> Block:
        """A block at the end of the pool's segment, which grows by whole pages for what its last block lacks."""
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        last = self._ends.get(pool.small)
        lacking = rounded - (last.size if last is not None and last.free else 0)
        grown = -(-lacking // page) * page
        self._reserve(grown, rounded)
        # Giving segments back may have taken the last block away.
        last = self._ends.get(pool.small)
        if last is None:
            block = Block(self._number(pool), 0, grown)
            self._segments[block.segment] = 0
        elif last.free:
            pool.remove(last)
            block = last
            block.size += grown
        else:
            block = Block(last.segment, last.offset + last.size, grown, before=last)
            last.after = block
        self._segments[block.segment] += grown
        self._ends[pool.small] = block
        return block

    def _split(self, pool: _Pool, block: Block, size: int) -> None:
        """Cuts off what a request leaves of a block, where that is worth a block of its own."""
        remaining = block.size - size
        least = ROUNDING if pool.small or self._expandable else SMALL_REQUEST + 1
        if remaining < least:
            return
        tail = Block(block.segment, block.offset + size, remaining, before=block, after=block.after)
        if block.after is not None:
            block.after.before = tail
        block.after, block.size = tail, size
        if self._ends.get(pool.small) is block:
            self._ends[pool.small] = tail
        pool.add(tail)

    def _join(self, block: Block, neighbour: Block) -> None:
        """Takes a neighbour into a block."""
        if neighbour is block.before:
            block.offset = neighbour.offset
            block.before = neighbour.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = neighbour.after
            if block.after is not None:
                block.after.before = block
        block.size += neighbour.size
        small = not block.segment % 2
        if self._ends.get(small) is neighbour:
            self._ends[small] = block


def rounded_size(size: int) -> int:
    """Bytes of the block for a request.

    >>> rounded_size(1), rounded_size(513)
    (512, 1024)
    """
    return max(-(-size // ROUNDING), 1) * ROUNDING


def segment_size(rounded: int) -> int:
    """Bytes of the segment that is made for a rounded request.

    >>> segment_size(512) >> 20, segment_size(3 << 20) >> 20, segment_size(33 << 20) >> 20
    (2, 20, 34)
    """
    if rounded <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if rounded < SINGLE_SEGMENT else -(-rounded // SINGLE_ROUNDING) * SINGLE_ROUNDING
