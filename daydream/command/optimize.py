"""``daydream optimize``: the buckets, recomputation and fused kernels with which a distributed step is shortest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from daydream.command.outputs import print_json, warn
from daydream.command.predict import STEP_OPTIONS, batch_sizes, chosen_devices, predicted_steps
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.graph.graph import TaskGraph
    from daydream.optimize.exchange import Exchange
    from daydream.optimize.strategies import Optimized
    from daydream.passes.distributed.ddp import AllReduceCost
    from daydream.whatif import PassRequest

_PATH = click.Path(dir_okay=False, path_type=Path)

#: How `daydream predict` takes a model, where it is not a file with a function.
_SCHEMES = ("timm:", "hf:", "onnx:")


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    # The one that is put around last stands first in the help.
    given = (
        click.option("--workers", type=click.IntRange(2), default=8, show_default=True, help="Ranks, all alike."),
        click.option(
            "--shard", type=click.Choice(["ddp", "fsdp"]), default="ddp", show_default=True, help="What is searched."
        ),
        click.option("--node", default="", metavar="NAME", help="What joins them (roller devices), or:"),
        click.option("--bandwidth", type=float, default=12.5, show_default=True, help="GB/s of a worker's bus."),
        click.option("--latency-us", type=float, default=5.0, show_default=True, help="Of a step of the ring."),
        click.option(
            "--interference", type=float, default=None, help="Share by which kernels slow all-reduces (0.34)."
        ),
        click.option("--call-us", type=float, default=None, help="CPU time of the call of an all-reduce (42)."),
        click.option("--gradient-mb", type=float, default=0.0, help="MiB of all gradients, if the trace is silent."),
        click.option("--memory-gb", type=float, default=None, help="What a step may hold, 10^9 bytes."),
        click.option(
            "--try", "tries", multiple=True, metavar="NAME[:KEY=VALUE]", help="A pass to take if it helps; repeat it."
        ),
        click.option("--out", type=_PATH, default=None, help="Write the plan as JSON."),
        click.option("--plot", type=_PATH, default=None, help="Draw both lists of buckets (png, svg or pdf)."),
        click.option("--json/--no-json", "as_json", default=False, help="The plan as one JSON object on stdout."),
        click.option("--device", default=None, metavar="NAME", help="The board that a MODEL runs on."),
        click.option("--batch", default=None, metavar="N", help="Samples of a MODEL's step."),
        click.option("--dtype", default="float32", show_default=True, metavar="TYPE", help="Of a MODEL."),
        click.option("--channels-last/--no-channels-last", default=False, help="Images of a MODEL as NHWC."),
        click.option("--checkpoint", default="none", show_default=True, metavar="none|full|MODULE", help="Recomputed."),
        *STEP_OPTIONS,
        click.argument("source"),
    )
    for option in reversed(given):
        command = option(command)
    return command


@click.command("optimize")
@_options
def optimize_command(
    *,
    source: str,
    workers: int,
    shard: str,
    node: str,
    bandwidth: float,
    latency_us: float,
    interference: float | None,
    call_us: float | None,
    gradient_mb: float,
    memory_gb: float | None,
    tries: tuple[str, ...],
    out: Path | None,
    plot: Path | None,
    as_json: bool,
    device: str | None,
    **options: Any,
) -> None:
    """Find the list of gradient buckets with which the training step of SOURCE is shortest on several boards.

    SOURCE is a trace of one worker, or a MODEL as daydream predict takes it, with --device. With --shard fsdp, which
    modules to call fully_shard on, and how far to prefetch.
    """
    from daydream.optimize.exchange import Exchange
    from daydream.passes.distributed.ddp import CALL_US
    from daydream.whatif import parse_pass

    _check_out(out)
    if plot is not None:
        from roller.explain.picture import check_plot

        check_plot(plot)
    if memory_gb is not None and not memory_gb > 0:
        raise InputError("--memory-gb", f"{memory_gb:g} is not above 0", "write a number > 0")
    for option, given in (("--try", tries or None), ("--memory-gb", memory_gb), ("--plot", plot)):
        if shard == "fsdp" and given is not None:
            raise InputError(option, "is for ddp alone", "leave it or --shard fsdp out")
    with _as_try():
        requests = [parse_pass(text) for text in tries]
    cost = all_reduce_cost(workers, node, bandwidth, latency_us, interference)
    call = CALL_US if call_us is None else call_us
    if not 0 <= call < float("inf"):
        raise InputError("--call-us", f"{call:g} is below 0", "write 0 or more")
    graph = _graph(source, device, options)
    exchange = Exchange.of(graph, cost, call, gradient_mb)
    if shard == "fsdp":
        record, show = _wrapping(source, exchange)
    else:
        record, show = _buckets(source, exchange, requests, memory_gb, plot)
    if out is not None:
        _write(out, record)
    if as_json:
        print_json(record)
    else:
        show()
        warn(graph)


#: A plan as JSON, and what prints it.
_Answer = tuple[dict[str, Any], Callable[[], None]]


def _buckets(
    source: str, exchange: Exchange, requests: Sequence[PassRequest], memory_gb: float | None, plot: Path | None
) -> _Answer:
    from daydream.optimize.plan import plan_record
    from daydream.optimize.strategies import optimized

    memory = None if memory_gb is None else 1e9 * memory_gb
    with _as_try():
        answer = optimized(exchange, requests, memory, _tell)
    if plot is not None:
        from daydream.optimize.picture import write_picture

        cost = exchange.cost
        write_picture(answer, f"{source}, {cost.workers} workers {cost.where}", plot)
    return plan_record(answer, source), lambda: _print(source, answer)


def _wrapping(source: str, exchange: Exchange) -> _Answer:
    from daydream.optimize.fsdp import Sharding, best_wrapping, usual_wrapping
    from daydream.optimize.plan import wrapping_record

    sharding = Sharding.of(exchange)
    usual = usual_wrapping(sharding)
    before = sharding.length_us(usual)
    best, after, tried = best_wrapping(sharding, _tell)
    record = wrapping_record(sharding, source, (usual, before), (best, after), tried)
    return record, lambda: _print_wrapping(record)


def _tell(text: str) -> None:
    click.echo(f"daydream: {text}", err=True)


def all_reduce_cost(
    workers: int, node: str, bandwidth: float, latency_us: float, interference: float | None
) -> AllReduceCost:
    """Cost of all-reduces, by a node's model of NCCL or by the formula of a ring.

    Raises:
        InputError: a number is out of range, or the node is unknown or has no room for so many.
    """
    from daydream.passes.basis.communication import INTERFERENCE, check, check_not_negative, node_of
    from daydream.passes.distributed.ddp import AllReduceCost

    slower = INTERFERENCE if interference is None else interference
    check("daydream optimize", workers=workers, bandwidth=bandwidth)
    check_not_negative("daydream optimize", latency_us=latency_us, interference=slower)
    return AllReduceCost(workers, bandwidth, latency_us, 1.0 + slower, node_of("daydream optimize", node, workers))


def _graph(source: str, device: str | None, options: dict[str, Any]) -> TaskGraph:
    """The graph of a trace, or of a model's step on a board."""
    from daydream.memory.attached import with_memory
    from daydream.tasks.build import build_graph, read_graph

    if device is None:
        if source.startswith(_SCHEMES) or ".py:" in source:
            raise InputError("--device", f"{source} is a model, and no board is named", "write --device h100")
        return with_memory(read_graph(Path(source)))
    from daydream.prediction.trace import predicted_trace

    devices, batches = chosen_devices(device), batch_sizes(options.pop("batch"))
    if len(devices) * len(batches) > 1:
        raise InputError("--device", "several steps were asked for", "give one device and one batch size")
    click.echo(f"daydream: predicting {source} on {devices[0].name}", err=True)
    (step,) = predicted_steps(source, devices, batches, options)
    return build_graph(predicted_trace(step))


