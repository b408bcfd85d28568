"""A kernel as a TVM function that is written statement by statement: what stands around the statements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from codegen.tir.lowered import identifier
from sokoban.language.expression import Tensor


def written(entry: str, body: Callable[[], None]) -> Any:
    """The module of one function ``entry``, whose parameters and statements ``body`` writes."""
    with IRBuilder() as builder, T.prim_func(s_tir=True):
        T.func_name(entry)
        T.func_attr({"global_symbol": entry, "tirx.noalias": True})
        body()
    return tvm.IRModule({entry: builder.get()})


def parameter(tensor: Tensor, shape: tuple[int, ...] | None = None) -> Any:
    """The next parameter, a buffer of ``shape``: by default the tensor's own, and one element where it has none."""
    name = identifier(tensor.name)
    handle = T.arg(f"{name}_handle", T.handle())
    buffer = T.match_buffer(handle, shape or tensor.shape or (1,), tensor.dtype)
    IRBuilder.name(name, buffer)
    return buffer
