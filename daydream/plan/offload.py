"""States of the optimizer, and parameters, in the host's memory: the update there, and the copies to and from it.

As ZeRO-Offload has it (Ren et al. 2021, section 4): gradients go to the host while the backward pass runs, an Adam of
vector instructions updates there what the rank keeps, and parameters come back as they are made. Ranks of a node update
at the same time, so that they share its memory's bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hal.spec.node import Host

#: Share of the processors' memory bandwidth that such an update reaches: ten billion parameters took 2.57 s on the two
#: Xeon 8168 of a DGX-2 (Ren et al. 2021, table 4), at 30 bytes each and 256 GB/s of twelve channels of DDR4-2666.
UPDATE_SHARE = 0.46

#: Share of a link to the processors that large copies from pinned memory reach: 25.2 of PCIe 4.0's 31.5 GB/s, what
#: headers of 256-byte packets and flow control leave.
COPY_SHARE = 0.8

#: Bytes of a number that optimizers compute in.
_FULL = 4


@dataclass(frozen=True, kw_only=True)
class HostUpdate:
    """An update of ranks on their host.

    Attributes:
        host: of the node.
        ranks: of the node, which update at the same time.
    """

    host: Host
    ranks: int

    def copy_seconds(self, size: float) -> float:
        """Seconds of a copy between a board and the host's memory, one way."""
        return size / (COPY_SHARE * self.host.board_bytes_per_second)

    def update_seconds(self, elements: float, states: int, gradient_bytes: float, parameter_bytes: float) -> float:
        """Seconds of the update: parameters and states are read and written in full, a gradient read, a copy written.

        Args:
            elements: that a rank keeps.
            states: of the optimizer for each: two of Adam.
            gradient_bytes: of an element.
            parameter_bytes: of an element of the copy that goes back to the board.
        """
        moved = elements * (2 * _FULL * (1 + states) + gradient_bytes + parameter_bytes)
        return self.ranks * moved / (UPDATE_SHARE * self.host.memory_bytes_per_second)
