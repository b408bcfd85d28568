"""Named operators recognised in expressions, by what these compute and not by how they are written.

The program of an operator is its own pattern: an expression is the operator where their canonical values
(:mod:`sokoban.language.canonical`) are one, whatever its tensors and axes are called. A first comparison, with programs
of sizes and numbers that stand for any, tells the sizes, the scale and the window; the program of that very operator
then has to agree in every number, shape and type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec

from hal.support.errors import InputError
from sokoban.language.canonical import Product, TooLarge, axis_name, canonical_value
from sokoban.language.expression import Call, Origin, Reduction, Tensor, TensorExpr, loads, walk
from sokoban.language.matching import SAME, Correspondence, correspondences
from sokoban.language.named.attention import Attention
from sokoban.language.named.attention_gradient import AttentionGradient
from sokoban.language.named.expressions import program_expression

_Recognised = Attention | AttentionGradient

#: Sizes, scale and window of the patterns: numbers that occur in none of the programs but for them.
_SIZES = {"b": 2, "heads": 6, "queries": 5, "keys": 17, "head_dim": 7, "value_dim": 11, "scale": 0.37}
_KEY_HEADS, _WINDOW = 3, 4
#: Keys in pages, the last of which ends with them or not.
_PAGED: tuple[dict[str, Any], ...] = ({"page": 13, "pool": 23}, {"page": 13, "pool": 23, "keys": 26})


@dataclass(frozen=True)
class _Pattern:
    """The program of an operator that stands for all of its kind with the same mask and sharing of heads."""

    operator: _Recognised
    expr: TensorExpr
    value: Product


#: Keys of which each sequence has a number of its own, contiguous or in pages.
_LENGTHS: tuple[dict[str, Any], ...] = ({"lengths": True}, {"page": 13, "pool": 23, "lengths": True})

#: Inputs of an expression -> what the operators that it may be have besides sizes.
_KINDS: Mapping[int, tuple[tuple[type[_Recognised], dict[str, Any]], ...]] = {
    3: ((Attention, {}),),
    4: tuple((Attention, keys) for keys in (*_PAGED, _LENGTHS[0])),
    5: ((Attention, _LENGTHS[1]),),
    6: (
        (AttentionGradient, {"of": "queries"}),
        (AttentionGradient, {"of": "keys"}),
        (AttentionGradient, {"of": "keys", "slopes": True}),
    ),
}


@cache
def _patterns(inputs: int) -> tuple[_Pattern, ...]:
    """The patterns of so many inputs."""
    masks: tuple[dict[str, Any], ...] = ({}, {"causal": True}, {"causal": True, "window": _WINDOW})
    operators = [
        msgspec.convert({**_SIZES, **keys, **mask, **shared}, kind)
        for kind, keys in _KINDS[inputs]
        for shared in ({}, {"kv_heads": _KEY_HEADS})
        for mask in masks
    ]
    expressions = [program_expression(operator, "pattern") for operator in operators]
    return tuple(
        _Pattern(operator, expr, canonical_value(expr))
        for operator, expr in zip(operators, expressions, strict=True)
    )  # fmt: skip


def recognised(expr: TensorExpr) -> TensorExpr:
    """The expression with the named operator that it is, an epilogue or none behind it; as it was where it is none.

    >>> from sokoban.language.parser import parse_program
    >>> text = (
    ...     "S[n,h,q,k] = sum(c, B[n,h,k,c] * A[n,h,q,c]) / 4; M[n,h,q] = max(k, S[n,h,q,k])\\n"
    ...     "W[n,h,q,k] = exp(S[n,h,q,k] - M[n,h,q]); T[n,h,q] = sum(k, W[n,h,q,k])\\n"
    ...     "R[n,h,q,c] = sum(k, W[n,h,q,k] * C[n,h,k,c]) / T[n,h,q]"
    ... )
    >>> expr = recognised(parse_program(text, {"n": 1, "h": 2, "q": 8, "k": 8, "c": 16}, {}))
    >>> expr.operator_as(Attention).head_dim, expr.origin.name("Q"), expr.origin.name("Y")
    (16, 'A', 'R')
    """
    for part in _parts(expr):
        origin = _origin(part)
        if origin is not None:
            return replace(expr, origin=origin)
    return expr


def _parts(expr: TensorExpr) -> Iterator[TensorExpr]:
    """The expression, and its first statements where the others read the result alone of what these define."""
    for count in range(len(expr.statements), 0, -1):
        part, others = expr.statements[:count], expr.statements[count:]
        inner = {statement.tensor for statement in part[:-1]}
        read, read_later = ({load.tensor for each in some for load in loads(each.value)} for some in (part, others))
        if inner <= read and inner.isdisjoint(read_later) and _has_softmax(first := _without_epilogue(expr, count)):
            yield first


def _without_epilogue(expr: TensorExpr, count: int) -> TensorExpr:
    """The first statements of an expression, whose result has the type that the whole one has."""
    if count == len(expr.statements):
        return expr
    statements = expr.statements[:count]
    used = {each.tensor for each in statements} | {load.tensor for each in statements for load in loads(each.value)}
    result = statements[-1].tensor
    tensors = tuple(
        replace(tensor, dtype=expr.output.dtype) if tensor.name == result else tensor
        for tensor in expr.tensors
        if tensor.name in used
    )
    return expr.rewritten(statements=statements, tensors=tensors)


def _has_softmax(expr: TensorExpr) -> bool:
    """True if an expression has what the patterns have: inputs, exponentials, at least two sums."""
    nodes = [node for statement in expr.statements for node in walk(statement.value)]
    functions = [node.function for node in nodes if isinstance(node, Call | Reduction)]
    return "exp" in functions and functions.count("sum") > 1 and len(expr.inputs) in _KINDS


def _origin(expr: TensorExpr) -> Origin | None:
    """The named operator that an expression is, without an epilogue."""
    try:
        value = canonical_value(expr)
    except (TooLarge, RecursionError):
        return None
    for pattern in _patterns(len(expr.inputs)):
        match = next(correspondences(pattern.value, value, _start(pattern.expr, expr, numbers={})), None)
        for operator in [] if match is None else _candidates(pattern, expr, match):
            origin = _agreeing(operator, expr, value)
            if origin is not None:
                return origin
    return None


def _start(pattern: TensorExpr, expr: TensorExpr, numbers: dict[float, tuple[float, ...]] | None) -> Correspondence:
    """The axes of the outputs correspond, one by one."""
    axes = dict(zip(pattern.statements[-1].axes, expr.statements[-1].axes, strict=False))
    return Correspondence(axes=axes, numbers=numbers)


def _candidates(pattern: _Pattern, expr: TensorExpr, match: Correspondence) -> Iterator[_Recognised]:
    """Operators that an expression may be, by its sizes and numbers. The scale is among those that stand for it, or
    its size is, where its sign stands further in."""
    sizes = {axis_name(program_axis): expr.sizes[axis_name(axis)] for program_axis, axis in match.axes.items()}
    numbers = {} if match.numbers is None else match.numbers
    queries = next(tensor for tensor in expr.inputs if tensor.name == match.tensors["Q"])
    key_heads = sizes.get("g", sizes["h"])
    heads = sizes["h"] * sizes.get("g", 1)
    usual_sums = "float64" if queries.dtype == "float64" else "float32"
    changes: dict[str, Any] = {
        "b": sizes["b"], "heads": heads, "kv_heads": key_heads if "g" in sizes else None, "queries": sizes["i"],
        "head_dim": sizes["d"], "value_dim": sizes["e"], "dtype": queries.dtype,
        "allow_tf32": expr.allow_tf32, "accumulate": None if expr.accumulate == usual_sums else expr.accumulate,
        **_keys(pattern, expr, match, sizes),
    }  # fmt: skip
    if pattern.operator.window:
        changes["window"] = _window(pattern.operator, numbers, changes["keys"], sizes["i"])
    usual = 1 / math.sqrt(sizes["d"])
    for scale in dict.fromkeys(sign * number for number in numbers[_SIZES["scale"]] for sign in (1, -1)):
        changes["scale"] = None if math.isclose(scale, usual, rel_tol=SAME) else scale
        try:
            yield msgspec.convert({**msgspec.to_builtins(pattern.operator), **changes}, type(pattern.operator))
        except msgspec.ValidationError:
            return


def _window(operator: _Recognised, numbers: Mapping[float, tuple[float, ...]], keys: int, queries: int) -> int:
    """The window of a mask, from the number by which its first key lies before the last."""
    if operator.least_keys is not None:
        return -int(numbers[-(operator.queries + _WINDOW)][0]) - queries
    before = operator.queries - operator.key_count
    return int(numbers[before + _WINDOW - 1][0]) + 1 + keys - queries


def _keys(pattern: _Pattern, expr: TensorExpr, match: Correspondence, sizes: Mapping[str, int]) -> Mapping[str, int]:
    """Keys of a sequence, and the pages that they lie in: the mask tells where they end, or full pages do."""
    operator, numbers = pattern.operator, match.numbers or {}
    pages = operator.pages
    if pages is None:
        return {"keys": sizes["j"]}
    keys = sizes["p"] * sizes["s"]
    if operator.least_keys is not None:
        keys = int(numbers[pages.keys][0])
    elif operator.causal:
        keys = int(numbers[pages.keys - operator.queries][0]) + sizes["i"]
    elif not pages.are_full:
        keys = int(numbers[pages.keys - 1][0]) + 1
    pool = expr.tensor_by_name[match.tensors["K"]].shape[0]
    return {"keys": keys, "page": sizes["s"], "pool": pool}


def _agreeing(operator: _Recognised, expr: TensorExpr, value: Product) -> Origin | None:
    """An operator as the origin of an expression, where its program agrees with that in all."""
    try:
        program = program_expression(operator, expr.name)
    except InputError:
        return None
    start = _start(program, expr, numbers=None)
    for match in correspondences(canonical_value(program), value, start):
        names = {**match.tensors, program.output.name: expr.output.name}
        tensors = [(program.tensor_by_name[expected], expr.tensor_by_name[name]) for expected, name in names.items()]
        axes = [
            (program.sizes[axis_name(expected)], expr.sizes[axis_name(axis)]) for expected, axis in match.axes.items()
        ]
        if all(expected == size for expected, size in axes) and all(
            _is_alike(expected, tensor) for expected, tensor in tensors
        ):
            pairs = tuple((_axis_names(match) | names).items())
            return Origin(operator=operator, result=expr.output.name, names=pairs)
    return None


def _axis_names(match: Correspondence) -> dict[str, str]:
    """The expression's axes by the program's, one for each: an axis of several names has the first, and of those that
    share a name one has it."""
    names: dict[str, str] = {}
    for program_axis, axis in match.axes.items():
        if axis_name(program_axis) not in names and axis_name(axis) not in names.values():
            names[axis_name(program_axis)] = axis_name(axis)
    return names


def _is_alike(tensor: Tensor, other: Tensor) -> bool:
    return (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
