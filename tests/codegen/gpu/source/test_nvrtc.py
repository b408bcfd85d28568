"""NVRTC makes cubins without a GPU, reports what a kernel takes, and makes the same bytes every time."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys

import pytest

from codegen.gpu.source import nvrtc as device_compiler
from codegen.gpu.source.nvrtc import (
    CompileError,
    compile_cuda,
    nvrtc_version,
    parse_resources,
    supported_architectures,
    unsupported_reason,
)

pytestmark = pytest.mark.usefixtures("no_kept_kernels")

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

SHARED_SUM = """
extern "C" __global__ void __launch_bounds__(64) shared_sum(const float* __restrict__ x, float* __restrict__ y) {
  __shared__ float staged[64 * 5];
  for (int i = 0; i < 5; ++i) staged[i * 64 + threadIdx.x] = x[(blockIdx.x * 5 + i) * 64 + threadIdx.x];
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < 5; ++i) sum += staged[threadIdx.x * 5 + i];
  y[blockIdx.x * 64 + threadIdx.x] = sum;
}
"""

#: 1024 threads leave 64 registers each; 128 live accumulators cannot fit.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spilling(const float* __restrict__ x, float* __restrict__ y, int n) {
  float a[128];
  #pragma unroll
  for (int i = 0; i < 128; ++i) a[i] = x[i * 1024 + threadIdx.x];
  for (int k = 0; k < n; ++k) {
    #pragma unroll
    for (int i = 0; i < 128; ++i) a[i] = a[i] * a[(i + 1) & 127] + x[k];
  }
  #pragma unroll
  for (int i = 0; i < 128; ++i) y[i * 1024 + threadIdx.x] = a[i];
}
"""

WMMA = """
#include <cuda_fp16.h>
#include <mma.h>
extern "C" __global__ void __launch_bounds__(32) tile(const half* a, const half* b, float* c) {
  nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, half, nvcuda::wmma::row_major> left;
  nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, half, nvcuda::wmma::row_major> right;
  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> sum;
  nvcuda::wmma::fill_fragment(sum, 0.0f);
  nvcuda::wmma::load_matrix_sync(left, a, 16);
  nvcuda::wmma::load_matrix_sync(right, b, 16);
  nvcuda::wmma::mma_sync(sum, left, right, sum);
  nvcuda::wmma::store_matrix_sync(c, sum, 16, nvcuda::wmma::mem_row_major);
}
"""


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize("architecture", ["sm_60", "sm_61", "sm_70", "sm_75", "sm_80", "sm_89", "sm_90"])
def test_a_kernel_compiles_for_every_board_with_a_generator(architecture: str) -> None:
    kernel = compile_cuda(SHARED_SUM, architecture, name="shared_sum")
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.shared_bytes == 64 * 5 * 4
    assert kernel.spill_bytes == kernel.stack_bytes == 0
    assert 0 < kernel.registers <= 255


@pytest.mark.usefixtures("device_compiler")
def test_spills_are_reported() -> None:
    kernel = compile_cuda(SPILLING, "sm_70", name="spilling")
    assert kernel.registers <= 65536 // 1024
    assert kernel.spill_bytes > 0
    assert kernel.stack_bytes > 0
    assert kernel.shared_bytes == 0


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
def test_tensor_core_kernels_find_their_headers(architecture: str) -> None:
    assert compile_cuda(WMMA, architecture, name="tile").registers > 0


@pytest.mark.usefixtures("device_compiler")
def test_the_same_source_gives_the_same_bytes_in_another_process_and_under_another_name() -> None:
    script = (
        "import hashlib, sys\n"
        "from codegen.gpu.source.nvrtc import compile_cuda\n"
        "kernel = compile_cuda(sys.stdin.read(), 'sm_70', name='elsewhere')\n"
        "print(hashlib.sha256(kernel.cubin).hexdigest())\n"
    )
    kernels = [compile_cuda(WMMA, "sm_70", name=name) for name in ("here", "there")]
    assert kernels[0] == kernels[1]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, input=WMMA, capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stdout.strip() == hashlib.sha256(kernels[0].cubin).hexdigest()


