"""Families of algorithms that libraries' kernels belong to, by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from daydream.operators.pricing import is_auxiliary

#: Algorithm families by what the names of a call's kernels contain; the first that fits counts.
FAMILIES = (
    ("non-fused Winograd", r"winograd_nonfused"),
    ("fused Winograd", r"winograd"),
    ("FFT", r"fft"),
    ("older engines", r"(im|ex)plicit_convolve_sgemm|wgrad_alg[01]|dgrad_engine"),
    ("TF32", r"tf32|s1688gemm|s16816gemm(?!_f16|_bf16)"),
    ("half precision", r"h884|h1688|h16816|s884gemm|s16816gemm|hgemm|fp16|bf16"),
    ("split-K", r"splitk"),
    ("GEMM", r"gemm"),
    ("implicit GEMM", r"scudnn|fprop|dgrad|wgrad|implicit"),
)


def algorithm_of(kernels: Sequence[str]) -> str:
    """The algorithm family that a call's kernels belong to; ``other`` where none fits."""
    text = " ".join(kernels).lower()
    main = " ".join(name for name in kernels if not is_auxiliary(name)).lower() or text
    for family, pattern in FAMILIES:
        # Only Winograd and split-K show in the auxiliary kernels.
        if re.search(pattern, text if "winograd" in pattern or "split" in pattern else main):
            return family
    return "other"
