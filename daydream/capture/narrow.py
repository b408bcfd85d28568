"""Which operators of a step run on narrow numbers.

Training frameworks keep what is first and last (embedding, head), attention and norms in 16 bits, and run the linear
layers of the repeated blocks narrow, forward and in both gradients (Micikevicius et al. 2022, "FP8 Formats for Deep
Learning"; Transformer Engine, torchao, Megatron).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from daydream.capture.captured import Capture
from daydream.operators.variants import PRECISIONS


def narrow_places(capture: Capture) -> Collection[int]:
    """Rows of a capture's operators that belong to its repeated blocks; none where it keeps 16 bits."""
    if capture.precision in ("", PRECISIONS[0]):
        return frozenset()
    inside = {
        number
        for number, module in enumerate(capture.modules)
        if any(module.path == block or module.path.startswith(f"{block}.") for block in capture.blocks)
    }
    return frozenset(row for row, operator in enumerate(capture.operators) if operator.module in inside)


def with_precision(capture: Capture, precision: str) -> Capture:
    """The step, whose blocks' linear layers run in a precision (:data:`daydream.operators.variants.PRECISIONS`)."""
    if precision in ("", PRECISIONS[0]):
        return replace(capture, precision=precision)
    said = (
        f"linear layers of the repeated blocks run in {precision}; embedding, head, attention and norms stay in 16 "
        "bits, and memory is counted as if all did"
    )
    return replace(capture, precision=precision, assumed=(*capture.assumed, said))
