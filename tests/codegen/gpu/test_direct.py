"""Element-wise kernels: vectors for every function and type."""

from __future__ import annotations

import re
from typing import Any

import pytest

from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.text import cuda_source
from codegen.verify.gpu import verify
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule, sizes
from tests.codegen.addresses import vector_accesses
from tests.codegen.lowering import lower


def form_of(**data: Any) -> KernelForm:
    return kernel_form(operator_from_data(data))


def flat(form: KernelForm, thread: int, threads: int = 32, copies: int = 1) -> TileSchedule:
    last = form.spatial[-1]
    return TileSchedule(
        block=sizes({axis: thread * threads * copies if axis == last else 1 for axis in form.spatial}),
        thread=sizes({axis: thread if axis == last else 1 for axis in form.spatial}),
        vthreads=sizes({axis: copies if axis == last else 1 for axis in form.spatial}),
    )


@pytest.mark.parametrize("function", ["relu", "gelu", "silu", "tanh"])
@pytest.mark.parametrize(("dtype", "elements"), [("float32", 4), ("float16", 8)])
def test_accesses_are_sixteen_bytes_wide_whatever_is_computed(function: str, dtype: str, elements: int) -> None:
    form = form_of(op="elementwise", function=function, shape=[64, 256], dtype=dtype)
    lowered = lower(form, flat(form, elements), entry="wide")
    source = strip_prelude(cuda_source(lowered, "sm_80", ["X", "Y"]))
    accesses = [access for access in vector_accesses(source, lowered.grid, lowered.block) if access.base[0] in "XY"]
    assert {access.base for access in accesses if access.width_bytes == 16} >= {"X_ptr", "Y_ptr"}
    assert all((access.offsets_bytes % access.width_bytes == 0).all() for access in accesses)
    # Nothing of either tensor is touched in another way.
    assert not re.search(r"[^(\w][XY]_ptr\[", source.split("{", 1)[1])
    assert compile_cuda(source, "sm_80", name="wide").spill_bytes == 0


@pytest.mark.usefixtures("opencl", "emulator")
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("thread", [1, 4, 8])
@pytest.mark.parametrize(
    "data",
    [
        {"op": "elementwise", "function": "gelu", "shape": [3, 133]},
        {"op": "elementwise", "function": "add", "shapes": [[5, 264], [264]]},
        {"op": "elementwise", "function": "mul", "shapes": [[3, 4, 7, 7], [3, 4, 1, 1]], "dtype": "float16"},
        {"op": "transpose", "shape": [12, 40], "perm": [1, 0]},
        {"expr": "Y[i,j] = X[i,j-1 | pad=0] + X[i,j+1 | pad=0]", "sizes": {"i": 5, "j": 64}, "shapes": {"X": [5, 64]}},
    ],
    ids=["odd", "broadcast", "scaled", "transposed", "shifted"],
)
def test_any_coarsening_gives_the_same_result(data: dict[str, Any], thread: int, copies: int) -> None:
    form = form_of(**data)
    engine = "opencl" if copies == 1 else "emulator"
    result = verify(form, flat(form, thread, 8, copies), full_size=True, engine=engine)
    assert result.passed, result.reason
