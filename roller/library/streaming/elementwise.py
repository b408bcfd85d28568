"""Times of PyTorch's element-wise operators: one vectorised kernel that streams its tensors.

PyTorch 2.1 runs a contiguous element-wise operator as one ``vectorized_elementwise_kernel``: blocks of 128 threads,
four elements per thread with 16-byte loads. Such a kernel is bound by DRAM, by the L2 cache when the tensors of the
previous call are still there, by arithmetic for powers, or, below some hundred thousand elements, by the host.

A call between two GPU events takes what the host needs for it, or, when the kernel outlasts the host, the host's share
before the kernel starts plus the kernel: ``max(host, host - tail + kernel)``. Seconds, bytes and elements throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.library.arrays import Floats
from roller.library.cache import is_flushed

Direction = Literal["forward", "backward"]
Names = NDArray[np.str_]

#: Host time after the kernel launch (return to Python, the second event) in units of ``framework.call_seconds``: it
#: runs while the kernel does. What comes before, arguments, checks and allocation, delays the kernel.
TAIL = 0.42

#: Bytes of a call over the L2 capacity: repeated calls find everything in L2 below the first, nothing above the second.
#: Read and written lines share the cache, and A100 holds some twice, once for either half of its SMs.
REUSE_FULL, REUSE_NONE = 0.28, 0.90

#: Share of L2 that outlasts a stream longer than all of it, from Ada and Hopper on; before, nothing outlasts it.
#: Adds of halves on an H100 move 3.4 to 3.8e12 bytes per second at once to twice its L2, more than its DRAM can
#: (Sarathi's layers by vidur, models on one and on four boards).
OUTLASTING, OUTLASTING_CAPABILITY = 0.5, (8, 9)

#: All instructions over those of float32: half of what these kernels issue is integer arithmetic and control.
INTEGER_TOO = 2.0

#: Bytes that a thread loads of each tensor, and cycles from an instruction to the one that takes its result (Jia and
#: others, 2018 and 2019, on Volta and Turing). Divisions branch, so that a thread's elements take their turns.
THREAD_BYTES, ISSUE_CYCLES = 16, 4

#: Elements per block: 128 threads with four each.
BLOCK_ELEMENTS = 512

#: Cycles between the starts of two blocks, by the first number of the compute capability, where a board's file has but
#: an estimate, which is V100's 2.15: 16-bit additions out of L2 on an A100 and an H100 (Sarathi's layers by vidur).
BLOCK_CYCLES: Mapping[int, float] = {8: 1.75, 9: 1.2, 10: 1.2}


@dataclass(frozen=True, kw_only=True)
class LibraryTime:
    """Times of library calls; every array has the shape of the broadcast arguments.

    Attributes:
        call_seconds: GPU events right before and after one framework call, repeated on the same tensors.
        kernel_seconds: the kernels alone, as a profiler adds them up.
        stages: seconds of each part by name (``host``, ``dram``, ...); parts that overlap are not a sum.
        bound: name of the stage that decides.
        algorithm: which kernel or algorithm was assumed.
        kernels: kernels that the call launches.
    """

    call_seconds: Floats
    kernel_seconds: Floats
    stages: Mapping[str, Floats]
    bound: Names
    algorithm: Names
    kernels: NDArray[np.int64]


@dataclass(frozen=True)
class ElementwiseOperator:
    """One element-wise operator of PyTorch.

    Attributes:
        inputs: tensors read by the forward kernel; it writes one.
        host: host time of the call in units of ``framework.call_seconds``: Python modules and plain numbers that
            have to become tensors cost more than a function of tensors. Medians over the boards of the data set.
        instructions: instructions per element besides loads and stores, ``powf`` being the only one that counts.
        backward: kernels, tensors read and tensors written by all kernels of the backward pass together. The
            gradient of an addition is passed on as it is.
    """

    inputs: int
    host: float
    instructions: float
    backward: tuple[int, int, int]


#: Operators by name; ``u`` marks those of a tensor and a number (``divu`` runs as a product with the inverse).
OPERATORS: Mapping[str, ElementwiseOperator] = {
    "add": ElementwiseOperator(2, 0.90, 4, (0, 0, 0)),
    "mul": ElementwiseOperator(2, 0.90, 4, (2, 4, 2)),
    "div": ElementwiseOperator(2, 0.90, 16, (5, 8, 5)),
    "pow": ElementwiseOperator(2, 0.91, 45, (7, 12, 7)),
    "addu": ElementwiseOperator(1, 1.06, 4, (0, 0, 0)),
    "mulu": ElementwiseOperator(1, 1.06, 4, (1, 1, 1)),
    "divu": ElementwiseOperator(1, 1.06, 4, (1, 1, 1)),
    "powu": ElementwiseOperator(1, 1.00, 45, (3, 4, 3)),
    "relu": ElementwiseOperator(1, 1.09, 4, (1, 2, 1)),
    "gelu": ElementwiseOperator(1, 1.04, 25, (1, 2, 1)),
    "tanh": ElementwiseOperator(1, 0.88, 20, (1, 2, 1)),
    "sigmoid": ElementwiseOperator(1, 0.88, 20, (1, 2, 1)),
    "exp": ElementwiseOperator(1, 0.88, 12, (1, 2, 1)),
    "sqrt": ElementwiseOperator(1, 0.88, 12, (2, 3, 2)),
    "copy": ElementwiseOperator(1, 0.88, 2, (1, 1, 1)),
}


def elementwise_seconds(
    operators: str | ArrayLike,
    elements: ArrayLike,
    device: DeviceSpec,
    inputs: int | None = None,
    dtype_bytes: int = 4,
    direction: Direction = "forward",
) -> LibraryTime:
    """Time of element-wise calls on contiguous tensors.

    Args:
        operators: names out of ``OPERATORS``, one or one per call.
        elements: elements of the result.
        device: the board.
        inputs: tensors of full size that the forward kernel reads; by default those of the operator.
        dtype_bytes: bytes per element.
        direction: forward, or the kernels of the backward pass.
    """
    wanted = np.asarray(operators, dtype=np.str_)
    names, count = np.broadcast_arrays(wanted, np.asarray(elements, dtype=np.float64))
    unique, where = np.unique(names, return_inverse=True)
    unknown = [str(name) for name in unique if name not in OPERATORS]
    if unknown:
        raise InputError("operators", f"unknown element-wise operator {unknown[0]}", f"known: {', '.join(OPERATORS)}")
    table = np.array([_traits(OPERATORS[str(name)], inputs, direction) for name in unique], dtype=np.float64)
    kernels, tensors, host_units, instructions = table[where.reshape(names.shape)].transpose(-1, *range(names.ndim))
    stages = {
        "host": host_seconds(device, host_units, kernels),
        "launch": kernels * block_seconds(device, np.ceil(count / BLOCK_ELEMENTS)),
        **stream_seconds(device, tensors * count * dtype_bytes),
        "arithmetic": instruction_seconds(device, kernels * count * instructions),
        "thread": kernels * _thread_seconds(device, instructions, dtype_bytes) * (count > 0),
    }
    memory = stages["dram"] + stages["l2"]
    busy = np.maximum.reduce([memory, stages["arithmetic"], stages["launch"]])
    # Blocks that follow hide a thread's turns.
    kernel = np.hypot(busy, stages["thread"]) + kernels * kernel_seconds_floor(device) * (count > 0)
    algorithm = np.where(kernels > 0, "vectorized_elementwise_kernel", "none")
    return library_time(device, stages, kernel, kernels, algorithm)


def _thread_seconds(device: DeviceSpec, instructions: Floats, dtype_bytes: int) -> Floats:
    """Seconds of a thread whose elements take their turns."""
    elements = THREAD_BYTES / dtype_bytes
    return np.asarray(instructions * INTEGER_TOO * elements * ISSUE_CYCLES / device.clocks.boost_hz)


class _Traits(NamedTuple):
    """Kernels, tensors moved, host units, and instructions per element and kernel."""

    kernels: float
    tensors: float
    host_units: float
    instructions: float


def _traits(operator: ElementwiseOperator, inputs: int | None, direction: Direction) -> _Traits:
    """Bytes and instructions of an operator's kernels in one direction."""
    if direction == "forward":
        read = operator.inputs if inputs is None else inputs
        return _Traits(1, read + 1, operator.host, operator.instructions)
    kernels, read, written = operator.backward
    return _Traits(kernels, read + written, 1.0, operator.instructions)


