"""Steps of NeMo's jobs as ``daydream plan`` is asked for them: by a configuration of transformers and options alone.

Rows say which model, how it was divided and in which numbers; what else its recipes set is the same for all rows of a
source, but for who carries tokens to experts, which recipes name. Nothing was chosen on these rows.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner
from rich.table import Table

from bench.accuracy.steps.option_models import AUTOMODEL_LORA, AUTOMODEL_RECIPES, LORA, MODELS, grok
from hal.support.tables import new_table

#: Largest mean errors asked for: of dense models in 16 and in 8 bits, and of models with experts.
BARS = {"BF16": 0.12, "FP8": 0.15, "experts": 0.20}

#: Share of the rows that must be said by options.
SAID = 0.90

#: Precision by the sources' words: NeMo's FP8 scales whole tensors.
PRECISIONS = {
    "BF16": "16-bit", "FP8": "fp8-tensorwise", "FP8-CS": "fp8-tensorwise", "FP8-CS (FP8-MX)": "fp8-tensorwise",
    "MXFP8": "mxfp8", "FP8-MX": "mxfp8", "NVFP4": "nvfp4",
}  # fmt: skip

#: NeMo tunes on SQuAD's questions, packed: 120 words of text each in the mean (Rajpurkar et al. 2016), about 200 tokens
#: with question and answer.
PACKED = ("--packed", "200")

#: Precisions whose recipes of Megatron-Bridge keep weights in eight bits alone (``fp8_param_gather``).
NARROW = ("fp8-tensorwise", "mxfp8")

#: First release whose recipes in MXFP8 set ``moe_a2a_overlap``.
OVERLAPPED_RELEASE = "26.06"

#: Boards by the sources' words, with the node and how many of its boards jobs use.
PLACES = {
    "h100": ("h100-sxm-80gb", ()), "DGX-H100": ("h100-sxm-80gb", ()), "DGX-B200": ("b200", ()),
    "DGX-B300": ("b300", ()), "gb200": ("gb200", ("--boards", "64")), "DGX-GB200": ("gb200", ("--boards", "64")),
    "DGX-GB300": ("gb300", ("--boards", "64")),
}  # fmt: skip

#: What recipes of a source have in common. Megatron's fuse updates and blocks by hand, take cuDNN's attention, and
#: exchange within layers next to products; AutoModel's modules are fused by Liger or Transformer Engine.
_COMMON = {
    "megatron": ("--optimizer-kernels", "fused", "--compile", "--attention", "cudnn", "--expert-kernels", "cublas",
        "--overlap-tensor"),
    "automodel": ("--optimizer-kernels", "foreach", "--compile", "--attention", "flash2"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class JobRow:
    """A measured row in the words of the command.

    Attributes:
        source: where it was published.
        model: that ran.
        kind: ``BF16``, ``FP8`` or ``experts``: which bar judges it.
        board: that it ran on.
        options: of the command; empty where it cannot be said, of which ``why`` tells.
        seconds: of a step.
    """

    source: str
    model: str
    kind: str
    board: str
    options: tuple[str, ...]
    seconds: float
    why: str = ""


def dgxc_rows(path: Path, folder: Path) -> Iterator[JobRow]:
    """Rows of dgxc-benchmarking."""
    for row in _lines(path):
        name, boards, tuned = row["recipe"], int(row["gpus"]), "Finetuning" in row["caption"] or "ft_" in row["recipe"]
        base = partial(JobRow, source="dgxc", board=row["board"], seconds=float(row["step_seconds"]))
        if "grok" in name:
            yield _grok(base, row, boards, folder)
            continue
        model = "nemotron-15b" if "nemotron" in name else "llama-8b"
        sizes = {
            "boards": boards, "tensor": _int(row["tp"]), "context": _int(row["cp"]), "pipeline": 1,
            "batch": _int(row["micro_batch"]), "sequence": 4096 if tuned or "nemotron" in name else 8192,
        }  # fmt: skip
        tokens = float(row["tokens_per_second"]) * float(row["step_seconds"])
        # Rates are rounded: samples are a multiple of the copies of the model.
        copies = boards // (sizes["tensor"] * sizes["context"]) * sizes["batch"]
        sizes["samples"] = copies * round(tokens / sizes["sequence"] / copies)
        lora = LORA if "LORA" in row["caption"] else ()
        more = (*lora, *PACKED) if tuned else lora
        options = _options(folder, model, row["board"], row["dtype"], sizes, more)
        yield base(model=f"{model}{', adapters' if lora else ''}", kind=row["dtype"], options=options)


def _grok(base: Any, row: Mapping[str, str], boards: int, folder: Path) -> JobRow:
    """Grok-1, whose rows of few boards are of fewer layers; how it was divided is on its recipe's page alone."""
    layout = grok(boards, row["board"])
    if layout is None:
        return base(model="grok-1", kind="experts", options=(), why="its page tells no division for so many boards")
    name, sizes = layout
    options = _options(folder, name, row["board"], row["dtype"], {"boards": boards, **sizes}, ())
    return base(model="grok-1", kind="experts", options=options)


