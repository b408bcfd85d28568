"""Compiled operators in a program: as functions of GPU tensors or NumPy arrays, and as operators of PyTorch."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from codegen.bundle.reader import choose_kernel, read_bundle
from codegen.runtime.cpu import CpuOperator
from codegen.runtime.gpu import GpuOperator
from codegen.runtime.torch_operator import define_on_cpu, fake_of, schema_of
from hal.support.errors import InputError

#: Namespace of operators whose name has none.
NAMESPACE = "roller"

_NAME = re.compile(r"(?:([A-Za-z_]\w*)::)?([A-Za-z_]\w*)")

#: Full name -> folder and operator, of all that were registered: PyTorch keeps an operator as long as the process.
_registered: dict[str, tuple[Path, Any]] = {}


def load(path: Path | str, rank: int | None = None) -> GpuOperator | CpuOperator:
    """The operator in a bundle's folder; its kernel is the fastest measured one, or without a profile rank 1.

    An operator of a GPU's bundle takes tensors on a GPU, one of a CPU's bundle NumPy arrays.

    Raises:
        InputError: the folder is no bundle, has no kernel of this rank, or its shared object cannot be loaded.
    """
    bundle = read_bundle(path)
    if rank is not None and bundle.manifest.launch_size is not None:
        axis = bundle.manifest.launch_size.axis
        raise InputError("rank", f"is chosen at launch, by {axis}", "leave it out")
    kernel = choose_kernel(bundle, rank)
    return CpuOperator(bundle, kernel) if bundle.is_for_cpu else GpuOperator(bundle, kernel)


def torch_op(path: Path | str, name: str | None = None) -> Any:
    """Register a bundle as a PyTorch operator (``torch.library``) and return it.

    ``op = roller.torch_op("out/matmul")``, then ``op(a, b)`` or ``torch.ops.roller.matmul(a, b)``: of tensors on a GPU,
    or on the CPU where the bundle was compiled for processors. A profiler trace shows it under its name,
    ``torch.compile`` and ``torch.export`` take it as one node. It has no backward pass.

    Args:
        path: the bundle's folder.
        name: ``name`` or ``namespace::name``; the bundle's own name in the namespace ``roller`` by default. The same
            folder under the same name gives the same operator again.

    Raises:
        InputError: the folder is no bundle, PyTorch is missing, or the name is taken or no identifier. The operator
            itself raises it for tensors that the kernel does not take, those elsewhere among them.
    """
    operator = load(path)
    full_name = _full_name(operator, name)
    folder = Path(path).resolve()
    if full_name in _registered:
        registered, op = _registered[full_name]
        if registered != folder:
            raise InputError("name", f"{full_name} is already the operator of {registered}", "give another name")
        return op
    torch = _torch()
    if isinstance(operator, CpuOperator):
        op = define_on_cpu(torch, operator, full_name)
    else:
        op = _define(torch, operator, full_name)
    _registered[full_name] = (folder, op)
    return op


def _full_name(operator: GpuOperator | CpuOperator, name: str | None) -> str:
    if name is None:
        name = re.sub(r"\W", "_", operator.bundle.name, flags=re.ASCII)
        name = name if name.isidentifier() else f"op_{name}"  # 3x3 as op_3x3
    match = _NAME.fullmatch(name)
    if match is None:
        raise InputError("name", f"{name!r} is no name of an operator", "write name or namespace::name")
    return f"{match[1] or NAMESPACE}::{match[2]}"


def _torch() -> Any:
    try:
        return import_module("torch")
    except ImportError as error:
        raise InputError("torch", f"cannot be imported ({error})", "pip install torch") from None


def _define(torch: Any, operator: GpuOperator, full_name: str) -> Any:
    def launch(*tensors: Any) -> Any:
        return operator(*tensors)

    def on_cpu(*tensors: Any) -> Any:
        raise InputError(full_name, "its tensors are on the CPU", "move them to a GPU with .cuda()")

    op = torch.library.custom_op(full_name, launch, mutates_args=(), device_types="cuda", schema=schema_of(operator))
    op.register_kernel("cpu")(on_cpu)
    op.register_fake(fake_of(torch, operator, full_name))
    return op


__all__ = ["load", "torch_op"]
