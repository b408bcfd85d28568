"""Topology from what the system says, working sets per level, the run, and the description that comes of it."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from hal.microbench import Measurement, MicrobenchError, Settings, cpu, json_text, toml_text
from hal.microbench.cpu import (
    ENOUGH_SECONDS,
    LEAST_READINGS,
    CpuDescription,
    against_numpy,
    capacity,
    describe,
    measure_cpu,
    numpy_products,
    topology,
)
from hal.microbench.cpu.bandwidth import Reading, level_sets
from hal.microbench.cpu.capacity import held_bytes
from hal.microbench.cpu.cores import Cores
from hal.microbench.cpu.machine import Machine
from hal.microbench.cpu.native import loops
from hal.microbench.cpu.numpy_products import NumpyProducts
from hal.microbench.cpu.topology import Cache, Topology, read_topology
from hal.microbench.cpu.vector_ir import chains, module, tile_rows
from hal.microbench.measurement import Turns
from hal.support.errors import InputError

TWO_CORES = Topology(
    title="A processor",
    architecture="x86_64",
    cpus=(0, 1),
    simd_bits=256,
    vector_registers=16,
    caches=(Cache(1, 32 << 10, 64, True), Cache(2, 1 << 20, 64, True), Cache(3, 32 << 20, 64, False)),
    memory_bytes=16 << 30,
)


def system(root: Path, cpu: int, siblings: str, shared: str) -> None:
    (root / f"cpu{cpu}" / "topology").mkdir(parents=True)
    (root / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    caches = (("Data", 1, "48K", siblings), ("Instruction", 1, "32K", siblings), ("Unified", 3, "8192K", shared))
    for index, (kind, level, size, sharers) in enumerate(caches):
        cache = root / f"cpu{cpu}" / "cache" / f"index{index}"
        cache.mkdir(parents=True)
        for name, value in (("type", kind), ("level", level), ("size", size), ("shared_cpu_list", sharers)):
            (cache / name).write_text(f"{value}\n")


def test_one_thread_of_every_core_and_its_data_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        system(tmp_path, number, f"{number % 2},{number % 2 + 2}", "0-3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    found = read_topology(tmp_path)
    assert found.cpus == (0, 1)
    assert found.caches == (Cache(1, 48 << 10, 64, True), Cache(3, 8 << 20, 64, False))


def test_a_container_has_as_much_memory_as_it_may_use(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/\n0::/docker/one\n")
    for folder, limit in (("docker/one", "max"), ("docker", str(3 << 30)), (".", str(9 << 30))):
        (tmp_path / "groups" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / folder / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.max").write_text("1\n")
    assert topology.memory_limit_bytes(tmp_path / "groups", own) == 3 << 30
    assert topology.memory_limit_bytes(tmp_path / "none", tmp_path / "nothing") == math.inf


def test_a_system_that_says_nothing_leaves_posix(tmp_path: Path) -> None:
    found = read_topology(tmp_path)
    assert len(found.cpus) >= 1 and found.memory_bytes > 0 and found.lanes >= 4


@pytest.mark.parametrize(
    ("features", "expected"),
    [({"avx512f", "avx"}, (512, 32)), ({"avx"}, (256, 16)), ({"neon"}, (128, 32)), (set(), (128, 16))],
)
def test_vectors_follow_the_instruction_set(features: set[str], expected: tuple[int, int]) -> None:
    assert topology._vectors(frozenset(features)) == expected


@pytest.mark.parametrize(
    ("text", "lanes"),
    [("flags\t\t: fpu avx avx2 avx512f", 16), ("flags : fpu avx", 8), ("Features : fp asimd", 4), ("model name: x", 2)],
)
def test_linux_or_llvm_names_the_features(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, lanes: int
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{text}\n")
    monkeypatch.setattr(topology, "_PROCESSORS", tmp_path / "cpuinfo")
    monkeypatch.setattr(topology, "host_features", lambda: frozenset({"llvm"}))
    monkeypatch.setattr(topology, "_vectors", lambda features: (64, 16) if features == {"llvm"} else vectors(features))
    assert read_topology(tmp_path).lanes == lanes


vectors = topology._vectors


def test_working_sets_fit_their_level_and_not_the_one_above() -> None:
    assert level_sets(TWO_CORES) == {"l1": 16 << 10, "l2": 512 << 10, "l3": 4 << 20, "dram": 64 << 20}
    small = replace(TWO_CORES, caches=(), memory_bytes=1 << 30)
    assert level_sets(small) == {"dram": 32 << 20}


def test_registers_bound_the_chains_and_the_tile() -> None:
    assert (chains(32), tile_rows(32)) == (28, 14)
    assert (chains(16), tile_rows(16)) == (12, 6)
    assert "<8 x float>" in module(8, 16) and "<16 x float>" not in module(8, 16)


def test_calls_run_at_once_each_on_its_core() -> None:
    cpus = read_topology().cpus
    meeting = threading.Barrier(len(cpus))
    seen = []

    def call() -> None:
        meeting.wait(600)
        seen.append(sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [])

    with Cores(cpus) as cores:
        assert cores.seconds([call] * len(cpus)) >= 0
    if hasattr(os, "sched_getaffinity"):
        assert sorted(seen) == [[cpu] for cpu in cpus]


def test_numpy_multiplies_on_every_core() -> None:
    with NumpyProducts(read_topology().cpus[:1], 64) as products:
        assert products.seconds() >= 0
        assert products.operations == 2.0 * 64**3


def test_a_process_that_ends_early_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_products, "_WORKER", "raise SystemExit(3)")
    with pytest.raises(MicrobenchError, match="ended early"), NumpyProducts((0,), 64):
        pass


def test_a_quantity_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(machine: object) -> Turns:
        raise MicrobenchError("no")
        yield

    monkeypatch.setitem(cpu.QUANTITIES, "barrier", fail)
    run = measure_cpu(["clock", "barrier"], Settings(repeats=2, target_seconds=1e-4))
    assert run.failures == {"barrier": "no"} and "clock" in run.measurements


def test_quantities_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    def quantity(name: str, readings: int) -> Callable[[object], Turns]:
        def measure(machine: object) -> Turns:
            for _ in range(readings):
                turns.append(name)
                yield None
            yield one(name, readings, "", "")

        return measure

    monkeypatch.setattr(cpu, "QUANTITIES", {"slow": quantity("slow", 3), "short": quantity("short", 1)})
    run = measure_cpu()
    assert turns == ["slow", "short", "slow", "slow"]
    assert {key: each.value for key, each in run.measurements.items()} == {"slow": 3, "short": 1}


def test_a_quantity_whose_readings_take_long_takes_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"slow": ENOUGH_SECONDS, "short": 1e-6}
    clock = [0.0]

    def quantity(name: str) -> Callable[[object], Turns]:
        def measure(machine: object) -> Turns:
            readings = 0
            for _ in range(15):
                clock[0] += seconds[name]
                readings += 1
                if (yield None):
                    break
            yield one(name, readings, "", "")

        return measure

    monkeypatch.setattr(cpu, "QUANTITIES", {name: quantity(name) for name in seconds})
    monkeypatch.setattr(cpu.time, "perf_counter", lambda: clock[0])
    run = measure_cpu()
    assert {key: each.value for key, each in run.measurements.items()} == {"slow": LEAST_READINGS, "short": 15}


def test_a_part_of_a_run_measures_what_was_named() -> None:
    run = measure_cpu(["clock", "barrier"], Settings(repeats=2, target_seconds=1e-4))
    assert set(run.measurements) <= {"clock", "barrier"} and "clock" in run.measurements
    assert run.measurements["clock"].value > 1e8
    with pytest.raises(InputError, match="--only: 'dram' is not measured on CPUs; name one of clock, arithmetic"):
        measure_cpu(["dram"])


#: Loops that read memory, and the places in which they do.
READS = {"dram.read": 1, "dram.read_apart": 8}


def one(key: str, value: float, path: str = "", unit: str = "B/s") -> Measurement:
    return Measurement(key=key, unit=unit, samples=(value,), method="made up", path=path, best=True)


def measured() -> dict[str, Measurement]:
    found = [one("clock", 3e9, "clock_hz", "Hz"), one("barrier", 1e-7, "barrier_seconds", "s")]
    found.append(one("fma", 2e11, "throughput.float32.peak_flops", "FLOP/s"))
    found.append(one("gemm", 1.8e11, "throughput.float32.sustained_flops", "FLOP/s"))
    found += [one("numpy.gemm", 1.7e11, "", "FLOP/s"), one("numpy.add", 2e10, "")]
    for level, rate in (("l1", 4e11), ("l2", 2e11), ("l3", 5e10), ("dram", 2e10)):
        found.append(one("dram.add" if level == "dram" else f"{level}.read", rate, f"layers.{level}.bandwidth"))
        found.append(one(f"{level}.latency", 1e-9, f"layers.{level}.latency_seconds", "s"))
    return {each.key: each for each in found}


def test_the_description_holds_layers_and_rates_of_a_device_file() -> None:
    description = describe(TWO_CORES, measured(), "2026-01-02")
    assert [layer.name for layer in description.layers] == ["l1", "l2", "l3", "dram"]
    assert [layer.shared_by for layer in description.layers] == ["unit", "unit", "device", "device"]
    assert description.layers[-1].bandwidth_bytes_per_second == 2e10
    assert (description.throughput[0].peak_flops, description.throughput[0].sustained_flops) == (2e11, 1.8e11)
    assert description.provenance["clock_hz"].startswith("measured 2026-01-02 by roller microbench")


def test_the_description_reads_back() -> None:
    import tomllib

    description = describe(TWO_CORES, measured(), "2026-01-02")
    assert msgspec.convert(tomllib.loads(toml_text(description)), CpuDescription) == description
    assert msgspec.json.decode(json_text(description), type=CpuDescription) == description


def test_beginnings_of_pages_are_what_reading_in_one_place_takes_longer() -> None:
    """A core reads a page of 4 KiB in 200 ns besides 80 ns of its beginning, which eight places share."""
    single, apart = (one(key, 2 * 4096 / (200e-9 + 80e-9 / places)) for key, places in READS.items())
    both = {each.key: each for each in (single, apart)}
    reading = Reading.of(both, cores=2)
    assert reading is not None
    assert reading.bytes_per_second == pytest.approx(2 * 4096 / 200e-9)
    assert reading.page_start_seconds == pytest.approx(80e-9)
    assert Reading.of(both | {"dram.read": apart}, cores=2) == Reading(apart.value, None)
    assert Reading.of({}, cores=2) is None


def test_a_cache_that_others_use_too_holds_what_was_measured() -> None:
    found = measured() | {"l3.capacity": one("l3.capacity", float(9 << 20), "layers.l3.capacity_bytes", "B")}
    assert describe(TWO_CORES, found).layers[2].capacity_bytes == 9 << 20
    assert describe(TWO_CORES, measured()).layers[2].capacity_bytes == 32 << 20


def test_reads_that_wait_for_memory_say_what_a_cache_holds() -> None:
    sizes = {"cached": 1 << 20, "uncached": 1 << 27, "most": 1 << 25}
    # Of 32 MiB a quarter is there, of 8 MiB all.
    seconds = {1 << 20: 2e-8, 1 << 23: 2e-8, 1 << 25: 1.1e-7, 1 << 27: 1.4e-7}
    assert held_bytes(seconds, **sizes) == pytest.approx(1 << 23)
    assert held_bytes(dict.fromkeys(seconds, 1e-7), **sizes) == 1 << 25
    assert held_bytes({size: 1.4e-7 for size in seconds} | {1 << 20: 2e-8}, **sizes) == 1 << 20


def test_the_capacity_of_a_shared_cache_is_measured_within_what_the_system_says() -> None:
    shared = Topology(
        title="A processor", architecture="x86_64", cpus=tuple(sorted(os.sched_getaffinity(0)))[:1], simd_bits=128,
        vector_registers=16, caches=(Cache(1, 32 << 10, 64, True), Cache(2, 1 << 20, 64, False)), memory_bytes=1 << 28,
    )  # fmt: skip
    with Cores(shared.cpus) as cores:
        machine = Machine(shared, cores, loops(shared.lanes, shared.vector_registers), Settings(repeats=2))
        (found,) = (each for each in capacity.measure(machine) if each is not None)
        private = replace(shared, caches=shared.caches[:1])
        assert list(capacity.measure(replace(machine, topology=private))) == []
    assert found.key == "l2.capacity" and found.path == "layers.l2.capacity_bytes"
    assert found.low is not None and found.low <= found.value <= 1 << 20


def test_a_missing_number_is_named() -> None:
    with pytest.raises(InputError, match=r"--out: a description needs clock, fma, gemm"):
        describe(TWO_CORES, {})


def test_figures_stand_against_numpys() -> None:
    rows = {ours.key: ratio for ours, _, ratio in against_numpy(measured())}
    assert rows == pytest.approx({"gemm": 1.8 / 1.7, "dram.add": 1.0})
