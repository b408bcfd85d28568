"""Predictions from a spec that is measured between operators: a kernel made by hand, specs made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.cpu import pace
from bench.cpu.comparison import compare
from bench.cpu.pace import Pace
from codegen.cpu.shared_object import SharedObject
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.model.rational import estimate_schedules
from sokoban.schedule.tile import TileSchedule, sizes
from tests.bench.cpu.test_command import SETTINGS, InProcess
from tests.codegen.cpu_bundles import CpuKernel, write_cpu_bundle

SPEC: dict[str, Any] = {"name": "product", "op": "matmul", "m": 256, "n": 256, "k": 256, "dtype": "float32"}
SCHEDULE = TileSchedule(
    block=sizes({"m": 128, "n": 64}), thread=sizes({"m": 8, "n": 32}), step=sizes({"k": 256}), cached=("B",)
)
FAST = load_device("xeon-platinum-8375c")
SLOW = msgspec.structs.replace(
    FAST,
    throughput=tuple(
        msgspec.structs.replace(one, peak_flops=one.peak_flops / 4, sustained_flops=one.peak_flops / 8)
        for one in FAST.throughput
    ),
)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_SLEEP_SECONDS", 0.0)


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    form = kernel_form(operator_from_data(dict(SPEC)))
    kernel = CpuKernel(SharedObject(entry="op", data=b"", assembly="", blocks=8, scratch_bytes=64), SCHEDULE, 1e-3)
    write_cpu_bundle(tmp_path / "product", form, [kernel], device="cpu", architecture="cascadelake")
    return tmp_path


def seconds(device: DeviceSpec) -> float:
    form = kernel_form(operator_from_data(dict(SPEC)))
    return float(estimate_schedules(form, device, [SCHEDULE]).seconds[0])


def test_it_lies_between_the_machine_before_and_after(bundles: Path) -> None:
    specs = iter([FAST, SLOW, SLOW])
    made = Pace(bundles, lambda: next(specs))
    made.turn()
    assert made.seconds(SPEC) is None, "the machine was measured on one side only"
    made.turn()
    assert made.seconds(SPEC) == pytest.approx((seconds(FAST) * seconds(SLOW)) ** 0.5)
    made.turn()
    assert made.seconds(SPEC) == pytest.approx(seconds(SLOW))


def test_what_has_no_kernel_has_no_prediction(tmp_path: Path) -> None:
    made = Pace(tmp_path, lambda: FAST)
    made.turn()
    made.turn()
    assert made.seconds(SPEC) is None


def test_the_comparison_measures_between_operators(bundles: Path) -> None:
    turns: list[int] = []

    def measure() -> DeviceSpec:
        turns.append(1)
        return FAST

    found = compare([SPEC], {"ours": InProcess("product_by_hand")}, SETTINGS, pace=Pace(bundles, measure))
    assert len(turns) == 2
    ours = found[0].entry("ours")
    assert ours is not None and ours.facts.predicted_then_seconds == pytest.approx(seconds(FAST))
