"""Explanation of attention's gradients: the reason for two kernels, and the work and memory of a step."""

from __future__ import annotations

from collections.abc import Iterator

from hal.spec.device import DeviceSpec
from roller.explain.pace import stage_bars
from roller.text.quantities import count_text, si_text, time_text, wrapped
from sokoban.kernel.attention import seen_pairs
from sokoban.kernel.attention_gradient import AttentionGradientKernel, SlopeProduct, gradient_flops
from sokoban.kernel.instructions import Instruction
from sokoban.language.named.attention_gradient import AttentionGradient
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.kinds.attention import matrix_rates
from sokoban.model.gpu.kinds.attention_gradient import gradient_registers, gradient_walks, slope_registers, slope_walks
from sokoban.schedule.attention import GROUP_WARPS, LANES
from sokoban.schedule.attention_gradient import GradientSchedule
from sokoban.schedule.warp_groups import GROUP_ROWS

#: What the stages of a gradient are.
MEANINGS = {
    "compute": "all products, what multiplies busy with nothing else",
    "issue": "exponentials and the arithmetic of the softmax's gradient",
    "shared": "a block's own tiles and what it walks out of shared memory, for every warp or warp group",
    "l2": "tiles that are walked, to every block",
    "dram": "queries, keys, values, gradients through DRAM",
    "latency": "the units with all that their blocks do, were memory infinitely fast",
    "block_launch": "starting every block",
}


