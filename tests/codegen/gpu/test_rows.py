"""Reductions shared among threads: who takes what, and that nobody is left behind at a barrier."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import cuda_source, opencl_source, static_shared_bytes
from codegen.target import Target
from codegen.tir.lowered import Lowered, LoweringError
from codegen.verify.gpu import verify
from hal.catalog import load_device
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.rows import keeps_in_shared
from sokoban.schedule.tile import TileSchedule, sizes
from tests.codegen.lowering import CUDA, lower


def form_of(**data: Any) -> KernelForm:
    return kernel_form(operator_from_data(data))


def rows_schedule(form: KernelForm, rows: int, threads: int, each: int = 1) -> TileSchedule:
    last = form.spatial[-1]
    return TileSchedule(
        block=sizes({axis: rows * each if axis == last else 1 for axis in form.spatial}),
        thread=sizes({axis: each if axis == last else 1 for axis in form.spatial}),
        reduce_threads=sizes({axis: threads if axis == form.reduced[-1] else 1 for axis in form.reduced}),
    )


def cuda(form: KernelForm, lowered: Lowered) -> str:
    names = [tensor.name for tensor in (*form.expr.inputs, form.expr.output)]
    return strip_prelude(cuda_source(lowered, "sm_70", names))


def opencl(form: KernelForm, lowered: Lowered) -> str:
    return opencl_source(lowered, [tensor.name for tensor in (*form.expr.inputs, form.expr.output)])


def test_threads_lie_along_what_is_contiguous() -> None:
    """Rows of a row-major tensor: neighbouring threads take columns. Its columns: they take neighbouring columns."""
    rows = form_of(op="reduce", function="sum", shape=[30, 100], axes=[1])
    assert lower(rows, rows_schedule(rows, 4, 32), entry="rows").block == (32, 4, 1)
    columns = form_of(op="reduce", function="sum", shape=[100, 30], axes=[0])
    assert lower(columns, rows_schedule(columns, 4, 32), entry="columns").block == (4, 32, 1)
    # 30 rows, 4 to a block.
    assert lower(rows, rows_schedule(rows, 4, 32), entry="rows").grid == (8, 1, 1)


@pytest.mark.parametrize("threads", [32, 64, 256])
@pytest.mark.parametrize("data", [{"op": "softmax", "shape": [33, 100]}, {"op": "layer_norm", "shape": [33, 1000]}])
def test_whole_warps_shuffle_and_say_so(data: dict[str, Any], threads: int) -> None:
    form = form_of(**data)
    source = cuda(form, lower(form, rows_schedule(form, 2, threads), entry="warps"))
    assert "__shfl_down_sync" in source
    # Lanes that have not come back from a branch would be missing from the active mask.
    assert "__activemask" not in source and "0xffffffffu" in source
    compiled = compile_cuda(source, "sm_70", name="warps")
    assert compiled.shared_bytes == static_shared_bytes(source)


def test_a_block_of_part_of_a_warp_asks_who_is_there() -> None:
    form = form_of(op="softmax", shape=[33, 100])
    source = cuda(form, lower(form, rows_schedule(form, 1, 16), entry="half_a_warp"))
    assert "0xffffffffu" not in source


@pytest.mark.parametrize("data", [{"op": "softmax", "shape": [33, 100]}, {"op": "layer_norm", "shape": [7, 65]}])
def test_no_barrier_stands_inside_a_condition(data: dict[str, Any]) -> None:
    """33 rows, 8 to a block: the last block has rows that do not exist, whose threads reach every barrier too."""
    form = form_of(**data)
    lowered = lower(form, rows_schedule(form, 8, 32), entry="barriers")
    for source, barrier in ((cuda(form, lowered), "__syncthreads"), (opencl(form, lowered), "barrier(")):
        stack: list[str] = []
        for line in source.splitlines():
            assert not (barrier in line and any("if (" in opened for opened in stack)), line
            if line.strip().startswith("}"):
                stack.pop()
            if line.rstrip().endswith("{"):
                stack.append(line)


@pytest.mark.usefixtures("opencl", "emulator")
@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("threads", [1, 16, 32, 96])
@pytest.mark.parametrize(
    "data",
    [
        {"op": "softmax", "shape": [13, 37]},
        {"op": "softmax", "shape": [5, 37, 6], "axis": 1},
        {"op": "layer_norm", "shape": [13, 129]},
        {"op": "reduce", "function": "max", "shape": [13, 5, 37], "axes": [0, 2]},
        {"op": "reduce", "function": "mean", "shape": [1003], "axes": [0]},
        {"expr": "C[i,j] = prod([r,s], X[r,i,s] + Y[s,j])", "sizes": {"i": 5, "j": 3, "r": 4, "s": 7}},
    ],
    ids=str,
)
def test_any_share_of_threads_gives_the_same_result(data: dict[str, Any], threads: int, each: int) -> None:
    form = form_of(**data)
    engine = "opencl" if each == 1 else "emulator"
    result = verify(form, rows_schedule(form, 2, threads, each), full_size=True, engine=engine)
    assert result.passed, result.reason


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        # 2500 columns of 64 threads in vectors of four: ten turns, of which shared memory keeps all, or four.
        ({"op": "softmax", "shape": [3, 2500]}, 2560),
        ({"op": "layer_norm", "shape": [3, 2500], "dtype": "bfloat16"}, 1024),
        ({"op": "softmax", "shape": [3, 2501], "dtype": "float16"}, 1024),
        ({"op": "softmax", "shape": [2, 2100, 64], "axis": 1}, 2112),
    ],
    ids=str,
)
def test_threads_find_what_they_kept_of_a_row(data: dict[str, Any], kept: int) -> None:
    """In registers, in shared memory and by reading again: no races, no barrier beyond those of the reductions."""
    form = form_of(**data)
    rows = 1 if form.reduces_contiguously else 2
    schedule = rows_schedule(form, rows, 64).with_(kept_columns=kept)
    result = verify(form, schedule, full_size=True, engine="emulator", target=CUDA)
    assert result.passed and not result.needless, result
    plain = lower(form, schedule.with_(kept_columns=0), entry="plain")
    element_bytes = form.expr.inputs[0].element_bytes
    assert lower(form, schedule, entry="kept").shared_bytes == plain.shared_bytes + rows * kept * element_bytes


def test_bfloat16_is_kept_where_it_is_computed_with() -> None:
    """Before compute capability 8.0 TVM keeps what is bfloat16 as float32, twice as wide."""
    form = form_of(op="softmax", shape=[3, 2500], dtype="bfloat16")
    schedule = rows_schedule(form, 1, 64).with_(kept_columns=2560)
    with pytest.raises(LoweringError, match=r"from compute capability 8\.0 on"):
        lower(form, schedule, entry="kept", target=Target("cuda", "sm_70", 32))
    assert keeps_in_shared(form, load_device("a100")) and not keeps_in_shared(form, load_device("v100"))
