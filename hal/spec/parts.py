"""The records a device is made of: memory layers, execution units, limits, clocks, rates, units in the names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from hal.support.errors import InputError, listed

#: Names of element types, as everywhere in the project.
Dtype = Literal[
    "float64", "float32", "tfloat32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "int8"
]

Kind = Literal["gpu", "ipu", "cpu"]
CodeGenerator = Literal["cuda", "cuda-source", "opencl-source", "llvm"]
SharedBy = Literal["thread", "unit", "device"]
ManagedBy = Literal["program", "hardware"]
Lane = Literal["thread", "element"]

# The bounds are for readers of the JSON Schema; ``hal/spec/checks.py`` enforces them, with the key path in its message.
Count = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 1})]
CountOrZero = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0})]
Positive = Annotated[float, msgspec.Meta(extra_json_schema={"exclusiveMinimum": 0})]
Text = Annotated[str, msgspec.Meta(extra_json_schema={"minLength": 1})]

#: Bytes of an element of every :data:`Dtype` as it is stored; TensorFloat-32 lies in memory as float32.
DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int32": 4, "int8": 1, "uint16": 2,
}  # fmt: skip
#: Bytes of a line of a processor's caches, on every processor that kernels are generated for.
CPU_LINE_BYTES = 64

#: How far ahead of its use a kernel for processors asks for a line of an array that it runs through: what a core moves
#: while a line comes from memory, with room.
CPU_AHEAD_BYTES = 2048


class MemoryLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer of the memory hierarchy.

    Attributes:
        name: ``registers``, ``shared``, ``l2`` or ``dram``; on an IPU ``registers``, ``local`` or ``exchange``; on a
            CPU ``registers``, ``l1``, ``l2``, ``l3`` or ``dram``.
        capacity_bytes: bytes one sharer holds: of a thread for registers, of a unit for shared and local memory, of
            the whole device for the rest.
        shared_by: who shares one copy of the layer: ``thread``, ``unit`` or ``device``.
        bandwidth_bytes_per_second: sustained rate, all units of the device together.
        transaction_bytes: the smallest transfer; a request for less moves this much.
        bank_count: ports that serve one request together; absent when the layer has no banks we plan around.
        bank_width_bytes: bytes one bank delivers per cycle; absent together with ``bank_count``.
        latency_seconds: from a dependent load to its value on an idle device; absent where no source gives it.
        scattered_bytes_per_second: rate of reads of ``transaction_bytes`` each, far apart, so that every one activates
            another DRAM row; absent where it was not measured.
        read_bytes_per_second: rate of reads alone, within pages; absent where it was not measured.
        page_start_seconds: time in which a unit that reads in one place waits at the beginning of every page of 4 KiB,
            until its prefetchers follow; absent where it does not, or it was not measured.
        translation_reach_bytes: how much memory a unit can read at a time with the address translations it keeps (its
            TLB); absent where reads do not wait for translations, or it was not measured.
        translation_miss_seconds: time between two misses of a unit's translations; absent together with
            ``translation_reach_bytes``.
        managed_by: who decides what lies in it: the ``program``, by copies, or the ``hardware``, as a cache. Absent
            where the layer's name says so: shared and local memory are the program's, ``l2`` of a GPU is a cache.
        associativity: lines whose addresses fall together that a cache keeps at a time; absent where no plan needs it
            around it.
        partitions: parts of a cache, each near some of the units, that keep lines of their own: a line that units
            of all sides read lies in each of them. Absent where the cache is one.
        lanes_per_cycle: lanes whose addresses the load/store units of a unit take in a cycle; absent where they take a
            TEU's at once, or no source says so.
    """

    name: Text
    capacity_bytes: Count
    shared_by: SharedBy
    bandwidth_bytes_per_second: Positive
    transaction_bytes: Count
    bank_count: Count | None = None
    bank_width_bytes: Count | None = None
    latency_seconds: Positive | None = None
    scattered_bytes_per_second: Positive | None = None
    read_bytes_per_second: Positive | None = None
    page_start_seconds: Positive | None = None
    translation_reach_bytes: Count | None = None
    translation_miss_seconds: Positive | None = None
    managed_by: ManagedBy | None = None
    associativity: Count | None = None
    partitions: Count | None = None
    lanes_per_cycle: Count | None = None

    @property
    def is_cache(self) -> bool:
        """True if the hardware decides what lies in it, as far as the spec says so."""
        return self.managed_by == "hardware"


