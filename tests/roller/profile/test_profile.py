"""Profiles of bundles: ranking by measured time, what is kept, several GPUs, clusters."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from codegen.bundle.manifest import manifest_schema, read_manifest
from codegen.bundle.reader import choose_kernel, read_bundle
from hal.support.errors import InputError
from roller.profile import profile
from roller.profile.gpu import MeasureOptions
from roller.profile.gpu_worker import LocalRunner
from roller.profile.measurement import Board, Measurement
from roller.profile.profile import OperatorProfile, ProfileOptions, parse_devices, profile_on_cluster
from tests.codegen import fake_cupy
from tests.codegen.bundles import RIGHT, WRONG, write_bundle, write_chain

pytestmark = pytest.mark.usefixtures("emulator")

QUICK = ProfileOptions(measure=MeasureOptions(repeats=3, graph_seconds=0.0, warmup_seconds=0.0))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.Gpu:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)  # type: ignore[arg-type]
    return fake_cupy.reset(seconds={"kernel_1.cu": 4e-6, "kernel_2.cu": 1e-6, "kernel_3.cu": 2e-6})


class FixedRunner:
    """A runner that knows its answers: source file -> seconds, 1e-6 for others."""

    def __init__(self, device: int, board: Board, seconds: dict[str, float] | None = None) -> None:
        self.device, self.known, self.seconds = device, board, seconds or {}
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.closed = False

    def board(self) -> Board:
        return self.known

    def measure(self, directory: Path, ranks: Sequence[int]) -> Iterator[tuple[int, Measurement]]:
        self.asked.append((directory.name, tuple(ranks)))
        kernels = {kernel.rank: kernel for kernel in read_bundle(directory).kernels}
        for rank in ranks:
            seconds = self.seconds.get(kernels[rank].source, 1e-6)
            yield (
                rank,
                Measurement(
                    seconds=seconds,
                    spread_seconds=0.0,
                    repeats=3,
                    launches=1,
                    relative_error=0.0,
                    tolerance=1e-4,
                    struck_out="",
                    loaded="cubin",
                ),
            )

    def close(self) -> None:
        self.closed = True


BOARD = Board("Pretended GPU", "7.0", {"cupy": "14", "driver": "13.0", "runtime": "12.9"})


def runners(seconds: dict[str, float], board: Board = BOARD) -> tuple[Any, list[FixedRunner]]:
    made: list[FixedRunner] = []

    def make(device: int, options: MeasureOptions) -> FixedRunner:
        made.append(FixedRunner(device, board, seconds))
        return made[-1]

    return make, made


def one(folder: Path, options: ProfileOptions = QUICK, runner: Any = LocalRunner) -> OperatorProfile:
    (result,) = profile.profile(folder, [0], options, runner)
    return result


def ranks(folder: Path) -> list[tuple[int, str, float | None]]:
    return [(k.rank, k.source, k.profiled_seconds) for k in read_manifest(folder).kernels]


def test_the_manifest_is_ranked_by_measured_time(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, (RIGHT, RIGHT, RIGHT))
    result = one(folder)
    assert ranks(folder) == [(1, "kernel_2.cu", 1e-6), (2, "kernel_3.cu", 2e-6), (3, "kernel_1.cu", 4e-6)]
    best = read_manifest(folder).kernels[0].profile
    assert best is not None
    assert (best.predicted_rank, best.board, best.capability) == (2, "Pretended GPU", "7.0")
    assert best.prediction_error == pytest.approx(1.0)  # predicted 2 µs, took 1
    assert best.versions == {"cupy": "14.0.0-fake", "driver": "13.0", "runtime": "12.9"}
    assert (best.repeats, best.launches, best.struck_out, best.loaded) == (3, 1, "", "cubin")
    assert result.best is not None and result.best.entry.source == "kernel_2.cu"
    assert choose_kernel(read_bundle(folder), None).source == "kernel_2.cu"
    jsonschema.validate(json.loads((folder / "manifest.json").read_text()), manifest_schema())


def test_wrong_kernels_are_struck_out_and_rank_last(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, (RIGHT, WRONG, RIGHT))
    one(folder)
    assert ranks(folder) == [(1, "kernel_3.cu", 2e-6), (2, "kernel_1.cu", 4e-6), (3, "kernel_2.cu", None)]
    last = read_manifest(folder).kernels[2].profile
    assert last is not None and last.struck_out.startswith("relative error")
    assert last.prediction_error is None


def test_no_right_kernel_means_no_best_one(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    assert one(write_bundle(tmp_path, (WRONG,))).best is None


def test_profiling_again_starts_from_the_prediction(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, (RIGHT, RIGHT, RIGHT))
    make, _ = runners({"kernel_1.cu": 3e-6, "kernel_2.cu": 2e-6})
    one(folder, runner=make)
    assert [source for _, source, _ in ranks(folder)] == ["kernel_3.cu", "kernel_2.cu", "kernel_1.cu"]
    make, _ = runners({"kernel_2.cu": 2e-6, "kernel_3.cu": 3e-6})
    first = (folder / "manifest.json").read_bytes()
    one(folder, runner=make)
    assert [source for _, source, _ in ranks(folder)] == ["kernel_1.cu", "kernel_2.cu", "kernel_3.cu"]
    make, _ = runners({"kernel_1.cu": 3e-6, "kernel_2.cu": 2e-6})
    one(folder, runner=make)
    assert (folder / "manifest.json").read_bytes() == first


def test_only_the_best_predicted_are_measured_if_so_asked(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, (RIGHT, RIGHT, RIGHT))
    make, made = runners({"kernel_1.cu": 9e-6})
    one(folder, replace(QUICK, top_k=2), make)
    assert made[0].asked == [("twice", (1, 2))] and made[0].closed
    assert ranks(folder) == [(1, "kernel_2.cu", 1e-6), (2, "kernel_1.cu", 9e-6), (3, "kernel_3.cu", None)]


def test_times_of_another_board_give_way(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, (RIGHT, RIGHT, RIGHT))
    make, _ = runners({"kernel_1.cu": 9e-6, "kernel_2.cu": 8e-6, "kernel_3.cu": 7e-6})
    one(folder, runner=make)
    make, _ = runners({"kernel_1.cu": 5e-6}, replace(BOARD, name="Another GPU"))
    one(folder, replace(QUICK, top_k=1), make)
    assert ranks(folder) == [(1, "kernel_1.cu", 5e-6), (2, "kernel_2.cu", None), (3, "kernel_3.cu", None)]


def test_times_are_kept_by_kernel_and_board(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, (RIGHT, RIGHT))
    options = replace(QUICK, cache=tmp_path / "cache")
    make, made = runners({"kernel_1.cu": 2e-6})
    fresh = one(folder, options, make)
    again = one(folder, options, make)
    assert [kernel.cached for kernel in fresh.kernels] == [False, False]
    assert [kernel.cached for kernel in again.kernels] == [True, True]
    assert [k.measurement for k in again.kernels] == [k.measurement for k in fresh.kernels]
    assert made[1].asked == []
    other, asked = runners({}, replace(BOARD, name="Another GPU"))
    one(folder, options, other)
    (folder / "kernel_2.cu").write_text((folder / "kernel_2.cu").read_text() + "// another\n")
    one(folder, options, make)
    slower = replace(options, measure=replace(QUICK.measure, repeats=9))
    one(folder, slower, make)
    assert [len(ranks) for _, ranks in asked[0].asked] == [2]
    assert [len(ranks) for _, ranks in made[2].asked] == [1]
    assert [len(ranks) for _, ranks in made[3].asked] == [2]


def test_a_damaged_cache_is_measured_again(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path)
    options = replace(QUICK, cache=tmp_path / "cache")
    make, made = runners({})
    one(folder, options, make)
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text("{}")
    assert not one(folder, options, make).kernels[0].cached
    assert made[1].asked == [("twice", (1,))]


def test_struck_out_kernels_are_not_kept(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    one(write_bundle(tmp_path, (WRONG,)), replace(QUICK, cache=tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_several_gpus_share_the_bundles_and_answer_in_order(tmp_path: Path) -> None:
    names = [f"op{number}" for number in range(7)]
    for name in names:
        write_bundle(tmp_path, name=name)
    make, made = runners({})
    results = list(profile.profile(tmp_path, [0, 1], QUICK, make))
    assert [result.name for result in results] == names
    assert sorted(name for runner in made for name, _ in runner.asked) == names
    assert [runner.device for runner in made] == [0, 1] and all(runner.closed for runner in made)


def test_different_gpus_are_refused(tmp_path: Path) -> None:
    write_bundle(tmp_path)

    def make(device: int, options: MeasureOptions) -> FixedRunner:
        return FixedRunner(device, replace(BOARD, name=f"GPU {device}"))

    with pytest.raises(InputError, match=r"0 is a GPU 0, 1 a GPU 1 or has other software; profile copies"):
        list(profile.profile(tmp_path, [0, 1], QUICK, make))


def test_runners_are_closed_when_nobody_wants_more(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_bundle(tmp_path, name=name)
    make, made = runners({})
    results = profile.profile(tmp_path, [0], QUICK, make)
    assert next(results).name == "a"
    results.close()  # type: ignore[attr-defined]
    assert made[0].closed


def test_a_bundle_without_reference_is_refused(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, reference=None)
    make, _ = runners({})
    with pytest.raises(InputError, match="has no reference to check its kernels against"):
        one(folder, runner=make)


@pytest.mark.parametrize(
    ("text", "devices"), [("cuda:0", [0]), ("cuda:2,cuda:0", [0, 2]), ("1", [1]), ("all", [0, 1, 2])]
)
def test_devices_by_name(gpu: fake_cupy.Gpu, text: str, devices: list[int]) -> None:
    gpu.count = 3
    assert parse_devices(text) == devices


@pytest.mark.parametrize("text", ["cpu", "cuda:", "cuda:-1", "", "cuda:0,,1", "cuda:٣"])
def test_other_devices_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"names no GPU; write cuda:0, cuda:0,cuda:1 or all"):
        parse_devices(text)


def test_a_cluster_gets_bundles_as_bytes(gpu: fake_cupy.Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "GpuRunner", LocalRunner)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out = tmp_path / "out"
    folders = [write_bundle(out, (RIGHT, RIGHT), name=name) for name in ("a", "b")]
    with ThreadPoolExecutor(1) as executor:
        results = list(profile_on_cluster(out, executor, QUICK))
    assert [(result.name, result.directory) for result in results] == [("a", folders[0]), ("b", folders[1])]
    for folder in folders:
        assert ranks(folder) == [(1, "kernel_2.cu", 1e-6), (2, "kernel_1.cu", 4e-6)]
    # Bundle b has the kernels of a, and the machine that measured those remembers.
    assert [kernel.cached for kernel in results[1].kernels] == [True, True]


def test_kernels_of_several_launches_are_profiled_and_remembered(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    gpu.seconds |= {"kernel_1_part_1.cu": 3e-6, "kernel_1_part_2.cu": 2e-6}
    folder, options = write_chain(tmp_path), replace(QUICK, cache=tmp_path / "cache")
    assert not one(folder, options).kernels[0].cached
    record = read_manifest(folder).kernels[0]
    assert record.profiled_seconds == pytest.approx(5e-6)
    assert len(record.launches) == 2 and record.workspace == {"T": 160}
    jsonschema.validate(json.loads((folder / "manifest.json").read_text()), manifest_schema())
    assert one(folder, options).kernels[0].cached
    # Another second kernel is another measurement.
    part = folder / "kernel_1_part_2.cu"
    part.write_text(part.read_text() + "// changed\n")
    assert not one(folder, options).kernels[0].cached


def test_a_cluster_gets_the_files_of_all_launches(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    files = profile._files(write_chain(tmp_path))
    assert {f"kernel_1_part_{part}.{kind}" for part in (1, 2) for kind in ("cu", "cubin")} <= set(files)
