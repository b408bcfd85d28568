"""Schedules of attention that somebody else made: JSON -> :class:`AttentionSchedule`, checked one by one.

A file holds them as one of tiles does (:mod:`sokoban.schedule.files`), in the form that ``AttentionSchedule.to_json``
writes, with ``slices`` where several blocks share the keys of the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from hal.support.errors import InputError
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.attention import FRAGMENT_LANES, FRAGMENT_ROWS, GROUP_WARPS, LANES, AttentionSchedule
from sokoban.schedule.columns import MAX_COUNT, plain
from sokoban.schedule.texts import ScheduleTexts, file_text
from sokoban.schedule.warp_groups import GROUP_ROWS

#: Keys of a step that one instruction of warp groups multiplies at most.
MOST_GROUP_KEYS = 256
#: What multiplies the tiles of attention.
_INSTRUCTIONS = (Instruction.FMA, Instruction.MMA_16X8X16, Instruction.WGMMA)
#: What the keys mean, for the schema.
_KEYS = {
    "rows": "queries of a block, of all heads that share keys",
    "keys": "keys of a step",
    "warps": "warps of a block, each with as many rows as any other",
    "stages": "buffers of keys and values; 1 where left out",
    "held": "whether queries stay in registers between steps (mma_16x8x16); they do not where left out",
    "instruction": "what multiplies",
    "lanes": "threads that share a row of multiply-adds; 8 where left out",
    "threads": "of a block: 32 times its warps, as bundles tell",
    "slices": "blocks that share the keys of the same rows; 1 where left out",
}

_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]


class _Text(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A schedule as a file has it; 0 stands for what was not given."""

    rows: _Count
    keys: _Count
    warps: Annotated[int, msgspec.Meta(ge=1, le=32)]
    stages: Annotated[int, msgspec.Meta(ge=0, le=2)] = 0
    held: bool = False
    instruction: Instruction = Instruction.MMA_16X8X16
    lanes: Annotated[int, msgspec.Meta(ge=0, le=LANES)] = 0
    threads: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] = 0
    slices: _Count = 1


@dataclass(frozen=True)
class SlicedSchedule:
    """A schedule, and the ``slices`` of the keys that blocks share the same rows of."""

    schedule: AttentionSchedule
    slices: int


def load_attention_schedules(path: str | Path) -> list[SlicedSchedule]:
    """The schedules of a file for an attention operator.

    Raises:
        InputError: the file cannot be read, or something in it contradicts itself; ``field`` has the line, counted from
            1 (``schedules.jsonl[17].keys``), or for a JSON list the position from 0.
    """
    texts = ScheduleTexts.of(file_text(path), str(path))
    return [_schedule(item, texts.place(position)) for position, item in enumerate(texts.items)]


def _schedule(item: bytes, place: str) -> SlicedSchedule:
    """One schedule, with what was left out.

    >>> _schedule(b'{"rows": 64, "keys": 64, "warps": 4}', "here").schedule.threads
    128
    >>> _schedule(b'{"rows": 60, "keys": 64, "warps": 4}', "here")
    Traceback (most recent call last):
    hal.support.errors.InputError: here.rows: 60 is not 4 warps with a multiple of 16 rows each; use 64
    """
    try:
        text = msgspec.json.decode(item, type=_Text)
    except (msgspec.DecodeError, RecursionError) as error:
        problem, _, where = plain(error).partition(" - at `$")
        raise InputError(place + where.rstrip("`"), problem, "see roller schema schedule") from None
    is_scalar = text.instruction is Instruction.FMA
    schedule = AttentionSchedule(
        rows=text.rows, keys=text.keys, warps=text.warps,
        stages=text.stages or (2 if text.instruction is Instruction.WGMMA else 1), held=text.held,
        instruction=text.instruction, lanes=text.lanes or (8 if is_scalar else FRAGMENT_LANES),
    )  # fmt: skip
    for field, problem, remedy in _problems(schedule, text.threads):
        raise InputError(f"{place}.{field}", problem, remedy)
    return SlicedSchedule(schedule, text.slices)


#: What contradicts itself: the field, the problem, a remedy.
_Problem = tuple[str, str, str]


