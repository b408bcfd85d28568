"""``daydream predict``: the step time of a model on boards that are not at hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from daydream.capture.options import DTYPES
from daydream.command.outputs import check_outputs, print_json, with_options, write_html
from daydream.operators.variants import EXPERT_KERNELS, PRECISIONS, VERSIONS
from hal.support.errors import InputError, listed

if TYPE_CHECKING:
    from daydream.capture.captured import Capture
    from daydream.capture.options import CaptureOptions
    from daydream.prediction.step import PredictedStep
    from hal.spec.device import DeviceSpec

#: Largest number of answers that one command gives.
MOST_ANSWERS = 1000

#: Batches that ``--largest-batch`` tries at most, and into how many parts of itself it narrows the answer down.
LARGEST_BATCH, BATCH_STEPS = 1 << 20, 64

_PATH = click.Path(dir_okay=False, path_type=Path)

#: How a step runs, whatever else a command asks.
STEP_OPTIONS = (
    click.option("--sequence", type=click.IntRange(1), default=None, help="Tokens of a sample."),
    click.option(
        "--cached",
        type=click.IntRange(0),
        default=0,
        help="Tokens of a sample in a cache of keys and values already, before one more or those of --sequence.",
    ),
    click.option("--image", type=click.IntRange(1), default=None, help="Side of an image in pixels."),
    click.option("--class", "class_name", default=None, help="Class of transformers, as AutoModelForCausalLM."),
    click.option("--mode", type=click.Choice(["training", "inference"]), default="training", show_default=True),
    click.option(
        "--optimizer", type=click.Choice(["sgd", "adam", "adamw", "none"]), default=None, help="Of the update."
    ),
    click.option(
        "--optimizer-kernels",
        type=click.Choice(["for-loop", "foreach", "fused"]),
        default="foreach",
        show_default=True,
        help="How PyTorch runs the update.",
    ),
    click.option(
        "--clip/--no-clip",
        default=False,
        help="Clip gradients by the norm of all, as clip_grad_norm_ does.",
    ),
    click.option(
        "--attention",
        type=click.Choice(VERSIONS),
        default="auto",
        show_default=True,
        help="Kernels of scaled_dot_product_attention; auto is what PyTorch takes on the board.",
    ),
    click.option(
        "--precision",
        type=click.Choice(PRECISIONS),
        default=PRECISIONS[0],
        show_default=True,
        help="Of linear layers within the repeated blocks; all else keeps the step's type.",
    ),
    click.option(
        "--packed",
        type=click.IntRange(1),
        default=None,
        metavar="TOKENS",
        help="Of the documents that a sample is packed of, which do not see each other.",
    ),
    click.option(
        "--expert-kernels",
        type=click.Choice(EXPERT_KERNELS),
        default=EXPERT_KERNELS[0],
        show_default=True,
        help="Of grouped products: PyTorch's, or a product an expert on several streams, as Transformer Engine has it.",
    ),
    click.option(
        "--lora",
        default="",
        metavar="rank=N[,modules=NAME,...]",
        help="Train low-rank adapters of linear layers alone; without modules of all in the repeated blocks.",
    ),
    click.option(
        "--tf32/--no-tf32", "tf32", default=True, help="Convolutions of float32 may round to TF32: PyTorch's default."
    ),
    click.option(
        "--assume",
        multiple=True,
        metavar="NAME=VALUE",
        help="Of values that the model reads: nonzero=SHARE that are not zero, item=VALUE read on the host.",
    ),
    click.option("--compile/--no-compile", "compiles", default=False, help="Fuse as TorchInductor would."),
    click.option(
        "--implementation",
        type=click.Choice(["library", "best"]),
        default="library",
        show_default=True,
        help="Kernels: what PyTorch launches, or Roller's own where it has some.",
    ),
)


def _options(command: Any) -> Any:
    choice = click.Choice
    given = (
        click.option("--device", required=True, metavar="NAME,...|all", help="Boards, or all of NVIDIA's."),
        click.option("--batch", default=None, metavar="N,N|A..B", help="Samples of a step; A..B doubles, A..B+S adds."),
        click.option(
            "--largest-batch", is_flag=True, help="The largest batch that fits on each board, in place of --batch."
        ),
        click.option(
            "--dtype",
            type=choice(DTYPES),
            default="float32",
            show_default=True,
            help="Of parameters and inputs; amp emulates autocast.",
        ),
        click.option("--channels-last/--no-channels-last", default=False, help="Images and weights as NHWC."),
        click.option(
            "--checkpoint",
            default="none",
            show_default=True,
            metavar="none|full|selective|attention|MODULE",
            help="Recomputed.",
        ),
        *STEP_OPTIONS,
        click.option(
            "--compiler",
            type=choice(["inductor", "roller"]),
            default="inductor",
            show_default=True,
            help="Of --compile; --compile=roller is short for both. Roller's backend predicts processors as well.",
        ),
        click.option("--pass", "passes", multiple=True, metavar="NAME[:KEY=VALUE]", help="Changes (daydream passes)."),
        click.option(
            "--host", default="", metavar="NAME", help="Processor that launches; the board's usual one if none."
        ),
        click.option("--price", multiple=True, metavar="NAME=AMOUNT", help="Of an hour on a board: samples per unit."),
        click.option("--out", type=_PATH, default=None, help="Write the step as a trace that all other commands read."),
        click.option("--html", type=_PATH, default=None, help="Write a report to open in a browser."),
        click.option("--plot", type=_PATH, default=None, help="Draw the steps (png, svg or pdf; needs matplotlib)."),
        click.option("--json/--no-json", "as_json", default=False, help="A JSON object per board and batch."),
        click.option("--rows", type=click.IntRange(1, 1000), default=10, help="Lines of each table."),
        click.argument("model"),
    )
    return with_options(*given)(command)


class _PredictCommand(click.Command):
    """A command that takes ``--compile=COMPILER`` besides ``--compile``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Arguments with the compiler as an option of its own."""
        spelled: list[str] = []
        for argument in args:
            flag, _, compiler = argument.partition("=")
            spelled += [flag, "--compiler", compiler] if flag == "--compile" and compiler else [argument]
        return super().parse_args(ctx, spelled)


@click.command("predict", cls=_PredictCommand)
@_options
def predict_command(
    *,
    model: str,
    device: str,
    largest_batch: bool,
    price: tuple[str, ...],
    compiler: str,
    passes: tuple[str, ...],
    out: Path | None,
    html: Path | None,
    plot: Path | None,
    as_json: bool,
    rows: int,
    **options: Any,
) -> None:
    """Predict the step time of MODEL on boards, from its code alone: no GPU, no weights, no recording.

    MODEL is FILE.py:FUNCTION (a function that returns a model and its inputs; its file is run), timm:NAME,
    hf:CONFIG.json, or onnx:MODEL.onnx.
    """
    from daydream.prediction.answer import print_answer, print_assumed, print_comparison, step_record

    check_outputs(out, html)
    if plot is not None:
        from roller.explain.picture import check_plot

        check_plot(plot)
    batch = options.pop("batch")
    processor = _compiled_by_roller(device, options) if compiler == "roller" else None
    if processor is not None:
        files = {"--out": out, "--html": html, "--plot": plot, "--pass": passes or None, "--price": price or None}
        _on_processor(model, processor, batch, {**options, "largest_batch": largest_batch}, files, as_json)
        return
    devices = chosen_devices(device)
    if largest_batch and batch is not None:
        raise InputError("--largest-batch", "finds the batch size", "leave --batch out")
    batches = batch_sizes(batch)
    hourly = hourly_prices(price, devices)
    if len(devices) * len(batches) > MOST_ANSWERS:
        raise InputError("--batch", f"{len(devices) * len(batches)} answers", f"ask for {MOST_ANSWERS} at most")
    single = len(devices) * len(batches) == 1
    for option, given in (("--out", out), ("--html", html), ("--pass", passes or None)):
        if given is not None and not single:
            raise InputError(option, "is of one step, several were asked for", "give one device and one batch size")
    steps = _largest(model, devices, options) if largest_batch else predicted_steps(model, devices, batches, options)
    if as_json:
        for step in steps:
            print_json(step_record(step, hourly))
    elif single and not passes:
        print_answer(steps[0], rows)
    elif not passes:
        print_comparison(steps, hourly)
        print_assumed(steps[0])
    if plot is not None:
        from daydream.prediction.chart import write_chart

        write_chart(steps, plot)
    if single and (passes or out is not None or html is not None):
        _as_trace(steps[0], passes, out, html, rows, quiet=as_json)


def _compiled_by_roller(device: str, options: dict[str, Any]) -> DeviceSpec | None:
    """Lets kernels of ours compete on boards; the processor, where one is asked for."""
    if not options["compiles"]:
        raise InputError("--compiler", "nothing is compiled without --compile", "write --compile=roller")
    options["implementation"] = "faster"
    return processor_named(device)


def processor_named(text: str) -> DeviceSpec | None:
    """The processor of ``--device``; None where boards are meant."""
    from hal.catalog import load_device
    from roller.dynamo.kernels import is_processor

    if text == "all" or "," in text:
        return None
    spec = load_device(text.strip())
    return spec if is_processor(spec) else None


def _on_processor(
    model: str,
    device: DeviceSpec,
    batch: str | None,
    options: Mapping[str, Any],
    files: Mapping[str, Any],
    as_json: bool,
) -> None:
    """The answer for a processor, of inference in float32."""
    from daydream.prediction.answer import print_processor_step
    from daydream.prediction.processor import processor_step

    for option, given in files.items():
        if given is not None:
            raise InputError(option, "is of steps on boards", "leave it out for a processor")
    for option, name, value in (("--mode", "mode", "inference"), ("--dtype", "dtype", "float32")):
        if options[name] != value:
            raise InputError(option, f"processors run {value} alone with this backend", f"give {option} {value}")
    usual = {"largest_batch": False, "precision": PRECISIONS[0], "lora": "", "packed": None, "checkpoint": "none",
             "host": "", "channels_last": False, "assume": (), "optimizer": None, "clip": False,
             "cached": 0}  # fmt: skip
    for name, default in usual.items():
        if options[name] != default:
            raise InputError(f"--{name.replace('_', '-')}", "is of steps on boards", "leave it out for a processor")
    for size in batch_sizes(batch):
        step = processor_step(model, device, {**options, "batch": size})
        if as_json:
            print_json(step.record())
        else:
            print_processor_step(step)


def predicted_steps(
    model: str, devices: Sequence[DeviceSpec], batches: Sequence[int | None], options: Mapping[str, Any]
) -> list[PredictedStep]:
    """Every batch on every board, captured once for all boards that run the same kernels of attention.

    ``options`` are those of the command line, by the names of its parameters.
    """
    from daydream.prediction.step import predicted

    options = dict(options)
    implementation, compiles = options.pop("implementation"), options.pop("compiles")
    options["implementation"] = options.pop("optimizer_kernels")
    host = options.pop("host", "")
    steps: dict[tuple[int | None, str], PredictedStep] = {}
    for batch in batches:
        for flash in dict.fromkeys(has_flash_attention(spec) for spec in devices):
            boards = [spec for spec in devices if has_flash_attention(spec) == flash]
            capture = _captured(model, {**options, "batch": batch, "flash": flash}, compiles=compiles)
            for step in predicted(capture, boards, implementation, host):
                steps[batch, step.device.name] = step
    return [steps[batch, spec.name] for spec in devices for batch in batches]


def _largest(model: str, devices: Sequence[DeviceSpec], options: dict[str, Any]) -> list[PredictedStep]:
    """The step with the largest batch that fits on each board, found by doubling and halving."""
    steps: dict[tuple[int, str], PredictedStep] = {}

    def step_of(batch: int, spec: DeviceSpec) -> PredictedStep:
        if (batch, spec.name) not in steps:
            click.echo(f"daydream: trying {batch} on {spec.name}", err=True)
            for step in predicted_steps(model, devices, [batch], options):
                steps[batch, step.device.name] = step
        return steps[batch, spec.name]

    answers = []
    for spec in devices:
        fitting, refused = 0, 1
        while refused <= LARGEST_BATCH and step_of(refused, spec).memory.fits:
            fitting, refused = refused, 2 * refused
        if not fitting:
            needed = step_of(1, spec).memory
            text = f"{needed.on_device / 1e9:.1f} GB for one sample, {needed.limiting} needs most"
            raise InputError(
                "--largest-batch", f"nothing fits on {spec.name}: {text}", "shrink the model, or recompute"
            )
        while refused - fitting > max(fitting // BATCH_STEPS, 1):
            middle = (fitting + refused) // 2
            fitting, refused = (middle, refused) if step_of(middle, spec).memory.fits else (fitting, middle)
        answers.append(step_of(fitting, spec))
    return answers


def _captured(model: str, options: Mapping[str, Any], *, compiles: bool) -> Capture:
    from daydream.capture.sources import CaptureOptions, captured
    from daydream.capture.stored import StoredStep, known_or_captured

    asked = CaptureOptions(**{**options, "assume": tuple(options.get("assume", ()))})

    def eager() -> Capture:
        return _of_values(model, asked) if model.startswith(("hf:", "timm:")) else captured(model, asked)

    def compiled() -> StoredStep:
        from daydream.capture.fusion.inductor import fused

        return StoredStep(fused(eager()))

    return known_or_captured(model, (asked, "compiled"), compiled).capture if compiles else eager()


def _of_values(model: str, options: CaptureOptions) -> Capture:
    """The step of a library's model; where it asks for values of which nothing was assumed, by the usual ones."""
    from daydream.capture.sources import captured

    try:
        return captured(model, options)
    except InputError as error:
        from daydream.capture.failures import DataDependentError

        if not isinstance(error, DataDependentError) or options.assume:
            raise
        from daydream.capture.assumptions import USUAL

        return captured(model, replace(options, assume=USUAL))


