"""Wave scaling: how much longer or shorter a recorded kernel takes on another board (Habitat: Yu et al., ATC 2021).

A board runs the B blocks of a kernel in waves of W, as many as fit on it at once. Habitat's equation (1) scales a
recorded time by the waves, the bandwidth D of memory, the wave size and the clock C, weighed by how far bandwidth
decides (gamma)::

    T' / T = ceil(B/W') / ceil(B/W)  (D/D' W'/W)^gamma  (C/C')^(1 - gamma)

:func:`habitat_ratio` is that, with what long copies and loads leave of D and C in place of data sheets. By default the
pass takes :func:`wave_ratio`, which differs in two things. Arithmetic has the sustained rate F of the whole board
instead of C W, as boards differ in lanes, and matrix units have a rate of their own. And the blocks of the last wave
spread over all U units, which run the faster the fewer they hold: what counts is the most blocks of a unit, and how
many of them it runs at once, by registers and shared memory, no longer does. Bandwidth belongs to all blocks together
and sees no waves::

    T' / T = (D/D')^gamma  (F/F'  ceil(B/U') U' / (ceil(B/U) U))^(1 - gamma)

A grid as large as the board (:func:`is_persistent`) would be another one on another board, and so would that of a
product whose sums are split to fill all waves: rates alone count there.

`python -m bench.accuracy --only ported` holds both against measured kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES

#: A grid of at least this share of the blocks that the board holds is as large as the board; tiles divide unevenly.
FULL_GRID = 0.85

#: A product's grid of at least this share of whole waves was made to fill the board.
EVEN_GRID = 0.98


@dataclass(frozen=True)
class Launch:
    """Launch of a kernel: blocks; threads and bytes of shared memory of a block, registers of a thread."""

    blocks: int
    threads: int
    registers: int = 0
    shared_bytes: int = 0


def launch_of(arguments: Mapping[str, Any]) -> Launch | None:
    """The launch of a recorded kernel, None where the trace does not say.

    >>> launch_of({"grid": [50, 2, 1], "block": [256, 1, 1], "registers per thread": 38, "shared memory": 0})
    Launch(blocks=100, threads=256, registers=38, shared_bytes=0)
    """
    blocks, threads = (_product(arguments.get(key)) for key in ("grid", "block"))
    if not blocks or not threads:
        return None
    resources = (arguments.get(key) for key in ("registers per thread", "shared memory"))
    registers, shared = (int(value) if isinstance(value, int | float) and value > 0 else 0 for value in resources)
    return Launch(blocks, threads, registers, shared)


def _product(sides: object) -> int:
    """The product of three counts; 0 of anything else."""
    if not isinstance(sides, list) or len(sides) != 3 or not all(isinstance(side, int) and side > 0 for side in sides):
        return 0
    return int(sides[0] * sides[1] * sides[2])


def wave_blocks(launch: Launch, device: DeviceSpec) -> int:
    """Blocks that run at once on the whole board: what threads, registers, shared memory and the limit of blocks leave.

    At least one a unit: what does not fit at all would have been compiled otherwise.

    >>> from hal.catalog import load_device
    >>> wave_blocks(Launch(blocks=3136, threads=128, registers=128, shared_bytes=16384), load_device("v100"))
    320
    """
    limits, lanes = device.limits, device.warp_lanes
    warps = -(-launch.threads // lanes)
    granularity = limits.register_allocation_granularity
    warp_registers = -(-max(launch.registers, 1) * lanes // granularity) * granularity
    resident = min(
        limits.threads_per_unit // (warps * lanes),
        limits.registers_per_unit // (warp_registers * warps),
        limits.shared_bytes_per_unit // max(1, launch.shared_bytes + limits.shared_bytes_reserved_per_block),
        limits.blocks_per_unit,
    )
    return device.unit_count * max(resident, 1)


def is_persistent(launch: Launch, device: DeviceSpec) -> bool:
    """True if a grid is as large as the board it ran on: its blocks loop over the work, and another board gets fewer.

    That is a grid that all units hold at once, as many blocks each, and of which hardly one lacks.

    >>> from hal.catalog import load_device
    >>> h100, wide = load_device("h100-sxm"), {"threads": 384, "registers": 168, "shared_bytes": 231424}
    >>> [is_persistent(Launch(blocks, **wide), h100) for blocks in (132, 120, 66, 264)]
    [True, True, False, False]
    """
    each = -(-launch.blocks // device.unit_count)
    full = launch.blocks >= FULL_GRID * each * device.unit_count
    return full and each * device.unit_count <= wave_blocks(launch, device)


def _fills(launch: Launch, device: DeviceSpec) -> bool:
    """True if a grid leaves no unit idle in its last wave: libraries split sums so that products do."""
    return launch.blocks >= EVEN_GRID * _rounded(launch.blocks, device.unit_count)


def sustained_rate(device: DeviceSpec, dtype: str, *, products: bool) -> float:
    """FLOP/s of long kernels: of `products` by matrix units where the board has any for this type, else of its lanes.

    Narrow types that the lanes have no rate for, or none of their own, compute in float32.
    """
    instruction = device.best_matrix_instruction(dtype) if products else None
    if instruction is not None:
        return instruction.sustained_flops
    return device.sustained_flops(dtype if DTYPE_BYTES[dtype] > 2 and dtype in device.dtypes else "float32")


def memory_share(intensity: float, ridge: float) -> float:
    """Influence of bandwidth on a kernel of so many FLOP a byte: Habitat's gamma, from 1 by way of 0.5 to 0.

    Args:
        intensity: arithmetic of the kernel, FLOP a byte.
        ridge: where the roofline of the board it ran on bends, FLOP a byte.

    >>> memory_share(0.0, 16.0), memory_share(16.0, 16.0), memory_share(32.0, 16.0)
    (1.0, 0.5, 0.25)
    """
    return 1 - 0.5 * intensity / ridge if intensity < ridge else 0.5 * ridge / intensity


def wave_ratio(
    source: DeviceSpec,
    target: DeviceSpec,
    *,
    share: float = 1.0,
    dtype: str = "float32",
    products: bool = False,
    launch: Launch | None = None,
) -> float:
    """Time on `target` over time on `source` of the same kernel.

    Args:
        source: where it ran.
        target: where it would run.
        share: how far bandwidth decides, 0 to 1 (:func:`memory_share`).
        dtype: element type of its arithmetic.
        products: whether it multiplies matrices, by matrix units where there are any.
        launch: as recorded; without, every unit is taken to have equally many blocks.
    """
    rates = sustained_rate(source, dtype, products=products) / sustained_rate(target, dtype, products=products)
    if launch is not None and not is_persistent(launch, source) and not (products and _fills(launch, source)):
        rates *= _rounded(launch.blocks, target.unit_count) / _rounded(launch.blocks, source.unit_count)
    return float(_bandwidths(source, target) ** share * rates ** (1 - share))


def habitat_ratio(source: DeviceSpec, target: DeviceSpec, launch: Launch, *, share: float = 1.0) -> float:
    """Time on `target` over time on `source` by Habitat's equation (1), from sustained bandwidths and clocks."""
    source_wave, target_wave = wave_blocks(launch, source), wave_blocks(launch, target)
    waves = -(-launch.blocks // target_wave) / -(-launch.blocks // source_wave)
    clocks = source.clocks.sustained_hz / target.clocks.sustained_hz
    return float(waves * (_bandwidths(source, target) * target_wave / source_wave) ** share * clocks ** (1 - share))


def _bandwidths(source: DeviceSpec, target: DeviceSpec) -> float:
    return source.dram.bandwidth_bytes_per_second / target.dram.bandwidth_bytes_per_second


def _rounded(count: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-count // step) * step
