"""Library kernels that stream their tensors: pooling, reductions, transpositions, and whatever no other model knows.

PyTorch runs them as one kernel of its own. The time is that of moving the tensors once, by the conventions of
:mod:`roller.library.elementwise`, or of issuing the instructions, whichever is longer; a *roofline* call, of which no
kernel is known, is arithmetic at the sustained rate of its type against the same traffic.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from hal.spec.device import DeviceSpec
from roller.library.elementwise import (
    BLOCK_ELEMENTS,
    LibraryTime,
    block_seconds,
    host_seconds,
    instruction_seconds,
    kernel_seconds_floor,
    library_time,
    stream_seconds,
)

#: Host time of a call in units of ``framework.call_seconds``: about that of a module such as relu.
HOST = 1.1

#: Instructions per point: a load, an operation, and its share of the addresses.
POINT_INSTRUCTIONS = 3.0


def streamed_seconds(
    moved: ArrayLike,
    outputs: ArrayLike,
    points: ArrayLike,
    device: DeviceSpec,
    algorithm: str,
    *,
    dtype: str = "float32",
    roofline: bool = False,
) -> LibraryTime:
    """Time of calls that stream.

    Args:
        moved: bytes read and written, every tensor once.
        outputs: elements of the result; they set the number of blocks.
        points: evaluations of what is reduced; for a roofline call arithmetic operations (a multiply-add is two).
        device: the board.
        algorithm: name of the kernel.
        dtype: type of the arithmetic, for a roofline call.
        roofline: whether no kernel is known.

    Raises:
        InputError: the board has no arithmetic rate for ``dtype``.
    """
    traffic, results, work = (
        np.atleast_1d(array)
        for array in np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in (moved, outputs, points)))
    )
    ones = np.ones(traffic.shape)
    if roofline:
        rate = device.sustained_flops(dtype if dtype in device.dtypes else "float32")
        arithmetic = work / rate
    else:
        arithmetic = instruction_seconds(device, work * POINT_INSTRUCTIONS)
    stages = {
        "host": host_seconds(device, HOST * ones),
        "launch": block_seconds(device, np.ceil(results / BLOCK_ELEMENTS)),
        **stream_seconds(device, traffic),
        "arithmetic": arithmetic,
    }
    busy = np.maximum.reduce([stages["dram"] + stages["l2"], stages["arithmetic"], stages["launch"]])
    return library_time(device, stages, busy + kernel_seconds_floor(device), ones, algorithm)
