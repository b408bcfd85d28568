"""Which operators are matrix products, and which axes play which part."""

import pytest

from hal.catalog import load_device
from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.matrix import BANK_PIECES, MatrixRoles, instruction_for, swizzle_of
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data


def form_of(**operator: object) -> KernelForm:
    return kernel_form(operator_from_data({"dtype": "float16", **operator}))


def roles_of(**operator: object) -> MatrixRoles | None:
    return form_of(**operator).roles


def summary(roles: MatrixRoles | None) -> tuple[str, ...]:
    assert roles is not None
    return (roles.m, roles.n, roles.k, roles.a.tensor, roles.a_layout, roles.b.tensor, roles.b_layout)


@pytest.mark.parametrize(("transpose_a", "a_layout"), [(False, "row"), (True, "col")])
@pytest.mark.parametrize(("transpose_b", "b_layout"), [(False, "row"), (True, "col")])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matmul_layouts_follow_the_innermost_dimensions(
    dtype: str, transpose_a: bool, a_layout: str, transpose_b: bool, b_layout: str
) -> None:
    roles = roles_of(op="matmul", m=64, n=48, k=32, dtype=dtype, transpose_a=transpose_a, transpose_b=transpose_b)
    assert summary(roles) == ("m", "n", "k", "A", a_layout, "B", b_layout)


def test_batch_axes_stay_outside() -> None:
    roles = roles_of(op="batch_matmul", b=3, m=64, n=48, k=32)
    assert summary(roles) == ("m", "n", "k", "A", "row", "B", "row")


def test_pointwise_convolution_multiplies_the_weights_from_the_left() -> None:
    form = form_of(op="conv2d", n=2, c=33, h=15, w=15, f=65, kh=1, kw=1)
    roles = form.roles
    assert roles is not None
    assert (roles.a.tensor, roles.b.tensor) == ("W", "X")
    assert roles.n == form.final.axes[-1]
    assert (roles.a_layout, roles.b_layout) == ("row", "row")


def test_channels_last_pointwise_convolution_multiplies_the_weights_from_the_right() -> None:
    form = form_of(op="conv2d", n=2, c=40, h=8, w=9, f=65, kh=1, kw=1, layout="NHWC")
    roles = form.roles
    assert roles is not None
    assert (roles.a.tensor, roles.b.tensor) == ("X", "W")
    assert roles.n == form.final.axes[-1]


def test_an_output_stored_the_other_way_around_swaps_the_operands() -> None:
    form = form_of(expr="C[n,m] = sum(k, A[m,k] * B[k,n])", sizes={"m": 64, "n": 48, "k": 32})
    roles = form.roles
    assert roles is not None
    assert (roles.a.tensor, roles.b.tensor) == ("B", "A")
    assert (roles.a_layout, roles.b_layout) == ("col", "col")


def test_the_larger_of_two_row_axes_is_taken() -> None:
    form = form_of(
        expr="C[i,j,n] = sum(k, A[j,i,k] * B[k,n])",
        sizes={"i": 16, "j": 64, "n": 48, "k": 32},
    )
    roles = form.roles
    assert roles is not None
    assert form.sizes[roles.m] == 64


