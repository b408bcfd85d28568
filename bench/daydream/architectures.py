"""Architectures of transformers, two layers each, captured in both modes: how many are answered, and why not others.

``python -m bench.daydream.architectures --every 3`` takes every third kind of model that transformers has a class for,
with the configuration that its class has by default but for the number of layers. Nothing is downloaded: a model
exists without weights.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.table import Table

from hal.support.errors import InputError
from hal.support.tables import new_table, print_line, print_table

#: Share of captures that have to be answered, and the longest median of an answer, in seconds.
ANSWERED_BAR, SECONDS_BAR = 0.95, 6.0

#: Lists of classes by task, the first that has a kind of model names its class.
TASKS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "IMAGE_CLASSIFICATION", "MASKED_LM",
    "OBJECT_DETECTION", "UNIVERSAL_SEGMENTATION", "SEMANTIC_SEGMENTATION", "AUDIO_CLASSIFICATION", "CTC",
    "DEPTH_ESTIMATION", "SEQUENCE_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION",
)  # fmt: skip

#: Fields of configurations that count layers.
LAYERS = frozenset({
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
    "num_decoder_layers", "depth", "num_layers_encoder", "speech_encoder_layers", "speech_decoder_layers",
    "encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_blocks_enc",
})  # fmt: skip

#: Fields of configurations that name the token of an image.
IMAGE_TOKENS = ("image_token_index", "image_token_id", "video_token_index", "video_token_id")

#: What models' data are taken for, in turn until a model runs: first nothing; and the board that prices.
ASSUMED, BOARD = ((), ("nonzero=0.1", "item=0"), ("nonzero=0.5", "item=1")), "h100-sxm-80gb"

#: Samples of a step: statistics of a batch want two.
BATCH = 2


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An architecture in a mode.

    Attributes:
        kind: transformers' name of the kind of model.
        class_name: of the model.
        mode: ``training`` or ``inference``.
        seconds: that the answer took.
        milliseconds: of the predicted step; 0 where there is none.
        reason: why there is no answer; empty where there is one.
        assumed: whether values of tensors had to be supposed.
    """

    kind: str
    class_name: str
    mode: str
    seconds: float
    milliseconds: float = 0.0
    reason: str = ""
    assumed: bool = False


def kinds() -> dict[str, str]:
    """Kinds of models with a class for a task, and that class: what a configuration's ``architectures`` may name.

    Parts of models, such as the encoder of images in a model of texts, are left out.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    tables = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS]
    return {kind: name for kind in sorted(CONFIG_MAPPING) if (name := _class_of(kind, tables)) is not None}


def _class_of(kind: str, tables: Sequence[Mapping[str, Any]]) -> str | None:
    """The first class of a kind that has the kind's own configuration."""
    import transformers
    from transformers import CONFIG_MAPPING

    for table in tables:
        names = table.get(kind, ())
        for name in (names,) if isinstance(names, str) else names:
            builder = getattr(transformers, name, None)
            if getattr(builder, "config_class", None) is CONFIG_MAPPING[kind]:
                return name
    return None


def configurations(kind: str, class_name: str) -> list[dict[str, Any]]:
    """Configurations that make a model: that with two layers, with four, and the one that a kind has by default.

    Empty where transformers wants what only checkpoints have.
    """
    import torch
    import transformers
    from transformers import CONFIG_MAPPING

    try:
        data: dict[str, Any] = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
    except Exception:
        return []
    made = []
    for each in (_shortened(data, 2), _shortened(data, 4), data):
        try:
            with torch.device("meta"):
                getattr(transformers, class_name)._from_config(CONFIG_MAPPING[kind].from_dict(dict(each)))
        except Exception:
            continue
        made.append(each | {"architectures": [class_name], "model_type": kind})
    return made


