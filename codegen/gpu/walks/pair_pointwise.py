"""What a pair of products does with single elements, and where they lie, as text that CUDA and OpenCL C share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from codegen.gpu.matrix.final_text import NEAR_WRITTEN, POINTERS, WRITTEN, value_text
from codegen.tir.lowered import identifier
from sokoban.kernel.pair import ProductPair
from sokoban.language.expression import AffineIndex, Load, Value

#: The variable that holds what was summed.
SUM = "sum"


def batch_names(kernel: ProductPair) -> dict[str, str]:
    """The variables with a problem's place along every axis that problems lie along."""
    return {axis: f"batch_{number}" for number, axis in enumerate(kernel.batch)}


def batch_places(kernel: ProductPair) -> str:
    """The declaration of those variables; empty where there is one problem alone."""
    below, items = 1, []
    for axis, name in reversed(batch_names(kernel).items()):
        size = kernel.sizes_by_axis[axis]
        items.append(f"{name} = problem / {below} % {size}")
        below *= size
    return f"  const int {', '.join(items)};" if items else ""


def problem_start(kernel: ProductPair, load: Load, long: str) -> str:
    """Elements in front of a problem's part of a tensor; ``long`` casts to what counts them."""
    terms = [
        f"({long}){name} * {stride}"
        for axis, name in batch_names(kernel).items()
        if (stride := kernel.stride(load, axis))
    ]
    return " + ".join(terms) or "0"


def output_load(kernel: ProductPair) -> Load:
    """The output as a load of every element that it is made of."""
    return Load(kernel.output.name, tuple(AffineIndex.axis(axis) for axis in kernel.final.axes))


def inner_text(kernel: ProductPair, fetched: Mapping[str, str] | None = None, *, is_rounded: bool = False) -> str:
    """An element of H at ``row`` and ``column`` as the second product takes it.

    ``fetched`` are the variables with what is known already, by tensor; ``is_rounded`` tells that elements of H and of
    the result are rounded to 16 bits.
    """
    return _text(kernel, kernel.inner, kernel.middle, {kernel.summed: SUM, **(fetched or {})}, is_rounded)


def final_text(kernel: ProductPair, *, is_rounded: bool = False) -> str:
    """An element of the result at ``row`` and ``column``; see :func:`inner_text`."""
    return _text(kernel, kernel.final.value, kernel.width, {kernel.result: SUM}, is_rounded)


def _text(kernel: ProductPair, value: Value, columns: str, results: Mapping[str, str], is_rounded: bool = False) -> str:
    axes = {**batch_names(kernel), kernel.row: "row", columns: "column"}
    composed = NEAR_WRITTEN if is_rounded else WRITTEN
    return value_text(value, kernel.expr.tensor_by_name, axes, results, composed)


def column_loads(kernel: ProductPair) -> Iterator[tuple[str, str]]:
    """Tensors that H's elements need the same element of in all rows, and the text that reads it at ``column``."""
    names = [load.tensor for load in kernel.inner_loads]
    for load in kernel.inner_loads:
        axes = {axis for index in load.indices for axis in index.axes}
        if names.count(load.tensor) == 1 and kernel.middle in axes and kernel.row not in axes:
            yield load.tensor, _text(kernel, load, kernel.middle, {})


def parameters(kernel: ProductPair) -> list[tuple[str, str]]:
    """Types of elements and names of the kernel's tensors, the output last."""
    inputs = [(f"const {POINTERS[tensor.dtype]}", identifier(tensor.name)) for tensor in kernel.inputs]
    return [*inputs, (POINTERS[kernel.dtype], identifier(kernel.output.name))]
