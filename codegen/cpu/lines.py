"""Lines of the caches that a kernel asks for before it reads or writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.cpu.cuts import position
from codegen.tir.values import Expr
from hal.spec.parts import CPU_AHEAD_BYTES
from sokoban.language.expression import Load, Tensor

#: Caches that a line is asked into, in LLVM's numbers: from the first on, or from the second.
ALL_CACHES, PRIVATE_CACHE = 3, 2


def runs_through(load: Load, tensor: Tensor, axes: Sequence[str], elements: int) -> bool:
    """True if a kernel that walks ``axes``, the last one fastest, reads the tensor from one end to the other.

    Args:
        load: the access.
        tensor: what is read.
        axes: the output's axes in order.
        elements: how many the output has; a tensor of fewer is read again and again, and stays in a cache.
    """
    read = tuple(index.axes[0] for index in load.indices if index.is_plain_axis)
    return read == tuple(axes) and len(load.indices) == len(axes) and tensor.element_count >= elements


def ask_for_line(buffer: Any, tensor: Tensor, point: Mapping[str, Expr], axes: Sequence[str], *, written: bool) -> None:
    """Ask for the line that lies `CPU_AHEAD_BYTES` after the element at ``at`` of a tensor that ``axes`` index."""
    ahead = CPU_AHEAD_BYTES // tensor.element_bytes
    prefetch(buffer[position([point[axis] for axis in axes], tensor.shape) + ahead], ALL_CACHES, written=written)


def prefetch(element: Any, caches: int, *, written: bool = False) -> None:
    """Write a request for the line of an element, which may lie outside its tensor; ``caches``: LLVM's locality, 3 for
    all of them; ``written``: it will be."""
    access, locality, data = (tirx.const(number, "int32") for number in (int(written), caches, 1))
    T.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", T.address_of(element), access, locality, data))
