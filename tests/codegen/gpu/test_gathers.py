"""Kernels that read tensors at places of other tensors: every kind that may, on places inside and outside."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.compile.build import verify_chain, verify_schedule
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import cuda_source
from codegen.target import Target
from hal.catalog import load_device
from roller.programs import find_programs, form_on
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule, sizes
from tests.codegen.lowering import lower

EMBEDDING = {"expr": "Y[t,d] = E[I[t], d]", "sizes": {"t": 37, "d": 264}, "shapes": {"E": [50, 264]}}


def test_rows_are_read_as_vectors() -> None:
    form = kernel_form(operator_from_data(EMBEDDING))
    schedule = TileSchedule(block=sizes({"t": 2, "d": 132}), thread=sizes({"t": 1, "d": 4}))
    lowered = lower(form, schedule, entry="embedding")
    source = strip_prelude(cuda_source(lowered, "sm_80", ["E", "I", "Y"]))
    assert "float4*)(E_ptr" in source and "float4*)(Y_ptr" in source
    # A place is read by itself, and kept in the table.
    assert "max(min(I_ptr[" in source and "), 0) * 264" in source


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
}  # fmt: skip


@pytest.mark.usefixtures("emulator", "device_compiler")
@pytest.mark.parametrize("name", GATHERS)
def test_kernels_agree_with_the_reference(name: str) -> None:
    data, board = GATHERS[name]
    device = load_device(board)
    program = find_programs(form_on(operator_from_data(data), device), device, 4, "roller").ranked(4)[0]
    check = program.check()
    if check is not None:
        result = verify_chain(check, Target.of(device), "emulator", (0, 1))
    else:
        result = verify_schedule(program.form, program.main.schedule, Target.of(device), "emulator", (0, 1))
    assert result.passed, result.reason
