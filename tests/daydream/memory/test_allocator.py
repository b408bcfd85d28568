"""The caching allocator against a plain model of it, and its documented sizes."""

from __future__ import annotations

import random

import pytest

from daydream.memory.allocator import Block, CachingAllocator, OutOfMemoryError, rounded_size, segment_size

MIB = 1 << 20


class PlainAllocator:
    """The same rules on lists that are searched from one end to the other: [offset, size, in use] by segment."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[list[int]]]] = []

    def allocate(self, size: int) -> tuple[int, int, int]:
        rounded = (size + 511) // 512 * 512 or 512
        small = rounded <= MIB
        fitting = [
            (block[1], number, block[0])
            for number, (is_small, blocks) in enumerate(self.segments)
            for block in blocks
            if is_small == small and not block[2] and block[1] >= rounded
        ]
        if fitting:
            _, number, offset = min(fitting)
        else:
            whole = (
                2 * MIB if small else 20 * MIB if rounded < 10 * MIB else (rounded + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            )
            self.segments.append((small, [[0, whole, 0]]))
            number, offset = len(self.segments) - 1, 0
        blocks = self.segments[number][1]
        place = [block[0] for block in blocks].index(offset)
        spare = blocks[place][1] - rounded
        if (small and spare >= 512) or (not small and spare > MIB):
            blocks[place][1] = rounded
            blocks.insert(place + 1, [offset + rounded, spare, 0])
        blocks[place][2] = 1
        return number, offset, blocks[place][1]

    def free(self, number: int, offset: int) -> None:
        blocks = self.segments[number][1]
        blocks[[block[0] for block in blocks].index(offset)][2] = 0
        joined: list[list[int]] = []
        for block in blocks:
            if joined and not joined[-1][2] and not block[2]:
                joined[-1][1] += block[1]
            else:
                joined.append(block)
        blocks[:] = joined

    @property
    def reserved(self) -> int:
        return sum(sum(block[1] for block in blocks) for _, blocks in self.segments)

    @property
    def allocated(self) -> int:
        return sum(block[1] for _, blocks in self.segments for block in blocks if block[2])


def draw_size(draw: random.Random) -> int:
    """Sizes of every kind: a few bytes, around the thresholds, and large."""
    kind = draw.randrange(4)
    if kind == 0:
        return draw.randrange(1, 4096)
    if kind == 1:
        return draw.choice((MIB, 10 * MIB, 2 * MIB, 20 * MIB)) + draw.randrange(-1024, 1024)
    return draw.randrange(1, MIB) if kind == 2 else draw.randrange(MIB, 40 * MIB)


@pytest.mark.parametrize("part", range(10))
def test_a_hundred_random_sequences_agree_with_the_plain_model(part: int) -> None:
    for seed in range(100 * part, 100 * part + 100):
        draw = random.Random(seed)
        ours, plain = CachingAllocator(), PlainAllocator()
        held: list[tuple[Block, tuple[int, int, int]]] = []
        for _ in range(draw.randrange(5, 60)):
            if held and draw.random() < 0.45:
                block, (number, offset, _) = held.pop(draw.randrange(len(held)))
                ours.free(block)
                plain.free(number, offset)
            else:
                size = draw_size(draw)
                held.append((ours.allocate(size), plain.allocate(size)))
                block, (_, offset, whole) = held[-1]
                assert (block.offset, block.size) == (offset, whole)
            assert (ours.allocated, ours.reserved) == (plain.allocated, plain.reserved)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_nothing_overlaps_and_nothing_is_lost(seed: int, expandable: bool) -> None:
    draw = random.Random(seed)
    allocator = CachingAllocator(expandable=expandable)
    held: list[Block] = []
    for _ in range(150):
        if held and draw.random() < 0.45:
            allocator.free(held.pop(draw.randrange(len(held))))
        else:
            size = draw_size(draw)
            held.append(allocator.allocate(size))
            assert held[-1].size >= rounded_size(size)
        by_segment: dict[int, list[tuple[int, int]]] = {}
        free = [block for pool in allocator._pools for block in pool.blocks.values()]
        for block in (*held, *free):
            by_segment.setdefault(block.segment, []).append((block.offset, block.size))
        for segment, parts in by_segment.items():
            end = 0
            for offset, size in sorted(parts):
                assert offset == end
                end = offset + size
            assert end == allocator.segments()[segment]
        assert allocator.reserved == sum(allocator.segments().values()) >= allocator.allocated
        assert allocator.allocated == sum(block.size for block in held)
    for block in held:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


@pytest.mark.parametrize(
    ("request_bytes", "segment"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12), (33 * MIB, 34)],
)
def test_segments_have_the_documented_sizes(request_bytes: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(request_bytes)
    assert allocator.reserved == segment * MIB == segment_size(rounded_size(request_bytes))


def test_expandable_segments_grow_by_pages() -> None:
    allocator = CachingAllocator(expandable=True)
    first = allocator.allocate(30 * MIB)
    assert allocator.reserved == 40 * MIB
    # Ten MiB are left of the second page; five of them are missing.
    allocator.allocate(15 * MIB)
    assert allocator.reserved == 60 * MIB and len(allocator.segments()) == 1
    allocator.free(first)
    allocator.allocate(29 * MIB)
    assert allocator.reserved == 60 * MIB


def test_free_segments_are_given_back_before_memory_is_missing() -> None:
    allocator = CachingAllocator(64 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    assert allocator.reserved == 40 * MIB
    allocator.allocate(50 * MIB)
    assert allocator.reserved == 50 * MIB
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.allocate(20 * MIB)
    assert (caught.value.request, caught.value.needed) == (20 * MIB, 6 * MIB)


def test_a_block_is_freed_once() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(100)
    allocator.free(block)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(block)
