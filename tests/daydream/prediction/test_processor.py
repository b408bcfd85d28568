"""A model on a processor by the backend, predicted from its code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daydream.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("pytorch")]

SOURCE = """
import torch

def small():
    layers = [torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(32 * 64, 10)), (torch.empty(4, 3, 8, 8),)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "small.py").write_text(SOURCE)
    return f"{tmp_path}/small.py:small"


def predict(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["predict", *arguments, "--device", "epyc-7763", "--compile=roller"])


def test_a_step_is_its_parts(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = predict(model, "--mode", "inference", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    parts = ("kernel_seconds", "library_seconds", "loop_seconds", "call_seconds")
    assert record["step_seconds"] == pytest.approx(sum(record[part] for part in parts), abs=1e-8)
    assert (record["products"], record["compiler"], record["device"]) == (2, "roller", "epyc-7763")
    assert 1e-6 < record["step_seconds"] < 1e-2
    result = predict(model, "--mode", "inference")
    assert "products and convolutions by kernels of ours" in result.stdout


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ((), "--mode: processors run inference alone"),
        (("--mode", "inference", "--dtype", "float16"), "--dtype: processors run float32 alone"),
        (("--mode", "inference", "--pass", "amp"), "--pass: is of steps on boards"),
        (("--mode", "inference", "--precision", "mxfp8"), "--precision: is of steps on boards"),
    ],
)
def test_what_boards_alone_have_is_refused(model: str, more: tuple[str, ...], line: str) -> None:
    result = predict(model, *more)
    assert result.exit_code == 2
    assert line in result.output


def test_a_compiler_that_compiles_nothing_is_refused(model: str) -> None:
    result = CliRunner().invoke(main, ["predict", model, "--device", "h100", "--compiler", "roller"])
    assert result.exit_code == 2
    assert "--compiler: nothing is compiled without --compile" in result.output
