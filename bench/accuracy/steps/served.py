"""Servings as ``daydream serve`` predicts them, against those that engines' authors and users published.

``served_rows.csv`` has every row's source and settings. The host's time for an iteration and for a sequence was chosen
on every second row of them, among (0, 0.5 and 1 ms) and (0, 10 and 20 us); the other rows judge. Engines differ in what
their documentation says: whether they schedule while boards compute, whether a sequence reserves all of its pages, and
whose all-reduces run; runtimes in C++ of 2023 were measured without a server, so that their hosts count nothing. Pages
that do not say which H100 they ran on are left out.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.table import Table

from bench.accuracy.errors import Errors, asked
from daydream.serving.costs import Engine, IterationCosts, iteration_costs
from daydream.serving.parts import ServedModel, served_model
from daydream.serving.requests import drawn
from daydream.serving.scheduler import Host
from daydream.serving.served import Served, served
from hal.catalog import load_device
from hal.support.errors import InputError
from hal.support.tables import new_table

#: Largest mean error asked for, of throughput and of time per token.
BAR = 0.15

#: Chosen on every second row.
HOST = Host(iteration=1e-3, sequence=2e-5)

_ROWS = Path(__file__).with_name("served_rows.csv")
_MODELS = Path(__file__).with_name("served_models.json")
_OTHERS = Path(__file__).with_name("served_aiconfigurator.csv")

#: Classes of transformers by the kind of a model.
_CLASSES = {
    "llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip

#: Decoding steps that the last table shows: model, tensor ranks, precision; sequences and context of each.
_STEPS = (("llama-8b", 1, "16-bit"), ("llama-70b", 8, "16-bit"), ("mixtral-8x7b", 2, "16-bit"),
          ("deepseek-v3", 8, "fp8-block"))  # fmt: skip
_BATCHES, _CONTEXT = (1, 16, 128), 4096


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Traits of an engine: no server around its kernels, schedules ahead, reserves pages, NCCL's all-reduces alone."""

    bare: bool = False
    overlaps: bool = False
    reserves: bool = False
    nccl: bool = False


#: By how the name of an engine begins.
ENGINES: Mapping[str, Traits] = {
    "TensorRT-LLM 0": Traits(bare=True, reserves=True, nccl=True),
    "TensorRT-LLM 1": Traits(overlaps=True, reserves=True),
    "NIM": Traits(reserves=True),
    "SGLang": Traits(overlaps=True),
    "vLLM": Traits(),
    "lmdeploy 0.1": Traits(bare=True, nccl=True),
}


@cache
def parts(name: str) -> ServedModel:
    """A model of ``served_models.json``."""
    config = json.loads(_MODELS.read_text("utf-8"))[name]
    config |= {"architectures": [_CLASSES[config["model_type"]]], "max_position_embeddings": 1 << 17}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({"tie_word_embeddings": False, **config}), "utf-8")
        return served_model(f"hf:{path}")


@cache
def costs(model: str, device: str, engine: Engine) -> IterationCosts:
    """Costs of iterations of a model on a board."""
    return iteration_costs(parts(model), load_device(device), engine)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published serving, as its file has it."""

    text: Mapping[str, str]

    @property
    def traits(self) -> Traits:
        """Of its engine."""
        return next(each for name, each in ENGINES.items() if self.text["engine"].startswith(name))

    def predicted(self) -> Served:
        """The serving simulated.

        Raises:
            InputError: the board has no such kernels.
        """
        text, traits = self.text, self.traits
        engine = Engine(
            ranks=int(text["tensor"]), precision=text["precision"], cache=text["cache"],
            sequences=int(text["sequences"]), tokens=int(text["tokens"]), memory_share=float(text["memory_share"]),
            reduces="nccl" if traits.nccl else "auto",
        )  # fmt: skip
        requests = drawn(
            int(text["requests"]), rate=None, prompt=text["prompt"], output=text["output"], seed=0,
            concurrency=int(text["concurrency"] or 0),
        )  # fmt: skip
        host = Host() if traits.bare else HOST._replace(overlaps=traits.overlaps)
        return served(requests, costs(text["model"], text["device"], engine), host, reserves=traits.reserves)

    def token_seconds(self, answer: Served) -> float:
        """Time per token as the source has it: the median of all tokens (lmdeploy), else the mean of requests."""
        return answer.gap(50) if self.text["engine"].startswith("lmdeploy") else float(answer.tpot.mean())


def read_rows() -> list[Row]:
    """All published rows, in the order of the file."""
    with _ROWS.open(newline="", encoding="utf-8") as file:
        return [Row(text=each) for each in csv.DictReader(file)]


def table(data: Path, out: Path) -> Iterable[Table]:
    """Published servings, AIConfigurator's predictions, and decoding steps next to their rooflines."""
    rows = read_rows()
    answers: dict[int, Served] = {}
    for place, row in enumerate(rows):
        try:
            answers[place] = row.predicted()
        except InputError:
            continue
    view = new_table(
        (
            "engine",
            "rows",
            "tokens/s: chosen on",
            "held out",
            "asked",
            "time per token: chosen on",
            "held out",
            "asked",
        ),
        title="Servings published by others, predicted from the model's code: mean errors",
    )
    names = dict.fromkeys(row.text["engine"] for row in rows)
    for name in (*names, ""):
        places = [place for place in answers if name in ("", rows[place].text["engine"])]
        if places:
            view.add_row(name or "all", str(len(places)), *_errors(rows, answers, places, "throughput"),
                         *_errors(rows, answers, places, "tpot_ms"))  # fmt: skip
    if len(answers) < len(rows):
        view.add_row("not priced", str(len(rows) - len(answers)))
    yield view
    yield _others()
    yield _steps()


