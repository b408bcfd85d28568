"""Measured 16-bit kernels and the library models: rows read as operators, figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.accuracy.data import default_directory
from bench.accuracy.library import tensor_core
from bench.accuracy.library.tensor_core import Comparison, compare, kind_table
from bench.accuracy.library.tensor_core_rows import BOARDS, FLOORS, KINDS, Calls, read_calls
from hal.catalog import load_device
from roller.library import library_time

pytest.importorskip("pyarrow")
measured_data = pytest.mark.skipif(
    not (default_directory() / "tensor_core").is_dir(), reason="the measured kernels are not next to this checkout"
)

GEMM, PREFILL, DECODE, ENCODER, COLLECTIVES = KINDS


def write_rows(directory: Path, file: str, **columns: list[Any]) -> None:
    import pyarrow
    import pyarrow.parquet

    (directory / "tensor_core").mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), directory / "tensor_core" / f"{file}.parquet")


def rows(**columns: list[Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.array(values) for name, values in columns.items()}


# Rows


def test_a_linear_layer_reads_its_weights_along_their_rows() -> None:
    found = rows(m=[7], n=[48], k=[96])
    assert GEMM.operators(found) == [
        {"op": "matmul", "dtype": "bfloat16", "transpose_b": True, "m": 7, "n": 48, "k": 96}
    ]
    work = GEMM.work(found)
    assert work.flops.tolist() == [2 * 7 * 48 * 96]
    assert work.bytes.tolist() == [2 * (7 * 96 + 48 * 96 + 7 * 48)]


def test_prefill_sees_no_later_keys_and_a_window_of_the_earlier_ones() -> None:
    found = rows(
        batch_size=[3, 3], num_heads=[8, 8], num_key_value_heads=[2, 2], query_length=[5, 5], head_dim=[64, 64],
        window_size=[0, 2],
    )  # fmt: skip
    first, second = PREFILL.operators(found)
    assert first == {
        "op": "attention", "dtype": "bfloat16", "causal": True, "page": 64, "b": 3, "heads": 8, "kv_heads": 2,
        "queries": 5, "head_dim": 64, "window": 0,
    }  # fmt: skip
    assert second == first | {"window": 2}
    work = PREFILL.work(found)
    assert work.flops.tolist() == [4 * 3 * 8 * 64 * pairs for pairs in (1 + 2 + 3 + 4 + 5, 1 + 2 + 2 + 2 + 2)]
    assert work.bytes.tolist() == [2 * 3 * 64 * 5 * (2 * 8 + 2 * 2)] * 2


def test_a_decoded_token_sees_the_cache_and_itself() -> None:
    found = rows(
        batch_size=[3, 3], num_heads=[8, 8], num_key_value_heads=[2, 2], cache_length=[31, 31], head_dim=[64, 64],
        window_size=[0, 16],
    )  # fmt: skip
    first, second = DECODE.operators(found)
    assert (first["queries"], first["keys"], first["causal"], second["window"]) == (1, 32, True, 16)
    work = DECODE.work(found)
    assert work.flops.tolist() == [4 * 3 * 8 * 64 * 32, 4 * 3 * 8 * 64 * 16]
    assert work.bytes.tolist() == [2 * 3 * 64 * (2 * 8 + 2 * 2 * 32), 2 * 3 * 64 * (2 * 8 + 2 * 2 * 16)]


def test_an_encoder_masks_nothing() -> None:
    found = rows(batch_size=[2], num_heads=[10], query_length=[13], head_dim=[72])
    assert ENCODER.operators(found) == [
        {"op": "attention", "dtype": "bfloat16", "b": 2, "heads": 10, "queries": 13, "head_dim": 72}
    ]
    assert ENCODER.work(found).flops.tolist() == [4 * 2 * 10 * 72 * 13 * 13]


def test_collectives_count_bytes_as_nccl_tests_does() -> None:
    found = rows(
        collective=["all_reduce", "all_gather"], dtype=["half", "int8"], num_gpus=[4, 8], elements_total=[1024, 1024]
    )
    assert COLLECTIVES.operators(found) == [
        {"op": "all_reduce", "bytes": 2048, "ranks": 4, "dtype": "float16"},
        {"op": "all_gather", "bytes": 1024, "ranks": 8, "dtype": "int8"},
    ]
    assert COLLECTIVES.work(found).bytes.tolist() == [2048 * 2 * 3 / 4, 1024 * 7 / 8]


def test_rows_come_board_by_board_and_a_missing_file_has_none(tmp_path: Path) -> None:
    write_rows(tmp_path, "gemm", board=["l40s", "h100_sxm", "voodoo"], m=[1, 2, 3], n=[64] * 3, k=[64] * 3)
    assert [(calls.board, calls.rows["m"].tolist()) for calls in read_calls(tmp_path, GEMM)] == [
        ("h100_sxm", [2]), ("l40s", [1]),
    ]  # fmt: skip
    assert read_calls(tmp_path, PREFILL) == []


def test_the_roofline_is_a_rate_and_the_constant_that_suits_the_rows_best() -> None:
    sizes = {"m": [4096, 8192], "n": [4096, 8192], "k": [4096, 8192]}
    flops = np.array([2 * 4096.0**3, 2 * 8192.0**3])
    expected = flops / (0.8 * 989e12) + FLOORS[4]
    calls = Calls(kind=GEMM, board="h100_sxm", rows=rows(**sizes, latency_ms=(1e3 * expected).tolist()))
    assert calls.roofline() == pytest.approx(expected)
    assert FLOORS[4] == pytest.approx(2e-6)


# Figures


def comparison(board: str, predicted: list[float] | None) -> Comparison:
    measured = np.array([2e-6, 10e-6, 20e-6, 4e-3])
    return Comparison(
        kind=GEMM,
        board=board,
        measured=measured,
        predicted=None if predicted is None else np.array(predicted) * measured,
        roofline=measured * 2,
    )


def test_errors_are_signed_by_length_of_the_call() -> None:
    found = comparison("l40s", [1.5, 0.5, 0.75, 2.0])
    assert found.mean_error(found.predicted) == pytest.approx((0.5 + 0.5 + 0.25 + 1.0) / 4)
    assert found.predicted is not None
    assert found.signed_by_length(found.predicted) == pytest.approx([0.5, -0.5, -0.25, None, 1.0])
    assert found.mean_error(None) is None


def test_a_table_has_dashes_where_there_is_no_model() -> None:
    view = kind_table([comparison("l40s", [1.0, 1.0, 1.1, 1.1]), comparison("b200_sxm", None)])
    cells = [list(column.cells) for column in view.columns]
    assert [row[0] for row in cells] == [
        "l40s", "4", "5.0%", "8.0%", "10.0%", "5.0%", "100.0%", "+0.0%", "+0.0%", "+10.0%", "-", "+10.0%",
    ]  # fmt: skip
    assert [row[1] for row in cells] == ["b200_sxm", "4", "-", "8.0%", "-", "-", "100.0%"] + ["-"] * 5


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    lengths = np.geomspace(1e-6, 1e-2, 200)
    found = [
        Comparison(
            kind=GEMM,
            board=board,
            measured=lengths,
            predicted=1.1 * lengths,
            roofline=lengths,
        )
        for board in BOARDS
    ]
    tensor_core.chart(found, tmp_path / "kind.png")
    assert min(path.stat().st_size for path in tmp_path.iterdir()) > 10_000


# Against the data


@measured_data
def test_every_kind_has_rows_and_products_are_predicted_by_the_library_model() -> None:
    data = default_directory()
    boards = {kind.name: [calls.board for calls in read_calls(data, kind)] for kind in KINDS}
    assert boards["gemm"] == boards["prefill"] == boards["decode"] == list(BOARDS)
    calls = read_calls(data, GEMM)[1]
    some = Calls(kind=GEMM, board=calls.board, rows={name: part[:50] for name, part in calls.rows.items()})
    found = compare(some)
    assert found.predicted is not None
    assert found.predicted[7] == library_time(some.operators[7], load_device("h100")).seconds
