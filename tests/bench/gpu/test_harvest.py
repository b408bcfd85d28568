"""A harvest measures everything once, goes on where it was stopped, and outlives what its kernels do to it."""

from __future__ import annotations

import argparse
import gzip
import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from bench.calls.operators import problem
from bench.gpu import harvest
from bench.gpu.fakes import FakeMachine, write_bundle
from bench.gpu.journal import MOST_BYTES, Journal
from bench.gpu.results import Results, read_results
from bench.gpu.sections import ALL, Broken, Harvest, Section, Task, run_section
from bench.gpu.training import VARIANTS

SCRIPT = Path(harvest.__file__)


def options(out: Path, *more: str) -> argparse.Namespace:
    return harvest._options(["--out", str(out), "--dry-run", *more])


@pytest.fixture(scope="module")
def harvested(tmp_path_factory: pytest.TempPathFactory, pytorch: Any) -> Path:
    """A dry run of everything: the first operator of each kind in each suite."""
    out = tmp_path_factory.mktemp("harvest")
    assert harvest.work(options(out, "--most-operators", "20"), time.time() + 600) == 0
    return out


@pytest.fixture(scope="module")
def results(harvested: Path) -> Results:
    return read_results(harvested)


def test_a_dry_run_measures_every_section_and_leaves_nothing_out(results: Results) -> None:
    assert results.board == "no GPU at all"
    assert results.errors == []
    assert {name: (one.failed, one.left_out) for name, one in results.sections.items()} == {
        "microbench": (0, 0), "profile": (0, 0), "operators": (0, 0), "training": (0, 0),
    }  # fmt: skip
    assert [one.figures["measurements"]["dram.copy"]["value"] for one in results.microbench] == [3.0e12]
    assert len(results.profile) == len(results.operators) == 20
    kinds = {one.op for one in results.operators}
    assert len(kinds) == 16, "all named operators"


def test_a_wrong_kernel_is_struck_out_and_never_timed(results: Results) -> None:
    for one in results.profile:
        right, wrong = one.kernels
        assert (right.entry, wrong.entry) == ("right_1", "wrong_2")
        assert right.check is not None and right.check.passed and right.cold is not None and right.warm is not None
        assert wrong.check is not None and not wrong.check.passed and wrong.cold is None
        assert wrong.reason == "differs from the reference"


def test_an_operator_is_computed_by_everyone(results: Results) -> None:
    product = next(one for one in results.operators if one.op == "matmul" and one.dtype == "float32")
    assert [one.name for one in product.candidates] == [
        "roller float32", "library float32", "library tf32", "library float16", "compile float32",
        "triton float32", "triton tf32", "triton float16",
    ]  # fmt: skip
    assert all(one.check and one.check.passed and one.cold and one.warm for one in product.candidates)
    assert product.candidates[0].detail == "rank 1"
    soft = next(one for one in results.operators if one.op == "softmax")
    assert [one.name for one in soft.candidates if one.who != "library"] == [
        f"roller {soft.dtype}", f"compile {soft.dtype}",
    ]  # fmt: skip


def test_every_check_is_in_the_correctness_log(results: Results) -> None:
    checks = sum(len(one.candidates) for one in results.operators) + sum(len(one.kernels) for one in results.profile)
    assert len(results.correctness) == checks
    failed = [one.what for one in results.correctness if not one.passed]
    # PyTorch multiplies eight bits with scales of blocks on GPUs alone.
    assert failed == ["library float8_e4m3fn", "compile float8_e4m3fn", *["rank 2"] * 20]


def test_every_variant_is_trained_and_telling_ones_are_traced(harvested: Path, results: Results) -> None:
    resnet = [one for one in results.training if one.model == "resnet50" and one.batch == 2]
    assert {one.variant for one in resnet} == {one.name for one in VARIANTS}
    assert all(one.steps.median > 0 and one.wall_seconds > 0 and one.loss is not None for one in results.training)
    traced = {one.key: one.trace for one in results.training if one.trace}
    assert len(traced) == 5 + 2 * 4, "torch.compile of one model only in a dry run"
    assert all(one.profiled is not None for one in results.training if one.trace)
    assert [one.trace_error for one in results.training] == [""] * len(results.training)
    for trace in traced.values():
        archive, _, name = trace.partition("/")
        with tarfile.open(harvested / archive) as tar:
            member = tar.extractfile(name)
            assert member is not None
            events = json.loads(gzip.decompress(member.read()))["traceEvents"]
        assert sum(str(event.get("name", "")).startswith("ProfilerStep#") for event in events) >= 2


def test_no_output_is_larger_than_what_can_be_carried(harvested: Path) -> None:
    files = [path for path in harvested.iterdir() if path.is_file()]
    assert {path.name for path in files} == {
        "harvest.log", "journal.jsonl", "results.json", "traces_resnet50.tar", "traces_bert-large.tar",
        "traces_gpt2-medium.tar",
    }  # fmt: skip
    assert all(path.stat().st_size < MOST_BYTES for path in files)


