"""The CUDA emulator: what it computes, and what it notices."""

from __future__ import annotations

import subprocess
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from codegen.gpu.source.text import cuda_source
from codegen.tir.lowered import KERNEL_SUFFIX
from codegen.verify import emulator
from codegen.verify.emulator import EmulatorError, run_cuda_on_cpu
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from sokoban.schedule.tile import TileSchedule, sizes
from tests.codegen.lowering import lower

pytestmark = pytest.mark.usefixtures("emulator")

FLOATS = np.arange(64, dtype=np.float32)
HEAD = 'extern "C" __global__ void __launch_bounds__(64) f(float* __restrict__ X, float* __restrict__ Y)'


def run(body: str, x: np.ndarray = FLOATS, grid: int = 1, block: int = 64, dynamic: int = 0) -> np.ndarray:
    output = np.full(x.size, -1, np.float32)
    source = f"{HEAD} {{ {body} }}"
    return run_cuda_on_cpu(source, "f", [x, output], [grid], [block], [1], dynamic, optimized=False).outputs[0]


def test_threads_and_blocks_have_their_indices() -> None:
    result = run("int i = blockIdx.x * 16 + threadIdx.x; Y[i] = X[i] * 2.0f;", grid=4, block=16)
    np.testing.assert_array_equal(result, FLOATS * 2)


def test_barriers_order_shared_memory() -> None:
    for memory in ("__shared__ alignas(64) float s[64];", "extern __shared__ __align__(64) float s[];"):
        body = "s[threadIdx.x] = X[threadIdx.x]; __syncthreads(); Y[threadIdx.x] = s[63 - threadIdx.x];"
        result = run(f"{memory} {body}", dynamic=256)
        np.testing.assert_array_equal(result, FLOATS[::-1])


@pytest.mark.parametrize("kind", ["signed char", "unsigned char", "unsigned short", "long long"])
def test_shared_memory_sized_at_launch_has_types_of_several_words(kind: str) -> None:
    body = "s[threadIdx.x] = threadIdx.x; __syncthreads(); Y[threadIdx.x] = s[63 - threadIdx.x];"
    result = run(f"extern __shared__ __align__(64) {kind} s[]; {body}", dynamic=512)
    np.testing.assert_array_equal(result, FLOATS[::-1])


def test_shared_memory_is_fresh_for_every_block() -> None:
    body = "__shared__ float s[32]; Y[blockIdx.x * 32 + threadIdx.x] = s[threadIdx.x]; s[threadIdx.x] = 1.0f;"
    assert np.isnan(run(body, grid=2, block=32)).all()


@pytest.mark.parametrize(
    ("shuffle", "source"),
    [
        ("__shfl_sync(__activemask(), v, 5)", lambda lane: 5),
        ("__shfl_sync(0xffffffff, v, 1, 8)", lambda lane: lane // 8 * 8 + 1),
        ("__shfl_down_sync(0xffffffff, v, 3)", lambda lane: lane + 3 if lane + 3 < 32 else lane),
        ("__shfl_down_sync(0xffffffff, v, 1, 4)", lambda lane: lane + 1 if lane % 4 < 3 else lane),
        ("__shfl_up_sync(0xffffffff, v, 2)", lambda lane: lane - 2 if lane >= 2 else lane),
        ("__shfl_xor_sync(0xffffffff, v, 16)", lambda lane: lane ^ 16),
    ],
)
def test_shuffles_move_values_inside_a_warp(shuffle: str, source: object) -> None:
    result = run(f"float v = X[threadIdx.x]; Y[threadIdx.x] = {shuffle};")
    expected = [warp * 32 + source(lane) for warp in range(2) for lane in range(32)]  # type: ignore[operator]
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("Y[threadIdx.x + 1] = 0.0f;", "an access outside an array"),
        ("Y[threadIdx.x] = X[threadIdx.x + 16384];", "an access outside an array"),
        ("Y[threadIdx.x] = ((float4*)(X + 1))->x;", "not aligned"),
        ("__shared__ float s[8]; s[threadIdx.x] = 1.0f;", "an index beyond"),
        ("if (threadIdx.x < 40) __syncwarp(); else __syncthreads();", "wait for each other"),
        ("undeclared = 1;", "undeclared"),
    ],
)
def test_mistakes_are_noticed(body: str, reason: str) -> None:
    with pytest.raises(EmulatorError, match=reason):
        run(body)


