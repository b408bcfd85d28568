"""A board whose clock has settled under its power limit, and one with another limit."""

from __future__ import annotations

import msgspec

from hal.spec.device import DeviceSpec
from hal.spec.parts import MatrixInstruction

#: Exponents by which rates of Tensor Cores follow the power limit, between H100 SXM (700 W) and H100 PCIe (350 W) with
#: their units: of large products once the clock has settled, and of those that it has not fallen for yet.
SETTLED_EXPONENT, FRESH_EXPONENT = 0.59, 0.44

#: Rate of large products of 16 bits of a job's operands over that of a data base's: normal numbers switch more
#: transistors, and draw more, than what benchmarks of kernels are given. An A100 SXM multiplies 8192 cubed at 257e12 of
#: normal numbers and at 295e12 of zeros (thonking.ai, "Strangely, Matrix Multiplications on GPUs Run Faster When Given
#: 'Predictable' Data!", 2024), at 264.5e12 of normal ones with PyTorch 2.8 (zzc0721/torch-performance-test-data); its
#: file has 281e12, from short runs of AIConfigurator. The mean of the two over that.
OPERANDS = 0.928


def settled(device: DeviceSpec) -> DeviceSpec:
    """The board in a job of hours, at the one clock that its largest products settle at under the power limit.

    The limit holds for the mean over many milliseconds, so that short products, attention and everything else that the
    clock drives run at that clock, too; memory has a clock of its own.
    """
    share = settled_clock(device)

    def limited(instruction: MatrixInstruction) -> MatrixInstruction:
        best = instruction.best_flops or instruction.peak_flops
        rate = best * share
        if device.clocks.job_hz is None:
            rate = min(rate, OPERANDS * (instruction.power_limited_flops or best))
        return msgspec.structs.replace(
            instruction,
            best_flops=rate if instruction.best_flops is not None else None,
            power_limited_flops=rate if instruction.power_limited_flops is not None else None,
            sustained_flops=min(instruction.sustained_flops * share, rate),
        )

    clocks = device.clocks
    boost = clocks.boost_hz * share
    changed = msgspec.structs.replace(
        clocks, boost_hz=boost, base_hz=min(clocks.base_hz, boost), sustained_hz=min(clocks.sustained_hz, boost)
    )
    throughput = tuple(
        msgspec.structs.replace(
            each,
            peak_flops=each.peak_flops * share,
            sustained_flops=min(each.sustained_flops, each.peak_flops * share),
            best_flops=None if each.best_flops is None else min(each.best_flops, each.peak_flops * share),
        )
        for each in device.throughput
    )
    instructions = tuple(limited(each) for each in device.matrix_instructions)
    return msgspec.structs.replace(device, matrix_instructions=instructions, clocks=changed, throughput=throughput)


def settled_clock(device: DeviceSpec) -> float:
    """Clock that large products of 16 bits settle at under the power limit, over the boost clock; 1 where unknown."""
    if device.clocks.job_hz is not None:
        return device.clocks.job_hz / device.clocks.boost_hz
    shares = [
        OPERANDS * each.power_limited_flops / each.best_flops
        for each in device.matrix_instructions
        if each.input_dtype in ("bfloat16", "float16") and each.power_limited_flops and each.best_flops
    ]
    return min(1.0, *shares) if shares else 1.0


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
    clocks = device.clocks
    if clocks.job_hz is not None:
        clocks = msgspec.structs.replace(clocks, job_hz=clocks.job_hz * share**SETTLED_EXPONENT)
    return msgspec.structs.replace(device, matrix_instructions=instructions, clocks=clocks)
