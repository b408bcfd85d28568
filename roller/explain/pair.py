"""Explanation of two products in one kernel: savings, costs, and the work and memory of a step."""

from __future__ import annotations

from collections.abc import Iterator

from hal.spec.device import DeviceSpec
from roller.explain.pace import stage_bars
from roller.text.quantities import count_text, si_text, time_text, wrapped
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.pair import ProductPair
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.kinds.pair import element_instructions, pair_registers, pair_walk
from sokoban.schedule.attention import LANES, padded
from sokoban.schedule.pair import PairSchedule

#: What the stages of a pair of products are.
MEANINGS = {
    "compute": "both products, what multiplies busy with nothing else",
    "issue": "what is done with every element between the products, and what brings fragments",
    "shared": "both factors that are walked out of shared memory, every warp by itself",
    "l2": "tiles of them to every block",
    "dram": "the factors and the result through DRAM",
    "latency": "the units with all that their blocks do, were memory infinitely fast",
    "block_launch": "starting every block",
}


def pair_origin(kernel: ProductPair, schedule: PairSchedule) -> Iterator[str]:
    """Reasons for a program of a pair of products."""
    yield from wrapped(
        f"what lies between the products, {si_text(float(kernel.middle_bytes), 'B')} that a sequence of kernels writes "
        "and reads, passes through registers alone"
    )
    first, second = kernel.first.tensor, kernel.second.tensor
    yield from wrapped(
        f"tiles: {schedule.rows} whole rows of {kernel.own.tensor} and of {kernel.output.name} meet every tile of "
        f"{schedule.step} columns between them, so that a byte of {first} and {second} from L2 serves {schedule.rows} "
        "rows; larger tiles save more, until registers or shared memory are full of rows"
    )


def pair_lines(kernel: ProductPair, schedule: PairSchedule, estimate: Estimate, device: DeviceSpec) -> Iterator[str]:
    """The kernel of a pair of products: its launch, what a step does and holds, its stages."""
    walk, warp_rows = pair_walk(kernel, schedule), schedule.rows // schedule.warps
    yield (
        f"  {count_text(schedule.blocks(kernel), 'block')} of {count_text(schedule.warps, 'warp')}, "
        f"{estimate.blocks_per_unit} at a time on a unit; a warp has {warp_rows} rows, and all columns of a step"
    )
    edge = ", the last one beyond the columns there are" if walk.edges else ""
    yield from wrapped(
        f"a block walks {count_text(int(walk.mean), 'tile')} of columns{edge}; an element between the products takes "
        f"{element_instructions(kernel, schedule):.3g} instructions besides them"
    )
    sums, elements = padded(kernel.width_size) * warp_rows // LANES, schedule.step * warp_rows // LANES
    first_operand = kernel.own.tensor
    rows = (
        f"rows of {first_operand}" if schedule.held else f"fragments of {first_operand} that are read again every step"
    )
    yield from wrapped(
        f"registers of a thread, about {estimate.registers} of {device.limits.registers_per_thread}: {sums} sums, "
        f"{elements} elements between, {rows}, addresses ({pair_registers(kernel, schedule)} by count)"
    )
    is_scalar = schedule.instruction is Instruction.FMA
    first, second = kernel.first.tensor, kernel.second.tensor
    buffers = f"{first} arrives while {second} is used and the other way round"
    if is_scalar:
        buffers = (
            f"rows of {first_operand}, a tile that {first} and {second} take in turns, "
            "the elements between, all in float32"
        )
    elif schedule.stages > 1:
        buffers = f"the next tiles of {first} and {second} arrive during a whole step"
    yield from wrapped(f"shared memory of a block, {si_text(estimate.shared_bytes, 'B')}: {buffers}")
    unit = "multiply-adds" if is_scalar else str(schedule.instruction)
    yield f"Predicted {time_text(estimate.seconds)}, {time_text(device.launch_overhead_seconds)} of it the launch"
    yield from stage_bars(estimate, MEANINGS)
    rates = None if is_scalar else device.matrix_instruction(kernel.dtype)
    peak = rates.peak_flops if rates is not None else device.peak_flops("float32")
    reached = kernel.flops / estimate.seconds
    yield from wrapped(f"{si_text(reached, 'FLOP/s')}, {100 * reached / peak:.0f} % of the peak of {unit}")
