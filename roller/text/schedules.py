"""Schedules as people read them, by kind of lane."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from roller.text.quantities import (
    short_sizes,
)
from sokoban.schedule.tile import TileSchedule


def _thread_schedule_text(schedule: TileSchedule) -> str:
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
    if schedule.raster:
        text += f" · bands of {schedule.raster}"
    if schedule.reduce_threads:
        text += f" · {math.prod(count for _, count in schedule.reduce_threads)} threads per row"
    return text


def packed_text(names: Sequence[str]) -> str:
    """``packs A and B``; empty where nothing is copied."""
    return f"packs {' and '.join(names)}" if names else ""


def vector_schedule_text(schedule: TileSchedule) -> str:
    """``block m=28 n=48 · registers m=7 n=48 · step k=256 · packs A``"""
    texts = [f"block {short_sizes(schedule.block)}"]
    if schedule.reduce_threads:
        lanes = math.prod(count for _, count in schedule.reduce_threads)
        return texts[0] + (f" · {lanes} lanes per row" if lanes > 1 else "")
    texts.append(f"registers {short_sizes(tuple(schedule.register_tile.items()))}")
    if schedule.step:
        texts.append(f"step {short_sizes(schedule.step)}")
    return " · ".join(text for text in (*texts, packed_text(schedule.cached)) if text)


_SCHEDULE_TEXTS: Mapping[str, Callable[[TileSchedule], str]] = {
    "thread": _thread_schedule_text,
    "element": vector_schedule_text,
}
