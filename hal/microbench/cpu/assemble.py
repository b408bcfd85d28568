"""A processor's device spec from what was measured on its cores."""

from __future__ import annotations

import datetime
import math
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError

if TYPE_CHECKING:
    from hal.microbench.cpu import Topology
    from hal.microbench.measurement import Measurement, Measurements


_NEEDED = ("clock", "fma", "issue", "gemm", "dram.add", "dram.latency")
_SYSTEM = "read from the operating system"
#: Vector registers that a tile leaves to the compiler: one operand on its way.
_SPARE_VECTORS = 1

#: By how much vectors of multiply-adds a cycle are above a whole number by chance.
_CLOCK_SPREAD = 0.15

_CHAIN_CYCLES = 4.0
_CALL_SECONDS = 1e-7
_BLOCK_SECONDS = 2e-8
_UNLIMITED = 2**31 - 1


def spec_of(name: str, topology: Topology, measurements: Measurements, architecture: str, day: str = "") -> DeviceSpec:
    """The device called `name` that these measurements describe, ``architecture`` being the processor's name in LLVM.

    Raises:
        InputError: a number that every device has was not measured, or the system does not say which caches there are.
    """
    missing = [key for key in _NEEDED if key not in measurements]
    if missing:
        raise InputError("device cpu", f"needs {', '.join(missing)}", "measure all quantities, without --only")
    return _Assembly(name, topology, measurements, architecture, day or datetime.date.today().isoformat()).spec()


