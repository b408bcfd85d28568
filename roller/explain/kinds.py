"""Explanation of kernels that no schedule of tiles computes: a row per kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from roller.explain.attention import attention_lines, attention_origin, slice_lines
from roller.explain.attention_gradient import gradient_lines, gradient_origin, slope_lines, slope_origin
from roller.explain.line import line_lines, line_origin
from roller.explain.pair import pair_lines, pair_origin
from roller.explain.patches import patch_lines
from sokoban.kernel.attention import AttentionKernel, SliceSum
from sokoban.kernel.attention_gradient import AttentionGradientKernel, SlopeProduct
from sokoban.kernel.line import LineKernel
from sokoban.kernel.pair import ProductPair
from sokoban.kernel.patches import PatchTransform


@dataclass(frozen=True)
class KindPage:
    """The page of a kind of kernel.

    Attributes:
        lines: a kernel with its schedule, its estimate and the device: its launch, what it does and holds, its stages.
        origin: how programs came about that begin with a kernel and its schedule; None where those are chains.
    """

    lines: Callable[..., Iterator[str]]
    origin: Callable[..., Iterator[str]] | None = None


#: Kind of kernel -> its page.
KINDS: Mapping[type, KindPage] = {
    PatchTransform: KindPage(patch_lines),
    AttentionKernel: KindPage(attention_lines, attention_origin),
    SliceSum: KindPage(slice_lines),
    AttentionGradientKernel: KindPage(gradient_lines, gradient_origin),
    SlopeProduct: KindPage(slope_lines, slope_origin),
    ProductPair: KindPage(pair_lines, pair_origin),
    LineKernel: KindPage(line_lines, line_origin),
}
