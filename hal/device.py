"""What the compiler knows of an accelerator: its memory layers, execution units, limits and rates, as one frozen value.

The thesis calls this the hardware abstraction layer (6.3.4, and 5.5.3 for RATIONAL's view of the same hardware): a
device is a stack of memory layers with equal interfaces, and many rTile execution units (TEUs) at the top of it. A
device is data: nothing in the project asks for a device by name.

Bytes are bytes, seconds are seconds, and rates are per second; one fused multiply-add counts as two FLOP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec

from hal.errors import InputError

Dtype = Literal["float64", "float32", "tfloat32", "float16", "bfloat16", "int32", "int8"]
"""Names of element types, as everywhere in the project."""

Kind = Literal["gpu", "ipu"]
CodeGenerator = Literal["cuda", "cuda-source", "opencl-source"]
SharedBy = Literal["thread", "unit", "device"]

# The bounds are for readers of the JSON Schema; ``check`` below enforces them, with the key path in its message.
Count = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 1})]
CountOrZero = Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 0})]
Positive = Annotated[float, msgspec.Meta(extra_json_schema={"exclusiveMinimum": 0})]
Text = Annotated[str, msgspec.Meta(extra_json_schema={"minLength": 1})]

LAYER_ORDER: dict[str, tuple[str, ...]] = {
    "gpu": ("registers", "shared", "l2", "dram"),
    "ipu": ("registers", "local", "exchange"),
}
"""The memory layers a device of each kind may have, top (next to the arithmetic) first; only ``l2`` may be absent."""

_SHARED_BY: dict[str, SharedBy] = {
    "registers": "thread",
    "shared": "unit",
    "local": "unit",
    "l2": "device",
    "dram": "device",
    "exchange": "device",
}

_OPTIONAL_LAYERS = frozenset({"l2"})


class MemoryLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer of the memory hierarchy.

    Attributes:
        name: ``registers``, ``shared``, ``l2`` or ``dram``; on an IPU ``registers``, ``local`` or ``exchange``.
        capacity_bytes: bytes one sharer holds: of a thread for registers, of a unit for shared and local memory, of
            the whole device for the rest.
        shared_by: who shares one copy of the layer: ``thread``, ``unit`` or ``device``.
        bandwidth_bytes_per_second: sustained rate, all units of the device together.
        transaction_bytes: the smallest transfer; a request for less moves this much.
        bank_count: ports that serve one request together; absent when the layer has no banks we plan around.
        bank_width_bytes: bytes one bank delivers per cycle; absent together with ``bank_count``.
        latency_seconds: from a dependent load to its value on an idle device; absent where nobody published it.
    """

    name: Text
    capacity_bytes: Count
    shared_by: SharedBy
    bandwidth_bytes_per_second: Positive
    transaction_bytes: Count
    bank_count: Count | None = None
    bank_width_bytes: Count | None = None
    latency_seconds: Positive | None = None


class Teu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rTile execution unit: the lanes that execute one instruction together (thesis 6.3.4 and 6.4).

    Attributes:
        name: ``warp``, ``wavefront`` or ``hardware thread``.
        lanes: threads in one TEU.
        group_size: TEUs of one unit that can issue in the same cycle, e.g. the warp schedulers of an SM.
        resident_per_unit: TEUs one unit keeps in flight at most.
    """

    name: Text
    lanes: Count
    group_size: Count
    resident_per_unit: Count


class MatrixInstruction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A matrix multiply-accumulate that one TEU executes as a whole: D[m,n] = A[m,k] B[k,n] + C[m,n].

    Attributes:
        name: the programming interface, ``wmma``.
        shape: (m, n, k) in elements.
        input_dtype: type of A and B.
        accumulate_dtype: type of C and D.
        peak_flops: datasheet FLOP/s of the device at boost clock, dense operands.
        sustained_flops: FLOP/s that a long-running kernel written with this interface reaches.
    """

    name: Text
    shape: tuple[int, int, int]
    input_dtype: Dtype
    accumulate_dtype: Dtype
    peak_flops: Positive
    sustained_flops: Positive

    @property
    def key(self) -> str:
        """How key paths name this instruction: ``float16-float32`` is float16 inputs, float32 accumulators."""
        return f"{self.input_dtype}-{self.accumulate_dtype}"


