"""Comparing the library models with measurements: the launches read from names, the figures, the boards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.accuracy.data import default_directory
from bench.accuracy.library import library
from bench.accuracy.library.library import (
    CLASSES,
    Score,
    boards,
    launch_of,
    read_calls,
    score_table,
    with_shape,
    with_tile,
)
from hal.catalog import load_device
from roller.library import library_time

pytest.importorskip("pyarrow")
measured_data = pytest.mark.skipif(
    not (default_directory() / "library_kernels").is_dir(), reason="the measured calls are not next to this checkout"
)


def write_calls(directory: Path, file: str, **columns: list[object]) -> None:
    import pyarrow
    import pyarrow.parquet

    (directory / "library_kernels").mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), directory / "library_kernels" / f"{file}.parquet")


def test_a_launch_is_read_from_the_kernels_name() -> None:
    rows = {
        "kernel": np.array(["volta_sgemm_32x32_sliced1x4_tn", "volta_sgemm_128x64_tn"]),
        "all_kernels": np.array(["a;void splitkreduce_kernel<32>", "b"]),
        "tile_m": np.array([32, 64]), "tile_n": np.array([32, 128]), "grid_z": np.array([4, 1]),
        "block_x": np.array([128, 64]), "block_y": np.array([1, 2]),
    }  # fmt: skip
    launch = launch_of(rows, splits=True)
    assert launch.tile_k.tolist() == [32, 8] and launch.splits.tolist() == [4, 1]
    assert launch.threads.tolist() == [128, 128] and launch.reduce.tolist() == [True, False]
    assert launch_of(rows, splits=False).splits.tolist() == [1, 1]


def test_boards_are_those_with_a_spec() -> None:
    found = boards(["NVIDIA A100-PCIE-40GB", "NVIDIA L4", "NVIDIA H100 80GB HBM3", "Voodoo 2"])
    assert [device.name for device in found.values()] == ["a100-pcie-40gb", "l4", "h100-sxm-80gb"]


def test_rows_of_new_boards_are_evaluated_and_missing_files_are_not(tmp_path: Path) -> None:
    write_calls(tmp_path, "softmax", device=["NVIDIA L4", "Voodoo 2"], b=[4096, 1], h=[512, 1], latency_ms=[0.2, 1.0])
    (score,) = with_shape(tmp_path)
    expected = library_time({"op": "softmax", "shape": [4096, 512]}, load_device("l4")).call_seconds
    assert (score.operation, score.device, score.bar) == ("softmax", "l4", 0.13)
    assert score.predicted.tolist() == [expected] and score.measured.tolist() == [0.2e-3]
    assert with_tile(tmp_path) == []


def test_errors_are_shares_of_the_measured_time_and_bars_are_wider_for_inference_boards() -> None:
    score = Score("bmm", "v100", np.array([1.0, 3.0]), np.array([2.0, 2.0]), 0.12)
    assert score.errors.tolist() == [0.5, 0.5]
    assert score_table([score], "t").row_count == 1
    made = library._score("bmm", load_device("t4"), np.ones(1), {"latency_ms": np.ones(1)}, 12)
    assert made.bar == pytest.approx(0.18)


@pytest.mark.slow
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    scores = [Score(name, "v100", np.geomspace(1e-5, 1, 9), np.geomspace(2e-5, 1, 9), 0.1) for name in CLASSES]
    library.scatter(scores, tmp_path / "new" / "it.png", "title", by="operation")
    assert (tmp_path / "new" / "it.png").stat().st_size > 10_000


@measured_data
@pytest.mark.slow
def test_all_classes_and_boards_get_a_figure() -> None:
    data = default_directory()
    known = with_tile(data)
    assert {score.operation for score in known} == {"bmm", "linear"}
    rows = read_calls(data, "linear")
    linear = [score for score in known if score.operation == "linear"]
    assert sum(len(score.measured) for score in linear) == sum(len(columns["b"]) for columns in rows.values())
    assert all(score.errors.mean() < 0.3 for score in known)
