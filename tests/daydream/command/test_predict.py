"""``daydream predict`` from the outside: a model of one's own on boards, as JSON, as a trace, and as operators."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daydream.cli import main

pytest.importorskip("torch")

NETWORK = """
import torch
from torch import nn

def network(batch=4):
    print("built")
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    return model, torch.empty(batch, 64), lambda result: result.sum()

def nonsense():
    return 42

def broken():
    raise ValueError("no such thing")

def by_data():
    class Net(nn.Module):
        def forward(self, x):
            return x[x.sum() > 0]
    return Net(), torch.empty(2, 3)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["predict", *arguments], catch_exceptions=False)


def test_json_has_an_object_per_board_and_batch(folder: Path) -> None:
    done = run("net.py:network", "--device", "v100,h100", "--batch", "4,8", "--json", "--price", "h100=2")
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["device"], each["batch"]) for each in records] == [
        ("v100-sxm2-16gb", 4), ("v100-sxm2-16gb", 8), ("h100-sxm-80gb", 4), ("h100-sxm-80gb", 8),
    ]  # fmt: skip
    for each in records:
        phases = each["forward_seconds"] + each["backward_seconds"] + each["optimizer_seconds"]
        assert phases == pytest.approx(each["step_seconds"], abs=2e-9)
        assert sum(each["priced_by"].values()) == pytest.approx(1, abs=1e-5)
        # Forward and the gradients of weights for both layers, the gradient of the data for the second.
        assert each["model_flops"] == 2 * each["batch"] * (2 * 64 * 256 + 3 * 256 * 10)
        assert each["bound"] == "host"
        assert each["memory"]["fits"] and each["memory"]["reserved_bytes"] >= each["memory"]["allocated_bytes"]
    assert "samples_per_currency_unit" in records[2] and "samples_per_currency_unit" not in records[0]
    assert "built" not in done.stdout


def test_one_board_tells_models_operators_modules_and_memory(folder: Path) -> None:
    done = run("net.py:network", "--device", "a100", "--mode", "inference")
    assert done.exit_code == 0, done.output
    for text in ("inference in float32", "Priced by", "matrix products", "addmm", "Memory at the peak"):
        assert text in done.stdout


def test_the_step_is_a_trace_that_other_commands_read(folder: Path) -> None:
    done = run("net.py:network", "--device", "a100", "--batch", "512", "--json", "--out", "step.json.gz")
    assert done.exit_code == 0, done.output
    predicted = json.loads(done.stdout)["step_seconds"]
    again = CliRunner().invoke(main, ["simulate", "step.json.gz", "--json"])
    record = json.loads(again.stdout)
    assert record["steps"][0]["simulated_seconds"] == pytest.approx(predicted, abs=2e-8)
    assert record["steps"][0]["measured_seconds"] is None and record["warnings"] == []
    changed = CliRunner().invoke(main, ["whatif", "step.json.gz", "--json", "--pass", "cuda-graphs"])
    assert json.loads(changed.stdout)["predicted_seconds"] < predicted
    written = CliRunner().invoke(main, ["operators", "step.json.gz", "--out", "ops.json"])
    assert written.exit_code == 0, written.output
    operators = json.loads((folder / "ops.json").read_text())
    products = [(each["m"], each["n"], each["k"]) for each in operators if each["op"] == "matmul"]
    assert sorted(products) == sorted([(512, 256, 64), (512, 10, 256), (512, 256, 10), (10, 256, 512), (256, 64, 512)])
    assert len({json.dumps(each) for each in operators}) == len(operators)


def test_passes_and_reports_go_with_one_step(folder: Path) -> None:
    done = run("net.py:network", "--device", "a100", "--pass", "cuda-graphs", "--html", "step.html")
    assert done.exit_code == 0, done.output
    assert "cuda-graphs" in done.stdout
    assert "never measured" in (folder / "step.html").read_text()


@pytest.mark.slow
def test_a_picture_is_drawn(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run("net.py:network", "--device", "a100,v100", "--plot", "steps.png")
    assert done.exit_code == 0, done.output
    assert (folder / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_the_largest_batch_fits_and_twice_as_much_does_not(folder: Path) -> None:
    (folder / "wide.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def network(batch=1):\n"
        "    return nn.Sequential(nn.Linear(1 << 20, 16), nn.ReLU()), torch.empty(batch, 1 << 20)\n"
    )
    done = run("wide.py:network", "--device", "t4", "--largest-batch", "--mode", "inference", "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["memory"]["fits"]
    twice = run(
        "wide.py:network", "--device", "t4", "--mode", "inference", "--json", "--batch", str(2 * record["batch"])
    )
    assert not json.loads(twice.stdout)["memory"]["fits"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing.py:f", "--device", "v100"), "nothing.py"),
        (("net.py:nonsense", "--device", "v100"), "nonsense"),
        (("net.py:broken", "--device", "v100"), "ValueError: no such thing"),
        (("net.py:by_data", "--device", "v100"), "net.py"),
        (("net.py:network", "--device", "nowhere"), "nowhere"),
        (("net.py:network", "--device", "v100,t4", "--out", "x.json"), "--out"),
        (("net.py:network", "--device", "v100", "--out", "x.txt"), "--out"),
        (("net.py:network", "--device", "v100", "--plot", "x.txt"), "--plot"),
        (("net.py:network", "--device", "v100", "--batch", "8", "--largest-batch"), "--largest-batch"),
        (("net.py:network", "--device", "v100", "--host", "486dx"), "--host"),
        (("timm:", "--device", "v100"), "timm:"),
        (("hf:missing.json", "--device", "v100"), "missing.json"),
        (("onnx:net.py", "--device", "v100"), "net.py"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    lines = [line for line in done.stderr.splitlines() if line != "built"]
    assert len(lines) == 1 and said in lines[0], done.stderr
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == ["net.py"]
