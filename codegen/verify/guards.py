"""Guard elements around buffers, by which writes past an end are noticed."""

from __future__ import annotations

import numpy as np

from sokoban.language.expression import FLOAT8_DTYPES, INTEGER_DTYPES, Tensor

#: Elements behind every buffer that no kernel may touch.
GUARD_ELEMENTS = 256


def guarded(values: np.ndarray, tensor: Tensor) -> np.ndarray:
    """The values flat, as a kernel stores them, followed by a guard of NaN (of integers: their smallest number)."""
    flat = np.concatenate([values.ravel(), np.full(GUARD_ELEMENTS, np.nan)])
    if tensor.dtype in INTEGER_DTYPES:
        flat = np.nan_to_num(flat, nan=np.iinfo(tensor.dtype).min)
    return stored(flat, tensor.dtype)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """The values flat, as a kernel stores them. NumPy has no bfloat16, whose bits are the upper half of a float32's."""
    flat = values.ravel()
    if dtype in FLOAT8_DTYPES:
        import ml_dtypes

        return flat.astype(getattr(ml_dtypes, dtype))
    if dtype == "bfloat16":
        return (flat.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return flat.astype(dtype)


def numbers(elements: np.ndarray, dtype: str) -> np.ndarray:
    """Elements as numbers: the guard of integers becomes NaN, bits of bfloat16 become float32."""
    if dtype == "bfloat16" and elements.dtype == np.uint16:
        return (elements.astype(np.uint32) << 16).view(np.float32)
    if dtype not in INTEGER_DTYPES:
        return elements
    return np.where(elements == np.iinfo(dtype).min, np.nan, elements.astype(np.float64))
