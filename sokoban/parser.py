"""Text of the tensor-expression language -> :class:`TensorExpr`.

The text is parsed by a real grammar (LALR) into a tree; values and indices are built from that tree and nothing is
ever evaluated as Python. What the language means, with every error, is in ``docs/operators.md``.

Which of ``max(a, b)`` and ``max(axis, body)`` is meant (``min`` alike): it reduces if the first argument is a list of
axes, or the bare name of an axis that is neither on the statement's left-hand side nor already reduced around the
call; else it is the larger of two values. ``sum``, ``prod`` and ``mean`` always reduce.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from hal import InputError
from sokoban.expression import (
    FLOAT_DTYPES,
    FUNCTIONS,
    REDUCTION_IDENTITY,
    AffineIndex,
    Axis,
    AxisValue,
    Call,
    Constant,
    Load,
    Reduction,
    Statement,
    Tensor,
    TensorExpr,
    Value,
    loads,
    rewrite,
    used_axes,
    walk,
)

if TYPE_CHECKING:
    import sympy

Node = Tree[Token] | Token
Pads = Mapping[str, float]

MAX_TEXT_BYTES = 64 * 1024
MAX_NESTING = 100
MAX_AXIS_SIZE = 2**31 - 1
MAX_ELEMENTS = 2**31 - 1
MAX_STATEMENTS = 256
MAX_NAME_LENGTH = 100

NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED_NAMES = frozenset({"and", "or", "not", "inf"})
REDUCERS = (*REDUCTION_IDENTITY, "mean")
_TRUTH_FUNCTIONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"})
_COMPARISONS = {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne"}
_AFFINE_ADVICE = "an index is a sum of integer*axis terms plus an integer"

GRAMMAR = r"""
// The tensor-expression language. Statements are separated by ";" or a line break outside brackets.
start: _SEPARATOR* statement (_SEPARATOR+ statement)* _SEPARATOR*

statement: NAME "[" arguments "]" "=" disjunction

?disjunction: conjunction
            | disjunction "or" conjunction -> or_
?conjunction: negation
            | conjunction "and" negation -> and_
?negation: comparison
         | "not" negation -> not_
?comparison: additive
           | additive COMPARISON additive -> compare
?additive: product
         | additive "+" product -> add
         | additive "-" product -> sub
?product: unary
        | product "*" unary -> mul
        | product "/" unary -> div
?unary: power
      | "-" unary -> neg
      | "+" unary -> pos
?power: atom
      | atom "**" unary -> pow
?atom: NUMBER -> number
     | NAME -> name
     | NAME "[" arguments pad? "]" -> load
     | NAME "(" _argument ("," _argument)* ")" -> call
     | "(" disjunction ")"

_argument: disjunction | axis_list
axis_list: "[" NAME ("," NAME)* "]"
         | "(" NAME ("," NAME)+ ")"
arguments: disjunction ("," disjunction)*
pad: "|" "pad" "=" SIGN? (NUMBER | INF)

