"""Kernels run on the CPU, and what goes wrong comes back as one line."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from codegen.verify.opencl import OpenClError, device_name, run_opencl

pytestmark = pytest.mark.usefixtures("opencl")

SCALED_SUM = """
__kernel void scaled_sum(__global const float* a, __global const float* b, __global float* c) {
  int i = get_global_id(0);
  if (i < 1000) c[i] = a[i] + 2.0f * b[i];
}
"""

REVERSE_IN_GROUP = """
__kernel void reverse_in_group(__global const int* restrict x, __global int* restrict y) {
  __local int staged[12];
  int t = get_local_id(1) * 4 + get_local_id(0);
  int base = (get_group_id(1) * 3 + get_group_id(0)) * 12;
  staged[t] = x[base + t];
  barrier(CLK_LOCAL_MEM_FENCE);
  y[base + t] = staged[11 - t];
}
"""


def test_a_kernel_writes_its_outputs_and_only_those() -> None:
    a = np.arange(1000, dtype=np.float32)
    b = np.ones(1000, dtype=np.float32)
    c = np.full(1000, np.nan, dtype=np.float32)
    run_opencl(SCALED_SUM, "scaled_sum", [a, b, c], [1024], [64], output_indices=[2])
    assert np.array_equal(c, np.arange(1000) + 2)
    assert np.array_equal(a, np.arange(1000)) and np.array_equal(b, np.ones(1000))


def test_what_a_kernel_does_not_write_keeps_its_poison() -> None:
    a = np.zeros(1200, dtype=np.float32)
    c = np.full(1200, np.nan, dtype=np.float32)
    run_opencl(SCALED_SUM, "scaled_sum", [a, a, c], [1024], [64], output_indices=[2])
    assert not np.isnan(c[:1000]).any()
    assert np.isnan(c[1000:]).all()


@pytest.mark.parametrize("optimized", [True, False])
def test_groups_have_barriers_local_memory_and_two_dimensions(optimized: bool) -> None:
    x = np.arange(2 * 3 * 12, dtype=np.int32)
    y = np.zeros_like(x)
    groups, group = (3 * 4, 2 * 3), (4, 3)
    run_opencl(REVERSE_IN_GROUP, "reverse_in_group", [x, y], groups, group, output_indices=[1], optimized=optimized)
    assert np.array_equal(y, x.reshape(6, 12)[:, ::-1].reshape(-1))


def test_an_empty_input_is_a_valid_buffer() -> None:
    empty = np.zeros(0, dtype=np.float32)
    source = "__kernel void f(__global const float* a, __global float* b) { b[get_global_id(0)] = 7; }"
    result = np.zeros(4, dtype=np.float32)
    run_opencl(source, "f", [empty, result], [4], [4], output_indices=[1])
    assert np.array_equal(result, np.full(4, 7))


def test_a_source_that_does_not_compile_gives_its_first_error() -> None:
    with pytest.raises(OpenClError) as caught:
        run_opencl(
            "__kernel void broken(__global float* a) { a[0] = nothing; }", "broken", [], [1], [1], output_indices=[]
        )
    assert str(caught.value).startswith("broken: ")
    assert "use of undeclared identifier 'nothing'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "nothing" in caught.value.log


def test_a_missing_kernel_and_a_wrong_argument_count_are_named() -> None:
    array = np.zeros(1000, dtype=np.float32)
    with pytest.raises(OpenClError, match=r"^other: "):
        run_opencl(SCALED_SUM, "other", [array] * 3, [1024], [64], output_indices=[2])
    with pytest.raises(OpenClError) as caught:
        run_opencl(SCALED_SUM, "scaled_sum", [array], [1024], [64], output_indices=[0])
    assert str(caught.value) == "scaled_sum: takes 3 arguments, not 1"


def test_an_impossible_launch_names_its_sizes() -> None:
    array = np.zeros(1000, dtype=np.float32)
    with pytest.raises(OpenClError) as caught:
        run_opencl(SCALED_SUM, "scaled_sum", [array, array, array.copy()], [100], [64], output_indices=[2])
    assert str(caught.value).startswith("scaled_sum: ")
    assert str(caught.value).endswith("(global (100,), local (64,))")


def test_a_strided_array_is_refused_instead_of_misread() -> None:
    strided = np.zeros((1000, 2), dtype=np.float32)[:, 0]
    with pytest.raises(OpenClError) as caught:
        run_opencl(SCALED_SUM, "scaled_sum", [strided] * 3, [1024], [64], output_indices=[2])
    assert str(caught.value) == "scaled_sum: argument 0 has to be a contiguous array, an output also writeable"


def test_an_error_survives_the_way_back_from_a_worker() -> None:
    error = pickle.loads(pickle.dumps(OpenClError("f: bad", "log\nlines")))
    assert (str(error), error.log) == ("f: bad", "log\nlines")


def test_the_device_tells_its_name() -> None:
    assert device_name()


def test_a_forked_child_is_asked_to_use_spawn() -> None:
    """PoCL's threads do not exist in a forked child; without a word the first launch there would hang."""
    script = (
        "import os, sys\n"
        "from codegen.verify.opencl import opencl_available\n"
        "assert opencl_available() is None\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    print(opencl_available(), flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.stdout == "OpenCL was in use before this process was forked; start workers by 'spawn' instead\n"


def test_importing_the_runner_loads_no_opencl() -> None:
    script = "import sys, codegen.verify.opencl; print('pyopencl' in sys.modules)"
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.stdout == "False\n"