def _errors(
    rows: Sequence[Row], answers: Mapping[int, Served], places: Sequence[int], name: str
) -> tuple[str, str, str]:
    """Mean errors of the half that the host was chosen on, and of the other, with the bar."""
    cells = []
    for half in (0, 1):
        some = [place for place in places if place % 2 == half and rows[place].text[name]]
        measured = [float(rows[place].text[name]) for place in some]
        predicted = [
            answers[place].tokens_per_second
            if name == "throughput"
            else 1e3 * rows[place].token_seconds(answers[place])
            for place in some
        ]
        cells.append(f"{Errors.of(predicted, measured).mean} of {len(some)}" if some else "")
    return cells[0], cells[1], asked(BAR) if any(cells) else ""


def _others() -> Table:
    """Qwen3-32B in FP8 on four H200, 4,000 tokens in and 500 out: AIConfigurator's README and this model."""
    numbers = ("fp8-block", "fp8-tensorwise")
    view = new_table(
        ("setting",), ("tokens/s a user: AIConfigurator", *(name for each in numbers for name in (each, "difference"))),
        title="AIConfigurator's tables of measured kernels next to this model: Qwen3-32B on four H200",
    )  # fmt: skip
    with _OTHERS.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            theirs = float(row["tokens_per_second_user"])
            users = [_user(row["kind"], int(row["batch"]), each) for each in numbers]
            cells = [cell for user in users for cell in (f"{user:.0f}", f"{100 * (user / theirs - 1):+.0f} %")]
            kind = "decoding alone" if row["kind"] == "decode" else "prompts and decoding"
            view.add_row(f"{kind}, {row['batch']} sequences", f"{theirs:.0f}", *cells)
    return view


def _user(kind: str, batch: int, precision: str) -> float:
    """Tokens a second of a user in a setting of AIConfigurator's."""
    cost = costs("qwen3-32b", "h200", Engine(ranks=4, precision=precision, cache="fp8"))
    if kind == "decode":
        return 1 / cost.seconds(batch, 4250)
    requests = drawn(20 * batch, rate=None, prompt="4000", output="500", seed=0, concurrency=batch)
    return served(requests, cost, Host()).user_tokens_per_second


def _steps() -> Table:
    """Decoding steps of four models on three boards."""
    columns = [f"{batch} x {_CONTEXT}" for batch in _BATCHES]
    view = new_table(
        ("model", "boards"), tuple(name for each in columns for name in (each, "roofline")),
        title="Milliseconds of a decoding step by sequences and context, and the least that the boards allow",
    )  # fmt: skip
    for model, ranks, precision in _STEPS:
        for device in ("h100", "h200", "b200"):
            cost = costs(model, device, Engine(ranks=ranks, precision=precision))
            cells = []
            for batch in _BATCHES:
                seconds = (cost.seconds(batch, _CONTEXT), cost.roofline(batch, _CONTEXT))
                cells += [f"{1e3 * each:.2f}" for each in seconds]
            view.add_row(f"{model}, {precision}", f"{ranks} {cost.device.name}", *cells)
    return view
