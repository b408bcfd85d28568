"""``daydream sweep``: every board, batch and variant, what fits, and the best of each board."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daydream.cli import main
from daydream.command.sweep import SweepRow, Variant, with_best

pytestmark = pytest.mark.usefixtures("pytorch")

#: Weights of 2 GB, inputs of 512 KB a sample: the board's 16 GiB end between 1,024 and 32,768 samples.
NETWORK = """
import torch
from torch import nn

def network(batch=4):
    layers = [nn.Linear(1 << 17, 4096), nn.ReLU(), nn.Linear(4096, 64)]
    return nn.Sequential(*layers), torch.empty(batch, 1 << 17)

def small(batch=4):
    body = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = body
        def forward(self, x):
            for each in self.body:
                x = torch.relu(each(x))
            return x
    return Net(), torch.empty(batch, 64)
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["sweep", *arguments], catch_exceptions=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_best_is_the_fastest_that_fits(folder: Path) -> None:
    done = run("net.py:network", "--device", "t4,h100", "--batch", "1024,32768", "--mode", "inference", "--json")
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["device"], row["batch"], row["fits"], row["best"]) for row in rows] == [
        ("t4", 1024, True, True), ("t4", 32768, False, False),
        ("h100-sxm-80gb", 1024, True, False), ("h100-sxm-80gb", 32768, True, True),
    ]  # fmt: skip
    for row in rows:
        assert row["samples_per_second"] == pytest.approx(row["batch"] / row["step_seconds"], rel=1e-5)
        inputs, weights = 4 * row["batch"] << 17, 4 * 4096 << 17
        assert weights + inputs < row["reserved_bytes"] < row["device_bytes"]
    assert "daydream: 2 of 2 steps" in done.stderr


def test_variants_are_combined_and_passes_come_last(folder: Path) -> None:
    passes = ("--pass", "cuda-graphs", "--pass", "fused-optimizer then cuda-graphs")
    done = run(
        "net.py:small", "--device", "v100", "--dtype", "float32,amp", "--checkpoint", "none,full", *passes, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    plain = [("float32", "none"), ("float32", "full"), ("amp", "none"), ("amp", "full")]
    changes = [[], ["cuda-graphs"], ["fused-optimizer", "cuda-graphs"]]
    assert [((row["dtype"], row["checkpoint"]), row["passes"]) for row in rows] == [
        (each, change) for change in changes for each in plain
    ]
    seconds = [row["step_seconds"] for row in rows]
    # A step of small kernels is the host's, which a graph relieves; casts and a second forward pass burden it.
    assert seconds[4] < 0.5 * seconds[0] and seconds[0] < seconds[1] and seconds[0] < seconds[2]
    assert [row["best"] for row in rows].count(True) == 1


def test_the_table_names_variants_and_what_fits(folder: Path) -> None:
    done = run("net.py:network", "--device", "t4", "--batch", "32768", "--channels-last", "--mode", "inference")
    assert done.exit_code == 0, done.output
    assert "float32, channels last" in done.stdout and "nothing fits on t4" in done.stdout
    assert "net.py:network, inference" in done.stdout


def test_ties_have_one_best() -> None:
    variant = Variant(dtype="amp", checkpoint="none", channels_last=True)
    rows = [
        SweepRow(variant=variant, device="t4", batch=2, seconds=0.1, reserved=1, on_device=2, fits=fits)
        for fits in (False, True, True)
    ]
    assert rows[0].pace == 20 and variant.title == "amp, channels last"
    assert [each.best for each in with_best(rows, ["t4"], [variant])] == [False, True, False]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dtype", "int8"), "--dtype: 'int8'"),
        (("--dtype", "amp,,float32"), "--dtype"),
        (("--checkpoint", ""), "--checkpoint"),
        (("--pass", "nonsense"), "--pass"),
        (("--pass", "amp then "), "--pass"),
        (("--batch", "0"), "--batch"),
        (("--batch", "1..900+1", "--dtype", "amp,float32"), "1800 answers"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    done = run("net.py:network", "--device", "t4", *arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr
