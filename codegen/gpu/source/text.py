"""Lowered kernels as source text: CUDA C++ for NVIDIA, OpenCL C for AMD and for the CPU that verifies everything."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import tvm
import tvm.s_tir  # noqa: F401  (its passes, which elsewhere come with the graphs of operators)

from codegen.gpu.source.opencl_functions import with_device_functions
from codegen.launch_shape import SIZE_PARAMETER
from codegen.tir.lowered import KERNEL_SUFFIX, Lowered, LoweringError, reason_of
from codegen.tir.statements import without_mentions
from sokoban.kernel.instructions import Instruction


@lru_cache(maxsize=16)
def _target(kind: str, architecture: str, warp_size: int) -> Any:
    fields: dict[str, Any] = {
        "kind": kind,
        "max_num_threads": 1024,
        "thread_warp_size": warp_size,
        "host": {"kind": "c"},
    }
    if kind == "cuda":
        fields |= {"arch": architecture, "max_shared_memory_per_block": 49152, "max_threads_per_block": 1024}
    return tvm.target.Target(fields)


def specific_architecture(schedule: Any, architecture: str) -> str | None:
    """The architecture that a kernel is compiled for where the device's, ``architecture``, lacks some of its
    instructions: those of warp groups are in ``sm_90a`` alone. None for every other kernel."""
    is_wgmma = getattr(schedule, "instruction", None) == Instruction.WGMMA
    return f"{architecture}a" if is_wgmma and not architecture.endswith("a") else None


def cuda_source(lowered: Lowered, architecture: str, parameters: Sequence[str]) -> str:
    """CUDA source of a lowered kernel with TVM's prelude, its parameters in the order of ``parameters``; a text that
    a lowering wrote itself as it stands."""
    if lowered.text:
        return lowered.text
    source = without_mentions(_source(lowered, _target("cuda", architecture, 32), parameters))
    return paired_words(_full_warp_shuffles(_infinities(_eight_lanes(_bits_of_constants(source))), lowered))


def opencl_source(lowered: Lowered, parameters: Sequence[str], wavefront: int = 1) -> str:
    """OpenCL C source of a lowered kernel, its parameters in the order of ``parameters``."""
    if lowered.text:
        return lowered.text
    source = _exact_constants(_source(lowered, _target("opencl", "", wavefront), parameters), lowered)
    return with_device_functions(source)


#: The bits of a float32 by the address of a number, which has none: TVM rounds constants to bfloat16 so.
_ADDRESS_OF_CONSTANT = re.compile(r"\(\*\(uint \*\)\(&\((-?(?:[\d.][^()&]*|CUDART_\w+))\)\)\)")


def _bits_of_constants(source: str) -> str:
    """CUDA source in which constants have no addresses.

    >>> _bits_of_constants("(*(uint *)(&(0x1p+0f/*1.0e+00*/))) >> (uint)16; (*(uint *)(&(v_1)))")
    '__float_as_uint(0x1p+0f/*1.0e+00*/) >> (uint)16; (*(uint *)(&(v_1)))'
    """
    return _ADDRESS_OF_CONSTANT.sub(r"__float_as_uint(\1)", source)


#: Infinities as TVM writes them, by names of a header that no kernel needs otherwise, and as their bits.
_INFINITIES = {
    "CUDART_INF_F": "__uint_as_float(0x7f800000u)",
    "CUDART_INF": "__longlong_as_double(0x7ff0000000000000)",
    # In a constant of bfloat16.
    "inff": "__uint_as_float(0x7f800000u)",
}


def _infinities(source: str) -> str:
    """CUDA source in which infinities are bits, without the header of their names.

    >>> _infinities("#include <math_constants.h>\\nmax(x, -CUDART_INF_F)")
    'max(x, -__uint_as_float(0x7f800000u))'
    """
    source = source.replace("#include <math_constants.h>\n", "")
    return re.sub(r"\b(?:CUDART_INF(?:_F)?|inff)\b", lambda match: _INFINITIES[match.group()], source)


#: Eight float32 constants as TVM writes a vector of them, which four 64-bit words hold.
_EIGHT_FLOATS = re.compile(r"make_ulonglong4\(((?:[^(),]+,){7}[^(),]+)\)")


def _eight_lanes(source: str) -> str:
    """CUDA source in which vectors of eight float32 constants are made of the four words that they are.

    >>> _eight_lanes(f"make_ulonglong4({', '.join(['1.0f'] * 8)})").count("__float_as_uint(1.0f)")
    8
    """

    def packed(match: re.Match[str]) -> str:
        lanes = [f"(unsigned long long)__float_as_uint({lane.strip()})" for lane in match[1].split(",")]
        words = (f"{high} << 32 | {low}" for low, high in zip(lanes[::2], lanes[1::2], strict=True))
        return f"make_ulonglong4({', '.join(words)})"

    return _EIGHT_FLOATS.sub(packed, source)


#: A floating-point constant as TVM's own language writes it, with all digits.
_SCRIPT_CONSTANT = re.compile(r"T\.float(?:32|64)\((-?\d[\d.e+-]*)\)")


def _exact_constants(source: str, lowered: Lowered) -> str:
    """Floating-point constants in full: TVM prints seven digits in OpenCL C, too few for float64.

    ``7.071068e-01`` -> ``0x1.6a09e667f3bcdp-1``, wherever one constant of the kernel alone prints so.
    """
    printed: dict[str, set[str]] = {}
    for text in _SCRIPT_CONSTANT.findall(lowered.module.script()):
        value = abs(float(text))
        if value != float(f"{value:e}"):
            printed.setdefault(f"{value:e}", set()).add(value.hex())
    exact = {text: next(iter(values)) for text, values in printed.items() if len(values) == 1}
    return re.sub(r"(?<![\w.])\d\.\d{6}e[+-]\d\d+", lambda match: exact.get(match.group(), match.group()), source)


def _source(lowered: Lowered, target: Any, parameters: Sequence[str]) -> str:
    try:
        with tvm.transform.PassContext(disabled_pass=_DISABLED_PASSES if lowered.has_barriers else []):
            executable = tvm.compile(lowered.module, target)
    except Exception as error:
        raise LoweringError(f"{lowered.entry}: {reason_of(error)}") from error
    source: str = executable.mod.imports[0].inspect_source()
    buffers = [var for var in lowered.module[lowered.entry].params if str(var.name) != SIZE_PARAMETER]
    dtypes = {str(var.name): str(var.dtype) for var in buffers}
    pointer = _OPENCL_POINTER if target.kind.name == "opencl" else _CUDA_POINTER
    declared = {name: pointer.format(_C_TYPES[dtypes[name]], f"{name}_ptr") for name in parameters if name in dtypes}
    if lowered.launch is not None:
        declared[SIZE_PARAMETER] = f"int {SIZE_PARAMETER}"
    return _order_parameters(source, lowered.entry + KERNEL_SUFFIX, parameters, declared)


#: Passes that kernels with barriers of their own do without. The first places barriers around shared memory, and takes
#: any write for a conflict with any read of the same buffer, also where they are to different stages: its mark for such
#: buffers is lost when passes before it rename them. The others find nothing to do in statements written as they are
#: meant, which have no buffer larger than what is accessed, no condition that could be further out and no empty branch;
#: they took more than half of the time. The last one's names for common expressions are taken out again by a later
#: pass, and then stand in the text unused.
_DISABLED_PASSES = [
    "s_tir.ThreadSync", "s_tir.CompactBufferAllocation", "s_tir.HoistIfThenElse", "tirx.RemoveNoOp",
    "tirx.CommonSubexprElim",
]  # fmt: skip

#: Pointer parameters as TVM declares them, and its names of the element types.
_CUDA_POINTER = "{}* __restrict__ {}"
_OPENCL_POINTER = "__global {}* restrict {}"
_C_TYPES = {
    "float16": "half", "bfloat16": "unsigned short", "float32": "float", "float64": "double",
    "int8": "signed char", "uint8": "unsigned char", "int32": "int",
}  # fmt: skip


def _order_parameters(source: str, kernel: str, parameters: Sequence[str], declared: Mapping[str, str]) -> str:
    """The kernel with the operator's parameters: the inputs in order, then the output.

    TVM sorts a device function's parameters by name, and leaves out a tensor that turns out to be read nowhere (all of
    it multiplied away, or outside every access); a caller passes it all the same. ``declared`` spells such a one.
    """
    names = [*(f"{name}_ptr" for name in parameters), *([SIZE_PARAMETER] if SIZE_PARAMETER in declared else [])]

    def ordered(match: re.Match[str]) -> str:
        given = {part.split()[-1].lstrip("*"): part.strip() for part in match.group(2).split(",") if part.strip()}
        if not given.keys() <= set(names):
            raise LoweringError(f"{kernel}: parameters {sorted(given)} are not the operator's {names}")
        parts = [given.get(name) or declared[name.removesuffix("_ptr")] for name in names]
        return match.group(1) + ", ".join(parts) + ")"

    return re.sub(rf"(\b{re.escape(kernel)}\()([^)]*)\)", ordered, source)


def static_shared_bytes(source: str) -> int:
    """Shared memory that the source of one kernel declares with a size, CUDA and OpenCL alike.

    What a device compiler reports too; here for kernels that are handed over as source.
    """
    end = 0
    for alignment, dtype, count in _SHARED_ARRAY.findall(source):
        boundary = int(alignment or 1)
        end = -(-end // boundary) * boundary + _C_BYTES[dtype] * int(count)
    return end


_SHARED_ARRAY = re.compile(
    r"^\s*(?:__shared__|__local)\s+(?:alignas\((\d+)\)\s+)?((?:signed\s+)?\w+)\s+\w+\[(\d+)\];", re.MULTILINE
)
_SCALAR_BYTES = {
    "half": 2,
    "nv_bfloat16": 2,
    "ushort": 2,
    "float": 4,
    "double": 8,
    "int": 4,
    "char": 1,
    "signed char": 1,
}
_C_BYTES = _SCALAR_BYTES | {
    f"{name}{lanes}": size * lanes
    for name, size in {**_SCALAR_BYTES, "uint": 4, "ulonglong": 8}.items()
    for lanes in (2, 4, 8)
}


def _full_warp_shuffles(source: str, lowered: Lowered) -> str:
    """Warp shuffles that name the whole warp.

    TVM asks ``__activemask()`` who takes part, which after a branch may leave out lanes that have not come back yet
    (CUDA C++ Programming Guide, warp vote functions). Every thread of our blocks reaches every shuffle.
    """
    if math.prod(lowered.block) % 32:
        return source
    return source.replace("__activemask()", "0xffffffffu")


#: The same number eight times in a vector of four twice as wide, as TVM prints what CUDA has no constructor for: by the
#: vector, the numbers' type, and the bits of one.
_EIGHT_TIMES = tuple(
    (re.compile(rf"make_{vector}4\(\(({element})\)(\d+)(?:, \(\1\)\2){{7}}\)"), vector, wide, bits)
    for vector, element, wide, bits in (
        ("ulonglong", "(?:unsigned )?u?int", "unsigned long long", 32),
        ("uint", "(?:unsigned short|ushort)", "unsigned", 16),
    )
)


def paired_words(source: str) -> str:
    """Vectors of eight equal numbers by four pairs of them: TVM prints eight arguments for the four of CUDA's types."""
    for pattern, vector, wide, bits in _EIGHT_TIMES:
        pair = rf"({wide})\2 << {bits} | ({wide})\2"
        source = pattern.sub(f"make_{vector}4({', '.join([pair] * 4)})", source)
    return source
