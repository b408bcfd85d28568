"""Tensor maps made by the driver, for kernels that copy tiles in bulk (CUDA driver API, ``cuTensorMapEncodeTiled``).

With Python, NumPy and the driver's own library alone. CuPy passes a NumPy array of one element by value.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from codegen.tensor_map import MAP_ITEM_BYTES, TensorMap
from hal.support.errors import InputError

#: Bytes of a ``CUtensorMap``, and where one may start.
MAP_BYTES, MAP_ALIGNMENT_BYTES = 128, 64

#: ``CUtensorMapDataType`` by element type; eight bits of any kind are bytes to the driver.
_DTYPES = {"float16": 6, "bfloat16": 9, "float8_e4m3fn": 0, "float8_e5m2": 0, "int8": 0, "tfloat32": 11}

#: ``CU_TENSOR_MAP_INTERLEAVE_NONE``, ``_SWIZZLE_128B``, ``_L2_PROMOTION_L2_256B`` and ``_FLOAT_OOB_FILL_NONE``: zeros.
_INTERLEAVE, _SWIZZLE, _PROMOTION, _FILL = 0, 3, 3, 0


@lru_cache(maxsize=1)
def driver() -> Any:
    """The driver's library, which is there wherever a GPU is."""
    return ctypes.CDLL("libcuda.so.1")


@lru_cache(maxsize=1024)
def encoded(tensor_map: TensorMap, address: int) -> np.ndarray[Any, Any]:
    """The map of a tensor at an address of the GPU, as an argument of a launch.

    Raises:
        InputError: the driver refuses it, or is too old to know tensor maps.
    """
    rank, item_bytes = len(tensor_map.shape), MAP_ITEM_BYTES[tensor_map.dtype]
    # The driver counts dimensions from the innermost on, and wants no pitch for that one.
    sizes, box = tensor_map.shape[::-1], tensor_map.box[::-1]
    pitches = [item_bytes * int(np.prod(sizes[: dimension + 1])) for dimension in range(rank - 1)]
    memory = np.zeros(MAP_BYTES + MAP_ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % MAP_ALIGNMENT_BYTES
    result = memory[start : start + MAP_BYTES].view(f"V{MAP_BYTES}")
    try:
        encode = driver().cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        problem = f"cannot be seen by bulk copies: {error}"
        raise InputError(tensor_map.tensor, problem, "use a driver of CUDA 12 or later") from None
    status = encode(
        ctypes.c_void_p(result.ctypes.data),
        ctypes.c_int(_DTYPES[tensor_map.dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*pitches),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*([1] * rank)),
        ctypes.c_int(_INTERLEAVE),
        ctypes.c_int(_SWIZZLE),
        ctypes.c_int(_PROMOTION),
        ctypes.c_int(_FILL),
    )
    if status:
        raise InputError(tensor_map.tensor, f"cannot be seen by bulk copies: driver error {status}", "use another rank")
    return result
