"""The device functions of kernels whose warp groups multiply: ``wgmma`` by inline assembly, for sm_90a alone.

As those of :mod:`codegen.gpu.matrix.mma_functions`, each is one PTX instruction by name. The four warps of a group
multiply 64 rows by ``n`` columns together; operands are not in registers but described, by a 64-bit matrix descriptor
each (PTX ISA, "Asynchronous warpgroup level matrix instructions", "Matrix descriptor format"). Descriptors are put
together by ordinary arithmetic, which the CUDA emulator executes as it stands; what it has functions of its own for is
in ``codegen/verify/emulator_headers/wgmma_on_cpu.h``.
"""

from __future__ import annotations

from itertools import product

from sokoban.kernel.matrix import MATRIX_TYPES
from sokoban.language.expression import FLOAT8_DTYPES
from sokoban.schedule.bulk_copies import BULK_WIDTHS

#: Rows of a tile in 128-byte swizzle repeat after so many bytes: eight rows of 128.
ATOM_BYTES = 1024

#: By element type, the name in PTX and in the emulator's C++: of types whose operands may be turned, and of all. Those
#: of int8 are summed in integers.
_TURNED_TYPES = {"float16": ("f16", "float16"), "bfloat16": ("bf16", "bfloat16")}
_TYPES = _TURNED_TYPES | {
    "float8_e4m3fn": ("e4m3", "float8_e4m3"), "float8_e5m2": ("e5m2", "float8_e5m2"), "tfloat32": ("tf32", "tfloat32"),
    "int8": ("s8", "int8"),
}  # fmt: skip

DESCRIPTOR, UNIFORM_DESCRIPTOR = "matrix_descriptor", "uniform_matrix_descriptor"
ARRIVE, COMMIT, PROXY_FENCE = "warp_group_arrive", "warp_group_commit", "async_proxy_fence"

#: Waits until all products but those committed last are done.
WAIT_FOR_EARLIER = "warp_group_wait_1"


def finish_name(width: int, sum_type: str = "float") -> str:
    """The function that waits until all products are done. It names the sums, so that no compiler reads them before."""
    return f"warp_group_finish_{width}" + ("_of_integers" if sum_type == "int" else "")


def product_name(dtype: str, width: int, a_turned: bool, b_turned: bool, *, is_anew: bool = False) -> str:
    """The function that multiplies 64 rows of 32 bytes by as many rows of ``width``; *turned* operands have rows (of A)
    or columns (of B) rather than the depth in adjacent places: ``wgmma_64x128x16_f16_kn``. Sums that start anew are
    those of this product alone: ``wgmma_64x128x32_e4m3_kk_anew``."""
    turns = f"{'m' if a_turned else 'k'}{'n' if b_turned else 'k'}"
    return f"wgmma_64x{width}x{_depth(dtype)}_{_TYPES[dtype][0]}_{turns}" + "_anew" * is_anew


def _depth(dtype: str) -> int:
    return MATRIX_TYPES[dtype].depth


def _product(dtype: str, width: int, a_turned: bool, b_turned: bool, is_anew: bool = False) -> str:
    ptx, cpu = _TYPES[dtype]
    name = product_name(dtype, width, a_turned, b_turned, is_anew=is_anew)
    function = "multiply_anew" if is_anew else "multiply_by_warp_group"
    count = width // 2
    registers = _lines([f"%{i}" for i in range(count)], '"', ' "')
    # Scales of the sums and of both operands are 1: sums are added to, signs stay, which integers have no choice of.
    sum_type, ptx_sum, scales = ("int", "s32", "1") if dtype == "int8" else ("float", "f32", "1, 1, 1")
    scales = "0, 1, 1" if is_anew else scales
    turns = f", {int(a_turned)}, {int(b_turned)}" if dtype in _TURNED_TYPES else ""
    return f"""\
#ifdef CUDA_ON_CPU
#define {name}(d, a, b) \\
  emulator::{function}(EMULATOR_SITE, d, a, b, emulator::{cpu}, {width}, {int(a_turned)}, {int(b_turned)})
#else
static __device__ __forceinline__ void {name}(
    {sum_type}* d, unsigned long long a, unsigned long long b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{width}k{_depth(dtype)}.{ptx_sum}.{ptx}.{ptx} {{"
{registers}
               "}}, %{count}, %{count + 1}, {scales}{turns};"
               : {_sums(width, sum_type, "=" if is_anew else "+")}
               : "l"(a), "l"(b));
}}
#endif"""


