"""RATIONAL for kernels that add scattered rows on processors: every block looks at all places, and adds its rows."""

from __future__ import annotations

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES
from sokoban.kernel.instructions import value_instructions
from sokoban.kernel.line import LineKernel
from sokoban.language.expression import loads
from sokoban.model.cpu.lines import memory_bound_estimate
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
    vectors = -(-kernel.columns // lanes)
    adding = value_instructions(kernel.scatter.value, None, FUNCTION_INSTRUCTIONS) + len(loads(kernel.scatter.value))
    storing = value_instructions(kernel.final.value, None, FUNCTION_INSTRUCTIONS) + 3.0
    work = blocks * kernel.length * PLACE_INSTRUCTIONS
    work += kernel.length * vectors * (adding + 3.0 + TURN_INSTRUCTIONS)
    work += kernel.lines * vectors * (storing + TURN_INSTRUCTIONS)
    issue = work / ((device.teu.issue_per_cycle or device.teu.group_size) * device.clocks.boost_hz * units)
    return memory_bound_estimate(kernel, schedule, device, issue=issue, vectors=lanes)
