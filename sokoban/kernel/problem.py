"""What one kernel of a program computes: a tensor expression in canonical form, a patch transform, attention,
its gradients, a pair of products."""

from __future__ import annotations

from sokoban.kernel.attention import AttentionKernel, SliceSum
from sokoban.kernel.attention_gradient import AttentionGradientKernel
from sokoban.kernel.form import KernelForm
from sokoban.kernel.pair import ProductPair
from sokoban.kernel.patches import PatchTransform
from sokoban.language.expression import Tensor

#: What one kernel of a program computes.
Problem = KernelForm | PatchTransform | AttentionKernel | SliceSum | AttentionGradientKernel | ProductPair


def tensors_of(problem: Problem) -> tuple[Tensor, ...]:
    """Tensors of a kernel in the order of its parameters: the inputs, then the output."""
    if isinstance(problem, KernelForm):
        return (*problem.expr.inputs, problem.expr.output)
    return (*problem.inputs, problem.output)