def _shortened(data: dict[str, Any], most: int) -> dict[str, Any]:
    """The configuration with ``most`` layers wherever it counts more, also in parts of it.

    Tokens that stand for images, which checkpoints name, are those of number 1 where no default names them.
    """
    before = max((data[name] for name in LAYERS if isinstance(data.get(name), int)), default=0)
    out: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, dict):
            out[name] = _shortened(value, most)
        elif name in LAYERS and isinstance(value, int):
            out[name] = min(value, most)
        elif isinstance(value, list) and before > most and len(value) == before:
            # Layers of two kinds where there are several.
            kinds_of_layers = [value.index(each) for each in dict.fromkeys(map(str, value)) if each in value]
            picked = kinds_of_layers[:2] * (most // 2) if len(kinds_of_layers) > 1 else range(most)
            out[name] = [value[place] for place in sorted(picked)]
        elif name in IMAGE_TOKENS and value is None:
            out[name] = 1
        else:
            out[name] = value
    return out


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise InputError("capture", f"takes more than {seconds} s")

    usual = signal.signal(signal.SIGALRM, stop)
    # Once more every second: what is raised while an object is deleted is lost.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)


def answer(kind: str, data: Mapping[str, Any], mode: str, folder: Path, limit: int) -> Answer:
    """The predicted step of an architecture by the first of :data:`ASSUMED` that has one."""
    path, begin = folder / "config.json", time.perf_counter()
    path.write_text(json.dumps(data), "utf-8")
    milliseconds, reason, assumed = 0.0, "", False
    for assume in ASSUMED:
        milliseconds, reason = _milliseconds(path, mode, assume, limit)
        assumed = bool(assume)
        if not reason:
            break
    return Answer(
        kind=kind, class_name=data["architectures"][0], mode=mode, seconds=time.perf_counter() - begin, reason=reason,
        assumed=assumed, milliseconds=milliseconds,
    )  # fmt: skip


def _milliseconds(path: Path, mode: str, assume: tuple[str, ...], limit: int) -> tuple[float, str]:
    """The predicted step, or why there is none."""
    from daydream.capture.options import CaptureOptions
    from daydream.capture.sources import captured
    from daydream.prediction.step import predicted
    from hal.catalog import load_device

    try:
        with _at_most(limit):
            step = captured(f"hf:{path}", CaptureOptions(mode=mode, batch=BATCH, assume=assume))
            return predicted(step, [load_device(BOARD)])[0].step_seconds * 1e3, ""
    except InputError as error:
        return 0.0, str(error).replace(f"hf:{path}", "").strip(": ")
    except Exception as error:
        # One architecture must not end the count.
        return 0.0, f"{type(error).__name__}: {error}"[:200]


def tables(answers: Sequence[Answer]) -> list[Table]:
    """Counts by mode, and the reasons of what has no answer."""
    numbers = ("captures", "answered", "share", "asked", "with values supposed", "median s", "asked s")
    counts = new_table(("mode",), numbers, title="Architectures of transformers")
    for mode in dict.fromkeys(each.mode for each in answers):
        mine = [each for each in answers if each.mode == mode]
        good = [each for each in mine if not each.reason]
        median = statistics.median([each.seconds for each in good] or [0.0])
        figures = (str(len(mine)), str(len(good)), f"{len(good) / len(mine):.1%}", f"{ANSWERED_BAR:.0%}")
        supposed = str(sum(each.assumed for each in good))
        counts.add_row(mode, *figures, supposed, f"{median:.1f}", f"{SECONDS_BAR:g}")
    reasons = new_table(("kind", "mode", "reason"), title="Without an answer")
    for each in answers:
        if each.reason:
            reasons.add_row(each.kind, each.mode, each.reason[:150])
    return [counts, reasons]


@click.command()
@click.option("--every", type=click.IntRange(1), default=3, show_default=True, help="Every so many kinds of models.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="The first of them.")
@click.option("--kind", "some", multiple=True, help="These kinds alone.")
@click.option("--mode", type=click.Choice(["training", "inference"]), multiple=True, help="Of a step; both by default.")
@click.option("--limit", type=click.IntRange(1), default=60, show_default=True, help="Seconds of an answer at most.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="A file of all answers, a line of JSON each."
)
def main(every: int, first: int, some: tuple[str, ...], mode: tuple[str, ...], limit: int, out: Path | None) -> None:
    """Capture architectures of transformers, and count the answers."""
    from daydream.capture.models.torchvision_operators import import_torchvision

    import_torchvision()
    classes = kinds()
    chosen = [kind for kind in some if kind in classes] or list(classes)[first::every]
    answers = []
    unmade = []
    with TemporaryDirectory() as folder:
        for kind in chosen:
            made = configurations(kind, classes[kind])
            if not made:
                unmade.append(kind)
            for each in (mode or ("inference", "training")) if made else ():
                answers.append(answer(kind, made[0], each, Path(folder), limit))
                for longer in made[1:]:
                    # Two layers are not always enough for those of a model's parts that take some of them.
                    if answers[-1].reason:
                        answers[-1] = answer(kind, longer, each, Path(folder), limit)
                if out is not None:
                    with out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(answers[-1])) + "\n")
                print_line(f"{kind} {each}: {answers[-1].reason or f'{answers[-1].seconds:.1f} s'}")
    if unmade:
        print_line(f"whose default configuration makes no model of transformers: {', '.join(unmade)}")
    for view in tables(answers):
        print_table(view)
    share = Counter(not each.reason for each in answers)[True] / max(len(answers), 1)
    sys.exit(0 if share >= ANSWERED_BAR else 1)


if __name__ == "__main__":
    main()
