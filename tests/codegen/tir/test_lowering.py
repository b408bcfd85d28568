"""A request is lowered by the first lowering that takes it, and TVM's errors come out as ours."""

from __future__ import annotations

import pytest

from codegen.cpu import lower as cpu
from codegen.gpu import lower as gpu
from codegen.target import Target
from codegen.tir.lowered import LoweringError
from codegen.tir.lowering import LoweringRequest, chosen, lowered_by
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule, sizes

FORM = kernel_form(operator_from_data({"op": "elementwise", "shape": [64], "function": "relu"}))
REQUEST = LoweringRequest(
    FORM, TileSchedule(block=sizes({"i0": 32}), thread=sizes({"i0": 1})), "relu", Target("cuda", "sm_80", 32)
)


class Lowering:
    """A lowering that takes requests of one entry, and whose error is TVM's."""

    def __init__(self, entry: str) -> None:
        self.entry = entry

    def takes(self, request: LoweringRequest) -> bool:
        return request.entry == self.entry

    def lower(self, request: LoweringRequest) -> str:
        raise RuntimeError("Traceback\nInternalError: out of loops\n")


def test_the_first_that_takes_a_request_lowers_it() -> None:
    other, first, second = Lowering("other"), Lowering("relu"), Lowering("relu")
    assert chosen((other, first, second), REQUEST) is first


def test_an_error_of_tvm_names_the_kernel_and_the_reason() -> None:
    with pytest.raises(LoweringError, match=r"^relu: InternalError: out of loops$"):
        lowered_by(Lowering("relu"), REQUEST)


def test_the_last_lowering_of_a_table_takes_whatever_is_left() -> None:
    assert gpu.LOWERINGS[-1].takes(REQUEST)
    assert cpu.LOWERINGS[-1].takes(REQUEST)