class Throughput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arithmetic rate of the ordinary (not matrix) pipelines for one element type.

    Attributes:
        dtype: the element type.
        peak_flops: FLOP/s of the device at boost clock with every lane doing a fused multiply-add each cycle.
        sustained_flops: FLOP/s that long-running library GEMMs reach, with the clock that load leaves.
    """

    dtype: Dtype
    peak_flops: Positive
    sustained_flops: Positive


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one launch, block, thread and unit may use. A unit is an SM, a CU or a tile; a register has 32 bits.

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
        boost_hz: the highest, which datasheet peaks assume.
        sustained_hz: what a long float32 GEMM load leaves.
    """

    base_hz: Positive
    boost_hz: Positive
    sustained_hz: Positive


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator. Building one checks it whole: an impossible device raises ``InputError``.

    Attributes:
        name: short name, lower case, also the file name: ``v100-sxm2-16gb``.
        title: marketing name.
        vendor: ``NVIDIA``, ``AMD``, ``Graphcore``.
        kind: ``gpu`` or ``ipu``; decides which memory layers there are.
        architecture: ``sm_70``, ``gfx906``, ``ipu-mk1``.
        compute_capability: (major, minor) of an NVIDIA device, otherwise absent.
        code_generator: ``cuda`` compiles and runs, ``cuda-source`` and ``opencl-source`` stop at source text, absent
            means estimates only.
        code_generator_reason: why it is not ``cuda``; empty when it is.
        aliases: other names ``load_device`` accepts, among them the name the driver reports.
        unit_name: what the vendor calls a unit: ``SM``, ``SMX``, ``CU``, ``tile``.
        unit_count: units of the device.
        teu: the rTile execution unit.
        layers: memory layers, registers first.
        limits: what a launch, block, thread and unit may use.
        clocks: clock rates.
        throughput: arithmetic rates, one entry per element type.
        matrix_instructions: matrix multiply-accumulate instructions; may be empty.
        launch_overhead_seconds: device time between two dependent kernels of one stream that do nothing.
        block_launch_seconds: time between the starts of two blocks, the whole device together.
        provenance: where the numbers come from: key path (``layers.dram.bandwidth_bytes_per_second``) or the start
            of one (``limits`` covers all below it) to the source in words. Every number is covered; the longest
            start that fits counts.
    """

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
    compute_capability: tuple[int, int] | None = None
    code_generator: CodeGenerator | None = None
    code_generator_reason: str = ""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self)

    def __hash__(self) -> int:
        # The generated hash would fail on the provenance dict; equal devices still hash equally.
        return hash((self.name, self.unit_count, self.layers, self.limits, self.clocks, self.throughput))

    @property
    def registers(self) -> MemoryLayer:
        """The top layer."""
        return self.layer("registers")

    @property
    def shared(self) -> MemoryLayer:
        """The scratchpad of a unit: shared memory of a GPU, local memory of an IPU tile."""
        return self.layer("local" if self.kind == "ipu" else "shared")

    @property
    def l2(self) -> MemoryLayer | None:
        """The cache in front of DRAM, or None."""
        return next((layer for layer in self.layers if layer.name == "l2"), None)

    @property
    def dram(self) -> MemoryLayer:
        """The bottom layer: DRAM of a GPU, all remote tile memories of an IPU."""
        return self.layer("exchange" if self.kind == "ipu" else "dram")

    @property
    def warp_lanes(self) -> int:
        """Threads in one TEU."""
        return self.teu.lanes

    @property
    def teu_count(self) -> int:
        """TEUs that issue at the same time on the whole device."""
        return self.unit_count * self.teu.group_size

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

    def sustained_flops(self, dtype: str) -> float:
        """FLOP/s of the ordinary pipelines under a long load."""
        return self._rate(dtype).sustained_flops

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s of the ordinary pipelines as the datasheet counts them."""
        return self._rate(dtype).peak_flops

    def matrix_instruction(self, input_dtype: str, accumulate_dtype: str | None = None) -> MatrixInstruction | None:
        """The first matrix instruction with these types (any accumulator when not given), or None."""
        for instruction in self.matrix_instructions:
            if instruction.input_dtype == input_dtype and accumulate_dtype in (None, instruction.accumulate_dtype):
                return instruction
        return None

    def _rate(self, dtype: str) -> Throughput:
        for rate in self.throughput:
            if rate.dtype == dtype:
                return rate
        raise InputError(
            f"device.throughput.{dtype}",
            f"{self.name} has no arithmetic rate for this data type",
            f"it has {listed(self.dtypes)}",
        )


def check(device: DeviceSpec) -> None:
    """Raise InputError at the first number that cannot be true of any device, or whose origin nobody names."""
    _check_texts(device)
    for path, value in leaves(device):
        _check_number(path, value)
    _check_architecture(device)
    _check_layers(device)
    _check_rates(device)
    _check_limits(device)
    _check_provenance(device)


