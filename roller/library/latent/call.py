"""Latent attention as library calls: device, host, and what sets the pace."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hal.spec.device import DeviceSpec
from roller.library.arrays import Floats
from roller.library.latent.families import ABSORBED, PREFILL
from roller.library.latent.model import LatentCalls, Setting, latent_times
from roller.library.streaming.elementwise import LibraryTime, host_seconds

#: Kernels of a module: four or five products, attention, norms, rotations and copies.
KERNELS = 12

#: Names of the sizes of a call.
SIZES = (
    "batch", "tokens", "context", "heads", "hidden", "query_rank", "latent", "rope", "key_dim", "value_dim",
)  # fmt: skip


def latent_call_time(variant: str, sizes: Mapping[str, Floats], device: DeviceSpec) -> LibraryTime:
    """Time of calls; ``variant`` has the precision of products, of the cache and of attention, joined by ``@``.

    Raises:
        InputError: the board has no matrix units for the precision.
    """
    precision, cache, attention = variant.split("@")
    setting = Setting(precision=precision, has_narrow_cache=cache == "fp8", is_narrow=attention == "fp8")
    times = latent_times(LatentCalls(**{name: sizes[name] for name in SIZES}), setting, device, PREFILL, ABSORBED)
    stages = {"products": times.products, "attention": times.attention, "around": times.around}
    slowest = np.argmax(np.stack(list(stages.values())), axis=0)
    host = host_seconds(device, np.ones_like(times.seconds), KERNELS)
    return LibraryTime(
        call_seconds=np.maximum(host, times.seconds),
        kernel_seconds=times.seconds,
        stages=stages,
        bound=np.array(list(stages))[slowest],
        algorithm=np.where(times.is_absorbed, "latent attention, absorbed", "latent attention"),
        kernels=np.full(times.seconds.shape, KERNELS),
    )
