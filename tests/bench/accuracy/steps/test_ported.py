"""Ported times: which calls count, what each way makes of them, and the errors on measured boards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.accuracy.data import default_directory
from bench.accuracy.library.backward_calls import RecordedCall, Run, call_seconds, library_calls, read_runs
from bench.accuracy.steps import ported
from bench.accuracy.steps.models import Score
from bench.accuracy.steps.ported import ASKED, BAR, SOURCE, ported_calls, ported_kernels, ported_steps
from hal.catalog import load_device

pytest.importorskip("pyarrow")
DATA = default_directory()
measured_data = pytest.mark.skipif(
    not (DATA / "models" / "neusight_operators.parquet").is_file(), reason="the measured models are not here"
)
TARGET = "Tesla P100-PCIE-16GB"
SPECS = {name: load_device(name) for name in (SOURCE, TARGET)}


def call(target: str, inputs: tuple[tuple[int, ...], ...], output: tuple[int, ...], seconds: float) -> RecordedCall:
    return RecordedCall(
        target=target, inputs=inputs, output=output, times=1, forward_seconds=seconds, backward_seconds=0.0
    )


def run(board: str, seconds: tuple[float, float, float], measured: float, *, training: bool = False) -> Run:
    """A product, an addition and a view."""
    big = (4096, 4096)
    calls = (
        call("h.0.fc1", (big,), big, seconds[0]),
        call("<built-in function add>", (big, big), big, seconds[1]),
        call("view", (big,), big, seconds[2]),
    )
    return Run(board=board.replace(" ", "_"), label="gpt", training=training, measured=measured, calls=calls)


def test_calls_take_recorded_time_by_the_ratio_of_prices() -> None:
    runs = [run(SOURCE, (12e-3, 3e-4, 1e-3), 14e-3), run(TARGET, (20e-3, 4e-4, 1e-3), 21e-3)]
    product, addition = ported_calls(runs, TARGET, SPECS)
    (here, there) = (
        call_seconds([library_calls(each, SPECS[name], training=False) for each in runs[0].calls], SPECS[name])
        for name in (SOURCE, TARGET)
    )
    assert (product.kind, addition.kind) == ("linear", "add"), "a view launches nothing"
    assert (product.by_price, addition.by_price) == pytest.approx(
        (12e-3 * there[0] / here[0], 3e-4 * there[1] / here[1])
    )
    memory = 812.6e9 / SPECS[TARGET].dram.bandwidth_bytes_per_second
    assert addition.by_waves == pytest.approx(3e-4 * memory)
    assert product.measured == 20e-3 and product.steady


def test_short_calls_and_training_are_left_out_and_unsteady_runs_marked() -> None:
    target = run(TARGET, (20e-3, 4e-4, 1e-3), 30e-3)
    (only,) = ported_calls([run(SOURCE, (12e-3, 2e-4, 1e-3), 14e-3), target], TARGET, SPECS)
    assert only.kind == "linear" and not only.steady, "21.4 of 30 ms"
    assert ported_calls([run(SOURCE, (12e-3, 3e-4, 1e-3), 14e-3, training=True), target], TARGET, SPECS) == []
    assert ported_calls([run(SOURCE, (12e-3, 3e-4, 1e-3), 14e-3)], TARGET, SPECS) == []


def test_steps_take_the_ratio_of_predicted_steps() -> None:
    scores = [
        Score(device="v100", mode="inference", label="a", measured=2.0, predicted=1.0),
        Score(device="p100", mode="inference", label="a", measured=3.0, predicted=1.6),
        Score(device="p100", mode="inference", label="b", measured=9.0, predicted=9.0),
    ]
    (step,) = ported_steps(scores, "v100")
    assert (step.board, step.ported, step.measured) == ("p100", 3.2, 3.0)


def write_additions(data: Path) -> None:
    """One addition on both boards, of 65536 blocks of 128 threads, and one that is too short."""
    import pyarrow as arrow
    from pyarrow import parquet

    milliseconds = {SOURCE: (1.0, 0.1), TARGET: (1.5, 0.2)}
    rows = [
        {
            "op": "add", "device": board, "b": 2 ** (13 - 3 * place), "h": 8192, "n_kernels": None,
            "latency_ms": milliseconds[board][place], "kernel": "vectorized_elementwise_kernel",
            "grid_x": 65536, "grid_y": 1, "grid_z": 1,
            "block_x": 128, "block_y": 1, "block_z": 1,
        }
        for board in (SOURCE, TARGET)
        for place in (0, 1)
    ]  # fmt: skip
    folder = data / "library_kernels"
    folder.mkdir()
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "elem.parquet")


def test_kernels_of_both_boards_take_wave_scaling(tmp_path: Path) -> None:
    write_additions(tmp_path)
    (each,) = ported_kernels(tmp_path, "element-wise")
    assert each.device == "p100-pcie-16gb" and len(each.by_price) == 1
    memory = SPECS[SOURCE].dram.bandwidth_bytes_per_second / SPECS[TARGET].dram.bandwidth_bytes_per_second
    assert each.by_waves == pytest.approx([memory / 1.5 - 1])
    # 65536 blocks are 52 waves of 1280 blocks and 74 of 896.
    assert each.by_habitat == pytest.approx([memory * 74 / 52 * 896 / 1280 / 1.5 - 1])
    assert ported_kernels(tmp_path, "softmax") == []


def test_tables_show_what_there_is(tmp_path: Path) -> None:
    assert list(ported.table(tmp_path, tmp_path)) == []
    write_additions(tmp_path)
    (view,) = ported.table(tmp_path, tmp_path)
    assert view.row_count == 1
    calls = ported_calls(
        [run(SOURCE, (12e-3, 3e-4, 1e-3), 14e-3), run(TARGET, (20e-3, 4e-4, 1e-3), 21e-3)], TARGET, SPECS
    )
    # Two kinds, all and those of steady runs, and these two of the boards asked about.
    assert ported.call_table({"p100": calls}, ["p100"]).row_count == 6
    assert ported.step_table([ported.PortedStep("p100", "a", 3.2, 3.0)]).row_count == 2


@measured_data
@pytest.mark.slow
def test_ported_calls_are_as_right_as_the_page_says() -> None:
    from bench.accuracy.library.library import boards

    runs = read_runs(DATA)
    specs = boards({each.board.replace("_", " ") for each in runs})
    calls = [each for name in ASKED for each in ported_calls(runs, name, specs)]
    steady = [abs(each.by_price / each.measured - 1) for each in calls if each.steady]
    assert len(steady) > 100 and np.mean(steady) < BAR / 100
    for each in ported_kernels(DATA, "element-wise"):
        assert np.abs(each.by_waves).mean() < 0.03