def test_a_store_into_the_slack_behind_an_array_is_noticed() -> None:
    with pytest.raises(EmulatorError, match="an access outside an array"):
        run("Y[threadIdx.x] = X[0];", x=FLOATS[:60].copy())


def test_misaligned_fragments_are_noticed() -> None:
    text = """nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> c;
    __shared__ alignas(64) float s[1024];
    nvcuda::wmma::fill_fragment(c, 1.0f);
    nvcuda::wmma::store_matrix_sync(&s[%s], c, %s, nvcuda::wmma::mem_row_major);"""
    with pytest.raises(EmulatorError, match="aligned to 32 bytes"):
        run(text % (4, 16))
    with pytest.raises(EmulatorError, match="multiple of 16 bytes"):
        run(text % (0, 18))
    run(text % (8, 20))


def test_arguments_have_to_fit_the_kernel() -> None:
    with pytest.raises(EmulatorError, match="1 arguments for 2 parameters"):
        run_cuda_on_cpu(f"{HEAD} {{}}", "f", [FLOATS], [1], [1], [0])
    with pytest.raises(EmulatorError, match="no such kernel"):
        run_cuda_on_cpu(f"{HEAD} {{}}", "g", [FLOATS], [1], [1], [0])


@pytest.mark.parametrize("threads", [(4, 32), (2, 64), (1, 256)])
def test_generated_reductions_run(threads: tuple[int, int]) -> None:
    form = kernel_form(operator_from_data({"op": "softmax", "shape": [9, 100]}))
    schedule = TileSchedule(
        block=sizes({form.spatial[0]: threads[0]}),
        thread=sizes({form.spatial[0]: 1}),
        reduce_threads=sizes({form.columns[0]: threads[1]}),
    )
    lowered = lower(form, schedule, entry="rows")
    tensors = (*form.expr.inputs, form.expr.output)
    source = cuda_source(lowered, "sm_70", [tensor.name for tensor in tensors])
    assert "__shfl_down_sync" in source
    inputs = random_inputs(form.expr, 3)
    arguments = [inputs[t.name].reshape(t.shape).astype(np.float32) for t in form.expr.inputs]
    arguments.append(np.full(form.expr.output.shape, np.nan, np.float32))
    (result,) = run_cuda_on_cpu(source, f"rows{KERNEL_SUFFIX}", arguments, lowered.grid, lowered.block, [1]).outputs
    # Next to a peak some probabilities have fewer bits than a number of float32.
    np.testing.assert_allclose(result, evaluate(form.expr, inputs), rtol=1e-5, atol=1e-40)


HALVES = 'extern "C" __global__ void f(half* __restrict__ A, half* __restrict__ B, float* __restrict__ D)'


