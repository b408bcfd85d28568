"""Which kernels compute in 16 bits or fewer already: by their names, else by the recorded types of their operators."""

from __future__ import annotations

import re

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
    of_operator: dict[int, bool] = {NONE: False}
    for operator in np.unique(graph.operator[rows]).tolist():
        of_operator[operator] = _reads_narrow(graph, operator)
    return by_name | np.array([of_operator[each] for each in graph.operator[rows].tolist()], np.bool_)


def _reads_narrow(graph: TaskGraph, operator: int) -> bool:
    """Whether the innermost operator that recorded types of tensors has one of 16 bits or fewer."""
    assert graph.trace is not None
    while operator != NONE:
        types = argument(graph.trace.arguments[operator], "Input type", "Input types", "input_types")
        tensors = [str(each) for each in types if is_tensor_type(each)] if isinstance(types, list) else []
        if tensors:
            return any(_FLOATING.search(each) and element_bytes(each) <= 2 for each in tensors)
        operator = int(graph.enclosing[operator])
    return False


def is_mixed(graph: TaskGraph, products: Ints) -> bool:
    """Whether nearly all time of these matrix products and convolutions is computed in 16 bits already."""
    whole = float(graph.duration_us[products].sum())
    if whole <= 0:
        return False
    return float(graph.duration_us[products[narrow(graph, products)]].sum()) >= MIXED * whole