def test_samples_of_the_board_are_kept(results: Results) -> None:
    assert results.samples and [value for value in results.samples[0][1:]] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_second_run_measures_nothing_again(harvested: Path) -> None:
    before = {one["key"]: one for one in Journal(harvested).items("operators")}
    started = options(harvested, "--most-operators", "20", "--sections", "profile,operators")
    assert harvest.work(started, time.time() + 601) == 0
    journal = Journal(harvested)
    assert {one["key"]: one for one in journal.items("operators")} == before
    assert journal.noted("sections")["operators"]["done"] == 20
    assert journal.noted("sections")["operators"]["seconds"] < 5


# One section


def small_harvest(out: Path, bundles: Path | None = None) -> Harvest:
    return Harvest(machine=FakeMachine(), journal=Journal(out), bundles=bundles, small=True, most_operators=1)


def section_of(*tasks: Task) -> Section:
    return Section("operators", 1.0, lambda harvest, left: iter(tasks))


def fail(message: str) -> dict[str, Any]:
    raise RuntimeError(message)


@pytest.mark.usefixtures("pytorch")
def test_an_item_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    said: list[str] = []
    mine = small_harvest(tmp_path)
    found = run_section(
        mine, section_of(Task("a", lambda: fail("out of luck"), 1), Task("b", lambda: {"x": 1}, 1)), 10, said.append
    )
    assert (found["done"], found["failed"], found["left_out"]) == (1, 1, 0)
    assert mine.journal.items("operators") == [{"key": "b", "x": 1}]
    assert said == ["operators a: RuntimeError: out of luck"]


def test_an_item_without_time_is_left_out(tmp_path: Path) -> None:
    found = run_section(small_harvest(tmp_path), section_of(Task("a", lambda: {}, 20)), 10, lambda text: None)
    assert (found["done"], found["left_out"]) == (0, 1)


@pytest.mark.usefixtures("pytorch")
def test_after_an_illegal_access_the_worker_ends_and_the_item_is_not_tried_again(tmp_path: Path) -> None:
    mine = small_harvest(tmp_path)
    what = mine.problems()[0]
    bundles = tmp_path / "bundles"
    write_bundle(bundles, what, ("crash", "right"))
    mine = small_harvest(tmp_path, bundles)
    code = harvest.measure_sections(mine, ["profile"], time.time() + 60, lambda: [], lambda text: None)
    assert code == harvest.BROKEN
    again = small_harvest(tmp_path, bundles)
    assert again.journal.done("profile", f"{what.suite}/{what.name}")
    assert harvest.measure_sections(again, ["profile"], time.time() + 60, lambda: [], lambda text: None) == 0


@pytest.mark.usefixtures("pytorch")
def test_what_a_section_had_its_time_for_is_left_by_a_worker_that_was_started_again(tmp_path: Path) -> None:
    mine, until, said = small_harvest(tmp_path), time.time() + 60, list[str]()
    assert harvest.measure_sections(mine, ["microbench"], until, lambda: [], said.append) == 0
    assert harvest.measure_sections(small_harvest(tmp_path), ["microbench"], until, lambda: [], said.append) == 0
    assert len(said) == 1


@pytest.mark.usefixtures("pytorch")
def test_a_bundle_of_other_shapes_is_refused_with_the_reason(tmp_path: Path) -> None:
    mine = small_harvest(tmp_path)
    what = mine.problems()[0]
    folder = write_bundle(tmp_path / "bundles", what)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["arguments"][0]["shape"] = [1, 2]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    mine = small_harvest(tmp_path, tmp_path / "bundles")
    run_section(mine, next(one for one in ALL if one.name == "operators"), 60, lambda text: None)
    ours = mine.journal.items("operators")[0]["candidates"][0]
    assert ours["name"] == "roller bfloat16" and ours["check"] is None
    assert ours["reason"] == "ValueError: the bundle's Q is bfloat16 of shape [1, 2]"


def test_bundles_of_another_architecture_are_not_taken(tmp_path: Path) -> None:
    what = problem("x", {"op": "matmul", "name": "p", "m": 4, "n": 4, "k": 4})
    from bench.gpu.machine import bundle_of

    folder = write_bundle(tmp_path, what)
    assert bundle_of(tmp_path, "sm_90", "x", "p") == folder
    assert bundle_of(tmp_path, "sm_80", "x", "p") is None
    assert bundle_of(tmp_path, "sm_120", "x", "p") is None
    assert bundle_of(None, "sm_90", "x", "p") is None


