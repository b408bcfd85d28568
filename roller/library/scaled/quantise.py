"""Time of the kernels that make narrow numbers of 16-bit activations, and their scales.

With a scale a row (vLLM's ``dynamic_per_token_scaled_fp8_quant``) a block of 256 threads reads its row twice, for the
maximum and for the numbers; conversions are tens of instructions an element, so that units are busy long before memory
is. With a scale for 16, 32 or 128 elements threads have a group each. With one for the whole tensor, a kernel finds the
maximum and another converts.
"""

from __future__ import annotations

import numpy as np

from hal.spec.device import DeviceSpec
from roller.library.arrays import Floats
from roller.library.scaled.families import QuantiseConstants
from roller.library.scaled.tiled import GAP_SECONDS, kept_share

#: Elements of a row that a block takes at once.
ROUND_ELEMENTS = 2048


def row_seconds(m: Floats, k: Floats, device: DeviceSpec, constants: QuantiseConstants, *, wide: float = 3.0) -> Floats:
    """A scale for each of ``m`` rows of ``k`` elements; ``wide`` bytes of an element are read and written."""
    rounds = np.ceil(k / ROUND_ELEMENTS)
    alone = constants.start_cycles + constants.round_cycles * rounds
    others = np.maximum(np.ceil(m / device.unit_count) - 1, 0)
    cycles = alone + others * (constants.busy_start_cycles + constants.busy_round_cycles * rounds)
    return _with_memory(cycles, m * k * wide, device, constants) + constants.start_seconds


def group_seconds(m: Floats, k: Floats, device: DeviceSpec, constants: QuantiseConstants, *, wide: float) -> Floats:
    """A scale for every group of elements of a row; ``wide`` bytes of an element are read and written."""
    elements, rows = m * k / device.unit_count, m / device.unit_count
    cycles = constants.group_start_cycles + constants.group_cycles * elements + constants.group_row_cycles * rows
    return _with_memory(cycles, m * k * wide, device, constants) + constants.group_start_seconds


def tensor_seconds(m: Floats, k: Floats, device: DeviceSpec, constants: QuantiseConstants) -> Floats:
    """A scale for the whole tensor, which its own maximum gives: two kernels that stream it."""
    largest = _with_memory(constants.group_start_cycles * np.ones_like(m), 2 * m * k, device, constants)
    return largest + constants.group_start_seconds + group_seconds(m, k, device, constants, wide=3.0)


def _with_memory(cycles: Floats, moved: Floats, device: DeviceSpec, constants: QuantiseConstants) -> Floats:
    """Seconds of a kernel, the gap before it included, whose arithmetic and traffic overlap."""
    missed = moved * (1 - kept_share(moved, device))
    memory = missed / (constants.dram_share * device.dram.bandwidth_bytes_per_second)
    return np.asarray(GAP_SECONDS + np.cbrt((cycles / device.clocks.boost_hz) ** 3 + memory**3))