def library_time(
    device: DeviceSpec, stages: Mapping[str, Floats], kernel: Floats, kernels: Floats, algorithm: ArrayLike
) -> LibraryTime:
    """Puts host and kernel together; the stage ``host`` already holds the time of an empty kernel."""
    host = stages["host"]
    lead = np.maximum(host - TAIL * device.framework_calls.call_seconds, 0.0)
    call = np.maximum(host, lead + np.maximum(kernel - kernels * kernel_seconds_floor(device), 0.0))
    device_stages = [name for name in stages if name != "host"]
    slowest = np.argmax(np.stack([np.broadcast_to(stages[name], kernel.shape) for name in device_stages]), axis=0)
    bound = np.where(host >= call, "host", np.array(device_stages)[slowest])
    shape = kernel.shape
    return LibraryTime(
        call_seconds=call,
        kernel_seconds=kernel,
        stages={name: np.broadcast_to(seconds, shape) for name, seconds in stages.items()},
        bound=bound,
        algorithm=np.broadcast_to(np.asarray(algorithm, dtype=np.str_), shape),
        kernels=np.broadcast_to(kernels, shape).astype(np.int64),
    )


def host_seconds(device: DeviceSpec, units: ArrayLike, kernels: ArrayLike = 1) -> Floats:
    """Host seconds of calls that cost ``units`` element-wise calls; every further kernel is one more launch."""
    further = np.maximum(np.asarray(kernels, dtype=np.float64) - 1, 0) * 0.25
    started = np.asarray(kernels) > 0
    return device.framework_calls.call_seconds * np.where(started, np.asarray(units, dtype=np.float64) + further, 0.0)


