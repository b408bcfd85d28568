"""Which kernels compute in 16 bits or fewer already: by their names, else by the recorded types of their operators."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from daydream.graph.graph import TaskGraph
from daydream.trace.dtypes import element_bytes, is_tensor_type
from daydream.trace.trace import NONE, Ints, argument

#: Names of kernels that compute in 16 bits or fewer: of cuBLAS, cuDNN and CUTLASS, of Triton and ATen's templates, of
#: composable kernel (mangled types, too) and MIOpen; of Tensile, whose first letter behind the layouts is the type of
#: operands (``Cijk_Alik_Bljk_BBS``: bfloat16, ``HHS``: float16; ``SB`` and ``S_B`` are float32), and of nvjet, whose
#: first letter is (``tst``: bfloat16, ``hsh``: float16, ``q``: 8 bits; ``sss`` is float32).
NARROW = re.compile(
    r"half|bfloat16|float16|bf16|fp16|f16f16|_f16|h884|h1688|h16816|s884|s16816gemm_f16|hgemm|hmma"
    r"|cijk_a[a-z]{3}_b[a-z]{3}_(?:h|b|f8|i8)|nvjet_(?:sm\d+[a-z]*_)?(?![sdcz])[a-z]{3,6}_"
    r"|df16[b_]|e4m3|e5m2|fp8|float8",
    re.IGNORECASE,
)

#: Types of 16 bits or fewer, floating-point ones alone.
_FLOATING = re.compile(r"half|bfloat16|float8|float4", re.IGNORECASE)

#: Types of floating-point numbers, and of two of them.
_NUMBERS = re.compile(r"half|float|double|complex", re.IGNORECASE)

#: A step whose products compute in 16 bits for this share of their time has mixed precision already.
MIXED = 0.9


def is_narrow(name: str) -> bool:
    """Kernels that compute in 16 bits or fewer, by name alone.

    >>> is_narrow("Cijk_Ailk_Bljk_B_BS_BH_Bias_HA_S_SAV"), is_narrow("Cijk_Ailk_Bljk_SB_MT128x64")
    (True, False)
    >>> is_narrow("nvjet_sm100_tst_64x64_64x16"), is_narrow("nvjet_sss_128x64")
    (True, False)
    """
    return NARROW.search(name) is not None


def narrow(graph: TaskGraph, rows: Ints) -> NDArray[np.bool_]:
    """Which of these GPU tasks compute in 16 bits or fewer: by name, else by what their operator read or wrote."""
    by_name = np.array([is_narrow(name) for name in graph.names] or [False], np.bool_)[graph.name[rows]]
    trace = graph.trace
    if trace is None:
        return by_name
    return by_name | _by_types(
        graph, rows, lambda types: any(_FLOATING.search(each) and element_bytes(each) <= 2 for each in types)
    )


def of_integers(graph: TaskGraph, rows: Ints) -> NDArray[np.bool_]:
    """Which of these GPU tasks have operators whose recorded tensors are all of integers or truth values."""
    return _by_types(graph, rows, lambda types: not any(_NUMBERS.search(each) for each in types))


def _by_types(graph: TaskGraph, rows: Ints, holds: Callable[[list[str]], bool]) -> NDArray[np.bool_]:
    """For each of these GPU tasks whether something holds of the recorded types of its operator's tensors."""
    of_operator = {operator: _tensor_types(graph, operator) for operator in np.unique(graph.operator[rows]).tolist()}
    chosen = {operator: bool(types) and holds(types) for operator, types in of_operator.items()}
    return np.array([chosen[each] for each in graph.operator[rows].tolist()], np.bool_)


def _tensor_types(graph: TaskGraph, operator: int) -> list[str]:
    """Types of the tensors of the innermost operator that recorded some."""
    while graph.trace is not None and operator != NONE:
        types = argument(graph.trace.arguments[operator], "Input type", "Input types", "input_types")
        tensors = [str(each) for each in types if is_tensor_type(each)] if isinstance(types, list) else []
        if tensors:
            return tensors
        operator = int(graph.enclosing[operator])
    return []


def is_mixed(graph: TaskGraph, products: Ints) -> bool:
    """True if nearly all time of these matrix products and convolutions is computed in 16 bits already."""
    total_us = float(graph.duration_us[products].sum())
    if total_us <= 0:
        return False
    return float(graph.duration_us[products[narrow(graph, products)]].sum()) >= MIXED * total_us
