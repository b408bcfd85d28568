"""Checks of a device, which building a :class:`hal.DeviceSpec` runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal.spec.numbers import leaves, source_of
from hal.support.errors import InputError, listed

if TYPE_CHECKING:
    from hal.spec.parts import Clocks, DeviceFields, MatrixInstruction, SharedBy, Throughput

#: The memory layers a device of each kind may have, top (next to the arithmetic) first; ``l2`` and ``l3`` may be
#: absent.
LAYER_ORDER: dict[str, tuple[str, ...]] = {
    "gpu": ("registers", "shared", "l2", "dram"),
    "ipu": ("registers", "local", "exchange"),
    "cpu": ("registers", "l1", "l2", "l3", "dram"),
}

#: Who may share a layer of each name, by kind of device: some CPUs have a second cache for all cores together.
_SHARED_BY: dict[str, dict[str, tuple[SharedBy, ...]]] = {
    "gpu": {"registers": ("thread",), "shared": ("unit",), "l2": ("device",), "dram": ("device",)},
    "ipu": {"registers": ("thread",), "local": ("unit",), "exchange": ("device",)},
    "cpu": {
        "registers": ("thread",),
        "l1": ("unit",),
        "l2": ("unit", "device"),
        "l3": ("unit", "device"),
        "dram": ("device",),
    },
}

#: Keys of a layer that say something only together.
_TOGETHER = (("bank_count", "bank_width_bytes"), ("translation_reach_bytes", "translation_miss_seconds"))

_OPTIONAL_LAYERS = frozenset({"l2", "l3"})

#: Code generators that need no reason why they stop halfway.
_COMPILES = frozenset({"cuda", "llvm"})

#: No count, capacity or rate of a device comes near; what lies above would overflow 64-bit columns.
_TOO_LARGE = 10**18

_ZERO_ALLOWED = frozenset({"compute_capability", "limits.shared_bytes_reserved_per_block"})


def check(device: DeviceFields) -> None:
    """Raise InputError at the first number that cannot be true of any device, or that has no source."""
    _check_texts(device)
    for path, value in leaves(device):
        _check_number(path, value)
    _check_architecture(device)
    _check_layers(device)
    _check_rates(device)
    _check_limits(device)
    _check_provenance(device)


def _check_texts(device: DeviceFields) -> None:
    for field in ("name", "title", "vendor", "architecture", "unit_name"):
        if not getattr(device, field).strip():
            raise InputError(f"device.{field}", "is empty", "write a name")
    allowed = "abcdefghijklmnopqrstuvwxyz0123456789-"
    if not all(character in allowed for character in device.name):
        raise _bad("name", device.name, "lower-case letters, digits and hyphens", "it is also the file name")
    for alias in device.aliases:
        if not alias.strip():
            raise InputError("device.aliases", "holds an empty name", "remove it")


def _check_number(path: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(path, value, "a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise _bad(path, value, "a finite number")
    if value >= _TOO_LARGE:
        raise _bad(path, value, "a number below 1e18")
    if value < 0 or (value == 0 and path not in _ZERO_ALLOWED):
        raise _bad(path, value, "a number of at least 0" if path in _ZERO_ALLOWED else "a number above 0")


def _check_architecture(device: DeviceFields) -> None:
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
    if device.code_generator not in _COMPILES and not device.code_generator_reason.strip():
        came = "absent" if device.code_generator is None else repr(device.code_generator)
        raise InputError(
            "device.code_generator_reason",
            f"is empty, but code_generator is {came}, not 'cuda' or 'llvm'",
            "say in words why kernels for this device are not compiled here",
        )


def _check_layers(device: DeviceFields) -> None:
    names = [layer.name for layer in device.layers]
    order = LAYER_ORDER[device.kind]
    optional_names = [name for name in order if name in _OPTIONAL_LAYERS]
    if tuple(names) != tuple(name for name in order if name in names or name not in _OPTIONAL_LAYERS):
        optional = f" ({listed(optional_names)} may be left out)" if optional_names else ""
        raise InputError(
            "device.layers",
            f"got {', '.join(names) or 'none'}, expected {', '.join(order)} in this order{optional}",
            f"a device of kind {device.kind!r} lists its memory layers from the registers down, each once",
        )
    for layer in device.layers:
        path = f"layers.{layer.name}"
        sharers = _SHARED_BY[device.kind][layer.name]
        if layer.shared_by not in sharers:
            raise _bad(f"{path}.shared_by", layer.shared_by, " or ".join(map(repr, sharers)))
        for pair in _TOGETHER:
            missing = [name for name in pair if getattr(layer, name) is None]
            if len(missing) == 1:
                given = pair[1 - pair.index(missing[0])]
                problem = f"is missing, but {given} is given"
                raise InputError(f"device.{path}.{missing[0]}", problem, "give both or neither")
        if layer.translation_reach_bytes is not None:
            if layer.name != "dram":
                raise InputError(
                    f"device.{path}.translation_reach_bytes", "belongs to the layer dram", "move it or remove it"
                )
            _check_at_most(
                f"{path}.translation_reach_bytes",
                layer.translation_reach_bytes,
                f"{path}.capacity_bytes",
                layer.capacity_bytes,
            )
        if layer.scattered_bytes_per_second is not None:
            _check_at_most(
                f"{path}.scattered_bytes_per_second",
                layer.scattered_bytes_per_second,
                f"{path}.bandwidth_bytes_per_second",
                layer.bandwidth_bytes_per_second,
            )
    _check_sharers_grow(device)
    for upper, lower in zip(device.layers, device.layers[1:], strict=False):
        _check_at_most(
            f"layers.{lower.name}.bandwidth_bytes_per_second",
            lower.bandwidth_bytes_per_second,
            f"layers.{upper.name}.bandwidth_bytes_per_second",
            upper.bandwidth_bytes_per_second,
            "bandwidth falls from the registers down",
        )


def _check_sharers_grow(device: DeviceFields) -> None:
    """A layer is shared by no fewer than the one above it."""
    order = ("thread", "unit", "device")
    for upper, lower in zip(device.layers, device.layers[1:], strict=False):
        if order.index(lower.shared_by) < order.index(upper.shared_by):
            above = f"{upper.shared_by!r} or more, as layers.{upper.name} above it"
            raise _bad(f"layers.{lower.name}.shared_by", lower.shared_by, above)


def _check_rates(device: DeviceFields) -> None:
    clocks = device.clocks
    _check_at_most("clocks.base_hz", clocks.base_hz, "clocks.boost_hz", clocks.boost_hz)
    _check_at_most("clocks.sustained_hz", clocks.sustained_hz, "clocks.boost_hz", clocks.boost_hz)
    if clocks.highest_hz is not None:
        _check_at_most("clocks.boost_hz", clocks.boost_hz, "clocks.highest_hz", clocks.highest_hz)
    if clocks.job_hz is not None:
        _check_at_most("clocks.job_hz", clocks.job_hz, "clocks.boost_hz", clocks.boost_hz)
    _check_unique("throughput", device.dtypes)
    _check_unique("matrix_instructions", [instruction.key for instruction in device.matrix_instructions])
    if "float32" not in device.dtypes:
        raise InputError("device.throughput", f"has {listed(device.dtypes)}, expected at least float32", "add float32")
    for rate in device.throughput:
        _check_rate(f"throughput.{rate.dtype}", rate, clocks)
    for instruction in device.matrix_instructions:
        path, best = f"matrix_instructions.{instruction.key}", instruction.best_flops
        _check_rate(path, instruction, clocks)
        if best is not None and instruction.power_limited_flops is not None:
            _check_at_most(f"{path}.power_limited_flops", instruction.power_limited_flops, f"{path}.best_flops", best)


def _check_rate(path: str, rate: Throughput | MatrixInstruction, clocks: Clocks) -> None:
    """The datasheet's rate, at the clock that the board really has, bounds the best call's, and that a long load's."""
    best, limited = rate.best_flops, rate.power_limited_flops
    _check_at_most(f"{path}.sustained_flops", rate.sustained_flops, f"{path}.peak_flops", rate.peak_flops)
    if best is not None:
        above, at = 1.0, ""
        if clocks.highest_hz is not None:
            above, at = clocks.highest_hz / clocks.boost_hz, " at clocks.highest_hz"
        _check_at_most(f"{path}.best_flops", best, f"{path}.peak_flops{at}", rate.peak_flops * above)
        _check_at_most(f"{path}.sustained_flops", rate.sustained_flops, f"{path}.best_flops", best)
    if limited is not None:
        _check_at_most(f"{path}.power_limited_flops", limited, f"{path}.peak_flops", rate.peak_flops)


def _check_limits(device: DeviceFields) -> None:
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
    # A lane that is an element of a vector is no thread.
    lanes, product = (teu.lanes, "resident_per_unit x lanes") if teu.lane == "thread" else (1, "resident_per_unit")
    resident = teu.resident_per_unit * lanes
    if resident != limits.threads_per_unit:
        raise _bad(
            "teu.resident_per_unit",
            teu.resident_per_unit,
            f"{product} = limits.threads_per_unit ({limits.threads_per_unit}), not {resident}",
        )
    if teu.lane == "thread":
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


def _check_provenance(device: DeviceFields) -> None:
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
