"""Schedules of attention, of its gradients and of pairs of products that somebody else made, from JSON, checked one by
one.

A file holds them as one of tiles does (:mod:`sokoban.schedule.files`), in the forms that the ``to_json`` of
``AttentionSchedule``, ``GradientSchedule`` and ``PairSchedule`` write; attention has ``slices``, too, where several
blocks share the keys of the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from hal.support.errors import InputError, listed
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.attention import (
    FRAGMENT_LANES,
    FRAGMENT_ROWS,
    GROUP_STAGES,
    GROUP_WARPS,
    LANES,
    MOST_STAGES,
    AttentionSchedule,
    RowTiles,
)
from sokoban.schedule.attention_gradient import GradientSchedule
from sokoban.schedule.columns import MAX_COUNT, decoder_message
from sokoban.schedule.pair import PairSchedule
from sokoban.schedule.texts import ScheduleTexts, file_text
from sokoban.schedule.tile import COPYING_THREADS
from sokoban.schedule.warp_groups import GROUP_ROWS

#: Keys of a step that one instruction of warp groups multiplies at most.
MOST_GROUP_KEYS = 256
#: Warps that have the same rows of a gradient, at most.
MOST_COLUMNS = 32
#: Threads that share a row of multiply-adds where a file does not say.
DEFAULT_LANES = 8

_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
_Warps = Annotated[int, msgspec.Meta(ge=1, le=32)]


class _Common(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Common keys of all kinds of schedule in a file; 0 stands for what was not given."""

    rows: _Count
    warps: _Warps
    stages: Annotated[int, msgspec.Meta(ge=0, le=MOST_STAGES)] = 0
    instruction: Instruction = Instruction.MMA_16X8X16
    lanes: Annotated[int, msgspec.Meta(ge=0, le=LANES)] = 0
    threads: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] = 0

    @property
    def row_lanes(self) -> int:
        """Threads that share a row."""
        return self.lanes or (DEFAULT_LANES if self.instruction is Instruction.FMA else FRAGMENT_LANES)


class _Attention(_Common, frozen=True, kw_only=True):
    keys: _Count
    held: bool = False
    slices: _Count = 1


class _Gradient(_Common, frozen=True, kw_only=True):
    step: _Count
    shares: Annotated[int, msgspec.Meta(ge=1, le=2)] = 1
    columns: Annotated[int, msgspec.Meta(ge=1, le=MOST_COLUMNS)] = 1


class _Pair(_Common, frozen=True, kw_only=True):
    step: _Count
    held: bool = False


_Kind = TypeVar("_Kind", bound=_Common)
_Rows = TypeVar("_Rows", bound=RowTiles)
#: What contradicts itself: the field, the problem, a remedy.
_Problem = tuple[str, str, str]


@dataclass(frozen=True)
class SlicedSchedule:
    """A schedule of attention, and the ``slices`` of the keys that blocks share the same rows of."""

    schedule: AttentionSchedule
    slices: int


def load_attention_schedules(path: str | Path) -> list[SlicedSchedule]:
    """The schedules of a file for an attention operator.

    Raises:
        InputError: the file cannot be read, or something in it contradicts itself; ``field`` has the line, counted from
            1 (``schedules.jsonl[17].keys``), or for a JSON list the position from 0.
    """
    return [_attention(text, place) for text, place in _texts(path, _Attention)]


def load_gradient_schedules(path: str | Path) -> list[GradientSchedule]:
    """The schedules of a file for a gradient of attention.

    Raises:
        InputError: as :func:`load_attention_schedules`.
    """
    return [_gradient(text, place) for text, place in _texts(path, _Gradient)]


def load_pair_schedules(path: str | Path) -> list[PairSchedule]:
    """The schedules of a file for a pair of products.

    Raises:
        InputError: as :func:`load_attention_schedules`.
    """
    return [_pair(text, place) for text, place in _texts(path, _Pair)]


