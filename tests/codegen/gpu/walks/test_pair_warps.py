"""Two products in a row by ``mma.sync``: executed by the CUDA emulator, held against float64, compiled by NVRTC."""

from __future__ import annotations

import pytest

from codegen.gpu.lower import lower
from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.walks.staged_walk import StagedWalk
from codegen.target import Target
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.pair import product_pair
from sokoban.model.gpu.kinds.pair import pair_registers
from sokoban.schedule.pair import PairSchedule, pair_shared_bytes
from tests.codegen.pair_kernels import ASIDE, BATCHED, PLAIN, by_matrices, checked, form_of


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("schedule", "text", "dtype"),
    [
        (by_matrices(), PLAIN, "float16"),
        (by_matrices(rows=64, step=16, stages=2, held=True), BATCHED, "float16"),
        (by_matrices(rows=16, warps=1, stages=2), ASIDE, "bfloat16"),
        (by_matrices(held=True, step=64), PLAIN.replace("A[k,n]", "A[n,k]").replace("B[n,p]", "B[p,n]"), "bfloat16"),
    ],
    ids=["plain", "batched, held, two fragments", "rows aside", "the other layouts"],
)
def test_results_are_those_of_float64(schedule: PairSchedule, text: str, dtype: str) -> None:
    result = checked(schedule, form_of(text, dtype))
    assert result.passed, result.reason
    assert not result.needless


@pytest.mark.usefixtures("emulator")
def test_an_odd_number_of_columns_ends_a_step_early() -> None:
    """Elements beyond the last column are none: relu of their bias would add to every result."""
    text = PLAIN.replace("A[k,n]", "A[n,k]").replace("gelu", "relu")
    result = checked(by_matrices(), form_of(text, n=45))
    assert result.passed, result.reason


@pytest.mark.usefixtures("emulator")
def test_a_text_without_the_wait_for_copies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    written = StagedWalk.before_second
    monkeypatch.setattr(StagedWalk, "before_second", lambda walk: written(walk).replace("__syncthreads();", ""))
    assert not checked(by_matrices(), form_of()).passed


@pytest.mark.usefixtures("device_compiler")
def test_the_kernel_compiles_without_spills_into_the_registers_it_is_priced_with() -> None:
    schedule, form = by_matrices(rows=128, warps=4, stages=2), form_of(m=4096, n=384, k=96, p=96)
    pair = product_pair(form.source)
    text = strip_prelude(lower(LoweringRequest(pair, schedule, "pair", Target("cuda", "sm_80", 32))).text)
    compiled = compile_cuda(text, "sm_80", name="pair")
    assert compiled.spill_bytes == 0
    assert pair_registers(pair, schedule) - 24 < compiled.registers < pair_registers(pair, schedule) + 40
    # 128 rows of 96 elements, twice a tile of 96 rows of 32 elements and one of 32 rows of 96; a piece behind each.
    assert pair_shared_bytes(pair, schedule) == 128 * 208 + 2 * (96 * 80 + 32 * 208)