def test_broken_is_raised_with_the_item_in_the_journal(tmp_path: Path) -> None:
    mine = small_harvest(tmp_path)
    with pytest.raises(Broken, match="illegal memory"):
        run_section(mine, section_of(Task("a", lambda: fail("an illegal memory access"), 1)), 9, lambda text: None)
    assert Journal(tmp_path).done("operators", "a")


@pytest.mark.usefixtures("pytorch")
def test_a_slow_item_is_not_begun_on_the_pace_of_quick_ones(tmp_path: Path) -> None:
    def pause() -> dict[str, Any]:
        time.sleep(0.02)
        return {}

    mine = small_harvest(tmp_path)
    slow = [Task(f"s{i}", pause, 0.01) for i in range(3)]
    found = run_section(mine, section_of(*slow, Task("slower", lambda: {}, 20.0)), 10, lambda text: None)
    assert (found["done"], found["left_out"]) == (3, 1), "20 s become 40 s at twice the time expected"


@pytest.mark.usefixtures("pytorch")
def test_a_worker_imports_nothing_that_a_gpu_machine_lacks() -> None:
    missing = ("tvm", "sympy", "msgspec", "lark", "click", "rich", "numba", "matplotlib")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
        "import bench.gpu.harvest, bench.gpu.sections, bench.gpu.board, bench.gpu.fakes, bench.gpu.models\n"
        "import codegen.runtime.gpu, roller.profile.profile, daydream.record.record"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=harvest.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# The supervisor, with workers that are a few lines of Python

WORKER = """
import os, sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from bench.gpu.journal import Journal
journal = Journal(Path({out!r}))
for key in "abc":
    if not journal.done("profile", key):
        journal.begin("profile", key)
        if key == "b":
            {trouble}
        journal.add("profile", key, {{"kernels": []}})
"""


def supervised(out: Path, trouble: str, *more: str) -> tuple[int, Journal]:
    found = options(out, *more)
    journal = Journal(out)
    text = WORKER.format(root=str(harvest.ROOT), out=str(out), trouble=trouble)
    code = harvest.supervise(found, journal, [sys.executable, "-c", text])
    return code, Journal(out)


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        ("os.kill(os.getpid(), 11)", "died of signal 11"),
        ("sys.exit(3)", "ended with exit code 3"),
        ("time.sleep(600)", "hung for 6 s"),
    ],
)
@pytest.mark.slow
def test_a_worker_that_crashes_or_hangs_is_started_again_without_the_item(
    tmp_path: Path, trouble: str, error: str
) -> None:
    code, journal = supervised(tmp_path, trouble, "--patience", "6", "--minutes", "20")
    assert code == 0
    assert [one["key"] for one in journal.items("profile")] == ["a", "c"]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["errors"] == [{"section": "profile", "key": "b", "error": error}]
    assert f"the worker {error} in profile b" in (tmp_path / "harvest.log").read_text()


def test_a_worker_that_lost_the_gpu_is_started_again(tmp_path: Path) -> None:
    trouble = f'journal.add("profile", "b", {{{{"error": "lost"}}}}); sys.exit({harvest.BROKEN})'
    code, journal = supervised(tmp_path, trouble.format())
    assert code == 0 and [one["key"] for one in journal.items("profile")] == ["a", "c"]


@pytest.mark.slow
def test_the_time_ends_a_worker_and_what_it_has_measured_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 3600 * bool(Journal(tmp_path).items("profile")))
    code, journal = supervised(tmp_path, "time.sleep(3600)", "--minutes", "50", "--patience", "9999")
    assert code == 0
    assert [one["key"] for one in journal.items("profile")] == ["a"]
    assert "stopped at the end of the time" in (tmp_path / "harvest.log").read_text()


def test_nothing_measured_is_a_failure(tmp_path: Path) -> None:
    found = options(tmp_path)
    assert harvest.supervise(found, Journal(tmp_path), [sys.executable, "-c", "raise SystemExit(1)"]) == 1
    assert json.loads((tmp_path / "results.json").read_text())["profile"] == []


@pytest.mark.usefixtures("pytorch")
def test_the_command_runs_from_a_plain_checkout_and_ends_with_results_when_terminated(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--dry-run", "--sections", "profile"]
    process = subprocess.Popen([*command, "--most-operators", "40"], cwd="/", stdout=subprocess.DEVNULL)
    try:
        until = time.time() + 600
        while time.time() < until and not Journal(tmp_path).items("profile"):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert len(json.loads((tmp_path / "results.json").read_text())["profile"]) >= 1


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--out", "x", "--sections", "profiles"],
            "--sections: there is no section 'profiles'; use microbench, profile",
        ),
        (["--out", "x", "--minutes", "0"], "--minutes: 0 is no time to measure in; use a number such as 8"),
        (["--out", "x", "--bundles", "nowhere"], "--bundles: there is no directory nowhere; make it with python"),
    ],
)
def test_bad_options_end_with_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        harvest.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
