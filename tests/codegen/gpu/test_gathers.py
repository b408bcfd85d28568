"""Kernels that read tensors at places of other tensors: every kind that may, on places inside and outside."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.compile.build import verify_chain, verify_schedule
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import cuda_source
from codegen.target import Target
from codegen.tir.lowered import LoweringError
from hal.catalog import load_device
from roller.programs import find_programs, form_on
from sokoban.kernel.form import kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule, sizes
from tests.codegen.lowering import lower

EMBEDDING = {"expr": "Y[t,d] = E[I[t], d]", "sizes": {"t": 37, "d": 264}, "shapes": {"E": [50, 264]}}


def test_multiply_adds_take_no_rows_at_places_from_tiles() -> None:
    data = GATHERS["rows of a product"][0]
    schedule = TileSchedule(
        block=sizes({"t": 32, "n": 32}), thread=sizes({"t": 2, "n": 2}), step=sizes({"k": 8}), cached=("X", "W")
    )
    with pytest.raises(LoweringError, match="X is read at places that are read: multiply-adds take it from no tile"):
        lower(kernel_form(operator_from_data(data)), schedule, entry="rows")


def test_tiles_of_one_matrix_read_it_once() -> None:
    device = load_device("a100-sxm-80gb")

    def seconds(**data: Any) -> float:
        form = form_on(operator_from_data({"dtype": "bfloat16", **data}), device)
        return find_programs(form, device, 1, "roller").ranked(1)[0].estimate.seconds

    grouped = seconds(**GATHERS["matrices of groups"][0] | {
        "sizes": {"b": 64, "r": 128, "n": 4096, "k": 1024}, "shapes": {"W": [8, 4096, 1024]}})  # fmt: skip
    product = seconds(op="matmul", m=8192, n=4096, k=1024, transpose_b=True)
    batched = seconds(op="batch_matmul", b=64, m=128, n=4096, k=1024, transpose_b=True)
    assert product <= grouped < 0.8 * batched


def test_rows_are_read_as_vectors() -> None:
    form = kernel_form(operator_from_data(EMBEDDING))
    schedule = TileSchedule(block=sizes({"t": 2, "d": 132}), thread=sizes({"t": 1, "d": 4}))
    lowered = lower(form, schedule, entry="embedding")
    source = strip_prelude(cuda_source(lowered, "sm_80", ["E", "I", "Y"]))
    assert "float4*)(E_ptr" in source and "float4*)(Y_ptr" in source
    # A place is read by itself, and kept in the table.
    assert "larger(smaller(I_ptr[" in source and "), 0) * 264" in source


GATHERS: dict[str, tuple[dict[str, Any], str]] = {
    "pointwise": (EMBEDDING, "a100-sxm-80gb"),
    "padded halves": (
        EMBEDDING | {"expr": "Y[t,d] = 2 * E[I[t], d | pad=3]", "dtype": "float16", "dtypes": {"I": "int32"}},
        "h100-sxm-80gb",
    ),
    "elements": ({"expr": "Y[i] = V[I[i]] + W[J[i], I[i]]", "sizes": {"i": 1000},
                  "shapes": {"V": [300], "W": [5, 70]}}, "a100-sxm-80gb"),
    "sums of rows": ({"expr": "Y[t,d] = sum(k, E[I[t,k], d | pad=0] * W[t,k])",
                      "sizes": {"t": 33, "d": 40, "k": 5}, "shapes": {"E": [90, 40]}}, "a100-sxm-80gb"),
    "products of rows": ({"expr": "Y[t] = sum(d, E[I[t], d] * Q[t,d])", "sizes": {"t": 65, "d": 520},
                          "shapes": {"E": [90, 520]}}, "a100-sxm-80gb"),
    "pages": ({"expr": "S[i,b,s] = sum(d, Q[i,d] * K[P[i,b], s, d])", "sizes": {"i": 5, "b": 3, "s": 8, "d": 64},
               "shapes": {"K": [20, 8, 64]}}, "a100-sxm-80gb"),
    "cross-entropy": ({"expr": "M[i] = max(j, X[i,j]); S[i] = sum(j, exp(X[i,j] - M[i])); "
                       "L[i] = log(S[i]) - (X[i, T[i]] - M[i])", "sizes": {"i": 64, "j": 500}}, "a100-sxm-80gb"),
    "rows that stay": ({"expr": "S[i] = sum(j, exp(E[I[i], j])); Y[i,j] = exp(E[I[i], j]) / S[i]",
                        "sizes": {"i": 40, "j": 256}, "shapes": {"E": [30, 256]}}, "a100-sxm-80gb"),
    "a scan": ({"expr": "Y[i,j] = cumsum(j, E[I[i], j]) + V[J[j]]", "sizes": {"i": 5, "j": 512},
                "shapes": {"E": [9, 512], "V": [33]}}, "a100-sxm-80gb"),
    "behind a product": ({"expr": "C[i,j] = sum(k, A[i,k] * B[k,j]); Y[i,j] = C[i,j] + E[I[i], j]",
                          "sizes": {"i": 128, "j": 128, "k": 64}, "shapes": {"E": [10, 128]}}, "v100-sxm2-16gb"),
    "behind matrix instructions": (
        {"expr": "C[i,j] = sum(k, A[i,k] * B[k,j]); Y[i,j] = C[i,j] + E[I[i], j]", "shapes": {"E": [10, 256]},
         "sizes": {"i": 256, "j": 256, "k": 64}, "dtype": "float16", "dtypes": {"I": "int32"}}, "a100-sxm-80gb",
    ),
    "behind warp groups": (
        {"expr": "C[i,j] = sum(k, A[i,k] * B[k,j]); Y[i,j] = C[i,j] * V[I[j]]",
         "sizes": {"i": 1024, "j": 1024, "k": 256}, "shapes": {"V": [10]}, "dtype": "float16",
         "dtypes": {"I": "int32"}}, "h100-sxm-80gb",
    ),
    "rows of a product": (
        {"expr": "Y[t,n] = sum(k, X[I[t],k] * W[k,n])", "sizes": {"t": 1000, "n": 256, "k": 128},
         "shapes": {"X": [70, 128]}, "dtype": "bfloat16", "dtypes": {"I": "int32"}}, "a100-sxm-80gb",
    ),
    "rows of fragments": (
        {"expr": "Y[t,n] = sum(k, X[I[t],k | pad=0] * W[n,k])", "sizes": {"t": 512, "n": 256, "k": 64},
         "shapes": {"X": [70, 64]}, "dtype": "float16", "dtypes": {"I": "int32"}}, "v100-sxm2-16gb",
    ),
    "columns of a product": (
        {"expr": "Y[t,n] = sum(k, X[t,k] * W[J[n],k])", "sizes": {"t": 1000, "n": 200, "k": 96},
         "shapes": {"W": [70, 96]}, "dtype": "float16", "dtypes": {"J": "int32"}}, "h100-sxm-80gb",
    ),
    "matrices of groups": (
        {"expr": "Y[b,r,n] = sum(k, X[b,r,k] * W[G[b],n,k])", "sizes": {"b": 24, "r": 128, "n": 512, "k": 256},
         "shapes": {"W": [8, 512, 256]}, "dtype": "bfloat16", "dtypes": {"G": "int32"}}, "h100-sxm-80gb",
    ),
    "experts": (
        {"expr": "Y[b,r,n] = sum(k, X[R[b,r],k | pad=0] * W[G[b],n,k])",
         "sizes": {"b": 24, "r": 64, "n": 512, "k": 256},
         "shapes": {"X": [900, 256], "W": [8, 512, 256]}, "dtype": "bfloat16",
         "dtypes": {"R": "int32", "G": "int32"}}, "h100-sxm-80gb",
    ),
}  # fmt: skip

#: Instructions that multiply where rows and matrices are named by places.
INSTRUCTIONS = {
    "rows of a product": Instruction.MMA_16X8X16, "rows of fragments": Instruction.WMMA,
    "columns of a product": Instruction.MMA_16X8X16, "matrices of groups": Instruction.WGMMA,
    "experts": Instruction.MMA_16X8X16, "behind warp groups": Instruction.WGMMA,
}  # fmt: skip


@pytest.mark.usefixtures("emulator", "device_compiler")
@pytest.mark.parametrize("name", GATHERS)
def test_kernels_agree_with_the_reference(name: str) -> None:
    data, board = GATHERS[name]
    device = load_device(board)
    program = find_programs(form_on(operator_from_data(data), device), device, 4, "roller").ranked(4)[0]
    if name in INSTRUCTIONS:
        assert program.main.tiles.instruction == INSTRUCTIONS[name]
    check = program.check()
    if check is not None:
        result = verify_chain(check, Target.of(device), "emulator", (0, 1))
    else:
        result = verify_schedule(program.form, program.main.schedule, Target.of(device), "emulator", (0, 1))
    assert result.passed, result.reason