class Teu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rTile execution unit: the lanes that execute one instruction together (thesis 6.3.4 and 6.4).

    Attributes:
        name: ``warp``, ``wavefront``, ``hardware thread`` or ``SIMD unit``.
        lanes: threads in one TEU, or float32 elements of its vectors.
        group_size: TEUs of one unit that can issue in the same cycle, e.g. the warp schedulers of an SM.
        resident_per_unit: TEUs one unit keeps in flight at most.
        lane: what a lane is: a ``thread`` with registers and addresses of its own, or an ``element`` of vectors that
            one thread computes with.
        chain_cycles: cycles from one multiply-add to the next that needs its result; absent where no plan needs it.
        issue_per_cycle: instructions that a unit starts in a cycle, of whatever kind; absent where TEUs start one each.
    """

    name: Text
    lanes: Count
    group_size: Count
    resident_per_unit: Count
    lane: Lane = "thread"
    chain_cycles: Positive | None = None
    issue_per_cycle: Positive | None = None


#: Name of the matrix instructions that four warps execute together.
WARP_GROUPS = "wgmma"

#: Name of the matrix instructions that one unit, or a pair of units together, executes: operands in shared memory,
#: accumulators in a memory of their own (tensor memory), issued by a single thread.
UNIT_PAIRS = "tcgen05"

#: Name of the matrix instructions of AMD's wavefronts, which libraries' kernels are written with and ours are not.
WAVEFRONTS = "mfma"


def rate_key(name: str, input_dtype: str, accumulate_dtype: str) -> str:
    """The key path of a matrix instruction: single warps' go by types alone, any other's by types and name.

    >>> rate_key("mma", "float16", "float32"), rate_key("wgmma", "float16", "float32")
    ('float16-float32', 'float16-float32-wgmma')
    """
    types = f"{input_dtype}-{accumulate_dtype}"
    return f"{types}-{name}" if name in (WARP_GROUPS, UNIT_PAIRS) else types


class MatrixInstruction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A matrix multiply-accumulate that one TEU, or several together, execute: D[m,n] = A[m,k] B[k,n] + C[m,n].

    Attributes:
        name: the programming interface: ``wgmma`` is for warp groups, ``tcgen05`` for a unit or a pair of units,
            ``mfma`` for AMD's wavefronts, any other (``wmma``, ``mma``) for single warps.
        shape: (m, n, k) in elements.
        input_dtype: type of A and B.
        accumulate_dtype: type of C and D.
        peak_flops: datasheet FLOP/s of the device at boost clock, dense operands.
        sustained_flops: FLOP/s that a long-running kernel written with this interface reaches.
        best_flops: FLOP/s of the best library product, of any length: the clock has not fallen yet; absent where
            it was neither measured nor estimated.
        power_limited_flops: FLOP/s that a large library product is left with once the board has been at its power
            limit for long and lowered its clock for good; absent where the limit does not bind.
    """

    name: Text
    shape: tuple[int, int, int]
    input_dtype: Dtype
    accumulate_dtype: Dtype
    peak_flops: Positive
    sustained_flops: Positive
    best_flops: Positive | None = None
    power_limited_flops: Positive | None = None

    @property
    def key(self) -> str:
        """Name in key paths: ``float16-float32`` is float16 inputs, float32 accumulators; warp
        groups' are ``float16-float32-wgmma``, a pair of units' ``float16-float32-tcgen05``."""
        return rate_key(self.name, self.input_dtype, self.accumulate_dtype)

    @property
    def fresh_flops(self) -> float:
        """FLOP/s of long loops before the clock has fallen: the sustained rate where no fall is known."""
        return self.sustained_flops if self.power_limited_flops is None else self.best_flops or self.sustained_flops

    @property
    def settled_flops(self) -> float:
        """FLOP/s that the power limit leaves for good: the sustained rate where no fall is known."""
        return self.power_limited_flops or self.sustained_flops

    @property
    def is_by_groups(self) -> bool:
        """True if four warps execute it together."""
        return self.name == WARP_GROUPS

    @property
    def is_by_unit_pairs(self) -> bool:
        """True if a unit, or a pair of units, executes it."""
        return self.name == UNIT_PAIRS

    @property
    def is_by_wavefronts(self) -> bool:
        """True if a wavefront of AMD's executes it."""
        return self.name == WAVEFRONTS

    @property
    def is_by_warps(self) -> bool:
        """True if a single warp executes it."""
        return not (self.is_by_groups or self.is_by_unit_pairs or self.is_by_wavefronts)