def nemo_rows(path: Path, folder: Path) -> Iterator[JobRow]:
    """Rows of Megatron-Bridge and AutoModel."""
    for row in _lines(path):
        boards, sequence = int(row["gpus"]), int(float(row["sequence"]))
        name = row["model"].split(" (")[0].removesuffix(" 2-node")
        model = MODELS.get(name)
        samples = float(row["gbs"])
        seconds = float(row["step_seconds"] or samples * sequence / (float(row["tokens_per_second_gpu"]) * boards))
        kind = "experts" if _int(row["ep"]) > 1 or "OSS" in name else "BF16" if row["precision"] == "BF16" else "FP8"
        base = partial(JobRow, source=row["source"], model=name, kind=kind, board=row["system"], seconds=seconds)
        if model is None:
            yield base(options=(), why="layers of Mamba")
            continue
        sizes = {
            "boards": boards, "tensor": _int(row["tp"]), "context": _int(row["cp"]), "pipeline": _int(row["pp"]),
            "chunks": _int(row["vp"]), "expert": _int(row["ep"]), "batch": _int(row["mbs"]), "sequence": sequence,
            "samples": round(samples), "fsdp": _int(row["fsdp"] or "0", 0),
        }  # fmt: skip
        tuned = row["source"] == "bridge" and row["task"] != "pretrain"
        lora = (*_adapters(row, model), *(PACKED if tuned else ()))
        more = (*lora, *_carrying(row, sizes)) if sizes["expert"] > 1 else lora
        if PRECISIONS[row["precision"]] in NARROW:
            more = (*more, "--narrow")
        kind_of_source = "automodel" if row["source"] == "automodel" else "megatron"
        options = _options(folder, model, row["system"], row["precision"], sizes, more, kind_of_source)
        yield base(options=options)


def _adapters(row: Mapping[str, str], model: str) -> tuple[str, ...]:
    """Adapters as the recipes have them; AutoModel's on two nodes say how tensor ranks exchange, and recompute."""
    if row["task"] != "lora":
        return ()
    return (*AUTOMODEL_LORA, *AUTOMODEL_RECIPES.get(model, ())) if row["source"] == "automodel" else LORA


