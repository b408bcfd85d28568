"""Schedules of attention from files: what is inferred, and what is refused by line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hal.support.errors import InputError
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.attention import AttentionSchedule
from sokoban.schedule.attention_files import (
    SlicedSchedule,
    attention_schema,
    gradient_schema,
    load_attention_schedules,
    load_gradient_schedules,
    load_pair_schedules,
    pair_schema,
)
from sokoban.schedule.attention_gradient import GradientSchedule
from sokoban.schedule.pair import PairSchedule

FRAGMENTS: dict[str, Any] = {"rows": 64, "keys": 64, "warps": 4}
GROUPS = {"rows": 128, "keys": 128, "warps": 8, "instruction": "wgmma_64xNx16"}
MULTIPLY_ADDS = {"rows": 64, "keys": 32, "warps": 4, "instruction": "fma"}


def loaded(path: Path, *schedules: dict[str, Any]) -> list[SlicedSchedule]:
    path.write_text("".join(json.dumps(each) + "\n" for each in schedules))
    return load_attention_schedules(path)


def test_what_is_left_out_is_what_the_instruction_takes(tmp_path: Path) -> None:
    found = [each.schedule for each in loaded(tmp_path / "s", FRAGMENTS, GROUPS, MULTIPLY_ADDS)]
    assert [(each.stages, each.lanes, each.threads) for each in found] == [(1, 4, 128), (2, 4, 384), (1, 8, 128)]
    assert [each.instruction for each in found] == [Instruction.MMA_16X8X16, Instruction.WGMMA, Instruction.FMA]


def test_a_schedule_comes_back_as_it_was_written(tmp_path: Path) -> None:
    schedule = AttentionSchedule(
        rows=128, keys=32, warps=4, stages=2, held=True, instruction=Instruction.MMA_16X8X16
    )  # fmt: skip
    written = schedule.to_json() | {"slices": 3}
    assert loaded(tmp_path / "s", written) == [SlicedSchedule(schedule, 3)]
    assert jsonschema.Draft202012Validator(attention_schema()).is_valid(written)


@pytest.mark.parametrize(
    ("schedule", "refused"),
    [
        (FRAGMENTS | {"rows": 72}, "rows: 72 is not 4 warps with a multiple of 16 rows each; use 128"),
        (FRAGMENTS | {"keys": 24}, "keys: 24 is no multiple of 16; use 32"),
        (FRAGMENTS | {"lanes": 8}, "lanes: 4 threads hold a row of a fragment, not 8; leave it out"),
        (FRAGMENTS | {"threads": 64}, "threads: 4 warps are 128 threads, not 64; leave it out"),
        (FRAGMENTS | {"instruction": "wmma_16x16x16"}, "instruction: there are no such kernels by wmma_16x16x16"),
        (FRAGMENTS | {"key": 3}, "Object contains unknown field `key`"),
        (GROUPS | {"rows": 64}, "rows: 64 are not 64 rows of every 4 of 8 warps; use 128"),
        (GROUPS | {"keys": 512}, "keys: 512 is no multiple of 16 up to 256; use 128"),
        (GROUPS | {"stages": 1}, "stages: wgmma_64xNx16 has 2, 3 and 4; use 2"),
        (GROUPS | {"held": True}, "held: wgmma_64xNx16 reads queries from shared memory; leave it out"),
        (MULTIPLY_ADDS | {"rows": 24}, "rows: 24 is no multiple of the 16 rows that 4 warps have at a time; use 32"),
        (MULTIPLY_ADDS | {"keys": 12}, "keys: 12 is no multiple of 8; give every thread of a row as many"),
        (MULTIPLY_ADDS | {"lanes": 6}, "lanes: 6 is no power of two; use 8 or 16"),
    ],
)
def test_contradictions_name_line_field_and_remedy(tmp_path: Path, schedule: dict[str, Any], refused: str) -> None:
    path = tmp_path / "s.jsonl"
    with pytest.raises(InputError) as error:
        loaded(path, FRAGMENTS, schedule)
    place = f"{path}[2]"
    assert str(error.value).startswith((f"{place}.{refused}", f"{place}: {refused}"))


def test_a_schedule_of_a_gradient_comes_back_as_it_was_written(tmp_path: Path) -> None:
    schedule = GradientSchedule(rows=64, step=32, warps=4, stages=2, columns=2, instruction=Instruction.MMA_16X8X16)
    scalar = GradientSchedule(rows=16, step=32, warps=2, stages=1, instruction=Instruction.FMA, lanes=8)
    path = tmp_path / "s.json"
    groups = GradientSchedule(rows=128, step=48, warps=8, stages=3, shares=2, instruction=Instruction.WGMMA)
    short = {"rows": 16, "step": 32, "warps": 2, "instruction": "fma"}
    path.write_text(json.dumps([schedule.to_json(), short, groups.to_json()]))
    assert load_gradient_schedules(path) == [schedule, scalar, groups]
    schema = jsonschema.Draft202012Validator(gradient_schema())
    assert schema.is_valid(schedule.to_json()) and schema.is_valid(groups.to_json())


@pytest.mark.parametrize(
    ("schedule", "refused"),
    [
        ({"rows": 16, "step": 64, "warps": 1}, "step: 64 rows, but 32 threads that fetch a row's numbers each"),
        ({"rows": 64, "step": 8, "warps": 4}, "step: 8 is no multiple of 16; use 16"),
        (
            {"rows": 64, "step": 32, "warps": 4, "instruction": "wmma_16x16x16"},
            "instruction: there are no such kernels",
        ),
        (
            {"rows": 32, "step": 32, "warps": 4, "instruction": "fma", "shares": 2},
            "shares: blocks by fma make all of their results",
        ),
        (
            {"rows": 64, "step": 32, "warps": 4, "shares": 2},
            "shares: blocks by mma_16x8x16 make all of their results",
        ),
        (
            {"rows": 64, "step": 64, "warps": 4, "instruction": "wgmma_64xNx16", "columns": 2},
            "columns: no warps of wgmma_64xNx16 have the same rows; leave it out",
        ),
        ({"rows": 48, "step": 64, "warps": 6, "columns": 4}, "columns: 4 do not divide 6 warps; use 8 warps"),
        (
            {"rows": 32, "step": 48, "warps": 4, "columns": 2},
            "step: 48 are no fragments of 16 for 2 warps; use 64",
        ),
        ({"rows": 24, "step": 32, "warps": 4, "columns": 2}, "rows: 24 is not"),
        ({"rows": 64, "step": 32, "warps": 8, "instruction": "wgmma_64xNx16"}, "rows: 64 are not 64 rows of every 4"),
    ],
)
def test_contradictions_of_a_gradient_name_the_field(tmp_path: Path, schedule: dict[str, Any], refused: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps(schedule))
    with pytest.raises(InputError) as error:
        load_gradient_schedules(path)
    assert str(error.value).startswith(f"{path}[1].{refused}")


def test_a_schedule_of_a_pair_comes_back_as_it_was_written(tmp_path: Path) -> None:
    schedule = PairSchedule(rows=64, step=32, warps=4, stages=2, held=True, instruction=Instruction.MMA_16X8X16)
    scalar = PairSchedule(rows=16, step=32, warps=2, stages=1, held=False, instruction=Instruction.FMA, lanes=8)
    short = {"rows": 16, "step": 32, "warps": 2, "instruction": "fma"}
    path = tmp_path / "s.json"
    path.write_text(json.dumps([schedule.to_json(), short]))
    assert load_pair_schedules(path) == [schedule, scalar]
    assert jsonschema.Draft202012Validator(pair_schema()).is_valid(schedule.to_json())
    path.write_text(json.dumps([short | {"held": True}]))
    with pytest.raises(InputError, match="held: fma reads rows from shared memory; leave it out"):
        load_pair_schedules(path)