def test_a_product_takes_its_fragments_as_the_ptx_manual_lays_them_out() -> None:
    """PTX ISA, "Matrix Fragments for mma.m16n8k16": rows and columns of a0 to a7, b0 to b3, c0 to c3 by lane."""
    body = """
      unsigned a[4], b[2]; float d[4] = {0, 0, 0, 0};
      int group = threadIdx.x / 4, in_group = threadIdx.x % 4;
      for (int i = 0; i < 8; ++i) {
        int row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;
        int column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
        ((half*)a)[i] = A[row * 16 + column];
      }
      for (int i = 0; i < 4; ++i) ((half*)b)[i] = B[(in_group * 2 + (i & 1) + (i < 2 ? 0 : 8)) * 8 + group];
      mma_16x8x16_f16(d, 0, a, 0, b, 0);
      for (int i = 0; i < 4; ++i) D[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)] = d[i];
    """
    generator = np.random.default_rng(1)
    a, b = generator.normal(size=(16, 16)).astype(np.float16), generator.normal(size=(16, 8)).astype(np.float16)
    arguments = [a, b, np.full((16, 8), np.nan, np.float32)]
    (result,) = run_cuda_on_cpu(f"{HALVES} {{ {body} }}", "f", arguments, [1], [32], [2]).outputs
    np.testing.assert_allclose(result, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_four_matrices_are_loaded_by_their_rows_addresses(transposed: bool) -> None:
    """PTX ISA, "ldmatrix": lane i gets elements 2 (i % 4) and one more of row i / 4 of every matrix."""
    name = "load_matrix_x4_trans" if transposed else "load_matrix_x4"
    body = f"""
      __shared__ alignas(128) half s[256]; unsigned to[4];
      for (int i = 0; i < 8; ++i) s[threadIdx.x * 8 + i] = A[threadIdx.x * 8 + i];
      __syncthreads();
      {name}(to, 0, s, (31 - (int)threadIdx.x) * 16);
      for (int i = 0; i < 8; ++i) D[threadIdx.x * 8 + i] = ((half*)to)[i];
    """
    a = np.arange(256, dtype=np.float16)
    arguments = [a, a, np.full(256, np.nan, np.float32)]
    (result,) = run_cuda_on_cpu(f"{HALVES} {{ {body} }}", "f", arguments, [1], [32], [2]).outputs
    matrices = a.reshape(32, 8)[::-1].reshape(4, 8, 8)
    matrices = matrices.transpose(0, 2, 1) if transposed else matrices
    expected = matrices.reshape(4, 8, 4, 2).transpose(1, 2, 0, 3)
    np.testing.assert_array_equal(result, expected.ravel())


def test_asynchronous_copies_fill_with_zeros_what_is_outside() -> None:
    body = """
      __shared__ alignas(128) float s[256];
      copy_async_16(s, threadIdx.x * 16, X);
      copy_async_8_guarded(s, 512 + threadIdx.x * 8, X, threadIdx.x != 0);
      copy_async_commit();
      copy_async_wait_0();
      Y[threadIdx.x] = s[threadIdx.x * 4 + 1];
      Y[32 + threadIdx.x] = s[128 + threadIdx.x * 2 + 1];
    """
    first, second = np.split(run(body, block=32), 2)
    assert (first == FLOATS[1]).all()
    assert (second[1:] == FLOATS[1]).all() and second[0] == 0


def test_copies_that_are_not_aligned_are_refused() -> None:
    with pytest.raises(EmulatorError, match="not aligned"):
        run("__shared__ alignas(128) float s[64]; copy_async_16(s, 8, X); copy_async_wait_0();", block=32)


@pytest.mark.usefixtures("no_kept_kernels")
def test_compiled_programs_go_with_the_worker_process_that_made_them() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool:
        folder = pool.submit(emulator._program_folder).result()
        assert folder.is_dir()
    assert not folder.exists()


def test_headers_are_read_once() -> None:
    """g++ tells with ``!`` which headers it had read before, and with ``x`` which do not fit."""
    run("Y[threadIdx.x] = X[threadIdx.x];")
    options = (*emulator._COMPILE_OPTIONS, *emulator._CHECK_OPTIONS, "-O0")
    folder = emulator._read_headers(options)
    command = ["g++", *options, f"-I{folder}", "-H", "-fsyntax-only", "-x", "c++", "-"]
    completed = subprocess.run(
        command, input=f'#include "{emulator._HEADER.name}"\n', capture_output=True, text=True, check=True
    )
    assert completed.stderr.startswith(f"! {folder}")