@contextmanager
def _as_try() -> Iterator[None]:
    """Within, errors of passes name the option that they were asked for with here."""
    try:
        yield
    except InputError as error:
        raise InputError(error.field.replace("--pass", "--try", 1), error.problem, error.remedy) from None


# Output


def _check_out(out: Path | None) -> None:
    if out is None:
        return
    if out.suffix != ".json":
        raise InputError("--out", f"{out} has no ending that is known", "use .json")
    if not out.parent.is_dir():
        raise InputError("--out", f"there is no directory {out.parent}", "make it first")


def _write(out: Path, record: dict[str, Any]) -> None:
    import msgspec

    from hal.support.atomic import write_atomic

    try:
        write_atomic(out, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    except OSError as error:
        raise InputError(str(out), f"cannot be written: {error.strerror or error}") from None


def _print(source: str, answer: Optimized) -> None:
    from rich.text import Text

    from daydream.optimize.plan import buckets_of, checkpointed, why
    from daydream.report.tables import ms, percent, table
    from hal.support.tables import print_line, print_table

    before, best = answer.before, answer.best
    now = before.lengths_us[before.usual]
    cost = best.exchange.cost
    # Titles are cut to the table's width.
    print_line(f"{source}, {cost.workers} workers {cost.where}")
    steps = table("Steps", "", "buckets", "step ms", "saved")
    after = f"{best.title}, " if best.requests else ""
    rows = [("as it is", before, before.usual)]
    rows += [("best list of buckets", before, before.best)] if best.requests else []
    rows += [(f"{after}bucket_cap_mb={best.limit_mb:g}", best, best.limited)]
    rows += [(f"{after}best list of buckets", best, best.best)]
    for name, variant, ends in rows:
        length = variant.lengths_us[ends]
        steps.add_row(Text(name), str(len(ends)), ms(length), percent(now - length, now))
    print_table(steps)
    print_line()
    lists = table("Buckets", "ends with", "gradients", "MB", "ready ms", "starts ms", "ends ms")
    for bucket in buckets_of(best.exchange, best.step, best.best):
        name = best.exchange.of_step[bucket.last].name
        cells = [str(bucket.last - bucket.first + 1), f"{bucket.bytes / 1e6:.2f}"]
        lists.add_row(Text(name), *cells, *(ms(each) for each in (bucket.ready_us, bucket.start_us, bucket.end_us)))
    print_table(lists)
    for each, word in answer.tried:
        print_line(f"{each.title}: {ms(each.length_us)} ms, {word}")
    for sentence in why(answer):
        print_line(sentence)
    if modules := checkpointed(best):
        print_line(f"torch.utils.checkpoint around: {', '.join(modules)}")
    print_line(best.exchange.gradients.summary())


def _print_wrapping(record: dict[str, Any]) -> None:
    from rich.text import Text

    from daydream.report.tables import ms, percent, table
    from hal.support.tables import print_line, print_table

    print_line(f"{record['source']}, fully_shard among {record['workers']} workers, {record['network']}")
    steps = table("Steps", "", "units", "prefetch forward", "backward", "gathered MB", "step ms", "saved")
    lengths = record["step_seconds"]
    for name, wrapped in (("every block a unit", record["usual"]), ("best found", record["fsdp"])):
        length = lengths["before" if wrapped is record["usual"] else "after"]
        cells = [str(len(wrapped["wrap"])), str(wrapped["forward_prefetch"]), str(wrapped["backward_prefetch"])]
        cells += [f"{wrapped['gathered_bytes'] / 1e6:.0f}", ms(1e6 * length)]
        steps.add_row(Text(name), *cells, percent(lengths["before"] - length, lengths["before"]))
    print_table(steps)
    for names in record["fsdp"]["wrap"]:
        print_line(f"fully_shard: {', '.join(names)}")
    print_line(f"{record['tried']} wrappings were simulated")
