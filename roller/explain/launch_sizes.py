"""Kernels of an operator one of whose sizes is known at launch, explained: which is for which sizes, and why."""

from __future__ import annotations

from typing import cast

import numpy as np

from roller.sizes import Choice, SizedPrograms, SizeRule
from sokoban.schedule.tile import TileSchedule


def explained(programs: SizedPrograms, rule: SizeRule) -> list[str]:
    """Lines that say which kernel is for which sizes, how far each is from the best, what another would take."""
    size, lines = programs.size, []
    names = [_name(choice) for choice in rule.choices]
    lines.append(
        f"{programs.expr.name} on {programs.device.title}: {len(programs.candidates)} programs of many {size.axis} "
        f"priced at every {size.axis}, {len(names)} chosen"
    )
    lines += [f"kernel {rank}: {name}" for rank, name in enumerate(names, start=1)]
    positions = [programs.candidates.index(choice.candidate) for choice in rule.choices]
    for each in rule.ranges:
        seconds = programs.prices(each.last, positions)
        others = [(float(seconds[row]), row) for row in range(len(names)) if row != each.rank - 1]
        line = f"{size.axis} = {each.first} to {each.last}: kernel {each.rank}, {each.seconds * 1e6:.1f} µs"
        if each.seconds > 1.001 * each.best_seconds:
            line += f", {each.seconds / each.best_seconds - 1:.1%} more than the best of all"
        if others and np.isfinite(min(others)[0]):
            line += f"; kernel {min(others)[1] + 1} would take {min(others)[0] * 1e6:.1f} µs"
        lines.append(line)
    return lines


def _name(choice: Choice) -> str:
    """A kernel in words: its tile, who found it, and for which size."""
    schedule = cast(TileSchedule, choice.priced.main.schedule)
    tile = " ".join(f"{axis}={extent}" for axis, extent in schedule.block)
    found = f"{choice.priced.policy}, for {choice.candidate.found_at}"
    return f"{tile} ({found})" if choice.candidate.only is None else f"{tile} ({found} alone)"
