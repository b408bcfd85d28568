"""Milliseconds of collectives as compiled graphs call them, on a node of boards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from daydream.planners.private import private
from hal.spec.parts import DTYPE_BYTES
from hal.support.errors import InputError

if TYPE_CHECKING:
    import torch

    from daydream.trace.trace import Floats
    from hal.spec.device import DeviceSpec

#: Collectives of the model by what PyTorch's operators and NCCL's calls have in their names.
KINDS: Mapping[str, str] = {
    "reduce_scatter": "reduce_scatter", "all_gather": "all_gather", "allgather": "all_gather",
    "all_reduce": "all_reduce", "allreduce": "all_reduce", "all_to_all": "alltoall", "alltoall": "alltoall",
    "broadcast": "broadcast",
}  # fmt: skip


def collective_kind(name: str) -> str | None:
    """The collective that an operator's name names, None where it is none.

    >>> collective_kind("_c10d_functional::all_gather_into_tensor_out"), collective_kind("aten::mm")
    ('all_gather', None)
    """
    return next((kind for part, kind in KINDS.items() if part in name), None)


class CollectiveTimes:
    """Times of collectives among boards.

    Args:
        device: the board.
        node: name or file of the node; None takes the board's usual one, and has no times where there is none.
        ranks: members of groups whose size PyTorch does not know, as without ``torch.distributed`` set up.

    Raises:
        InputError: there is no such node, or it holds other boards.
    """

    def __init__(self, device: DeviceSpec, node: str | None = None, ranks: int | None = None) -> None:
        from hal.node_catalog import usual_node
        from roller.library.collectives import node_for

        self.node = usual_node(device) if node is None else node_for(device, node)
        self._ranks = ranks

    @property
    def place(self) -> str:
        """Name of the node, for messages."""
        return "no name" if self.node is None else self.node.name

    def milliseconds(self, kind: str, message_bytes: Floats, ranks: int, dtype: str) -> Floats | None:
        """Times of messages as nccl-tests counts them: of an all-gather what a rank ends with, of a reduce-scatter
        what it begins with, of the others what it holds. None where the group does not fit the node.
        """
        from roller.library.collectives import collective_seconds

        if self.node is None:
            return None
        element = dtype if dtype in DTYPE_BYTES else "float32"
        try:
            times = collective_seconds(kind, np.maximum(message_bytes, 1), ranks, self.node, dtype=element)
        except InputError:
            return None
        return np.asarray(times.kernel_seconds) * 1e3

    def of_input(self, kind: str, input_bytes: float, ranks: int | None, dtype: torch.dtype) -> float | None:
        """Time of a call by the bytes that a rank gives; None where that or the group's size is unknown."""
        if ranks is None:
            return None
        return self._one(kind, input_bytes * (ranks if kind == "all_gather" else 1), ranks, dtype)

    def of_output(self, kind: str, output_bytes: float, ranks: int | None, dtype: torch.dtype) -> float | None:
        """Time of a call by the bytes that a rank gets; 0 of them give what the shortest message takes."""
        if ranks is None:
            return None
        return self._one(kind, output_bytes * (ranks if kind == "reduce_scatter" else 1), ranks, dtype)

    def group_size(self, group_name: object) -> int | None:
        """Number of ranks that take part: as ``torch.distributed`` says, else as given."""
        distributed = private("torch.distributed", "is_initialized")
        if isinstance(group_name, str) and distributed():
            try:
                return int(private("torch.distributed.distributed_c10d", "_get_group_size_by_name")(group_name))
            except (RuntimeError, KeyError, ValueError):
                return self._ranks
        return self._ranks

    def _one(self, kind: str, message_bytes: float, ranks: int, dtype: torch.dtype) -> float | None:
        times = self.milliseconds(kind, np.asarray([message_bytes]), ranks, str(dtype).removeprefix("torch."))
        return None if times is None else float(times[0])
