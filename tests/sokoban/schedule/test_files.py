"""Schedules from JSON: what is read, what is inferred, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.accesses import fetch_vector, widest_fetch
from sokoban.schedule.files import (
    load_schedules,
    schedule_from_json,
    schedule_schema,
    schedules_from_json,
    table_from_json,
)
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule
from tests.sokoban.schedules import form_of, schedules

MATMUL = {"op": "matmul", "m": 96, "n": 64, "k": 40}
CONV = {"op": "conv2d", "n": 2, "c": 8, "h": 12, "w": 12, "f": 16, "kh": 3, "kw": 3, "padding": 1}
ROWS = {"op": "softmax", "shape": [16, 64]}
RELU = {"op": "elementwise", "function": "relu", "shape": [4, 8, 6]}
STRIDED = {"op": "conv2d", "n": 2, "c": 8, "h": 12, "w": 12, "f": 16, "kh": 1, "kw": 1, "stride": 2}

FORMS = [
    kernel_form(operator_from_data(data), fuse=fuse) for data in (MATMUL, CONV, RELU, ROWS) for fuse in (True, False)
]


def lines(*items: Any) -> bytes:
    return "".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items).encode()


def matmul(**schedule: Any) -> TileSchedule:
    return schedule_from_json(schedule, form_of(**MATMUL))


def columns(table: ScheduleTable) -> dict[str, Any]:
    """Every column as a list, by field and name."""
    out: dict[str, Any] = {}
    for field in ("block", "thread", "vthreads", "step", "cached", "padding", "vector"):
        out |= {f"{field}.{name}": values.tolist() for name, values in getattr(table, field).items()}
    return out | {field: getattr(table, field).tolist() for field in ("reduce_threads", "warp_tile", "unroll")}


# What was written is read


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.expr.name}-{len(form.sizes)}")
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_a_schedule_writes_is_read_back(form: KernelForm, data: st.DataObject) -> None:
    schedule = data.draw(schedules(form))
    assert schedule_from_json(schedule.to_json(), form).to_json() == schedule.to_json()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_file_is_the_table_of_its_schedules(data: st.DataObject) -> None:
    form = form_of(**CONV)
    many = data.draw(st.lists(schedules(form), min_size=1, max_size=6))
    table = table_from_json(lines(*(schedule.to_json() for schedule in many)), form)
    assert columns(table) == columns(ScheduleTable.of(form, many))


@pytest.mark.parametrize("instruction", ("fma", "wmma_16x16x16"))
def test_instruction_unroll_and_threads_along_the_reduction_are_read(instruction: str) -> None:
    form = form_of(**MATMUL, dtype="float16", accumulate="float32")
    given = {
        "block": {"m": 32, "n": 32},
        "thread": {"m": 16, "n": 16},
        "unroll": 0,
        "reduce_threads": {"k": 4},
        "step": {"k": 16},
    }
    schedule = schedule_from_json({**given, "instruction": instruction}, form)
    assert (schedule.instruction, schedule.unroll, schedule.reduce_threads) == (instruction, 0, (("k", 4),))
    table = table_from_json(lines({**given, "instruction": instruction}), form)
    assert (table.warp_tile[0], table.reduce_threads[0], table.unroll[0]) == (instruction != "fma", 4, 0)


# What was left out is inferred


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"block": 48}, (48, 1, 48, 1)),
        ({"block": 48, "thread": 4}, (48, 4, 12, 1)),
        ({"block": 48, "threads": 12}, (48, 4, 12, 1)),
        ({"block": 48, "threads": 12, "thread": 2}, (48, 2, 12, 2)),
        ({"block": 48, "threads": 12, "vthreads": 2}, (48, 2, 12, 2)),
        ({"block": 48, "vthreads": 2}, (48, 1, 24, 2)),
        ({"block": 48, "vthreads": 2, "thread": 3}, (48, 3, 8, 2)),
        ({"threads": 8, "thread": 3, "vthreads": 2}, (48, 3, 8, 2)),
        ({"threads": 8}, (8, 1, 8, 1)),
        ({"thread": 8}, (8, 8, 1, 1)),
        ({}, (1, 1, 1, 1)),
    ],
)
def test_block_threads_and_thread_follow_from_each_other(given: dict[str, int], expected: tuple[int, ...]) -> None:
    schedule = matmul(**{key: {"m": size} for key, size in given.items()})
    found = (schedule.block_of["m"], schedule.thread_of["m"], schedule.threads_of["m"], schedule.vthreads_of["m"])
    assert found == expected
    assert schedule.block_of["n"] == 1


def test_inputs_are_staged_where_there_is_a_step_and_something_to_reuse() -> None:
    block = {"block": {"m": 32, "n": 32}}
    assert matmul(**block, step={"k": 8}).cached == ("A", "B")
    assert matmul(**block).cached == ()
    assert matmul(**block, step={"k": 8}, cached=[]).cached == ()
    assert matmul(**block, step={"k": 8}, cached=["B"]).cached == ("B",)
    sums = form_of(op="reduce", function="sum", shape=[8, 64], axes=[1])
    assert schedule_from_json({"step": {"i1": 8}}, sums).cached == ()


def test_a_reduction_without_a_step_is_walked_at_once() -> None:
    form = form_of(**CONV)
    table = table_from_json(lines({"step": {"c": 4}}, {}), form)
    assert {axis: values.tolist() for axis, values in table.step.items()} == {"c": [4, 8], "kh": [3, 3], "kw": [3, 3]}


def test_vectors_are_left_to_the_code_generator_unless_said() -> None:
    block = {"block": {"m": 32, "n": 32}, "step": {"k": 8}}
    assert matmul(**block).vector == ()
    assert matmul(**block, vector={"A": 2}).vector == (("A", 2),)
    table = table_from_json(lines(block, {**block, "vector": {"A": 2, "C": 1}}), form_of(**MATMUL))
    assert {name: column.tolist() for name, column in table.vector.items()} == {"A": [0, 2], "B": [0, 0], "C": [0, 1]}


@settings(max_examples=30, deadline=None)
@given(data=st.data(), padding=st.integers(0, 9))
def test_the_widest_vectors_are_those_of_the_code_generator(data: st.DataObject, padding: int) -> None:
    form = data.draw(st.sampled_from([form for form in FORMS if form.kind == "tile"]))
    schedule = data.draw(schedules(form))
    table = ScheduleTable.of(form, [schedule])
    for load in form.body_loads:
        found = widest_fetch(form, load, {**table.block, **table.step}, np.array([padding]))
        assert found.tolist() == [fetch_vector(form, schedule, load, padding)]


# Axes: the operator's own, or fused


def test_the_operators_own_axes_are_the_first_choice() -> None:
    (group,) = schedules_from_json(lines({"block": {"i2": 6}}), operator_from_data(RELU))
    assert (tuple(group.table.block), group.positions.tolist()) == (("i0", "i1", "i2"), [0])


def test_schedules_that_name_fused_axes_are_read_over_those() -> None:
    text = lines({"block": {"i0.i1.i2": 64}}, {"block": {"i2": 6}}, {"block": {"i0.i1.i2": 32}})
    own, fused = schedules_from_json(text, operator_from_data(RELU))
    assert (own.positions.tolist(), fused.positions.tolist()) == ([1], [0, 2])
    assert fused.table.block["i0.i1.i2"].tolist() == [64, 32]


def test_axes_of_size_one_count_where_they_are_named() -> None:
    text = lines({"block": {"f": 4}, "step": {"c": 4}}, {"block": {"f": 4}, "step": {"c": 4, "kh": 1}})
    own, fused = schedules_from_json(text, operator_from_data(STRIDED))
    assert (tuple(own.table.step), own.positions.tolist()) == (("c", "kh", "kw"), [1])
    assert (tuple(fused.table.step), fused.positions.tolist()) == (("c",), [0])


def test_mixing_fused_and_own_axes_names_the_axis_that_is_gone() -> None:
    with pytest.raises(InputError) as caught:
        schedules_from_json(lines({"block": {"i0.i1.i2": 64, "i2": 2}}), operator_from_data(RELU), "s.jsonl")
    assert str(caught.value) == "s.jsonl[1].block.i2: no spatial axis 'i2'; spatial axes: i0.i1.i2"


# Files


def test_lines_lists_and_single_objects_are_read(tmp_path: Path) -> None:
    expr = operator_from_data(MATMUL)
    one, two = {"block": {"m": 8}}, {"block": {"m": 16}}
    texts = {
        "lines": b"\n" + lines(one, "  ", two),
        "windows": lines(one, two).replace(b"\n", b"\r\n"),
        "list": json.dumps([one, two], indent=1).encode(),
        "bom": b"\xef\xbb\xbf" + lines(one, two),
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
        (group,) = load_schedules(tmp_path / name, expr)
        assert group.table.block["m"].tolist() == [8, 16], name
    (tmp_path / "single").write_text(json.dumps(one, indent=2))
    (group,) = load_schedules(tmp_path / "single", expr)
    assert group.table.block["m"].tolist() == [8]


@pytest.mark.parametrize("text", (b"", b"\n \n", b"[]"))
def test_a_file_without_schedules_is_refused(text: bytes) -> None:
    with pytest.raises(InputError, match="schedules: holds no schedules; write one a line"):
        schedules_from_json(text, operator_from_data(MATMUL))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file or directory"):
        load_schedules(tmp_path / "none.jsonl", operator_from_data(MATMUL))


# What is refused


GOOD = {"block": {"m": 32, "n": 32}, "thread": {"m": 4, "n": 4}, "step": {"k": 8}}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block": {"m": 64}, "thread": {"m": 7}}, "block.m: 64 is not a multiple of thread 7; leave one of them out"),
        (
            {"block": {"m": 64}, "thread": {"m": 8}, "threads": {"m": 2}, "vthreads": {"m": 2}},
            "block.m: 64 is not vthreads 2 x threads 2 x thread 8; leave one of them out and it is inferred",
        ),
        ({"block": {"q": 64}}, "block.q: no spatial axis 'q'; spatial axes: m and n"),
        ({"step": {"m": 64}}, "step.m: 'm' is no reduction axis of matmul_96x64x40; reduction axes: k"),
        ({"vector": {"Z": 4}}, "vector.Z: no tensor 'Z'; tensors: A, B, C_acc and C"),
        ({"cached": ["A", "Q"]}, "cached[1]: there is no input 'Q'; can be staged: A and B"),
        ({"cached": "A"}, "cached: expected a list of tensors, got a string"),
        ({"blok": {}}, ": unknown key 'blok'; did you mean 'block'? known: block, thread, threads, vthreads, inner"),
        ({"block": {"m": "64"}}, "block.m: expected an integer, got a string"),
        ({"block": {"m": True}}, "block.m: expected an integer, got a boolean"),
        ({"block": {"m": 0}}, "block.m: expected an integer >= 1"),
        ({"block": {"m": 2**70}}, "block.m: expected an integer"),
        ({"block": 64}, "block: expected an object, got an integer"),
        ({"block": {"m": 2**28, "n": 2**28}}, "block: 7.21e+16 elements; no block has more than 268435456"),
        (
            {"thread": {"m": 2**20, "n": 2**20}, "threads": {"m": 2**20, "n": 2**20}, "vthreads": {"m": 2**20}},
            "block: 1.27e+30 elements; no block has more than 268435456",
        ),
        ({"reduce_threads": {"k": 2**21}}, "reduce_threads.k: expected an integer <= 1048576"),
        ({"unroll": -1}, "unroll: expected an integer >= 0"),
        (
            {"instruction": "wmma"},
            'instruction: unknown instruction \'wmma\'; use "fma", "wmma_16x16x16" or "mma_16x8x16"',
        ),
        (
            {"instruction": "wmma_16x16x16"},
            'instruction: matmul_96x64x40 is no product of matrices that an instruction multiplies; write "fma"',
        ),
        ([], ": expected an object, got a list; a schedule is"),
        ('{"block": {"m": 64}', ": broken JSON: Input data was truncated; write one schedule a line"),
        ('{"block": }', ": broken JSON: "),
    ],
)
def test_a_mistake_is_named_with_its_line(wrong: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        schedules_from_json(lines(GOOD, "", wrong, GOOD), operator_from_data(MATMUL), "s.jsonl")
    joint = "" if message.startswith(":") else "."
    assert str(caught.value).startswith(f"s.jsonl[3]{joint}{message}")


def test_what_is_read_at_places_is_never_staged() -> None:
    data = {
        "expr": "Y[t,d] = sum(k, E[I[t,k], d] * W[t,k])", "sizes": {"t": 64, "d": 64, "k": 8}, "shapes": {"E": [9, 64]},
    }  # fmt: skip
    for name in ("E", "I"):
        with pytest.raises(InputError) as caught:
            schedule_from_json({"block": {"t": 8}, "cached": [name]}, kernel_form(operator_from_data(data)))
        role = "is read at places that are read" if name == "E" else "says where others are read"
        assert str(caught.value) == f"cached[0]: {name} {role}, and lies in no tile; can be staged: W"
    by_default = schedule_from_json({"block": {"t": 8}, "step": {"k": 8}}, kernel_form(operator_from_data(data)))
    assert by_default.cached == ("W",)


def test_a_position_in_a_list_counts_from_zero() -> None:
    with pytest.raises(InputError) as caught:
        schedules_from_json(json.dumps([GOOD, {"block": {"q": 1}}]).encode(), operator_from_data(MATMUL), "s.json")
    assert caught.value.field == "s.json[1].block.q"


@pytest.mark.parametrize(("key", "axis"), (("thread", "m"), ("thread", "n"), ("step", "k")))
def test_matrix_instructions_take_whole_fragments(key: str, axis: str) -> None:
    form = form_of(**MATMUL, dtype="float16", accumulate="float32")
    given = {"thread": {"m": 16, "n": 32}, "step": {"k": 16}, "instruction": "wmma_16x16x16"}
    assert schedule_from_json(given, form).threads_per_block == 32
    with pytest.raises(InputError) as caught:
        schedule_from_json({**given, key: {**given[key], axis: 24}}, form)  # type: ignore[dict-item]
    assert str(caught.value) == f"{key}.{axis}: 24 is not a multiple of 16; a matrix instruction takes fragments of 16"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"block": {"m": 64}, "thread": {"m": 7}}, {"blok": 1}),
        ({"cached": ["Q"]}, {"block": {"n": 64}, "thread": {"n": 7}}),
        ({"blok": 1}, {"block": {"m": 64}, "thread": {"m": 7}}),
    ],
)
def test_of_several_mistakes_the_first_in_the_file_is_named(first: Any, second: Any) -> None:
    with pytest.raises(InputError) as caught:
        schedules_from_json(lines(GOOD, first, second), operator_from_data(MATMUL), "s.jsonl")
    assert caught.value.field.startswith("s.jsonl[2]")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"block": {"q": 1}}, "block.q"),
        ({"block": {"m": "x"}}, "block.m"),
        ({"cached": ["Q"]}, "cached[0]"),
        ({"block": {"m": 3}, "thread": {"m": 2}}, "block.m"),
    ],
)
def test_the_field_of_a_single_schedule_is_the_path_inside_it(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        matmul(**wrong)
    assert caught.value.field == field


@pytest.mark.parametrize("data", (None, 3, [], "x"))
def test_what_is_no_object_is_no_schedule(data: object) -> None:
    with pytest.raises(InputError, match="expected an object"):
        schedule_from_json(data, form_of(**MATMUL))


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(InputError, match=r"s.jsonl\[1\]"):
        schedules_from_json(b'{"block": {"\xff": 1}}', operator_from_data(MATMUL), "s.jsonl")


# The schema


def test_the_schema_accepts_what_schedules_write_and_refuses_unknown_keys() -> None:
    schema = schedule_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    written = matmul(**GOOD).to_json()
    assert validator.is_valid(written) and validator.is_valid([written, {}])
    assert not validator.is_valid({"blok": {}}) and not validator.is_valid({"block": {"m": 0}})
    assert set(schema["$defs"]["Schedule"]["properties"]) == {
        *written,
        "inner_thread",
        "inner_step",
        "address",
        "pieces",
        "waits",
        "reads",
        "stages",
        "turned",
        "asynchronous",
        "raster",
        "cluster",
        "launched",
        "kept_columns",
    }


def test_copies_past_the_registers_and_bands_come_back_as_they_were_written() -> None:
    schedule = matmul(**GOOD).with_(stages=3, asynchronous=True, raster=8, turned=("A",))
    assert schedule_from_json(schedule.to_json(), form_of(**MATMUL)) == schedule


def test_bulk_copies_are_for_warp_groups_and_whole_clusters() -> None:
    form = form_of(**{**MATMUL, "m": 256, "n": 256, "k": 256, "dtype": "float16"})
    axes = {"block": {"m": 128, "n": 256}, "thread": {"m": 16, "n": 256}, "step": {"k": 64}}
    written = {**axes, "instruction": "wgmma_64xNx16", "stages": 4, "cluster": 2, "launched": 132}
    schedule = schedule_from_json(written, form)
    assert (schedule.cluster, schedule.launched, schedule.threads_per_block) == (2, 132, 384)
    assert ScheduleTable.of(form, [schedule]).threads_per_block.tolist() == [384]
    assert schedule_from_json(schedule.to_json(), form) == schedule
    with pytest.raises(InputError, match="133 blocks in clusters of 2"):
        schedule_from_json({**written, "launched": 133}, form)
    with pytest.raises(InputError, match="cluster: 3 blocks"):
        schedule_from_json({**written, "cluster": 3}, form)
    with pytest.raises(InputError, match="warp groups alone multiply tiles that are copied in bulk"):
        schedule_from_json({**written, "instruction": "fma", "thread": {"m": 16, "n": 16}, "launched": 0}, form)
    assert not {"asynchronous", "raster"} & matmul(**GOOD).to_json().keys()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"asynchronous": True}, "asynchronous"),
        ({"raster": 4, "cached": ["A"]}, "raster"),
        ({"raster": -1}, "raster"),
    ],
)
def test_bands_and_copies_past_the_registers_need_a_pipeline_of_staged_tiles(change: Any, field: str) -> None:
    with pytest.raises(InputError) as raised:
        table_from_json(lines({**matmul(**GOOD).to_json(), **change}), form_of(**MATMUL))
    assert field in raised.value.field


def test_inner_loops_are_parts_of_thread_and_step() -> None:
    block = {"block": {"m": 32, "n": 32}, "thread": {"m": 8, "n": 4}, "step": {"k": 8}}
    table = table_from_json(
        lines({**block, "inner_thread": {"m": 2}, "inner_step": {"k": 4}}, block), form_of(**MATMUL)
    )
    assert {axis: values.tolist() for axis, values in table.inner_thread.items()} == {"m": [2, 8], "n": [4, 4]}
    assert table.inner_step["k"].tolist() == [4, 8]
    with pytest.raises(InputError, match=r"inner_thread\.m: thread 8 is not a multiple of 3"):
        table_from_json(lines({**block, "inner_thread": {"m": 3}}), form_of(**MATMUL))
