"""The picture of ``roller explain --plot``: what is in it, and what happens when it cannot be drawn."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hal.catalog import load_device
from hal.support.errors import InputError
from roller.cli import main
from roller.construct.program import DIRECT
from roller.explain.picture import check_plot, draw, plot
from roller.programs import Programs, find_programs
from roller.text.quantities import time_text
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.model.gpu.breakdown import STAGES

SUITE = {data["name"]: data for data in json.loads(files("bench.suites").joinpath("roller119.json").read_text())}
TRANSPOSE = {"op": "transpose", "shape": [1000, 777], "perm": [1, 0]}
HALVES = {"op": "matmul", "m": 1024, "n": 768, "k": 512, "dtype": "float16"}


def constructed(operator: dict[str, Any], device: str = "v100", top_k: int = 10) -> Programs:
    return find_programs(kernel_form(operator_from_data(operator)), load_device(device), top_k, "roller", (DIRECT,))


@pytest.fixture
def product(tmp_path: Path) -> Path:
    path = tmp_path / "op.json"
    path.write_text(json.dumps({"op": "matmul", "m": 512, "n": 256, "k": 128, "name": "small"}))
    return path


def explain(file: Path, picture: Path, *more: str) -> Any:
    command = ["explain", str(file), "--device", "v100", "--search", "roller", "--plot", str(picture), *more]
    return CliRunner().invoke(main, command)


def panels(programs: Programs, rank: int = 1) -> dict[str, Any]:
    pytest.importorskip("matplotlib")
    return {axes.get_label(): axes for axes in draw(programs, rank).axes}


@pytest.mark.parametrize("name", ["M0", "C0", "D0", "R0", "P0"])
def test_every_candidate_has_a_bar_per_stage_and_a_dot(name: str) -> None:
    programs = constructed(SUITE[name])
    found, count = panels(programs), len(programs.direct)
    bars = [bar for bar in found["stages"].patches if bar.get_facecolor()[3] > 0]
    outlined = [bar for bar in found["stages"].patches if bar.get_facecolor()[3] == 0]
    assert len(bars) == len(STAGES) * count and len(outlined) == count
    widths = [bar.get_width() for bar in bars]
    times = [1e6 * program.estimate.stage_seconds[stage] for stage in STAGES for program in programs.direct]
    assert widths == pytest.approx(times)
    bounds = {1e6 * program.estimate.stage_seconds[program.estimate.bound] for program in programs.direct}
    assert {bar.get_width() for bar in outlined} == bounds
    for panel in ("roofline", "near"):
        dots = [line for line in found[panel].lines if line.get_marker() == "o"]
        assert [dot.get_ydata()[0] for dot in dots] == [
            programs.form.flops / program.estimate.seconds for program in programs.direct
        ]


def test_no_program_stands_above_the_roof() -> None:
    """Neither above what DRAM feeds at its traffic, nor above the peak."""
    programs = constructed(SUITE["D0"])
    device = programs.device
    for dot in (line for line in panels(programs)["roofline"].lines if line.get_marker() == "o"):
        x, y = dot.get_xdata()[0], dot.get_ydata()[0]
        assert y <= min(x * device.dram.bandwidth_bytes_per_second, device.peak_flops("float32")) * 1.0001


def test_ceilings_are_layers_and_rates_of_the_board() -> None:
    labels = panels(constructed(SUITE["C0"]))["roofline"].get_legend_handles_labels()[1]
    assert labels[:3] == ["DRAM: 813 GB/s", "L2: 2.15 TB/s", "shared: 13.4 TB/s"]
    assert labels[3:] == ["float32 sustained: 14.5 TFLOP/s", "float32 peak: 15.7 TFLOP/s"]
    matrix = panels(constructed(HALVES))["roofline"].get_legend_handles_labels()[1]
    assert any(label.startswith("float16 by matrix instructions, peak: 1") for label in matrix)


def test_an_operator_without_arithmetic_has_no_roofline() -> None:
    found = panels(constructed(TRANSPOSE))
    assert not found["roofline"].axison
    assert "no arithmetic" in found["roofline"].texts[0].get_text()


def test_the_rank_asked_for_is_marked_and_shown_even_when_it_is_late() -> None:
    programs = constructed(SUITE["C0"], top_k=12)
    assert len(programs.direct) == 12
    names = [label.get_text() for label in panels(programs, 12)["stages"].get_yticklabels()]
    assert len(names) == 12 and [name.startswith("→") for name in names] == [False] * 11 + [True]
    assert names[11].startswith(f"→ 12: {time_text(programs.direct[11].estimate.seconds)}\n")
    assert len(panels(programs, 3)["stages"].get_yticklabels()) == 10


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
@pytest.mark.slow
def test_the_command_writes_a_picture_next_to_its_text_the_same_each_time(
    product: Path, ending: str, start: bytes
) -> None:
    pytest.importorskip("matplotlib")
    one, two = (product.parent / f"{name}.{ending}" for name in ("one", "two"))
    for picture in (one, two):
        result = explain(product, picture)
        assert result.exit_code == 0 and "Times of every stage" in result.output
    assert one.read_bytes().startswith(start)
    assert one.read_bytes() == two.read_bytes()
    assert sorted(path.name for path in product.parent.iterdir()) == [one.name, "op.json", two.name]


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        ("picture.txt", "roller: --plot: {}/picture.txt has no ending that is known; use .png, .svg, .pdf\n"),
        ("none/picture.png", "roller: --plot: there is no directory {}/none; make it first\n"),
    ],
)
def test_what_cannot_be_drawn_is_refused_at_once(product: Path, picture: str, message: str) -> None:
    result = explain(product, product.parent / picture)
    assert (result.exit_code, result.output) == (2, message.format(product.parent))


@pytest.mark.slow
def test_a_list_needs_a_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    operators = [{"op": "matmul", "m": 64, "n": 64, "k": 64, "name": name} for name in ("first", "second")]
    (tmp_path / "ops.json").write_text(json.dumps(operators))
    result = explain(tmp_path / "ops.json", tmp_path / "picture.png")
    assert result.exit_code == 2
    assert result.output == f"roller: --plot: draws one operator, {tmp_path}/ops.json has 2; pick one with --name\n"
    assert explain(tmp_path / "ops.json", tmp_path / "picture.png", "--name", "second").exit_code == 0


def test_without_matplotlib_one_line_names_the_remedy(product: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., Any] = builtins.__import__

    def missing(name: str, *arguments: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    result = explain(product, product.parent / "picture.png")
    assert (result.exit_code, result.output) == (
        2,
        "roller: --plot: matplotlib is not installed; pip install 'roller[plot]'\n",
    )
    with pytest.raises(InputError, match="matplotlib"):
        check_plot(product.parent / "picture.png")


@pytest.mark.slow
def test_a_picture_that_cannot_be_finished_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "picture.png").write_text("old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        plot(constructed(SUITE["M0"], top_k=1), tmp_path / "picture.png")
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]
    assert (tmp_path / "picture.png").read_text() == "old"