def leaves(device: DeviceSpec) -> Iterator[tuple[str, int | float]]:
    """Every number of a device with its key path: ``("layers.dram.capacity_bytes", 17179869184)``.

    Tuples of numbers give one leaf per element, all under the path of the tuple. Absent numbers give none.
    """
    for number in device.compute_capability or ():
        yield "compute_capability", number
    yield "unit_count", device.unit_count
    for prefix, part in _parts(device):
        for field in part.__struct_fields__:
            value = getattr(part, field)
            for item in value if isinstance(value, tuple) else (value,):
                if item is not None and not isinstance(item, str):
                    yield f"{prefix}.{field}", item
    yield "launch_overhead_seconds", device.launch_overhead_seconds
    yield "block_launch_seconds", device.block_launch_seconds


def source_of(provenance: dict[str, str], path: str) -> str | None:
    """The text of the longest key that is ``path`` or a whole-word start of it; None when there is none.

    ``layers.dram.capacity_bytes`` is looked up as itself, then ``layers.dram``, then ``layers``.
    """
    while path:
        if path in provenance:
            return provenance[path]
        path = path.rpartition(".")[0]
    return None


def listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``; ``nothing`` when empty."""
    if not words:
        return "nothing"
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _parts(device: DeviceSpec) -> Iterator[tuple[str, msgspec.Struct]]:
    yield "teu", device.teu
    for layer in device.layers:
        yield f"layers.{layer.name}", layer
    yield "limits", device.limits
    yield "clocks", device.clocks
    for rate in device.throughput:
        yield f"throughput.{rate.dtype}", rate
    for instruction in device.matrix_instructions:
        yield f"matrix_instructions.{instruction.key}", instruction


_TOO_LARGE = 10**18
"""No count, capacity or rate of a device comes near; what lies above would overflow 64-bit columns."""

_ZERO_ALLOWED = frozenset({"compute_capability", "limits.shared_bytes_reserved_per_block"})


def _check_number(path: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(path, value, "a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise _bad(path, value, "a finite number")
    if value >= _TOO_LARGE:
        raise _bad(path, value, "a number below 1e18")
    if value < 0 or (value == 0 and path not in _ZERO_ALLOWED):
        raise _bad(path, value, "a number of at least 0" if path in _ZERO_ALLOWED else "a number above 0")


def _check_texts(device: DeviceSpec) -> None:
    for field in ("name", "title", "vendor", "architecture", "unit_name"):
        if not getattr(device, field).strip():
            raise InputError(f"device.{field}", "is empty", "write a name")
    allowed = "abcdefghijklmnopqrstuvwxyz0123456789-"
    if not all(character in allowed for character in device.name):
        raise _bad("name", device.name, "lower-case letters, digits and hyphens", "it is also the file name")
    for alias in device.aliases:
        if not alias.strip():
            raise InputError("device.aliases", "holds an empty name", "remove it")


def _check_architecture(device: DeviceSpec) -> None:
    if device.compute_capability is not None:
        major, minor = device.compute_capability
        expected = f"sm_{major}{minor}"
        if device.architecture != expected:
            raise _bad(
                "architecture", device.architecture, f"{expected}, as compute_capability [{major}, {minor}] says"
            )
    elif device.code_generator in ("cuda", "cuda-source"):
        raise InputError(
            "device.compute_capability",
            f"is missing, but code_generator is {device.code_generator!r}",
            "add compute_capability = [major, minor]",
        )
    if device.code_generator != "cuda" and not device.code_generator_reason.strip():
        came = "absent" if device.code_generator is None else repr(device.code_generator)
        raise InputError(
            "device.code_generator_reason",
            f"is empty, but code_generator is {came}, not 'cuda'",
            "say in words why kernels for this device are not compiled here",
        )


def _check_layers(device: DeviceSpec) -> None:
    names = [layer.name for layer in device.layers]
    order = LAYER_ORDER[device.kind]
    allowed = [order, tuple(name for name in order if name not in _OPTIONAL_LAYERS)]
    if tuple(names) not in allowed:
        optional = f" ({listed([n for n in order if n in _OPTIONAL_LAYERS])} may be left out)" if "l2" in order else ""
        raise InputError(
            "device.layers",
            f"got {', '.join(names) or 'none'}, expected {', '.join(order)} in this order{optional}",
            f"a device of kind {device.kind!r} lists its memory layers from the registers down, each once",
        )
    for layer in device.layers:
        path = f"layers.{layer.name}"
        if layer.shared_by != _SHARED_BY[layer.name]:
            raise _bad(f"{path}.shared_by", layer.shared_by, repr(_SHARED_BY[layer.name]))
        if (layer.bank_count is None) != (layer.bank_width_bytes is None):
            missing, given = ("bank_count", "bank_width_bytes")
            if layer.bank_count is not None:
                missing, given = given, missing
            raise InputError(f"device.{path}.{missing}", f"is missing, but {given} is given", "give both or neither")
    for upper, lower in zip(device.layers, device.layers[1:], strict=False):
        _check_at_most(
            f"layers.{lower.name}.bandwidth_bytes_per_second",
            lower.bandwidth_bytes_per_second,
            f"layers.{upper.name}.bandwidth_bytes_per_second",
            upper.bandwidth_bytes_per_second,
            "bandwidth falls from the registers down",
        )


def _check_rates(device: DeviceSpec) -> None:
    clocks = device.clocks
    _check_at_most("clocks.base_hz", clocks.base_hz, "clocks.boost_hz", clocks.boost_hz)
    _check_at_most("clocks.sustained_hz", clocks.sustained_hz, "clocks.boost_hz", clocks.boost_hz)
    _check_unique("throughput", device.dtypes)
    _check_unique("matrix_instructions", [instruction.key for instruction in device.matrix_instructions])
    if "float32" not in device.dtypes:
        raise InputError("device.throughput", f"has {listed(device.dtypes)}, expected at least float32", "add float32")
    for prefix, rate in _parts(device):
        if isinstance(rate, Throughput | MatrixInstruction):
            peak_path = f"{prefix}.peak_flops"
            _check_at_most(f"{prefix}.sustained_flops", rate.sustained_flops, peak_path, rate.peak_flops)


def _check_limits(device: DeviceSpec) -> None:
    limits, teu = device.limits, device.teu
    for smaller, larger in (
        ("threads_per_block", "threads_per_unit"),
        ("registers_per_thread_usable", "registers_per_thread"),
        ("registers_per_thread", "registers_per_unit"),
        ("register_allocation_granularity", "registers_per_unit"),
        ("shared_bytes_per_block", "shared_bytes_per_block_opt_in"),
    ):
        _check_at_most(f"limits.{smaller}", getattr(limits, smaller), f"limits.{larger}", getattr(limits, larger))
    _check_at_most(
        "limits.shared_bytes_per_block_opt_in",
        limits.shared_bytes_per_block_opt_in,
        "limits.shared_bytes_per_unit less what is reserved per block",
        limits.shared_bytes_per_unit - limits.shared_bytes_reserved_per_block,
    )
    resident = teu.resident_per_unit * teu.lanes
    if resident != limits.threads_per_unit:
        raise _bad(
            "teu.resident_per_unit",
            teu.resident_per_unit,
            f"resident_per_unit x lanes = limits.threads_per_unit ({limits.threads_per_unit}), not {resident}",
        )
    _check_at_most("teu.group_size", teu.group_size, "teu.resident_per_unit", teu.resident_per_unit)
    _check_equal(
        "layers.registers.capacity_bytes",
        device.registers.capacity_bytes,
        "limits.registers_per_thread x 4",
        limits.registers_per_thread * 4,
    )
    _check_equal(
        f"layers.{device.shared.name}.capacity_bytes",
        device.shared.capacity_bytes,
        "limits.shared_bytes_per_unit",
        limits.shared_bytes_per_unit,
    )


def _check_provenance(device: DeviceSpec) -> None:
    paths = {path for path, _ in leaves(device)}
    for key, text in device.provenance.items():
        field = f"device.provenance.{key}"
        if not text.strip():
            raise InputError(field, "is empty", "name the source of the number, or write 'estimate: ' and how")
        if not any(path == key or path.startswith(f"{key}.") for path in paths):
            raise InputError(field, "no number of this device has this key path", "correct the key or remove it")
    for path, value in leaves(device):
        if source_of(device.provenance, path) is None:
            raise InputError(
                f"device.{path}",
                f"is {_shown(value)}, but nothing says where the number comes from",
                f'add "{path}" (or "{path.partition(".")[0]}") to [provenance], a source or \'estimate: \' and how',
            )


def _check_at_most(path: str, value: float, bound_path: str, bound: float, why: str = "") -> None:
    if value > bound:
        raise _bad(path, value, f"at most {_shown(bound)} ({bound_path})", why)


def _check_equal(path: str, value: int, other_path: str, other: int) -> None:
    if value != other:
        raise _bad(path, value, f"{_shown(other)} ({other_path})")


def _check_unique(path: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InputError(f"device.{path}.{name}", "is listed twice", "keep one entry")


def _bad(path: str, value: Any, expected: str, remedy: str = "") -> InputError:
    return InputError(f"device.{path}", f"got {_shown(value)}, expected {expected}", remedy)


def _shown(value: Any) -> str:
    """A value for a message: 48000 as ``48000``, 7.5e11 as ``7.5e+11``, text in quotes."""
    return f"{value:g}" if isinstance(value, float) else repr(value)
