"""Syntax tree -> statements as written; reductions may still be nested anywhere in them.

``max`` and ``min`` reduce if their first argument is a list of axes, or the bare name of an axis that is neither on the
statement's left-hand side nor already reduced around the call; else they are the larger and the smaller of two values.
``sum``, ``prod``, ``mean``, ``argmax`` and ``argmin`` always reduce. ``cumsum``, ``cumprod``, ``cummax`` and ``cummin``
go along an axis that stays; the words ``reverse`` and ``exclusive`` may follow what they accumulate. An axis of the
statement may follow what ``max``, ``min``, ``argmax`` and ``argmin`` reduce: it counts values, or places, by rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lark import Token, Tree

from hal.support.errors import InputError
from sokoban.language.checks import MAX_AXIS_SIZE, RESERVED_NAMES, check_name, reach
from sokoban.language.expression import (
    PLACE_REDUCTIONS,
    RANKED_REDUCTIONS,
    REDUCTION_IDENTITY,
    SCANS,
    AffineIndex,
    AxisValue,
    Call,
    Constant,
    GatheredIndex,
    Load,
    Reduction,
    Scan,
    Statement,
    Value,
    used_axes,
)
from sokoban.language.functions import FUNCTIONS
from sokoban.language.grammar import Node, source_text

if TYPE_CHECKING:
    import sympy

#: Value of a tensor's elements outside of it, by tensor.
Pads = Mapping[str, float]

#: Functions that reduce.
REDUCERS = (*REDUCTION_IDENTITY, "mean", *PLACE_REDUCTIONS)
#: Words that may follow what a scan accumulates.
_SCAN_OPTIONS = ("reverse", "exclusive")
#: Scans of which nothing is no number, so that they leave none out.
_WITHOUT_IDENTITY = ("max", "min")
_TRUTH_FUNCTIONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"})
_COMPARISONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}
_AFFINE_ADVICE = "an index is a sum of integer*axis terms plus an integer, or one element of an integer tensor"


@dataclass(frozen=True)
class _Scope:
    """Names that one statement may refer to while its right-hand side is built."""

    tensor: str
    left: tuple[str, ...]
    sizes: Mapping[str, int]
    pads: Pads
    reduced: tuple[str, ...] = ()

    def error(self, problem: str, remedy: str = "") -> InputError:
        return InputError("expr", f"statement {self.tensor}: {problem}", remedy)


def build_statements(tree: Tree[Token], sizes: Mapping[str, int], pads: Pads) -> list[Statement]:
    """The statements as written; reductions may still be nested anywhere."""
    result = []
    for statement in tree.children:
        assert isinstance(statement, Tree)
        tensor, left, right = statement.children
        assert isinstance(left, Tree) and isinstance(right, Tree)
        check_name(str(tensor), "expr")
        scope = _Scope(str(tensor), (), sizes, pads)
        if tensor in sizes:
            raise scope.error(f"{str(tensor)!r} is also the name of an axis", "rename the tensor")
        scope = replace(scope, left=_left_axes(left, scope))
        value = _value(right, scope)
        if _is_truth(value):
            raise scope.error("a comparison cannot be stored", "use select(condition, 1, 0)")
        result.append(Statement(scope.tensor, scope.left, value))
    return result


def _left_axes(left: Tree[Token], scope: _Scope) -> tuple[str, ...]:
    axes: list[str] = []
    for index in left.children:
        if not (isinstance(index, Tree) and index.data == "name"):
            raise scope.error("an index on the left-hand side is not a plain axis", "write Y[i,j] = ...")
        axis = str(index.children[0])
        if axis in axes:
            raise scope.error(f"axis {axis!r} is used twice on the left-hand side", "use one axis per dimension")
        _check_axis(axis, scope)
        axes.append(axis)
    return tuple(axes)


def _check_axis(axis: str, scope: _Scope) -> None:
    if axis in RESERVED_NAMES:
        raise scope.error(f"{axis!r} is reserved and no axis")
    if axis not in scope.sizes:
        raise InputError("sizes", f"axis {axis!r} of statement {scope.tensor} has no size", f'add "{axis}" to sizes')


def _value(node: Node, scope: _Scope) -> Value:
    """The value a syntax tree stands for."""
    assert isinstance(node, Tree)
    kind, children = str(node.data), node.children
    if kind == "number":
        return Constant(_number(str(children[0]), scope))
    if kind == "name":
        return _name_value(str(children[0]), scope)
    if kind == "load":
        return _load(node, scope)
    if kind == "call":
        return _call(str(children[0]), children[1:], scope)
    if kind == "axis_list":
        raise scope.error("a list of axes is only the first argument of a reduction")
    if kind == "compare":
        return _apply(_COMPARISONS[str(children[1])], [_value(children[0], scope), _value(children[2], scope)], scope)
    if kind == "pos":
        return _apply("pos", [_value(children[0], scope)], scope)
    return _apply(kind.rstrip("_"), [_value(child, scope) for child in children], scope)


def _number(text: str, scope: _Scope) -> float:
    value = float(text)
    if math.isinf(value):
        raise scope.error(f"the number {text[:30]} is too large for float64", "write inf for infinity")
    return value


def _name_value(name: str, scope: _Scope) -> Value:
    if name == "inf":
        return Constant(math.inf)
    if name not in scope.sizes:
        raise scope.error(
            f"{name!r} is neither an axis nor indexed",
            "scalar names are not supported: give the axis a size, write the number, or index a tensor",
        )
    _check_bound(name, scope)
    return AxisValue(AffineIndex.axis(name))


def _check_bound(axis: str, scope: _Scope) -> None:
    if axis not in scope.left and axis not in scope.reduced:
        raise scope.error(
            f"axis {axis!r} is neither on the left-hand side nor reduced", f"wrap the value in sum({axis}, ...)"
        )


def _call(function: str, arguments: Sequence[Node], scope: _Scope) -> Value:
    if function in REDUCERS and _is_reduction(function, arguments, scope):
        return _reduction(function, arguments, scope)
    if function in SCANS:
        return _scan(function, arguments, scope)
    if function not in FUNCTIONS:
        function_names = ", ".join(sorted({*FUNCTIONS, *REDUCERS, *SCANS} - RESERVED_NAMES))
        raise scope.error(f"unknown function {function!r}", f"known: {function_names}")
    if len(arguments) != FUNCTIONS[function].arity:
        raise scope.error(f"{function} takes {FUNCTIONS[function].arity} argument(s), got {len(arguments)}")
    return _apply(function, [_value(argument, scope) for argument in arguments], scope)


def _is_reduction(function: str, arguments: Sequence[Node], scope: _Scope) -> bool:
    """True if a call reduces and is not point-wise; the module's docstring says which, for max and min."""
    if function not in FUNCTIONS:
        return True
    first = arguments[0]
    assert isinstance(first, Tree)
    if first.data == "axis_list":
        return True
    axis = str(first.children[0]) if first.data == "name" else ""
    return axis in scope.sizes and axis not in scope.left and axis not in scope.reduced