class Throughput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arithmetic rate of the ordinary (not matrix) pipelines for one element type.

    Attributes:
        dtype: the element type.
        peak_flops: FLOP/s of the device at boost clock with every lane doing a fused multiply-add each cycle.
        sustained_flops: FLOP/s that long-running library GEMMs reach, with the clock that load leaves.
        best_flops: FLOP/s of the best library GEMM, of any length: the clock has not fallen yet; absent where it was
            not measured.
        power_limited_flops: FLOP/s of a GEMM with the largest tiles and an idle DRAM once the board has been at its
            power limit for long and lowered its clock for good; absent where the limit does not bind.
    """

    dtype: Dtype
    peak_flops: Positive
    sustained_flops: Positive
    best_flops: Positive | None = None
    power_limited_flops: Positive | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Most that one launch, block, thread and unit may use. A unit is an SM, a CU or a tile; a register has 32 bits.

    Attributes:
        threads_per_block: threads in one block (work-group).
        threads_per_unit: resident threads.
        blocks_per_unit: resident blocks.
        registers_per_unit: the register file of a unit.
        registers_per_thread: what the instruction set can name in one thread.
        registers_per_thread_usable: what a tile may plan to fill with accumulators and operands, so that the
            compiler's own registers still fit and nothing spills (thesis 5.5.3 and 6.4).
        register_allocation_granularity: registers are given to a TEU in multiples of this.
        shared_bytes_per_block: shared memory a block gets without asking for more.
        shared_bytes_per_block_opt_in: shared memory a block gets when the launch asks for it.
        shared_bytes_per_unit: shared memory of a unit, for all its resident blocks together.
        shared_bytes_reserved_per_block: taken by the system from ``shared_bytes_per_unit`` for every resident block.
        grid_x: blocks along x in one launch.
        grid_y: blocks along y.
        grid_z: blocks along z.
    """

    threads_per_block: Count
    threads_per_unit: Count
    blocks_per_unit: Count
    registers_per_unit: Count
    registers_per_thread: Count
    registers_per_thread_usable: Count
    register_allocation_granularity: Count
    shared_bytes_per_block: Count
    shared_bytes_per_block_opt_in: Count
    shared_bytes_per_unit: Count
    shared_bytes_reserved_per_block: CountOrZero
    grid_x: Count
    grid_y: Count
    grid_z: Count


class Clocks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Clock of the arithmetic units.

    Attributes:
        base_hz: guaranteed within the board's power limit.
        boost_hz: the highest that the datasheet promises, which its peaks assume.
        highest_hz: what the board goes up to by itself while power and temperature allow, as GeForce boards do; absent
            where that is the boost clock.
        sustained_hz: what a long float32 GEMM load leaves.
        job_hz: what hours of 16-bit products of a job's numbers leave; absent where it follows from the rates of
            benchmarks (:mod:`hal.spec.power`).
    """

    base_hz: Positive
    boost_hz: Positive
    sustained_hz: Positive
    highest_hz: Positive | None = None
    job_hz: Positive | None = None


class Framework(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of one call of a deep-learning framework however small its tensors are, host and device together.

    GPU events right before and right after the call, nothing else in flight: the host prepares and launches while the
    device waits. It depends on the host of the board as much as on the board.

    Attributes:
        call_seconds: an element-wise operator, one kernel; median over sizes too small to take time themselves.
        matmul_call_seconds: a batched matrix multiplication without bias; likewise.
        linear_call_seconds: a linear layer with bias (addmm); likewise.
        softmax_call_seconds: softmax; absent where it follows from ``call_seconds`` (the same host measured both).
        layer_norm_call_seconds: layer norm; likewise.
    """

    call_seconds: Positive
    matmul_call_seconds: Positive
    linear_call_seconds: Positive
    softmax_call_seconds: Positive | None = None
    layer_norm_call_seconds: Positive | None = None


#: Stands in for a board without measurements: the medians over the boards of the NeuSight data set (PyTorch 2.1).
TYPICAL_FRAMEWORK = Framework(call_seconds=30e-6, matmul_call_seconds=34e-6, linear_call_seconds=58e-6)


class DeviceFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a device, unchecked: what checks and key paths read. `DeviceSpec` explains them."""

    name: Text
    title: Text
    vendor: Text
    kind: Kind
    architecture: Text
    unit_name: Text
    unit_count: Count
    teu: Teu
    layers: tuple[MemoryLayer, ...]
    limits: Limits
    clocks: Clocks
    throughput: tuple[Throughput, ...]
    launch_overhead_seconds: Positive
    block_launch_seconds: Positive
    provenance: dict[str, str]
    matrix_instructions: tuple[MatrixInstruction, ...] = ()
    framework: Framework | None = None
    compute_capability: tuple[int, int] | None = None
    code_generator: CodeGenerator | None = None
    code_generator_reason: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def registers(self) -> MemoryLayer:
        """The top layer."""
        return self.layer("registers")

    @property
    def shared(self) -> MemoryLayer:
        """The layer in which a unit keeps data tiles: shared memory of a GPU, local memory of an IPU tile, the last
        cache that a core has for itself."""
        return [layer for layer in self.layers if layer.shared_by == "unit"][-1]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types with an arithmetic rate."""
        return tuple(rate.dtype for rate in self.throughput)

    def layer(self, name: str) -> MemoryLayer:
        """The memory layer of that name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        names = [layer.name for layer in self.layers]
        raise InputError(f"device.layers.{name}", f"{self.name} has no such memory layer", f"it has {listed(names)}")
