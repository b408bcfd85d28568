"""CUDA and OpenCL C as far as attention by multiply-adds needs them: one text, written in either."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from codegen.gpu.walks.functions import device_functions
from codegen.target import Target
from codegen.tir.lowered import KERNEL_SUFFIX

#: By element type: the C type of a tensor's elements, and the ending of the functions that read and write four.
ELEMENTS = {"float16": ("unsigned short", "f16"), "bfloat16": ("unsigned short", "bf16"), "float32": ("float", "f32")}


@dataclass(frozen=True, kw_only=True)
class Language:
    """Spellings that differ between the two languages.

    Attributes:
        is_opencl: True where shared memory is declared with its size, and functions stand in the kernel's own text.
        opening: in front of the kernel's name, with the ``threads`` of a block.
        pointer: a parameter, with its ``type`` and ``name``.
        shared: the declaration of shared memory, ``pieces`` times four floats.
        words: spellings of the language, by the word in the texts here.
    """

    is_opencl: bool
    opening: str
    pointer: str
    shared: str
    words: tuple[tuple[str, str], ...]

    @staticmethod
    def of(target: Target) -> Language:
        """The language of a target."""
        return _CUDA if target.row.has_dynamic_shared else _OPENCL

    def kernel(self, entry: str, threads: int, tensors: Sequence[tuple[str, str]], body: str) -> str:
        """The text of a kernel: ``tensors`` are types of elements and names, ``body`` its statements in words that both
        languages share."""
        parameters = ", ".join(self.pointer.format(type=kind, name=f"{name}_ptr") for kind, name in tensors)
        for word, written in self.words:
            # A user's tensor may have a word in its name.
            body = re.sub(rf"(?<!\w){re.escape(word)}" + r"(?!\w)" * word[-1].isalpha(), written, body)
        text = f"{self.opening.format(threads=threads)}{entry}{KERNEL_SUFFIX}({parameters}) {{\n{body}\n}}\n"
        return f"{device_functions(text, is_opencl=True)}\n\n{text}" if self.is_opencl else text


_CUDA = Language(
    is_opencl=False,
    opening='extern "C" __global__ void __launch_bounds__({threads}) ',
    pointer="{type}* __restrict__ {name}",
    shared="extern __shared__ __align__(16) float shared[];",
    words=(
        ("GLOBAL ", ""), ("LOCAL ", ""), ("BARRIER;", "__syncthreads();"), ("FMA(", "fmaf("), ("LARGER(", "fmaxf("),
        ("(long)", "(long long)"), ("THREAD", "threadIdx.x"), ("BLOCK", "blockIdx.x"),
    ),
)  # fmt: skip
_OPENCL = Language(
    is_opencl=True,
    opening="__kernel void __attribute__((reqd_work_group_size({threads}, 1, 1))) ",
    pointer="__global {type}* restrict {name}",
    shared="__local float4 tiles[{pieces}];\n  __local float* shared = (__local float*)tiles;",
    words=(
        ("GLOBAL ", "__global "), ("LOCAL ", "__local "), ("BARRIER;", "barrier(CLK_LOCAL_MEM_FENCE);"),
        ("FMA(", "fma("), ("LARGER(", "fmax("), ("THREAD", "get_local_id(0)"), ("BLOCK", "get_group_id(0)"),
        # Point-wise functions as CUDA calls them.
        ("(long long)", "(long)"), ("smaller(", "fmin("), ("larger(", "fmax("), ("fabsf(", "fabs("),
        ("__expf(", "exp("), ("__logf(", "log("), ("sqrtf(", "sqrt("), ("tanhf(", "tanh("), ("erff(", "erf("),
        ("__sinf(", "sin("), ("__cosf(", "cos("), ("floorf(", "floor("), ("ceilf(", "ceil("), ("powf(", "pow("),
    ),
)  # fmt: skip