@pytest.mark.usefixtures("device_compiler")
def test_the_log_is_free_of_times_and_of_this_machine() -> None:
    log = compile_cuda(SHARED_SUM, "sm_70", name="shared_sum").log
    assert "Compile time" not in log
    assert "deprecated" not in log
    assert "1280 bytes smem" in log


@pytest.mark.usefixtures("device_compiler")
def test_a_source_that_does_not_compile_gives_its_first_error_and_the_log() -> None:
    source = 'extern "C" __global__ void f(float* x) { x[0] = one; x[1] = two; }'
    with pytest.raises(CompileError) as caught:
        compile_cuda(source, "sm_70", name="f")
    assert str(caught.value) == 'f: kernel.cu(1): error: identifier "one" is undefined'
    assert 'identifier "two" is undefined' in caught.value.log


@pytest.mark.usefixtures("device_compiler")
def test_a_missing_header_is_an_error_that_names_it() -> None:
    with pytest.raises(CompileError, match=r'cannot open source file "no_such\.h"'):
        compile_cuda('#include "no_such.h"\n' + SHARED_SUM, "sm_70", name="f")


@pytest.mark.usefixtures("device_compiler")
def test_a_kernel_that_takes_too_much_shared_memory_is_an_error() -> None:
    source = SHARED_SUM.replace("64 * 5];", "64 * 500];")
    with pytest.raises(CompileError, match="uses too much shared data"):
        compile_cuda(source, "sm_70", name="shared_sum")


@pytest.mark.usefixtures("device_compiler")
def test_a_source_without_a_kernel_is_an_error() -> None:
    with pytest.raises(CompileError) as caught:
        compile_cuda("int f() { return 1; }", "sm_70", name="f")
    assert str(caught.value) == "f: the source holds no __global__ function"


@pytest.mark.usefixtures("device_compiler")
def test_a_board_too_old_for_the_compiler_is_refused_up_front() -> None:
    with pytest.raises(CompileError) as caught:
        compile_cuda("not even CUDA", "sm_37", name="k80")
    version = ".".join(map(str, nvrtc_version()))
    oldest, newest = supported_architectures()[0], supported_architectures()[-1]
    assert str(caught.value) == f"k80: NVRTC {version} compiles for sm_{oldest} to sm_{newest}, not for sm_37"
    assert unsupported_reason("sm_37") == caught.value.reason


@pytest.mark.parametrize("architecture", ["", "70", "sm_", "gfx906", "sm_70 --use_fast_math"])
def test_what_is_no_architecture_is_refused(architecture: str) -> None:
    assert unsupported_reason(architecture) == f"{architecture!r} is not a CUDA architecture such as 'sm_70'"


@pytest.mark.usefixtures("device_compiler")
def test_supported_boards_have_no_reason_against_them() -> None:
    assert [unsupported_reason(name) for name in ("sm_60", "sm_70", "sm_90", "sm_90a")] == [None] * 4


def test_resources_are_the_worst_over_all_kernels_of_a_log() -> None:
    log = (
        "ptxas info    : Compiling entry function 'a' for 'sm_70'\n"
        "ptxas         .     16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 1280 bytes smem, 368 bytes cmem[0]\n"
        "ptxas info    : Compiling entry function 'b' for 'sm_70'\n"
        "ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 64 registers, used 0 barriers, 368 bytes cmem[0]\n"
    )
    assert parse_resources(log) == (64, 12 + 20, 16, 1280)
    assert parse_resources("ptxas info    : 0 bytes gmem\n") is None


def test_an_error_survives_the_way_back_from_a_worker() -> None:
    error = pickle.loads(pickle.dumps(CompileError("f", "bad\n thing", "log")))
    assert (str(error), error.kernel, error.reason, error.log) == ("f: bad thing", "f", "bad thing", "log")


def test_importing_the_compiler_loads_no_library() -> None:
    script = f"import sys, {device_compiler.__name__}; print('codegen.gpu.source.nvrtc_library' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout == "False\n"
