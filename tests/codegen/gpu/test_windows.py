"""Windows in registers: every element loaded once, every output right whatever the shape."""

from __future__ import annotations

import math
from typing import Any

import pytest

from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import cuda_source
from codegen.tir.lowered import Lowered
from codegen.verify.gpu import verify
from roller.inspect.disassembly import disassemble, nvdisasm_path
from roller.inspect.mix import mix_of
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule, sizes
from sokoban.schedule.windows import PATCH_STATEMENTS, reads_patches
from tests.codegen.lowering import lower

DEPTHWISE = {"op": "depthwise_conv2d", "n": 2, "c": 3, "h": 21, "w": 19}


def form_of(**data: Any) -> KernelForm:
    return kernel_form(operator_from_data(data))


def patch(form: KernelForm, tile: dict[str, tuple[int, int, int]]) -> TileSchedule:
    """``tile``: threads, adjacent outputs and virtual copies of a thread, by axis."""
    parts = {axis: tile.get(axis, (1, 1, 1)) for axis in form.spatial}
    schedule = TileSchedule(
        block=sizes({axis: math.prod(part) for axis, part in parts.items()}),
        thread=sizes({axis: own for axis, (_, own, _) in parts.items()}),
        vthreads=sizes({axis: copies for axis, (_, _, copies) in parts.items()}),
        step=sizes({axis: form.sizes[axis] for axis in form.reduced}),
        unroll=PATCH_STATEMENTS,
    )
    assert reads_patches(form, schedule)
    return schedule


def cuda(form: KernelForm, lowered: Lowered) -> str:
    return strip_prelude(cuda_source(lowered, "sm_80", [t.name for t in (*form.expr.inputs, form.expr.output)]))


@pytest.mark.skipif(nvdisasm_path() is None, reason="nvdisasm is not installed: roller[inspect]")
@pytest.mark.parametrize(("own", "stride", "rows"), [(1, 1, 5), (4, 1, 8), (4, 2, 11)])
def test_every_element_of_a_patch_is_loaded_once(own: int, stride: int, rows: int) -> None:
    """``own`` outputs below each other cover ``rows`` rows of five elements; the filter has 25."""
    form = form_of(op="depthwise_conv2d", n=2, c=3, h=64, w=64, kh=5, kw=5, stride=stride, padding=2)
    lowered = lower(form, patch(form, {"oh": (2, own, 1), "ow": (32, 1, 1)}), entry="once")
    compiled = compile_cuda(cuda(form, lowered), "sm_80", name="once")
    (function,) = disassemble(compiled.cubin).functions
    mix = mix_of(function.reachable)
    assert mix.count("global loads") == rows * 5 + 25
    assert mix.count("local memory") == 0 and compiled.spill_bytes == 0
    assert mix.kind("FFMA") == own * 25


def test_nobody_waits_for_anybody() -> None:
    form = form_of(**DEPTHWISE, kh=3, kw=3, padding=1)
    source = cuda(form, lower(form, patch(form, {"oh": (2, 4, 1), "ow": (16, 1, 1)}), entry="alone"))
    assert "__syncthreads" not in source and "__shared__" not in source


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize(
    "tile",
    [
        {"oh": (2, 3, 1), "ow": (8, 1, 1)},
        {"oh": (1, 2, 1), "ow": (4, 2, 1)},
        {"oh": (2, 2, 2), "ow": (4, 1, 2), "n": (1, 2, 1)},
        {"oh": (4, 1, 1), "ow": (4, 4, 1), "c": (1, 2, 1)},
    ],
    ids=["column", "patch", "copies", "row"],
)
@pytest.mark.parametrize(
    "data",
    [
        {**DEPTHWISE, "kh": 3, "kw": 3, "padding": 1},
        {**DEPTHWISE, "kh": 5, "kw": 3, "stride": 2, "padding": "SAME"},
        {**DEPTHWISE, "kh": 3, "kw": 3, "dilation": 2, "padding": 2},
        {**DEPTHWISE, "kh": 2, "kw": 2, "stride": 3, "dtype": "float16"},
        {**DEPTHWISE, "op": "avg_pool2d", "kh": 3, "kw": 3, "stride": 2, "padding": 1},
        {**DEPTHWISE, "op": "max_pool2d", "kh": 2, "kw": 3, "stride": 2},
    ],
    ids=["same", "strided", "dilated", "gaps", "average", "maximum"],
)
def test_any_patch_gives_the_same_result(data: dict[str, Any], tile: dict[str, tuple[int, int, int]]) -> None:
    form = form_of(**data)
    # Pools fuse images and channels.
    named = {axis: part for axis, part in tile.items() if axis in form.spatial}
    result = verify(form, patch(form, named), full_size=True)
    assert result.passed, result.reason
