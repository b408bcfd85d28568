"""A stripped source is the same kernel: what TVM's prelude gave it, the new lines give it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from codegen.gpu.source.nvrtc import compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.sources import cuda_kernel
from codegen.target import Target
from codegen.tir.lowering import LoweringRequest
from hal.catalog import load_device
from roller.programs import find_programs
from sokoban.kernel.form import kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.stages import operator_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule

tvm = pytest.importorskip("tvm")

KERNEL = 'extern "C" __global__ void f(float* x) {{ {} }}\n'


def tvm_source(dtype: str, function: Callable[[Any], Any], lanes: int) -> str:
    """CUDA source of an element-wise operator over 1024 elements, ``lanes`` per access."""
    from tvm import te

    x = te.placeholder((1024,), dtype, name="X")
    y = te.compute((1024,), lambda i: function(x[i]), name="Y")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([x, y]))
    (loop,) = schedule.get_loops(schedule.get_sblock("Y"))
    outer, threads, vector = schedule.split(loop, [None, 64, lanes])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(threads, "threadIdx.x")
    schedule.vectorize(vector)
    target = tvm.target.Target(
        {
            "kind": "cuda", "arch": "sm_80", "max_num_threads": 1024, "thread_warp_size": 32,
            "max_shared_memory_per_block": 49152, "max_threads_per_block": 1024, "host": {"kind": "llvm"},
        }
    )  # fmt: skip
    source: str = tvm.compile(schedule.mod, target).mod.imports[0].inspect_source()
    return source


def machine_code(cubin: bytes) -> bytes:
    """The instructions of the one kernel in an ELF image."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry_bytes) for i in range(count)]
    names = sections[names_index][4]
    for name, _, _, _, offset, size in sections:
        if cubin[names + name :].startswith(b".text."):
            return cubin[offset : offset + size]
    raise AssertionError("no .text section")


def functions(dtype: str) -> dict[str, Callable[[Any], Any]]:
    from tvm import tirx

    return {
        "relu": lambda x: tirx.Max(x, tirx.const(0, dtype)),
        "clip": lambda x: tirx.Min(tirx.exp(x), tirx.const(6, dtype)),
        "erf": lambda x: tirx.erf(x),
        "tanh": lambda x: tirx.tanh(x),
        "power": lambda x: tirx.power(x, x),
        "square": lambda x: x * x,
        "cast": lambda x: tirx.exp(x.astype("float32")).astype(dtype),
    }


@pytest.mark.parametrize(
    ("dtype", "lanes", "name"),
    [
        ("float32", 4, "tanh"),
        ("float16", 1, "erf"),
        ("float16", 2, "power"),
        ("float16", 4, "erf"),
        ("float16", 4, "power"),
        ("float16", 8, "erf"),
        ("float16", 8, "tanh"),
        ("bfloat16", 2, "square"),
        ("bfloat16", 4, "cast"),
        ("bfloat16", 8, "cast"),
    ],
)
def test_a_stripped_kernel_is_the_same_machine_code(dtype: str, lanes: int, name: str) -> None:
    source = tvm_source(dtype, functions(dtype)[name], lanes)
    stripped = strip_prelude(source)
    assert "cuda/std" in source and "cuda/std" not in stripped
    kernels = [compile_cuda(text, "sm_80", name=name) for text in (source, stripped)]
    assert machine_code(kernels[0].cubin) == machine_code(kernels[1].cubin)
    assert kernels[0].registers == kernels[1].registers


def test_a_float_kernel_needs_nothing_above_it() -> None:
    source = tvm_source("float32", functions("float32")["tanh"], 4)
    assert strip_prelude(source).startswith('extern "C" __global__ void')


def test_a_variable_named_after_halves_is_no_half() -> None:
    stripped = strip_prelude("#include <cuda_fp16.h>\n" + KERNEL.format("float halfway[1]; halfway[0] = x[0];"))
    assert "cuda_fp16" not in stripped


def test_stripping_twice_changes_nothing_more() -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        stripped = strip_prelude(tvm_source(dtype, functions(dtype)["relu"], 4))
        assert strip_prelude(stripped) == stripped


