"""``daydream plan``: the step of a model that many boards share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from daydream.capture.options import DTYPES
from daydream.command.engines import ENGINE_OPTIONS, answers
from daydream.command.outputs import print_json, with_options
from daydream.command.predict import STEP_OPTIONS, chosen_devices, has_flash_attention
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.plan.layout import Layout
    from daydream.plan.planned import PlannedStep
    from daydream.plan.search import Candidate, FittingPlan
    from daydream.plan.units import Units
    from hal.spec.device import DeviceSpec
    from hal.spec.node import NodeSpec

#: Boards of the largest job that is planned.
MOST_RANKS = 1 << 20

#: What parameters of 16 bits are exchanged in when FSDP's mixed precision is left as torchtitan has it.
_REDUCE_BYTES = {"float32": 4, "gradient": 0}


_COUNT = click.IntRange(1, MOST_RANKS)


@click.command("plan")
@with_options(
    click.option("--device", required=True, metavar="NAME", help="The board."),
    click.option("--node", default=None, metavar="NAME|FILE", help="What holds the boards; else the usual one."),
    click.option("--boards", type=_COUNT, default=None, help="Of a node that the job uses; all of them if not given."),
    click.option("--nodes", type=_COUNT, default=None, help="How many of them; --data follows."),
    click.option("--data", type=_COUNT, default=None, help="Copies of the model, or ranks that share it by FSDP."),
    click.option("--context", type=_COUNT, default=1, show_default=True, help="Ranks that share a sample's tokens."),
    click.option(
        "--context-exchange",
        type=click.Choice(["ring", "all-gather", "ulysses"]),
        default="ring",
        show_default=True,
        help="How they get at each other's keys and values.",
    ),
    click.option("--expert", type=_COUNT, default=1, show_default=True, help="Of these ranks, that share experts."),
    click.option(
        "--dispatch",
        type=click.Choice(["nccl", "deepep"]),
        default="nccl",
        show_default=True,
        help="Whose kernels carry tokens to experts.",
    ),
    click.option(
        "--imbalance", type=click.FloatRange(1, 1e6), default=1.0, help="Tokens of the busiest rank over the mean."
    ),
    click.option(
        "--overlap-experts/--no-overlap-experts", default=False, help="Carry tokens beside shared experts' products."
    ),
    click.option(
        "--offload",
        type=click.Choice(["none", "optimizer", "parameters"]),
        default="none",
        show_default=True,
        help="What the host's memory holds and its processors update.",
    ),
    click.option("--tensor", type=_COUNT, default=1, show_default=True, help="Ranks that share every layer."),
    click.option("--pipeline", type=_COUNT, default=1, show_default=True, help="Stages."),
    click.option(
        "--schedule",
        type=click.Choice(["1f1b", "interleaved", "gpipe"]),
        default="1f1b",
        show_default=True,
        help="Order of micro-batches on a stage.",
    ),
    click.option("--chunks", type=_COUNT, default=None, help="Of the model on a stage (interleaved; default 2)."),
    click.option(
        "--shard",
        type=click.Choice(["none", "zero1", "zero2", "fsdp"]),
        default="none",
        show_default=True,
        help="What ranks of --data share.",
    ),
    click.option("--batch", type=_COUNT, default=1, show_default=True, help="Samples of a micro-batch."),
    click.option("--micro-batches", type=_COUNT, default=None, help="Of every copy of the model in a step."),
    click.option("--global-batch", type=_COUNT, default=None, help="Samples of a step on all boards."),
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        default="bfloat16",
        show_default=True,
        help="That the step computes in; parameters of 16 bits are kept in float32, too.",
    ),
    click.option("--master/--no-master", default=True, help="Keep parameters of 16 bits in float32, too."),
    click.option(
        "--reduce-dtype",
        type=click.Choice(["float32", "gradient"]),
        default="gradient",
        show_default=True,
        help="What gradients are exchanged in.",
    ),
    click.option(
        "--bucket-mb", type=click.FloatRange(0.001, 1e6), default=None, help="DDP buckets, MiB; else as large as DDP's."
    ),
    click.option(
        "--stages", default="equal", metavar="equal|cost|N,N,...", help="Blocks of stages, or of their chunks in turn."
    ),
    click.option("--waits/--no-waits", default=False, help="Hosts wait for every message, as Megatron's do."),
    click.option(
        "--blocking-sends/--no-blocking-sends", "blocking", default=False, help="A stage's kernels wait for its sends."
    ),
    click.option("--host", default="", metavar="NAME", help="Processor that launches; the board's usual one if none."),
    click.option(
        "--host-factor", type=click.FloatRange(0.01, 100), default=1.0, help="Host's time for calls over PyTorch's own."
    ),
    click.option("--overlap/--no-overlap", default=True, help="Exchange gradients beside the backward pass."),
    click.option(
        "--sequence-parallel/--no-sequence-parallel", default=False, help="Tensor ranks share the sequence, too."
    ),
    click.option(
        "--overlap-tensor/--no-overlap-tensor",
        default=False,
        help="Exchange within layers beside their products, in parts.",
    ),
    click.option(
        "--param-dtype",
        type=click.Choice(["float32", "bfloat16", "float16"]),
        default="float32",
        show_default=True,
        help="Of parameters under autocast (amp), as FSDP's mixed precision gathers them.",
    ),
    click.option(
        "--checkpoint",
        default="none",
        show_default=True,
        metavar="none|full|selective|attention|MODULE",
        help="Recomputed.",
    ),
    *STEP_OPTIONS,
    *ENGINE_OPTIONS,
    click.option("--search", is_flag=True, help="Try every plan for these boards; what is said of ranks stays."),
    click.option(
        "--plot",
        type=click.Path(dir_okay=False, path_type=Path),
        default=None,
        help="Draw the step's stages (png, svg or pdf; needs matplotlib).",
    ),
    click.option("--json/--no-json", "as_json", default=False, help="A JSON object per plan."),
    click.option("--rows", type=click.IntRange(1, 1000), default=10, show_default=True, help="Lines of tables."),
    click.argument("model"),
)
def plan_command(
    *,
    model: str,
    device: str,
    node: str | None,
    boards: int | None,
    nodes: int | None,
    search: bool,
    plot: Path | None,
    as_json: bool,
    rows: int,
    **options: Any,
) -> None:
    """Predict the step of MODEL on many boards from a plan that divides it, without any of them.

    MODEL is named as for daydream predict. Ranks are numbered as Megatron does: neighbours share layers, then come
    copies of the model, then stages.
    """
    from daydream.plan.answer import print_plan, print_plans
    from daydream.plan.planned import planned

    if plot is not None:
        from roller.explain.picture import check_plot

        check_plot(plot)
    board = _board(device)
    place = _node(board, node, boards)
    if search:
        ranks = _ranks(place, nodes, options)
        plans, tried = _searched(model, (device, node, boards), ranks, rows, options)
        steps = [each.step for each in plans]
        if not as_json:
            print_plans(plans, tried)
    else:
        layout = _layout(place, nodes, options)
        layout.check(place)
        units = _units(model, board, layout, options)
        steps = [planned(units, layout, board, place, *_calls(options), balances=options["stages"] == "cost")]
        if not as_json:
            print_plan(steps[0], rows)
    for step in steps if as_json else ():
        print_json(step.record())
    if plot is not None:
        from daydream.plan.chart import write_chart

        write_chart(steps[0], plot)


def _board(name: str) -> DeviceSpec:
    devices = chosen_devices(name)
    if len(devices) > 1:
        raise InputError("--device", "several boards were named", "a plan is of one kind of board")
    return devices[0]


def _node(board: DeviceSpec, name: str | None, boards: int | None) -> NodeSpec | None:
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


def _ranks(place: NodeSpec | None, nodes: int | None, options: dict[str, Any]) -> int:
    """Boards of the job."""
    parts = options["tensor"] * options["pipeline"] * options["context"]
    if nodes is None:
        return (options["data"] or 1) * parts
    if place is None:
        raise InputError("--nodes", "is of no node", "name one with --node")
    ranks = nodes * place.boards
    if ranks > MOST_RANKS:
        raise InputError("--nodes", f"{ranks} boards", f"plan for {MOST_RANKS} at most")
    if options["data"] is not None and options["data"] * parts != ranks:
        problem = f"{nodes} x {place.boards} boards are not {options['data']} x {parts} ranks"
        raise InputError("--nodes", problem, "leave --data or --nodes out")
    return ranks


def _layout(place: NodeSpec | None, nodes: int | None, options: dict[str, Any]) -> Layout:
    from daydream.plan.layout import Layout

    ranks, parts = _ranks(place, nodes, options), options["tensor"] * options["pipeline"] * options["context"]
    if ranks % parts:
        raise InputError("--nodes", f"{ranks} boards are no multiple of {parts} ranks of a copy", "divide it otherwise")
    data = ranks // parts
    count = options["micro_batches"] or 1
    global_batch = options["global_batch"]
    if global_batch is not None:
        if options["micro_batches"] is not None:
            raise InputError("--global-batch", "and --micro-batches say the same", "leave one of them out")
        each = data * options["batch"]
        if global_batch % each:
            problem = f"{global_batch} samples are no multiple of {data} x {options['batch']}"
            raise InputError("--global-batch", problem, "choose --batch so")
        count = global_batch // each
    chunks = options["chunks"] or (2 if options["schedule"] == "interleaved" else 1)
    return Layout(
        data=data, tensor=options["tensor"], pipeline=options["pipeline"], schedule=options["schedule"], chunks=chunks,
        micro_batches=count, sequence=options["sequence_parallel"], blocks=_blocks(options["stages"]),
        **_exchange(options),
    )  # fmt: skip


def _exchange(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a layout on gradients and copies of parameters, the same with ``--search`` and without."""
    names = (
        "shard", "overlap", "master", "context", "expert", "dispatch", "imbalance", "overlap_experts", "offload",
        "overlap_tensor", "waits", "blocking",
    )  # fmt: skip
    exchange = {name: options[name] for name in names} | {"exchange_context": options["context_exchange"]}
    if options["bucket_mb"] is not None:
        exchange["bucket_bytes"] = options["bucket_mb"] * 2**20
    return exchange | {"reduce_bytes": _REDUCE_BYTES[options["reduce_dtype"]]}


