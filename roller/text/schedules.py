"""Schedules as people read them, by kind of lane."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from roller.text.quantities import short_sizes
from sokoban.schedule.tile import TileSchedule


def gpu_schedule_text(schedule: TileSchedule) -> str:
    """A schedule whose lanes are threads: ``block m=64 n=64 · thread m=4 n=8 · step k=8``."""
    text = f"block {short_sizes(schedule.block)}"
    owner = "warp" if schedule.uses_matrix else "thread"
    tile = short_sizes(tuple(schedule.register_tile.items()))
    text += f" · {owner} {tile}" if tile != "of one" else ""
    if schedule.step and schedule.cached:
        text += f" · step {short_sizes(schedule.step)}"
    if schedule.stages > 1:
        text += f" · {schedule.stages} buffers"
    if schedule.asynchronous:
        text += " · cp.async"
    if schedule.cluster:
        text += " · TMA" + (f" to {schedule.cluster} blocks" if schedule.cluster > 1 else "")
    if schedule.launched:
        text += f" · {schedule.launched} persistent blocks"
    if schedule.raster:
        text += f" · bands of {schedule.raster}"
    if schedule.reduce_threads:
        text += f" · {math.prod(count for _, count in schedule.reduce_threads)} threads per row"
    if schedule.kept_columns:
        text += f" · {schedule.kept_columns} columns kept"
    return text


def packed_text(names: Sequence[str]) -> str:
    """Operands copied into scratch memory; empty where there are none.

    >>> packed_text(["A", "B"])
    'packs A and B'
    """
    return f"packs {' and '.join(names)}" if names else ""


def cpu_schedule_text(schedule: TileSchedule) -> str:
    """A schedule whose lanes are elements of vectors: ``block m=28 n=48 · registers m=7 n=48 · packs A``."""
    texts = [f"block {short_sizes(schedule.block)}"]
    if schedule.reduce_threads:
        lanes = math.prod(count for _, count in schedule.reduce_threads)
        return texts[0] + (f" · {lanes} lanes per row" if lanes > 1 else "")
    texts.append(f"registers {short_sizes(tuple(schedule.register_tile.items()))}")
    if schedule.step:
        texts.append(f"step {short_sizes(schedule.step)}")
    return " · ".join(text for text in (*texts, packed_text(schedule.cached)) if text)


#: Schedules in words, by what the lanes of a device are.
SCHEDULE_TEXTS: Mapping[str, Callable[[TileSchedule], str]] = {
    "thread": gpu_schedule_text,
    "element": cpu_schedule_text,
}
