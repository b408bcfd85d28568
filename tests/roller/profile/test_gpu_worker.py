"""Measuring in a process apart: crashes, hangs and lost GPUs cost a kernel, not the profile."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hal.support.errors import InputError
from roller.profile.child import serve
from roller.profile.gpu import MeasureOptions
from roller.profile.gpu_worker import GpuRunner, answer
from roller.profile.measurement import Measurement
from tests.codegen import fake_cupy
from tests.codegen.bundles import RIGHT, WRONG, write_bundle

pytestmark = pytest.mark.usefixtures("emulator")

ROOT = Path(__file__).resolve().parents[3]
QUICK = MeasureOptions(repeats=3, graph_seconds=0.0, warmup_seconds=0.0)

#: What a child finds as CuPy; faults by source file.
CHILDS_CUPY = """
import sys
sys.path.insert(0, {root!r})
from tests.codegen import fake_cupy
fake_cupy.gpu.faults = {faults!r}
print("a library that prints")
sys.modules["cupy"] = fake_cupy
"""


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes runners whose children find the pretended CuPy, with faults."""
    made: list[GpuRunner] = []

    def runner(seconds: float = 60.0, **faults: str) -> GpuRunner:
        place = tmp_path / "site"
        place.mkdir()
        named = {f"{name}.cu": fault for name, fault in faults.items()}
        (place / "cupy.py").write_text(CHILDS_CUPY.format(root=str(ROOT), faults=named))
        monkeypatch.syspath_prepend(str(place))
        made.append(GpuRunner(0, QUICK, seconds))
        return made[-1]

    yield runner
    for one in made:
        one.close()


def struck(runner: GpuRunner, folder: Path, ranks: list[int]) -> dict[int, str]:
    return {rank: measurement.struck_out for rank, measurement in runner.measure(folder, ranks)}


def test_a_child_measures_bundle_after_bundle(pretend: Any, tmp_path: Path) -> None:
    runner = pretend()
    assert runner.board().name == "Pretended GPU"
    child = runner.child
    folder = write_bundle(tmp_path, (RIGHT, WRONG))
    results = dict(runner.measure(folder, [1, 2]))
    assert results[1].seconds == pytest.approx(1e-5) and results[1].struck_out == ""
    assert results[2].struck_out.startswith("relative error")
    assert struck(runner, write_bundle(tmp_path, name="second"), [1]) == {1: ""}
    assert runner.child is child


def test_a_crash_and_a_lost_gpu_strike_out_one_kernel_each(pretend: Any, tmp_path: Path) -> None:
    runner = pretend(kernel_1="crash", kernel_3="illegal")
    reasons = struck(runner, write_bundle(tmp_path, (RIGHT,) * 4), [1, 2, 3, 4])
    assert reasons[1].startswith("the measuring process was ended by signal 11")
    assert reasons[3].startswith("CUDADriverError: CUDA_ERROR_ILLEGAL_ADDRESS")
    assert (reasons[2], reasons[4]) == ("", "")


def test_a_kernel_that_hangs_is_given_up(pretend: Any, tmp_path: Path) -> None:
    runner = pretend(seconds=8.0, kernel_1="hang")
    assert struck(runner, write_bundle(tmp_path), [1]) == {1: "no answer for 8 s"}


def test_a_reference_that_takes_the_process_down_ends_the_bundle(pretend: Any, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path)
    runner = pretend(**{"": "crash"})
    (tmp_path / "site" / "cupy.py").write_text("import os; os._exit(3)")
    with pytest.raises(InputError, match="cannot be measured: the measuring process ended with status 3"):
        struck(runner, folder, [1])


def test_what_is_wrong_with_a_bundle_comes_back_as_it_is(pretend: Any, tmp_path: Path) -> None:
    runner = pretend()
    with pytest.raises(InputError, match="has no reference to check against; compile the operator again"):
        struck(runner, write_bundle(tmp_path, reference=None), [1])
    with pytest.raises(InputError, match="--device: there is no cuda:5"):
        GpuRunner(5, QUICK).board()


def test_a_closed_runner_starts_nothing(pretend: Any, tmp_path: Path) -> None:
    runner = pretend()
    runner.close()
    with pytest.raises(InputError, match="was interrupted"):
        runner.board()
    assert runner.child is None


def test_the_protocol_is_a_line_of_json_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)  # type: ignore[arg-type]
    fake_cupy.reset(faults={"kernel_1.cu": "illegal"})
    request = {
        "ask": "measure", "device": 0, "directory": str(write_bundle(tmp_path, (RIGHT, RIGHT))), "ranks": [1, 2],
        "options": asdict(QUICK),
    }  # fmt: skip
    replies = io.StringIO()
    serve(io.StringIO(json.dumps({"ask": "board", "device": 0}) + "\n" + json.dumps(request) + "\n"), replies, answer)
    board, ready, last = map(json.loads, replies.getvalue().splitlines())
    assert board["board"]["name"] == "Pretended GPU" and ready == {"ready": True}
    assert Measurement(**last["measurement"]).lost  # and nothing after it
