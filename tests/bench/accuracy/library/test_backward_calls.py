"""Single recorded calls: which library calls they are, and how long their backward passes take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.accuracy.data import default_directory
from bench.accuracy.library import backward_calls as calls
from bench.accuracy.library.backward_calls import RecordedCall, backward_calls, library_calls
from hal.catalog import load_device

pytest.importorskip("pyarrow")
DATA = default_directory()
measured_data = pytest.mark.skipif(
    not (DATA / "models" / "neusight_operators.parquet").is_file(), reason="the measured models are not here"
)
V100, A100 = load_device("v100-pcie"), load_device("a100")


def recorded(target: str, inputs: tuple[tuple[int, ...], ...], output: tuple[int, ...]) -> RecordedCall:
    return RecordedCall(
        target=target, inputs=inputs, output=output, times=1, forward_seconds=1e-3, backward_seconds=0.0
    )


def test_products_are_distinguished_by_how_their_weights_lie() -> None:
    module = recorded("h.0.fc1", ((2, 8, 16),), (2, 8, 32))
    function = recorded("<built-in method addmm of type object>", ((32,), (16, 64), (64, 32)), (16, 32))
    head = recorded("lm_head", ((2, 8, 16),), (2, 8, 100))
    found = [library_calls(call, V100, training=False)[0] for call in (module, function, head)]
    assert [call.variant for call in found] == ["linear", "addmm", "matmul"]
    assert [call.sizes for call in found] == [(1, 16, 32, 16), (1, 16, 32, 64), (1, 16, 100, 16)]


def test_products_of_four_dimensions_copy_their_views_first() -> None:
    scores = recorded("<built-in method matmul of type object>", ((2, 4, 32, 8), (2, 4, 8, 32)), (2, 4, 32, 32))
    values = recorded("<built-in method matmul of type object>", ((2, 4, 32, 32), (2, 4, 32, 8)), (2, 4, 32, 8))
    assert [call.kind for call in library_calls(scores, V100, training=False)] == ["elementwise", "elementwise", "gemm"]
    assert [call.kind for call in library_calls(values, V100, training=False)] == ["elementwise", "gemm"]


def test_a_repeated_operand_is_read_again_where_l2_cannot_hold_it() -> None:
    add = recorded("<built-in function add>", ((2, 32, 2048, 2048), (2, 1, 2048, 2048)), (2, 32, 2048, 2048))
    on_v100, on_a100 = (library_calls(add, board, training=False)[0] for board in (V100, A100))
    assert (on_v100.inputs, on_a100.inputs) == (None, 1), "16 MiB per image; an addition reads two by itself"


def test_dropout_is_nothing_in_inference_and_three_kernels_backward() -> None:
    dropout = recorded("h.0.attn_dropout", ((4, 64),), (4, 64))
    assert library_calls(dropout, V100, training=False) == []
    assert [call.label for call in library_calls(dropout, V100, training=True)] == ["dropout"]
    assert len(backward_calls(dropout, V100)) == 3


def test_views_launch_nothing() -> None:
    assert library_calls(recorded("view", ((4, 64), (1,)), (64, 4)), V100, training=True) == []


def test_the_table_has_a_row_per_kind(tmp_path: Path) -> None:
    assert calls.backward_table({"add": (np.ones(2), np.ones(2))}).row_count == 2
    assert list(calls.table(tmp_path, tmp_path)) == []


@measured_data
@pytest.mark.slow
def test_backward_calls_are_as_right_as_was_asked() -> None:
    times = calls.backward_times(calls.read_runs(DATA)).values()
    errors = np.concatenate([abs(predicted / measured - 1) for predicted, measured in times])
    assert len(errors) == 96 and np.median(errors) < calls.BACKWARD_BAR / 100
