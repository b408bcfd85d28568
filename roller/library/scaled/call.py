"""Scaled products as library calls: device, host, and what sets the pace."""

from __future__ import annotations

import numpy as np

from hal.spec.device import DeviceSpec
from roller.library.arrays import Floats
from roller.library.products.gemm import framework_seconds
from roller.library.scaled.products import scaled_times, trained_times
from roller.library.streaming.elementwise import LibraryTime


def scaled_call_time(variant: str, m: Floats, n: Floats, k: Floats, device: DeviceSpec) -> LibraryTime:
    """Time of layers y[m,n] = q(x)[m,k] w[n,k]; ``variant``: the precision, ``@training`` for its kernels.

    ``call_seconds`` are those of calls from Python one after the other where hosts were measured so (128x128 blocks),
    else those of PyTorch's linear layer around the kernels.

    Raises:
        InputError: the board has no matrix units for the precision.
    """
    precision, _, kernels = variant.partition("@")
    times = (trained_times if kernels else scaled_times)(precision, m, n, k, device)
    stages = {
        "quantise": times.quantise, "compute": times.product.compute, "dram": times.product.dram,
        "l2": times.product.l2,
    }  # fmt: skip
    names = [
        f"{family}_{int(columns)}x{int(rows)}"
        for family, columns, rows in zip(times.family, times.tile_n, times.tile_m, strict=True)
    ]
    seconds = times.seconds
    calls = framework_seconds(seconds, device, bias=True)
    slowest = np.argmax(np.stack(list(stages.values())), axis=0)
    return LibraryTime(
        call_seconds=np.where(times.host > 0, times.eager_seconds, calls),
        kernel_seconds=seconds,
        stages=stages,
        bound=np.array(list(stages))[slowest],
        algorithm=np.array(names, dtype=np.str_),
        kernels=np.full(seconds.shape, times.kernels),
    )
