"""Compiled operators in a program: as functions of GPU tensors, and as operators of PyTorch."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from codegen.arrays import holds
from codegen.bundle_reader import ArgumentEntry
from codegen.launch import Operator, load
from hal.errors import InputError

#: Namespace of operators whose name has none.
NAMESPACE = "roller"

_NAME = re.compile(r"(?:([A-Za-z_]\w*)::)?([A-Za-z_]\w*)")

#: Full name -> folder and operator, of all that were registered: PyTorch keeps an operator as long as the process.
_registered: dict[str, tuple[Path, Any]] = {}


def torch_op(path: Path | str, name: str | None = None) -> Any:
    """Register a bundle as a PyTorch operator (``torch.library.custom_op``) and return it.

    ``op = roller.torch_op("out/matmul")``, then ``op(a, b)`` or ``torch.ops.roller.matmul(a, b)``. A profiler trace
    shows it under its name, ``torch.compile`` and ``torch.export`` take it as one node. It has no backward pass.

    Args:
        path: the bundle's folder.
        name: ``name`` or ``namespace::name``; the bundle's own name in the namespace ``roller`` by default. The same
            folder under the same name gives the same operator again.

    Raises:
        InputError: the folder is no bundle, PyTorch is missing, or the name is taken or no identifier. The operator
            itself raises it for tensors that the kernel does not take, those on the CPU among them.
    """
    operator = load(path)
    full_name = _full_name(operator, name)
    folder = Path(path).resolve()
    if full_name in _registered:
        known, op = _registered[full_name]
        if known != folder:
            raise InputError("name", f"{full_name} is already the operator of {known}", "give another name")
        return op
    op = _define(operator, full_name)
    _registered[full_name] = (folder, op)
    return op


def _full_name(operator: Operator, name: str | None) -> str:
    if name is None:
        name = re.sub(r"\W", "_", operator.bundle.name, flags=re.ASCII)
        name = name if name.isidentifier() else f"op_{name}"  # 3x3 as op_3x3
    match = _NAME.fullmatch(name)
    if match is None:
        raise InputError("name", f"{name!r} is no name of an operator", "write name or namespace::name")
    return f"{match[1] or NAMESPACE}::{match[2]}"


def _define(operator: Operator, full_name: str) -> Any:
    try:
        torch = import_module("torch")
    except ImportError as error:
        raise InputError("torch", f"cannot be imported ({error})", "pip install torch") from None
    parameters = ", ".join(f"Tensor {argument.name}" for argument in operator.inputs)
    schema = f"({parameters}) -> Tensor"

    def launch(*tensors: Any) -> Any:
        return operator(*tensors)

    def on_cpu(*tensors: Any) -> Any:
        raise InputError(full_name, "its tensors are on the CPU", "move them to a GPU with .cuda()")

    def shapes(*tensors: Any) -> Any:
        for argument, tensor in zip(operator.inputs, tensors, strict=True):
            _check_like(full_name, argument, tensor)
        dtype = getattr(torch, operator.output.dtype)
        return torch.empty(operator.output.shape, dtype=dtype, device=tensors[0].device)

    op = torch.library.custom_op(full_name, launch, mutates_args=(), device_types="cuda", schema=schema)
    op.register_kernel("cpu")(on_cpu)
    op.register_fake(shapes)
    return op


def _check_like(full_name: str, argument: ArgumentEntry, tensor: Any) -> None:
    """Shape and dtype, which a tensor without memory has too."""
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if shape != argument.shape:
        raise InputError(f"{full_name}.{argument.name}", f"has shape {list(shape)}", f"it takes {list(argument.shape)}")
    if not holds(argument.dtype, dtype):
        raise InputError(f"{full_name}.{argument.name}", f"is {dtype}", f"it takes {argument.dtype}")


__all__ = ["load", "torch_op"]
