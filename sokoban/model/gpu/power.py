"""Clock that a board's power limit leaves to attention: seconds of a kernel from those at the clock it starts with.

The models of kernels of ours and of libraries share it, so that it needs no schedules.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]

#: Power of a step over that of as many FLOP of a large matrix product, which a board's power-limited rate is for:
#: exponentials and registers draw some too. And seconds of a kernel after which half of the fall of the clock has come.
STEP_POWER, POWER_SECONDS = 1.3, 0.02


def power_limited(
    seconds: Seconds | float, products: Seconds | float, power: float = STEP_POWER, long: float = POWER_SECONDS
) -> Seconds:
    """Seconds with the clock that the board's power limit leaves, the longer the kernel the lower.

    Args:
        seconds: of the kernel at the clock it starts with.
        products: its matrix products at the rate that the limit leaves large ones for good.
        power: see :data:`STEP_POWER`.
        long: see :data:`POWER_SECONDS`.
    """
    sustained = np.maximum(seconds, products * power)
    limited: Seconds = seconds + (sustained - seconds) * seconds / (seconds + long)
    return limited
