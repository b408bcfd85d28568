"""``daydream sweep``: what fits on which board, at which speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import click

from daydream.command.engines import ENGINE_OPTIONS, answers
from daydream.command.outputs import print_json, with_options
from daydream.command.predict import MOST_ANSWERS, STEP_OPTIONS, batch_sizes, chosen_devices, predicted_steps
from hal.support.errors import InputError, listed

if TYPE_CHECKING:
    from daydream.prediction.step import PredictedStep
    from daydream.whatif import PassRequest

#: What stands between passes of one variant: names, files and values may hold every other sign.
_THEN = " then "

#: What of a variant a step is captured with.
_STEP = ("dtype", "checkpoint", "channels_last")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Options of a step that a sweep varies.

    Attributes:
        dtype: ``float32``, ``bfloat16``, ``float16`` or ``amp``.
        checkpoint: ``none``, ``full``, or a pattern of modules' paths.
        channels_last: whether images lie with their channels last.
        passes: what-if passes, applied one after another.
    """

    dtype: str
    checkpoint: str
    channels_last: bool
    passes: tuple[PassRequest, ...] = ()

    @property
    def title(self) -> str:
        """In words: ``amp, checkpoint full, ddp:workers=8``."""
        parts = [self.dtype]
        parts += [] if self.checkpoint == "none" else [f"checkpoint {self.checkpoint}"]
        parts += ["channels last"] if self.channels_last else []
        return ", ".join([*parts, *(request.text for request in self.passes)])


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """A board, a batch and a variant.

    Attributes:
        variant: how the step is run.
        device: the board's name.
        batch: samples; None where that is unknown.
        seconds: of a step.
        reserved: bytes of PyTorch's allocator at their peak.
        on_device: bytes that nvidia-smi would show.
        fits: whether the board has them.
        best: whether nothing that fits on this board trains faster.
    """

    variant: Variant
    device: str
    batch: int | None
    seconds: float
    reserved: int
    on_device: int
    fits: bool
    best: bool = False

    @property
    def pace(self) -> float:
        """Samples per second, steps where the batch is unknown."""
        return (self.batch or 1) / self.seconds if self.seconds else 0.0

    def record(self, model: str) -> dict[str, Any]:
        """As JSON."""
        return {
            "model": model,
            "device": self.device,
            "batch": self.batch,
            "dtype": self.variant.dtype,
            "checkpoint": self.variant.checkpoint,
            "channels_last": self.variant.channels_last,
            "passes": _texts(self.variant),
            "step_seconds": round(self.seconds, 9),
            "samples_per_second": float(f"{self.pace:.6g}"),
            "reserved_bytes": self.reserved,
            "device_bytes": self.on_device,
            "fits": self.fits,
            "best": self.best,
        }


