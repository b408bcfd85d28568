"""Computation of one kernel of a program: a tensor expression in canonical form, a patch transform, attention,
its gradients, a pair of products, a scan or place along an axis."""

from __future__ import annotations

from sokoban.kernel.attention import AttentionKernel, SliceSum
from sokoban.kernel.attention_gradient import AttentionGradientKernel, SlopeProduct
from sokoban.kernel.form import KernelForm
from sokoban.kernel.line import LineKernel
from sokoban.kernel.pair import ProductPair
from sokoban.kernel.patches import PatchTransform

#: What one kernel of a program computes.
Problem = (
    KernelForm | PatchTransform | AttentionKernel | SliceSum | AttentionGradientKernel | SlopeProduct | ProductPair
    | LineKernel
)  # fmt: skip
