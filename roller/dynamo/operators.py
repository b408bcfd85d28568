"""Kernels of regions as operators of PyTorch: on the processor, on the current stream of a GPU, or emulated.

An operator takes the tensors of its region whatever their shapes are called, since a kernel reads elements in their
order, and gives a dense one of the region's own shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from codegen.bundle.records import Bundle
from codegen.runtime.cpu import CpuOperator
from codegen.runtime.gpu import GpuOperator
from roller.dynamo.orders import LAST

#: Namespace of the operators; PyTorch keeps them as long as the process.
NAMESPACE = "roller_regions"


@dataclass(frozen=True)
class RegionOperator:
    """Arguments of :func:`region_operator`, by which another process defines the operator.

    Attributes:
        kernel: name of the bundle's folder.
        shape: of the result.
        memory_format: order of the result's elements.
        formats: orders in which it reads the elements of its inputs.
    """

    kernel: str
    shape: tuple[int, ...]
    memory_format: Any
    formats: tuple[Any, ...]


#: Full name -> operator, of all that were defined.
_defined: dict[str, Any] = {}
#: Operator -> what it was defined as.
_definitions: dict[Any, RegionOperator] = {}
_writers: dict[Any, Callable[..., Any]] = {}
#: PyTorch forgets what a library defined when the library is gone.
_libraries: list[Any] = []

#: A kernel as a function of dense tensors.
Launch = Callable[..., torch.Tensor]


def region_operator(
    bundle: Bundle, shape: Sequence[int], memory_format: Any, formats: Sequence[Any], *, emulated: bool = False
) -> Any:
    """The operator of a bundle whose result has a shape; the same one again where it is defined already.

    Args:
        bundle: of one kernel or more.
        shape: of the result.
        memory_format: order of the result's elements.
        formats: orders in which it reads the elements of its inputs.
        emulated: whether its CUDA kernels are run on the processor, thread by thread.

    Raises:
        InputError: its kernel cannot be loaded on this machine.
    """
    orders = "".join("l" if each is LAST else "f" for each in (*formats, memory_format))
    words = [bundle.name.replace(".", "_").replace("-", "_"), *map(str, shape), orders, *["emulated"] * emulated]
    name = "_".join(words)
    if name not in _defined:
        _defined[name] = _define(name, bundle, _Result(tuple(shape), memory_format), formats, emulated)
        _definitions[_defined[name]] = RegionOperator(
            bundle.directory.name, tuple(shape), memory_format, tuple(formats)
        )
    return _defined[name]


def definition_of(op: Any) -> RegionOperator | None:
    """The definition of an operator; None where it is none of ours."""
    return _definitions.get(op)


def writer_of(op: Any) -> Callable[..., Any]:
    """The function that compiled graphs call for an operator on a processor: of tensors that lie in its formats, and
    ``out``, which it writes to and returns."""
    return _writers[op]


@dataclass(frozen=True)
class _Result:
    """Shape of an operator's result, and the order of its elements."""

    shape: tuple[int, ...]
    memory_format: Any

    def empty(self, dtype: Any, device: Any) -> Any:
        """A tensor to write to."""
        return torch.empty(self.shape, dtype=dtype, device=device, memory_format=self.memory_format)


def _define(name: str, bundle: Bundle, result: _Result, formats: Sequence[Any], emulated: bool) -> Any:
    dtype = getattr(torch, bundle.output.dtype)
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _libraries.append(library)
    parameters = ", ".join(f"Tensor {argument.name}" for argument in bundle.inputs)
    # Inductor may change the layout of what an operator reads unless it says that it minds.
    tags = (torch.Tag.flexible_layout if bundle.is_for_cpu else torch.Tag.needs_contiguous_strides,)
    library.define(f"{name}({parameters}) -> Tensor", tags=tags)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if bundle.is_for_cpu:
        write = _on_processor(CpuOperator.load(bundle.directory))

        def arranged(*tensors: Any) -> Any:
            # What lies in the right order already is not copied.
            pairs = zip(tensors, formats, strict=True)
            dense = [tensor.contiguous(memory_format=memory_format) for tensor, memory_format in pairs]
            return write(*dense, out=result.empty(dtype, "cpu"))

        library.impl(name, arranged, "CPU")
        _writers[op] = write
        _lower_in_inductor(op, f"{NAMESPACE}_{name}", write, result, formats, dtype)
    elif emulated:
        library.impl(name, _in_emulator(bundle, result.shape, dtype), "CPU")
    else:
        library.impl(name, _on_gpu(bundle, result.shape), "CUDA")

    def fake(*tensors: Any) -> Any:
        return result.empty(dtype, tensors[0].device)

    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return op


def _on_processor(operator: CpuOperator) -> Launch:
    """A function of tensors in the orders that the kernel reads, which writes its result into ``out``."""
    # PyTorch's own operators run on OpenMP's threads: those of ours would wait for theirs.
    operator.use_openmp()
    run = operator.run

    def write(*tensors: Any, out: Any) -> Any:
        run(*[tensor.data_ptr() for tensor in tensors], out.data_ptr())
        return out

    return write


def _lower_in_inductor(op: Any, name: str, write: Launch, result: _Result, formats: Sequence[Any], dtype: Any) -> None:
    """Let Inductor call a kernel by its function, in memory that is planned, rather than by PyTorch's dispatcher."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.select_algorithm import ExternKernelChoice

    kernel = ExternKernelChoice(write, name=name, op_overload=op)
    strides = result.empty(dtype, "meta").stride()

    @register_lowering(op, type_promotion_kind=None)
    def lowered(*operands: Any) -> Any:
        inputs = [
            ir.ExternKernel.require_exact_strides(ir.ExternKernel.realize_input(operand), _strides(operand, order))
            for operand, order in zip(operands, formats, strict=True)
        ]
        layout = ir.FixedLayout(torch.device("cpu"), dtype, list(result.shape), list(strides))
        return ir.TensorBox.create(
            ir.ExternKernelOut(layout=layout, inputs=inputs, python_kernel_name=kernel.call_name(), op_overload=op)
        )


def _strides(operand: Any, memory_format: Any) -> tuple[int, ...]:
    """Strides of an operand of Inductor's in an order."""
    shape = [int(extent) for extent in operand.get_size()]
    return torch.empty(shape, device="meta", memory_format=memory_format).stride()


def _on_gpu(bundle: Bundle, shape: tuple[int, ...]) -> Launch:
    # Loaded with the first call: a graph may be compiled where no GPU is.
    operators: list[GpuOperator] = []
    inputs = [argument.shape for argument in bundle.inputs]

    def launch(*tensors: Any) -> Any:
        if not operators:
            operators.append(GpuOperator.load(bundle.directory))
        shaped = [tensor.contiguous().view(wanted) for tensor, wanted in zip(tensors, inputs, strict=True)]
        return operators[0](*shaped).view(shape)

    return launch


def _in_emulator(bundle: Bundle, shape: tuple[int, ...], dtype: Any) -> Launch:
    from codegen.verify.emulated_bundle import emulate

    def launch(*tensors: Any) -> Any:
        arrays = [
            tensor.float().contiguous().numpy().reshape(argument.shape)
            for tensor, argument in zip(tensors, bundle.inputs, strict=True)
        ]
        return torch.from_numpy(np.asarray(emulate(bundle, arrays), np.float32)).to(dtype).reshape(shape)

    return launch