COMPARISON: "<=" | ">=" | "==" | "!=" | "<" | ">"
INF: "inf"
SIGN: "+" | "-"
NUMBER: /([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?/
NAME: /[A-Za-z_][A-Za-z0-9_]*/
_SEPARATOR: /[;\n]/
%ignore /[ \t\r]+/
"""

_TERMINAL_TEXT = {
    "LSQB": "'['", "RSQB": "']'", "LPAR": "'('", "RPAR": "')'", "COMMA": "','", "EQUAL": "'='",
    "NUMBER": "a number", "NAME": "a name", "PAD": "'pad'", "INF": "'inf'", "SIGN": "a sign", "VBAR": "'|'",
}  # fmt: skip


def parse_program(
    text: str,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, str],
    accumulate: str | None = None,
    name: str = "expr",
    shapes: Mapping[str, Sequence[int]] | None = None,
    pads: Pads | None = None,
    default_dtype: str = "float32",
    external_shapes: Mapping[str, Sequence[int]] | None = None,
) -> TensorExpr:
    """``text`` -> a normalised expression: every statement is one reduction, or point-wise.

    Args:
        sizes: axis name -> number of elements; exactly the axes the text uses.
        dtypes: tensor name -> dtype. Other inputs and the output get ``default_dtype``; other tensors in between are
            never stored and get the dtype of ``accumulate``.
        accumulate: dtype of the arithmetic; None is float64 where a tensor is float64, else float32.
        shapes: input name -> shape. Inferred from the largest index where the input is never padded.
        pads: tensor name -> value of its elements outside, for loads that do not say ``| pad=`` themselves.
        external_shapes: tensor name -> the caller's shape of it, where it differs (:class:`Tensor`).

    Raises:
        InputError: ``field`` is the argument it is about (``expr``, ``sizes.k``, ``dtypes.A``, ``shapes.X``).
    """
    shapes, pads = shapes or {}, pads or {}
    check_sizes(sizes)
    tree = parse_tree(text)
    definitions = _build_statements(tree, sizes, pads)
    statements = _lift_reductions(definitions, sizes)
    sizes = {**sizes, **{axis: 1 for s in statements for axis in s.axes if axis not in sizes}}
    _check_every_size_is_used(statements, sizes)
    _check_order_and_use(statements)
    tensor_shapes = _tensor_shapes(statements, sizes, shapes)
    statements = [replace(s, value=_check_loads(s, sizes, tensor_shapes)) for s in statements]
    user_tensors = {d.tensor for d in definitions}
    tensor_dtypes, accumulate = _tensor_dtypes(
        statements, tensor_shapes, user_tensors, dtypes, accumulate, default_dtype
    )
    for key in pads:
        if key not in tensor_shapes:
            raise InputError(f"pad.{key}", "the expression has no tensor of this name", "remove it")
    external = {key: tuple(shape) for key, shape in (external_shapes or {}).items()}
    tensors = tuple(Tensor(key, shape, tensor_dtypes[key], external.get(key)) for key, shape in tensor_shapes.items())
    axes = tuple(Axis(axis, sizes[axis]) for axis in _axis_order(statements))
    return TensorExpr(name, axes, tensors, tuple(statements), accumulate)


# Text to tree


@cache
def _parser() -> Lark:
    return Lark(GRAMMAR, parser="lalr", maybe_placeholders=False)


def parse_tree(text: str) -> Tree[Token]:
    """The syntax tree of a program.

    Raises:
        InputError: not a program of the language, longer than :data:`MAX_TEXT_BYTES`, or nested too deep.
    """
    if len(text) > MAX_TEXT_BYTES or len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        raise InputError(
            "expr", f"{len(text)} characters; at most {MAX_TEXT_BYTES} bytes are read", "split the program"
        )
    if not text.strip("; \t\r\n"):
        raise InputError("expr", "is empty", "write a statement such as C[i,j] = sum(k, A[i,k] * B[k,j])")
    try:
        tree = _parser().parse(_join_bracketed_lines(text))
    except UnexpectedInput as error:
        raise _syntax_error(text, error) from None
    _check_depth(tree)
    if len(tree.children) > MAX_STATEMENTS:
        raise InputError("expr", f"{len(tree.children)} statements; at most {MAX_STATEMENTS} are read", "split it")
    return tree


def _join_bracketed_lines(text: str) -> str:
    """Line breaks inside brackets become spaces, so that columns stay; too many open brackets are refused."""
    characters = list(text)
    depth = 0
    for position, character in enumerate(characters):
        if character in "([":
            depth += 1
            if depth > MAX_NESTING:
                raise _too_deep()
        elif character in ")]":
            depth = max(depth - 1, 0)
        elif character == "\n" and depth:
            characters[position] = " "
    return "".join(characters)


def _check_depth(tree: Tree[Token]) -> None:
    """Refuses trees that recursive functions could not walk (long operator chains nest as deep as brackets)."""
    pending: list[tuple[Tree[Token], int]] = [(tree, -2)]  # the program and its statements are no nesting
    while pending:
        node, depth = pending.pop()
        if depth > MAX_NESTING:
            raise _too_deep()
        pending.extend((child, depth + 1) for child in node.children if isinstance(child, Tree))


def _too_deep() -> InputError:
    return InputError("expr", f"nested deeper than {MAX_NESTING} levels", "split it into several statements")


def _syntax_error(text: str, error: UnexpectedInput) -> InputError:
    expected: set[str] = set()
    found = "end of text"
    if isinstance(error, UnexpectedToken):
        expected = set(error.accepts or error.expected)
        if error.token.type != "$END":
            found = _quote(str(error.token))
    elif isinstance(error, UnexpectedCharacters):
        found = _quote(error.char)
    at_end = found == "end of text"
    position = len(text) if at_end else min(getattr(error, "pos_in_stream", None) or 0, len(text))
    line_start = text.rfind("\n", 0, position) + 1
    line = text.count("\n", 0, position) + 1
    place = (
        f"column {position - line_start + 1}"
        if "\n" not in text
        else f"line {line}, column {position - line_start + 1}"
    )
    names = sorted(_TERMINAL_TEXT.get(terminal, "") for terminal in expected)
    remedy = f"expected {' or '.join(names)}" if 0 < len(names) <= 3 and all(names) else ""
    return InputError("expr", f"syntax error at {place}: unexpected {found}", remedy)


def _quote(text: str) -> str:
    return "a line break" if text == "\n" else f"'{text[:30]}'"


# Checks of what comes with the text


def shown(value: object) -> str:
    """A value of decoded JSON for a message; lists and objects, which may be deep, by their kind alone."""
    if isinstance(value, dict):
        return "an object"
    return "an array" if isinstance(value, list | tuple) else repr(value)


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raises InputError unless every key is a usable axis name and every value a positive 32-bit integer."""
    for axis, size in sizes.items():
        check_name(axis, f"sizes.{axis}")
        if isinstance(size, bool) or not isinstance(size, int):
            raise InputError(f"sizes.{axis}", f"expected a whole number, got {shown(size)}", "")
        if not 0 < size <= MAX_AXIS_SIZE:
            raise InputError(f"sizes.{axis}", f"{size} is not between 1 and {MAX_AXIS_SIZE}", "")


def check_name(name: str, where: str) -> None:
    """An axis or tensor name: letters, digits and underscore, not a reserved word."""
    if not NAME_PATTERN.fullmatch(name) or name in RESERVED_NAMES:
        raise InputError(where, f"{name!r} is not a usable name", "use letters, digits and _, starting with a letter")
    if len(name) > MAX_NAME_LENGTH:
        raise InputError(where, f"a name of {len(name)} characters; at most {MAX_NAME_LENGTH} are read", "shorten it")


# Tree to values


@dataclass(frozen=True)
class _Scope:
    """What one statement may refer to while its right-hand side is built."""

    tensor: str
    left: tuple[str, ...]
    sizes: Mapping[str, int]
    pads: Pads
    reduced: tuple[str, ...] = ()

    def error(self, problem: str, remedy: str = "") -> InputError:
        return InputError("expr", f"statement {self.tensor}: {problem}", remedy)


def _build_statements(tree: Tree[Token], sizes: Mapping[str, int], pads: Pads) -> list[Statement]:
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
    if function not in FUNCTIONS:
        known = ", ".join(sorted({*FUNCTIONS, *REDUCERS} - RESERVED_NAMES))
        raise scope.error(f"unknown function {function!r}", f"known: {known}")
    if len(arguments) != FUNCTIONS[function]:
        raise scope.error(f"{function} takes {FUNCTIONS[function]} argument(s), got {len(arguments)}")
    return _apply(function, [_value(argument, scope) for argument in arguments], scope)


def _is_reduction(function: str, arguments: Sequence[Node], scope: _Scope) -> bool:
    """The rule of the module's docstring."""
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
    if first.data not in ("axis_list", "name") or len(arguments) != 2:
        raise scope.error(
            f"{function} reduces one value over axes",
            f"write {function}(axis, value) or {function}([axis, axis], value)",
        )
    axes = tuple(str(child) for child in first.children)
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
    return Reduction(function, axes, body)


def _load(node: Tree[Token], scope: _Scope) -> Load:
    tensor = str(node.children[0])
    check_name(tensor, "expr")
    if tensor in scope.sizes:
        raise scope.error(f"{tensor!r} is also the name of an axis", "rename the tensor")
    arguments = node.children[1]
    assert isinstance(arguments, Tree)
    indices = tuple(_index(child, tensor, scope) for child in arguments.children)
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
    folded = _fold(function, arguments)
    if isinstance(folded, AxisValue) and _reach(folded.index, scope.sizes) > MAX_AXIS_SIZE:
        folded = None  # beyond 32-bit integers; the floating-point arithmetic as written is not
    return folded or Call(function, tuple(arguments))


def _fold(function: str, arguments: list[Value]) -> Value | None:
    """Arithmetic on constants and affine axis values done now; None where there is nothing to do."""
    if function not in ("add", "sub", "mul", "div", "neg"):
        return None
    first, second = arguments[0], arguments[-1]
    if isinstance(first, Constant) and isinstance(second, Constant):
        value = _fold_numbers(function, first.value, second.value)
        return Constant(value) if math.isfinite(value) or function == "neg" else None
    left, right = _as_index(first), _as_index(second)
    if left is None or right is None or function == "div":
        return None
    if function == "mul":
        if left.terms and right.terms:
            return None
        return AxisValue(_scaled(left, right.offset) if left.terms else _scaled(right, left.offset))
    if function == "neg":
        return AxisValue(_scaled(left, -1))
    return AxisValue(_plus(left, right if function == "add" else _scaled(right, -1)))


def _fold_numbers(function: str, a: float, b: float) -> float:
    if function == "div":
        return a / b if b else math.nan
    return {"add": a + b, "sub": a - b, "mul": a * b, "neg": -a}[function]


def _reach(index: AffineIndex, sizes: Mapping[str, int]) -> int:
    """No partial sum of ``index`` is larger than this in magnitude."""
    return abs(index.offset) + sum(abs(coefficient) * (sizes[axis] - 1) for axis, coefficient in index.terms)


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


# Tree to indices


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
    left, right = parts[0], parts[-1]
    if left is None or right is None:
        return None
    if kind == "neg":
        return _scaled(left, -1)
    if kind == "mul":
        if left.terms and right.terms:
            return None
        return _scaled(left, right.offset) if left.terms else _scaled(right, left.offset)
    return _plus(left, right if kind == "add" else _scaled(right, -1))


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
    left, *rest = (_sympy(child, tensor, scope) for child in node.children)
    right = rest[0] if rest else sympy.S.Zero
    if kind in ("neg", "pos"):
        return -left if kind == "neg" else left
    if kind in ("add", "sub"):
        return left + right if kind == "add" else left - right
    curved = right.free_symbols if kind == "div" else left.free_symbols and right.free_symbols
    if curved or (kind == "div" and right == 0):
        raise scope.error(f"index {_index_text(node)} of {tensor} is not affine", _AFFINE_ADVICE)
    return sympy.expand(left * right if kind == "mul" else left / right)


def _index_text(node: Node) -> str:
    """The source of a subtree, for messages: its tokens and operators, brackets wherever a part is compound."""
    return f"'{_source(node)[:60]}'"


def _source(node: Node) -> str:
    if isinstance(node, Token):
        return str(node)
    parts = [_source(child) for child in node.children]
    sign = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "neg": "-", "pos": "+"}.get(str(node.data))
    if sign and len(parts) == 1:
        return f"{sign}{parts[0]}"
    if sign:
        compound = [isinstance(child, Tree) and len(child.children) > 1 for child in node.children]
        if node.data not in ("add", "sub"):
            parts = [f"({part})" if wide else part for part, wide in zip(parts, compound, strict=True)]
        return sign.join(parts)
    if node.data == "compare":
        return "".join(parts)
    if node.data in ("and_", "or_", "not_"):
        word = str(node.data).rstrip("_")
        return f" {word} ".join(parts) if len(parts) == 2 else f"{word} {parts[0]}"
    if node.data == "load":
        return f"{parts[0]}[{parts[1]}]"
    return f"{parts[0]}({','.join(parts[1:])})" if node.data == "call" else ",".join(parts)


# Values to normalised statements


@dataclass
class _Lifted:
    """Reductions taken out of one statement, each a statement of its own."""

    owner: Statement
    taken: set[str]
    unit_axis: str
    order: tuple[str, ...]
    statements: list[Statement] = field(default_factory=list)
    loads: dict[Reduction, Load] = field(default_factory=dict)

    def lift(self, value: Value, *, top: bool = False) -> Value:
        """``value`` without reductions inside (``top`` itself may be one): ``sum(k, X[i,k]) / 2 -> Y_sum[i] / 2``."""
        if isinstance(value, Call):
            return Call(value.function, tuple(self.lift(argument) for argument in value.arguments))
        if not isinstance(value, Reduction):
            return value
        reduction = Reduction(value.function, value.axes, self.lift(value.body))
        return reduction if top else self._load_of(reduction)

    def _load_of(self, reduction: Reduction) -> Load:
        if reduction not in self.loads:
            used = set(used_axes([reduction.body])) - set(reduction.axes)
            axes = tuple(axis for axis in self.order if axis in used)
            name = unused_name(f"{self.owner.tensor}_{reduction.function}", self.taken)
            self.taken.add(name)
            self.statements.append(Statement(name, axes or (self.unit_axis,), reduction))
            indices = tuple(AffineIndex.axis(axis) for axis in axes) or (AffineIndex(),)
            self.loads[reduction] = Load(name, indices)
        return self.loads[reduction]


def unused_name(stem: str, taken: set[str]) -> str:
    """``stem``, or the first of ``stem_2``, ``stem_3``, ... that is not taken."""
    name, number = stem, 2
    while name in taken:
        name, number = f"{stem}_{number}", number + 1
    return name


def _lift_reductions(definitions: Sequence[Statement], sizes: Mapping[str, int]) -> list[Statement]:
    """Statements that are each one reduction or point-wise; a scalar reduction gets an axis ``one`` of size 1."""
    taken = {*sizes, *(d.tensor for d in definitions), *(load.tensor for d in definitions for load in loads(d.value))}
    unit_axis = unused_name("one", taken)
    taken.add(unit_axis)
    result: list[Statement] = []
    for definition in definitions:
        inner = (axis for node in walk(definition.value) if isinstance(node, Reduction) for axis in node.axes)
        own_unit = next((axis for axis in definition.axes if sizes[axis] == 1), unit_axis)
        lifted = _Lifted(definition, taken, own_unit, (*definition.axes, *dict.fromkeys(inner)))
        value = lifted.lift(definition.value, top=True)
        result += [*lifted.statements, Statement(definition.tensor, definition.axes, value)]
    return result


def _axis_order(statements: Sequence[Statement]) -> tuple[str, ...]:
    """Axis names by first use: what a statement defines, then what it reduces."""
    return tuple(dict.fromkeys(axis for s in statements for axis in _statement_axes(s)))


def _statement_axes(statement: Statement) -> Iterator[str]:
    yield from statement.axes
    if statement.reduction:
        yield from statement.reduction.axes


def _check_every_size_is_used(statements: Sequence[Statement], sizes: Mapping[str, int]) -> None:
    used = set(_axis_order(statements))
    for axis in sizes:
        if axis not in used:
            raise InputError(f"sizes.{axis}", "the expression does not use this axis", f"remove {axis} from sizes")


def _check_order_and_use(statements: Sequence[Statement]) -> None:
    defined_at = {}
    for position, statement in enumerate(statements):
        if statement.tensor in defined_at:
            raise InputError("expr", f"tensor {statement.tensor} is assigned twice", "give the second one another name")
        defined_at[statement.tensor] = position
    read: set[str] = set()
    for position, statement in enumerate(statements):
        for load in loads(statement.value):
            read.add(load.tensor)
            if defined_at.get(load.tensor, -1) >= position:
                raise InputError(
                    "expr",
                    f"statement {statement.tensor} reads {load.tensor} before it is defined",
                    f"move the statement of {load.tensor} up",
                )
    for statement in statements[:-1]:
        if statement.tensor not in read:
            raise InputError(
                "expr", f"tensor {statement.tensor} is never read; only the last statement is the output", "remove it"
            )


# Shapes and dtypes


def _tensor_shapes(
    statements: Sequence[Statement], sizes: Mapping[str, int], shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor: inputs by first use, then what the statements define."""
    written = {s.tensor: tuple(sizes[axis] for axis in s.axes) for s in statements}
    accesses: dict[str, list[Load]] = {}
    for load in (load for s in statements for load in loads(s.value)):
        accesses.setdefault(load.tensor, []).append(load)
    for tensor in shapes:
        if tensor not in accesses or tensor in written:
            raise InputError(f"shapes.{tensor}", "the expression has no input of this name", "remove it from shapes")
    result = {
        tensor: check_shape(tensor, shapes[tensor]) if tensor in shapes else _inferred_shape(tensor, group, sizes)
        for tensor, group in accesses.items()
        if tensor not in written
    }
    result.update(written)
    for tensor, group in accesses.items():
        for load in group:
            if len(load.indices) != len(result[tensor]):
                raise InputError(
                    "expr", f"{tensor} has {len(result[tensor])} dimension(s) and is read with {len(load.indices)}", ""
                )
    for tensor, shape in result.items():
        if math.prod(shape) > MAX_ELEMENTS:
            extents = "x".join(map(str, shape))
            raise InputError(
                f"shapes.{tensor}",
                f"{extents} is more than {MAX_ELEMENTS} elements (32-bit indexing)",
                "split the work",
            )
    return result


def check_shape(tensor: str, shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` as a tuple; raises InputError unless every extent is a positive 32-bit integer."""
    for extent in shape:
        if isinstance(extent, bool) or not isinstance(extent, int) or not 0 < extent <= MAX_AXIS_SIZE:
            raise InputError(f"shapes.{tensor}", f"{shown(extent)} is not between 1 and {MAX_AXIS_SIZE}", "")
    return tuple(shape)


def _inferred_shape(tensor: str, group: Sequence[Load], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The smallest shape that holds every index."""
    if any(load.pad is not None for load in group):
        raise InputError(
            f"shapes.{tensor}",
            "the shape of a padded input cannot be inferred",
            f'give it: "shapes": {{"{tensor}": [...]}}',
        )
    rank = len(group[0].indices)
    highs = [max(load.indices[d].bounds(sizes)[1] for load in group if len(load.indices) == rank) for d in range(rank)]
    return tuple(max(high + 1, 1) for high in highs)


def _check_loads(statement: Statement, sizes: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> Value:
    """The statement's value; loads that are always inside lose their pad, others must have one."""
    replacements: dict[Value, Value] = {}
    for load in loads(statement.value):
        outside = None
        for dimension, (index, extent) in enumerate(zip(load.indices, shapes[load.tensor], strict=True)):
            low, high = index.bounds(sizes)
            if _reach(index, sizes) > MAX_AXIS_SIZE:
                raise InputError(
                    "expr",
                    f"statement {statement.tensor}: an index of {load.tensor} goes beyond 32-bit integers",
                    "use smaller strides and offsets",
                )
            if low < 0 or high >= extent:
                outside = outside or (dimension, low, high, extent)
        if outside is None and load.pad is not None:
            replacements[load] = replace(load, pad=None)
        if outside is not None and load.pad is None:
            dimension, low, high, extent = outside
            raise InputError(
                "expr",
                f"statement {statement.tensor} reads {load.tensor} dimension {dimension} at {low} to {high}, "
                f"outside 0 to {extent - 1} of its shape {list(shapes[load.tensor])}",
                "write | pad=0 in the brackets, or correct the index, size or shape",
            )
    return rewrite(statement.value, replacements) if replacements else statement.value


def _tensor_dtypes(
    statements: Sequence[Statement],
    shapes: Mapping[str, tuple[int, ...]],
    user_tensors: set[str],
    dtypes: Mapping[str, str],
    accumulate: str | None,
    default_dtype: str,
) -> tuple[dict[str, str], str]:
    for tensor, dtype in dtypes.items():
        check_dtype(dtype, f"dtypes.{tensor}")
        if tensor not in shapes or (tensor not in user_tensors and any(s.tensor == tensor for s in statements)):
            raise InputError(f"dtypes.{tensor}", "the expression has no tensor of this name", "remove it from dtypes")
    inner = {statement.tensor for statement in statements[:-1]}
    result = {tensor: dtypes.get(tensor, default_dtype) for tensor in shapes if tensor in dtypes or tensor not in inner}
    widest = "float64" if "float64" in result.values() else "float32"
    accumulate = widest if accumulate is None else accumulate
    check_accumulate(accumulate, widest)
    return {tensor: result.get(tensor, accumulate) for tensor in shapes}, accumulate


def check_dtype(dtype: object, where: str) -> None:
    """Raises InputError unless ``dtype`` is one of :data:`FLOAT_DTYPES`."""
    if dtype not in FLOAT_DTYPES:
        raise InputError(where, f"unknown dtype {shown(dtype)}", f"use one of {', '.join(FLOAT_DTYPES)}")


def check_accumulate(accumulate: str, widest: str) -> None:
    """Raises InputError unless values of dtype ``widest`` can be computed in ``accumulate``."""
    if accumulate not in ("float32", "float64"):
        raise InputError("accumulate", f"unknown dtype {accumulate!r}", "use float32 or float64")
    if (accumulate, widest) == ("float32", "float64"):
        raise InputError("accumulate", "float32 is narrower than the float64 tensors", "use float64")