def kernel_seconds_floor(device: DeviceSpec) -> float:
    """An empty kernel on an idle device as a profiler sees it: its launch latency and two trips to DRAM."""
    return 1e-6 + 2 * (device.dram.latency_seconds or 400e-9)


def block_seconds(device: DeviceSpec, blocks: ArrayLike) -> Floats:
    """Seconds that the start of ``blocks`` blocks takes."""
    cycles = BLOCK_CYCLES.get((device.compute_capability or (0, 0))[0])
    is_estimate = device.provenance.get("block_launch_seconds", "").startswith("estimate")
    each = cycles / device.clocks.boost_hz if cycles and is_estimate else device.block_launch_seconds
    return np.asarray(blocks, dtype=np.float64) * each


def stream_seconds(device: DeviceSpec, moved: ArrayLike, footprint: ArrayLike | None = None) -> dict[str, Floats]:
    """Seconds of DRAM and L2 for a kernel that moves so many bytes.

    ``footprint`` are the bytes of the tensors, which repeated calls may find in L2; by default what is moved.
    """
    data = np.asarray(moved, dtype=np.float64)
    hit = reuse(device, data if footprint is None else footprint)
    l2_rate = device.l2.bandwidth_bytes_per_second if device.l2 else device.dram.bandwidth_bytes_per_second
    return {"dram": data * (1 - hit) / device.dram.bandwidth_bytes_per_second, "l2": data * hit / l2_rate}


def reuse(device: DeviceSpec, footprint: ArrayLike) -> Floats:
    """Share of a call's bytes that the previous identical call left in L2; none where it is flushed.

    >>> from hal.catalog import load_device
    >>> v100 = load_device("v100")
    >>> reuse(v100, [0.0, v100.l2.capacity_bytes]).tolist()
    [1.0, 0.0]
    """
    if device.l2 is None or is_flushed():
        return np.zeros(np.shape(footprint))
    filled = np.asarray(footprint, dtype=np.float64) / device.l2.capacity_bytes
    share = np.clip((REUSE_NONE - filled) / (REUSE_NONE - REUSE_FULL), 0.0, 1.0)
    if (device.compute_capability or (0, 0)) >= OUTLASTING_CAPABILITY:
        share = np.maximum(share, OUTLASTING / np.maximum(filled, 1.0))
    return share


def integer_seconds(device: DeviceSpec, instructions: ArrayLike) -> Floats:
    """Seconds to issue so many integer instructions of single threads, at the board's rate for them.

    Volta, Turing, Ampere, Ada and Hopper have 64 lanes per unit for them, however many they have for float32.
    """
    rate = device.peak_flops("int32" if "int32" in device.dtypes else "float32") / 2
    return np.asarray(instructions, dtype=np.float64) / rate


def instruction_seconds(device: DeviceSpec, instructions: ArrayLike) -> Floats:
    """Seconds to issue ``instructions`` of single threads, one per float32 lane and cycle at boost clock.

    Memory-bound kernels draw little power, so the boost clock holds; peak FLOP/s count two per lane and cycle. Integer
    and address arithmetic runs in parallel on Volta, Turing and the large Ampere chip, whose schedulers issue for twice
    the 64 lanes that a unit has for float32; where it has 128, on Pascal and from small Ampere on, they are all that
    schedulers issue for, and integers take their turns.
    """
    capability = device.compute_capability
    shared = capability is not None and (capability < (7, 0) or capability >= (8, 6))
    return (
        np.asarray(instructions, dtype=np.float64)
        * (INTEGER_TOO if shared else 1.0)
        / (device.peak_flops("float32") / 2)
    )
