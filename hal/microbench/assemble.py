"""From measurements and what the driver says to a complete device.

Three sources, in this order of weight: measurements, facts of the driver, and arithmetic on both. The few numbers that
neither tells (schedulers of a unit, base clock, planned registers) come from the shipped spec of the same board where
there is one, or from the programming guide; the provenance says which.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from hal.microbench.launcher import Board
from hal.microbench.measurement import Found, Measurement
from hal.microbench.units.arithmetic import INSTRUCTIONS
from hal.microbench.units.matrix import FRAGMENTS
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError

_NEEDED = ("fma.float32", "lanes.float32", "clock.sustained", "dram.add", "dram.transaction", "l2.read", "shared.read")
_ALSO_NEEDED = ("shared.banks", "shared.width", "launch", "block.launch", "registers.portion")
#: Of the multiply-add rate, what a library's matrix products reach where none was at hand: a mean over the boards.
_LIBRARY_SHARE = 0.85

_PLANNED_REGISTERS = 96
_DRIVER = "read from the driver"


def spec_from(board: Board, found: Found, known: DeviceSpec | None = None, day: str = "") -> DeviceSpec:
    """The device: validated by hal. Raises InputError where a number that every device file has was not measured."""
    missing = [key for key in (*_NEEDED, *_ALSO_NEEDED) if key not in found]
    if missing:
        remedy = "measure all quantities, without --only; the table says which failed and why"
        raise InputError("--out", f"a device file needs {', '.join(missing)}", remedy)
    assembly = _Assembly(board, found, known, day or datetime.date.today().isoformat())
    return assembly.spec()


def device_name(title: str) -> str:
    """``tesla-v100-sxm2-16gb`` from the driver's name."""
    return re.sub(r"[^a-z0-9]+", "-", title.casefold()).strip("-") or "gpu"


