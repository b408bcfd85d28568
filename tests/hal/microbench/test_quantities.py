"""Every quantity through a modelled board: what it finds is what the model has."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hal.catalog import load_device
from hal.microbench import QUANTITIES, Settings, kernel_texts, measure_gpu
from hal.microbench.memory.shared_banks import bank_width, row_bytes
from hal.microbench.memory.transaction import smallest_transfer
from hal.microbench.memory.translation import reach_pages
from hal.microbench.units.registers import portion
from hal.support.errors import InputError
from tests.hal.microbench.fake_board import NEW_BOARD, V100, FakeLauncher, Truth

QUICK = Settings(repeats=3, long_seconds=12.0)


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    truth = Truth(reach_pages=16, gemm=13e12)
    run = measure_gpu(FakeLauncher(truth, NEW_BOARD), settings=QUICK)
    assert run.failures == {}
    return {key: measurement.value for key, measurement in run.measurements.items()}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dram.read", 800e9),
        ("dram.copy", 800e9),
        ("dram.add", 800e9),
        ("dram.scattered", 250e9),
        ("dram.transaction", 32),
        ("l1.latency", 28e-9),
        ("l2.latency", 140e-9),
        ("dram.latency", 300e-9),
        ("dram.reach", 32 << 20),
        ("dram.miss", 12e-9),
        ("l2.read", 2.1e12),
        ("shared.read", 13e12),
        ("shared.latency", 14e-9),
        ("shared.banks", 32),
        ("shared.width", 4),
        ("fma.float32", 0.97 * 64 * 2 * 80 * 1.5e9),
        ("fma.float64", 0.97 * 32 * 2 * 80 * 1.5e9),
        ("fma.float16", 0.97 * 64 * 4 * 80 * 1.5e9),
        ("fma.int8", 0.97 * 64 * 8 * 80 * 1.5e9),
        ("lanes.float32", 64),
        ("lanes.float64", 32),
        ("clock.short", 1.5e9),
        ("clock.sustained", 1.3e9),
        ("wmma.float16-float32", 0.9 * 1024 * 80 * 1.5e9),
        ("wmma.cycle.float16-float32", 1024),
        ("launch", 2.5e-6),
        ("block.launch", 1.56e-9),
        ("barrier.1024", 15e-9),
        ("registers.portion", 256),
        ("registers.values", 194),
    ],
)
def test_the_number_of_the_model_is_found(found: dict[str, float], key: str, value: float) -> None:
    assert found[key] == pytest.approx(value, rel=1e-3)


def test_library_products_are_slower_once_the_board_is_hot(found: dict[str, float]) -> None:
    assert found["power.float32"] == pytest.approx(13e12 * 1.3 / 1.5, rel=1e-3)
    assert found["gemm.best"] >= found["gemm.long"] >= found["power.float32"]


@pytest.mark.parametrize(("banks", "width"), [(32, 4), (32, 8), (16, 4)])
def test_banks_are_distinguished_by_their_conflicts(banks: int, width: int) -> None:
    run = measure_gpu(FakeLauncher(Truth(banks=banks, width=width)), ["banks"], QUICK)
    assert (run.measurements["shared.banks"].value, run.measurements["shared.width"].value) == (banks, width)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_transaction_is_where_time_per_read_stops_growing(size: int) -> None:
    run = measure_gpu(FakeLauncher(Truth(transaction=size)), ["transaction"], QUICK)
    assert run.measurements["dram.transaction"].value == size


def test_a_board_that_never_waits_for_translations_has_neither_number() -> None:
    run = measure_gpu(FakeLauncher(Truth(reach_pages=None)), ["translation"], QUICK)
    assert run.measurements == {} and run.failures == {}


def test_empty_kernels_are_submitted_before_the_first_starts() -> None:
    launcher = FakeLauncher()
    measure_gpu(launcher, ["launch"], QUICK)
    assert set(launcher.ahead) == {"launch_empty"}


def test_a_board_without_a_power_limit_to_feel_has_no_such_rate() -> None:
    run = measure_gpu(FakeLauncher(Truth(gemm=13e12, hot_clock=1.5e9)), ["power"], QUICK)
    assert run.measurements["power.float32"].path == ""
    hot = measure_gpu(FakeLauncher(Truth(gemm=13e12, hot_after=6.0)), ["power"], QUICK)
    assert hot.measurements["power.float32"].path == "throughput.float32.power_limited_flops"


def test_one_failure_leaves_the_others() -> None:
    launcher = FakeLauncher(broken=["barrier_loop"])
    run = measure_gpu(launcher, ["barrier", "launch"], QUICK)
    assert run.failures == {"barrier": "barrier_loop does not compile: broken"}
    assert "launch" in run.measurements
    assert launcher.released == 2


def test_readings_far_from_the_shipped_spec_are_marked() -> None:
    v100 = load_device("v100")
    right = measure_gpu(FakeLauncher(), ["dram", "latency"], QUICK, v100)
    assert right.measurements["dram.add"].plausible and right.measurements["l2.latency"].plausible
    slow = measure_gpu(FakeLauncher(Truth(dram=400e9)), ["dram"], QUICK, v100)
    assert not slow.measurements["dram.add"].plausible


def test_nothing_is_faster_than_the_memory_interface() -> None:
    run = measure_gpu(FakeLauncher(Truth(dram=1000e9)), ["dram"], QUICK)
    assert run.measurements["dram.add"].high == pytest.approx(2 * 877e6 * 4096 / 8)
    assert not run.measurements["dram.add"].plausible


def test_an_unknown_quantity_is_named() -> None:
    with pytest.raises(InputError, match="--only: 'drum' is not measured on GPUs; name one of arithmetic, matrix"):
        measure_gpu(FakeLauncher(), ["drum"])


def test_old_boards_get_the_kernels_that_they_have() -> None:
    old = {kernel.entry for kernel in kernel_texts(50)}
    new = {kernel.entry for kernel in kernel_texts(90)}
    assert "fma_float32" in old and not {"fma_bfloat16", "fma_int8", "wmma_float16_float32"} & old
    assert {"fma_bfloat16", "fma_int8", "wmma_bfloat16_float32", "wmma_tfloat32_float32"} <= new
    run = measure_gpu(FakeLauncher(board=replace(V100, compute_capability=(5, 0))), ["arithmetic", "matrix"], QUICK)
    assert {key for key in run.measurements if key.startswith("fma")} == {"fma.float32", "fma.float64", "fma.int32"}


def test_every_quantity_says_what_it_launches_and_how_to_measure() -> None:
    for name, module in QUANTITIES.items():
        assert module.__doc__ and callable(module.measure), name
        assert all(f"{kernel.entry}(" in kernel.source for kernel in module.kernels(80)), name


class FakeTorch:
    """As much of PyTorch as the calls need; every event pair reads 30 microseconds."""

    __version__, float32 = "2.9", "float32"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.cuda = SimpleNamespace(Event=lambda enable_timing: self, synchronize=lambda: self.calls.append("idle"))
        self.nn = SimpleNamespace(functional=self)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **keywords: self.calls.append(name)

    def elapsed_time(self, after: object) -> float:
        return 0.030


def test_framework_calls_start_on_an_idle_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    monkeypatch.setattr(FakeLauncher, "torch", lambda self: torch)
    run = measure_gpu(FakeLauncher(), ["framework"], QUICK)
    assert {key: measurement.value for key, measurement in run.measurements.items()} == pytest.approx(
        dict.fromkeys(["call.add", "call.matmul", "call.linear", "call.softmax", "call.layer_norm"], 30e-6)
    )
    assert run.measurements["call.linear"].path == "framework.linear_call_seconds"
    assert run.measurements["call.add"].path == "framework.call_seconds"
    first = torch.calls.index("idle")
    assert torch.calls[first : first + 5] == ["idle", "record", "add", "record", "synchronize"]


# The decisions by themselves


def test_smallest_transfer_wants_an_end_of_growth() -> None:
    with pytest.raises(RuntimeError, match="no transaction size to be seen"):
        smallest_transfer({distance: float(distance) for distance in (8, 16, 32, 64, 128, 256)})


def test_reads_that_take_equally_long_have_no_banks() -> None:
    with pytest.raises(RuntimeError, match="no banks to be seen"):
        row_bytes(dict.fromkeys((4, 8, 16, 32, 64, 128, 256, 512), 1.0))
    with pytest.raises(RuntimeError, match="no bank width to be seen"):
        bank_width({0: 10.0, 4: 10.0, 8: 10.0}, 1.0, 10.0)


def test_reach_is_the_last_count_before_the_step() -> None:
    assert reach_pages({4: 1.0, 6: 1.0, 8: 1.02, 12: 1.1, 16: 1.6}) == 12
    assert reach_pages({4: 1.0, 6: 1.0, 8: 1.0}) is None


@pytest.mark.parametrize("truth", [512, 256, 128])
def test_the_portion_of_registers_explains_the_occupancy(truth: int) -> None:
    launcher = FakeLauncher(Truth(portion=truth))
    run = measure_gpu(launcher, ["registers"], QUICK)
    assert run.measurements["registers.portion"].value == truth
    with pytest.raises(RuntimeError, match="no rounding explains"):
        portion({40: 7, 80: 12}, 65536, 32)