@pytest.mark.parametrize(
    "operator",
    [
        {"op": "matmul", "m": 64, "n": 64, "k": 64, "dtype": "float32"},
        {"op": "conv2d", "n": 1, "c": 16, "h": 16, "w": 16, "f": 16, "kh": 3, "kw": 3, "padding": "SAME"},
        {"op": "conv2d", "n": 1, "c": 16, "h": 16, "w": 16, "f": 16, "kh": 1, "kw": 1, "stride": 2},
        {"op": "depthwise_conv2d", "n": 1, "c": 16, "h": 16, "w": 16, "kh": 3, "kw": 3},
        {"op": "softmax", "shape": [64, 64]},
        {"op": "elementwise", "function": "relu", "shape": [64, 64]},
        {"op": "reduce", "function": "sum", "shape": [64, 64], "axes": [1]},
        {"expr": "C[m,n] = max(k, A[m,k] * B[k,n])", "sizes": {"m": 64, "n": 64, "k": 64}},
        {"expr": "C[m,n] = sum(k, A[m,k] + B[k,n])", "sizes": {"m": 64, "n": 64, "k": 64}},
        {"expr": "C[m,n] = sum(k, A[m,k] * A[n,k])", "sizes": {"m": 64, "n": 64, "k": 64}},
        {"expr": "C[m,n] = sum(k, A[m,k] * B[k,n] * 2.0)", "sizes": {"m": 64, "n": 64, "k": 64}},
        {"expr": "C[m] = sum(k, A[m,k] * B[k])", "sizes": {"m": 64, "k": 64}},
        {
            "expr": "C[b,m,n] = sum(k, A[m,k,b] * B[k,n,b])",
            "sizes": {"b": 8, "m": 32, "n": 32, "k": 32},
        },
    ],
    ids=lambda operator: str(operator.get("expr") or operator["op"]),
)
def test_everything_else_has_no_roles(operator: dict[str, object]) -> None:
    assert roles_of(**operator) is None


