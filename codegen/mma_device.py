"""The device functions that kernels with ``mma.sync`` call: one PTX instruction each, by inline assembly.

TVM has intrinsics for these instructions too, but prints them as blocks of assembly of its own, which only a GPU can
execute. Here each is a function by name, so that a kernel's text stays readable and the CUDA emulator can put functions
of the same meaning in their place (``codegen/emulator/mma_on_cpu.h``).

Offsets into shared memory are bytes, those into fragments are registers.
"""

from __future__ import annotations

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


def _product(name: str, dtype: str) -> str:
    return f"""\
static __device__ __forceinline__ void {name}(float* sums, int at, const unsigned* a, int a_at, const unsigned* b,
                                              int b_at) {{
  float* d = sums + at;
  const unsigned *x = a + a_at, *y = b + b_at;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
               "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
}}"""


def _copy(size: int, guarded: bool) -> str:
    # Only copies of 16 bytes may pass by L1, which nobody reads them from again.
    cache = "cg" if size == 16 else "ca"
    name = f"copy_async_{size}" + ("_guarded" if guarded else "")
    condition, operand, count = (", bool inside", ", %2", f', "r"(inside ? {size} : 0)') if guarded else ("", "", "")
    return f"""\
static __device__ __forceinline__ void {name}(void* shared, int offset, const void* from{condition}) {{
  asm volatile("cp.async.{cache}.shared.global.L2::128B [%0], [%1], {size}{operand};"
               :: "r"(shared_address(shared, offset)), "l"(from){count} : "memory");
}}"""


def _wait(pending: int) -> str:
    return f"""\
static __device__ __forceinline__ void copy_async_wait_{pending}() {{
  asm volatile("cp.async.wait_group {pending};" ::: "memory");
}}"""


_COMMIT = """\
static __device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}"""

#: A copy of what ``cp.async`` cannot take: single elements of two bytes.
_STORE = """\
template <typename T> static __device__ __forceinline__ void store_shared(void* shared, int offset, T value) {
  *(T*)((char*)shared + offset) = value;
}"""

#: Sizes in bytes of an asynchronous copy.
COPY_BYTES = (16, 8, 4)

#: Most groups of copies that a wait leaves under way.
MOST_PENDING = 6

#: By name of the element type: the function that multiplies fragments of it.
PRODUCTS = {"float16": "mma_16x8x16_f16", "bfloat16": "mma_16x8x16_bf16"}

_FUNCTIONS = {
    "load_matrix_x4": _load("load_matrix_x4", ""),
    "load_matrix_x4_trans": _load("load_matrix_x4_trans", ".trans"),
    PRODUCTS["float16"]: _product(PRODUCTS["float16"], "f16"),
    PRODUCTS["bfloat16"]: _product(PRODUCTS["bfloat16"], "bf16"),
    **{f"copy_async_{size}": _copy(size, False) for size in COPY_BYTES},
    **{f"copy_async_{size}_guarded": _copy(size, True) for size in COPY_BYTES},
    "copy_async_commit": _COMMIT,
    **{f"copy_async_wait_{pending}": _wait(pending) for pending in range(MOST_PENDING + 1)},
    "store_shared": _STORE,
}


def device_functions(used: set[str]) -> str:
    """The text of the functions among the names ``used``, empty where there are none."""
    texts = [text for name, text in _FUNCTIONS.items() if name in used]
    if not texts:
        return ""
    if any("shared_address" in text for text in texts):
        texts.insert(0, _SHARED_ADDRESS)
    return "\n".join([f"#ifndef {_EMULATED}", *texts, "#endif"])
