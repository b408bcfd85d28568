"""Instructions that values cost on vectors: what the code generator writes out for a function, per vector.

Counted in its assembly for 512-bit vectors; divisions and roots occupy a pipeline of their own for as long as so many
multiply-adds take.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Multiply-adds that a call takes the time of; one where a function is missing.
VECTOR_INSTRUCTIONS: Mapping[str, float] = {
    "exp": 15.0,
    "log": 40.0,
    "sqrt": 32.0,
    "rsqrt": 48.0,
    "div": 20.0,
    "tanh": 36.0,
    "erf": 36.0,
    "gelu": 40.0,
    "sigmoid": 37.0,
    "silu": 38.0,
    "sin": 60.0,
    "cos": 60.0,
    "pow": 120.0,
}