class _Assembly:
    """The numbers of one device and where each comes from."""

    def __init__(self, board: Board, found: Found, known: DeviceSpec | None, day: str) -> None:
        self.board, self.found, self.known, self.day = board, found, known, day
        self.provenance: dict[str, str] = {}

    def spec(self) -> DeviceSpec:
        board = self.board
        major, minor = board.compute_capability
        fields: dict[str, Any] = {
            "name": device_name(board.title),
            "title": board.title,
            "vendor": "NVIDIA",
            "kind": "gpu",
            "architecture": f"sm_{major}{minor}",
            "compute_capability": [major, minor],
            "unit_name": "SM",
            "unit_count": board.units,
            "teu": self._teu(),
            "layers": list(self._layers().values()),
            "limits": self._limits(),
            "clocks": self._clocks(),
            "throughput": list(self._throughput().values()),
            "matrix_instructions": self._matrix(),
            **self._code_generator(),
        }
        for path in ("unit_count", "compute_capability"):
            self.provenance[path] = _DRIVER
        self._set("launch_overhead_seconds", fields, "launch_overhead_seconds", "launch")
        self._set("block_launch_seconds", fields, "block_launch_seconds", "block.launch")
        if framework := self._framework():
            fields["framework"] = framework
        fields["provenance"] = dict(sorted(self.provenance.items()))
        return _converted(fields)

    def _code_generator(self) -> dict[str, str]:
        if self.board.compute_capability >= (5, 0):
            return {"code_generator": "cuda"}
        return {"code_generator": "cuda-source", "code_generator_reason": "NVRTC 12 compiles for sm_50 and newer"}

    def _teu(self) -> dict[str, Any]:
        board = self.board
        self.provenance["teu"] = _DRIVER
        guide = "NVIDIA architecture white papers: four warp schedulers per SM, two on GP100"
        schedulers = self.known.teu.group_size if self.known else 2 if board.compute_capability == (6, 0) else 4
        self.provenance["teu.group_size"] = f"shipped spec {self.known.name}" if self.known else guide
        return {
            "name": "warp",
            "lanes": board.lanes,
            "group_size": schedulers,
            "resident_per_unit": board.threads_per_unit // board.lanes,
        }

    def _layers(self) -> dict[str, dict[str, Any]]:
        board = self.board
        peak = self._peak("float32", 2)
        layers = {
            "registers": _layer("registers", 1020, "thread", bandwidth_bytes_per_second=6 * peak, transaction_bytes=4),
            "shared": _layer("shared", board.shared_per_unit, "unit"),
            "l2": _layer("l2", board.l2_bytes, "device", transaction_bytes=32),
            "dram": _layer("dram", board.memory_bytes, "device"),
        }
        self.provenance["layers"] = _DRIVER
        self.provenance["layers.registers"] = (
            "estimate: operands arrive as fast as the float32 pipelines take them, three 4-byte reads per multiply-add "
            "at boost clock; 255 registers of 4 bytes per thread"
        )
        self.provenance["layers.l2.transaction_bytes"] = "sectors of 32 bytes as in the CUDA profiler documentation"
        for name, layer in layers.items():
            for measurement in self.found.values():
                layer_name, _, key = measurement.path.removeprefix("layers.").partition(".")
                if measurement.path.startswith("layers.") and layer_name == name:
                    self._set(measurement.path, layer, key, measurement.key)
        shared, dram = layers["shared"], layers["dram"]
        shared["transaction_bytes"] = board.lanes * shared["bank_width_bytes"]
        self.provenance["layers.shared.transaction_bytes"] = "arithmetic: one warp's worth, lanes x bank width"
        streaming = dram["bandwidth_bytes_per_second"]
        if dram.get("scattered_bytes_per_second", 0) > streaming:
            dram["scattered_bytes_per_second"] = streaming  # a reading within the spread of the streaming one
        return layers

    def _limits(self) -> dict[str, Any]:
        board = self.board
        self.provenance["limits"] = _DRIVER
        self.provenance["limits.registers_per_thread"] = "CUDA C++ programming guide: 255 on every board since sm_35"
        usable = self.known.limits.registers_per_thread_usable if self.known else _PLANNED_REGISTERS
        source = f"shipped spec {self.known.name}" if self.known else "thesis 5.5.3 and 6.4: 96 on V100"
        if "registers.values" in self.found:
            source += f"; tiles of up to {self.found['registers.values'].value:.0f} values compile without a spill"
        self.provenance["limits.registers_per_thread_usable"] = source
        limits = {
            "threads_per_block": board.threads_per_block,
            "threads_per_unit": board.threads_per_unit,
            "blocks_per_unit": board.blocks_per_unit,
            "registers_per_unit": board.registers_per_unit,
            "registers_per_thread": 255,
            "registers_per_thread_usable": usable,
            "shared_bytes_per_block": board.shared_per_block,
            "shared_bytes_per_block_opt_in": max(board.shared_opt_in, board.shared_per_block),
            "shared_bytes_per_unit": board.shared_per_unit,
            "shared_bytes_reserved_per_block": board.shared_reserved,
            **dict(zip(("grid_x", "grid_y", "grid_z"), board.grid, strict=True)),
        }
        path = "limits.register_allocation_granularity"
        self._set(path, limits, "register_allocation_granularity", "registers.portion")
        return limits

    def _clocks(self) -> dict[str, float]:
        clocks = {"boost_hz": self.board.clock_hz}
        self._set("clocks.sustained_hz", clocks, "sustained_hz", "clock.sustained")
        clocks["sustained_hz"] = min(clocks["sustained_hz"], self.board.clock_hz)
        self.provenance["clocks.boost_hz"] = _DRIVER
        self.provenance["clocks.base_hz"] = "estimate: the clock under the longest load, or less where it is higher"
        clocks["base_hz"] = clocks["sustained_hz"]
        if self.known:
            clocks["base_hz"] = min(self.known.clocks.base_hz, self.board.clock_hz)
            self.provenance["clocks.base_hz"] = f"shipped spec {self.known.name}"
        return clocks

    def _throughput(self) -> dict[str, dict[str, Any]]:
        rates: dict[str, dict[str, Any]] = {}
        share = self._library_share()
        for instruction in INSTRUCTIONS:
            dtype, rate = instruction.dtype, self.found.get(f"fma.{instruction.dtype}")
            if rate is None or f"lanes.{dtype}" not in self.found:
                continue
            path = f"throughput.{dtype}"
            peak = self._peak(dtype, instruction.operations)
            lanes = self.found[f"lanes.{dtype}"].value
            lanes_text = f"{self.board.units} x {lanes:.0f} lanes (measured) x {instruction.operations}"
            self.provenance[f"{path}.peak_flops"] = f"arithmetic: {lanes_text} x boost clock"
            self.provenance[f"{path}.sustained_flops"] = (
                f"estimate: {share:.2f} of the multiply-add rate {rate.value:.4g} ({self._source(rate)})"
            )
            rates[dtype] = {"dtype": dtype, "peak_flops": peak, "sustained_flops": share * min(rate.value, peak)}
        self._library_rates(rates["float32"])
        return rates

    def _library_share(self) -> float:
        """What the library's float32 products reach of the multiply-add rate; other types are taken to reach it too."""
        if "gemm.long" not in self.found:
            return _LIBRARY_SHARE
        return min(1.0, self.found["gemm.long"].value / self.found["fma.float32"].value)

    def _library_rates(self, float32: dict[str, Any]) -> None:
        """The float32 rates that library products gave in place of estimates, none above the peak."""
        for key in ("gemm.best", "gemm.long", "power.float32"):
            measurement = self.found.get(key)
            if measurement is not None and measurement.path:
                field = measurement.path.rpartition(".")[2]
                self._set(measurement.path, float32, field, key)
                float32[field] = min(float32[field], float32["peak_flops"])

    def _matrix(self) -> list[dict[str, Any]]:
        instructions = []
        for fragment in FRAGMENTS:
            rate, cycle = (self.found.get(f"wmma.{part}{fragment.key}") for part in ("", "cycle."))
            if rate is None or cycle is None:
                continue
            peak = cycle.value * self.board.units * self.board.clock_hz
            path = f"matrix_instructions.{fragment.key}"
            self.provenance[f"{path}.shape"] = "PTX ISA: shapes of wmma.mma"
            self.provenance[f"{path}.peak_flops"] = (
                f"arithmetic: {cycle.value:.0f} per SM and cycle x SMs x boost clock"
            )
            sustained, source = rate.value, self._source(rate)
            library = self.found.get("gemm.float16") if fragment.key == "float16-float32" else None
            if library is not None and library.value < sustained:
                sustained, source = library.value, self._source(library)
            self.provenance[f"{path}.sustained_flops"] = source
            instructions.append(
                {
                    "name": "wmma",
                    "shape": list(fragment.shape),
                    "input_dtype": fragment.input_dtype,
                    "accumulate_dtype": fragment.accumulate_dtype,
                    "peak_flops": peak,
                    "sustained_flops": min(sustained, peak),
                }
            )
        return instructions

    def _framework(self) -> dict[str, float] | None:
        framework: dict[str, float] = {}
        for measurement in self.found.values():
            if measurement.path.startswith("framework."):
                self._set(measurement.path, framework, measurement.path.partition(".")[2], measurement.key)
        return framework or None

    def _peak(self, dtype: str, operations: int) -> float:
        return self.found[f"lanes.{dtype}"].value * operations * self.board.units * self.board.clock_hz

    def _set(self, path: str, table: dict[str, Any], key: str, measured: str) -> None:
        measurement = self.found[measured]
        whole = measurement.unit in ("", "B")
        table[key] = round(measurement.value) if whole else float(f"{measurement.value:.4g}")
        self.provenance[path] = self._source(measurement)

    def _source(self, measurement: Measurement) -> str:
        how = f"{measurement.method}; {measurement.readings}"
        return f"measured {self.day} by roller microbench, {self.board.software}: {how}"


def _layer(name: str, capacity: int, shared_by: str, **numbers: float) -> dict[str, Any]:
    return {"name": name, "capacity_bytes": capacity, "shared_by": shared_by, **numbers}


def _converted(fields: Mapping[str, Any]) -> DeviceSpec:
    try:
        return msgspec.convert(fields, DeviceSpec)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, InputError):
            raise InputError(cause.field, f"measured, but {cause.problem}", "measure again on an idle board") from None
        raise
