"""Memory of a process on a board besides PyTorch's tensors: the context, handles and their workspaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daydream.capture.captured import Capture

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: Bytes of a context for every thread that can be resident. Half of it is their stacks, the default of
#: ``cudaLimitStackSize`` (CUDA C++ Programming Guide, device runtime limits); the whole is what two contexts with few
#: kernels measure, 319 MiB on a Titan V and 522 MiB on an H200 (docs/memory.md has the sources).
BYTES_PER_THREAD = 2048

#: Workspace of a cuBLAS handle, allocated by PyTorch with the first product: 2 of 4 MiB and 8 of 16 KiB, from sm_90 on
#: 8 of 4 MiB (``aten/src/ATen/cuda/CublasHandlePool.cpp``; issue 95668 and pull requests 89027 and 175344, since when
#: Blackwell has as much as Hopper).
CUBLAS_BYTES, CUBLAS_BYTES_SINCE_HOPPER = 8_519_680, 33_554_432

#: Operators that need the handle.
_PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "_addmm_activation"))


def context_bytes(device: DeviceSpec) -> int:
    """Bytes that the process takes before it holds a tensor, so that nvidia-smi shows them.

    Kernels come on top, which the driver loads when they are first launched; how much they take is not known.

    >>> from hal.catalog import load_device
    >>> [context_bytes(load_device(name)) >> 20 for name in ("t4", "v100", "a100", "h200")]
    [80, 320, 432, 528]
    """
    return BYTES_PER_THREAD * device.limits.threads_per_unit * device.unit_count


def handle_bytes(capture: Capture, device: DeviceSpec) -> int:
    """Bytes of the workspace that PyTorch's allocator keeps for cuBLAS; 0 where the step has no product."""
    if not any(operator.name in _PRODUCTS for operator in capture.operators):
        return 0
    capability = device.compute_capability
    return CUBLAS_BYTES_SINCE_HOPPER if capability is not None and capability >= (9, 0) else CUBLAS_BYTES
