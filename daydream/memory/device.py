"""What a process takes of a board's memory besides PyTorch's tensors: the context, handles and their workspaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from daydream.capture.captured import Capture

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: Local memory that a CUDA context keeps for every thread that can be resident: the default of
#: ``cudaLimitStackSize`` (CUDA C++ Programming Guide, device runtime limits).
STACK_BYTES = 1024

#: The driver, and the kernels that PyTorch loads when they are first launched. An estimate: contexts of 2022 to 2025
#: measure some 100 MiB on a T4, 300 on a V100, 400 on an A100 and 500 on an H100, of which the stacks explain 40, 160,
#: 216 and 264.
DRIVER_BYTES = 150 << 20

#: Workspace of a cuBLAS handle, allocated by PyTorch with the first product: 2 of 4 MiB and 8 of 16 KiB, from sm_90 on
#: 8 of 4 MiB (``aten/src/ATen/cuda/CublasHandlePool.cpp``).
CUBLAS_BYTES, CUBLAS_BYTES_SINCE_HOPPER = 8_519_680, 33_554_432

#: Operators that need the handle.
_PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "_addmm_activation"))


def context_bytes(device: DeviceSpec) -> int:
    """Bytes that the process takes before it holds a tensor, so that nvidia-smi shows them.

    >>> from hal.catalog import load_device
    >>> [context_bytes(load_device(name)) >> 20 for name in ("t4", "v100", "a100", "h100")]
    [190, 310, 366, 414]
    """
    return DRIVER_BYTES + STACK_BYTES * device.limits.threads_per_unit * device.unit_count


def handle_bytes(capture: Capture, device: DeviceSpec) -> int:
    """Bytes of the workspace that PyTorch's allocator keeps for cuBLAS; 0 where the step has no product."""
    if not any(operator.name in _PRODUCTS for operator in capture.operators):
        return 0
    capability = device.compute_capability
    return CUBLAS_BYTES_SINCE_HOPPER if capability is not None and capability >= (9, 0) else CUBLAS_BYTES