def _units(model: str, board: DeviceSpec, layout: Layout, options: dict[str, Any], **changed: Any) -> Units:
    """The step of a rank, captured."""
    from daydream.capture.options import CaptureOptions
    from daydream.plan.source import planned_units

    names = (
        "batch", "sequence", "image", "class_name", "mode", "dtype", "optimizer", "attention", "checkpoint", "tf32",
        "assume", "precision", "lora", "expert_kernels", "cached",
    )  # fmt: skip
    capture = CaptureOptions(
        **({name: options[name] for name in names} | {"sequence": _tokens(options)} | changed),
        implementation=options["optimizer_kernels"],
        flash=has_flash_attention(board),
        parameters="" if options["param_dtype"] == "float32" else options["param_dtype"],
    )
    return planned_units(
        model, capture, tensor=layout.tensor, sequence_parallel=layout.sequence, compiles=options["compiles"]
    )


def _blocks(text: str) -> tuple[int, ...]:
    """Numbers of ``--stages``; none for equal parts and for parts of equal cost."""
    if text in ("equal", "cost"):
        return ()
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdecimal() and 0 < int(size) < MOST_RANKS for size in sizes):
        raise InputError("--stages", f"got {text!r}", "write equal, cost, or blocks of every part: 11,10,10,9")
    return tuple(map(int, sizes))


