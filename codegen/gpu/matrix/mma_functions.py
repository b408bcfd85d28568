"""The device functions that kernels with ``mma.sync`` call: one PTX instruction each, by inline assembly.

TVM has intrinsics for these instructions too, but prints them as blocks of assembly of its own, which only a GPU can
execute. Here each is a function by name, so that a kernel's text stays readable and the CUDA emulator can put functions
of the same meaning in their place (``codegen/verify/emulator_headers/mma_on_cpu.h``). Fragments that no single
instruction loads have functions in plain C++ over those.

Offsets into shared memory are bytes, those into fragments are registers.
"""

from __future__ import annotations

from dataclasses import dataclass

from sokoban.kernel.matrix import MatrixRoles

#: What tells the text that it is compiled for the CPU.
_EMULATED = "CUDA_ON_CPU"

_SHARED_ADDRESS = """\
static __device__ __forceinline__ unsigned shared_address(const void* shared, int offset) {
  return (unsigned)__cvta_generic_to_shared(shared) + offset;
}"""


def _load(name: str, modifier: str) -> str:
    return f"""\
static __device__ __forceinline__ void {name}(unsigned* fragment, int at, const void* shared, int offset) {{
  unsigned* to = fragment + at;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4{modifier}.shared.b16 {{%0, %1, %2, %3}}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(shared, offset)) : "memory");
}}"""


#: Of the words (m, k) = (0, 0), (0, 1), (1, 0), (1, 1) of a fragment the order in which its registers want them: by m
#: first, then k; of B by k first, then n.
_ORDER = {"a": (0, 2, 1, 3), "b": (0, 1, 2, 3)}


def _load_words(operand: str) -> str:
    """Words of a tile whose depth runs down: of two columns, and as many rows ``down`` from there."""
    places = [("first", "first + down", "second", "second + down")[at] for at in _ORDER[operand]]
    lines = [f"  to[{word}] = *(const unsigned*)(from + {place});" for word, place in enumerate(places)]
    return f"""\
static __device__ __forceinline__ void load_words_{operand}(unsigned* fragment, int at, const void* shared, int first,
                                                    int second, int down) {{
  const char* from = (const char*)shared;
  unsigned* to = fragment + at;
{chr(10).join(lines)}
}}"""


def _load_bytes(operand: str) -> str:
    """Even columns of the pairs that ``ldmatrix.trans`` brings, four steps of the depth to a word, and odd ones."""
    words = [(pairs, selector) for selector in ("0x6420", "0x7531") for pairs in (0, 2)]
    lines = [
        f"  to[{word}] = __byte_perm(pairs[{pairs}], pairs[{pairs + 1}], {selector});"
        for word, (pairs, selector) in enumerate(words[at] for at in _ORDER[operand])
    ]
    return f"""\
static __device__ __forceinline__ void load_bytes_{operand}(unsigned* fragment, int at, const void* shared,
                                                    int offset) {{
  unsigned pairs[4], *to = fragment + at;
  load_matrix_x4_trans(pairs, 0, shared, offset);
{chr(10).join(lines)}
}}"""


@dataclass(frozen=True)
class _Product:
    """The multiplication of fragments of one element type.

    Attributes:
        name: of the function.
        types: of the sums and of the elements, as PTX has them.
        depth: steps of the product's depth.
    """

    name: str
    types: tuple[str, str]
    depth: int

    def text(self, interleaved: bool) -> str:
        """The function; ``interleaved`` sums are every other one."""
        sums, elements = self.types
        kind, letter = ("int", "r") if sums == "s32" else ("float", "f")
        name = self.name + "_interleaved" * interleaved
        operands = ", ".join(f'"+{letter}"(d[{i * (1 + interleaved)}])' for i in range(4))
        return f"""\
static __device__ __forceinline__ void {name}({kind}* sums, int at, const unsigned* a, int a_at, const unsigned* b,
                                              int b_at) {{
  {kind}* d = sums + at;
  const unsigned *x = a + a_at, *y = b + b_at;
  asm volatile("mma.sync.aligned.m16n8k{self.depth}.row.col.{sums}.{elements}.{elements}.{sums} "
               "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
               : {operands}
               : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
}}"""


def _copy(size: int, guarded: bool) -> str:
    # Only copies of 16 bytes may pass by L1, from which they are not read again.
    cache = "cg" if size == 16 else "ca"
    name = f"copy_async_{size}" + ("_guarded" if guarded else "")
    condition, operand, count = (", bool inside", ", %2", f', "r"(inside ? {size} : 0)') if guarded else ("", "", "")
    return f"""\
static __device__ __forceinline__ void {name}(void* shared, int offset, const void* from{condition}) {{
  asm volatile("cp.async.{cache}.shared.global.L2::128B [%0], [%1], {size}{operand};"
               :: "r"(shared_address(shared, offset)), "l"(from){count} : "memory");
}}"""


