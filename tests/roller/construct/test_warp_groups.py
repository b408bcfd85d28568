"""Warp groups in construction, ranking, scores and bundles."""

from __future__ import annotations

import json
from typing import Any

import pytest

from codegen.compile.build import build_kernel
from codegen.compile.request import BuildRequest
from codegen.target import Target
from hal.catalog import load_device
from hal.support.errors import InputError
from roller.construct.construct import construct
from roller.construct.warp_groups import WARP_GROUPS_POLICY
from roller.estimate.schedules import score
from roller.explain.page import explain
from roller.inspect.disassembly import nvdisasm_path
from roller.inspect.inspection import inspect_built
from roller.programs import Programs, find_programs
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.language.operators import operator_from_data
from sokoban.schedule.files import schedules_from_json


def product_data(**changes: Any) -> dict[str, Any]:
    return {"op": "matmul", "m": 2048, "n": 2048, "k": 2048, "dtype": "float16", **changes}


def product(**changes: Any) -> KernelForm:
    return kernel_form(operator_from_data(product_data(**changes)))


@pytest.mark.parametrize("board", ["h100", "h200"])
def test_construction_proposes_warp_groups_and_keeps_mma_to_fall_back_on(board: str) -> None:
    instructions = [program.schedule.instruction for program in construct(product(), load_device(board)).programs]
    assert instructions[0] == Instruction.WGMMA
    assert any(each.is_mma for each in instructions)
    assert len(instructions) == 10


@pytest.mark.parametrize("method", ["roller", "sokoban", "both"])
def test_every_method_does(method: str) -> None:
    programs = find_programs(product(), load_device("h200"), 6, method, ("direct",))
    instructions = [program.schedule.instruction for program in programs.ranked(4, spares=2)]
    assert Instruction.WGMMA in instructions[:4]
    assert any(instruction.is_mma for instruction in instructions[:4])


@pytest.mark.parametrize(
    ("board", "changes"), [("a100", {}), ("l4", {}), ("h200", {"k": 2044}), ("h200", {"dtype": "float32"})]
)
def test_others_get_none(board: str, changes: dict[str, Any]) -> None:
    programs = construct(product(**changes), load_device(board)).programs
    assert all(program.schedule.instruction != Instruction.WGMMA for program in programs)


def test_the_page_on_a_program_says_how_it_was_found() -> None:
    text = explain(Programs.of(construct(product(), load_device("h200")), top_k=10))
    assert f"How rank 1 was constructed: {WARP_GROUPS_POLICY}" in text
    assert "registers: one tile of sums a warp group (64 rows by " in text
    assert "swizzled against bank conflicts" in text


def test_a_board_without_them_cannot_run_their_schedules() -> None:
    expr = operator_from_data(product_data())
    schedule = {
        "block": {"m": 128, "n": 256}, "thread": {"m": 16, "n": 256}, "step": {"k": 64}, "instruction": "wgmma_64xNx16",
        "stages": 4, "cluster": 1,
    }  # fmt: skip
    groups = schedules_from_json(json.dumps(schedule).encode(), expr)
    on_h200, on_a100 = (score(groups, load_device(name)) for name in ("h200", "a100"))
    assert on_h200.rows([0])[0].reason is None
    assert on_a100.rows([0])[0].reason == "a100-pcie-40gb has no matrix instruction for this operator"


def test_a_warp_of_a_group_has_sixteen_rows() -> None:
    schedule = {
        "block": {"m": 128, "n": 256},
        "thread": {"m": 32, "n": 256},
        "step": {"k": 64},
        "instruction": "wgmma_64xNx16",
    }
    with pytest.raises(InputError, match="cluster: warp groups multiply tiles that are copied in bulk; give 1, 2, 4"):
        narrow = {**schedule, "thread": {"m": 16, "n": 256}}
        schedules_from_json(json.dumps(narrow).encode(), operator_from_data(product_data()))
    with pytest.raises(InputError, match=r"thread\.m: 32 with wgmma_64xNx16; a warp of a group has 16 rows"):
        schedules_from_json(json.dumps(schedule).encode(), operator_from_data(product_data()))


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.skipif(nvdisasm_path() is None, reason="there is no nvdisasm")
def test_inspection_sees_the_products_and_no_conflicts() -> None:
    form, device = product(), load_device("h200")
    schedule = construct(form, device).programs[0].schedule
    built = build_kernel(
        BuildRequest(
            form=form,
            schedule=schedule,
            entry="product",
            target=Target.of(device),
        )
    )
    found = inspect_built("product", built, form, device, schedule)
    assert set(found.hot.mix.kinds["multiply-adds"]) == {"HGMMA"}
    assert found.model is not None
    assert [(use.tensor, use.conflicts) for use in found.model.banks] == [("A", 0.0), ("B", 0.0)]
    assert found.in_place_of is None