def gradient_origin(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> Iterator[str]:
    """Reasons for a program of a gradient."""
    attention = kernel.attention
    own, walked = ("keys", "queries") if kernel.is_of_keys else ("queries", "keys")
    pairs = attention.b * attention.heads * attention.queries * attention.key_count
    table = si_text(float(pairs * kernel.output.element_bytes), "B")
    passes = f"slopes alone, {table}, pass" if kernel.writes_slopes else "no table passes"
    yield from wrapped(
        f"{passes} through memory: logits and their gradients, {table} each, are computed anew from {own} of a block's "
        f"own and {walked} that it walks"
    )
    if kernel.writes_slopes:
        yield from wrapped(
            "blocks add to nothing that others write, and two runs agree to the bit: the slopes of logits are written, "
            "so that the gradient of queries is one product that reads them, five products in all"
        )
    else:
        yield from wrapped(
            "blocks add to nothing that others write: the gradients of queries, and of keys and values, have a kernel "
            "each (seven products where atomic additions need five), and two runs agree to the bit"
        )
    yield from wrapped(
        f"tiles: {schedule.rows} {own} meet every tile of {schedule.step} {walked}, so that a byte from L2 serves "
        f"{schedule.rows} rows; larger tiles save more, until registers or shared memory are full"
    )
    if schedule.shares > 1:
        yield from wrapped(
            "dK and dV of so many elements do not fit the registers of a block: different blocks make them"
        )
    if kernel.group > 1 and schedule.instruction is not Instruction.FMA and kernel.is_of_keys:
        yield from wrapped(f"the queries of the {kernel.group} heads that share keys are walked head by head")
    elif kernel.group > 1:
        yield from wrapped(f"the {kernel.group} heads that share keys are rows of one product")
    yield from _mask(attention)


def _mask(attention: AttentionGradient) -> Iterator[str]:
    """Pairs that a mask leaves; nothing where there is none."""
    if attention.causal:
        seen = seen_pairs(attention) / (attention.queries * attention.key_count)
        yield from wrapped(f"the mask leaves {100 * seen:.0f} % of all pairs; tiles that it hides are not walked")


def gradient_lines(
    kernel: AttentionGradientKernel, schedule: GradientSchedule, estimate: Estimate, device: DeviceSpec
) -> Iterator[str]:
    """The kernel of a gradient: its launch, what a step does and holds, its stages."""
    walk, warp_rows, columns = gradient_walks(kernel, schedule), schedule.warp_rows, schedule.columns
    of_step = "all of a step" if columns == 1 else f"{schedule.step // columns} of a step"
    yield (
        f"  {count_text(schedule.blocks(kernel), 'block')} of {count_text(schedule.threads // LANES, 'warp')}, "
        f"{estimate.blocks_per_unit} at a time on a unit; a warp has {warp_rows} rows, and {of_step}"
    )
    if columns > 1:
        yield from wrapped(
            f"{columns} warps have the same rows: each makes its part of the logits and of the results' columns, which "
            "would not fit the registers of one; factors pass between them through shared memory, behind a barrier"
        )
    if schedule.instruction.is_by_groups:
        yield from wrapped(
            f"warp groups of {GROUP_WARPS} warps multiply {GROUP_ROWS} rows together; one more copies what is walked"
        )
    yield from wrapped(
        f"a block walks {walk.mean:.3g} tiles in the mean, {walk.longest:.0f} at most, {walk.edges:.2g} of them masked "
        "element by element"
    )
    logits = schedule.step // columns * warp_rows // LANES
    yield from wrapped(
        f"registers of a thread, about {estimate.registers} of {device.limits.registers_per_thread}: results, "
        f"{logits} logits and as many gradients of them, addresses ({gradient_registers(kernel, schedule)} by count)"
    )
    is_scalar = schedule.instruction is Instruction.FMA
    buffers = "what is walked arrives " + ("during a whole step" if schedule.stages > 1 else "between steps")
    if schedule.instruction.is_by_groups:
        buffers = f"{schedule.stages} buffers of what is walked, which a warp group of its own copies in bulk"
    if is_scalar:
        buffers = "a block's own tiles, those it walks, and the factors of the last products, all in float32"
    yield from wrapped(f"shared memory of a block, {si_text(estimate.shared_bytes, 'B')}: {buffers}")
    unit = "multiply-adds" if is_scalar else str(schedule.instruction)
    yield f"Predicted {time_text(estimate.seconds)}, {time_text(device.launch_overhead_seconds)} of it the launch"
    yield from stage_bars(estimate, MEANINGS)
    yield from _rate(kernel, schedule, estimate, device, unit)


def slope_origin(kernel: SlopeProduct, schedule: GradientSchedule) -> Iterator[str]:
    """Reasons for a program of a product of slopes and keys."""
    yield from wrapped(
        "the kernel of keys and values has written the slopes of the logits: the gradient of queries is one product "
        "that reads them once, in place of three products"
    )
    yield from wrapped(
        f"tiles: {schedule.rows} queries of a head meet every tile of {schedule.step} keys, which serves all of them; "
        "slopes are read turned, straight into fragments"
    )
    yield from _mask(kernel.attention)


def slope_lines(
    kernel: SlopeProduct, schedule: GradientSchedule, estimate: Estimate, device: DeviceSpec
) -> Iterator[str]:
    """The kernel of a product of slopes and keys: its launch, what a step does and holds, its stages."""
    walk, warp_rows = slope_walks(kernel, schedule), schedule.warp_rows
    yield (
        f"  {count_text(schedule.blocks(kernel), 'block')} of {count_text(schedule.warps, 'warp')}, "
        f"{estimate.blocks_per_unit} at a time on a unit; a warp has {warp_rows} rows, and all of a step"
    )
    yield from wrapped(f"a block walks {walk.mean:.3g} tiles in the mean, {walk.longest:.0f} at most")
    yield from wrapped(
        f"registers of a thread, about {estimate.registers} of {device.limits.registers_per_thread}: results, "
        f"fragments of {'slopes' if schedule.instruction.is_by_groups else 'both factors'}, addresses "
        f"({slope_registers(kernel, schedule)} by count)"
    )
    buffers = f"slopes and keys of a step arrive {'during a whole step' if schedule.stages > 1 else 'between steps'}"
    if schedule.instruction.is_by_groups:
        buffers = f"{schedule.stages} buffers of slopes and keys, which a warp group of its own copies in bulk"
    yield from wrapped(f"shared memory of a block, {si_text(estimate.shared_bytes, 'B')}: {buffers}")
    yield f"Predicted {time_text(estimate.seconds)}, {time_text(device.launch_overhead_seconds)} of it the launch"
    yield from stage_bars(estimate, MEANINGS | {"issue": "loads of fragments, copies and masks"})
    yield from _rate(kernel, schedule, estimate, device, str(schedule.instruction))


def _rate(
    kernel: AttentionGradientKernel | SlopeProduct, schedule: GradientSchedule, estimate: Estimate, device: DeviceSpec,
    unit: str,
) -> Iterator[str]:  # fmt: skip
    """The rate that a kernel reaches, and its share of the peak."""
    rates = matrix_rates(kernel, schedule, device)
    peak = rates.peak_flops if rates is not None else device.peak_flops("float32")
    reached = gradient_flops(kernel.attention) / estimate.seconds
    yield from wrapped(f"{si_text(reached, 'FLOP/s')}, {100 * reached / peak:.0f} % of the peak of {unit}")