def _copy_by_offsets(size: int) -> str:
    # A macro, since an instruction's offsets are constants of the text.
    cache = "cg" if size == 16 else "ca"
    return f"""\
#define copy_async_{size}_apart(shared, offset, shared_more, from, from_more) \\
  asm volatile("cp.async.{cache}.shared.global.L2::128B [%0 + %2], [%1 + %3], {size};" \\
               :: "r"(shared_address(shared, offset)), "l"(from), "n"(shared_more), "n"(from_more) : "memory")"""


def _wait(pending: int) -> str:
    return f"""\
static __device__ __forceinline__ void copy_async_wait_{pending}() {{
  asm volatile("cp.async.wait_group {pending};" ::: "memory");
}}"""


_COMMIT = """\
static __device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}"""

#: A copy of what ``cp.async`` cannot take: single elements of less than four bytes.
_STORE = """\
template <typename T> static __device__ __forceinline__ void store_shared(void* shared, int offset, T value) {
  *(T*)((char*)shared + offset) = value;
}"""

#: Sizes in bytes of an asynchronous copy.
COPY_BYTES = (16, 8, 4)

#: Most groups of copies that a wait leaves under way.
MOST_PENDING = 6

#: Nearest values of ten bits of mantissa, ties away from zero: what TensorFloat-32 keeps of a float32.
ROUND_TO_TF32 = "round_to_tf32"
_ROUND = f"""\
static __device__ __forceinline__ void {ROUND_TO_TF32}(unsigned* fragment, int at) {{
  unsigned* word = fragment + at;
  for (int i = 0; i < 4; ++i)
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word[i]) : "f"(__uint_as_float(word[i])));
}}"""

#: By element type: what multiplies fragments of it.
_PRODUCTS = {
    "float16": _Product("mma_16x8x16_f16", ("f32", "f16"), 16),
    "bfloat16": _Product("mma_16x8x16_bf16", ("f32", "bf16"), 16),
    "tfloat32": _Product("mma_16x8x8_tf32", ("f32", "tf32"), 8),
    "int8": _Product("mma_16x8x32_s8", ("s32", "s8"), 32),
    "float8_e4m3fn": _Product("mma_16x8x32_e4m3", ("f32", "e4m3"), 32),
    "float8_e5m2": _Product("mma_16x8x32_e5m2", ("f32", "e5m2"), 32),
}


def product_name(roles: MatrixRoles) -> str:
    """The function that multiplies fragments of the operands."""
    return _PRODUCTS[roles.dtype].name + "_interleaved" * roles.is_interleaved


_FUNCTIONS = {
    "load_matrix_x4": _load("load_matrix_x4", ""),
    "load_matrix_x4_trans": _load("load_matrix_x4_trans", ".trans"),
    ROUND_TO_TF32: _ROUND,
    **{
        product.name + "_interleaved" * interleaved: product.text(interleaved)
        for product in _PRODUCTS.values()
        for interleaved in ((False, True) if product.depth == 32 else (False,))
    },
    **{f"copy_async_{size}": _copy(size, False) for size in COPY_BYTES},
    **{f"copy_async_{size}_guarded": _copy(size, True) for size in COPY_BYTES},
    **{f"copy_async_{size}_apart": _copy_by_offsets(size) for size in COPY_BYTES},
    "copy_async_commit": _COMMIT,
    **{f"copy_async_wait_{pending}": _wait(pending) for pending in range(MOST_PENDING + 1)},
}

#: Those that are C++ without assembly, which the CPU executes as they stand.
_CPP_FUNCTIONS = {
    **{f"load_words_{operand}": _load_words(operand) for operand in "ab"},
    **{f"load_bytes_{operand}": _load_bytes(operand) for operand in "ab"},
    "store_shared": _STORE,
}


def device_functions(used: set[str]) -> str:
    """The text of the functions among the names ``used``, empty where there are none."""
    if any(name.startswith("load_bytes") for name in used):
        used = used | {"load_matrix_x4_trans"}
    texts = [text for name, text in _FUNCTIONS.items() if name in used]
    # The descriptors of warp groups have addresses too.
    if any("matrix_descriptor" in name for name in used) or any("shared_address" in text for text in texts):
        texts.insert(0, _SHARED_ADDRESS)
    if texts:
        texts = [f"#ifndef {_EMULATED}", *texts, "#endif"]
    return "\n".join(texts + [text for name, text in _CPP_FUNCTIONS.items() if name in used])
