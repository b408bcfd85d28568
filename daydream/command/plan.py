"""``daydream plan``: the step of a model that many boards share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from daydream.capture.options import DTYPES
from daydream.command.engines import ENGINE_OPTIONS
from daydream.command.outputs import print_json, with_options
from daydream.command.planning import board_of, calls_of, exchange_of, node_of, units_for
from daydream.command.predict import STEP_OPTIONS
from daydream.operators.variants import PRECISIONS
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.plan.layout import Layout
    from hal.spec.node import NodeSpec

#: Boards of the largest job that is planned.
MOST_RANKS = 1 << 20

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
        "--overlap-experts/--no-overlap-experts", default=False, help="Carry tokens next to shared experts' products."
    ),
    click.option(
        "--overlap-batches/--no-overlap-batches",
        default=False,
        help="Carry tokens next to another micro-batch's kernels.",
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
        "--narrow/--no-narrow",
        default=False,
        help="Keep and gather weights of --precision in narrow numbers alone.",
    ),
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
    click.option("--overlap/--no-overlap", default=True, help="Exchange gradients during the backward pass."),
    click.option(
        "--sequence-parallel/--no-sequence-parallel", default=False, help="Tensor ranks share the sequence, too."
    ),
    click.option(
        "--overlap-tensor/--no-overlap-tensor",
        default=False,
        help="Exchange within layers during their products, in parts.",
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
        "--try-precision", type=click.Choice(PRECISIONS), multiple=True, help="Of linear layers, searched as well."
    ),
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
    if plot is not None:
        from roller.explain.picture import check_plot

        check_plot(plot)
    board = board_of(device)
    place = node_of(board, node, boards)
    if options["try_precision"] and not search:
        raise InputError("--try-precision", "is of a search", "add --search, or write --precision")
    if options["narrow"] and not search:
        _check_narrow(options["precision"])
    if search:
        from daydream.command.plan_search import searched

        ranks = _ranks(place, nodes, options)
        plans, tried = searched(model, (device, node, boards), ranks, rows, options)
        steps = [each.step for each in plans]
        if not as_json:
            from daydream.plan.answer import print_plans

            print_plans(plans, tried)
    else:
        layout = _layout(place, nodes, options)
        layout.check(place)
        units = units_for(model, board, layout, options)
        from daydream.plan.planned import planned

        steps = [planned(units, layout, board, place, *calls_of(options), balances=options["stages"] == "cost")]
        if not as_json:
            from daydream.plan.answer import print_plan

            print_plan(steps[0], rows)
    for step in steps if as_json else ():
        print_json(step.record())
    if plot is not None:
        from daydream.plan.chart import write_chart

        write_chart(steps[0], plot)


def _check_narrow(precision: str) -> None:
    from daydream.memory.narrow import ELEMENT_BYTES

    if precision not in ELEMENT_BYTES:
        problem = f"no weights are kept in narrow numbers with --precision {precision}"
        raise InputError("--narrow", problem, f"write one of {', '.join(ELEMENT_BYTES)}")


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
        **exchange_of(options),
    )  # fmt: skip


def _blocks(text: str) -> tuple[int, ...]:
    """Numbers of ``--stages``; none for equal parts and for parts of equal cost."""
    if text in ("equal", "cost"):
        return ()
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdecimal() and 0 < int(size) < MOST_RANKS for size in sizes):
        raise InputError("--stages", f"got {text!r}", "write equal, cost, or blocks of every part: 11,10,10,9")
    return tuple(map(int, sizes))
