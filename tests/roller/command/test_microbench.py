"""``roller microbench`` as a person meets it, on a modelled board and on a modelled CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hal.catalog import load_device
from hal.microbench import Measurement, QuantityResults, Settings, cpu, quantities
from hal.microbench.launcher import Launcher
from roller.cli import main
from roller.command import microbench as microbench_command
from tests.hal.microbench.fake_board import V100, FakeLauncher, Truth

QUICK = Settings(repeats=3, long_seconds=2.0)


def roller(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["microbench", *map(str, arguments)], prog_name="roller")


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLauncher:
    """A modelled V100 in place of every GPU."""
    launcher = FakeLauncher(Truth(gemm=13e12), V100)

    def opened(device: str) -> Launcher:
        return launcher

    monkeypatch.setattr(microbench_command, "open_launcher", opened)
    monkeypatch.setattr(quantities, "Settings", lambda: QUICK)
    monkeypatch.chdir(tmp_path)
    return launcher


def test_the_table_has_every_quantity(board: FakeLauncher) -> None:
    result = roller()
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Tesla V100-SXM2-16GB\n")
    for words in ("dram.add", "800 GB/s", "l2.latency", "140 ns", "wmma.float16-float32", "launch", "2.5 µs"):
        assert words in result.output
    assert "OUTSIDE" not in result.output


@pytest.mark.parametrize("name", ["board.toml", "board.json"])
def test_the_file_written_is_a_device(board: FakeLauncher, name: str) -> None:
    result = roller("--device", "cuda:0", "--out", name)
    assert result.exit_code == 0, result.output
    assert result.output.endswith(f"written to {name}\n")
    device = load_device(Path(name))
    assert device.dram.bandwidth_bytes_per_second == 800e9
    assert device.name == "tesla-v100-sxm2-16gb"
    assert [path.name for path in Path().iterdir()] == [name]


def test_two_boards_stand_side_by_side(board: FakeLauncher) -> None:
    result = roller("--compare", "v100")
    lines = {line.split()[0]: line.split() for line in result.output.splitlines() if line.strip()}
    assert lines["layers.dram.bandwidth_bytes_per_second"][1:] == ["800", "GB/s", "813", "GB/s", "0.98"]
    assert lines["unit_count"][1:] == ["80", "80", "1.00"]
    part = roller("--compare", "v100", "--only", "dram")
    assert "unit_count" not in part.output and "layers.dram.bandwidth_bytes_per_second" in part.output


def test_only_what_was_named_is_measured(board: FakeLauncher) -> None:
    result = roller("--only", "launch", "--only", "barrier", "--json")
    record = json.loads(result.output)
    assert {each["key"].split(".")[0] for each in record["measurements"]} == {"launch", "barrier"}
    assert record["spec"] is None and record["failures"] == {}
    assert record["measurements"][0]["samples"] == [pytest.approx(2.5e-6)] * 3


def test_json_holds_readings_device_and_ratios(board: FakeLauncher) -> None:
    record: dict[str, Any] = json.loads(roller("--json", "--compare", "a100").output)
    assert record["device"] == "Tesla V100-SXM2-16GB"
    assert record["spec"]["unit_count"] == 80
    assert record["compared"]["name"] == "a100-pcie-40gb"
    assert record["compared"]["ratios"]["unit_count"] == pytest.approx(80 / 108)


def test_a_failure_is_reported_and_costs_the_exit_code(board: FakeLauncher) -> None:
    board.broken = ["barrier_loop"]
    result = roller()
    assert result.exit_code == 1
    assert "barrier: not measured, barrier_loop does not compile: broken" in result.output
    board.broken = ["launch_empty"]
    result = roller("--out", "board.toml")
    assert result.exit_code == 2
    assert "--out: a device file needs launch, block.launch" in result.output
    assert not Path("board.toml").exists()


def test_a_reading_that_cannot_be_is_marked(board: FakeLauncher) -> None:
    board.truth.dram = 300e9
    result = roller("--only", "dram")
    assert "OUTSIDE" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "board.yaml"], "--out: got a file ending in '.yaml'; end it in .toml or .json"),
        (["--out", "no/board.toml"], "--out: there is no directory no; make it first"),
        (["--out", "board.toml", "--only", "dram"], "--out: a file needs all quantities; leave --only away"),
        (["--only", "drum"], "--only: 'drum' is not measured on GPUs; name one of arithmetic, matrix, dram"),
        (["--device", "cpu", "--only", "dram"], "--only: 'dram' is not measured on CPUs; name one of clock"),
        (["--compare", "v1000"], "device: no device is called 'v1000'"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(
    board: FakeLauncher, arguments: list[str], message: str
) -> None:
    result = roller(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith(f"roller: {message}")
    assert len(result.output.splitlines()) == 1
    assert board.busy_seconds == 0


def test_without_cupy_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    result = roller("--device", "cuda:0")
    assert result.exit_code == 2
    assert "install cupy-cuda12x on the machine with the GPU" in result.output


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run on cores that takes no time."""
    values = {
        "clock": ("Hz", 3e9, "clock_hz"),
        "fma": ("FLOP/s", 2e11, "throughput.float32.peak_flops"),
        "gemm": ("FLOP/s", 1.8e11, "throughput.float32.sustained_flops"),
        "numpy.gemm": ("FLOP/s", 1.7e11, ""),
        "dram.add": ("B/s", 2e10, "layers.dram.bandwidth_bytes_per_second"),
        "numpy.add": ("B/s", 2.1e10, ""),
        "dram.latency": ("s", 1e-7, "layers.dram.latency_seconds"),
        "barrier": ("s", 1e-7, "barrier_seconds"),
    }
    found = {
        key: Measurement(key=key, unit=unit, samples=(value,), method="made up", path=path)
        for key, (unit, value, path) in values.items()
    }
    monkeypatch.setattr(cpu, "measure_cpu", lambda only, progress: QuantityResults(measurements=dict(found)))
    monkeypatch.chdir(tmp_path)


def test_cores_are_shown_next_to_numpy(cores: None) -> None:
    result = roller("--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "-bit vectors\n" in result.output.splitlines(keepends=True)[0]
    rows = [line.split() for line in result.output.splitlines() if "numpy" in line]
    assert ["gemm", "180", "GFLOP/s", "numpy.gemm", "170", "GFLOP/s", "1.06"] in rows
    assert ["dram.add", "20", "GB/s", "numpy.add", "21", "GB/s", "0.95"] in rows


def test_cores_are_described_in_a_file(cores: None) -> None:
    assert roller("--device", "cpu", "--out", "cores.json").exit_code == 0
    record = json.loads(Path("cores.json").read_text())
    assert record["kind"] == "cpu"
    assert record["layers"][-1]["bandwidth_bytes_per_second"] == 2e10
    ratios = json.loads(roller("--device", "cpu", "--json", "--compare", "v100").output)
    assert ratios["beside_numpy"]["gemm"] == ["numpy.gemm", pytest.approx(1.8 / 1.7)]
    assert ratios["compared"]["ratios"]["layers.dram.bandwidth_bytes_per_second"] == pytest.approx(2e10 / 812.6e9)
