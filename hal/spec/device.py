"""Accelerators as the compiler knows them: memory layers, execution units, limits and rates, as one frozen value.

The thesis calls this the hardware abstraction layer (6.3.4, and 5.5.3 for RATIONAL's view of the same hardware): a
device is a stack of memory layers with equal interfaces, and many rTile execution units (TEUs) at the top of it. A
device is data: nothing in the project asks for a device by name.

Bytes are bytes, seconds are seconds, and rates are per second; one fused multiply-add counts as two FLOP.
"""

from __future__ import annotations

from hal.spec.checks import check
from hal.spec.parts import (
    TYPICAL_FRAMEWORK,
    DeviceFields,
    Framework,
    MatrixInstruction,
    MemoryLayer,
    Throughput,
)
from hal.support.errors import InputError, listed


class DeviceSpec(DeviceFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator. Building one checks it whole: an impossible device raises ``InputError``.

    Attributes:
        name: short name, lower case, also the file name: ``v100-sxm2-16gb``.
        title: marketing name.
        vendor: ``NVIDIA``, ``AMD``, ``Graphcore``.
        kind: ``gpu``, ``ipu`` or ``cpu``; decides which memory layers there are.
        architecture: ``sm_70``, ``gfx906``, ``ipu-mk1``; of a CPU its name in LLVM, ``icelake-server``.
        compute_capability: (major, minor) of an NVIDIA device, otherwise absent.
        code_generator: ``cuda`` and ``llvm`` compile and run, ``cuda-source`` and ``opencl-source`` stop at source
            text, absent means estimates only.
        code_generator_reason: why it is neither ``cuda`` nor ``llvm``; empty when it is.
        aliases: other names ``load_device`` accepts, among them the name the driver reports.
        unit_name: what the vendor calls a unit: ``SM``, ``SMX``, ``CU``, ``tile``, ``core``.
        unit_count: units of the device.
        teu: the rTile execution unit.
        layers: memory layers, registers first.
        limits: what a launch, block, thread and unit may use.
        clocks: clock rates.
        throughput: arithmetic rates, one entry per element type.
        matrix_instructions: matrix multiply-accumulate instructions; may be empty.
        launch_overhead_seconds: device time between two dependent kernels of one stream that do nothing.
        block_launch_seconds: time between the starts of two blocks, the whole device together.
        framework: what a call of a deep-learning framework costs; absent where it was not measured.
        provenance: where the numbers come from: key path (``layers.dram.bandwidth_bytes_per_second``) or the start
            of one (``limits`` covers all below it) to the source in words. Every number is covered; the longest
            start that fits counts.
    """

    def __post_init__(self) -> None:
        check(self)

    def __hash__(self) -> int:
        # The generated hash would fail on the provenance dict; equal devices still hash equally.
        return hash((self.name, self.unit_count, self.layers, self.limits, self.clocks, self.throughput))

    @property
    def l2(self) -> MemoryLayer | None:
        """The cache of the whole device in front of DRAM, or None."""
        return next((layer for layer in self.layers[:-1] if layer.shared_by == "device"), None)

    @property
    def dram(self) -> MemoryLayer:
        """The bottom layer: DRAM, or all remote tile memories of an IPU."""
        return self.layers[-1]

    @property
    def framework_calls(self) -> Framework:
        """The costs of framework calls: the board's own, or typical ones when it has none."""
        return self.framework or TYPICAL_FRAMEWORK

    @property
    def warp_lanes(self) -> int:
        """Threads in one TEU: one where its lanes are elements of vectors."""
        return self.teu.lanes if self.teu.lane == "thread" else 1

    @property
    def teu_count(self) -> int:
        """TEUs that issue at the same time on the whole device."""
        return self.unit_count * self.teu.group_size

    def sustained_flops(self, dtype: str) -> float:
        """FLOP/s of the ordinary pipelines under a long load."""
        return self._rate(dtype).sustained_flops

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s of the ordinary pipelines as the datasheet counts them."""
        return self._rate(dtype).peak_flops

    def best_flops(self, dtype: str) -> float:
        """FLOP/s of the best library GEMM; where it was not measured, the sustained rate."""
        rate = self._rate(dtype)
        return rate.best_flops or rate.sustained_flops

    def power_limited_flops(self, dtype: str) -> float | None:
        """FLOP/s that the power limit leaves large GEMMs for good, or None where it does not bind."""
        return self._rate(dtype).power_limited_flops

    def limited_flops(self, dtype: str) -> float | None:
        """FLOP/s of the ordinary pipelines under the board's power limit, or None where it lowers no clock.

        Where it was not measured for GEMMs, it is the rate of busy lanes at the clock of a long float32 load. The
        sustained rate is no measure of it: there a library's own losses come on top.
        """
        clocks = self.clocks
        limit = self.power_limited_flops(dtype)
        if limit is None and clocks.sustained_hz < clocks.boost_hz:
            limit = self.peak_flops(dtype) * clocks.sustained_hz / clocks.boost_hz
        return limit

    def matrix_instruction(self, input_dtype: str, accumulate_dtype: str | None = None) -> MatrixInstruction | None:
        """The first matrix instruction of single warps with these types (any accumulator when not given), or None."""
        for instruction in self.matrix_instructions:
            types = instruction.input_dtype == input_dtype and accumulate_dtype in (None, instruction.accumulate_dtype)
            if types and instruction.is_by_warps:
                return instruction
        return None

    def warp_group_instruction(self, input_dtype: str) -> MatrixInstruction | None:
        """The matrix instruction of warp groups for a type, or None."""
        matches = (each for each in self.matrix_instructions if each.is_by_groups and each.input_dtype == input_dtype)
        return next(matches, None)

    def unit_pair_instruction(self, input_dtype: str) -> MatrixInstruction | None:
        """The matrix instruction of units and pairs of units for a type, or None."""
        matches = (
            each for each in self.matrix_instructions if each.is_by_unit_pairs and each.input_dtype == input_dtype
        )
        return next(matches, None)

    def wavefront_instruction(self, input_dtype: str) -> MatrixInstruction | None:
        """The matrix instruction of AMD's wavefronts for a type, or None."""
        matches = (
            each for each in self.matrix_instructions if each.is_by_wavefronts and each.input_dtype == input_dtype
        )
        return next(matches, None)

    def best_matrix_instruction(self, input_dtype: str) -> MatrixInstruction | None:
        """The matrix instruction that a library uses for a type: the one that most warps work on together; or None."""
        return (
            self.unit_pair_instruction(input_dtype)
            or self.warp_group_instruction(input_dtype)
            or self.matrix_instruction(input_dtype)
            or self.wavefront_instruction(input_dtype)
        )

    def _rate(self, dtype: str) -> Throughput:
        for rate in self.throughput:
            if rate.dtype == dtype:
                return rate
        raise InputError(
            f"device.throughput.{dtype}",
            f"{self.name} has no arithmetic rate for this data type",
            f"it has {listed(self.dtypes)}",
        )