def _sums(width: int, sum_type: str, change: str = "+") -> str:
    """The sums of a thread as operands that an instruction reads and writes (``+``), or writes alone (``=``)."""
    kind = {"float": "f", "int": "r"}[sum_type]
    return _lines([f'"{change}{kind}"(d[{i}])' for i in range(width // 2)], "", "").strip()


def _finish(width: int, sum_type: str) -> str:
    name = finish_name(width, sum_type)
    return f"""\
#ifdef CUDA_ON_CPU
#define {name}(d) warp_group_wait_all()
#else
static __device__ __forceinline__ void {name}({sum_type}* d) {{
  asm volatile("wgmma.wait_group.sync.aligned 0;"
               : {_sums(width, sum_type)}
               :: "memory");
}}
#endif"""


def _lines(items: list[str], opening: str, closing: str) -> str:
    """Items eight to a line, separated by commas throughout."""
    rows = [", ".join(items[i : i + 8]) for i in range(0, len(items), 8)]
    last = len(rows) - 1
    indent = " " * 15
    return "\n".join(f"{indent}{opening}{row}{'' if i == last else ','}{closing}" for i, row in enumerate(rows))


def _instruction(name: str, text: str) -> str:
    return f"""\
#ifndef CUDA_ON_CPU
static __device__ __forceinline__ void {name}() {{
  asm volatile("{text}" ::: "memory");
}}
#endif"""


#: Start address, leading and stride byte offsets without their lowest four bits at bits 0, 16 and 32; 1 at bit 62 is
#: 128-byte swizzle. The base offset (bits 49 to 51) is 0, as tiles start at multiples of 1024 bytes.
_DESCRIPTOR = """\
static __device__ __forceinline__ unsigned long long matrix_descriptor(const void* shared, int offset, int leading,
                                                                       int stride) {
  unsigned long long start = (shared_address(shared, offset) & 0x3FFFF) >> 4;
  return start | (unsigned long long)(leading >> 4) << 16 | (unsigned long long)(stride >> 4) << 32 | 1ULL << 62;
}"""

#: Where shared memory begins, in 16 bytes, as a number that the compiler knows to be the same for all lanes and knows
#: nothing else of: descriptors stay in uniform registers, and the next one is an addition of 64 bits to the last. Of an
#: address whose lower bits it knows it puts together each half of each descriptor anew, an eighth of the instructions
#: of gradients' loops. Products of matrices go without: where clusters meet, warps that shuffle first hid from the
#: emulator that a meeting was left out.
SHARED_START = "const unsigned long long shared_start = __shfl_sync(0xffffffffu, shared_address(shared, 0) >> 4, 0);"

#: The same of an offset from a place in 16 bytes that is known to be the same for all lanes, :data:`SHARED_START` or
#: one further on.
_UNIFORM_DESCRIPTOR = """\
static __device__ __forceinline__ unsigned long long uniform_matrix_descriptor(unsigned long long start, int offset,
                                                                               int leading, int stride) {
  unsigned long long panels = (unsigned long long)(leading >> 4) << 16 | (unsigned long long)(stride >> 4) << 32;
  return start + ((unsigned long long)(offset >> 4) | panels | 1ULL << 62);
}"""

_FUNCTIONS = {
    DESCRIPTOR: _DESCRIPTOR,
    UNIFORM_DESCRIPTOR: _UNIFORM_DESCRIPTOR,
    PROXY_FENCE: _instruction(PROXY_FENCE, "fence.proxy.async.shared::cta;"),
    ARRIVE: _instruction(ARRIVE, "wgmma.fence.sync.aligned;"),
    COMMIT: _instruction(COMMIT, "wgmma.commit_group.sync.aligned;"),
    WAIT_FOR_EARLIER: _instruction(WAIT_FOR_EARLIER, "wgmma.wait_group.sync.aligned 1;"),
    **{finish_name(width, kind): _finish(width, kind) for width in BULK_WIDTHS for kind in ("float", "int")},
    **{
        product_name(dtype, width, a, b): _product(dtype, width, a, b)
        for dtype, width, a, b in product(_TYPES, BULK_WIDTHS, (False, True), (False, True))
        if dtype in _TURNED_TYPES or not (a or b)
    },
    # Scales of blocks are those of eight-bit floats.
    **{
        product_name(dtype, width, False, False, is_anew=True): _product(dtype, width, False, False, is_anew=True)
        for dtype, width in product(FLOAT8_DTYPES, BULK_WIDTHS)
    },
}


def device_functions(used: set[str]) -> str:
    """The text of the functions among the names ``used``, empty where there are none; ``shared_address`` of
    :mod:`codegen.gpu.matrix.mma_functions` stands before it."""
    return "\n".join(text for name, text in _FUNCTIONS.items() if name in used)
