"""Registration of an operator with PyTorch: its schema, its result without running, and its kernel on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from codegen.bundle.records import Argument
from codegen.runtime.arrays import holds
from codegen.runtime.cpu import CpuOperator
from codegen.runtime.operator import BundleOperator, mismatch
from hal.support.errors import InputError

#: PyTorch forgets what a library defined when the library is gone.
_libraries: list[Any] = []


def schema_of(operator: BundleOperator) -> str:
    """``(Tensor A, Tensor B) -> Tensor``."""
    parameters = ", ".join(f"Tensor {argument.name}" for argument in operator.inputs)
    return f"({parameters}) -> Tensor"


def fake_of(torch: Any, operator: BundleOperator, full_name: str) -> Callable[..., Any]:
    """A function of tensors without memory: the output's shape and dtype, or an InputError."""

    def shapes(*tensors: Any) -> Any:
        size = operator.size_of([tuple(tensor.shape) for tensor in tensors])
        for argument, tensor in zip(operator.inputs, tensors, strict=True):
            _check_like(full_name, argument.at(size), tensor)
        dtype = getattr(torch, operator.output.dtype)
        return torch.empty(operator.output.at(size).shape, dtype=dtype, device=tensors[0].device)

    return shapes


def define_on_cpu(torch: Any, operator: CpuOperator, full_name: str) -> Any:
    """Register an operator of CPU tensors, which are not copied, and return it.

    Defined by hand, since calling a ``custom_op`` takes longer than small kernels do.
    """
    namespace, _, name = full_name.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)
    library.define(f"{name}{schema_of(operator)}")
    library.impl(name, _kernel(torch, operator, full_name), "CPU")
    library.impl(name, _elsewhere(full_name), "CUDA")
    torch.library.register_fake(full_name, fake_of(torch, operator, full_name), lib=library)
    return getattr(getattr(torch.ops, namespace), name).default


def _kernel(torch: Any, operator: CpuOperator, full_name: str) -> Callable[..., Any]:
    expected = [(argument.shape, getattr(torch, argument.dtype)) for argument in operator.inputs]
    # Its memory is never touched. A tensor like another is made sooner than one of a shape and a dtype.
    like = torch.empty(operator.output.shape, dtype=getattr(torch, operator.output.dtype))
    run, empty_like = operator.run, torch.empty_like

    def launch(*tensors: Any) -> Any:
        addresses = []
        for tensor, (wanted_shape, wanted_dtype) in zip(tensors, expected, strict=True):
            if tensor.shape != wanted_shape or tensor.dtype is not wanted_dtype or not tensor.is_contiguous():
                _refuse(full_name, operator, tensors)
            addresses.append(tensor.data_ptr())
        output = empty_like(like)
        run(*addresses, output.data_ptr())
        return output

    return launch


def _refuse(full_name: str, operator: CpuOperator, tensors: tuple[Any, ...]) -> None:
    """Raises what is wrong with the first tensor that the kernel does not take."""
    for argument, tensor in zip(operator.inputs, tensors, strict=True):
        _check_like(full_name, argument, tensor)
        if not tensor.is_contiguous():
            raise mismatch(full_name, argument, argument.shape, argument.dtype, fits_dtype=True)


def _elsewhere(full_name: str) -> Callable[..., Any]:
    def refuse(*tensors: Any) -> Any:
        raise InputError(full_name, "its tensors are on a GPU", "move them to the CPU with .cpu()")

    return refuse


def _check_like(full_name: str, argument: Argument, tensor: Any) -> None:
    """Shape and dtype, which a tensor without memory has too."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    fits_dtype = holds(argument.dtype, dtype)
    if shape != argument.shape or not fits_dtype:
        raise mismatch(full_name, argument, shape, dtype, fits_dtype=fits_dtype)
