"""What one kernel of a program computes: a tensor expression in canonical form, or a patch transform."""

from __future__ import annotations

from sokoban.kernel.form import KernelForm
from sokoban.kernel.patches import PatchTransform
from sokoban.language.expression import Tensor

#: What one kernel of a program computes.
Problem = KernelForm | PatchTransform


def tensors_of(problem: Problem) -> tuple[Tensor, ...]:
    """Tensors of a kernel in the order of its parameters: the inputs, then the output."""
    if isinstance(problem, PatchTransform):
        return (*problem.inputs, problem.output)
    return (*problem.expr.inputs, problem.expr.output)