@click.command("sweep")
@with_options(
    click.option("--device", required=True, metavar="NAME,...|all", help="Boards, or all of NVIDIA's."),
    click.option("--batch", default=None, metavar="N,N|A..B", help="Samples of a step; A..B doubles, A..B+S adds."),
    click.option(
        "--dtype",
        "dtypes",
        default="float32",
        show_default=True,
        metavar="TYPE,...",
        help="float32, bfloat16, float16, amp: each of those named.",
    ),
    click.option(
        "--checkpoint",
        "checkpoints",
        default="none",
        show_default=True,
        metavar="none|full|MODULE,...",
        help="Recomputed in the backward pass: each of those named.",
    ),
    click.option("--channels-last/--no-channels-last", default=False, help="Every variant as NHWC, too."),
    click.option(
        "--pass",
        "passes",
        multiple=True,
        metavar="'NAME[:KEY=VALUE][ then ...]'",
        help="Every variant after these changes, too (daydream passes).",
    ),
    *STEP_OPTIONS,
    *ENGINE_OPTIONS,
    click.option("--json/--no-json", "as_json", default=False, help="A JSON object per line of the table."),
    click.argument("model"),
)
def sweep_command(
    *,
    model: str,
    device: str,
    batch: str | None,
    dtypes: str,
    checkpoints: str,
    channels_last: bool,
    passes: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Tell which batches of MODEL fit on which boards, how fast they are, and which is best.

    MODEL and options are those of daydream predict. Types, checkpoints, layouts and passes are combined.
    """
    devices, batches = chosen_devices(device), batch_sizes(batch)
    variants = _variants(dtypes, checkpoints, channels_last, passes)
    if len(devices) * len(batches) * len(variants) > MOST_ANSWERS:
        count = len(devices) * len(batches) * len(variants)
        raise InputError("daydream sweep", f"{count} answers", f"ask for {MOST_ANSWERS} at most")
    swept: list[SweepRow] = []
    assumed: dict[str, None] = {}
    engine = {name: options.pop(name) for name in ("jobs", "resume")}
    unchanged = [variant for variant in variants if not variant.passes]
    parts = [
        {
            "model": model, "device": device, "batch": size, "options": options,
            "variant": {name: getattr(variant, name) for name in _STEP},
            "passes": [_texts(other) for other in variants if replace(other, passes=()) == variant],
        }
        for variant, size in product(unchanged, batches)
    ]  # fmt: skip
    echo = partial(click.echo, err=True)
    for answer in answers(sweep_part, parts, progress=lambda words: echo(f"daydream: {words} steps"), **engine):
        swept += [_row_of(record) for record in answer["rows"]]
        assumed.update(dict.fromkeys(answer["assumed"]))
    rows = with_best(swept, [spec.name for spec in devices], variants)
    if as_json:
        for row in rows:
            print_json(row.record(model))
    else:
        _print(model, options["mode"], rows, list(assumed))


def _variants(dtypes: str, checkpoints: str, channels_last: bool, passes: Sequence[str]) -> list[Variant]:
    """Every combination, those without passes first.

    Raises:
        InputError: a type is unknown, or a pass.
    """
    from daydream.capture.options import DTYPES
    from daydream.whatif import parse_pass

    chosen = _parts("--dtype", dtypes)
    unknown = [dtype for dtype in chosen if dtype not in DTYPES]
    if unknown:
        raise InputError("--dtype", f"{unknown[0]!r} is no type", f"known: {listed(DTYPES)}")
    changes = [tuple(parse_pass(each.strip()) for each in text.split(_THEN)) for text in passes]
    layouts = (False, True) if channels_last else (False,)
    return [
        Variant(dtype=dtype, checkpoint=checkpoint, channels_last=layout, passes=change)
        for change in [(), *changes]
        for dtype, checkpoint, layout in product(chosen, _parts("--checkpoint", checkpoints), layouts)
    ]


def _parts(option: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(option, f"{text!r} has an empty part", "put one comma between two")
    return list(dict.fromkeys(parts))


def _texts(variant: Variant) -> list[str]:
    """The passes of a variant as they were written."""
    return [request.text for request in variant.passes]


def sweep_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """One step on every board under every list of passes: rows and what was assumed, as JSON."""
    from daydream.whatif import parse_pass

    unchanged = Variant(**part["variant"])
    variants = [replace(unchanged, passes=tuple(map(parse_pass, texts))) for texts in part["passes"]]
    options = {**part["options"], **part["variant"]}
    steps = predicted_steps(part["model"], chosen_devices(part["device"]), [part["batch"]], options)
    rows = [_row(step, variant) for step in steps for variant in variants]
    names = ("device", "batch", "seconds", "reserved", "on_device", "fits")
    records = [
        {name: getattr(row, name) for name in names} | {"variant": part["variant"] | {"passes": _texts(row.variant)}}
        for row in rows
    ]
    return {"rows": records, "assumed": list(dict.fromkeys(each for step in steps for each in step.capture.assumed))}


def _row_of(record: Mapping[str, Any]) -> SweepRow:
    """A row from its record."""
    from daydream.whatif import parse_pass

    variant = dict(record["variant"])
    passes = tuple(map(parse_pass, variant.pop("passes")))
    return SweepRow(**{**record, "variant": Variant(**variant, passes=passes)})


def _row(step: PredictedStep, variant: Variant) -> SweepRow:
    seconds, gained = step.step_seconds, 0
    if variant.passes:
        seconds, gained = _after(step, variant.passes)
    memory = step.memory
    capacity = step.device.dram.capacity_bytes
    return SweepRow(
        variant=variant,
        device=step.device.name,
        batch=step.capture.batch,
        seconds=seconds,
        reserved=memory.reserved + gained,
        on_device=memory.on_device + gained,
        fits=capacity is None or memory.on_device + gained <= capacity,
    )


def _after(step: PredictedStep, passes: Sequence[PassRequest]) -> tuple[float, int]:
    """Seconds of a step after passes, and the bytes that they say its peak gains."""
    from daydream.answers import predict, replay_of
    from daydream.prediction.trace import predicted_trace

    prediction = predict(replay_of(predicted_trace(step)), passes)
    memory_changes = [applied.memory_bytes or {} for applied in prediction.applied]
    return float(prediction.after.timeline.step_us[0]) * 1e-6, round(sum(sum(each.values()) for each in memory_changes))


def with_best(rows: Sequence[SweepRow], devices: Sequence[str], variants: Sequence[Variant]) -> list[SweepRow]:
    """Rows by board, variant and batch; on each board that of the best pace among those that fit is marked."""
    answer = []
    for device in devices:
        of_board = [row for variant in variants for row in rows if (row.device, row.variant) == (device, variant)]
        best = max((row for row in of_board if row.fits), key=lambda row: row.pace, default=None)
        answer += [replace(row, best=row is best) for row in of_board]
    return answer


def _print(model: str, mode: str, rows: Sequence[SweepRow], assumed: Sequence[str]) -> None:
    from rich.text import Text

    from daydream.report.tables import table
    from hal.support.tables import print_line, print_table

    columns = ("device", "variant", "batch", "step ms", "samples/s", "reserved GB", "device GB", "fits", "best")
    view = table(f"{model}, {mode}", *columns)
    view.columns[1].justify = "left"
    for row in rows:
        pace = f"{row.pace:,.0f}" if row.pace >= 100 else f"{row.pace:.3g}"
        cells = ["-" if row.batch is None else str(row.batch), f"{1e3 * row.seconds:.2f}", pace]
        cells += [f"{row.reserved / 1e9:.2f}", f"{row.on_device / 1e9:.2f}", "yes" if row.fits else "no"]
        view.add_row(row.device, Text(row.variant.title), *cells, "best" if row.best else "")
    print_table(view, drop=("reserved GB", "device GB", "samples/s"))
    for device in dict.fromkeys(row.device for row in rows):
        if not any(row.fits for row in rows if row.device == device):
            print_line(f"nothing fits on {device}")
    for sentence in assumed:
        print_line(f"assumed: {sentence}")
