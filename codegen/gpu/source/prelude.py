"""The lines above a kernel: TVM's own prelude replaced by what the kernel needs.

TVM opens every CUDA source with the same hundred lines, which pull in libcu++; compiling those takes NVRTC 0.4 to
0.9 s, ten times as long as most kernels. Here the kernel keeps its own text and gets only the type names, headers and
half-precision helpers that it uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from codegen.gpu.matrix import bulk_functions as bulk_device
from codegen.gpu.matrix import mma_functions as mma_device
from codegen.gpu.matrix import wgmma_functions as wgmma_device
from codegen.gpu.walks import functions as attention_device
from codegen.gpu.walks import group_functions as attention_groups

#: Every kernel's text starts here; TVM writes forward declarations of all kernels before the first body.
_FIRST_KERNEL = 'extern "C" __global__'

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

#: Names that TVM's prelude mentions and that nvcc and NVRTC provide themselves, on every architecture we compile for.
_BUILT_IN = frozenset({"__shfl_sync", "__shfl_down_sync", "__shfl_up_sync", "__asm__", "__volatile__", "__align__"})


@dataclass(frozen=True)
class _Part:
    """Some lines of a prelude.

    Attributes:
        names: identifiers that a kernel must use for the lines to be there.
        lines: the text.
        also: a further condition on the kernel's identifiers.
    """

    names: frozenset[str]
    lines: str
    also: Callable[[set[str]], bool] = lambda used: True

    def needed(self, used: set[str]) -> bool:
        return not self.names.isdisjoint(used) and self.also(used)


#: A type of halves, or a function of CUDA's that has one in its name; no name of a tensor or of registers.
_HALF_NAME = re.compile(r"(?:make_)?half\d*|__\w*half\w*")


def _uses_half(used: set[str]) -> bool:
    return any(_HALF_NAME.fullmatch(name) for name in used)


def _uses_bfloat16(used: set[str]) -> bool:
    return any("bfloat16" in name for name in used)


def _integer_types(names: tuple[str, ...], used: set[str]) -> str:
    """Fixed-width integers by typedef under NVRTC, which has no ``<cstdint>``; from the header elsewhere."""
    wanted = [name for name in names if name in used]
    lines = [f"typedef {_INTEGER_TYPES[name]} {name};" for name in wanted]
    return "\n".join(["#ifdef __CUDACC_RTC__", *lines, "#else", "#include <cstdint>", "#endif"]) if wanted else ""


_INTEGER_TYPES = {
    "int8_t": "signed char",
    "uint8_t": "unsigned char",
    "int16_t": "short",
    "uint16_t": "unsigned short",
    "int32_t": "int",
    "uint32_t": "unsigned int",
    "int64_t": "long long",
    "uint64_t": "unsigned long long",
}

_SHORT_TYPES = {"uint": "unsigned int", "uchar": "unsigned char", "ushort": "unsigned short"}


def _chosen(name: str, type_name: str = "") -> str:
    """The larger or the smaller of two numbers, NaN where one of them is."""
    order = {"larger": "b < a", "smaller": "a < b"}[name]
    if not type_name:
        return (
            f"template <typename number> static __device__ __forceinline__ number {name}(number a, number b) {{\n"
            f"  return {order} || a != a ? a : b;\n"
            "}"
        )
    as_float = {"half": "__half2float", "nv_bfloat16": "__bfloat162float"}[type_name]
    return (
        f"static __device__ __forceinline__ {type_name} {name}({type_name} x, {type_name} y) {{\n"
        f"  const float a = {as_float}(x), b = {as_float}(y);\n"
        f"  return {order} || a != a ? x : y;\n"
        "}"
    )


def _pack(name: str, type_name: str) -> str:
    return (
        f"static __device__ __forceinline__ unsigned {name}(const {type_name} low, const {type_name} high) {{\n"
        "  return (unsigned(*(const unsigned short*)&high) << 16) | *(const unsigned short*)&low;\n"
        "}"
    )


def _four(name: str, type_name: str) -> str:
    return (
        f"struct __align__(8) {name} {{\n"
        f"  {type_name} x, y, z, w;\n"
        "};\n"
        f"static __device__ __forceinline__ {name} make_{name}"
        f"({type_name} x, {type_name} y, {type_name} z, {type_name} w) {{\n"
        f"  {name} four = {{x, y, z, w}};\n"
        "  return four;\n"
        "}"
    )


def _half_function(name: str, float_name: str, arity: int) -> str:
    letters = "xy"[:arity]
    parameters = ", ".join(f"half {letter}" for letter in letters)
    arguments = ", ".join(f"__half2float({letter})" for letter in letters)
    return (
        f"static __device__ __forceinline__ half {name}({parameters}) {{\n"
        f"  return __float2half({float_name}({arguments}));\n"
        "}"
    )


def _part(names: str, lines: str, also: Callable[[set[str]], bool] = lambda used: True) -> _Part:
    return _Part(frozenset(names.split()), lines, also)


#: In the order in which they are written.
_HELPERS = (
    *(_part(name, _chosen(name)) for name in ("larger", "smaller")),
    *(_part(name, _chosen(name, "half"), _uses_half) for name in ("larger", "smaller")),
    _part("__pack_half2", _pack("__pack_half2", "half")),
    _part("half4 make_half4", _four("half4", "__half")),
    _part("hpow", _half_function("hpow", "powf", 2), _uses_half),
    _part("htan", _half_function("htan", "tanf", 1), _uses_half),
    _part("hatan", _half_function("hatan", "atanf", 1), _uses_half),
    _part("herf", _half_function("herf", "erff", 1), _uses_half),
    *(_part(name, _chosen(name, "nv_bfloat16"), _uses_bfloat16) for name in ("larger", "smaller")),
    _part("__pack_nv_bfloat162", _pack("__pack_nv_bfloat162", "nv_bfloat16")),
    _part(
        "make_nv_bfloat162",
        "static __device__ __forceinline__ nv_bfloat162 make_nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) {\n"
        "  return nv_bfloat162(x, y);\n"
        "}",
    ),
    _part("nv_bfloat164 make_nv_bfloat164", _four("nv_bfloat164", "__nv_bfloat16")),
)

#: What has functions of the names that kernels call, in the order in which they need each other.
_DEVICE_FUNCTIONS = (mma_device, wgmma_device, bulk_device, attention_device, attention_groups)

#: Defined by TVM for older compilers or boards only; the headers of the compiler we pin define them themselves.
_FROM_HEADERS = frozenset({"htanh", "hexp"})


def strip_prelude(source: str) -> str:
    """A CUDA source of TVM's with only the prelude that its kernels need.

    From the first kernel on all is kept to the letter, but for the larger and the smaller of two numbers. Where the
    kernels use a name that the old prelude defines and this module does not know, the old one stays: slower to compile,
    never wrong.
    """
    start = source.find(_FIRST_KERNEL)
    if start < 0:
        return source
    original, body = source[:start], _with_undefined(source[start:])
    used = set(_IDENTIFIER.findall(_COMMENT.sub(" ", body)))
    functions = "\n".join(filter(None, (module.device_functions(used) for module in _DEVICE_FUNCTIONS)))
    helpers = [helper for helper in _HELPERS if helper.needed(used)]
    names = _BUILT_IN | _FROM_HEADERS | _INTEGER_TYPES.keys() | _SHORT_TYPES.keys()
    names |= {name for helper in helpers for name in helper.names}
    if _defined_names(original) & used - names:
        chosen = (helper.lines for helper in helpers if helper.names <= {"larger", "smaller"})
        own = "\n\n".join(filter(None, [*chosen, functions]))
        return f"{original}\n{own}\n{body}" if own else source
    parts = [
        "\n".join(f"typedef {_SHORT_TYPES[name]} {name};" for name in _SHORT_TYPES if name in used),
        _integer_types(tuple(_INTEGER_TYPES), used),
        "\n".join(_headers(used)),
        *(helper.lines for helper in helpers),
        functions,
    ]
    return "\n\n".join([part for part in parts if part] + [body.rstrip() + "\n"])


def _with_undefined(kernels: str) -> str:
    """Kernels in which the larger and the smaller of two numbers are NaN where one of them is: CUDA's ``max`` and
    ``min`` are the other one then, and a sum that has diverged would be 0 behind a ReLU.

    >>> _with_undefined("Y_ptr[0] = max(v, 0.000000e+00f);")
    'Y_ptr[0] = larger(v, 0.000000e+00f);'
    """
    words = {"max": "larger", "min": "smaller"}
    return re.sub(r"\b(max|min)(?=\()", lambda match: words[match[1]], kernels)


def _headers(used: set[str]) -> list[str]:
    headers = []
    if _uses_half(used):
        headers.append("#include <cuda_fp16.h>")
    if _uses_bfloat16(used):
        headers.append("#include <cuda_bf16.h>")
    if "wmma" in used:
        headers.append("#include <mma.h>")
    return headers


def _defined_names(prelude: str) -> set[str]:
    """The identifiers that a prelude defines: macros, types, functions, names brought in by ``using``.

    ``#define A 1`` and ``struct B {};`` and ``int f(int x) {}`` -> ``{"A", "B", "f"}``. Functions that a macro
    defines count by the macro's arguments: ``MATH_UNARY(htan, tanf)`` -> ``htan`` and ``tanf``.
    """
    text = _COMMENT.sub(" ", prelude).replace("\\\n", " ")
    names = set(re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", text, re.MULTILINE))
    text = re.sub(r"^[ \t]*#.*$", "", text, flags=re.MULTILINE)
    names |= set(re.findall(r"\busing\s+(\w+)\s*=", text))
    names |= set(re.findall(r"\busing\s+(?:\w+::)+(\w+)\s*;", text))
    names |= set(re.findall(r"\btypedef\b[^;]*?(\w+)\s*;", text))
    names |= set(re.findall(r"\b(?:struct|class|enum|union)\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?(\w+)", text))
    outermost = _outside_braces(text)
    for function, arguments, body in re.findall(r"(\w+)\s*\(([^()]*)\)\s*(\{?)", outermost):
        names.add(function)
        if not body and function.isupper():
            names |= set(_IDENTIFIER.findall(arguments))
    # A numeric function that the compiler provides is not the prelude's, though a macro's arguments name it.
    return names - {"powf", "tanf", "atanf", "tanhf", "erf", "exp"}


def _outside_braces(text: str) -> str:
    """The text at brace depth 0: ``int f(int x) { return g(x); } int h;`` -> ``int f(int x) { int h;``."""
    depth = 0
    characters = []
    for character in text:
        if character == "{":
            if depth == 0:
                characters.append(character)
            depth += 1
        elif character == "}":
            depth = max(depth - 1, 0)
        elif depth == 0:
            characters.append(character)
    return "".join(characters)
