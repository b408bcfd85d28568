"""Patch transforms told in words."""

from __future__ import annotations

from collections.abc import Iterator

from hal.spec.device import DeviceSpec
from roller.explain.pace import stage_bars
from roller.text.quantities import count_text, time_text
from sokoban.kernel.patches import PatchTransform
from sokoban.model.estimates import Estimate
from sokoban.schedule.patches import PatchSchedule


def patch_lines(
    transform: PatchTransform, schedule: PatchSchedule, estimate: Estimate, device: DeviceSpec
) -> Iterator[str]:
    """A patch transform: its threads, what they hold and do, its stages."""
    yield (
        f"  {count_text(schedule.blocks(transform), 'block')} of {count_text(schedule.threads, 'thread')}, "
        f"{estimate.blocks_per_unit} at a time on a unit; a thread holds {transform.patch}x{transform.patch} numbers, "
        f"about {estimate.registers} registers"
    )
    width = transform.store_width
    stores = f"in pieces of {width}" if width > 1 else "one by one"
    yield (
        f"  it makes {transform.transformed}x{transform.transformed} of them by {transform.multiply_adds} "
        f"multiply-adds and stores those {stores}"
    )
    yield f"Predicted {time_text(estimate.seconds)}, {time_text(device.launch_overhead_seconds)} of it the launch"
    yield from stage_bars(estimate)