def test_integer_types_are_defined_where_they_are_used() -> None:
    source = "#include <cuda/std/cstdint>\n" + KERNEL.format("uint a = 1; x[(int64_t)a] = (uchar)2;")
    stripped = strip_prelude(source)
    assert "typedef long long int64_t;" in stripped
    assert "typedef unsigned int uint;" in stripped
    assert "uint64_t" not in stripped
    assert compile_cuda(stripped, "sm_70", name="f").spill_bytes == 0


def test_half_and_integer_types_go_together() -> None:
    source = KERNEL.format("half h = __float2half_rn(x[0]); x[(int64_t)threadIdx.x] = (float)max(h, h) + (uint8_t)1;")
    assert compile_cuda(strip_prelude(source), "sm_70", name="f").registers > 0


def test_tensor_core_kernels_get_their_header() -> None:
    stripped = strip_prelude(
        "#include <mma.h>\n" + KERNEL.format("nvcuda::wmma::layout_t l; half h; (void)l; (void)h;")
    )
    assert "#include <cuda_fp16.h>\n#include <mma.h>\n" in stripped
    assert compile_cuda(stripped, "sm_70", name="f").registers > 0


@pytest.mark.parametrize(
    "definition",
    [
        "#define MAGIC(a) ((a) + 1)",
        "__device__ float MAGIC(float a) { return a; }",
        "static inline __device__ float\nMAGIC(float a) {\n  return a;\n}",
        "struct MAGIC { float v; __device__ MAGIC(float a) : v(a) {} __device__ operator float() { return v; } };",
        "DEFINE_UNARY(MAGIC, other)",
        "using MAGIC = float;",
        "using helpers::MAGIC;",
        "typedef float MAGIC;",
    ],
)
def test_a_kernel_that_needs_something_unknown_is_left_alone(definition: str) -> None:
    source = f"#include <cuda/std/cstdint>\n{definition}\n" + KERNEL.format("x[0] = MAGIC(x[1]);")
    assert strip_prelude(source) == source
    without = f"#include <cuda/std/cstdint>\n{definition}\n" + KERNEL.format("x[0] = x[1]; // MAGIC")
    assert strip_prelude(without).startswith('extern "C"')


def test_a_source_of_unknown_shape_is_left_alone() -> None:
    assert strip_prelude("__kernel void f() {}\n") == "__kernel void f() {}\n"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_with_much_shared_memory_go_without_the_old_prelude(dtype: str) -> None:
    """They declare it by ``__align__``, which is no name of TVM's, though its prelude has structures aligned so."""
    form = kernel_form(operator_from_data({"op": "matmul", "m": 512, "n": 512, "k": 512, "dtype": dtype}))
    schedule = TileSchedule(
        block=(("m", 128), ("n", 128)), thread=(("m", 64), ("n", 32)), step=(("k", 64),), cached=("A", "B"), stages=3,
        instruction=Instruction.MMA_16X8X16, asynchronous=True,
    )  # fmt: skip
    _, kernel = cuda_kernel(LoweringRequest(form, schedule, "product", Target("cuda", "sm_80", 32)))
    assert kernel.dynamic_shared_bytes > 48 * 1024
    assert "extern __shared__ __align__" in kernel.source and "TVM" not in kernel.source


def test_infinities_need_no_header() -> None:
    text = "Y[i,j] = select(j <= i, sum(k, A[i,k] * B[j,k]), -inf)"
    data = {"expr": text, "sizes": {"i": 256, "j": 256, "k": 128}, "dtypes": dict.fromkeys("AB", "bfloat16")}
    program = find_programs(operator_form(operator_from_data(data)), load_device("a100"), 1).ranked(1)[0]
    part = program.parts[0]
    _, kernel = cuda_kernel(LoweringRequest(part.problem, part.schedule, "masked", Target("cuda", "sm_80", 32)))
    assert "__uint_as_float(0x7f800000u)" in kernel.source and "math_constants" not in kernel.source
