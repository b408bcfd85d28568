"""Device functions of attention by warp groups, on top of those of :mod:`codegen.gpu.matrix.wgmma_functions`.

Logits are products of queries and keys that both lie in shared memory, rows along the depth; the first of a step starts
anew, so that no register is cleared. Values are multiplied by exponentials out of registers, whose layout is that of
the sums they come from. Widths are any multiple of eight that the names tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: By element type: the name in functions and in PTX, and in the emulator's C++.
_TYPES = {"float16": ("f16", "float16"), "bfloat16": ("bf16", "bfloat16")}
_STAND_INS = dict(_TYPES.values())

_LOGITS = re.compile(r"(first|more)_logits_(\d+)_(\w+)")
_VALUES = re.compile(r"weighted_values_(\d+)_(\w+)")
_DONE = re.compile(r"products_done_but_([012])_(\d+)")
_BEHIND = re.compile(r"sums_behind_(\d+)")

#: What keeps a compiler from waiting for products before it has computed an exponential, which is never so large: it
#: would fall asleep. (That none is negative the assembler knows.) Nothing else orders a wait behind arithmetic that
#: does not read what was waited for. (A trap would end the kernel there, and the compiler then gives no thread the
#: registers that ``setmaxnreg`` moves.)
BESIDE = "beside_products"


def beside(sums: str, step_name: str) -> str:
    """The mark that the last exponentials of both rows of a thread stand in front of the wait that follows."""
    last = f"{sums}[0][{step_name} / 8 - 1]"
    return f"{BESIDE}(fmaxf({last}[1], {last}[3]));"


_BESIDE = """\
#ifdef CUDA_ON_CPU
#define beside_products(number)
#else
static __device__ __forceinline__ void beside_products(float number) {
  if (__any_sync(0xffffffffu, number > 1e30f)) asm volatile("nanosleep.u32 1;" ::: "memory");
}
#endif"""


def logits_name(dtype: str, keys: int, is_first: bool) -> str:
    """The product of 64 rows of 16 elements by ``keys`` keys: ``first_logits_128_f16(sums, queries, keys)``."""
    return f"{'first' if is_first else 'more'}_logits_{keys}_{_TYPES[dtype][0]}"


def values_name(dtype: str, width: int) -> str:
    """The product of 64 rows of 16 exponentials by values of ``width`` elements:
    ``weighted_values_64_f16(sums, weights, values)``."""
    return f"weighted_values_{width}_{_TYPES[dtype][0]}"


def done_name(pending: int, width: int) -> str:
    """The wait until all groups of products but the last ``pending`` are done, 0 to 2. It names ``width / 2`` sums, so
    that no compiler reads them before."""
    return f"products_done_but_{pending}_{width}"


def behind_name(width: int) -> str:
    """The mark that ``width / 2`` more sums are there after a wait, so that no compiler reads them before."""
    return f"sums_behind_{width}"


def _lines(items: Iterable[str], opening: str, closing: str) -> str:
    """Items eight to a line, separated by commas throughout."""
    each = list(items)
    rows = [", ".join(each[i : i + 8]) for i in range(0, len(each), 8)]
    return f",{closing}\n               {opening}".join(rows)


def _sums(width: int, constraint: str) -> str:
    return _lines((f'"{constraint}f"(d[{i}])' for i in range(width // 2)), "", "")


def _registers(width: int) -> str:
    return _lines((f"%{i}" for i in range(width // 2)), '"', ' "')


def _logits(is_first: bool, keys: int, element: str) -> str:
    count, function = keys // 2, "multiply_anew" if is_first else "multiply_by_warp_group"
    name = f"{'first' if is_first else 'more'}_logits_{keys}_{element}"
    # Whether sums are added to; signs of both operands; neither is turned.
    return f"""\
#ifdef CUDA_ON_CPU
#define {name}(d, a, b) \\
  emulator::{function}(EMULATOR_SITE, d, a, b, emulator::{_STAND_INS[element]}, {keys}, 0, 0)
#else
static __device__ __forceinline__ void {name}(float* d, unsigned long long a, unsigned long long b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{keys}k16.f32.{element}.{element} {{"
               "{_registers(keys)} "
               "}}, %{count}, %{count + 1}, {int(not is_first)}, 1, 1, 0, 0;"
               : {_sums(keys, "=" if is_first else "+")}
               : "l"(a), "l"(b));
}}
#endif"""


def _values(width: int, element: str) -> str:
    count, name = width // 2, f"weighted_values_{width}_{element}"
    rows = ", ".join(f"%{count + i}" for i in range(4))
    return f"""\
#ifdef CUDA_ON_CPU
#define {name}(d, a, b) \\
  emulator::multiply_registers(EMULATOR_SITE, d, a, b, emulator::{_STAND_INS[element]}, {width}, 1)
#else
static __device__ __forceinline__ void {name}(float* d, const unsigned* a, unsigned long long b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{element}.{element} {{"
               "{_registers(width)} "
               "}}, {{{rows}}}, %{count + 4}, 1, 1, 1, 1;"
               : {_sums(width, "+")}
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}
#endif"""


def _done(pending: int, width: int) -> str:
    return f"""\
#ifdef CUDA_ON_CPU
#define {done_name(pending, width)}(d) warp_group_wait_{pending or "all"}()
#else
static __device__ __forceinline__ void {done_name(pending, width)}(float* d) {{
  asm volatile("wgmma.wait_group.sync.aligned {pending};" ::: "memory");
  asm volatile("" : {_sums(width, "+")} :: "memory");
}}
#endif"""


def _behind(width: int) -> str:
    return f"""\
#ifdef CUDA_ON_CPU
#define {behind_name(width)}(d)
#else
static __device__ __forceinline__ void {behind_name(width)}(float* d) {{
  asm volatile("" : {_sums(width, "+")} :: "memory");
}}
#endif"""


def device_functions(used: set[str]) -> str:
    """The text of the functions among the names ``used``, empty where there are none."""
    texts = []
    for name in sorted(used):
        if match := _LOGITS.fullmatch(name):
            texts.append(_logits(match[1] == "first", int(match[2]), match[3]))
        elif match := _VALUES.fullmatch(name):
            texts.append(_values(int(match[1]), match[2]))
        elif name == BESIDE:
            texts.append(_BESIDE)
        elif match := _DONE.fullmatch(name):
            texts.append(_done(int(match[1]), int(match[2])))
        elif match := _BEHIND.fullmatch(name):
            texts.append(_behind(int(match[1])))
    return "\n".join(texts)
