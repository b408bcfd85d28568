"""RATIONAL for kernels that add scattered rows on processors: every block looks at all places, and adds its rows."""

from __future__ import annotations

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES
from sokoban.kernel.instructions import value_instructions
from sokoban.kernel.line import LineKernel
from sokoban.kernel.regions import read_bytes
from sokoban.language.expression import loads
from sokoban.model.cpu.stages import COPYING, SHARED_OVERLAP, STAGES, WAITING
from sokoban.model.cpu.work import FUNCTION_INSTRUCTIONS, TURN_INSTRUCTIONS
from sokoban.model.estimates import Estimate
from sokoban.schedule.patches import LineSchedule

#: Instructions by which a place is loaded, compared with a block's rows, and passed over.
PLACE_INSTRUCTIONS = 4.0


def estimate_cpu_scatter(kernel: LineKernel, schedule: LineSchedule, device: DeviceSpec) -> Estimate:
    """The predicted time of a kernel that adds scattered rows on a processor: its instructions and memory."""
    assert kernel.scatter is not None
    lanes = max(1, device.teu.lanes * 4 // DTYPE_BYTES[kernel.expr.accumulate])
    blocks, units = schedule.blocks(kernel), device.unit_count
    uneven = -(-blocks // units) * units / blocks
    vectors = -(-kernel.columns // lanes)
    adding = value_instructions(kernel.scatter.value, None, FUNCTION_INSTRUCTIONS) + len(loads(kernel.scatter.value))
    storing = value_instructions(kernel.final.value, None, FUNCTION_INSTRUCTIONS) + 3.0
    work = blocks * kernel.length * PLACE_INSTRUCTIONS
    work += kernel.length * vectors * (adding + 3.0 + TURN_INSTRUCTIONS)
    work += kernel.lines * vectors * (storing + TURN_INSTRUCTIONS)
    issue = work / ((device.teu.issue_per_cycle or device.teu.group_size) * device.clocks.boost_hz * units)
    moved = kernel.output.size_bytes + sum(read_bytes(kernel.expr, tensor) for tensor in kernel.inputs)
    dram = moved / device.dram.bandwidth_bytes_per_second
    seconds = (issue**SHARED_OVERLAP + dram**SHARED_OVERLAP) ** (1.0 / SHARED_OVERLAP) * uneven
    starting = blocks * device.block_launch_seconds
    names = (*STAGES, WAITING, COPYING, *(layer.name for layer in device.layers[2:]), "block_launch")
    stages = dict.fromkeys(names, 0.0)
    stages |= {"issue": issue, device.dram.name: dram, "block_launch": starting}
    return Estimate(
        seconds=seconds + starting + device.launch_overhead_seconds,
        bound=max(stages, key=lambda stage: stages[stage]),
        stage_seconds=stages,
        registers=lanes * (2 + len(kernel.reads)),
        shared_bytes=0,
        blocks_per_unit=1,
        wave_count=-(-blocks // units),
    )
