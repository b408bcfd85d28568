"""``daydream serve``: requests served by a model on boards that are not at hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from daydream.command.outputs import check_outputs, print_json, with_options
from daydream.command.predict import chosen_devices, hourly_prices
from daydream.operators.variants import PRECISIONS
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.serving.costs import Engine, IterationCosts
    from daydream.serving.parts import ServedModel
    from daydream.serving.requests import Requests
    from daydream.serving.scheduler import Host
    from daydream.serving.served import Promise, Served
    from hal.spec.device import DeviceSpec

_PATH = click.Path(dir_okay=False, path_type=Path)
_POSITIVE = click.FloatRange(1e-6, 1e9)


@click.command("serve")
@with_options(
    click.option("--device", required=True, metavar="NAME[,...]", help="The board; with --search one or more."),
    click.option(
        "--tensor", type=click.IntRange(1, 1024), default=None, help="Boards that share every layer.  [default: 1]"
    ),
    click.option(
        "--replicas", type=click.IntRange(1, 4096), default=1, show_default=True, help="That take requests in turns."
    ),
    click.option(
        "--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16", show_default=True,
        help="Of parameters, activations, and what is not narrow.",
    ),
    click.option(
        "--precision", type=click.Choice(PRECISIONS), default=PRECISIONS[0], show_default=True,
        help="Of linear layers within the repeated blocks, and of experts.",
    ),
    click.option(
        "--cache", type=click.Choice(["16-bit", "fp8"]), default="16-bit", show_default=True,
        help="Numbers of keys and values.",
    ),
    click.option(
        "--expert", type=click.IntRange(1, 1024), default=None, metavar="N",
        help="Boards that experts are divided among, in groups of --tensor; else tensor ranks share each expert.",
    ),
    click.option(
        "--draft", type=click.IntRange(0, 16), default=0, show_default=True, metavar="N",
        help="Speculative tokens of a sequence, verified in an iteration.",
    ),
    click.option(
        "--accept", type=click.FloatRange(0, 1), default=0.7, show_default=True,
        help="Share of drafted tokens accepted where those before were.",
    ),
    click.option(
        "--drafter", default="head", show_default=True, metavar="head|prompt|MODEL",
        help="What drafts: a block behind the model (EAGLE, MTP), its prompt at no cost, or a small model.",
    ),
    click.option(
        "--prefill", type=click.IntRange(1, 4096), default=None, metavar="N",
        help="Replicas for prompts alone; --replicas then decode.",
    ),
    click.option("--prefill-device", default=None, metavar="NAME", help="Their boards.  [default: --device]"),
    click.option(
        "--prefill-tensor", type=click.IntRange(1, 1024), default=None, help="Their ranks.  [default: --tensor]"
    ),
    click.option(
        "--link", type=click.Choice(["network", "nvlink"]), default="network", show_default=True,
        help="Carries keys and values from boards for prompts.",
    ),
    click.option("--separate", is_flag=True, help="With --search: try boards for prompts alone too."),
    click.option("--class", "class_name", default=None, help="Class of transformers, as AutoModelForCausalLM."),
    click.option(
        "--requests", "count", type=click.IntRange(1, 1_000_000), default=1000, show_default=True, help="How many."
    ),
    click.option("--rate", type=_POSITIVE, default=None, help="Of arrivals a second (Poisson); all at once if none."),
    click.option(
        "--concurrency", type=click.IntRange(1, 1_000_000), default=None,
        help="Requests under way: the next is sent when one is answered.",
    ),
    click.option(
        "--prompt", default="1000", show_default=True, metavar="N|A..B", help="Tokens of a prompt; A..B draws."
    ),
    click.option("--output", default="200", show_default=True, metavar="N|A..B", help="Tokens of an answer, likewise."),
    click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of all that is drawn."),
    click.option(
        "--trace", type=_PATH, default=None, help="CSV file of requests instead: arrival, prompt, output."
    ),
    click.option(
        "--shared-prefix", type=click.IntRange(0), default=0, show_default=True,
        help="First tokens that all prompts have in common, which are in the cache.",
    ),
    click.option(
        "--max-sequences", type=click.IntRange(1, 65536), default=256, show_default=True, help="Of an iteration."
    ),
    click.option(
        "--max-tokens", type=click.IntRange(1, 1 << 20), default=8192, show_default=True,
        help="Of an iteration; longer prompts are computed in chunks.",
    ),
    click.option(
        "--memory", type=click.FloatRange(0.05, 1.0), default=0.9, show_default=True,
        help="Share of a board's memory for weights, activations, keys and values.",
    ),
    click.option(
        "--reserve/--no-reserve", "reserves", default=False,
        help="Begin a sequence only where all that it will need is free; else the last one is preempted.",
    ),
    click.option(
        "--reduce", "reduces", type=click.Choice(["auto", "nccl"]), default="auto", show_default=True,
        help="All-reduces: the faster of vLLM's own and NCCL's, or NCCL's alone.",
    ),
    click.option(
        "--host-ms", type=click.FloatRange(0, 1e4), default=1.0, show_default=True,
        help="Of the scheduler for an iteration.",
    ),
    click.option(
        "--host-us", type=click.FloatRange(0, 1e6), default=20.0, show_default=True,
        help="Of the scheduler for each sequence of it.",
    ),
    click.option(
        "--overlap/--no-overlap", "overlaps", default=False, help="Schedule while the boards compute."
    ),
    click.option(
        "--graphs/--no-graphs", default=True, help="Launch an iteration as a graph, or kernel by kernel."
    ),
    click.option("--search", is_flag=True, help="Find the cheapest boards that keep --ttft and --tpot."),
    click.option("--ttft", type=_POSITIVE, default=None, help="Milliseconds to the first token that are promised."),
    click.option("--tpot", type=_POSITIVE, default=None, help="Milliseconds for each further token, likewise."),
    click.option(
        "--percentile", type=click.FloatRange(1, 100), default=90.0, show_default=True,
        help="Of the requests that keep the promise.",
    ),
    click.option("--price", multiple=True, metavar="NAME=AMOUNT", help="Of an hour on a board."),
    click.option("--html", type=_PATH, default=None, help="Write a report to open in a browser."),
    click.option("--json/--no-json", "as_json", default=False, help="A JSON object per answer."),
    click.option("--rows", type=click.IntRange(1, 1000), default=10, show_default=True, help="Lines of tables."),
    click.argument("model"),
)  # fmt: skip
def serve_command(
    *, model: str, device: str, html: Path | None, as_json: bool, rows: int, percentile: float, **options: Any
) -> None:
    """Predict how MODEL serves requests: times to the first token and between tokens, and tokens a second.

    MODEL is named as for daydream predict: a decoder of transformers, hf:CONFIG.json. Its code alone is read, no
    weights and no board are needed. Requests are batched continuously, and prompts computed in chunks, as vLLM does it.
    """
    from daydream.serving.answer import print_outcome, print_served
    from daydream.serving.page import write_page
    from daydream.serving.parts import served_model
    from daydream.serving.search import TENSORS, search

    check_outputs(None, html)
    devices = chosen_devices(device)
    _check(options, len(devices))
    hourly = hourly_prices(options["price"], devices)
    requests, engine, host = _requests(options), _engine(options), _host(options)
    parts = served_model(model, class_name=options["class_name"], dtype=options["dtype"])
    draft = _drafts(parts, options)
    if options["search"]:
        tensors = TENSORS if options["tensor"] is None else (options["tensor"],)
        outcome = search(
            parts, devices, requests, _promise(options, percentile), host, engine, tensors=tensors,
            reserves=options["reserves"], hourly=hourly, draft=draft,
            link=options["link"] if options["separate"] else None,
            progress=lambda words: click.echo(f"daydream: {words} kinds of boards and ranks", err=True),
        )  # fmt: skip
        for each in outcome.best[:rows] if as_json else ():
            print_json(each.record(hourly.get(each.costs.device.name)))
        if not as_json:
            print_outcome(outcome, percentile, rows)
        if html is not None:
            write_page(html, outcome, percentile)
        return
    from daydream.serving.costs import iteration_costs

    answer = _served(options, requests, iteration_costs(parts, devices[0], engine, draft), host, draft)
    if as_json:
        print_json(answer.record(hourly.get(devices[0].name)))
    else:
        print_served(answer)
    if html is not None:
        write_page(html, answer)


def _served(
    options: dict[str, Any], requests: Requests, costs: IterationCosts, host: Host, draft: ServedModel | None
) -> Served:
    from daydream.serving.costs import iteration_costs
    from daydream.serving.separate import decoded, prefilled
    from daydream.serving.served import served

    common = {"replicas": options["replicas"], "reserves": options["reserves"]}
    if options["prefill"] is None:
        return served(requests, costs, host, **common)
    name, ranks = options["prefill_device"], options["prefill_tensor"] or costs.engine.ranks
    others = (costs.device,) if name is None else chosen_devices(name)
    if len(others) > 1:
        raise InputError("--prefill-device", "several boards were named", "name one")
    other: DeviceSpec = others[0]
    first = costs
    if name is not None or ranks != costs.engine.ranks:
        first = iteration_costs(costs.model, other, costs.engine._replace(ranks=ranks), draft)
    source = prefilled(requests, first, host, replicas=options["prefill"], link=options["link"])
    return decoded(source, costs, host, **common)


def _drafts(model: ServedModel, options: dict[str, Any]) -> ServedModel | None:
    """The model that drafts; None where nothing does, or the prompt."""
    from daydream.serving.parts import served_model

    if not options["draft"] or options["drafter"] == "prompt":
        return None
    if options["drafter"] == "head":
        return model.draft_head()
    return served_model(options["drafter"], dtype=options["dtype"])


def _check(options: dict[str, Any], devices: int) -> None:
    """Refuses options that say nothing together, and numbers that are none, which no range refuses."""
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"--{name.replace('_', '-')}", f"got {value}", "write a number")
    if not options["draft"] and (options["drafter"] != "head" or options["accept"] != 0.7):
        raise InputError("--draft", "is 0: nothing is drafted", "say how many tokens, as --draft 3")
    for name in ("prefill_device", "prefill_tensor"):
        if options[name] is not None and options["prefill"] is None:
            raise InputError(f"--{name.replace('_', '-')}", "is of boards for prompts alone", "add --prefill")
    promised = options["ttft"] is not None or options["tpot"] is not None
    if options["search"]:
        if options["prefill"] is not None:
            raise InputError("--prefill", "is what --search finds out", "write --separate")
        if not promised:
            raise InputError("--search", "needs a promise to keep", "add --ttft or --tpot")
        if options["replicas"] != 1 or options["concurrency"] is not None:
            name = "--replicas" if options["replicas"] != 1 else "--concurrency"
            raise InputError(name, "is what --search finds out", "leave it out")
        if options["rate"] is None and options["trace"] is None:
            raise InputError("--search", "needs to know when requests arrive", "add --rate or --trace")
        return
    if options["separate"]:
        raise InputError("--separate", "is what --search tries", "add --search, or write --prefill")
    if promised:
        raise InputError("--ttft", "and --tpot are promises that --search keeps", "add --search")
    if devices > 1:
        raise InputError("--device", "several boards were named", "name one, or add --search")


def _requests(options: dict[str, Any]) -> Requests:
    from daydream.serving.requests import drawn, read_requests

    common = {"concurrency": options["concurrency"] or 0, "shared": options["shared_prefix"]}
    if options["trace"] is not None:
        if options["rate"] is not None:
            raise InputError("--rate", "and --trace both say when requests arrive", "leave one of them out")
        return read_requests(options["trace"], **common)
    return drawn(
        options["count"], rate=options["rate"], prompt=options["prompt"], output=options["output"],
        seed=options["seed"], **common,
    )  # fmt: skip


def _engine(options: dict[str, Any]) -> Engine:
    from daydream.serving.costs import Engine

    return Engine(
        ranks=options["tensor"] or 1, precision=options["precision"], cache=options["cache"],
        sequences=options["max_sequences"], tokens=options["max_tokens"], memory_share=options["memory"],
        reduces=options["reduces"], draft=options["draft"], acceptance=options["accept"],
        experts=options["expert"] or 0,
    )  # fmt: skip


def _host(options: dict[str, Any]) -> Host:
    from daydream.serving.scheduler import Host

    return Host(options["host_ms"] / 1e3, options["host_us"] / 1e6, options["overlaps"], options["graphs"])


def _promise(options: dict[str, Any], percentile: float) -> Promise:
    from daydream.serving.served import Promise

    ttft, tpot = (None if options[name] is None else options[name] / 1e3 for name in ("ttft", "tpot"))
    return Promise(ttft=ttft, tpot=tpot, percentile=percentile)
