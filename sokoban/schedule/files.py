"""Schedules that somebody else made: JSON -> :class:`ScheduleTable`, many at a time.

A file holds one schedule a line, a list of them, or a single one, in the form that ``TileSchedule.to_json`` writes.
Whatever is left out is inferred (:class:`sokoban.schedule.columns.ScheduleReader` says how), so that
``{"block": {"m": 128, "n": 64}}`` is a schedule too. Axes are those of the operator as the user wrote it; a schedule
that names fused axes (``n.c``), as the bundles of ``roller compile`` do, is read against the fused form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.language.expression import TensorExpr
from sokoban.schedule.attention_files import attention_schema, gradient_schema, pair_schema
from sokoban.schedule.bulk_copies import CLUSTERS
from sokoban.schedule.columns import MAX_COUNT, MAX_STAGES, MAX_TILE_ELEMENTS, REDUCED, SPATIAL, ScheduleReader
from sokoban.schedule.table import Bools, Ints, ScheduleTable
from sokoban.schedule.texts import ScheduleTexts, file_text
from sokoban.schedule.tile import TileSchedule, sizes

#: What the keys mean, for the schema.
_KEYS: Mapping[str, str] = {
    "block": "elements per block, by spatial axis",
    "thread": "adjacent elements per thread, by spatial axis",
    "threads": "threads along a spatial axis; block = vthreads * threads * thread",
    "vthreads": "strided copies per thread, by spatial axis",
    "step": "elements per step, by reduction axis; the whole axis where left out",
    "reduce_threads": "threads that share a reduction axis",
    "inner_thread": "the part of `thread` below the inner loops over the reduction; all of it where left out",
    "inner_step": "the part of `step` in the inner loops over the reduction; all of it where left out",
    "cached": "tensors staged in shared memory; all inputs where left out, a step is given and blocks reuse data",
    "vector": "elements per access when a tensor is fetched; the widest legal ones where left out",
    "padding": "elements added to the innermost dimension of a staged tile, by tensor",
    "unroll": "largest number of inner-loop iterations to unroll; 0 leaves it to the compiler",
    "instruction": "what computes: scalar multiply-adds, or Tensor Cores with thread tiles that belong to warps",
    "stages": "buffers of every staged tile; with 2 or more the next steps are fetched while one is computed on",
    "turned": "staged tensors whose tile is stored with the last dimension that outputs walk innermost",
    "asynchronous": "with several stages of multiply-adds: copy past the registers (cp.async, sm_80 and later)",
    "raster": "blocks next to each other in a band that is launched before the next one; 0 for no bands",
    "cluster": "blocks that get a tile in common by one read, copied in bulk (sm_90a); 0 where threads copy",
    "launched": "blocks of the launch, each computing one tile after another; 0 for a block per tile",
    "kept_columns": "columns of a row that its threads keep in shared memory for later statements",
    "reads": "widest read of an operand in elements, where a kernel's text says so; left to the compiler otherwise",
    "pieces": "adjacent elements of a staged tile that a thread copies, by accesses of `vector`",
    "waits": "times that a thread waits for its copies of a step, where a kernel's loops say so",
    "address": "integer instructions of every read in place, for its address or guard; none where left out",
}


@dataclass(frozen=True, eq=False)
class ScheduleGroup:
    """Schedules of one file that are over the same axes.

    Attributes:
        positions: which of the file's schedules these are, counted from 0 without blank lines.
        table: the schedules.
    """

    positions: Ints
    table: ScheduleTable


# Files


def load_schedules(path: str | Path, expr: TensorExpr) -> list[ScheduleGroup]:
    """The schedules of a file for one operator.

    Raises:
        InputError: the file cannot be read, or something in it cannot be used; ``field`` has the line, counted from 1
            (``schedules.jsonl[17].block.f``), or for a JSON list the position from 0.
    """
    return schedules_from_json(file_text(path), expr, str(path))


def schedules_from_json(text: bytes, expr: TensorExpr, source_name: str = "schedules") -> list[ScheduleGroup]:
    """JSON text -> tables over the operator's own axes, and over its fused ones for the schedules that name those.

    Raises:
        InputError: as :func:`load_schedules`.
    """
    texts = ScheduleTexts.of(text, source_name)
    unfused, fused = kernel_form(expr, fuse=False), kernel_form(expr)
    names_fused = _over_fused(text, texts.items, unfused, fused)
    groups = []
    for form, mask in ((unfused, ~names_fused), (fused, names_fused)):
        positions = np.flatnonzero(mask)
        if len(positions):
            groups.append(ScheduleGroup(positions, _table(texts.picked(positions), form)))
    return groups


def _over_fused(text: bytes, items: Sequence[bytes], unfused: KernelForm, fused: KernelForm) -> Bools:
    """Which schedules mean the fused axes: those that name one.

    Where fusing only dropped axes of size 1, also those that name none of them. A 1x1 window in steps of two then
    fetches every second element; over its own axes it fetches whole lines, since a window might have needed them.
    """
    added = [f'"{name}"'.encode() for name in fused.sizes if name not in unfused.sizes]
    dropped = [f'"{name}"'.encode() for name in unfused.sizes if name not in fused.sizes]
    if added:
        if not any(word in text for word in added):
            return np.zeros(len(items), dtype=np.bool_)
        return np.array([any(word in item for word in added) for item in items], dtype=np.bool_)
    if not dropped:
        return np.ones(len(items), dtype=np.bool_)
    return np.array([not any(word in item for word in dropped) for item in items], dtype=np.bool_)


def table_from_json(text: bytes, form: KernelForm, source_name: str = "schedules") -> ScheduleTable:
    """JSON text -> the table of its schedules, all over the axes of ``form``.

    Raises:
        InputError: as :func:`load_schedules`.
    """
    return _table(ScheduleTexts.of(text, source_name), form)


def schedule_from_json(data: object, form: KernelForm) -> TileSchedule:
    """One decoded JSON object -> a schedule over the axes of ``form``; the inverse of ``TileSchedule.to_json``.

    Raises:
        InputError: ``field`` is the path inside the object (``block.f``).
    """
    reader = ScheduleReader(form, [msgspec.json.encode(data)], lambda position: "")
    table, candidate = reader.table(), reader.candidates[0]
    assert isinstance(data, dict)
    given = {key: value for key, value in data.items() if isinstance(value, dict)}
    staged = tuple(tensor for tensor, values in table.cached.items() if values[0])
    vector = sizes(given.get("vector", {})) if candidate.vector is not None else ()
    return TileSchedule(
        block=tuple((axis, int(values[0])) for axis, values in table.block.items()),
        thread=tuple((axis, int(values[0])) for axis, values in table.thread.items()),
        vthreads=tuple((axis, int(values[0])) for axis, values in table.vthreads.items()),
        step=tuple((axis, int(values[0])) for axis, values in table.step.items()) if given.get("step") else (),
        reduce_threads=sizes(given.get("reduce_threads", {})),
        cached=staged if candidate.cached is None else candidate.cached,
        vector=vector,
        padding=sizes(given.get("padding", {})),
        unroll=candidate.unroll,
        instruction=candidate.instruction,
        stages=candidate.stages,
        turned=candidate.turned,
        asynchronous=candidate.asynchronous,
        raster=candidate.raster,
        cluster=candidate.cluster,
        launched=candidate.launched,
        kept_columns=candidate.kept_columns,
    )


def _table(texts: ScheduleTexts, form: KernelForm) -> ScheduleTable:
    """The schedules of texts over the axes of ``form``."""
    return ScheduleReader(form, texts.items, texts.place).table()


def schedule_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of one schedule, of a list of them, and of a line of a JSON Lines file."""

    def by_name(least: int, most: int = MAX_TILE_ELEMENTS) -> dict[str, Any]:
        number = {"type": "integer", "minimum": least, "maximum": most}
        return {"type": "object", "additionalProperties": number}

    kinds = {key: by_name(1, MAX_COUNT) for key in (*SPATIAL, *REDUCED)}
    kinds["block"] = kinds["step"] = by_name(1)
    kinds["cached"] = {"type": "array", "items": {"type": "string"}}
    kinds["vector"] = by_name(1, MAX_COUNT)
    kinds["padding"] = by_name(0)
    kinds |= dict.fromkeys(("reads", "pieces", "waits", "address"), by_name(1, MAX_COUNT))
    kinds["unroll"] = {"type": "integer", "minimum": 0, "maximum": MAX_TILE_ELEMENTS, "default": TileSchedule.unroll}
    kinds["instruction"] = {"enum": [str(each) for each in Instruction], "default": str(TileSchedule.instruction)}
    kinds["turned"] = {"type": "array", "items": {"type": "string"}}
    kinds["asynchronous"] = {"type": "boolean", "default": TileSchedule.asynchronous}
    kinds["raster"] = {"type": "integer", "minimum": 0, "maximum": MAX_COUNT, "default": TileSchedule.raster}
    kinds["cluster"] = {"type": "integer", "minimum": 0, "maximum": max(CLUSTERS), "default": TileSchedule.cluster}
    kinds["launched"] = {"type": "integer", "minimum": 0, "maximum": MAX_COUNT, "default": TileSchedule.launched}
    kinds["kept_columns"] = {
        "type": "integer", "minimum": 0, "maximum": MAX_COUNT, "default": TileSchedule.kept_columns
    }  # fmt: skip
    kinds["stages"] = {"type": "integer", "minimum": 1, "maximum": MAX_STAGES, "default": TileSchedule.stages}
    properties = {key: {"description": text, **kinds[key]} for key, text in _KEYS.items()}
    kinds_of_schedules = ("Schedule", "AttentionSchedule", "GradientSchedule", "PairSchedule")
    item = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in kinds_of_schedules]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Schedules",
        "anyOf": [item, {"type": "array", "items": item, "minItems": 1}],
        "$defs": {
            "Schedule": {"type": "object", "properties": properties, "additionalProperties": False},
            "AttentionSchedule": attention_schema(),
            "GradientSchedule": gradient_schema(),
            "PairSchedule": pair_schema(),
        },
    }
