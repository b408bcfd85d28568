"""A request is lowered by the one lowering that takes it, and TVM's errors come out as ours."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from codegen.cpu import lower as cpu
from codegen.gpu import lower as gpu
from codegen.target import Target
from codegen.tir.lowered import LoweringError
from codegen.tir.lowering import AnyRequest, KernelLowerings, LoweringRequest, chosen, lowered_by
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.problem import Problem
from sokoban.language.operators import operator_from_data
from sokoban.schedule.patches import PatchSchedule, Schedule
from sokoban.schedule.tile import TileSchedule, sizes

FORM = kernel_form(operator_from_data({"op": "elementwise", "shape": [64], "function": "relu"}))
REQUEST = LoweringRequest(
    FORM, TileSchedule(block=sizes({"i0": 32}), thread=sizes({"i0": 1})), "relu", Target("cuda", "sm_80", 32)
)


class Lowering:
    """A lowering that takes requests of one entry, and whose error is TVM's."""

    def __init__(self, entry: str, number: int = 1) -> None:
        self.entry = entry
        self.__name__ = f"{number}.{entry}"

    def takes(self, request: AnyRequest) -> bool:
        return request.entry == self.entry

    def lower(self, request: AnyRequest) -> str:
        raise RuntimeError("Traceback\nInternalError: out of loops\n")


def kinds(*lowerings: Lowering, otherwise: Lowering | None = None) -> dict[type, KernelLowerings[str]]:
    return {KernelForm: KernelLowerings(schedule=TileSchedule, lowerings=lowerings, otherwise=otherwise)}


def test_the_lowering_that_takes_a_request_is_chosen() -> None:
    first, second, rest = Lowering("other"), Lowering("relu"), Lowering("rest")
    assert chosen(kinds(first, second, otherwise=rest), REQUEST) is second
    assert chosen(kinds(first, otherwise=rest), REQUEST) is rest


def test_two_lowerings_that_claim_one_kernel_are_an_error() -> None:
    with pytest.raises(LoweringError, match=r"^relu: 1\.relu and 2\.relu claim one kernel$"):
        chosen(kinds(Lowering("relu"), Lowering("other"), Lowering("relu", 2)), REQUEST)


def test_a_kernel_that_no_lowering_takes_is_an_error() -> None:
    with pytest.raises(LoweringError, match="no lowering of KernelForm takes its schedule"):
        chosen(kinds(Lowering("other")), REQUEST)
    with pytest.raises(LoweringError, match="no lowering takes a KernelForm by a PatchSchedule"):
        chosen(gpu.KINDS, replace(REQUEST, schedule=PatchSchedule(32)))
    with pytest.raises(LoweringError, match="no lowering takes a str by a TileSchedule"):
        chosen(cpu.KINDS, LoweringRequest("product", REQUEST.schedule, "", REQUEST.target))


def test_an_error_of_tvm_names_the_kernel_and_the_reason() -> None:
    with pytest.raises(LoweringError, match=r"^relu: InternalError: out of loops$"):
        lowered_by(Lowering("relu"), REQUEST)


def test_every_kind_of_problem_has_a_row() -> None:
    assert set(gpu.KINDS) == set(get_args(Problem))
    assert {kind.schedule for kind in gpu.KINDS.values()} == set(get_args(Schedule))