class _Assembly:
    """The numbers of the device and where each comes from."""

    def __init__(self, name: str, topology: Topology, measurements: Measurements, architecture: str, day: str) -> None:
        self.name, self.topology, self.measurements, self.architecture, self.day = (
            name,
            topology,
            measurements,
            architecture,
            day,
        )
        self.provenance: dict[str, str] = {}

    def spec(self) -> DeviceSpec:
        import msgspec

        topology = self.topology
        fields: dict[str, Any] = {
            "name": self.name,
            "title": topology.title or topology.architecture,
            "vendor": _vendor(topology.title),
            "kind": "cpu",
            "architecture": self.architecture,
            "code_generator": "llvm",
            "unit_name": "core",
            "unit_count": len(topology.cpus),
            "teu": self._teu(),
            "layers": self._layers(),
            "clocks": self._clocks(),
            "throughput": self._throughput(),
            "launch_overhead_seconds": self._launch(),
            "block_launch_seconds": _BLOCK_SECONDS / len(topology.cpus),
        }
        fields["limits"] = self._limits(fields["layers"])
        self.provenance["unit_count"] = _SYSTEM
        self.provenance["block_launch_seconds"] = (
            "estimate: 20 ns for a thread to take its next block, all cores at once"
        )
        fields["provenance"] = dict(sorted(self.provenance.items()))
        try:
            return msgspec.convert(fields, DeviceSpec)
        except msgspec.ValidationError as error:
            cause = error.__cause__
            if isinstance(cause, InputError):
                raise InputError(
                    cause.field, f"measured, but {cause.problem}", "measure again on an idle machine"
                ) from None
            raise

    def _teu(self) -> dict[str, Any]:
        self.provenance["teu"] = _SYSTEM
        lanes = self.topology.lanes
        cycle = (
            self.measurements["fma"].value / self.measurements["clock"].value / len(self.topology.cpus) / (2 * lanes)
        )
        self.provenance["teu.group_size"] = (
            f"arithmetic: {cycle:.2f} vectors of multiply-adds a cycle and core, measured"
        )
        self.provenance["teu.chain_cycles"] = "estimate: 4, as of most server processors since 2015"
        started = self.measurements["issue"].value / self.measurements["clock"].value / len(self.topology.cpus)
        self.provenance["teu.issue_per_cycle"] = self._source(self.measurements["issue"])
        self.provenance["teu.resident_per_unit"] = "arithmetic: one thread per core"
        return {
            "name": "SIMD unit",
            "lanes": lanes,
            # Cores are slower while they compute with wide vectors than while they count cycles.
            "group_size": max(1, math.ceil(cycle - _CLOCK_SPREAD)),
            "resident_per_unit": 1,
            "lane": "element",
            "chain_cycles": _CHAIN_CYCLES,
            "issue_per_cycle": round(started, 2),
        }

    def _layers(self) -> list[dict[str, Any]]:
        topology, peak = self.topology, self.measurements["fma"].value
        vector_bytes = topology.simd_bits // 8
        layers: list[dict[str, Any]] = [
            {
                "name": "registers",
                "capacity_bytes": topology.vector_registers * vector_bytes,
                "shared_by": "thread",
                "bandwidth_bytes_per_second": _rounded(6 * peak),
                "transaction_bytes": vector_bytes,
                "managed_by": "program",
            }
        ]
        self.provenance["layers"] = _SYSTEM
        self.provenance["layers.registers"] = "instruction set: vector registers x bytes of one"
        self.provenance["layers.registers.bandwidth_bytes_per_second"] = (
            "estimate: operands arrive as fast as the float32 pipelines take them, three 4-byte reads per multiply-add"
        )
        for cache in topology.caches:
            layer = {
                "name": f"l{cache.level}",
                "capacity_bytes": cache.size_bytes,
                "shared_by": "unit" if cache.private else "device",
                "transaction_bytes": cache.line_bytes,
                "managed_by": "hardware",
            }
            if cache.ways:
                layer["associativity"] = cache.ways
            self._set_capacity(layer)
            self._set_rates(layer, f"l{cache.level}.read", layers[-1])
            layers.append(layer)
        if len(layers) == 1:
            raise InputError("device cpu", "the system does not say which caches there are", "describe it in a file")
        dram = {
            "name": "dram",
            "capacity_bytes": topology.memory_bytes,
            "shared_by": "device",
            "transaction_bytes": topology.caches[-1].line_bytes,
        }
        self._set_rates(dram, "dram.add", layers[-1])
        self._set_reading(dram, layers[-1]["bandwidth_bytes_per_second"])
        return [*layers, dram]

    def _set_capacity(self, layer: dict[str, Any]) -> None:
        """Bytes of a cache that a process finds, where that was measured and is less than what the system says."""
        measured = self.measurements.get(f"{layer['name']}.capacity")
        if measured is not None and measured.value < layer["capacity_bytes"]:
            layer["capacity_bytes"] = int(measured.value)
            self.provenance[f"layers.{layer['name']}.capacity_bytes"] = self._source(measured)

    def _set_reading(self, dram: dict[str, Any], bound: float) -> None:
        """Rate of memory that is read alone, at most that of the level above, and what one place at a time costs."""
        from hal.microbench.cpu.bandwidth import Reading

        reading = Reading.of(self.measurements, len(self.topology.cpus))
        if reading is None:
            return
        rate = min(reading.bytes_per_second, bound)
        figures = {"read_bytes_per_second": rate, "page_start_seconds": reading.page_start_seconds}
        for name, value in figures.items():
            if value is not None:
                dram[name] = _rounded(value)
                self.provenance[f"layers.dram.{name}"] = (
                    "arithmetic: from reads of memory in one place and in several; "
                    + self._source(self.measurements["dram.read_apart"])
                )

    def _set_rates(self, layer: dict[str, Any], key: str, above: Mapping[str, Any]) -> None:
        """Bandwidth, of a level that is too small for a reading of its own the one above, and latency."""
        path = f"layers.{layer['name']}"
        bound = above["bandwidth_bytes_per_second"]
        if key in self.measurements:
            measured = self.measurements[key]
            # Never above the level before: a reading within the spread of that one's.
            layer["bandwidth_bytes_per_second"] = min(_rounded(measured.value), bound)
            self.provenance[f"{path}.bandwidth_bytes_per_second"] = self._source(measured)
        else:
            layer["bandwidth_bytes_per_second"] = bound
            self.provenance[f"{path}.bandwidth_bytes_per_second"] = "estimate: that of the level above it"
        latency = self.measurements.get(f"{layer['name']}.latency")
        if latency is not None:
            layer["latency_seconds"] = _rounded(latency.value)
            self.provenance[f"{path}.latency_seconds"] = self._source(latency)

    def _limits(self, layers: list[dict[str, Any]]) -> dict[str, int]:
        topology = self.topology
        tiles = next(layer["capacity_bytes"] for layer in reversed(layers) if layer["shared_by"] == "unit")
        registers = topology.vector_registers * topology.lanes
        self.provenance["limits"] = "arithmetic: one block per core, one thread a block, tiles in the core's own caches"
        self.provenance["limits.registers_per_thread"] = "instruction set: vector registers x lanes"
        self.provenance["limits.registers_per_thread_usable"] = (
            "arithmetic: all vector registers but one, which compiled tiles of 6 x 4 and 14 x 2 vectors leave room for"
        )
        return {
            "threads_per_block": 1,
            "threads_per_unit": 1,
            "blocks_per_unit": 1,
            "registers_per_unit": registers,
            "registers_per_thread": registers,
            "registers_per_thread_usable": registers - _SPARE_VECTORS * topology.lanes,
            "register_allocation_granularity": topology.lanes,
            "shared_bytes_per_block": tiles,
            "shared_bytes_per_block_opt_in": tiles,
            "shared_bytes_per_unit": tiles,
            "shared_bytes_reserved_per_block": 0,
            "grid_x": _UNLIMITED,
            "grid_y": 1,
            "grid_z": 1,
        }

    def _clocks(self) -> dict[str, float]:
        clock = self.measurements["clock"]
        self.provenance["clocks"] = self._source(clock)
        return dict.fromkeys(("base_hz", "boost_hz", "sustained_hz"), _rounded(clock.value))

    def _throughput(self) -> list[dict[str, Any]]:
        peak, product = self.measurements["fma"], self.measurements["gemm"]
        single = {
            "dtype": "float32",
            "peak_flops": _rounded(peak.value),
            "sustained_flops": min(_rounded(product.value), _rounded(peak.value)),
        }
        self.provenance["throughput.float32.peak_flops"] = self._source(peak)
        self.provenance["throughput.float32.sustained_flops"] = self._source(product)
        self.provenance["throughput.float64"] = "arithmetic: half of float32, as half as many lanes fit into a vector"
        halves = {key: value / 2 for key, value in single.items() if isinstance(value, float)}
        return [single, {"dtype": "float64", **halves}]

    def _launch(self) -> float:
        """Two barriers, when the blocks are shared out and when all are done, and the calls around them."""
        barrier = self.measurements.get("barrier")
        if barrier is None:
            self.provenance["launch_overhead_seconds"] = "estimate: 0.1 us for a call of a single core"
            return _CALL_SECONDS
        self.provenance["launch_overhead_seconds"] = f"arithmetic: 0.1 us and two barriers; {self._source(barrier)}"
        return _rounded(_CALL_SECONDS + 2 * barrier.value)

    def _source(self, measurement: Measurement) -> str:
        how = f"{measurement.method}; {measurement.readings}"
        return f"measured {self.day} by roller microbench, Python {platform.python_version()}: {how}"


def _vendor(title: str) -> str:
    vendors = ("Intel", "AMD", "Ampere", "Apple", "Amazon")
    return next((vendor for vendor in vendors if vendor.casefold() in title.casefold()), "unknown")


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
