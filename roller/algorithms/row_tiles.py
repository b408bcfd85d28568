"""Tiles of rows that walk a tile at a step, as attention, its gradients and pairs of products try them.

Tiles grow under the rules of every rTile (thesis 6.3.1): rows and steps are whole fragments of the instruction, or what
a grid of threads divides. What of them fits registers and shared memory, and which are best, RATIONAL says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, TypeVar

from hal.spec.device import DeviceSpec
from sokoban.kernel.instructions import Instruction
from sokoban.model.estimates import Estimate
from sokoban.schedule.attention import FRAGMENT_ROWS, GROUP_STAGES, GROUP_WARPS, LANES, RowTiles, padded
from sokoban.schedule.warp_groups import GROUP_ROWS, MOVED_REGISTERS

_R = TypeVar("_R", bound=RowTiles)

#: Fragments of rows of a warp, warps of a block, and rows or columns of a step that are tried.
FRAGMENTS = (1, 2)
WARPS = (1, 2, 4, 8)
STEPS = (16, 32, 64, 128)
#: Warp groups of a block, and rows of a step of theirs.
GROUPS = (1, 2, 3)
GROUP_STEPS = (32, 48, 64, 80, 96, 112, 128, 176)
#: Lanes that share a row and rows of a thread where threads multiply and add.
LANES_OF_ROWS = (8, 16)
THREAD_ROWS = (1, 2, 4, 8)
#: Halves of a unit in the last place by which rounded values between two products may move a result.
ROUNDINGS = 8
#: The first boards with ``mma.sync`` for 16 bits in both of its types.
MMA_CAPABILITY = (8, 0)


def has_matrix_instructions(dtype: str, device: DeviceSpec) -> bool:
    """True if ``mma.sync`` multiplies such elements on a device."""
    capability = device.compute_capability
    is_cuda = device.code_generator != "opencl-source" and capability is not None
    return is_cuda and dtype != "float32" and tuple(capability or ()) >= MMA_CAPABILITY


def matrix_tiles(kind: type[_R], options: Sequence[Any]) -> Iterator[_R]:
    """Tiles of whole fragments, with every value of the option that schedules of a kind have."""
    option = kind.OPTION[0]
    for fragments, warps, step, stages, value in product(FRAGMENTS, WARPS, STEPS, (1, 2), options):
        yield kind(
            rows=FRAGMENT_ROWS * fragments * warps, warps=warps, stages=stages, instruction=Instruction.MMA_16X8X16,
            **{kind.STEP: step, option: value},
        )  # fmt: skip


def group_tiles(
    kind: type[_R], shared_bytes: Callable[[_R], int], device: DeviceSpec, options: Sequence[Any]
) -> Iterator[_R]:
    """Tiles of whole warp groups, with every value of the option that schedules of a kind have, and as many buffers as
    take no block of a unit its place.

    Args:
        shared_bytes: shared memory of a block of a schedule.
    """
    option = kind.OPTION[0]
    for groups, step, value in product(GROUPS, GROUP_STEPS, options):
        tiles = [
            kind(
                rows=GROUP_ROWS * groups, warps=GROUP_WARPS * groups, stages=stages, instruction=Instruction.WGMMA,
                **{kind.STEP: step, option: value},
            )
            for stages in GROUP_STAGES
        ]  # fmt: skip
        # Several groups take all registers of a unit.
        most = 1 if groups in MOVED_REGISTERS else device.limits.blocks_per_unit
        blocks = [min(most, _blocks_by_memory(shared_bytes(schedule), device)) for schedule in tiles]
        yield tiles[max(place for place, count in enumerate(blocks) if count == blocks[0])]


def _blocks_by_memory(shared: int, device: DeviceSpec) -> int:
    """Blocks of so many bytes that a unit's shared memory holds."""
    limits = device.limits
    if shared > limits.shared_bytes_per_block_opt_in:
        return 0
    return limits.shared_bytes_per_unit // (shared + limits.shared_bytes_reserved_per_block)


def multiply_add_tiles(kind: type[_R]) -> Iterator[_R]:
    """Tiles that a grid of threads divides; several elements of every thread, as shared memory feeds them."""
    option, without, _ = kind.OPTION
    for rows, lanes, warps, step in product(THREAD_ROWS, LANES_OF_ROWS, WARPS[1:], STEPS):
        yield kind(
            rows=rows * warps * LANES // lanes, warps=warps, stages=1, lanes=lanes, instruction=Instruction.FMA,
            **{kind.STEP: step, option: without},
        )  # fmt: skip


def within(schedules: Iterable[_R], rows: int, walked: int, parts: int = 1) -> Iterator[_R]:
    """Tiles that are not mostly beyond the ``rows``, or beyond a part of what is ``walked``, that there are."""
    rows_all, walked_all = padded(rows), padded(walked)
    return (each for each in schedules if each.rows < 2 * rows_all and each.walked * parts < 2 * walked_all)


def fitting(schedules: Iterable[_R], price: Callable[[_R], Estimate]) -> tuple[list[tuple[Estimate, _R]], int]:
    """Estimate and schedule of those of which a block fits a unit, the fastest first; and how many were priced."""
    priced = [(price(schedule), schedule) for schedule in schedules]
    return sorted((pair for pair in priced if pair[0].blocks_per_unit), key=lambda pair: pair[0].seconds), len(priced)
