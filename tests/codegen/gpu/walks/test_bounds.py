"""Bounds as text have the values that the model counts with."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

import numpy as np
import pytest

from codegen.gpu.walks.bounds import inside, named, numbered
from sokoban.kernel.block_range import BlockRange

OPERATIONS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Lt: operator.lt, ast.Gt: operator.gt,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., int]] = {"min": min, "max": max}


def computed(node: ast.expr) -> int:
    """The value of an expression over numbers."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -computed(operand)
        case ast.BinOp(left=left, op=operation, right=right):
            return OPERATIONS[type(operation)](computed(left), computed(right))
        case ast.Compare(left=left, ops=[comparison], comparators=[right]):
            return OPERATIONS[type(comparison)](computed(left), computed(right))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return computed(body if computed(test) else orelse)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return FUNCTIONS[name](*map(computed, arguments))
    raise AssertionError(ast.dump(node))


def value(text: str, sizes: dict[str, int]) -> int:
    """The value of C text: ``a ? b : c`` nests in its first part alone."""
    for name, size in sorted(sizes.items(), key=lambda item: -len(item[0])):
        text = re.sub(rf"\b{name}\b", str(size), text)
    text = re.sub(r"\(([^()]*) \? ([^()]*) : ([^()]*)\)", r"((\2) if (\1) else (\3))", text)
    text = re.sub(r"^(.*) \? (.*) : (.*)$", r"(\2) if (\1) else (\3)", text)
    return computed(ast.parse(text.replace(" / ", " // "), mode="eval").body)


@pytest.mark.parametrize("is_of_keys", [False, True])
@pytest.mark.parametrize(("is_causal", "window"), [(False, 0), (True, 0), (True, 24)])
def test_both_texts_have_the_bound_of_the_model(is_of_keys: bool, is_causal: bool, window: int) -> None:
    walked = BlockRange(is_of_keys=is_of_keys, queries=64, keys=80, group=2, is_causal=is_causal, window=window)
    for bound in walked.bounds:
        for row in (0, 7, 40, 63):
            expected = int(bound.value(np.array([row]), walked.sizes)[0])
            sizes = {**walked.sizes, "row": row}
            assert value(named(bound, "row"), sizes) == expected
            assert value(inside(numbered(bound, "row", walked.sizes)), sizes) == expected
            then = 8 if walked.sizes[bound.option] else 1  # bounds that no mask sets are left as they are
            assert value(numbered(bound, "row", walked.sizes, " / 8"), sizes) == expected // then