def _tokens(options: dict[str, Any]) -> int | None:
    """Tokens of a sample that a rank works on."""
    sequence, ranks = options["sequence"], options["context"]
    if ranks == 1:
        return sequence
    if sequence is None:
        raise InputError("--context", "needs the tokens of a sample", "add --sequence")
    if sequence % (2 * ranks):
        problem = f"{sequence} tokens have no {2 * ranks} equal pieces, two a rank"
        raise InputError("--context", problem, "choose --sequence so")
    return sequence // ranks


def _searched(
    model: str, where: tuple[str, str | None, int | None], ranks: int, rows: int, options: dict[str, Any]
) -> tuple[list[FittingPlan], int]:
    """Plans that fit, the fastest first, and how many were tried; ``where`` is board, node, and boards of it."""
    from daydream.plan.layout import Layout
    from daydream.plan.planned import planned
    from daydream.plan.search import CandidateOutcome, best, candidates, captures

    board = _board(where[0])
    place = _node(board, *where[1:])
    if options["global_batch"] is None:
        raise InputError("--search", "needs the samples of a step", "add --global-batch")
    base = Layout(tensor=options["tensor"], pipeline=options["pipeline"], **_exchange(options))
    uncut = _units(model, board, Layout(), options, batch=1)
    checkpoints = ("none", "selective", "full") if options["checkpoint"] == "none" else (options["checkpoint"],)
    tried = list(candidates(ranks, options["global_batch"], place, base, checkpoints, len(uncut.blocks)))
    if not tried:
        problem = f"{options['global_batch']} samples cannot be shared by {ranks} boards"
        raise InputError("--global-batch", problem, "choose a multiple of the boards")
    engine = {name: options.pop(name) for name in ("jobs", "resume")}
    groups = captures(tried)
    common = {"model": model, "device": where[0], "node": where[1], "boards": where[2], "options": options}
    parts = [
        common
        | {"batch": key.batch, "checkpoint": key.checkpoint}
        | {"layouts": [asdict(tried[each].layout) for each in places]}
        for key, places in groups.items()
    ]
    echo = partial(click.echo, err=True)
    done = answers(search_part, parts, progress=lambda words: echo(f"daydream: {words} captures"), **engine)
    outcomes: dict[int, CandidateOutcome] = {}
    for places, answer in zip(groups.values(), done, strict=True):
        outcomes |= {each: CandidateOutcome(*pair) for each, pair in zip(places, answer, strict=True)}
    units_by_layout: dict[tuple[Any, ...], Units] = {}

    def plan(candidate: Candidate) -> PlannedStep:
        layout = candidate.layout
        key = (layout.tensor, layout.sequence, candidate.batch, candidate.checkpoint)
        if key not in units_by_layout:
            changed = {"batch": candidate.batch, "checkpoint": candidate.checkpoint}
            units_by_layout[key] = _units(model, board, layout, options, **changed)
        return planned(units_by_layout[key], layout, board, place, *_calls(options))

    return best(tried, [outcomes[each] for each in range(len(tried))], plan, board, rows), len(tried)


def search_part(part: Mapping[str, Any]) -> list[list[float]]:
    """Seconds of a step and bytes at least of every layout that one capture serves, as JSON."""
    from daydream.plan.layout import Layout
    from daydream.plan.search import outcome

    layouts = [Layout(**each) for each in part["layouts"]]
    board = _board(part["device"])
    place, options = _node(board, part["node"], part["boards"]), part["options"]
    changed = {"batch": part["batch"], "checkpoint": part["checkpoint"]}
    units = _units(part["model"], board, layouts[0], options, **changed)
    return [list(outcome(units, layout, board, place, *_calls(options))) for layout in layouts]


def _calls(options: Mapping[str, Any]) -> tuple[Any, float, str]:
    """Kernels that run, and the host that launches them."""
    return options["implementation"], options["host_factor"], options["host"]
