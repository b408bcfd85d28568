"""From measurements to a device file: complete, valid, every number with its source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hal.catalog import load_device, provenance_of, shipped_board
from hal.microbench import QuantityResults, Settings, json_text, measure_gpu, number_at, spec_from, toml_text
from hal.microbench.assemble import device_name
from hal.spec.device import DeviceSpec
from hal.spec.numbers import leaves
from hal.support.errors import InputError
from tests.hal.microbench.fake_board import NEW_BOARD, V100, FakeLauncher, Truth

QUICK = Settings(repeats=3, long_seconds=12.0)
DAY = "2026-01-02"


@pytest.fixture(scope="module")
def run() -> QuantityResults:
    return measure_gpu(FakeLauncher(Truth(reach_pages=16, gemm=13e12), NEW_BOARD), settings=QUICK)


@pytest.fixture(scope="module")
def spec(run: QuantityResults) -> DeviceSpec:
    return spec_from(NEW_BOARD, run.measurements, day=DAY)


def test_measured_numbers_are_where_they_belong(spec: DeviceSpec) -> None:
    for path, value in (
        ("layers.dram.bandwidth_bytes_per_second", 800e9),
        ("layers.dram.scattered_bytes_per_second", 250e9),
        ("layers.dram.transaction_bytes", 32),
        ("layers.dram.translation_reach_bytes", 32 << 20),
        ("layers.l2.latency_seconds", 140e-9),
        ("layers.shared.bank_count", 32),
        ("layers.shared.transaction_bytes", 128),
        ("limits.register_allocation_granularity", 256),
        ("limits.blocks_per_unit", 32),
        ("launch_overhead_seconds", 2.5e-6),
        ("block_launch_seconds", 1.56e-9),
        ("clocks.boost_hz", 1.53e9),
        ("clocks.sustained_hz", 1.3e9),
        ("throughput.float32.peak_flops", 80 * 64 * 2 * 1.53e9),
        ("throughput.float32.best_flops", 13e12),
        ("throughput.int8.peak_flops", 80 * 64 * 8 * 1.53e9),
        ("matrix_instructions.float16-float32.peak_flops", 80 * 1024 * 1.53e9),
        ("matrix_instructions.tfloat32-float32.sustained_flops", 0.9 * 80 * 1024 * 1.5e9),
    ):
        assert number_at(spec, path) == pytest.approx(value, rel=1e-3), path


def test_the_file_says_how_each_number_was_measured(spec: DeviceSpec) -> None:
    text = provenance_of(spec, "layers.dram.bandwidth_bytes_per_second")
    assert text.startswith(f"measured {DAY} by roller microbench, a model: dram_add: 3 arrays of 256 MiB")
    assert text.endswith("median of 3, quartiles 0.0 % apart")
    assert provenance_of(spec, "unit_count") == "read from the driver"
    assert provenance_of(spec, "clocks.base_hz").startswith("estimate: ")
    assert provenance_of(spec, "throughput.float16.sustained_flops").startswith("estimate: ")
    assert provenance_of(spec, "throughput.float32.sustained_flops").startswith("measured")


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_the_file_reads_back_as_the_same_device(spec: DeviceSpec, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"board{suffix}"
    path.write_text(toml_text(spec) if suffix == ".toml" else json_text(spec), "utf-8")
    read = load_device(path)
    assert read == spec
    assert dict(leaves(read)) == dict(leaves(spec))
    assert read.provenance == spec.provenance


@pytest.mark.parametrize("name", ["v100", "a100", "h200", "p100", "k80"])
def test_shipped_devices_survive_the_toml_writer(name: str, tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text(toml_text(load_device(name)), "utf-8")
    assert load_device(path) == load_device(name)


def test_a_known_board_lends_what_cannot_be_measured() -> None:
    v100 = shipped_board(V100)
    assert v100 is not None and v100.name == "v100-sxm2-16gb"
    found = measure_gpu(FakeLauncher(), settings=QUICK, datasheet=v100).measurements
    spec = spec_from(V100, found, v100, DAY)
    assert spec.clocks.base_hz == v100.clocks.base_hz
    assert provenance_of(spec, "clocks.base_hz") == "shipped spec v100-sxm2-16gb"
    assert provenance_of(spec, "limits.registers_per_thread_usable").startswith("shipped spec v100-sxm2-16gb; tiles of")
    assert shipped_board(NEW_BOARD) is None


def test_without_a_library_sustained_rates_are_estimates() -> None:
    spec = spec_from(NEW_BOARD, measure_gpu(FakeLauncher(board=NEW_BOARD), settings=QUICK).measurements, day=DAY)
    float32 = spec.throughput[0]
    assert float32.best_flops is None and float32.power_limited_flops is None
    assert float32.sustained_flops == pytest.approx(0.85 * 0.97 * 80 * 64 * 2 * 1.5e9, rel=1e-3)
    assert provenance_of(spec, "throughput.float32.sustained_flops").startswith("estimate: 0.85 of")


def test_readings_above_a_peak_are_cut_to_it() -> None:
    truth = Truth(gemm=20e12, scattered=900e9, efficiency=1.0, clock=1.55e9, hot_clock=1.55e9)
    spec = spec_from(NEW_BOARD, measure_gpu(FakeLauncher(truth, NEW_BOARD), settings=QUICK).measurements, day=DAY)
    assert spec.throughput[0].best_flops == spec.throughput[0].peak_flops
    assert spec.dram.scattered_bytes_per_second == spec.dram.bandwidth_bytes_per_second
    assert spec.clocks.sustained_hz == spec.clocks.boost_hz


def test_a_missing_number_is_named(run: QuantityResults) -> None:
    found = {key: value for key, value in run.measurements.items() if key not in ("launch", "dram.add")}
    with pytest.raises(InputError, match=r"--out: a device file needs dram.add, launch; measure all quantities"):
        spec_from(NEW_BOARD, found)


def test_numbers_that_contradict_each_other_ask_for_another_run(run: QuantityResults) -> None:
    slow = replace(run.measurements["l2.read"], samples=(1e9,))
    with pytest.raises(InputError, match=r"measured, but got .* measure again on an idle board"):
        spec_from(NEW_BOARD, {**run.measurements, "l2.read": slow})


def test_boards_too_old_for_the_compiler_are_said_to_be(run: QuantityResults) -> None:
    spec = spec_from(replace(NEW_BOARD, compute_capability=(3, 7)), run.measurements)
    assert (spec.code_generator, spec.architecture) == ("cuda-source", "sm_37")
    assert spec.code_generator_reason


def test_names_are_made_of_what_file_names_are() -> None:
    assert device_name("NVIDIA A100-SXM4-80GB") == "nvidia-a100-sxm4-80gb"
    assert device_name("NVIDIA GeForce RTX 2080 Ti (x)") == "nvidia-geforce-rtx-2080-ti-x"