def _carrying(row: Mapping[str, str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """How tokens get to experts, as the recipes that NVIDIA publishes with the tables say.

    Megatron-Bridge's ``workload_base_configs`` name DeepEP's or its successor's kernels (``deepep``, ``hybridep``), or
    none: NCCL's all-to-all, which GPT-OSS takes in 16 bits unless its experts lie within a node of B300, and which jobs
    that drop tokens need. Recipes in MXFP8 carry tokens next to another micro-batch from release 26.06 on, as do those
    of DeepSeek-V3 whose experts lie in several nodes of B200.
    """
    if row["source"] == "automodel":
        return ("--dispatch", "deepep")
    is_oss, is_latest = "OSS" in row["model"], row["release"] >= OVERLAPPED_RELEASE
    within_node = row["system"] == "DGX-B300" and sizes["expert"] == 8
    if "tokendrop" in row["model"] or (is_oss and row["precision"] == "BF16" and not within_node):
        return ("--dispatch", "nccl")
    overlaps = row["precision"] == "MXFP8" and is_latest
    if overlaps or (row["system"] == "DGX-B200" and sizes["expert"] > 8):
        return ("--dispatch", "deepep", "--overlap-batches")
    return ("--dispatch", "deepep")


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def _int(text: str, default: int = 1) -> int:
    return int(float(text)) if text else default


def _options(
    folder: Path, model: str, board: str, numbers: str, sizes: Mapping[str, int], more: tuple[str, ...],
    source: str = "megatron",
) -> tuple[str, ...]:  # fmt: skip
    """The command's options of a job that divides a model so."""
    device, node = PLACES[board]
    tensor, pipeline, context = sizes["tensor"], sizes["pipeline"], sizes["context"]
    data = sizes["boards"] // (tensor * pipeline * context)
    chunks, expert = sizes.get("chunks", 1), sizes.get("expert", 1)
    options = [f"hf:{folder / model}.json", "--device", device, *node, "--precision", PRECISIONS[numbers]]
    options += ["--sequence", str(sizes["sequence"]), "--batch", str(sizes["batch"])]
    options += ["--global-batch", str(sizes["samples"]), "--data", str(data), "--tensor", str(tensor)]
    options += ["--pipeline", str(pipeline), "--context", str(context), "--expert", str(expert)]
    options += ["--shard", "fsdp" if sizes.get("fsdp", 0) > 1 else "zero1" if data * context > 1 else "none"]
    common = _COMMON[source]
    if tensor > 1 and source == "megatron":
        options += ["--sequence-parallel"]
    else:
        common = tuple(each for each in common if each != "--overlap-tensor")
    if pipeline > 1 and chunks > 1:
        options += ["--schedule", "interleaved", "--chunks", str(chunks)]
    return (*options, *more, *common, "--optimizer", "adamw", "--json")


def write_models(folder: Path) -> None:
    """Writes the configurations that rows name."""
    from bench.accuracy.steps.option_models import CONFIGURATIONS

    for name, configuration in CONFIGURATIONS.items():
        (folder / f"{name}.json").write_text(json.dumps(configuration), "utf-8")


def predictions(rows: Iterable[JobRow]) -> dict[tuple[str, ...], dict[str, Any] | str]:
    """Answers of the command by its options: a record, or the line that it refuses them with."""
    from daydream.cli import main

    known: dict[tuple[str, ...], dict[str, Any] | str] = {}
    for row in rows:
        if row.options and row.options not in known:
            said = CliRunner().invoke(main, ["plan", *row.options])
            known[row.options] = (
                json.loads(said.stdout) if said.exit_code == 0 else (said.stderr.strip() or repr(said.exception))
            )
    return known


def table(data: Path, out: Path) -> Iterable[Table]:
    """A row per source and kind; none where the data are missing."""
    del out
    jobs = data / "jobs"
    if not (jobs / "nemo.csv").is_file():
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder)
        rows = [*dgxc_rows(jobs / "dgxc.csv", folder), *nemo_rows(jobs / "nemo.csv", folder)]
        yield jobs_table(rows, predictions(rows))


def jobs_table(rows: list[JobRow], known: Mapping[tuple[str, ...], dict[str, Any] | str]) -> Table:
    """Errors by kind, source and board."""
    view = new_table(
        ("kind", "source", "board", "rows", "said by options", "asked", "fit", "bias", "mean error", "asked", "worst"),
        title="NeMo's jobs by a configuration and options alone: nothing chosen on these rows",
    )
    groups = [(kind, source, board) for kind in BARS for source, board in sorted({
        (row.source, row.board) for row in rows if row.kind == kind
    })]  # fmt: skip
    for kind in BARS:
        groups.append((kind, "all", "all"))
    for kind, source, board in groups:
        some = [
            row for row in rows if row.kind == kind and source in (row.source, "all") and board in (row.board, "all")
        ]
        records = [(row, known.get(row.options)) for row in some]
        said = [(row, record) for row, record in records if isinstance(record, dict)]
        errors = np.array([record["step_seconds"] / row.seconds - 1 for row, record in said])
        fits = sum(record["fits"] for _, record in said)
        figures = ("-", "-", "-") if not said else (
            f"{errors.mean():+.1%}", f"**{np.abs(errors).mean():.1%}**", f"{errors[np.abs(errors).argmax()]:+.0%}"
        )  # fmt: skip
        share = f"{len(said) / len(some):.0%}"
        view.add_row(
            kind, source, board, str(len(some)), share, f"{SAID:.0%}", f"{fits} of {len(said)}", figures[0], figures[1],
            f"{BARS[kind]:.0%}", figures[2],
        )  # fmt: skip
    return view
