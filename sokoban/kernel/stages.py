"""An operator that no single kernel computes, as kernels one after the other: products of products, written-out steps.

Statements are taken as far as one kernel takes them, the longest run of them first; what it computes is stored, and the
next kernel reads it. Factors of products have the type of the operator's result where that is narrower than what sums
are kept in, so that matrix instructions multiply them; whatever else passes between kernels keeps the type of sums,
since an exponential of a rounded number is far from that of the number.

Products side by side, such as a layer and its gate, could be one kernel that sums both row by row. It would read every
operand again for every row, so that from two rows on each is a kernel of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hal.spec.parts import DTYPE_BYTES
from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm, attention_of, kernel_form
from sokoban.kernel.instructions import product_factors
from sokoban.kernel.statements import axes_of
from sokoban.language.expression import Statement, Tensor, TensorExpr, loads
from sokoban.language.named.expressions import in_program

#: Statements that one kernel is tried with: softmax and layer norm have six.
MOST_STATEMENTS = 12


def operator_form(expr: TensorExpr, *, with_attention: bool = True) -> KernelForm:
    """An operator in canonical form: as one kernel, or as a ``sequence`` of them where it needs several.

    ``with_attention``: whether attention and its gradients are kernels of their own; they are written out otherwise.

    >>> from sokoban.language.parser import parse_program
    >>> layers = "H[m,n] = sum(k, X[m,k] * A[k,n]); G[m,n] = gelu(H[m,n]); Y[m,p] = sum(n, G[m,n] * B[n,p])"
    >>> form = operator_form(parse_program(layers, {"m": 64, "n": 256, "k": 32, "p": 32}, {}))
    >>> form.kind, [stage.expr.output.name for stage in form.stages]
    ('sequence', ['G', 'Y'])

    Raises:
        InputError: a statement alone is no kernel.
    """
    try:
        form = kernel_form(expr)
    except InputError:
        if len(expr.statements) < 2:
            raise
        # Every spelling of attention in front of an epilogue is then the same sequence.
        attention = attention_of(expr)
        return sequence_form(expr if attention is None else in_program(attention, expr))
    if form.is_attention and not with_attention:
        return sequence_form(form.expr)
    return _separate_products(form) or form


def _separate_products(form: KernelForm) -> KernelForm | None:
    """Products that one kernel could compute row by row, as a kernel each; None where that is no operator, or where
    they are none."""
    if not form.is_rows_of_products:
        return None
    try:
        return sequence_form(form.source)
    except InputError:
        return None


def sequence_form(expr: TensorExpr, counts: Sequence[int] = ()) -> KernelForm:
    """An operator as a ``sequence`` of kernels, of one where that is enough.

    Args:
        expr: the operator.
        counts: of the statements that each kernel computes; empty for as many as it can. How many those are depends on
            the sizes: a reduction is repeated for the outputs that share it where that takes no time.

    Raises:
        InputError: a statement alone is no kernel, or those of ``counts`` are none.
    """
    stages = tuple(_stages_of(expr, counts) if counts else _stages(expr))
    return KernelForm(
        source=expr, expr=expr, kind="sequence", reductions=(), final=expr.statements[-1], fused=(), stages=stages
    )


def _stages_of(expr: TensorExpr, counts: Sequence[int]) -> list[KernelForm]:
    """The kernels of an operator by the number of their statements."""
    ends = list(itertools.accumulate(counts))
    return [
        kernel_form(part_of(expr, expr.statements[end - count : end])) for end, count in zip(ends, counts, strict=True)
    ]


def _stages(expr: TensorExpr) -> list[KernelForm]:
    """The kernels of an operator, in order."""
    stages, first = [], 0
    while first < len(expr.statements):
        for last in range(min(len(expr.statements), first + MOST_STATEMENTS), first, -1):
            group = expr.statements[first:last]
            if _read_later(expr, group[:-1], last):
                continue
            form = _kernel_of(part_of(expr, group), is_alone=last == first + 1)
            if form is not None:
                stages.append(form)
                first = last
                break
    return stages


def _kernel_of(part: TensorExpr, *, is_alone: bool) -> KernelForm | None:
    """The kernel of tiles that computes statements, or None; a statement alone says why it is none."""
    try:
        form = kernel_form(part)
    except InputError:
        if is_alone:
            raise
        return None
    return None if (form.is_composed and not form.is_line) or form.is_rows_of_products else form


def _read_later(expr: TensorExpr, inner: Sequence[Statement], last: int) -> bool:
    """True if a statement from ``last`` on reads what ``inner`` statements define."""
    written = {statement.tensor for statement in inner}
    return any(load.tensor in written for later in expr.statements[last:] for load in loads(later.value))


def part_of(expr: TensorExpr, group: Sequence[Statement]) -> TensorExpr:
    """Some statements of an operator as an operator of their own."""
    written = {statement.tensor for statement in group}
    read = dict.fromkeys(load.tensor for statement in group for load in loads(statement.value))
    tensors, inputs = expr.tensor_by_name, {tensor.name for tensor in expr.inputs}
    inner = [tensors[statement.tensor] for statement in group[:-1]]
    outer = [tensors[name] if name in inputs else _stored(expr, tensors[name]) for name in read if name not in written]
    axes = axes_of(expr, tuple(group))
    name = f"{expr.name}_{group[-1].tensor}"
    output = _stored(expr, tensors[group[-1].tensor])
    return expr.rewritten(name=name, axes=axes, tensors=(*outer, *inner, output), statements=tuple(group))


def _stored(expr: TensorExpr, tensor: Tensor) -> Tensor:
    """A tensor that one kernel writes and another reads, or the operator's result.

    Factors of the next product are stored as matrix instructions take them, in the 16 bits of the result; who asks for
    sums in float64 gets them.
    """
    dtype = expr.output.dtype
    if tensor.name == expr.output.name or tensor.dtype != "float32" or DTYPE_BYTES[dtype] >= DTYPE_BYTES["float32"]:
        return tensor
    readers = [each for each in expr.statements if any(load.tensor == tensor.name for load in loads(each.value))]
    return replace(tensor, dtype=dtype) if all(map(_is_product, readers)) else tensor


def _is_product(statement: Statement) -> bool:
    """True if a statement sums products of elements: their roundings even out, a largest or smallest has its own."""
    reduction = statement.reduction
    factors = product_factors(reduction.body) if reduction is not None and reduction.function == "sum" else None
    return factors is not None and len(factors) > 1
