"""A board whose clock has settled under its power limit, and one with another limit."""

from __future__ import annotations

import msgspec

from hal.spec.device import DeviceSpec
from hal.spec.parts import MatrixInstruction

#: Exponents by which rates of Tensor Cores follow the power limit, between H100 SXM (700 W) and H100 PCIe (350 W) with
#: their units: of large products once the clock has settled, and of those that it has not fallen for yet.
SETTLED_EXPONENT, FRESH_EXPONENT = 0.59, 0.44


def settled(device: DeviceSpec) -> DeviceSpec:
    """The board in a job of hours: its Tensor Cores run at what the power limit leaves them, in short products too."""

    def limited(instruction: MatrixInstruction) -> MatrixInstruction:
        limit = instruction.power_limited_flops
        best = instruction.best_flops
        if limit is None or best is None or best <= limit:
            return instruction
        return msgspec.structs.replace(
            instruction, best_flops=limit, sustained_flops=min(instruction.sustained_flops, limit)
        )

    instructions = tuple(limited(each) for each in device.matrix_instructions)
    return msgspec.structs.replace(device, matrix_instructions=instructions)


def with_power(device: DeviceSpec, share: float) -> DeviceSpec:
    """The board with another power limit.

    Args:
        device: the board, whose rates hold under the limit that it comes with.
        share: of that limit, 0.25 to 1: below, and above, the exponents have not been seen.

    Raises:
        ValueError: the share is out of range.
    """
    if not 0.25 <= share <= 1:
        raise ValueError(f"a share of {share:g} of the power limit, expected 0.25 to 1")

    def scaled(instruction: MatrixInstruction) -> MatrixInstruction:
        fresh, long = share**FRESH_EXPONENT, share**SETTLED_EXPONENT
        # Instructions of single warps draw less than the limit at the board's full clock.
        if instruction.is_by_warps and instruction.power_limited_flops is None:
            return instruction
        best, limit = instruction.best_flops, instruction.power_limited_flops
        return msgspec.structs.replace(
            instruction,
            best_flops=best * fresh if best is not None else None,
            power_limited_flops=limit * long if limit is not None else None,
            sustained_flops=instruction.sustained_flops * long,
        )

    instructions = tuple(scaled(each) for each in device.matrix_instructions)
    return msgspec.structs.replace(device, matrix_instructions=instructions)
