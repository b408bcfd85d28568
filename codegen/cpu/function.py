"""The function that every CPU kernel is: pointers to tensors and scratch memory, and a range of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from codegen.cpu.cuts import position
from codegen.tir.lowered import identifier
from codegen.tir.lowering import AnyRequest
from codegen.tir.reads import guarded_read
from codegen.tir.statements import named
from codegen.tir.values import Expr
from sokoban.language.expression import DTYPE_BYTES, Load, Tensor

#: What the name of the function that runs a range of blocks has behind the kernel's.
BLOCKS = "_blocks"


@dataclass(frozen=True, kw_only=True)
class LoweredCpu:
    """A TVM module and what a caller needs to run it.

    Attributes:
        module: one PrimFunc, called ``entry`` with `BLOCKS` behind it: pointers to the inputs in order, the output and
            scratch memory, then the first block to run and the one to stop before (64-bit integers).
        entry: name of the kernel, which is that of the function for callers.
        blocks: how many blocks there are; they may run in any order and at the same time.
        scratch_bytes: scratch memory that every thread needs for itself, aligned to 64 bytes.
        vector_bytes: width of the vectors that it computes with.
    """

    module: Any
    entry: str
    blocks: int
    scratch_bytes: int
    vector_bytes: int


@dataclass(frozen=True)
class CpuBuffers:
    """Tensors that a kernel reads and writes, each as one run of elements.

    Attributes:
        sources: the inputs by name.
        output: the output.
        scratch: the thread's scratch memory, in the type that the kernel computes in.
    """

    sources: Mapping[str, Any]
    output: Any
    scratch: Any


def lanes_of(request: AnyRequest) -> int:
    """Elements of the type that a kernel computes in, in one vector of its target."""
    return request.target.vector_bytes // int(DTYPE_BYTES[request.problem.expr.accumulate])


def lowered_blocks(
    request: AnyRequest, *, blocks: int, scratch_elements: int, body: Callable[[CpuBuffers, Expr], None]
) -> LoweredCpu:
    """A kernel of so many blocks; ``body(buffers, number)`` writes the loops of one block."""
    expr, function = request.problem.expr, request.entry + BLOCKS
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(function)
        # An entry point already, by TVM's numbers: it makes no function of its own calling convention of it.
        T.func_attr({"global_symbol": function, "tirx.noalias": True, "calling_conv": 1})
        tensors = [*expr.inputs, expr.output]
        handles = [T.arg(identifier(tensor.name), T.handle(tensor.dtype)) for tensor in tensors]
        scratch_handle = T.arg("scratch", T.handle(expr.accumulate))
        begin, end = T.arg("begin", T.int64()), T.arg("end", T.int64())
        flat = [
            T.decl_buffer((max(1, tensor.element_count),), tensor.dtype, data=handle)
            for tensor, handle in zip(tensors, handles, strict=True)
        ]
        scratch = T.decl_buffer((max(1, scratch_elements),), expr.accumulate, data=scratch_handle)
        sources = {tensor.name: buffer for tensor, buffer in zip(expr.inputs, flat, strict=False)}
        with named(T.serial, end - begin, "number") as number:
            body(CpuBuffers(sources, flat[-1], scratch), (begin + number).astype("int32"))
    element_bytes = DTYPE_BYTES[expr.accumulate]
    return LoweredCpu(
        module=tvm.IRModule({function: builder.get()}),
        entry=request.entry,
        blocks=blocks,
        scratch_bytes=scratch_elements * element_bytes,
        vector_bytes=lanes_of(request) * element_bytes,
    )


def reads_inside(load: Load, tensor: Tensor, ranges: Mapping[str, int]) -> bool:
    """True if a load needs no condition to be read wherever axes of sizes ``ranges`` may be."""
    bounds = (index.bounds(ranges) for index in load.indices)
    return all(low >= 0 and high < extent for (low, high), extent in zip(bounds, tensor.shape, strict=True))


def read_flat(
    load: Load,
    tensors: Mapping[str, Tensor],
    sources: Mapping[str, Any],
    axes: Mapping[str, Expr],
    ranges: Mapping[str, int],
    dtype: str,
) -> Expr:
    """An element of a tensor that lies flat in its source, in ``dtype``; the pad value outside."""
    tensor, source = tensors[load.tensor], sources[load.tensor]

    def element(*indices: Expr) -> Expr:
        return source[position(indices, tensor.shape or (1,))]

    def gathered(place: Load) -> Expr:
        return read_flat(place, tensors, sources, axes, ranges, tensors[place.tensor].dtype)

    return guarded_read(load, tensor, element, axes, ranges, gathered).astype(dtype)
