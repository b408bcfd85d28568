"""Kernels of processors measured: checked first, timed in turns, in a process that may break."""

from __future__ import annotations

import io
import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from codegen.bundle.reader import read_bundle
from codegen.generators import linker
from codegen.runtime.cpu import CpuOperator
from hal.microbench.cpu.native import host_architecture
from hal.support.errors import InputError
from roller.cli import main
from roller.profile.child import serve
from roller.profile.cpu import (
    FEWEST_ROUNDS,
    FEWEST_SETS,
    HOPELESS,
    MOST_SETS,
    SIFTED_AFTER,
    CpuBench,
    CpuMeasureOptions,
    _Contender,
    _Judge,
    rotating_sets,
)
from roller.profile.cpu_worker import CpuRunner, answer
from roller.profile.profile import ProfileOptions, profile_in_process
from tests.codegen.cpu_bundles import CpuKernel, write_cpu_bundle
from tests.codegen.cpu_kernels import built, form_of, schedule_for

pytestmark = pytest.mark.usefixtures("c_compiler")

QUICK = CpuMeasureOptions(rounds=3, turn_seconds=0.0, warmup_seconds=0.0)

#: A library like ours: a right kernel, a wrong one, and one that ends its process.
FAULTY = """
#include <stdint.h>
#include <stdlib.h>
void roller_parallel(void *task, void *state, int64_t count) {}
int64_t roller_threads(void) { return 1; }
int32_t zeros(void *parallel, void *const *t) { for (int i = 0; i < 40 * 48; i++) ((float *)t[2])[i] = 0; return 0; }
int32_t nothing(void *parallel, void *const *t) { return 0; }
int32_t ends(void *parallel, void *const *t) { abort(); }
int32_t vectors(void *parallel, void *const *t) { return 1; }
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    form = form_of(op="matmul", m=40, n=48, k=32)
    kernels = [
        CpuKernel(built(form, schedule), schedule, seconds)
        for schedule, seconds in ((schedule_for(form, cached=False), 1e-6), (schedule_for(form), 2e-6))
    ]
    folder = tmp_path_factory.mktemp("bundles") / "op"
    return write_cpu_bundle(folder, form, kernels, device="cpu", architecture=host_architecture())


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    """A copy to write to."""
    # Threads of a process are those of the first kernel that it loads: of a right one.
    CpuOperator.load(made)
    folder = tmp_path / "op"
    folder.mkdir()
    for file in made.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def with_fault(folder: Path, entry: str) -> None:
    """Kernel 1 is this function of :data:`FAULTY`."""
    source = folder / "faulty.c"
    source.write_text(FAULTY)
    compiler = linker()
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", folder / "kernel_1.so", source], check=True)
    data = json.loads((folder / "manifest.json").read_bytes())
    data["kernels"][0]["entry"] = entry
    (folder / "manifest.json").write_text(json.dumps(data))


def measured(folder: Path) -> dict[int, Any]:
    bundle = read_bundle(folder)
    return CpuBench(bundle, QUICK).measure(bundle.kernels, lambda rank: None)


def test_right_kernels_are_timed(bundle: Path) -> None:
    found = measured(bundle)
    assert sorted(found) == [1, 2]
    for one in found.values():
        assert one.struck_out == "" and one.loaded == "library"
        assert 0 < one.seconds < 1 and one.spread_seconds >= 0
        assert one.relative_error < one.tolerance == 1e-4
        assert one.repeats == FEWEST_ROUNDS and one.launches >= 1


def test_tensors_may_have_another_shape_for_callers(tmp_path: Path) -> None:
    form = form_of(op="depthwise_conv2d", n=1, c=5, h=9, w=14, kh=3, kw=3, padding=1)
    schedule = schedule_for(form)
    kernel = CpuKernel(built(form, schedule), schedule, 1e-6)
    folder = write_cpu_bundle(tmp_path / "op", form, [kernel], device="cpu", architecture=host_architecture())
    assert read_bundle(folder).inputs[1].shape == (5, 1, 3, 3)
    assert measured(folder)[1].struck_out == ""


@pytest.mark.slow
def test_kernels_of_integers_are_timed(tmp_path: Path) -> None:
    file = tmp_path / "places.json"
    file.write_text('{"op": "topk", "shape": [8, 32], "k": 2, "result": "indices"}')
    options = ["--device", "cpu", "--top-k", "1", "--verify", "0", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, ["compile", str(file), *options])
    assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "out").glob("*/manifest.json")
    (one,) = measured(folder.parent).values()
    assert (one.struck_out, one.relative_error) == ("", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("largest", [True, False])
def test_ranks_have_an_order_for_all_numbers(tmp_path: Path, largest: bool) -> None:
    """NaN come first, of equals the first, and infinities are numbers."""
    file, out = tmp_path / "ranks.json", tmp_path / "out"
    operator = {"op": "topk", "shape": [70, 300], "result": "indices", "largest": largest}
    file.write_text(json.dumps([{**operator, "name": f"best_{ranks}", "k": ranks} for ranks in (1, 7, 40)]))
    done = CliRunner().invoke(main, ["compile", str(file), "--device", "cpu", "--top-k", "1", "--out", str(out)])
    assert done.exit_code == 0, done.output
    rng = np.random.default_rng(0)
    numbers = rng.integers(-3, 4, (70, 300)).astype(np.float32)
    for number in (np.nan, np.inf, -np.inf):
        numbers[rng.random(numbers.shape) < 0.1] = number
        numbers[rng.integers(70)] = number
    values = -numbers if largest else numbers
    order = np.argsort(np.where(np.isnan(values), -np.inf, values), axis=1, kind="stable")
    # Among what sorts with the infinities that stand for them, NaN come first.
    order = np.take_along_axis(order, np.argsort(~np.isnan(np.take_along_axis(values, order, 1)), 1, kind="stable"), 1)
    for ranks in (1, 7, 40):
        np.testing.assert_array_equal(CpuOperator.load(out / f"best_{ranks}")(numbers), order[:, :ranks])


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("zeros", "relative error 0."),
        ("nothing", "1920 of 1920 outputs not written, or read outside a tensor"),
        ("missing", "has no function missing"),
        ("vectors", "whose vectors this processor does not have"),
    ],
)
def test_wrong_kernels_are_struck_out(bundle: Path, entry: str, reason: str) -> None:
    with_fault(bundle, entry)
    found = measured(bundle)
    assert reason in found[1].struck_out and found[1].seconds is None
    assert found[2].struck_out == ""


def test_a_kernel_that_ends_the_process_costs_itself_alone(bundle: Path) -> None:
    with_fault(bundle, "ends")
    runner = CpuRunner(QUICK)
    try:
        found = dict(runner.measure(bundle, [1, 2]))
    finally:
        runner.close()
    assert found[1].struck_out == "the measuring process was ended by signal 6"
    assert found[2].struck_out == "" and found[2].seconds > 0
    with pytest.raises(InputError, match="was interrupted"):
        runner.board()


def test_a_profile_ranks_the_manifest(bundle: Path) -> None:
    (result,) = profile_in_process(bundle, ProfileOptions(), QUICK)
    assert result.best is not None and result.seconds is not None
    again = read_bundle(bundle)
    assert again.manifest.profiling_seconds == {2: pytest.approx(result.seconds, rel=1e-3)}
    times = [kernel.profiled_seconds for kernel in again.kernels]
    assert times == sorted(times) and sorted(kernel.predicted_rank for kernel in again.kernels) == [1, 2]
    record = json.loads((bundle / "manifest.json").read_bytes())["kernels"][0]["profile"]
    assert record["capability"].endswith(" threads") and set(record["versions"]) == {"python", "numpy"}
    list(profile_in_process(bundle, ProfileOptions(top_k=1), QUICK))
    assert sorted(read_bundle(bundle).manifest.profiling_seconds) == [1, 2]


def test_requests_are_answered_in_order(bundle: Path) -> None:
    request = {"ask": "measure", "directory": str(bundle), "ranks": [2, 1], "options": asdict(QUICK)}
    lines = [{"ask": "board"}, request, {**request, "directory": "nowhere"}]
    out = io.StringIO()
    serve(io.StringIO("".join(json.dumps(line) + "\n" for line in lines)), out, answer)
    replies = [json.loads(line) for line in out.getvalue().splitlines()]
    assert "board" in replies[0] and replies[-1]["error"][0] == "nowhere"
    running = [reply["running"] for reply in replies if "running" in reply]
    # Both are checked, then each round begins with another one.
    assert running[:8] == [2, 1, 2, 1, 1, 2, 2, 1]
    assert sorted(replies[-2]["measurements"]) == ["1", "2"]


def test_sets_of_inputs_fill_the_private_caches_twice() -> None:
    assert rotating_sets(100, 400) == 8
    assert rotating_sets(10**9, 400) == FEWEST_SETS
    assert rotating_sets(1, 10**9) == MOST_SETS


def test_a_hopeless_kernel_is_out_after_the_first_rounds(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def turn(self: _Contender, seconds: float) -> None:
        self.seconds.append(1.0 if self.kernel.rank == 1 else 1.1 * HOPELESS)
        self.counts.append(1)
        next(self.calls)()

    monkeypatch.setattr(_Contender, "turn", turn)
    # On a loaded machine there would be time for fewer.
    monkeypatch.setattr(CpuBench, "_rounds", lambda self, contenders: 8)
    read = read_bundle(bundle)
    found = CpuBench(read, CpuMeasureOptions(8, 1e-3, 0.0)).measure(read.kernels, lambda rank: None)
    assert {rank: one.repeats for rank, one in found.items()} == {1: 8, 2: SIFTED_AFTER}


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e6])
def test_the_quick_judge_is_as_strict_as_the_other(wrong: float) -> None:
    expected = np.linspace(-1, 1, 1000)
    out = expected.astype(np.float32)
    judge = _Judge(expected, out)
    assert judge(1e-4) == (pytest.approx(0.0, abs=1e-6), "")
    out[500] = wrong
    assert judge(1e-4)[1] != ""


def test_infinities_of_the_reference_are_judged_too() -> None:
    expected = np.array([1.0, np.inf])
    assert _Judge(expected, np.array([1.0, np.inf], np.float32))(1e-4) == (0.0, "")
    assert _Judge(expected, np.array([1.0, 2.0], np.float32))(1e-4)[1] != ""
