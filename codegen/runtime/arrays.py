"""Tensors of CuPy, PyTorch and whatever else speaks DLPack, as a kernel needs them: a pointer, and what it points to.

No framework is imported unless a tensor of it is given.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hal.support.errors import InputError

#: DLPack's number for CUDA memory, and for such memory that the host may read.
_DLPACK_CUDA = (2, 13)

#: Names under which CuPy may hold elements of a dtype that NumPy does not have: as their bits.
_AS_BITS = {"bfloat16": ("bfloat16", "uint16"), "float8_e4m3fn": ("uint8", "int8"), "float8_e5m2": ("uint8", "int8")}


@dataclass(frozen=True, kw_only=True)
class DeviceTensor:
    """A tensor in GPU memory.

    Attributes:
        pointer: address of its first element on the device.
        device: number of the GPU.
        dtype: name of its element type.
        shape: extents.
        contiguous: dense and row-major.
        owner: what keeps the memory alive.
    """

    pointer: int
    device: int
    dtype: str
    shape: tuple[int, ...]
    contiguous: bool
    owner: Any


def cupy_module() -> Any:
    """CuPy.

    Raises:
        InputError: it is not installed.
    """
    try:
        return import_module("cupy")
    except ImportError as error:
        remedy = "pip install cupy-cuda13x (cupy-cuda12x for drivers before 580)"
        raise InputError("cupy", f"cannot be imported ({error})", remedy) from None


def holds(dtype: str, name: str) -> bool:
    """True if elements named ``name`` by their framework are the manifest's ``dtype``.

    >>> holds("bfloat16", "uint16"), holds("float16", "uint16")
    (True, False)
    """
    return name == dtype or name in _AS_BITS.get(dtype, ())


class CupyTensors:
    """CuPy's own arrays, on CuPy's current stream."""

    name = "CuPy"

    def describe(self, tensor: Any) -> DeviceTensor:
        flags = tensor.flags.c_contiguous
        return DeviceTensor(
            pointer=tensor.data.ptr,
            device=tensor.device.id,
            dtype=str(tensor.dtype),
            shape=tuple(tensor.shape),
            contiguous=flags,
            owner=tensor,
        )

    def empty(self, shape: Sequence[int], dtype: str, given: Sequence[Any], device: int) -> Any:
        """A new array on the current device; of a dtype that NumPy lacks as the inputs hold it, else as its bits."""
        given_dtype = next((str(array.dtype) for array in given if holds(dtype, str(array.dtype))), None)
        return cupy_module().empty(tuple(shape), given_dtype or _AS_BITS.get(dtype, (dtype,))[-1])

    def stream(self, device: int) -> AbstractContextManager[Any]:
        """Makes the stream current that the tensors' own framework works on."""
        return cupy_module().cuda.get_current_stream()

    def give(self, array: Any, like: Any) -> Any:
        """Tensor for the caller from an array of :meth:`empty`."""
        return array


@dataclass(frozen=True)
class _StreamOf:
    """A stream's handle in the CUDA stream protocol; PyTorch's own streams speak it in new versions only."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


class TorchTensors:
    """PyTorch's tensors, on PyTorch's current stream."""

    name = "PyTorch"

    def describe(self, tensor: Any) -> DeviceTensor:
        if not tensor.is_cuda:
            raise InputError("", f"is on the {tensor.device}", "move it to a GPU with .cuda()")
        dtype = str(tensor.dtype).removeprefix("torch.")
        index = tensor.device.index
        return DeviceTensor(
            pointer=tensor.data_ptr(),
            device=index,
            dtype=dtype,
            shape=tuple(tensor.shape),
            contiguous=tensor.is_contiguous(),
            owner=tensor,
        )

    def empty(self, shape: Sequence[int], dtype: str, given: Sequence[Any], device: int) -> Any:
        torch = import_module("torch")
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=given[0].device)

    def stream(self, device: int) -> AbstractContextManager[Any]:
        current = import_module("torch").cuda.current_stream(device).cuda_stream
        cuda = cupy_module().cuda
        if hasattr(cuda.Stream, "from_external"):
            return cuda.Stream.from_external(_StreamOf(current))
        return cuda.ExternalStream(current, device)  # CuPy before 14

    def give(self, array: Any, like: Any) -> Any:
        return array


class DlpackTensors(CupyTensors):
    """Tensors of any other framework: borrowed by CuPy, results lent back."""

    name = "DLPack"

    def describe(self, tensor: Any) -> DeviceTensor:
        kind = int(tensor.__dlpack_device__()[0])
        if kind not in _DLPACK_CUDA:
            where = "on the CPU" if kind == 1 else "not in the memory of an NVIDIA GPU"
            raise InputError("", f"is {where}", "move it to a GPU first")
        return super().describe(cupy_module().from_dlpack(tensor))

    def empty(self, shape: Sequence[int], dtype: str, given: Sequence[Any], device: int) -> Any:
        return cupy_module().empty(tuple(shape), _AS_BITS.get(dtype, (dtype,))[-1])

    def give(self, array: Any, like: Any) -> Any:
        """The array as the framework of ``like`` takes it over; a CuPy array where that offers no way."""
        root = import_module(type(like).__module__.partition(".")[0])
        for place in (root, getattr(root, "dlpack", None), getattr(root, "numpy", None)):
            take_over = getattr(place, "from_dlpack", None)
            if callable(take_over):
                return take_over(array)
        return array


Tensors = CupyTensors | TorchTensors


def tensors_of(tensor: Any) -> Tensors:
    """Functions for a kind of tensors, by the tensor's type alone.

    Raises:
        InputError: it is no tensor.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return TorchTensors()
    if cupy is not None and isinstance(tensor, cupy.ndarray):
        return CupyTensors()
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        return DlpackTensors()
    raise InputError("", f"is a {type(tensor).__name__}", "give a CuPy array, a PyTorch tensor or another with DLPack")
