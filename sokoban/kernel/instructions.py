"""Instructions: the one that computes a schedule's tiles, and how many the functions inside a value cost.

Costs are what the device compiler makes of a function, on the way that is taken nearly always: counted in the SASS of
element-wise kernels compiled for sm_75, sm_80 and sm_90, which agree to within an instruction. Divisions, roots, sines
and powers have a rare second way for huge, tiny and undefined arguments, which is not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum

from sokoban.language.expression import (
    AxisValue,
    Call,
    Constant,
    Load,
    Reduction,
    Scan,
    TensorExpr,
    Value,
)
from sokoban.language.functions import FUNCTIONS

#: Oldest NVIDIA devices with arithmetic of bfloat16, as a compute capability.
BFLOAT16_CAPABILITY = (8, 0)


class Instruction(StrEnum):
    """Instructions that compute the tiles of a schedule; the texts are those of files.

    A matrix instruction is named by what a warp multiplies at a time, rows by columns by depth.
    """

    #: Scalar multiply-adds, a tile per thread.
    FMA = "fma"
    #: Fragments of ``nvcuda::wmma``, whose layout in registers is the hardware's secret.
    WMMA = "wmma_16x16x16"
    #: ``mma.sync`` with operands by ``ldmatrix`` and asynchronous copies; the depth is the element type's.
    MMA_16X8X16 = "mma_16x8x16"
    MMA_16X8X32 = "mma_16x8x32"
    MMA_16X8X8 = "mma_16x8x8"
    #: ``wgmma`` of sm_90a: four warps multiply 64 rows by all columns of their tile, operands in shared memory
    #: (:mod:`sokoban.schedule.warp_groups`).
    WGMMA = "wgmma_64xNx16"

    @property
    def is_matrix(self) -> bool:
        """True if a tile belongs to a warp, which multiplies it by a matrix instruction."""
        return self is not _SCALAR

    @property
    def is_mma(self) -> bool:
        """True if it is ``mma.sync``, whatever the depth."""
        return self in _MMA

    @property
    def is_by_groups(self) -> bool:
        """True if warp groups multiply."""
        return self is _BY_GROUPS

    @property
    def is_swizzled(self) -> bool:
        """True if operands are copied past the registers and lie swizzled in shared memory: ``mma.sync``, ``wgmma``."""
        return self in _SWIZZLED


# Construction asks for every tile, and a member looked up in its class takes ten times as long as a name of the module.
_SCALAR = Instruction.FMA
_BY_GROUPS = Instruction.WGMMA
_MMA = frozenset((Instruction.MMA_16X8X16, Instruction.MMA_16X8X32, Instruction.MMA_16X8X8))
_SWIZZLED = _MMA | {Instruction.WGMMA}


def product_factors(value: Value) -> list[Load] | None:
    """The loads of a product of nothing but loads; None for anything else.

    >>> a, b = Load("A", ()), Load("B", ())
    >>> [factor.tensor for factor in product_factors(Call("mul", (a, b)))]
    ['A', 'B']
    >>> product_factors(Call("add", (a, b))) is None
    True
    """
    if isinstance(value, Load):
        return [value]
    if not isinstance(value, Call) or value.function != "mul":
        return None
    parts = [product_factors(argument) for argument in value.arguments]
    return [load for part in parts if part is not None for load in part] if None not in parts else None


#: Instructions per call of a primitive, one where it is missing; and of what compilers do better than its definition
#: says.
FUNCTION_INSTRUCTIONS: Mapping[str, float] = {
    "exp": 8.0,
    "log": 25.0,
    "sqrt": 9.0,
    "rsqrt": 18.0,
    "div": 10.0,
    "tanh": 15.0,
    "erf": 24.0,
    # The sign is part of the operand.
    "sigmoid": 19.0,
    "silu": 19.0,
    "sin": 20.0,
    "cos": 20.0,
    "pow": 60.0,
}


#: The same where what they make is rounded to 16 bits (:func:`makes_16_bits`) and functions near enough for that are
#: called in their place (``near_erf`` and its kin of :mod:`codegen.gpu.walks.functions`); counted in the SASS for
#: sm_80 and sm_90. Kernels with matrix instructions call them.
NEAR_INSTRUCTIONS: Mapping[str, float] = {
    **FUNCTION_INSTRUCTIONS, "erf": 12.0, "gelu": 15.0, "sigmoid": 4.0, "silu": 5.0, "tanh": 6.0,
}  # fmt: skip


def makes_16_bits(expr: TensorExpr) -> bool:
    """True if the last statement is computed in float32 and rounded to 16 bits."""
    return expr.final_dtype == "float32" and expr.output.dtype in ("float16", "bfloat16")


def value_instructions(
    value: Value, along: Collection[str] | None = None, costs: Mapping[str, float] = FUNCTION_INSTRUCTIONS
) -> float:
    """Instructions that compute ``value`` in float32, without its loads; a multiply and an add fuse into one.

    >>> x, y = Load("X", ()), Load("Y", ())
    >>> value_instructions(Call("add", (Call("mul", (x, y)), x))), value_instructions(Call("exp", (x,)))
    (1.0, 8.0)

    Args:
        value: what is computed.
        along: count only what depends on one of these axes: compilers compute the rest once. None counts all.
        costs: instructions per call of a function; one where a primitive is missing, the definition's where another is.
    """
    if isinstance(value, Scan):
        return value_instructions(value.body, along, costs) + 1.0
    if isinstance(value, Reduction):
        fused = value.function == "sum" and _is_product(value.body)
        return value_instructions(value.body, along, costs) + (0.0 if fused else 1.0)
    if isinstance(value, AxisValue):
        return 1.0 if along is None or depends(value, along) else 0.0
    if not isinstance(value, Call) or (along is not None and not depends(value, along)):
        return 0.0
    inside = sum(value_instructions(argument, along, costs) for argument in value.arguments)
    return _call_instructions(value, costs) + inside


def _call_instructions(call: Call, costs: Mapping[str, float]) -> float:
    """Instructions of a call, without those of its arguments."""
    if call.function in ("add", "sub") and any(_is_product(argument) for argument in call.arguments):
        return 0.0
    if call.function == "pow" and call.arguments[1] == Constant(2.0):
        return 1.0
    if call.function == "div" and isinstance(call.arguments[1], Constant):
        return 4.0 if _is_inexact(call.arguments[1]) else 1.0
    if call.function in costs:
        return costs[call.function]
    definition = FUNCTIONS[call.function].value
    return 1.0 if definition is None else value_instructions(definition, costs=costs)


def depends(value: Value, along: Collection[str]) -> bool:
    """True if ``value`` differs along one of some axes."""
    if isinstance(value, Load):
        return any(axis in along for index in value.indices for axis in index.axes)
    if isinstance(value, AxisValue):
        return any(axis in along for axis in value.index.axes)
    return isinstance(value, Call) and any(depends(argument, along) for argument in value.arguments)


def _is_product(value: Value) -> bool:
    return isinstance(value, Call) and (
        value.function == "mul" or (value.function == "pow" and value.arguments[1] == Constant(2.0))
    )


def _is_inexact(value: Constant) -> bool:
    """True if a division by ``value`` is no multiplication by its reciprocal: all but powers of two."""
    number = abs(value.value)
    while number > 1.0:
        number /= 2.0
    while 0.0 < number < 1.0:
        number *= 2.0
    return number != 1.0
