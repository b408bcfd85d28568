"""CPU kernels against the float64 reference: every kind of operator, edges, steps, packed and unpacked operands."""

from __future__ import annotations

import itertools
import operator
import re
from pathlib import Path
from typing import Any

import pytest

from codegen.cpu import tile_lines
from codegen.cpu.lower import lower
from codegen.tir.lowered import LoweringError
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.cpu_tiles import WRITTEN_OUT
from sokoban.schedule.tile import TileSchedule, sizes
from tests.codegen.cpu_kernels import built, error_of, form_of, host, schedule_for, vector_bytes

pytestmark = pytest.mark.usefixtures("c_compiler")

MATMUL = {"op": "matmul", "m": 50, "n": 70, "k": 33}
CONV = {"op": "conv2d", "n": 2, "c": 6, "h": 9, "w": 11, "f": 36, "kh": 3, "kw": 3, "padding": 1}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "matmul": (MATMUL, {}),
    "matmul without packing": (MATMUL, {"cached": False}),
    "matmul in steps": (MATMUL, {"step": {"k": 8}}),
    "integers": (
        {"expr": "Y[i,j] = sum(k, A[i,k] * B[k,j])", "sizes": {"i": 50, "j": 64, "k": 33}, "accumulate": "float32",
         "dtypes": {"A": "int32"}},
        {},
    ),
    "integers in panels": (
        {"expr": "Y[i,j] = sum(k, A[i,k] * B[k,j])", "sizes": {"i": 50, "j": 64, "k": 33}, "accumulate": "float32",
         "dtypes": {"B": "int32"}},
        {},
    ),
    "matmul with epilogue": ({**MATMUL, "epilogue": [{"function": "bias_add", "axis": "n"}, "gelu"]}, {}),
    "matmul of float64": ({**MATMUL, "dtype": "float64"}, {}),
    "batched, transposed": ({"op": "batch_matmul", "b": 3, "m": 18, "n": 20, "k": 24, "transpose_b": True}, {}),
    "conv along the row": (CONV, {}),
    "conv along the channels": (CONV, {"vector_axis": "f", "step": {"c": 4}}),
    "conv along the channels, from rows": (
        {**CONV, "c": 20, "w": 21, "f": 52},
        {"vector_axis": "f", "step": {"c": 10, "kh": 2}, "tile": {"oh": 2, "ow": 3}},
    ),
    "conv along channels that end in a single one": (
        {**CONV, "f": 17},
        {"vector_axis": "f", "tile": {"f": 17, "oh": 1, "ow": 3}, "step": {"c": 3}},
    ),
    "transposed in steps": (
        {"op": "batch_matmul", "b": 2, "m": 18, "n": 70, "k": 75, "transpose_b": True},
        {"step": {"k": 40}},
    ),
    "conv with stride": ({**CONV, "stride": 2}, {"vector_axis": "f"}),
    "conv NHWC": ({**CONV, "layout": "NHWC"}, {}),
    "depthwise": ({"op": "depthwise_conv2d", "n": 2, "c": 5, "h": 9, "w": 14, "kh": 3, "kw": 3, "padding": "SAME"}, {}),
    "average pool": (
        {"op": "avg_pool2d", "n": 2, "c": 5, "h": 8, "w": 8, "kh": 2, "kw": 2, "stride": 2},
        {"cached": False},
    ),
    "max pool with padding": (
        {"op": "max_pool2d", "n": 2, "c": 3, "h": 9, "w": 9, "kh": 3, "kw": 3, "stride": 2, "padding": 1},
        {},
    ),
    "sum of rows": ({"op": "reduce", "function": "sum", "shape": [40, 37], "axes": [0]}, {"cached": False}),
    "softmax": ({"op": "softmax", "shape": [7, 300]}, {}),
    "softmax over a middle axis": ({"op": "softmax", "shape": [3, 10, 39], "axis": 1}, {}),
    "layer norm": ({"op": "layer_norm", "shape": [7, 130]}, {}),
    "triangle times a matrix": (
        {"expr": "Y[i,j] = sum(k, select(k <= i, A[i,k], 0.5) * B[k,j])", "sizes": {"i": 50, "j": 70, "k": 33}}, {},
    ),
    "selection of what lies outside": (
        {"expr": "Y[i,j] = select(i > 0 and j < 60, X[i - 1, j | pad=2], 3)", "sizes": {"i": 9, "j": 70},
         "shapes": {"X": [8, 60]}}, {},
    ),
    "rows at places": (
        {"expr": "Y[t,d] = 2 * E[I[t], d]", "sizes": {"t": 19, "d": 41}, "shapes": {"E": [30, 41]}}, {},
    ),
    "elements at places": (
        {"expr": "Y[t,d] = V[I[t,d] | pad=7] + E[d, J[t]]", "sizes": {"t": 19, "d": 41},
         "shapes": {"V": [30], "E": [41, 9]}}, {},
    ),
    "sums of rows at places": (
        {"expr": "Y[t,d] = sum(k, E[I[t,k], d | pad=0.5] * W[t,k])", "sizes": {"t": 19, "d": 41, "k": 6},
         "shapes": {"E": [30, 41]}}, {},
    ),
    "rows less an element at a place": (
        {"expr": "M[i] = max(j, X[i,j]); Y[i,j] = X[i,j] - M[i] + X[i, T[i]]", "sizes": {"i": 9, "j": 70}}, {},
    ),
    "gelu": ({"op": "elementwise", "function": "gelu", "shape": [9, 41]}, {}),
    "tanh": ({"op": "elementwise", "function": "tanh", "shape": [9, 41]}, {}),
    "silu": ({"op": "elementwise", "function": "silu", "shape": [9, 41]}, {}),
    "exp": ({"op": "elementwise", "function": "exp", "shape": [9, 41]}, {}),
    "functions of functions": (
        {"expr": "Y[i,j] = tanh(select(j > i, exp(tanh(gelu(X[i,j - 1 | pad=0]))), silu(erf(X[i,j]))))",
         "sizes": {"i": 9, "j": 41}, "shapes": {"X": [9, 41]}}, {},
    ),
    "composed functions of each other": (
        {"expr": "Y[i,j] = gelu(silu(gelu(2 * silu(X[i,j]) + 1)) - gelu(X[i,j]))", "sizes": {"i": 9, "j": 41}}, {},
    ),
    "addition": ({"op": "elementwise", "function": "add", "shape": [9, 41]}, {}),
    "transposition": ({"op": "transpose", "shape": [20, 41], "perm": [1, 0]}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_what_the_operator_says(name: str, tmp_path: Path) -> None:
    fields, how = CASES[name]
    form = form_of(**fields)
    library = built(form, schedule_for(form, **how))
    assert error_of(form, library, tmp_path) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("function", ["tanh", "gelu", "silu"])
def test_functions_grow_by_a_level_each(function: str, dtype: str) -> None:
    """Without registers between them, eight levels take TVM minutes; composed functions read an argument twice."""
    lengths = []
    for levels in (2, 8):
        form = form_of(expr=f"Y[i] = {f'{function}(' * levels}X[i]{')' * levels}", sizes={"i": 64}, dtype=dtype)
        lengths.append(len(built(form, schedule_for(form)).assembly))
    assert lengths[1] < 6 * lengths[0]


@pytest.mark.parametrize(("function", "shape", "axes"), [("sum", [9, 1000], [1]), ("max", [5, 7, 5], [1, 2])])
def test_lanes_share_a_sum(function: str, shape: list[int], axes: list[int], tmp_path: Path) -> None:
    form = form_of(op="reduce", function=function, shape=shape, axes=axes)
    lanes = sizes({form.reduced[-1]: vector_bytes() // 4})
    library = built(form, schedule_for(form, cached=False).with_(reduce_threads=lanes))
    assert error_of(form, library, tmp_path) < 1e-6


@pytest.mark.parametrize("stride", [2, 3])
def test_strided_rows_are_copied_by_phases(stride: int, tmp_path: Path) -> None:
    """Vectors along a strided axis then read neighbours; borders, rests of rows and several blocks included."""
    form = form_of(op="max_pool2d", n=1, c=5, h=23, w=37, kh=3, kw=3, stride=stride, padding=1, layout="NCHW")
    width = form.sizes["ow"]
    schedule = TileSchedule(
        block=sizes({"c": 2, "oh": 4, "ow": 2 * (width // 2)}),
        thread=sizes({"c": 1, "oh": 1, "ow": width // 2}),
        cached=("X",),
    )
    assert error_of(form, built(form, schedule), tmp_path) == 0.0


def test_copies_and_scattered_results_go_through_vectors() -> None:
    """Columns of a panel are read as rows and transposed, and so are results whose vectors lie across the rows."""
    if vector_bytes() != 64:
        pytest.skip("counts instructions of 512 bits")
    form = form_of(op="conv2d", n=1, c=16, h=28, w=28, f=64, kh=3, kw=3, stride=2, padding=1, layout="NCHW")
    schedule = TileSchedule(
        block=sizes({"f": 64, "oh": 14, "ow": 14}), thread=sizes({"f": 16, "oh": 2, "ow": 8}), cached=("X", "W")
    )
    assembly = built(form, schedule).assembly
    # Sixteen columns of each of nine panels would be 256 insertions one by one, and 16 vectors of results 256 stores.
    assert assembly.count("vinsertps") < 64 and assembly.count("vextractps") < 64


@pytest.mark.parametrize(
    ("value", "branches"),
    [("select(k <= i, A[i,k], 0) * B[k,j]", False), ("select(k <= i, A[i,k - 1 | pad=0], 0) * B[k,j]", True)],
)
def test_lanes_choose_where_both_sides_may_be_computed(value: str, branches: bool) -> None:
    operator = {"expr": f"Y[i,j] = sum(k, {value})", "sizes": {"i": 50, "j": 70, "k": 33}, "shapes": {"A": [50, 33]}}
    form = form_of(**operator)
    lowered = lower(LoweringRequest(form, schedule_for(form, cached=False), "kernel", host()))
    script = lowered.module.script()
    assert "T.Select" in script or branches
    assert ("T.if_then_else" in script) == branches


def test_operands_of_several_turns_are_not_kept_in_registers() -> None:
    """Told that a short loop has three turns, LLVM would hold operands of all of them beside a large tile."""
    if vector_bytes() != 64:
        pytest.skip("the tile is one for 32 registers of 512 bits")
    form = form_of(op="conv2d", n=1, c=64, h=28, w=28, f=64, kh=3, kw=3, stride=1, padding=1, layout="NCHW")
    schedule = TileSchedule(
        block=sizes({"f": 64, "oh": 28, "ow": 28}), thread=sizes({"f": 32, "oh": 2, "ow": 7}), cached=("X", "W")
    )
    loops = re.split(r"\n(?=\.LBB)", built(form, schedule).assembly)
    inner = max(loops, key=lambda text: text.count("vfmadd"))
    assert inner.count("vfmadd") % 28 == 0
    assert not re.search(r"zmm\d+, -?\d*\(%rsp\)", inner)


def test_the_inner_loop_keeps_its_tile_in_registers() -> None:
    """A tile of 6 x 4 vectors: 24 multiply-adds a turn, none of their sums or operands through memory."""
    if vector_bytes() != 64:
        pytest.skip("the tile is one for 32 registers of 512 bits")
    form = form_of(op="matmul", m=12, n=128, k=64)
    schedule = TileSchedule(
        block=sizes({"m": 12, "n": 128}), thread=sizes({"m": 6, "n": 64}), step=sizes({"k": 64}), cached=("B",)
    )
    loops = re.split(r"\n(?=\.LBB)", built(form, schedule).assembly)
    inner = max(loops, key=lambda text: text.count("vfmadd"))
    turn = inner[: inner.index("\tjne")]
    assert turn.count("vfmadd") == 24 * WRITTEN_OUT
    assert "%rsp" not in turn
    assert not re.search(r"vmovup[sd]\s+%zmm\d+, ", turn), "no vector is stored"


PRODUCT = {"op": "matmul", "m": 96, "n": 128, "k": 48}
IN_STEPS = TileSchedule(
    block=sizes({"m": 96, "n": 64}), thread=sizes({"m": 6, "n": 32}), step=sizes({"k": 24}), cached=("B",)
)


@pytest.mark.parametrize(
    ("operator", "schedule", "asked"),
    [
        (PRODUCT, IN_STEPS, True),
        (PRODUCT, IN_STEPS.with_(step=()), True),
        ({**PRODUCT, "k": 45, "n": 120}, IN_STEPS, True),
        (PRODUCT, IN_STEPS.with_(cached=()), True),
        (PRODUCT, IN_STEPS.with_(cached=("A",)), True),
        ({**PRODUCT, "transpose_b": True}, IN_STEPS, False),
        ({**PRODUCT, "m": 6}, IN_STEPS.with_(block=sizes({"m": 6, "n": 64})), False),
        ({**PRODUCT, "n": 8192}, IN_STEPS.with_(block=sizes({"m": 96, "n": 8192}), cached=()), False),
    ],
    ids=["steps", "blocks", "rests", "read in place", "packed in a box", "columns", "few tiles", "long rows in place"],
)
def test_tiles_ask_for_what_is_read_next(
    operator: dict[str, Any], schedule: TileSchedule, asked: bool, tmp_path: Path
) -> None:
    """The next step's rows are on their way into the core's own cache while this one's are computed with."""
    if vector_bytes() < 32:
        pytest.skip("prefetcht1 is an instruction of x86-64, and so are these vectors")
    form = form_of(**operator)
    library = built(form, schedule)
    assert ("prefetcht1" in library.assembly) == asked
    assert error_of(form, library, tmp_path) < 1e-5


@pytest.mark.parametrize(
    ("filters", "channels", "lines"),
    [(32, 16, 4), (16, 16, 2), (64, 8, 8)],
    ids=["pairs", "single vectors", "long rows"],
)
def test_tiles_ask_for_every_line_of_the_next_step(
    filters: int, channels: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of a window, in steps of channels: their rows do not follow each other in memory."""
    if vector_bytes() != 64:
        pytest.skip("the tile is one for 32 registers of 512 bits")
    asked: list[Any] = []
    monkeypatch.setattr(tile_lines, "prefetch", lambda element, caches, written=False: asked.append((element, caches)))
    form = form_of(op="conv2d", n=1, c=64, h=12, w=14, f=filters, kh=3, kw=3, layout="NHWC")
    tile = {"oh": 1, "ow": 12 * 16 // filters, "f": filters}
    block = TileSchedule(
        block=sizes({**tile, "oh": 5}), thread=sizes(tile), step=sizes({"c": channels, "kh": 3, "kw": 3}), cached=("X",)
    )
    lower(LoweringRequest(form, block, "op", host()))
    places = [element.indices[0] for element, caches in asked if caches == tile_lines.PRIVATE_CACHE][:lines]
    turns = itertools.product(range(5), range(3), range(3), range(channels // WRITTEN_OUT))
    found = {
        value(place, dict(zip(("oh_tile", "kh", "kw", "c"), turn, strict=True))) for turn in turns for place in places
    }
    windows, vectors = range(9), range(0, filters, 16)
    following = range(channels, 2 * channels)
    assert found == {(window * 64 + c) * filters + f for window in windows for c in following for f in vectors}


#: Operations of numbers of a kernel, by the name of their node.
OPERATIONS: dict[str, Any] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "FloorDiv": operator.floordiv,
    "FloorMod": operator.mod, "Min": min, "Max": max, "GE": operator.ge, "GT": operator.gt, "LT": operator.lt,
}  # fmt: skip


def value(number: Any, turn: dict[str, int]) -> int:
    """A number of the kernel in a turn of its loops, in the first step of the sum."""
    match type(number).__name__:
        case "IntImm":
            return int(number.value)
        case "Var":
            return turn.get(number.name, 0)
        case "Cast":
            return value(number.value, turn)
        case "Select":
            return value(number.true_value if value(number.condition, turn) else number.false_value, turn)
        case name:
            return int(OPERATIONS[name](value(number.a, turn), value(number.b, turn)))


@pytest.mark.parametrize("rows", [7, 14])
def test_tiles_ask_for_every_line_that_is_added_to_their_sums(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual of the result's own order; a bias of a row stays in a cache."""
    if vector_bytes() != 64:
        pytest.skip("the tile is one for 32 registers of 512 bits")
    asked: list[Any] = []
    monkeypatch.setattr(
        tile_lines, "prefetch", lambda element, caches, written=False: asked.append((element, caches, written))
    )
    form = form_of(
        expr="S[i,j] = sum(k, A[i,k] * B[k,j]); Y[i,j] = S[i,j] + R[i,j] + C[j]", sizes={"i": 28, "j": 32, "k": 64}
    )
    tile = TileSchedule(block=sizes({"i": rows, "j": 32}), thread=sizes({"i": rows, "j": 32}), cached=())
    lower(LoweringRequest(form, tile, "op", host()))
    near = [(element, is_written) for element, caches, is_written in asked if caches == tile_lines.ALL_CACHES]
    written, added = ([element for element, is_written in near if is_written == kind] for kind in (True, False))
    assert len(written) == len(added) == -(-rows * 2 // (64 // WRITTEN_OUT))
    for elements in (written, added):
        found = {value(element.indices[0], {"k": turn}) for element in elements for turn in range(64 // WRITTEN_OUT)}
        assert found == set(range(0, rows * 32, 16))


@pytest.mark.parametrize(("channels", "asked"), [(64, True), (2, False)])
def test_boxes_ask_for_rows_that_they_copy_later(channels: int, asked: bool, tmp_path: Path) -> None:
    """Each row for one of a later channel; not where there are too few of them."""
    if vector_bytes() < 32:
        pytest.skip("prefetcht0 is an instruction of x86-64, and so are these vectors")
    form = form_of(**CONV | {"c": channels})
    schedule = schedule_for(form)
    library = built(form, schedule.with_(cached=("X",)))
    assert ("prefetcht0" in library.assembly) == asked
    assert error_of(form, library, tmp_path) < 1e-5


@pytest.mark.parametrize("operator", [{}, {"epilogue": ["relu"]}], ids=["sums", "epilogue"])
def test_tiles_ask_for_where_their_sums_go(operator: dict[str, Any], tmp_path: Path) -> None:
    """And add what the steps before left there after the loop, not before."""
    if vector_bytes() < 32:
        pytest.skip("prefetchw is an instruction of x86-64, and so are these vectors")
    form = form_of(**PRODUCT | {"k": 96} | operator)
    library = built(form, IN_STEPS.with_(step=sizes({"k": 48})))
    loops = re.split(r"\n(?=\.LBB)", library.assembly)
    inner = max(loops, key=lambda text: text.count("vfmadd"))
    assert "prefetchw" in inner
    assert error_of(form, library, tmp_path) < 1e-5


@pytest.mark.parametrize(
    ("operator", "read", "written"),
    [
        ({"op": "elementwise", "function": "add", "shape": [64, 128]}, 2, 1),
        ({"op": "transpose", "shape": [64, 128], "perm": [1, 0]}, 0, 1),
        ({"op": "softmax", "shape": [16, 256]}, 1, 1),
        ({"op": "layer_norm", "shape": [16, 256]}, 1, 1),
        ({"op": "reduce", "function": "sum", "shape": [64, 256], "axes": [1]}, 1, 0),
    ],
    ids=lambda value: value.get("function", value["op"]) if isinstance(value, dict) else str(value),
)
def test_what_is_run_through_is_asked_for(operator: dict[str, Any], read: int, written: int, tmp_path: Path) -> None:
    """One request for every line that is read in order, or written; none for the few numbers that rows share."""
    if vector_bytes() < 32:
        pytest.skip("prefetcht0 is an instruction of x86-64, and so are these vectors")
    form = form_of(**operator)
    lanes = vector_bytes() // 4
    shared = sizes({axis: lanes for axis in form.reduced[-1:]} if form.kind == "tile" else {})
    library = built(form, schedule_for(form, cached=False).with_(reduce_threads=shared))
    for request, streams in (("prefetcht0", read), ("prefetchw", written)):
        lines = set(re.findall(rf"{request}\s+(.*)", library.assembly))
        # Loops that LLVM unrolled may count the lines of an array with several registers.
        assert len({re.sub(r"^-?\d*|,.*", "", line) for line in lines}) == streams, "as many arrays"
    assert error_of(form, library, tmp_path) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"thread": sizes({"m": 6, "n": 32})}, "6 elements of m per thread do not divide a block of 16"),
        ({"instruction": Instruction.WMMA}, "wmma_16x16x16 is no instruction of a CPU"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], message: str) -> None:
    form = form_of(**MATMUL)
    schedule = TileSchedule(block=sizes({"m": 16, "n": 32}), thread=sizes({"m": 4, "n": 32})).with_(**change)
    with pytest.raises(LoweringError, match=message):
        lower(LoweringRequest(form, schedule, "op", host()))


@pytest.mark.parametrize("operator", [MATMUL, {"op": "softmax", "shape": [9, 100]}])
def test_halves_are_computed_in_float32(operator: dict[str, Any], tmp_path: Path) -> None:
    form = form_of(**operator, dtype="float16")
    assert error_of(form, built(form, schedule_for(form)), tmp_path) < 1e-3


def test_dtypes_without_vectors_are_refused() -> None:
    form = form_of(**MATMUL, dtype="bfloat16")
    with pytest.raises(LoweringError, match="A is bfloat16; CPU kernels take float16, float32 and float64"):
        lower(LoweringRequest(form, schedule_for(form), "op", host()))


def test_diagonals_are_read_in_place() -> None:
    form = form_of(expr="Y[i] = sum(k, A[k,k] * B[i,k])", sizes={"i": 64, "k": 4000})
    assert lower(LoweringRequest(form, schedule_for(form), "op", host())).scratch_bytes < 2**22