def has_flash_attention(device: DeviceSpec) -> bool:
    """True if PyTorch takes FlashAttention in 16 bits on this board: from sm_80 on."""
    return device.compute_capability is not None and device.compute_capability >= (8, 0)


def _as_trace(
    step: PredictedStep, passes: Sequence[str], out: Path | None, html: Path | None, rows: int, *, quiet: bool
) -> None:
    """The step as a trace: written, reported, changed by passes."""
    from daydream.answers import predict, replay_of
    from daydream.prediction.trace import predicted_trace
    from daydream.whatif import parse_pass

    requests = [parse_pass(text) for text in passes]
    trace = predicted_trace(step)
    before = replay_of(trace)
    prediction = predict(before, requests) if requests else None
    after = prediction.after.analysis(rows=rows) if prediction is not None else None
    analysis = before.analysis(rows=rows, device=step.device.name, batch=step.capture.batch)
    if prediction is not None and after is not None and not quiet:
        from daydream.report.tables import print_whatif

        print_whatif(analysis, after, prediction.applied)
    if out is not None:
        from daydream.trace.writer import write_trace

        write_trace(trace, out)
    if html is not None:
        write_html(html, analysis, after, prediction.applied if prediction is not None else ())


# Options


def chosen_devices(text: str) -> list[DeviceSpec]:
    """The boards of ``--device``; ``all`` are NVIDIA's GPUs.

    Raises:
        InputError: a board is unknown, or runs no CUDA.
    """
    from hal.catalog import device_names, load_device

    if text == "all":
        specs = [load_device(name) for name in device_names()]
        return [spec for spec in specs if spec.compute_capability is not None]
    specs = [load_device(name.strip()) for name in text.split(",") if name.strip()]
    if not specs:
        raise InputError("--device", "names no board", "write --device h100-sxm-80gb, or several with commas")
    for spec in specs:
        if spec.compute_capability is None:
            raise InputError("--device", f"{spec.name} runs no CUDA kernels", "name an NVIDIA board")
    return list({spec.name: spec for spec in specs}.values())


