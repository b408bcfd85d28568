"""dPRO's theorems 2 and 3 (section 5.1): when fusing two tensors is sure to help.

Notation is table 1's: p is computation, q the exchange of its gradient; d is a duration, e an end. ``took_us`` at [i,
j] is what the exchange of gradients i to j takes as one tensor. The theorems are about T_n, the time until p_n and q_n
are done, on a critical path. What their proofs need besides is checked; where it does not hold, the answer is None or
nothing is pruned.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from daydream.trace.trace import Floats, Ints

#: Microseconds by which times of equal exchanges differ that were worked out from different sizes.
ROUNDED_US = 1e-9


def tensor_fusion_pays(
    exchanged: Floats | float, ready: Floats | float, fused_us: Floats | float, alone_us: Floats | float
) -> NDArray[np.bool_]:
    """Theorem 2: whether exchanging q_(n-1) and q_n as one tensor makes T_n smaller (algorithm 1, line 18).

    It pays if q^e_(n-1) > p^e_n + t_sync(q_(n-1) + q_n) - t_sync(q_n). The theorem as printed has p^e_(n-1) and
    t_sync(q_(n-1)); algorithm 1 has the form that its proof needs, which is this one. Premises: an exchange of both
    takes no longer than one after the other (:func:`subadditive`), and calls of all-reduces take no time or the fused
    tensor saves one. That it does *not* pay otherwise holds only where calls take none, since a call less may be worth
    more, and where more bytes take no less.

    Args:
        exchanged: q^e_(n-1), when the exchange of the tensor in front ends.
        ready: p^e_n, when the later tensor is ready.
        fused_us: what the exchange of both as one takes.
        alone_us: what that of the later one takes.
    """
    return np.asarray(exchanged > ready + (np.asarray(fused_us) - alone_us))


def subadditive(took_us: Floats, first: Ints | int, middle: Ints | int, last: Ints | int) -> NDArray[np.bool_]:
    """Whether gradients first to last take no longer as one tensor than as two, cut behind middle.

    Rings do: what is added is a latency. A library that changes its algorithm with the size may not.
    """
    middle = np.asarray(middle)
    return np.asarray(took_us[first, last] <= took_us[first, middle] + took_us[middle + 1, last] + ROUNDED_US)


def cuts(took_us: Floats, ready: Floats, producer: Ints, hook: Ints, call_us: Floats) -> NDArray[np.bool_]:
    """Theorem 3: behind which gradients a bucket may have to end; behind the others a bucket further is no worse.

    Gradients of one operator are two tensors of a fused one, so that they belong together (Coarsened View, section
    5.3). The theorem is about these two alone. In buckets with others it needs more, which is checked: both are ready
    at the same time and handed over by the same task, or calls take no time; and the later one adds no more to any
    bucket that ends with the earlier one than it takes off any bucket that begins with it. Both are the same for
    a cost that is a latency and bytes over a bandwidth. Where the library changes its algorithm with the size they may
    not be, and the cut stays.
    """
    count = len(ready)
    open_ = np.ones(count, np.bool_)
    for place in range(count - 1):
        later = place + 1
        if hook[place] == hook[later] and producer[place] == producer[later]:
            together = True
        else:
            together = not call_us[place] and not call_us[later] and ready[place] == ready[later]
        if together:
            added = (took_us[:later, later] - took_us[:later, place]).max()
            beyond = took_us[later, later + 1 :] - took_us[later + 1 : later + 2, later + 1 :]
            # A bucket of the later one alone goes into the one in front of it as a whole.
            off = beyond.min(initial=took_us[later, later])
            open_[place] = max(added, 0.0) > off + ROUNDED_US
    return open_
