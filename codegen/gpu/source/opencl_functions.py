"""The asynchronous copies of :mod:`codegen.gpu.matrix.mma_functions` as plain ones in OpenCL C, by the same names.

A kernel that copies past the registers then runs on any OpenCL device with the statements that it has in CUDA: copies
are there at once, and waiting for them is nothing.
"""

from __future__ import annotations

import re

from codegen.gpu.matrix.mma_functions import COPY_BYTES, MOST_PENDING

#: By bytes of a copy: the type that is copied as a whole.
_TYPES = {4: "uint", 8: "uint2", 16: "uint4"}

_CALL = re.compile(r"\bcopy_async_\w+")


def _copy_by_offsets(size: int) -> str:
    return f"""\
static void copy_async_{size}_apart(__local void* shared, int offset, int shared_more, const __global void* from,
                                    int from_more) {{
  *(__local {_TYPES[size]}*)((__local char*)shared + offset + shared_more) =
      *(const __global {_TYPES[size]}*)((const __global char*)from + from_more);
}}"""


def _guarded(size: int) -> str:
    return f"""\
static void copy_async_{size}_guarded(__local void* shared, int offset, const __global void* from, bool inside) {{
  __local {_TYPES[size]}* to = (__local {_TYPES[size]}*)((__local char*)shared + offset);
  if (inside) *to = *(const __global {_TYPES[size]}*)from;
  else *to = 0;
}}"""


_FUNCTIONS = {
    **{f"copy_async_{size}_apart": _copy_by_offsets(size) for size in COPY_BYTES},
    **{f"copy_async_{size}_guarded": _guarded(size) for size in COPY_BYTES},
    **{
        name: f"static void {name}() {{}}"
        for name in ("copy_async_commit", *(f"copy_async_wait_{pending}" for pending in range(MOST_PENDING + 1)))
    },
}


def with_device_functions(source: str) -> str:
    """An OpenCL C source with the functions that it calls in front of it."""
    used = set(_CALL.findall(source))
    texts = [text for name, text in _FUNCTIONS.items() if name in used]
    return "\n".join([*texts, source]) if texts else source
