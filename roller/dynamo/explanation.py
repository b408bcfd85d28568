"""The backend's decisions about a model: what kernels of ours take, what stays with PyTorch, and why."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from roller.dynamo.backend import RollerBackend
from roller.dynamo.rewriting import Decision


@dataclass(frozen=True)
class Explanation:
    """Decisions about every graph of a model, in the order in which the graphs were compiled."""

    graphs: tuple[tuple[Decision, ...], ...]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Those of all graphs."""
        return tuple(decision for graph in self.graphs for decision in graph)

    @property
    def taken_share(self) -> float:
        """Share of the multiply-adds that kernels of ours do; NaN where there are none."""
        total = sum(decision.multiply_adds for decision in self.decisions)
        taken = sum(decision.multiply_adds for decision in self.decisions if decision.is_taken)
        return taken / total if total else math.nan

    @property
    def seconds(self) -> float:
        """Predicted time of all kernels that were taken."""
        return sum(decision.seconds for decision in self.decisions if decision.is_taken)

    def __str__(self) -> str:
        console = Console(width=140, color_system=None)
        with console.capture() as capture:
            console.print(self.table())
        taken = sum(decision.is_taken for decision in self.decisions)
        counts = f"{taken} of {len(self.decisions)} sums of products in {len(self.graphs)} graphs"
        return f"{capture.get()}{counts}, {self.seconds * 1e3:.2f} ms predicted"

    def table(self) -> Table:
        """A row for decisions that are alike."""
        table = Table(
            "operators", "result", "times", "multiply-adds", "predicted", "kernel, or why PyTorch's own", box=None
        )
        alike = Counter(replace(decision, seconds=round(decision.seconds, 9)) for decision in self.decisions)
        for decision, count in alike.items():
            table.add_row(
                decision.functions,
                "x".join(map(str, decision.shape)),
                str(count),
                f"{decision.multiply_adds / 1e6:.1f} M",
                f"{decision.seconds * 1e6:.1f} µs" if decision.is_taken else "-",
                decision.reason or decision.name,
            )
        return table


def explain_model(model: Any, *inputs: Any, training: bool = False, **options: Any) -> Explanation:
    """Decisions of the backend about a model, which is compiled and run once.

    Args:
        model: a module or function of PyTorch.
        inputs: what it is called with.
        training: whether gradients are recorded, and the backward pass runs as well.
        options: of :func:`roller.backend`.

    Raises:
        InputError: an option has a value that it does not take.
    """
    import torch

    from roller.dynamo.backend import backend

    chosen: RollerBackend = backend(**options)
    graphs: list[tuple[Decision, ...]] = []
    chosen.listeners.append(lambda decisions: graphs.append(tuple(decisions)))
    torch.compiler.reset()
    with torch.set_grad_enabled(training):
        outputs = torch.compile(model, backend=chosen)(*inputs)
        if training:
            _first_tensor(outputs).sum().backward()
    return Explanation(tuple(graphs))


def _first_tensor(outputs: Any) -> Any:
    """The first tensor of a model's outputs that has a gradient."""
    import torch
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves(outputs)  # type: ignore[no-untyped-call]
    return next(each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad)
