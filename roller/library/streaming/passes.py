"""DRAM and L2 seconds of kernels that read a row more than once while blocks of other rows run."""

from __future__ import annotations

import numpy as np

from hal.spec.device import DeviceSpec
from roller.library.streaming.elementwise import Floats, reuse

#: Bytes that the resident rows read and write over the capacity of L2: second reads all hit up to the first and all
#: miss from the second on.
RESIDENT_FULL, RESIDENT_NONE = 1.05, 2.25

#: Bytes that the resident rows of one SM read over the capacity of its L1: second reads all hit up to the first and all
#: miss from the second on. From Volta on; before, L1 keeps no loads.
L1_FULL, L1_NONE = 0.8, 1.8

#: Bytes of L1 over the most that shared memory may take, by compute capability where that is not about one: Turing
#: divides 96 KiB in two ways, and 64 of shared memory leave 32 (CUDA programming guide).
L1_SHARE = {(7, 5): 0.5}


def passes_seconds(
    device: DeviceSpec, moved: Floats, again: Floats, resident: Floats, row_bytes: Floats
) -> dict[str, Floats]:
    """DRAM and L2 seconds of kernels that move ``moved`` bytes once and read ``again`` bytes another time."""
    l2 = device.l2
    cached = reuse(device, moved)
    cached_share = np.zeros_like(moved)
    if l2 is not None:
        cached_share = _ramp(
            2 * resident * device.unit_count * row_bytes / l2.capacity_bytes, RESIDENT_FULL, RESIDENT_NONE
        )
    capability = device.compute_capability
    if capability is not None and capability >= (7, 0):
        l1_bytes = device.shared.capacity_bytes * L1_SHARE.get(capability, 1.0)
        cached_share = np.maximum(cached_share, _ramp(resident * row_bytes / l1_bytes, L1_FULL, L1_NONE))
    hits = np.maximum(cached_share, cached)
    rate = device.dram.bandwidth_bytes_per_second
    l2_rate = l2.bandwidth_bytes_per_second if l2 is not None else rate
    return {
        "dram": (moved * (1 - cached) + again * (1 - hits)) / rate,
        "l2": (moved * cached + again * hits) / l2_rate,
    }


def _ramp(filled: Floats, full: float, none: float) -> Floats:
    return np.clip((none - filled) / (none - full), 0.0, 1.0)
