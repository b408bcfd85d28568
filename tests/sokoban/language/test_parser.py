"""The expression language: what it means, and every way to get it wrong."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from hal.support.errors import InputError
from sokoban.language.expression import (
    AffineIndex,
    AxisValue,
    Call,
    Constant,
    Load,
    Reduction,
    Statement,
    Tensor,
    TensorExpr,
)
from sokoban.language.parser import parse_program

AFFINE = "an index is a sum of integer*axis terms plus an integer, or one element of an integer tensor"


def parse(text: str, pads: dict[str, float] | None = None, shapes: Any = None, **sizes: int) -> TensorExpr:
    return parse_program(text, sizes, {}, pads=pads, shapes=shapes)


def plain(tensor: str, *axes: str) -> Load:
    return Load(tensor, tuple(AffineIndex.axis(axis) for axis in axes))


def test_matmul_with_epilogue() -> None:
    expr = parse_program(
        "C[i,j] = sum(k, A[i,k] * B[k,j]); D[i,j] = relu(C[i,j] + bias[j])",
        {"k": 7, "j": 5, "i": 3},
        {"A": "float16", "B": "float16", "D": "float16"},
        name="fused",
    )
    product = Call("mul", (plain("A", "i", "k"), plain("B", "k", "j")))
    assert expr.statements == (
        Statement("C", ("i", "j"), Reduction("sum", ("k",), product)),
        Statement("D", ("i", "j"), Call("relu", (Call("add", (plain("C", "i", "j"), plain("bias", "j"))),))),
    )
    assert expr.tensors == (
        Tensor("A", (3, 7), "float16"),
        Tensor("B", (7, 5), "float16"),
        Tensor("bias", (5,), "float32"),
        Tensor("C", (3, 5), "float32"),
        Tensor("D", (3, 5), "float16"),
    )
    assert [axis.name for axis in expr.axes] == ["i", "j", "k"]
    assert (expr.name, expr.accumulate) == ("fused", "float32")


def test_float64_tensor_makes_accumulate_float64() -> None:
    assert parse_program("Y[i] = X[i]", {"i": 3}, {"X": "float64"}).accumulate == "float64"


def test_reduction_inside_arithmetic_becomes_a_statement() -> None:
    expr = parse("Y[i] = sum(k, X[i,k]) / 1024 + sum(k, X[i,k])", i=3, k=7)
    total = plain("Y_sum", "i")
    assert expr.statements == (
        Statement("Y_sum", ("i",), Reduction("sum", ("k",), plain("X", "i", "k"))),
        Statement("Y", ("i",), Call("add", (Call("div", (total, Constant(1024.0))), total))),
    )


def test_reduction_inside_a_reduction_keeps_the_outer_axis() -> None:
    expr = parse("Y[i] = sum(k, max(j, X[i,j,k]))", i=3, j=5, k=7)
    assert expr.statements == (
        Statement("Y_max", ("i", "k"), Reduction("max", ("j",), plain("X", "i", "j", "k"))),
        Statement("Y", ("i",), Reduction("sum", ("k",), plain("Y_max", "i", "k"))),
    )


def test_scalar_reduction_gets_an_axis_of_size_one() -> None:
    expr = parse("Y[i] = X[i] / sum(j, X[j])", i=3, j=3)
    assert expr.statements[0] == Statement("Y_sum", ("one",), Reduction("sum", ("j",), plain("X", "j")))
    assert expr.statements[1].value == Call("div", (plain("X", "i"), Load("Y_sum", (AffineIndex(),))))
    assert expr.sizes == {"one": 1, "i": 3, "j": 3}


def test_generated_names_avoid_the_text() -> None:
    expr = parse("Y_sum[i] = X[i]; Y[i] = Y_sum[i] + sum(k, X[k])", i=3, k=3)
    assert [s.tensor for s in expr.statements] == ["Y_sum", "Y_sum_2", "Y"]


def test_mean_is_sum_over_count() -> None:
    expr = parse("Y[i] = mean((j, k), X[i,j,k])", i=3, j=5, k=7)
    assert expr.statements[1].value == Call("div", (plain("Y_sum", "i"), Constant(5.0 * 7.0)))


def test_max_reduces_over_a_free_axis_and_compares_otherwise() -> None:
    value = parse("Y[i] = max(i, X[i])", i=3).statements[0].value
    assert value == Call("max", (AxisValue(AffineIndex.axis("i")), plain("X", "i")))
    assert parse("Y[i] = max(j, X[i,j])", i=3, j=5).statements[0].reduction is not None
    body = parse("Y[i] = sum(j, max(j, X[i,j]))", i=3, j=5).statements[0].reduction
    assert body is not None and body.body == Call("max", (AxisValue(AffineIndex.axis("j")), plain("X", "i", "j")))
    assert parse("Y[i] = min([j], X[i,j])", i=3, j=5).statements[0].reduction is not None


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("2*i + j - 1", AffineIndex((("i", 2), ("j", 1)), -1)),
        ("j*3 - -2", AffineIndex((("j", 3),), 2)),
        ("2*(i + 3*(j - 1)) + 7", AffineIndex((("i", 2), ("j", 6)), 1)),
        ("(4*i + 6*j)/2", AffineIndex((("i", 2), ("j", 3)))),
        ("i + j - i", AffineIndex((("j", 1),))),
        ("+i", AffineIndex((("i", 1),))),
        ("5", AffineIndex((), 5)),
    ],
)
def test_affine_index(index: str, expected: AffineIndex) -> None:
    value = parse(f"Y[i,j] = X[{index} | pad=0]", shapes={"X": [2]}, i=3, j=5).statements[0].value
    assert isinstance(value, Load) and value.indices == (expected,)


def test_linear_index_does_not_import_sympy() -> None:
    program = (
        "import sys; from sokoban.language.parser import parse_program;"
        "parse_program('Y[i,j] = X[2*i + j*3 - 1 | pad=0]', {'i': 3, 'j': 5}, {}, shapes={'X': [9]});"
        "sys.exit('sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_arithmetic_on_axes_is_one_value() -> None:
    value = parse("Y[i] = X[i] * (2*i - 3 + 1)", i=3).statements[0].value
    assert value == Call("mul", (plain("X", "i"), AxisValue(AffineIndex((("i", 2),), -2))))
    beyond = parse("Y[i] = X[i] * (i*2000000000)", i=3).statements[0].value
    assert beyond == Call("mul", (plain("X", "i"), Call("mul", (AxisValue(AffineIndex.axis("i")), Constant(2e9)))))


def test_precedence() -> None:
    value = parse("Y[i] = -X[i]**2 + 2*3 - X[i]", i=3).statements[0].value
    square = Call("pow", (plain("X", "i"), Constant(2.0)))
    assert value == Call("sub", (Call("add", (Call("neg", (square,)), Constant(6.0))), plain("X", "i")))
    chosen = parse("Y[i] = select(not i < 2 and i == 1 or X[i] != 0, -inf, .5e1)", i=3).statements[0].value
    index = AxisValue(AffineIndex.axis("i"))
    condition = Call(
        "or",
        (
            Call("and", (Call("not", (Call("lt", (index, Constant(2.0))),)), Call("eq", (index, Constant(1.0))))),
            Call("ne", (plain("X", "i"), Constant(0.0))),
        ),
    )
    assert chosen == Call("select", (condition, Constant(-math.inf), Constant(5.0)))


def test_lines_may_break_inside_brackets_and_end_statements_outside() -> None:
    expr = parse("\nC[i] = sum(k,\n    A[i,\n k])\n\nD[i] = C[i] + 1;\n", i=3, k=5)
    assert [s.tensor for s in expr.statements] == ["C", "D"]


def test_pad_in_the_brackets_goes_before_pad_of_the_tensor() -> None:
    expr = parse("Y[i] = X[i - 1] + X[i + 1 | pad=-inf] + X[i]", pads={"X": 0.5}, shapes={"X": [3]}, i=3)
    by_offset = {load.indices[0].offset: load.pad for s in expr.statements for load in _loads(s)}
    assert by_offset == {-1: 0.5, 1: -math.inf, 0: None}  # never outside needs no pad


@pytest.mark.parametrize(
    ("dtype", "pad", "kept"),
    [("float16", 0.3, 0.300048828125), ("bfloat16", -0.3, -0.30078125), ("float32", 0.3, 0.3), ("int8", -2.0, -2.0),
     ("int8", math.inf, 127.0), ("int8", -math.inf, -128.0), ("int32", -math.inf, -(2.0**31)),
     ("float16", -math.inf, -math.inf)],
)  # fmt: skip
def test_a_pad_is_an_element_of_its_tensor(dtype: str, pad: float, kept: float) -> None:
    expr = parse_program("Y[i] = X[i - 1]", {"i": 3}, {"X": dtype, "Y": "float32"}, pads={"X": pad}, shapes={"X": [3]})
    assert _loads(expr.statements[0])[0].pad == kept


@pytest.mark.parametrize(("pad", "shown"), [(-0.5, "-0.5"), (128.0, "128")])
def test_what_pads_integers_is_one_of_them(pad: float, shown: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_program("Y[i] = X[i - 1]", {"i": 3}, {"X": "int8", "Y": "float32"}, pads={"X": pad}, shapes={"X": [3]})
    problem = f"expr: {shown} pads X, whose elements are int8; pad by a whole number of int8"
    assert str(caught.value) == problem


def _loads(statement: Statement) -> list[Load]:
    from sokoban.language.expression import loads

    return list(loads(statement.value))


def test_input_shape_is_the_largest_index() -> None:
    expr = parse("Y[i] = X[2*i + 1] + X[i]", i=4)
    assert expr.inputs == (Tensor("X", (2 * 3 + 1 + 1,), "float32"),)


NO_SCALARS = "scalar names are not supported: give the axis a size, write the number, or index a tensor"
OUTSIDE = "write | pad=0 in the brackets, or correct the index, size or shape"
DEEP = "split it into several statements"
ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("__import__('os').system('id')", {}, "expr: syntax error at column 11: unexpected '('; expected '['"),
    ("Y[i] = ", {"i": 3}, "expr: syntax error at column 8: unexpected end of text"),
    ("Y[i] = X[i] X[i]", {"i": 3}, "expr: syntax error at column 13: unexpected 'X'"),
    ("Y[i] = X[i].real", {"i": 3}, "expr: syntax error at column 12: unexpected '.'"),
    ("Y[i] = 1 < 2 < 3", {"i": 3}, "expr: syntax error at column 14: unexpected '<'"),
    ("A[i] = X[i]\nB[i] = = 1", {"i": 3}, "expr: syntax error at line 2, column 8: unexpected '='"),
    ("Y[i] = sum([k+1], X[k])", {"k": 3}, "expr: syntax error at column 14: unexpected '+'; expected ',' or ']'"),
    (" ;\n", {}, "expr: is empty; write a statement such as C[i,j] = sum(k, A[i,k] * B[k,j])"),
    ("Y[i] = " + "(" * 101, {"i": 3}, f"expr: nested deeper than 100 levels; {DEEP}"),
    ("Y[i] = " + "-" * 30_000 + "1", {"i": 3}, f"expr: nested deeper than 100 levels; {DEEP}"),
    ("Y[i] = " + "2**" * 9_000 + "1", {"i": 3}, f"expr: nested deeper than 100 levels; {DEEP}"),
    ("Y[i] = X[i]" + "+1" * 200, {"i": 3}, f"expr: nested deeper than 100 levels; {DEEP}"),
    ("Y" * 65_537, {}, "expr: 65537 characters; at most 65536 bytes are read; split the program"),
    ("Y[i] = 1;" * 257, {"i": 3}, "expr: 257 statements; at most 256 are read; split it"),
    ("Y[i] = X[i]", {}, "sizes: axis 'i' of statement Y has no size; add \"i\" to sizes"),
    ("Y[i] = X[i,k]", {"i": 3}, "sizes: axis 'k' of statement Y has no size; add \"k\" to sizes"),
    ("Y[i] = sum(k, X[i])", {"i": 3}, "sizes: axis 'k' of statement Y has no size; add \"k\" to sizes"),
    ("Y[i] = X[i]", {"i": 0}, "sizes.i: 0 is not between 1 and 2147483647"),
    ("Y[i] = X[i]", {"i": -3}, "sizes.i: -3 is not between 1 and 2147483647"),
    ("Y[i] = X[i]", {"i": 2**31}, "sizes.i: 2147483648 is not between 1 and 2147483647"),
    ("Y[i] = X[i]", {"i": True}, "sizes.i: expected a whole number, got True"),
    ("Y[i] = X[i]", {"i": 3.0}, "sizes.i: expected a whole number, got 3.0"),
    ("Y[i] = X[i]", {"i": 3, "j": 5}, "sizes.j: the expression does not use this axis; remove j from sizes"),
    ("Y[i,j] = X[i]", {"i": 2**16, "j": 2**15},
     "shapes.Y: 65536x32768 is more than 2147483647 elements (32-bit indexing); split the work"),
    ("Y[i] = X[i*i]", {"i": 3}, f"expr: statement Y: index 'i*i' of X is not affine; {AFFINE}"),
    ("Y[i] = X[(i+1)*(i-1)]", {"i": 3}, f"expr: statement Y: index '(i+1)*(i-1)' of X is not affine; {AFFINE}"),
    ("Y[i] = X[1/i]", {"i": 3}, f"expr: statement Y: index '1/i' of X is not affine; {AFFINE}"),
    ("Y[i] = X[i/0]", {"i": 3}, f"expr: statement Y: index 'i/0' of X is not affine; {AFFINE}"),
    ("Y[i] = X[2**i]", {"i": 3}, f"expr: statement Y: index '2**i' of X is not affine; {AFFINE}"),
    ("Y[i] = X[exp(i)]", {"i": 3}, f"expr: statement Y: index 'exp(i)' of X is not affine; {AFFINE}"),
    ("Y[i] = X[max(i,1)]", {"i": 3}, f"expr: statement Y: index 'max(i,1)' of X is not affine; {AFFINE}"),
    ("Y[i] = X[i < 2]", {"i": 3}, f"expr: statement Y: index 'i<2' of X is not affine; {AFFINE}"),
    ("Y[i] = X[i/2]", {"i": 3}, f"expr: statement Y: index 'i/2' of X has the coefficient 1/2; {AFFINE}"),
    ("Y[i] = X[1.5*i]", {"i": 3}, f"expr: statement Y: index '1.5' of X is not a whole number below 10**18; {AFFINE}"),
    ("Y[i] = X[3000000000*i]", {"i": 3},
     "expr: statement Y: an index of X has a number beyond 2147483647; use smaller strides and offsets"),
    ("Y[i] = X[k]", {"i": 3, "k": 5},
     "expr: statement Y: axis 'k' is neither on the left-hand side nor reduced; wrap the value in sum(k, ...)"),
    ("Y[i] = i + k", {"i": 3, "k": 5},
     "expr: statement Y: axis 'k' is neither on the left-hand side nor reduced; wrap the value in sum(k, ...)"),
    ("Y[i] = alpha * X[i]", {"i": 3},
     f"expr: statement Y: 'alpha' is neither an axis nor indexed; {NO_SCALARS}"),
    ("Y[i] = pow(X[i])", {"i": 3}, "expr: statement Y: pow takes 2 argument(s), got 1"),
    ("Y[i] = X[i] < 3", {"i": 3},
     "expr: statement Y: a comparison cannot be stored; use select(condition, 1, 0)"),
    ("Y[i] = 1 + (X[i] < 3)", {"i": 3},
     "expr: statement Y: a comparison is an argument of 'add'; use select(condition, 1, 0)"),
    ("Y[i] = +(X[i] < 3)", {"i": 3},
     "expr: statement Y: a comparison is an argument of 'pos'; use select(condition, 1, 0)"),
    ("Y[i] = select(X[i], 1, 0)", {"i": 3},
     "expr: statement Y: 'select' takes a comparison, not a number; compare it, such as x != 0"),
    ("Y[i] = sum(k, X[k] < 2)", {"i": 3, "k": 5},
     "expr: statement Y: sum reduces numbers, not comparisons; use select(condition, 1, 0)"),
    ("Y[i] = X[i] + 1e999", {"i": 3},
     "expr: statement Y: the number 1e999 is too large for float64; write inf for infinity"),
    ("Y[i] = X[i] * 1e39", {"i": 3},
     'expr: 1e+39 is beyond the numbers of float32; write 0 or inf, or "accumulate": "float64"'),
    ("Y[i] = max(k, X[i,k]) / 1e-40", {"i": 3, "k": 5},
     'expr: 1e-40 is beyond the numbers of float32; write 0 or inf, or "accumulate": "float64"'),
    ("Y[i] = X[i] / 0", {"i": 3},
     "expr: statement Y: a division by zero; divide by another number, or multiply by inf"),
    ("Y[i] = X[i] / (i - i)", {"i": 3},
     "expr: statement Y: a division by zero; divide by another number, or multiply by inf"),
    ("Y[i] = sum(i, X[i])", {"i": 3},
     "expr: statement Y: axis 'i' is reduced and also on the left-hand side; remove it from one of the two"),
    ("Y[i] = sum(k, sum(k, X[k]))", {"i": 3, "k": 5},
     "expr: statement Y: axis 'k' is reduced twice; use another axis for the inner reduction"),
    ("Y[i] = sum([k,k], X[k])", {"i": 3, "k": 5},
     "expr: statement Y: axis 'k' is reduced twice; use another axis for the inner reduction"),
    ("Y[i] = sum(k, X[i])", {"i": 3, "k": 5},
     "expr: statement Y: axis 'k' is reduced but the reduced value does not use it; remove k"),
    ("Y[i] = sum(X[i])", {"i": 3},
     "expr: statement Y: sum reduces one value over axes; write sum(axis, value) or sum([axis, axis], value)"),
    ("Y[i] = exp([i])", {"i": 3}, "expr: statement Y: a list of axes is only the first argument of a reduction"),
    ("Y[i+1] = X[i]", {"i": 3},
     "expr: statement Y: an index on the left-hand side is not a plain axis; write Y[i,j] = ..."),
    ("Y[i,i] = X[i]", {"i": 3},
     "expr: statement Y: axis 'i' is used twice on the left-hand side; use one axis per dimension"),
    ("Y[i] = i[i]", {"i": 3}, "expr: statement Y: 'i' is also the name of an axis; rename the tensor"),
    ("i[i] = X[i]", {"i": 3}, "expr: statement i: 'i' is also the name of an axis; rename the tensor"),
    ("Y[i] = Y[i]", {"i": 3}, "expr: statement Y reads Y before it is defined; move the statement of Y up"),
    ("Y[i] = Z[i]; Z[i] = Y[i]", {"i": 3},
     "expr: statement Y reads Z before it is defined; move the statement of Z up"),
    ("Y[i] = X[i]; Y[i] = X[i]", {"i": 3},
     "expr: tensor Y is assigned twice; give the second one another name"),
    ("Z[i] = X[i]; Y[i] = X[i]", {"i": 3},
     "expr: tensor Z is never read; only the last statement is the output; remove it"),
    ("Y[i] = X[i] + X[i,i]", {"i": 3}, "expr: X has 1 dimension(s) and is read with 2"),
    ("Y[i] = X[i - 1]", {"i": 3},
     f"expr: statement Y reads X dimension 0 at -1 to 1, outside 0 to 1 of its shape [2]; {OUTSIDE}"),
    ("Y[i] = X[i + 1 | pad=0]", {"i": 3},
     'shapes.X: the shape of a padded input cannot be inferred; give it: "shapes": {"X": [...]}'),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sizes", "message"), ERRORS, ids=[message[:70] for _, _, message in ERRORS])
def test_error(text: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_program(text, sizes, {})
    assert str(caught.value) == message


def test_unknown_function_lists_the_known_ones() -> None:
    with pytest.raises(
        InputError,
        match=r"^expr: statement Y: unknown function 'system'; known: abs, add, argmax, argmin, ceil, cos, ",
    ):
        parse("Y[i] = system(X[i])", i=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"dtypes": {"X": "int4"}},
            "dtypes.X: unknown dtype 'int4'; use one of float16, bfloat16, float32, float64, int8, int32, "
            "float8_e4m3fn, float8_e5m2",
        ),
        ({"dtypes": {"Z": "float32"}}, "dtypes.Z: the expression has no tensor of this name; remove it from dtypes"),
        ({"accumulate": "float16"}, "accumulate: unknown dtype 'float16'; use float32 or float64, int32 for integers"),
        (
            {"accumulate": "float32", "dtypes": {"X": "float64"}},
            "accumulate: float32 is narrower than the float64 tensors; use float64",
        ),
        ({"shapes": {"Z": [3]}}, "shapes.Z: the expression has no input of this name; remove it from shapes"),
        ({"shapes": {"X": [0]}}, "shapes.X: 0 is not between 1 and 2147483647"),
        ({"shapes": {"X": [3, 3]}}, "expr: X has 2 dimension(s) and is read with 1"),
        (
            {"shapes": {"X": [2]}},
            f"expr: statement Y reads X dimension 0 at 0 to 2, outside 0 to 1 of its shape [2]; {OUTSIDE}",
        ),
        ({"shapes": {"X": [[[3]]]}}, "shapes.X: an array is not between 1 and 2147483647"),
        ({"pads": {"Z": 0.0}}, "pad.Z: the expression has no tensor of this name; remove it"),
    ],
)
def test_error_in_what_comes_with_the_text(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_program("Y[i] = X[i]", {"i": 3}, arguments.pop("dtypes", {}), **arguments)
    assert str(caught.value) == message


def test_padded_index_beyond_32_bits() -> None:
    with pytest.raises(InputError) as caught:
        parse("Y[i] = X[2000000000*i | pad=0]", shapes={"X": [3]}, i=3)
    assert str(caught.value) == (
        "expr: statement Y: an index of X goes beyond 32-bit integers; use smaller strides and offsets"
    )


@pytest.mark.parametrize("name", ["inf", "and", "2x", "a-b", "", "a" * 101, "é"])
def test_unusable_axis_name(name: str) -> None:
    with pytest.raises(InputError):
        parse_program("Y[i] = X[i]", {"i": 3, name: 3}, {})