def _reduction(function: str, arguments: Sequence[Node], scope: _Scope) -> Value:
    first = arguments[0]
    assert isinstance(first, Tree)
    if first.data not in ("axis_list", "name") or not 2 <= len(arguments) <= 2 + (function in RANKED_REDUCTIONS):
        raise scope.error(
            f"{function} reduces one value over axes",
            f"write {function}(axis, value) or {function}([axis, axis], value)",
        )
    axes = tuple(str(child) for child in first.children)
    if function in PLACE_REDUCTIONS and len(axes) > 1:
        raise scope.error(f"{function} is a place along one axis, not along {len(axes)}", "reduce one axis at a time")
    for position, axis in enumerate(axes):
        _check_axis(axis, scope)
        if axis in scope.left:
            raise scope.error(
                f"axis {axis!r} is reduced and also on the left-hand side", "remove it from one of the two"
            )
        if axis in scope.reduced or axis in axes[:position]:
            raise scope.error(f"axis {axis!r} is reduced twice", "use another axis for the inner reduction")
    body = _value(arguments[1], replace(scope, reduced=scope.reduced + axes))
    if _is_truth(body):
        raise scope.error(f"{function} reduces numbers, not comparisons", "use select(condition, 1, 0)")
    for axis in axes:
        if axis not in used_axes([body]):
            raise scope.error(f"axis {axis!r} is reduced but the reduced value does not use it", f"remove {axis}")
    if function == "mean":
        count = math.prod(scope.sizes[axis] for axis in axes)
        return Call("div", (Reduction("sum", axes, body), Constant(float(count))))
    rank = _rank(function, axes, arguments[2], scope) if len(arguments) == 3 else None
    if rank is not None and rank in used_axes([body]):
        raise scope.error(f"{function} ranks values that are others for every {rank}", f"leave {rank} out of them")
    return Reduction(function, axes, body, rank)