def _texts(path: str | Path, kind: type[_Kind]) -> Iterator[tuple[_Kind, str]]:
    """The schedules of a file as they stand, and the place of each."""
    texts = ScheduleTexts.of(file_text(path), str(path))
    for position, item in enumerate(texts.items):
        place = texts.place(position)
        try:
            text = msgspec.json.decode(item, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            problem, _, where = decoder_message(error).partition(" - at `$")
            raise InputError(place + where.rstrip("`"), problem, "see roller schema schedule") from None
        yield text, place


def _attention(text: _Attention, place: str) -> SlicedSchedule:
    instruction = text.instruction
    stages = {Instruction.FMA: (1,), Instruction.WGMMA: GROUP_STAGES}.get(instruction, (1, 2))
    tiles = _Tiles(text, "keys", text.keys, (Instruction.FMA, Instruction.MMA_16X8X16, Instruction.WGMMA), stages)
    _refuse(tiles.problems(), place)
    _refuse(_only_by_mma(text.held, instruction, "queries"), place)
    return SlicedSchedule(_schedule(AttentionSchedule, text, stages), text.slices)


def _gradient(text: _Gradient, place: str) -> GradientSchedule:
    instruction = text.instruction
    stages = {Instruction.FMA: (1,), Instruction.WGMMA: GROUP_STAGES}.get(instruction, (1, 2))
    _refuse(_column_problems(text), place)
    instructions = (Instruction.FMA, Instruction.MMA_16X8X16, Instruction.WGMMA)
    tiles = _Tiles(text, "step", text.step, instructions, stages, columns=text.columns)
    _refuse(tiles.problems(), place)
    if text.shares > 1 and not instruction.is_by_groups:
        raise InputError(f"{place}.shares", f"blocks by {instruction} make all of their results", "leave it out")
    if text.step > text.warps * LANES and not instruction.is_by_groups:
        problem = f"{text.step} rows, but {text.warps * LANES} threads that fetch a row's numbers each"
        raise InputError(f"{place}.step", problem, f"use {text.warps * LANES} at most")
    return replace(_schedule(GradientSchedule, text, stages), columns=text.columns)


def _column_problems(text: _Gradient) -> Iterator[_Problem]:
    """Contradictions between warps that divide columns and the rest of a schedule."""
    columns = text.columns
    if columns == 1:
        return
    if text.instruction is not Instruction.MMA_16X8X16:
        yield "columns", f"no warps of {text.instruction} have the same rows", "leave it out"
    if text.warps % columns:
        yield (
            "columns",
            f"{columns} do not divide {text.warps} warps",
            f"use {-(-text.warps // columns) * columns} warps",
        )
    if text.step % (FRAGMENT_ROWS * columns):
        rounded = -(-text.step // (FRAGMENT_ROWS * columns)) * FRAGMENT_ROWS * columns
        yield "step", f"{text.step} are no fragments of {FRAGMENT_ROWS} for {columns} warps", f"use {rounded}"


def _pair(text: _Pair, place: str) -> PairSchedule:
    stages = (1,) if text.instruction is Instruction.FMA else (1, 2)
    tiles = _Tiles(text, "step", text.step, (Instruction.FMA, Instruction.MMA_16X8X16), stages)
    _refuse(tiles.problems(), place)
    _refuse(_only_by_mma(text.held, text.instruction, "rows"), place)
    return _schedule(PairSchedule, text, stages)


def _schedule(kind: type[_Rows], text: _Common, stages: tuple[int, ...]) -> _Rows:
    """The schedule of a kind, with the fewest stages where the text leaves them out."""
    fields = {name: getattr(text, name) for name in (kind.STEP, kind.OPTION[0])}
    return kind(
        rows=text.rows, warps=text.warps, stages=text.stages or stages[0], instruction=text.instruction,
        lanes=text.row_lanes, **fields,
    )  # fmt: skip


def _only_by_mma(in_registers: bool, instruction: Instruction, rows: str) -> Iterator[_Problem]:
    if in_registers and instruction is not Instruction.MMA_16X8X16:
        yield "held", f"{instruction} reads {rows} from shared memory", "leave it out"


def _refuse(problems: Iterator[_Problem], place: str) -> None:
    for field, problem, remedy in problems:
        raise InputError(f"{place}.{field}", problem, remedy)


@dataclass(frozen=True)
class _Tiles:
    """Rows of a block and of a step, and what divides them.

    Attributes:
        text: the schedule as it stands in a file.
        step_name, step: what rows of a step are called, and how many there are.
        instructions: those that there are kernels by.
        stages: those that the schedule's instruction has.
        columns: warps that have the same rows.
    """

    text: _Common
    step_name: str
    step: int
    instructions: tuple[Instruction, ...]
    stages: tuple[int, ...]
    columns: int = 1

    def problems(self) -> Iterator[_Problem]:
        """Contradictions in the schedule."""
        text, instruction = self.text, self.text.instruction
        if instruction not in self.instructions:
            remedy = f"use one of {', '.join(map(str, self.instructions))}"
            yield "instruction", f"there are no such kernels by {instruction}", remedy
            return
        yield from {Instruction.FMA: self._of_lanes, Instruction.WGMMA: self._of_groups}.get(
            instruction, self._of_fragments
        )()
        if instruction is not Instruction.FMA and text.row_lanes != FRAGMENT_LANES:
            yield "lanes", f"{FRAGMENT_LANES} threads hold a row of a fragment, not {text.lanes}", "leave it out"
        if text.stages and text.stages not in self.stages:
            yield "stages", f"{instruction} has {listed([str(each) for each in self.stages])}", f"use {self.stages[0]}"
        threads = text.warps * LANES + (COPYING_THREADS if instruction.is_by_groups else 0)
        if text.threads and text.threads != threads:
            yield "threads", f"{text.warps} warps are {threads} threads, not {text.threads}", "leave it out"

    def _of_lanes(self) -> Iterator[_Problem]:
        """Multiply-adds: a grid of threads that all have as many logits."""
        text, lanes = self.text, self.text.row_lanes
        each = text.warps * LANES // lanes
        if lanes & lanes - 1:
            yield "lanes", f"{lanes} is no power of two", "use 8 or 16"
        if text.rows % each:
            problem = f"{text.rows} is no multiple of the {each} rows that {text.warps} warps have at a time"
            yield "rows", problem, f"use {-(-text.rows // each) * each}"
        if self.step % max(4, lanes):
            remedy = "give every thread of a row as many"
            yield self.step_name, f"{self.step} is no multiple of {max(4, lanes)}", remedy

    def _of_groups(self) -> Iterator[_Problem]:
        """Warp groups: whole ones, and keys that one instruction multiplies."""
        rows, warps = self.text.rows, self.text.warps
        if warps % GROUP_WARPS or rows != warps // GROUP_WARPS * GROUP_ROWS:
            problem = f"{rows} are not {GROUP_ROWS} rows of every {GROUP_WARPS} of {warps} warps"
            yield "rows", problem, f"use {max(1, warps // GROUP_WARPS) * GROUP_ROWS}"
        if self.step % FRAGMENT_ROWS or self.step > MOST_GROUP_KEYS:
            problem = f"{self.step} is no multiple of {FRAGMENT_ROWS} up to {MOST_GROUP_KEYS}"
            yield self.step_name, problem, "use 128"

    def _of_fragments(self) -> Iterator[_Problem]:
        """Single warps: whole fragments of rows and of a step."""
        rows, each = self.text.rows, self.text.warps // self.columns * FRAGMENT_ROWS
        if rows % each:
            problem = f"{rows} is not {self.text.warps} warps with a multiple of {FRAGMENT_ROWS} rows each"
            yield "rows", problem, f"use {-(-rows // each) * each}"
        if self.step % FRAGMENT_ROWS:
            rounded = -(-self.step // FRAGMENT_ROWS) * FRAGMENT_ROWS
            yield self.step_name, f"{self.step} is no multiple of {FRAGMENT_ROWS}", f"use {rounded}"


# The schema

#: What the keys mean that all kinds have.
_COMMON_KEYS = {
    "rows": "rows of a block: queries of all heads that share keys, keys of a gradient, rows of a product",
    "warps": "warps of a block, each with as many rows as any other",
    "stages": "buffers of what is walked; the fewest where left out",
    "instruction": "what multiplies",
    "lanes": f"threads that share a row of multiply-adds; {DEFAULT_LANES} where left out",
    "threads": "of a block, as bundles tell: 32 times its warps, and 128 that copy for warp groups",
}
_KEYS = {
    "attention": {
        "keys": "keys of a step",
        "held": "whether queries stay in registers between steps (mma_16x8x16); they do not where left out",
        "slices": "blocks that share the keys of the same rows; 1 where left out",
    },
    "gradient": {
        "step": "rows of the other side at a step",
        "shares": "blocks of warp groups that divide the results of rows: with 2 one makes dK, the other dV",
        "columns": "warps that have the same rows and divide columns (mma_16x8x16); 1 where left out",
    },
    "pair": {
        "step": "columns between the products at a step",
        "held": "whether rows of the first factor stay in registers (mma_16x8x16); they do not where left out",
    },
}


def attention_schema() -> dict[str, Any]:
    """The JSON Schema of one schedule of attention."""
    return _schema("attention", (Instruction.FMA, Instruction.MMA_16X8X16, Instruction.WGMMA), "keys")


def gradient_schema() -> dict[str, Any]:
    """The JSON Schema of one schedule of a gradient of attention."""
    return _schema("gradient", (Instruction.FMA, Instruction.MMA_16X8X16, Instruction.WGMMA), "step")


def pair_schema() -> dict[str, Any]:
    """The JSON Schema of one schedule of a pair of products."""
    return _schema("pair", (Instruction.FMA, Instruction.MMA_16X8X16), "step")


def _schema(kind: str, instructions: tuple[Instruction, ...], step: str) -> dict[str, Any]:
    texts = _COMMON_KEYS | _KEYS[kind]
    most = {
        "warps": 32,
        "stages": {"pair": 2}.get(kind, MOST_STAGES),
        "lanes": LANES,
        "shares": 2,
        "columns": MOST_COLUMNS,
    }
    kinds: dict[str, dict[str, Any]] = {
        name: {"type": "integer", "minimum": 1, "maximum": most.get(name, MAX_COUNT)} for name in texts
    }
    kinds["instruction"] = {"enum": [str(each) for each in instructions], "default": str(Instruction.MMA_16X8X16)}
    kinds |= {"held": {"type": "boolean", "default": False}} if "held" in texts else {}
    properties = {key: {"description": text, **kinds[key]} for key, text in texts.items()}
    required = ["rows", step, "warps"]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
