"""The examples print what they say, as far as that needs no GPU and takes seconds."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from roller.cli import main
from tests.codegen import fake_cupy
from tests.support.shown import shown_blocks, update

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_every_folder_is_in_the_list() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if (path / "README.md").is_file()}
    page = (EXAMPLES / "README.md").read_text("utf-8")
    assert folders == {line.split("](")[1].split("/")[0] for line in page.splitlines() if line.startswith("| [")}


@pytest.mark.slow
def test_cuda_graphs_are_reported_as_shown() -> None:
    for name in ("example-graphs", "example-graphs-b200", "whatif"):
        assert shown_blocks()[name] == update().BLOCKS[name](), "run python docs/update.py"


@pytest.mark.parametrize("name", ["example-boards", "example-board", "example-plan"])
@pytest.mark.usefixtures("pytorch")
@pytest.mark.slow
def test_steps_are_reported_as_shown(name: str) -> None:
    assert shown_blocks()[name] == update().BLOCKS[name](), "run python docs/update.py"


@pytest.mark.usefixtures("opencl", "pytorch")
@pytest.mark.slow
def test_a_processors_kernel_is_an_operator_of_pytorch() -> None:
    steady = update().steady
    assert steady(shown_blocks()["example-processor"]) == steady(update().BLOCKS["example-processor"]())


@pytest.mark.usefixtures("device_compiler", "emulator")
@pytest.mark.slow
def test_a_kernel_is_launched_with_cupy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch, folder = EXAMPLES / "launch", tmp_path / "feed_forward"
    command = ["compile", str(launch / "operator.json"), "--device", "h100", "--top-k", "1", "--verify", "0"]
    compiled = CliRunner().invoke(main, [*command, "--out", str(tmp_path)])
    assert compiled.exit_code == 0, compiled.output
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)  # type: ignore[arg-type]
    fake_cupy.reset(capability="90")
    monkeypatch.setattr(sys, "argv", ["with_cupy.py", str(folder)])
    capsys.readouterr()
    runpy.run_path(str(launch / "with_cupy.py"))
    steady = update().steady
    assert steady(capsys.readouterr().out) in steady((launch / "README.md").read_text("utf-8"))