def _rank(function: str, axes: tuple[str, ...], node: Node, scope: _Scope) -> str:
    """The axis by which values of one axis are counted in their order."""
    name = str(node.children[0]) if isinstance(node, Tree) and node.data == "name" else ""
    if name not in scope.left:
        remedy = f"write {function}({axes[0]}, value, rank) with rank on the left-hand side"
        raise scope.error(f"{function} has one value, and an axis of ranks behind it", remedy)
    if len(axes) > 1:
        raise scope.error(f"{function} ranks values along one axis, not along {len(axes)}", "reduce one axis at a time")
    if scope.sizes[name] > scope.sizes[axes[0]]:
        problem = f"{scope.sizes[name]} ranks of {scope.sizes[axes[0]]} values along {axes[0]}"
        raise scope.error(problem, f"use a size of {name} up to {scope.sizes[axes[0]]}")
    return name


def _scan(word: str, arguments: Sequence[Node], scope: _Scope) -> Scan:
    """A scan: its axis, what it accumulates, and options."""
    first, *others = arguments
    assert isinstance(first, Tree)
    if first.data != "name" or not others:
        raise scope.error(f"{word} goes along one axis", f"write {word}(axis, value)")
    axis = str(first.children[0])
    _check_axis(axis, scope)
    _check_bound(axis, scope)
    options = [str(each.children[0]) if isinstance(each, Tree) and each.data == "name" else "" for each in others[1:]]
    for option in options:
        if option not in _SCAN_OPTIONS or options.count(option) > 1:
            raise scope.error(
                f"{word} has one value and options behind it", f"options are {' and '.join(_SCAN_OPTIONS)}"
            )
    function = SCANS[word]
    if "exclusive" in options and function in _WITHOUT_IDENTITY:
        raise scope.error(f"{word} cannot be exclusive: of no values there is no {function}", "remove exclusive")
    body = _value(others[0], scope)
    if _is_truth(body):
        raise scope.error(f"{word} accumulates numbers, not comparisons", "use select(condition, 1, 0)")
    return Scan(function, axis, body, "reverse" in options, "exclusive" in options)


def _load(node: Tree[Token], scope: _Scope) -> Load:
    tensor = str(node.children[0])
    check_name(tensor, "expr")
    if tensor in scope.sizes:
        raise scope.error(f"{tensor!r} is also the name of an axis", "rename the tensor")
    arguments = node.children[1]
    assert isinstance(arguments, Tree)
    indices = tuple(_place(child, tensor, scope) or _index(child, tensor, scope) for child in arguments.children)
    pad = float(scope.pads[tensor]) if tensor in scope.pads else None
    if len(node.children) == 3:
        assert isinstance(node.children[2], Tree)
        *sign, magnitude = (str(token) for token in node.children[2].children)
        pad = math.inf if magnitude == "inf" else _number(magnitude, scope)
        pad = -pad if sign == ["-"] else pad
    return Load(tensor, indices, pad)


