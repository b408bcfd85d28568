"""Captured steps kept between runs: found again where nothing has changed, and only there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from daydream.capture import stored
from daydream.capture.captured import Capture, CapturedOperator, CapturedParameter, CapturedStorage
from daydream.capture.stored import StoredStep, key_of, known_or_captured
from daydream.graph.graph import Phase
from daydream.operators.inputs import Inputs, RecordedTensor
from hal.support.store import Store, cache_folder

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97,
}  # fmt: skip

#: A plan in a process of its own: its step, and whether PyTorch was imported.
PLAN = """
import sys
import zlib
from daydream.capture.options import CaptureOptions
from daydream.plan.source import planned_units

if __name__ == "__main__":
    options = CaptureOptions(sequence=int(sys.argv[1]))
    units = planned_units("hf:config.json", options, tensor=2, compiles=sys.argv[2] == "compiled")
    print("torch" in sys.modules, len(units.blocks), zlib.crc32(repr(units.capture).encode()))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ROLLER_CACHE", "1")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def step_of(title: str) -> StoredStep:
    tensor = RecordedTensor((2, 3), "float", (3, 1))
    operator = CapturedOperator(
        name="aten::mm", overload="default", inputs=Inputs((tensor, None), ("", "[1, 2]"), ((), (tensor,))),
        outputs=(tensor,), module=-1, phase=Phase.BACKWARD, read=(0,),
    )  # fmt: skip
    parameter = CapturedParameter(name="w", tensor=tensor, storage=0, trained=True)
    storages = (CapturedStorage(24, "parameter"),)
    return StoredStep(
        Capture(title=title, operators=(operator,), modules=(), parameters=(parameter,), storages=storages), 5
    )


def counted(step: StoredStep) -> tuple[list[int], Callable[[], StoredStep]]:
    calls: list[int] = []

    def make() -> StoredStep:
        calls.append(1)
        return step

    return calls, make


def test_a_step_is_captured_once(here: Path) -> None:
    calls, make = counted(step_of("a"))
    assert [known_or_captured("hf:config.json", "asked", make) for _ in range(3)] == [step_of("a")] * 3
    assert len(calls) == 1


@pytest.mark.parametrize(
    "changed",
    [
        ("hf:config.json", "otherwise"),
        ("hf:.", "asked"),
        ("timm:resnet18", "asked"),
    ],
)
def test_other_options_and_names_are_other_steps(here: Path, changed: tuple[str, str]) -> None:
    known_or_captured("hf:config.json", "asked", lambda: step_of("a"))
    assert known_or_captured(*changed, lambda: step_of("b")) == step_of("b")


def test_another_configuration_is_another_step(here: Path) -> None:
    known_or_captured("hf:config.json", "asked", lambda: step_of("a"))
    (here / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 128}))
    assert known_or_captured("hf:config.json", "asked", lambda: step_of("b")) == step_of("b")


def test_a_damaged_step_is_captured_again(here: Path) -> None:
    known_or_captured("hf:config.json", "asked", lambda: step_of("a"))
    key = key_of("hf:config.json", "asked")
    assert key is not None
    Store(cache_folder(stored.FOLDER)).write(key, b"\x93 no step")
    assert known_or_captured("hf:config.json", "asked", lambda: step_of("b")) == step_of("b")


@pytest.mark.parametrize("model", ["model.py:build", "model.py", "onnx:model.onnx", "hf:missing.json", "hf:", "none"])
def test_what_a_step_follows_from_must_be_known(here: Path, model: str) -> None:
    assert key_of(model, "asked") is None


def test_nothing_is_kept_without_a_cache(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLER_CACHE", "0")
    assert key_of("timm:resnet18", "asked") is None


@pytest.mark.parametrize("variable", ["HF_HOME", "TORCH_LOGS", "TRANSFORMERS_CACHE"])
def test_what_libraries_read_of_the_environment_counts(
    here: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    keys = []
    for value in ("a", "b"):
        monkeypatch.setenv(variable, value)
        stored._surroundings.cache_clear()
        keys.append(key_of("timm:resnet18", "asked"))
    stored._surroundings.cache_clear()
    assert keys[0] != keys[1] and None not in keys


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_known_plan_needs_no_pytorch_and_is_the_same(here: Path, how: str) -> None:
    def run(sequence: int) -> Any:
        command = [sys.executable, "-c", PLAN, str(sequence), how]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        return done.stdout.split()

    first, again, other = run(16), run(16), run(32)
    assert (first[0], again[0], other[0]) == ("True", "False", "True")
    assert first[1:] == again[1:] != other[1:]
    assert first[1] == "5"
