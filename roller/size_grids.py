"""Sizes between the smallest and the largest of one known at launch, at which kernels are compared."""

from __future__ import annotations

from sokoban.language.expression import LaunchSize

#: Steps of sizes in which boundaries are looked for: up to the first number by the second.
STEPS = ((64, 1), (256, 8), (2048, 16), (16384, 64), (2**31, 512))


def size_grid(size: LaunchSize, ratio: float) -> list[int]:
    """Sizes from the smallest to the largest, each about ``ratio`` times the one before, and round: tiles end there.

    >>> size_grid(LaunchSize("m", 300, 1), 2.0)
    [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    """
    sizes, wanted = [size.multiple], float(size.multiple)
    while sizes[-1] < size.most:
        wanted = max(wanted * ratio, sizes[-1] + size.multiple)
        step = max(size.multiple, min(128, 1 << max(0, int(wanted).bit_length() - 4)))
        step = -(-step // size.multiple) * size.multiple
        sizes.append(min(size.most, max(sizes[-1] + size.multiple, round(wanted / step) * step)))
    return sizes


def fine_sizes(size: LaunchSize) -> list[int]:
    """Sizes in the steps of :data:`STEPS`, all of them multiples, the last of them the largest.

    >>> fine_sizes(LaunchSize("m", 64, 8))
    [8, 16, 24, 32, 40, 48, 56, 64]
    """
    sizes, last = [], 0
    for end, step in STEPS:
        step = -(-step // size.multiple) * size.multiple
        while last < min(end, size.most):
            last = min((last // step + 1) * step, size.most)
            sizes.append(last)
    return sizes