def _is_truth(value: Value) -> bool:
    return isinstance(value, Call) and value.function in _TRUTH_FUNCTIONS


def _apply(function: str, arguments: list[Value], scope: _Scope) -> Value:
    """A function of values, simplified where all of them are numbers or affine: ``2*i + 1`` is one AxisValue."""
    wants_truth = [function in ("and", "or", "not") or (function == "select" and not i) for i in range(len(arguments))]
    for argument, truth in zip(arguments, wants_truth, strict=True):
        if _is_truth(argument) and not truth:
            raise scope.error(f"a comparison is an argument of {function!r}", "use select(condition, 1, 0)")
        if truth and not _is_truth(argument):
            raise scope.error(f"{function!r} takes a comparison, not a number", "compare it, such as x != 0")
    if function == "pos":
        return arguments[0]
    if function == "div" and _as_index(arguments[1]) == AffineIndex():
        raise scope.error("a division by zero", "divide by another number, or multiply by inf")
    folded = _fold(function, arguments)
    if isinstance(folded, AxisValue) and reach(folded.index, scope.sizes) > MAX_AXIS_SIZE:
        folded = None  # beyond 32-bit integers; the floating-point arithmetic as written is not
    return folded or Call(function, tuple(arguments))


def _fold(function: str, arguments: list[Value]) -> Value | None:
    """The result of arithmetic on constants and affine axis values; None where it is neither."""
    if function not in ("add", "sub", "mul", "div", "neg"):
        return None
    first, second = arguments[0], arguments[-1]
    if isinstance(first, Constant) and isinstance(second, Constant):
        value = _fold_numbers(function, first.value, second.value)
        return Constant(value) if math.isfinite(value) or function == "neg" else None
    augend, addend = _as_index(first), _as_index(second)
    if augend is None or addend is None or function == "div":
        return None
    if function == "mul":
        if augend.terms and addend.terms:
            return None
        return AxisValue(_scaled(augend, addend.offset) if augend.terms else _scaled(addend, augend.offset))
    if function == "neg":
        return AxisValue(_scaled(augend, -1))
    return AxisValue(_plus(augend, addend if function == "add" else _scaled(addend, -1)))


def _fold_numbers(function: str, a: float, b: float) -> float:
    if function == "div":
        return a / b if b else math.nan
    return {"add": a + b, "sub": a - b, "mul": a * b, "neg": -a}[function]


def _as_index(value: Value) -> AffineIndex | None:
    if isinstance(value, AxisValue):
        return value.index
    if isinstance(value, Constant) and value.value.is_integer() and abs(value.value) <= MAX_AXIS_SIZE:
        return AffineIndex.of({}, int(value.value))
    return None


def _plus(a: AffineIndex, b: AffineIndex) -> AffineIndex:
    terms = dict(a.terms)
    for axis, coefficient in b.terms:
        terms[axis] = terms.get(axis, 0) + coefficient
    return AffineIndex.of(terms, a.offset + b.offset)


def _scaled(index: AffineIndex, factor: int) -> AffineIndex:
    return AffineIndex.of({axis: c * factor for axis, c in index.terms}, index.offset * factor)


# Indices


def _place(node: Node, tensor: str, scope: _Scope) -> GatheredIndex | None:
    """An index of ``tensor`` that is read from another one; None for any other."""
    if not (isinstance(node, Tree) and node.data == "load"):
        return None
    place = _load(node, scope)
    if place.places:
        raise scope.error(
            f"index {_index_text(node)} of {tensor} is read at an index that is read itself", "read one of them alone"
        )
    return GatheredIndex(place=place)


