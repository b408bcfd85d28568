"""This machine's cores as a device: what is made of measurements, and what is kept of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import hal
import hal.this_cpu
from hal.microbench.cpu.assemble import spec_of
from hal.microbench.cpu.topology import Cache, Topology
from hal.microbench.quantities import QuantityResults
from hal.microbench.sampling import Settings
from hal.support.errors import InputError
from hal.this_cpu import cache_path, this_cpu
from tests.support.this_cpu import QUANTITIES
from tests.support.this_cpu import measurements as found

TWO_CORES = Topology(
    title="Intel(R) Xeon(R) Processor @ 2.50GHz",
    architecture="x86_64",
    cpus=(0, 1),
    simd_bits=512,
    vector_registers=32,
    caches=(Cache(1, 32 << 10, 64, True, 8), Cache(2, 1 << 20, 64, True, 16), Cache(3, 32 << 20, 64, False)),
    memory_bytes=16 << 30,
)


def test_layers_run_from_the_registers_to_dram() -> None:
    device = spec_of("cpu", TWO_CORES, found(), "cascadelake")
    assert [layer.name for layer in device.layers] == ["registers", "l1", "l2", "l3", "dram"]
    assert [layer.shared_by for layer in device.layers] == ["thread", "unit", "unit", "device", "device"]
    assert [layer.managed_by for layer in device.layers] == ["program", "hardware", "hardware", "hardware", None]
    assert device.layer("l1").associativity == 8
    assert device.registers.capacity_bytes == 32 * 64
    assert device.l2 is not None
    assert (device.shared.name, device.l2.name, device.dram.name) == ("l2", "l3", "dram")


def test_a_unit_is_a_core_and_a_lane_an_element() -> None:
    device = spec_of("cpu", TWO_CORES, found(), "cascadelake")
    assert (device.unit_count, device.teu.lanes, device.teu.lane, device.teu.group_size) == (2, 16, "element", 2)
    assert (device.kind, device.code_generator, device.architecture) == ("cpu", "llvm", "cascadelake")
    assert (device.warp_lanes, device.teu_count) == (1, 4)
    assert device.limits.registers_per_thread == 32 * 16
    assert device.peak_flops("float64") == device.peak_flops("float32") / 2
    assert device.launch_overhead_seconds == pytest.approx(3e-7)
    for path, _ in hal.leaves(device):
        assert len(hal.provenance_of(device, path)) > 15, path


def test_a_disturbed_reading_is_no_faster_than_the_level_above() -> None:
    device = spec_of("cpu", TWO_CORES, found(**{"l2.read": 900e9, "gemm": 400e9}), "cascadelake")
    assert device.layer("l2").bandwidth_bytes_per_second == 700e9
    assert device.sustained_flops("float32") == 380e9


def test_a_single_core_has_no_barrier() -> None:
    readings = found()
    del readings["barrier"]
    device = spec_of("cpu", replace(TWO_CORES, cpus=(0,)), readings, "cascadelake")
    assert device.launch_overhead_seconds == 1e-7


@pytest.mark.parametrize(
    ("changes", "missing", "message"),
    [
        ({}, "fma", "device cpu: needs fma"),
        ({"caches": ()}, "", "device cpu: the system does not say which caches there are"),
    ],
)
def test_what_cannot_be_a_device_is_refused(changes: dict[str, Any], missing: str, message: str) -> None:
    readings = {key: value for key, value in found().items() if key != missing}
    with pytest.raises(InputError, match=message):
        spec_of("cpu", replace(TWO_CORES, **changes), readings, "cascadelake")


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Settings | None]:
    """A cache of its own, two cores, and measurements that are counted."""
    calls: list[Settings | None] = []

    def measure(settings: Settings | None = None) -> QuantityResults:
        calls.append(settings)
        return QuantityResults({key: replace(one, samples=(0.5 * one.value, one.value, 3 * one.value), best=True)
                    for key, one in found().items()})  # fmt: skip

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("hal.microbench.cpu.read_topology", lambda: TWO_CORES)
    monkeypatch.setattr("hal.microbench.cpu.measure_cpu", measure)
    return calls


def test_it_is_as_work_finds_it_and_not_at_its_best(measured: list[Settings | None]) -> None:
    device = hal.this_cpu.cpu_now()
    assert device.sustained_flops("float32") == QUANTITIES["gemm"][0]
    assert device.teu.issue_per_cycle == 3.5
    assert measured == [None]


def test_vectors_a_cycle_are_counted_at_a_slower_clock() -> None:
    """Cores that compute with wide vectors are slower than while they count cycles."""
    for rate, vectors in ((380e9, 2), (270e9, 2), (198e9, 1), (150e9, 1)):
        assert spec_of("cpu", TWO_CORES, found(fma=rate), "cascadelake").teu.group_size == vectors


def test_it_is_measured_once(
    measured: list[Settings | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = hal.load_device("cpu")
    path = tmp_path / "roller" / "devices" / "cpu-7-intel-r-xeon-r-processor-2-50ghz-2.toml"
    assert capsys.readouterr().err == f"measured the 2 cores of this machine in 0 s; kept in {path}\n"
    assert hal.load_device("CPU") == first
    assert capsys.readouterr().err == ""
    assert len(measured) == 1
    assert list(path.parent.iterdir()) == [path]


def test_other_processors_have_files_of_their_own() -> None:
    other = cache_path(replace(TWO_CORES, title="AMD EPYC 9654"))
    fewer = cache_path(replace(TWO_CORES, cpus=(0,)))
    assert len({other, fewer, cache_path(TWO_CORES)}) == 3


def test_a_damaged_cache_names_the_file(measured: list[Settings | None]) -> None:
    path = cache_path(TWO_CORES)
    path.parent.mkdir(parents=True)
    path.write_text("name = 3", "utf-8")
    with pytest.raises(InputError, match=r"cpu-7-.*device\.name: got 3.*delete the file to measure again"):
        this_cpu()


def test_a_cache_that_cannot_be_written_is_no_error(
    measured: list[Settings | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert this_cpu().name == "cpu"
    assert "; not kept: " in capsys.readouterr().err


@pytest.fixture
def cpu() -> hal.DeviceSpec:
    return hal.load_device("epyc-9654")


class TestRefusals:
    """Changes of a valid CPU and the message that each brings."""

    def test_layers_of_a_gpu(self, cpu: hal.DeviceSpec) -> None:
        with pytest.raises(
            InputError, match="registers, l1, l2, l3, dram in this order \\(l2 and l3 may be left out\\)"
        ):
            msgspec.structs.replace(cpu, layers=cpu.layers[::-1])

    def test_a_private_cache_below_a_shared_one(self, cpu: hal.DeviceSpec) -> None:
        layers = list(cpu.layers)
        layers[2] = msgspec.structs.replace(layers[2], shared_by="device")
        layers[3] = msgspec.structs.replace(layers[3], shared_by="unit")
        with pytest.raises(InputError, match=r"layers.l3.shared_by: got 'unit', expected 'device' or more"):
            msgspec.structs.replace(cpu, layers=tuple(layers))

    def test_lanes_that_are_threads(self, cpu: hal.DeviceSpec) -> None:
        with pytest.raises(InputError, match=r"resident_per_unit x lanes = limits.threads_per_unit \(1\), not 16"):
            msgspec.structs.replace(cpu, teu=msgspec.structs.replace(cpu.teu, lane="thread"))