def batch_sizes(text: str | None) -> list[int | None]:
    """The sizes of ``--batch``, None where nothing was said.

    Raises:
        InputError: a part is no size and no range.

    >>> batch_sizes("1,8..64,10..30+10")
    [1, 8, 16, 32, 64, 10, 20, 30]
    """
    if text is None:
        return [None]
    sizes: dict[int | None, None] = {}
    for part in text.split(","):
        parsed = re.fullmatch(r"\s*(\d{1,9})(?:\.\.(\d{1,9})(?:\+(\d{1,9}))?)?\s*", part)
        if parsed is None or int(parsed[1]) == 0 or parsed[3] == "0":
            raise InputError("--batch", f"{part.strip()!r} is no batch size", "write 8, 1,2,4, 8..64, or 8..64+8")
        size, last, added = int(parsed[1]), int(parsed[2] or parsed[1]), int(parsed[3] or 0)
        while size <= last:
            sizes[size] = None
            size = size + added if added else 2 * size
            if len(sizes) > MOST_ANSWERS:
                raise InputError("--batch", f"{part.strip()!r} are too many sizes", f"ask for {MOST_ANSWERS} at most")
    if not sizes:
        raise InputError("--batch", f"{text!r} is an empty range", "write the smaller size first")
    return list(sizes)


def hourly_prices(texts: Sequence[str], devices: Sequence[DeviceSpec]) -> dict[str, float]:
    """Prices of an hour by board, from ``--price h100=2.5``.

    Raises:
        InputError: a part names no asked board, or no amount.
    """
    from hal.catalog import load_device

    prices = {}
    for text in (part for each in texts for part in each.split(",")):
        name, equals, amount = text.partition("=")
        if not equals or not re.fullmatch(r"\s*\d{1,9}(\.\d{1,9})?\s*", amount) or float(amount) == 0:
            raise InputError("--price", f"{text!r} is no price", "write --price h100=2.5")
        board = load_device(name.strip()).name
        if board not in {spec.name for spec in devices}:
            raise InputError("--price", f"{board} is not asked for", f"asked for: {listed([d.name for d in devices])}")
        prices[board] = float(amount)
    return prices