def _index(node: Node, tensor: str, scope: _Scope) -> AffineIndex:
    """An index of ``tensor``: affine, integer coefficients, every axis known and bound."""
    index = _linear(node)
    if index is None:
        index = _affine_by_sympy(node, tensor, scope)
    for axis in index.axes:
        _check_axis(axis, scope)
        _check_bound(axis, scope)
    if max((abs(c) for _, c in index.terms), default=0) > MAX_AXIS_SIZE or abs(index.offset) > MAX_AXIS_SIZE:
        raise scope.error(
            f"an index of {tensor} has a number beyond {MAX_AXIS_SIZE}", "use smaller strides and offsets"
        )
    return index


def _linear(node: Node) -> AffineIndex | None:
    """The index of a tree that is plainly a sum of axis, integer*axis and integer; None for anything else."""
    assert isinstance(node, Tree)
    kind = str(node.data)
    if kind == "name" and node.children[0] not in RESERVED_NAMES:
        return AffineIndex.axis(str(node.children[0]))
    if kind == "number":
        text = str(node.children[0])
        return AffineIndex.of({}, int(text)) if text.isdigit() and len(text) <= 18 else None
    if kind not in ("add", "sub", "mul", "neg"):
        return None
    parts = [_linear(child) for child in node.children]
    first, last = parts[0], parts[-1]
    if first is None or last is None:
        return None
    if kind == "neg":
        return _scaled(first, -1)
    if kind == "mul":
        if first.terms and last.terms:
            return None
        return _scaled(first, last.offset) if first.terms else _scaled(last, first.offset)
    return _plus(first, last if kind == "add" else _scaled(last, -1))


def _affine_by_sympy(node: Node, tensor: str, scope: _Scope) -> AffineIndex:
    """Any other index tree, through a sympy expression built node by node and kept expanded."""
    import sympy

    expression = sympy.expand(_sympy(node, tensor, scope))
    terms: dict[str, int] = {}
    offset = 0
    for monomial, coefficient in expression.as_coefficients_dict().items():
        if not coefficient.is_Integer:
            raise scope.error(
                f"index {_index_text(node)} of {tensor} has the coefficient {coefficient}", _AFFINE_ADVICE
            )
        if monomial == sympy.S.One:
            offset = int(coefficient)
        else:
            terms[str(monomial)] = int(coefficient)
    return AffineIndex.of(terms, offset)


def _sympy(node: Node, tensor: str, scope: _Scope) -> sympy.Expr:
    """A subtree of an index as an expanded, affine sympy expression."""
    import sympy

    assert isinstance(node, Tree)
    kind = str(node.data)
    if kind == "number":
        text = str(node.children[0])
        if not text.isdigit() or len(text) > 18:
            raise scope.error(
                f"index {_index_text(node)} of {tensor} is not a whole number below 10**18", _AFFINE_ADVICE
            )
        return sympy.Integer(int(text))
    if kind == "name" and node.children[0] not in RESERVED_NAMES:
        _check_axis(str(node.children[0]), scope)
        return sympy.Symbol(str(node.children[0]), integer=True)
    if kind not in ("add", "sub", "mul", "div", "neg", "pos"):
        raise scope.error(f"index {_index_text(node)} of {tensor} is not affine", _AFFINE_ADVICE)
    first, *others = (_sympy(child, tensor, scope) for child in node.children)
    right = others[0] if others else sympy.S.Zero
    if kind in ("neg", "pos"):
        return -first if kind == "neg" else first
    if kind in ("add", "sub"):
        return first + right if kind == "add" else first - right
    curved = right.free_symbols if kind == "div" else first.free_symbols and right.free_symbols
    if curved or (kind == "div" and right == 0):
        raise scope.error(f"index {_index_text(node)} of {tensor} is not affine", _AFFINE_ADVICE)
    return sympy.expand(first * right if kind == "mul" else first / right)


def _index_text(node: Node) -> str:
    """The source of a subtree, for messages: its tokens and operators, brackets wherever a part is compound."""
    return f"'{source_text(node)[:60]}'"
