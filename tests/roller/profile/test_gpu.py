"""Measuring on a pretended GPU: what is checked, what is struck out, and that times are those of the launches."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from codegen.bundle.reader import read_bundle
from codegen.tolerance import LARGEST_HALF, relative_error
from codegen.verify.guards import guarded
from hal.support.errors import InputError
from roller.profile import gpu as measure
from roller.profile.gpu import (
    GUARD_BYTES,
    MAX_COPIES,
    Measurement,
    MeasureOptions,
    OperatorBench,
    board_of,
    device_relative_error,
    stored_bytes,
)
from sokoban.language.expression import Tensor
from tests.codegen import fake_cupy
from tests.codegen.bundles import ADDS, BEYOND, PARTIAL, RIGHT, SPOILS_INPUT, WRONG, write_bundle, write_chain

pytestmark = pytest.mark.usefixtures("emulator")

QUICK = MeasureOptions(repeats=5, graph_seconds=0.0, warmup_seconds=0.0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.Gpu:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)  # type: ignore[arg-type]
    return fake_cupy.reset()


def measured(folder: Path, rank: int = 1, options: MeasureOptions = QUICK) -> Measurement:
    bundle = read_bundle(folder)
    return OperatorBench(bundle, 0, options).measure(bundle.kernels[rank - 1])


def test_a_right_kernel_gets_its_time(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    gpu.seconds["kernel_1.cu"] = 3e-6
    result = measured(write_bundle(tmp_path))
    assert result.seconds == pytest.approx(3e-6)
    assert result.spread_seconds == pytest.approx(0.0, abs=1e-12)
    assert (result.repeats, result.struck_out, result.loaded, result.lost) == (5, "", "cubin", False)
    assert result.relative_error is not None and result.relative_error <= 1e-6 and result.tolerance == 1e-4


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (WRONG, r"relative error 0\.\d+ is above 0\.0001"),
        (PARTIAL, "1 of 40 outputs not written or not a number"),
        (BEYOND, "written behind the end of Y"),
        (SPOILS_INPUT, "written behind the end of B"),
        (ADDS, "40 of 40 outputs not written or not a number"),
        ("undeclared = 1;", "EmulatorError: twice_kernel: g\\+\\+: .*undeclared"),
    ],
)
def test_a_wrong_kernel_is_struck_out_with_the_reason(
    gpu: fake_cupy.Gpu, tmp_path: Path, body: str, reason: str
) -> None:
    result = measured(write_bundle(tmp_path, (body,)))
    assert result.seconds is None and not result.lost
    assert re.search(reason, result.struck_out), result.struck_out


def test_several_launches_take_their_times_together(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    gpu.seconds |= {"kernel_1_part_1.cu": 3e-6, "kernel_1_part_2.cu": 2e-6}
    result = measured(write_chain(tmp_path))
    assert result.seconds == pytest.approx(5e-6)
    assert (result.struck_out, result.loaded) == ("", "cubin")


def test_what_was_left_in_a_workspace_counts_for_nothing(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    """The first kernel leaves out an element, which an earlier launch may have written into the same memory."""
    folder = write_chain(tmp_path, ("if (i < 39) T[i] = 2.0f * X[i];", "if (i < 40) Y[i] = T[i] + B[i % 8];"))
    assert measured(folder).struck_out == "1 of 40 outputs not written or not a number"


def test_a_kernel_may_ask_for_a_larger_tolerance(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    bodies = ("if (i < 40) T[i] = 2.0f * X[i];", "if (i < 40) Y[i] = T[i] + B[i % 8] + 3e-4f;")
    assert "is above 0.0001" in measured(write_chain(tmp_path, bodies)).struck_out
    result = measured(write_chain(tmp_path, bodies, name="lax", tolerance=1e-3))
    assert (result.struck_out, result.tolerance) == ("", 1e-3)


def test_no_launch_is_timed_before_the_output_was_right(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    measured(write_bundle(tmp_path, (WRONG,)))
    assert [launch[0] for launch in gpu.launches] == ["twice_reference_0", "twice_kernel"]


def test_a_kernel_that_goes_wrong_under_load_is_struck_out(
    gpu: fake_cupy.Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = OperatorBench._replay

    def racing(bench: OperatorBench, graph: fake_cupy.Graph) -> float:
        gpu.faults["kernel_1.cu"] = "wrong"
        return replay(bench, graph)

    monkeypatch.setattr(OperatorBench, "_replay", racing)
    result = measured(write_bundle(tmp_path))
    assert result.seconds is None
    assert result.struck_out.startswith("after 5 timed runs: relative error")


def test_a_lost_gpu_differs_from_a_failure(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    gpu.faults["kernel_1.cu"] = "illegal"
    result = measured(write_bundle(tmp_path))
    assert result.lost and "CUDADriverError: CUDA_ERROR_ILLEGAL_ADDRESS" in result.struck_out


def test_an_output_that_is_added_to_is_cleared_for_every_launch(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    result = measured(write_bundle(tmp_path, (ADDS,), kernel={"zero_output": True}))
    assert result.struck_out == ""


def test_launches_rotate_over_copies_that_exceed_l2(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    bundle = read_bundle(write_bundle(tmp_path))
    one = (160 + GUARD_BYTES) * 2 + 32 + GUARD_BYTES
    for l2_bytes, copies in ((0, 1), (one, 4), (one * 10, 31), (one * 1000, MAX_COPIES)):
        gpu.l2_bytes = l2_bytes
        bench = OperatorBench(bundle, 0, QUICK)
        assert len(bench.copies) == copies
        addresses = {array.data.ptr for tensors in bench.copies for array in tensors}
        assert len(addresses) == 3 * copies
    gpu.l2_bytes = one
    bench = OperatorBench(bundle, 0, QUICK)
    result = bench.measure(bundle.kernels[0])
    assert result.launches == 4
    for tensors in bench.copies:
        np.testing.assert_array_equal(tensors[2][:160], bench.copies[0][2][:160])


def test_graphs_are_filled_and_slow_kernels_repeated_less(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, (RIGHT, RIGHT))
    options = MeasureOptions(repeats=50, graph_seconds=1e-3, warmup_seconds=0.0, limit_seconds=2.0)
    gpu.seconds = {"kernel_1.cu": 1e-5, "kernel_2.cu": 0.4}
    fast, slow = measured(folder, 1, options), measured(folder, 2, options)
    assert fast.launches in (100, 101) and fast.repeats == 50
    assert (slow.launches, slow.repeats) == (1, 5)
    assert slow.seconds == pytest.approx(0.4)


def test_the_median_and_the_quartiles_are_given(
    gpu: fake_cupy.Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([1.0, 1.0, 3e-6, 9e-6, 1e-6, 2e-6, 4e-6])
    replay = OperatorBench._replay

    def given(bench: OperatorBench, graph: fake_cupy.Graph) -> float:
        replay(bench, graph)
        return next(times)

    monkeypatch.setattr(OperatorBench, "_replay", given)
    result = measured(write_bundle(tmp_path), options=MeasureOptions(5, 0.0, 0.0, 10.0))
    assert result.seconds == 3e-6
    assert result.spread_seconds == pytest.approx(5e-6)


def test_the_clock_is_warmed_up_longer_for_the_first_kernel(
    gpu: fake_cupy.Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = iter(range(10**6))
    monkeypatch.setattr(measure.time, "monotonic", lambda: next(passing) * 0.01)
    bundle = read_bundle(write_bundle(tmp_path, (RIGHT, RIGHT)))
    bench = OperatorBench(bundle, 0, MeasureOptions(3, 0.0, 0.5))
    before = next(passing)
    bench.measure(bundle.kernels[0])
    between = next(passing)
    bench.measure(bundle.kernels[1])
    assert between - before > 45 > 10 > next(passing) - between > 3


def test_a_bundle_without_a_reference_is_refused(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no reference to check against; compile the operator again"):
        measured(write_bundle(tmp_path, reference=None))


def test_the_board_tells_what_times_depend_on(gpu: fake_cupy.Gpu) -> None:
    board = board_of(0)
    assert (board.name, board.capability) == ("Pretended GPU", "7.0")
    assert board.versions == {"cupy": "14.0.0-fake", "driver": "13.0", "runtime": "12.9"}
    with pytest.raises(InputError, match=r"--device: there is no cuda:1; there are 1 GPUs, from cuda:0 on"):
        board_of(1)


def test_without_a_driver_the_error_is_one_line(gpu: fake_cupy.Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> int:
        raise fake_cupy.CUDADriverError("cudaErrorInsufficientDriver")

    monkeypatch.setattr(fake_cupy.cuda.runtime, "getDeviceCount", no_driver)
    with pytest.raises(InputError, match="--device: CuPy finds no GPU: cudaErrorInsufficientDriver"):
        board_of(0)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as verification stores them."""
    return guarded(values, Tensor("X", values.shape, dtype))[: values.size]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_test_data_are_stored_as_verification_stores_them(dtype: str) -> None:
    values = np.random.default_rng(1).uniform(-1, 1, 1000).astype(np.float32)
    # Verification gets values that are rounded already, and cuts; here they are rounded.
    exact = np.frombuffer(stored_bytes(values, dtype).tobytes(), stored(values, dtype).dtype)
    if dtype == "bfloat16":
        back = (exact.astype(np.uint32) << 16).view(np.float32)
        assert np.abs(back - values).max() <= 2.0**-9
        np.testing.assert_array_equal(stored(back, dtype), exact)
    else:
        np.testing.assert_array_equal(exact, stored(values, dtype))


