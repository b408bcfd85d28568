"""RATIONAL for kernels of lines on processors: elements one after the other, or a vector of neighbouring lines."""

from __future__ import annotations

import math

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES
from sokoban.kernel.instructions import value_instructions
from sokoban.kernel.line import LineKernel
from sokoban.kernel.regions import read_bytes
from sokoban.model.cpu.stages import CHAIN_CYCLES, CONTENTION, COPYING, DRAIN, SHARED_OVERLAP, STAGES, WAITING
from sokoban.model.cpu.work import FUNCTION_INSTRUCTIONS, TURN_INSTRUCTIONS
from sokoban.model.estimates import Estimate
from sokoban.schedule.patches import LineSchedule, lies_across

#: Instructions by which a value is compared with the best so far, and taken.
PLACE_INSTRUCTIONS = 6.0
#: Of a vector of values that is compared with the best so far and with the one of the rank before, each by five
#: comparisons, six functions of truths and a selection of value and place: NaN and equal values have an order, too.
RANK_INSTRUCTIONS = 2 * (5 + 6 + 2.0)
#: Of a value that is compared with the last of a list: the comparison and the branch past the list.
LIST_INSTRUCTIONS = 2.0
#: Cycles that are lost with a branch that was guessed wrongly, 16 to 20 on most server processors since 2015 (A. Fog,
#: The microarchitecture of Intel, AMD and VIA CPUs). A list is entered and left by one each that no pattern tells.
MISPREDICTED_CYCLES, INSERTION_BRANCHES = 18.0, 2


def _insertions(kernel: LineKernel) -> float:
    """Elements of a line that come into the list of the best so far, in no order: the first ``k``, and of those after
    them element ``n`` by a chance of ``k / n``."""
    return kernel.ranks * (1.0 + math.log(kernel.length / kernel.ranks))


def estimate_cpu_lines(kernel: LineKernel, schedule: LineSchedule, device: DeviceSpec) -> Estimate:
    """The predicted time of a kernel of lines on a processor: the slower of its instructions and of sums that wait for
    themselves, and memory, which share a little of their time."""
    across = lies_across(kernel)
    lanes = max(1, device.teu.lanes * 4 // DTYPE_BYTES[kernel.expr.accumulate]) if across else 1
    is_list = kernel.rank_axis is not None and not across
    steps = kernel.lines * kernel.length * (kernel.ranks if across else 1) / lanes
    width, chain_cycles, lost = device.teu.issue_per_cycle or device.teu.group_size, device.teu.chain_cycles, 0.0
    combining = 1.0 if kernel.is_scan else PLACE_INSTRUCTIONS
    if is_list:
        entering = _insertions(kernel) / kernel.length
        combining = LIST_INSTRUCTIONS + PLACE_INSTRUCTIONS * 2 * kernel.ranks * entering
        lost = MISPREDICTED_CYCLES * INSERTION_BRANCHES * entering
    elif kernel.rank_axis is not None:
        combining, width = RANK_INSTRUCTIONS, device.teu.group_size
    work = value_instructions(kernel.body, None, FUNCTION_INSTRUCTIONS) + combining + len(kernel.reads)
    if kernel.is_scan:
        work += value_instructions(kernel.final.value, None, FUNCTION_INSTRUCTIONS) + 1.0
    cycles = device.clocks.boost_hz * device.unit_count
    issue = steps * ((work + TURN_INSTRUCTIONS) / width + lost) / cycles
    # Elements that pass by a list wait for none before them.
    chain = 0.0 if is_list else steps * (chain_cycles or CHAIN_CYCLES) / cycles
    return memory_bound_estimate(kernel, schedule, device, issue=issue, chain=chain, vectors=lanes)


def memory_bound_estimate(
    kernel: LineKernel, schedule: LineSchedule, device: DeviceSpec, *, issue: float, chain: float = 0.0, vectors: int
) -> Estimate:
    """The time of a kernel of lines whose instructions take ``issue`` seconds of all cores, and whose sums wait for
    themselves ``chain`` seconds; ``vectors`` lanes of each value are in registers."""
    blocks, units = schedule.blocks(kernel), device.unit_count
    uneven = -(-blocks // units) * units / blocks
    moved = kernel.output.size_bytes + sum(read_bytes(kernel.expr, tensor) for tensor in kernel.inputs)
    dram = moved / device.dram.bandwidth_bytes_per_second
    core = max(issue, chain)
    seconds = (core**SHARED_OVERLAP + dram**SHARED_OVERLAP) ** (1.0 / SHARED_OVERLAP) * uneven
    starting = blocks * device.block_launch_seconds
    names = (*STAGES, DRAIN, WAITING, COPYING, CONTENTION, *(layer.name for layer in device.layers[2:]), "block_launch")
    stages = dict.fromkeys(names, 0.0)
    stages |= {"issue": issue, "chain": chain, device.dram.name: dram, "block_launch": starting}
    return Estimate(
        seconds=seconds + starting + device.launch_overhead_seconds,
        bound=max(stages, key=lambda stage: stages[stage]),
        stage_seconds=stages,
        registers=vectors * (2 + len(kernel.reads)),
        shared_bytes=0,
        blocks_per_unit=1,
        wave_count=-(-blocks // units),
    )
