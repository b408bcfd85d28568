"""Options of a plan as values: boards and nodes, what ranks exchange, what is captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from daydream.command.predict import chosen_devices, has_flash_attention
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.plan.layout import Layout
    from daydream.plan.units import Units
    from hal.spec.device import DeviceSpec
    from hal.spec.node import NodeSpec

#: What parameters of 16 bits are exchanged in when FSDP's mixed precision is left as torchtitan has it.
_REDUCE_BYTES = {"float32": 4, "gradient": 0}


def board_of(name: str) -> DeviceSpec:
    """The one board of a name.

    Raises:
        InputError: there is none, or several.
    """
    devices = chosen_devices(name)
    if len(devices) > 1:
        raise InputError("--device", "several boards were named", "a plan is of one kind of board")
    return devices[0]


def node_of(board: DeviceSpec, name: str | None, boards: int | None) -> NodeSpec | None:
    """The node that holds the boards, the usual one without a name; None where none is known.

    Raises:
        InputError: there is no such node, or so many boards of it cannot be used.
    """
    from hal.node_catalog import usual_node
    from roller.library.collectives import node_for

    node = usual_node(board) if name is None else node_for(board, name)
    if boards is None:
        return node
    if node is None or not 2 <= boards <= node.boards or node.link.topology != "switch":
        where = "no node is known" if node is None else f"{node.name} has {node.boards}"
        raise InputError(
            "--boards", f"got {boards}, but {where}", "write 2 to all of a node whose boards share a switch"
        )
    return replace(node, boards=boards)


def exchange_of(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a layout on gradients and copies of parameters, the same with ``--search`` and without."""
    names = (
        "shard", "overlap", "master", "narrow", "context", "expert", "dispatch", "imbalance", "overlap_experts",
        "overlap_batches", "offload", "overlap_tensor", "waits", "blocking",
    )  # fmt: skip
    exchange = {name: options[name] for name in names} | {"exchange_context": options["context_exchange"]}
    if options["bucket_mb"] is not None:
        exchange["bucket_bytes"] = options["bucket_mb"] * 2**20
    return exchange | {"reduce_bytes": _REDUCE_BYTES[options["reduce_dtype"]]}


def units_for(model: str, board: DeviceSpec, layout: Layout, options: dict[str, Any], **changed: Any) -> Units:
    """The step of a rank, captured."""
    from daydream.capture.options import CaptureOptions
    from daydream.plan.source import planned_units

    names = (
        "batch", "sequence", "image", "class_name", "mode", "dtype", "optimizer", "attention", "checkpoint", "tf32",
        "assume", "precision", "lora", "expert_kernels", "packed", "cached", "clip",
    )  # fmt: skip
    capture = CaptureOptions(
        **({name: options[name] for name in names} | {"sequence": tokens_of(options)} | changed),
        implementation=options["optimizer_kernels"],
        flash=has_flash_attention(board),
        parameters="" if options["param_dtype"] == "float32" else options["param_dtype"],
    )
    return planned_units(
        model,
        capture,
        tensor=layout.tensor,
        sequence_parallel=layout.sequence,
        in_place=layout.overlap_tensor,
        compiles=options["compiles"],
    )


def tokens_of(options: dict[str, Any]) -> int | None:
    """Tokens of a sample that a rank works on."""
    sequence, ranks = options["sequence"], options["context"]
    if ranks == 1:
        return sequence
    if options["packed"]:
        raise InputError("--packed", "is of samples that no ranks share", "leave --context out")
    if sequence is None:
        raise InputError("--context", "needs the tokens of a sample", "add --sequence")
    if sequence % (2 * ranks):
        problem = f"{sequence} tokens have no {2 * ranks} equal pieces, two a rank"
        raise InputError("--context", problem, "choose --sequence so")
    return sequence // ranks


def calls_of(options: Mapping[str, Any]) -> tuple[Any, float, str]:
    """Kernels that run, and the host that launches them."""
    return options["implementation"], options["host_factor"], options["host"]
