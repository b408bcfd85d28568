"""Guard elements around buffers, by which writes past an end are noticed."""

from __future__ import annotations

import numpy as np

from sokoban.language.expression import INTEGER_DTYPES, Tensor

#: Elements behind every buffer that no kernel may touch.
GUARD_ELEMENTS = 256


def guarded(values: np.ndarray, tensor: Tensor) -> np.ndarray:
    """The values flat, in the tensor's dtype, followed by a guard of NaN (of integers: their smallest number)."""
    flat = np.concatenate([values.ravel(), np.full(GUARD_ELEMENTS, np.nan)])
    if tensor.dtype in INTEGER_DTYPES:
        return np.nan_to_num(flat, nan=np.iinfo(tensor.dtype).min).astype(tensor.dtype)
    return flat.astype(np.float64 if tensor.dtype == "float64" else np.float32)
