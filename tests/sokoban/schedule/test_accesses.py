"""Vector widths: whatever is allowed must be contiguous, aligned and inside or outside the tensor as a whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.regions import data_dimension
from sokoban.language.parser import parse_program
from sokoban.schedule.accesses import fetch_vector, store_vector
from sokoban.schedule.tile import TileSchedule
from tests.sokoban.schedules import form_of, matmul_schedule


def parse(text: str, dtypes: dict[str, str] | None = None, shapes: Any = None, **sizes: int) -> KernelForm:
    return kernel_form(parse_program(text, sizes, dtypes or {}, shapes=shapes))


SIZE = st.sampled_from([3, 4, 5, 6, 8, 12, 16])
PART = st.sampled_from([1, 2, 3, 4, 8])


@settings(max_examples=80, deadline=None)
@given(
    SIZE, SIZE, PART, PART, st.sampled_from([1, 1, 2, 4, -1]), st.sampled_from([1, 2, 4]),
    st.sampled_from([-4, -1, 0, 2, 4]),
    st.sampled_from([16, 17, 24, 30, 32]), st.integers(0, 5), st.sampled_from(["float16", "float32", "float64"]),
)  # fmt: skip
def test_fetches_never_straddle(
    i: int, k: int, block: int, step: int, a: int, b: int, offset: int, extent: int, padding: int, dtype: str
) -> None:
    """``X[k, a*i + b*k + offset | pad]``: every vector of every tile of every block."""
    text = f"Y[i] = sum(k, X[k, {a}*i + {b}*k + {offset} | pad=0] * W[k])"
    form = parse(text, {"X": dtype}, {"X": [k, extent]}, i=i, k=k)
    schedule = TileSchedule(block=(("i", block),), thread=(("i", 1),), step=(("k", step),), cached=("X",))
    load = next(load for load in form.body_loads if load.tensor == "X")
    width = fetch_vector(form, schedule, load, padding)
    element_bytes = form.expr.tensor_by_name["X"].element_bytes
    assert 1 <= width <= 16 // element_bytes
    if width == 1:
        return
    row = data_dimension(load.indices[-1]).extent({"i": block, "k": step})
    # Rows of the shared tile and of the tensor start aligned, and the tile is whole vectors.
    assert row % width == 0 and (row + padding) % width == 0 and extent % width == 0
    for first_i in range(0, i, block):
        for first_k in range(0, k, step):
            for u in range(0, row, width):
                columns = [a * first_i + b * first_k + offset + u + lane for lane in range(width)]
                assert columns[0] % width == 0
                assert len({0 <= column < extent for column in columns}) == 1


MATMUL = form_of(op="matmul", m=96, n=88, k=100)


@pytest.mark.parametrize(
    ("tensor", "step", "block", "padding", "width"),
    [
        ("A", 8, (24, 40), 0, 4),
        ("A", 6, (24, 40), 0, 2),
        ("A", 7, (24, 40), 0, 1),
        ("A", 8, (24, 40), 1, 1),
        ("A", 8, (24, 40), 2, 2),
        ("A", 8, (24, 40), 4, 4),
        ("B", 7, (24, 40), 0, 4),
        ("B", 7, (24, 22), 0, 2),
    ],
)
def test_a_fetch_is_as_wide_as_tile_and_padding_allow(
    tensor: str, step: int, block: tuple[int, int], padding: int, width: int
) -> None:
    load = next(load for load in MATMUL.body_loads if load.tensor == tensor)
    assert fetch_vector(MATMUL, matmul_schedule(block, (1, 1), step), load, padding) == width


def test_the_tensor_s_own_rows_limit_a_fetch() -> None:
    form = form_of(op="matmul", m=96, n=90, k=99)
    a, b = form.body_loads
    schedule = matmul_schedule((24, 40), (1, 1), 8)
    assert (fetch_vector(form, schedule, a), fetch_vector(form, schedule, b)) == (1, 2)


@pytest.mark.parametrize(("dtype", "width"), [("float64", 2), ("float32", 4), ("float16", 8)])
def test_sixteen_bytes_are_the_widest_fetch(dtype: str, width: int) -> None:
    form = form_of(op="matmul", m=96, n=96, k=96, dtype=dtype)
    assert fetch_vector(form, matmul_schedule((32, 32), (4, 4), 32), form.body_loads[0]) == width


def test_a_window_s_halo_is_not_split() -> None:
    form = form_of(op="conv2d", n=1, c=8, h=16, w=16, f=8, kh=3, kw=3)
    schedule = TileSchedule(
        block=(("f", 8), ("oh", 2), ("ow", 4)), thread=(("f", 1), ("oh", 1), ("ow", 1)),
        step=(("c", 8), ("kh", 3), ("kw", 3)), cached=("X", "W"),
    )  # fmt: skip
    x = next(load for load in form.body_loads if load.tensor == "X")
    # Rows are 4 + 3 - 1 = 6 wide, and the window's own step of 3 shifts them.
    assert fetch_vector(form, schedule, x) == 1


def flat(form: KernelForm, thread: int) -> TileSchedule:
    axes = form.spatial
    return TileSchedule(
        block=tuple((axis, 32 * thread if axis == axes[-1] else 1) for axis in axes),
        thread=tuple((axis, thread if axis == axes[-1] else 1) for axis in axes),
    )


@pytest.mark.parametrize(
    ("text", "sizes", "shapes", "thread", "width"),
    [
        ("Y[i] = relu(X[i])", {"i": 96}, None, 4, 4),
        ("Y[i] = relu(X[i])", {"i": 96}, None, 8, 4),
        ("Y[i] = relu(X[i])", {"i": 96}, None, 6, 2),
        ("Y[i] = relu(X[i])", {"i": 98}, None, 4, 2),
        ("Y[i] = relu(X[i])", {"i": 97}, None, 4, 1),
        ("Y[i,j] = X[i,j] + b[i]", {"i": 7, "j": 96}, None, 4, 4),
        ("Y[i,j] = X[i,j] + b[j] * c[i]", {"i": 7, "j": 96}, None, 4, 4),
        ("Y[i,j] = X[j,i]", {"i": 8, "j": 96}, None, 4, 1),
        ("Y[i,j] = X[i,2*j]", {"i": 8, "j": 96}, {"X": [8, 192]}, 4, 1),
        ("Y[i,j] = X[i,j + 2]", {"i": 8, "j": 96}, {"X": [8, 100]}, 4, 2),
        ("Y[i,j] = X[i,j + 4]", {"i": 8, "j": 96}, {"X": [8, 100]}, 4, 4),
        ("Y[i,j] = X[i,j + 4 | pad=0]", {"i": 8, "j": 96}, {"X": [8, 98]}, 4, 2),
        ("Y[i,j] = X[2*i + j]", {"i": 8, "j": 96}, {"X": [112]}, 4, 2),
        ("Y[i,j] = X[j,j] * Z[i]", {"i": 8, "j": 96}, {"X": [96, 96]}, 4, 1),
    ],
)
def test_a_thread_stores_what_it_can_also_read(
    text: str, sizes: dict[str, int], shapes: Any, thread: int, width: int
) -> None:
    form = parse(text, shapes=shapes, **sizes)
    assert store_vector(form, flat(form, thread)) == width


def test_halves_are_stored_four_at_a_time() -> None:
    form = form_of(op="elementwise", function="relu", shape=[1024], dtype="float16")
    assert store_vector(form, flat(form, 8)) == 4


def test_the_widest_type_of_all_limits_the_lanes() -> None:
    form = parse("Y[i] = X[i] * Z[i]", {"X": "float64", "Z": "float16", "Y": "float16"}, i=96)
    assert store_vector(form, flat(form, 4)) == 16 // 8


def test_an_epilogue_limits_the_store_of_a_contraction() -> None:
    schedule = matmul_schedule((24, 40), (1, 4), 8)
    text = "C[m,n] = sum(k, A[m,k] * B[k,n]); D[m,n] = C[m,n] + "
    wide = parse(text + "r[m,n]", m=96, n=88, k=100)
    narrow = parse(text + "r[n,m]", m=96, n=88, k=100)
    assert (store_vector(wide, schedule), store_vector(narrow, schedule)) == (4, 1)
    # A staged operand is read from shared memory: it does not limit the store.
    assert store_vector(form_of(op="matmul", m=96, n=88, k=99), schedule) == 4