def test_test_data_of_narrow_types_are_rounded() -> None:
    values = np.array([-1.6, 0.4, 126.7], np.float32)
    assert stored_bytes(values, "int8").view(np.int8).tolist() == [-2, 0, 127]
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        exact = np.frombuffer(stored_bytes(values, dtype).tobytes(), getattr(ml_dtypes, dtype))
        np.testing.assert_array_equal(exact, values.astype(getattr(ml_dtypes, dtype)))


def test_other_dtypes_have_no_test_data() -> None:
    with pytest.raises(InputError, match="complex64: has no test data"):
        stored_bytes(np.zeros(1, np.float32), "complex64")


def test_errors_are_judged_as_in_verification(gpu: fake_cupy.Gpu) -> None:
    generator = np.random.default_rng(2)
    expected = generator.normal(size=100)
    expected[:3] = math.inf, -math.inf, math.nan
    for change in (0.0, 1e-5, math.nan, math.inf):
        result = expected.copy()
        result[:3] = LARGEST_HALF, -math.inf, 7.0
        result[50] += change
        assert device_relative_error(fake_cupy, result, expected) == pytest.approx(relative_error(result, expected))
    result[50], result[0] = expected[50], -LARGEST_HALF
    assert device_relative_error(fake_cupy, result, expected) == relative_error(result, expected) == math.inf
    assert measure.LARGEST_HALF == LARGEST_HALF


def test_tensors_side_by_side_are_judged_each_by_itself(gpu: fake_cupy.Gpu) -> None:
    expected = np.concatenate([np.full((4, 3), 100.0), np.full((4, 5), 1e-3)], axis=1)
    result = expected * 1.01
    result[0, -1] = 0.0
    together, apart = (relative_error(result, expected, widths) for widths in ((), (3, 5)))
    assert together < 0.01 and apart == pytest.approx(0.5)
    assert device_relative_error(fake_cupy, result.ravel(), expected.ravel(), (3, 5)) == pytest.approx(apart)