@pytest.mark.parametrize("pieces", [*range(1, 33), 48, 64])
def test_swizzled_rows_have_their_pieces_in_different_banks(pieces: int) -> None:
    divisor, count = swizzle_of(pieces)
    for piece in range(pieces):
        stored = [row * pieces + (piece ^ (row // divisor % count)) for row in range(BANK_PIECES)]
        assert len({place % BANK_PIECES for place in stored}) == BANK_PIECES
    for row in range(2 * BANK_PIECES):
        assert {piece ^ (row // divisor % count) for piece in range(pieces)} == set(range(pieces))


@pytest.mark.parametrize(
    ("device", "dtype", "instruction"),
    [
        ("v100", "float16", "wmma_16x16x16"),
        ("t4", "float16", "wmma_16x16x16"),
        ("a100", "float16", "mma_16x8x16"),
        ("h200", "bfloat16", "mma_16x8x16"),
        ("v100", "tfloat32", None),
        ("a100", "tfloat32", "mma_16x8x8"),
        ("t4", "int8", None),
        ("l4", "int8", "mma_16x8x32"),
        ("a100", "float8_e4m3fn", None),
        ("l4", "float8_e5m2", "mma_16x8x32"),
        ("mi50", "float16", None),
    ],
)
def test_the_instruction_depends_on_board_and_type(device: str, dtype: str, instruction: str | None) -> None:
    assert instruction_for(load_device(device), dtype) == instruction


@pytest.mark.parametrize(
    ("operator", "dtype", "depth"),
    [
        ({"dtype": "float32", "allow_tf32": True}, "tfloat32", 8),
        ({"dtype": "bfloat16"}, "bfloat16", 16),
        ({"dtype": "int8"}, "int8", 32),
        ({"dtype": "float8_e5m2"}, "float8_e5m2", 32),
    ],
)
def test_fragments_are_32_bytes_deep(operator: dict[str, object], dtype: str, depth: int) -> None:
    roles = roles_of(op="matmul", m=64, n=64, k=64, **operator)
    assert roles is not None
    assert (roles.dtype, roles.fragment("m"), roles.fragment("n"), roles.fragment("k")) == (dtype, 16, 16, depth)


def test_float32_is_multiplied_exactly_unless_tensorfloat_is_allowed() -> None:
    assert roles_of(op="matmul", m=64, n=64, k=64, dtype="float32") is None
    assert roles_of(op="matmul", m=64, n=64, k=64, dtype="int8", accumulate="float32", output_dtype="float32") is None


def test_bytes_that_lie_across_are_interleaved() -> None:
    for dtype, transpose_b, interleaved in (("int8", False, True), ("int8", True, False), ("float16", False, False)):
        roles = roles_of(op="matmul", m=64, n=64, k=64, dtype=dtype, transpose_b=transpose_b)
        assert roles is not None
        assert roles.is_interleaved == interleaved


@pytest.mark.parametrize(
    ("operator", "device", "reason"),
    [
        ({"op": "matmul", "m": 64, "n": 64, "k": 64}, "a100", "a100-pcie-40gb has none for it"),
        ({"op": "matmul", "m": 1, "n": 64, "k": 64}, "l4", "this is no product of two matrices of one dtype"),
        (
            {"expr": "S[m,n] = sum(k, A[m,k] * B[k,n])\nC[m,n] = S[m,n] + D[n]", "sizes": {"m": 64, "n": 64, "k": 64}},
            "l4",
            "of D is for the operands of the product alone",
        ),
    ],
)
def test_eight_bit_floats_need_a_matrix_instruction(operator: dict[str, object], device: str, reason: str) -> None:
    form = form_of(**operator, dtype="float8_e4m3fn")
    with pytest.raises(InputError, match=reason):
        PlacedForm(form, load_device(device)).check()
    PlacedForm(form_of(op="matmul", m=64, n=64, k=64, dtype="int8"), load_device("k80")).check()


BLOCKS = {"i": 64, "c": 3, "n": 128, "b": 5, "k": 128}


def scaled_of(factors: str, output: str = "Y[i,c,n]", **dtypes: str) -> KernelForm:
    scales = {name: "float32" for name in "ST" if f"{name}[" in factors}
    text = f"{output} = sum((b, k), {factors})"
    return form_of(expr=text, sizes=BLOCKS, dtype="float8_e4m3fn", dtypes={**scales, "Y": "float32", **dtypes})


def test_scales_of_blocks_multiply_sums_of_a_depth() -> None:
    form = scaled_of("A[i,b,k] * W[c,n,b,k] * S[i,b] * T[c,b]")
    roles = form.roles
    assert summary(roles) == ("i", "n", "k", "A", "row", "W", "col")
    assert roles is not None and [load.tensor for load in roles.scales] == ["S", "T"]
    assert (roles.blocks, roles.across) == ("c", "c")
    assert [load.tensor for load in form.body_loads] == ["A", "W"]
    # A multiply-add for each product, and for each sum of a block.
    assert form.flops == 2 * 64 * 3 * 128 * (5 * 128 + 5)


def test_scales_stand_where_they_like_among_the_factors() -> None:
    roles = scaled_of("T[c,b] * W[c,n,b,k] * (S[i,b] * A[i,b,k])").roles
    assert summary(roles) == ("i", "n", "k", "A", "row", "W", "col")


@pytest.mark.parametrize(
    "factors",
    [
        "A[i,b,k] * W[c,n,b,k] * S[b,k]",  # of the depth itself
        "A[i,b,k] * W[c,n,b,k] * S[c,n,b]",  # of single columns
        "A[i,b,k] * W[c,n,b,k] * exp(S[i,b])",
    ],
)
def test_other_scales_leave_no_product_of_matrices(factors: str) -> None:
    assert scaled_of(factors).roles is None


def test_scales_of_matrices_at_places_are_read_there() -> None:
    data = {"op": "grouped_matmul", "m": 256, "groups": 4, "n": 256, "k": 384, "precision": "fp8-block"}
    roles = kernel_form(operator_from_data(data)).roles
    assert summary(roles) == ("r", "n", "k", "X", "row", "W", "col")
    assert roles is not None and [load.tensor for load in roles.scales] == ["SX", "SW"]
    assert [len(load.places) for load in roles.scales] == [0, 1] and roles.blocks == "c"


def test_scales_are_those_of_eight_bit_floats() -> None:
    wide = {"A": "float16", "W": "float16"}
    assert scaled_of("A[i,b,k] * W[c,n,b,k] * S[i,b] * T[c,b]", **wide).roles is None
    assert scaled_of("A[i,b,k] * W[c,n,b,k] * S[i,b] * T[c,b]", T="float16").roles is None