def _problems(schedule: AttentionSchedule, threads: int) -> Iterator[_Problem]:
    """What of a schedule contradicts itself."""
    instruction = schedule.instruction
    if instruction not in _INSTRUCTIONS:
        names = ", ".join(map(str, _INSTRUCTIONS))
        yield "instruction", f"attention has no kernels by {instruction}", f"use one of {names}"
        return
    yield from {Instruction.FMA: _of_lanes, Instruction.WGMMA: _of_groups}.get(instruction, _of_fragments)(schedule)
    if instruction is not Instruction.FMA and schedule.lanes != FRAGMENT_LANES:
        yield "lanes", f"{FRAGMENT_LANES} threads hold a row of a fragment, not {schedule.lanes}", "leave it out"
    stages = {Instruction.FMA: (1,), Instruction.WGMMA: (2,)}.get(instruction, (1, 2))
    if schedule.stages not in stages:
        yield "stages", f"{instruction} has {' or '.join(map(str, stages))} of them", f"use {stages[0]}"
    if schedule.held and instruction is not Instruction.MMA_16X8X16:
        yield "held", f"{instruction} reads queries from shared memory", "leave it out"
    if threads and threads != schedule.threads:
        yield "threads", f"{schedule.warps} warps are {schedule.threads} threads, not {threads}", "leave it out"


def _of_lanes(schedule: AttentionSchedule) -> Iterator[_Problem]:
    """Multiply-adds: a grid of threads that all have as many logits."""
    rows, keys, lanes = schedule.rows, schedule.keys, schedule.lanes
    each = schedule.threads // lanes
    if lanes & lanes - 1:
        yield "lanes", f"{lanes} is no power of two", "use 8 or 16"
    if rows % each:
        problem = f"{rows} is no multiple of the {each} rows that {schedule.warps} warps have at a time"
        yield "rows", problem, f"use {-(-rows // each) * each}"
    if keys % max(4, lanes):
        yield "keys", f"{keys} is no multiple of {max(4, lanes)}", "give every thread of a row as many"


def _of_groups(schedule: AttentionSchedule) -> Iterator[_Problem]:
    """Warp groups: whole ones, and keys that one instruction multiplies."""
    rows, keys, warps = schedule.rows, schedule.keys, schedule.warps
    if warps % GROUP_WARPS or rows != warps // GROUP_WARPS * GROUP_ROWS:
        problem = f"{rows} are not {GROUP_ROWS} rows of every {GROUP_WARPS} of {warps} warps"
        yield "rows", problem, f"use {max(1, warps // GROUP_WARPS) * GROUP_ROWS}"
    if keys % FRAGMENT_ROWS or keys > MOST_GROUP_KEYS:
        yield "keys", f"{keys} is no multiple of {FRAGMENT_ROWS} up to {MOST_GROUP_KEYS}", "use 128"


def _of_fragments(schedule: AttentionSchedule) -> Iterator[_Problem]:
    """Single warps: whole fragments of rows and of keys."""
    rows, keys, each = schedule.rows, schedule.keys, schedule.warps * FRAGMENT_ROWS
    if rows % each:
        problem = f"{rows} is not {schedule.warps} warps with a multiple of {FRAGMENT_ROWS} rows each"
        yield "rows", problem, f"use {-(-rows // each) * each}"
    if keys % FRAGMENT_ROWS:
        most = -(-keys // FRAGMENT_ROWS) * FRAGMENT_ROWS
        yield "keys", f"{keys} is no multiple of {FRAGMENT_ROWS}", f"use {most}"


def attention_schema() -> dict[str, Any]:
    """The JSON Schema of one schedule of attention."""
    kinds: dict[str, dict[str, Any]] = {
        name: {"type": "integer", "minimum": 1, "maximum": MAX_COUNT} for name in ("rows", "keys", "threads", "slices")
    }
    kinds["warps"] = {"type": "integer", "minimum": 1, "maximum": 32}
    kinds["stages"] = {"type": "integer", "minimum": 1, "maximum": 2}
    kinds["held"] = {"type": "boolean", "default": False}
    kinds["instruction"] = {"enum": [str(each) for each in _INSTRUCTIONS], "default": str(Instruction.MMA_16X8X16)}
    kinds["lanes"] = {"type": "integer", "minimum": 1, "maximum": LANES}
    properties = {key: {"description": text, **kinds[key]} for key, text in _KEYS.items()}
    required = ["rows", "keys", "warps"]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
