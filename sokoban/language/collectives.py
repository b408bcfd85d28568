"""Collectives as JSON data: what several boards do together, which is no tensor expression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from hal.spec.parts import Dtype
from hal.support.errors import InputError

#: Names of collectives.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "send")

#: Whose kernels: NCCL's, or vLLM's all-reduce within a node.
COLLECTIVE_KERNELS = ("nccl", "vllm")


class Collective(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """One collective.

    Attributes:
        op: one of :data:`COLLECTIVES`.
        bytes: as nccl-tests counts: of an all-gather what a rank ends with, of a reduce-scatter what it begins with,
            of the others what it holds.
        ranks: how many take part; a send is between two.
        dtype: element type.
        kernels: whose, one of :data:`COLLECTIVE_KERNELS`.
        node: name or file of the node; None takes the board's usual one.
        name: a name of its own.
    """

    op: str
    bytes: int
    ranks: int = 2
    dtype: Dtype = "bfloat16"
    kernels: str = "nccl"
    node: str | None = None
    name: str | None = None

    @property
    def stem(self) -> str:
        """The name that it has without one of its own.

        >>> Collective(op="all_reduce", bytes=1024, ranks=8).stem
        'all_reduce_1024_8ranks'
        """
        kernels = "" if self.kernels == "nccl" else f"_{self.kernels}"
        dtype = "" if self.dtype == "bfloat16" else f"_{self.dtype}"
        return f"{self.op}_{self.bytes}_{self.ranks}ranks{dtype}{kernels}"


def is_collective(data: object) -> bool:
    """True if an operator's JSON value is a collective's, right or wrong."""
    return isinstance(data, Mapping) and isinstance(data.get("op"), str) and data["op"] in COLLECTIVES


def collective_from_data(data: Mapping[str, Any]) -> Collective:
    """The collective of a JSON object of which :func:`is_collective` is true.

    Raises:
        InputError: a key is missing, unknown or out of range.
    """
    if "ranks" not in data and data["op"] != "send":
        raise InputError("ranks", "is missing", "write how many boards take part")
    try:
        collective = msgspec.convert(dict(data), Collective)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        field = path.removesuffix("`")
        keys = ", ".join(get_args(Dtype) if field == "dtype" else Collective.__struct_fields__)
        remedy = f"use one of {keys}" if field == "dtype" else f"the keys of a collective are {keys}"
        raise InputError(field, problem.replace("`", ""), remedy) from None
    if collective.bytes < 1:
        raise InputError("bytes", f"got {collective.bytes}, expected 1 or more", "write the size of a message")
    if collective.ranks < 2:
        raise InputError(
            "ranks", f"got {collective.ranks}, expected 2 or more", "one rank has no other to exchange with"
        )
    if collective.op == "send" and collective.ranks != 2:
        raise InputError("ranks", f"got {collective.ranks}, but a send is between 2", "leave ranks out")
    if collective.kernels not in COLLECTIVE_KERNELS:
        raise InputError("kernels", f"there are none of {collective.kernels!r}", "use one of nccl and vllm")
    if collective.kernels == "vllm" and collective.op != "all_reduce":
        raise InputError("kernels", f"vllm has none for {collective.op}", "use nccl, or an all_reduce")
    return collective
