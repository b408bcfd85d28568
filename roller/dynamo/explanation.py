"""The backend's decisions about a model: what kernels of ours take, what stays with PyTorch, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from hal.catalog import load_device
from hal.support.errors import InputError
from roller.dynamo.backend import RollerBackend, backend
from roller.dynamo.kernels import is_processor
from roller.dynamo.prices import GraphPrice
from roller.dynamo.rewriting import Decision


@dataclass(frozen=True)
class Explanation:
    """Decisions about every graph of a model, in the order in which the graphs were compiled.

    Attributes:
        graphs: the decisions.
        prices: times of the graphs on a processor, where they were asked for in place of compiling.
    """

    graphs: tuple[tuple[Decision, ...], ...]
    prices: tuple[GraphPrice, ...] = ()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Those of all graphs."""
        return tuple(decision for graph in self.graphs for decision in graph)

    @property
    def seconds(self) -> float:
        """Predicted time of all kernels that were taken."""
        return sum(decision.seconds for decision in self.decisions if decision.is_taken)

    @property
    def price(self) -> GraphPrice:
        """Time of one call of the model; zero where no prices were asked for."""
        return sum(self.prices, GraphPrice(0.0, 0.0, 0.0, 0.0))

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
    return _examined(backend(**options), model, inputs, training)


def predict_model(model: Any, *inputs: Any, **options: Any) -> Explanation:
    """Decisions of the backend about a model on a processor, and the time of a call, before anything is compiled.

    The model runs once, operator by operator, so that all of its graphs are seen.

    Args:
        model: a module or function of PyTorch on the CPU.
        inputs: what it is called with.
        options: of :func:`roller.backend`.

    Raises:
        InputError: an option has a value that it does not take, or the device is no processor.

    >>> import torch
    >>> step = predict_model(torch.nn.Linear(64, 64).eval(), torch.ones(8, 64), device="epyc-7763")
    >>> len(step.decisions), 1e-6 < step.price.seconds < 1e-3
    (1, True)
    """
    chosen = backend(**options)
    if chosen.device != "auto" and not is_processor(load_device(chosen.device)):
        raise InputError("device", f"{chosen.device} is no processor", "name one, or use daydream predict for boards")
    chosen.prices = []
    explanation = _examined(chosen, model, inputs, training=False)
    return replace(explanation, prices=tuple(chosen.prices))


def _examined(chosen: RollerBackend, model: Any, inputs: Sequence[Any], training: bool) -> Explanation:
    import torch

    graphs: list[tuple[Decision, ...]] = []
    chosen.listeners.append(lambda decisions: graphs.append(tuple(decisions)))
    torch.compiler.reset()
    with torch.set_grad_enabled(training):
        compiled: Any = torch.compile(model, backend=chosen)
        outputs = compiled(*inputs)
        if training:
            _first_tensor(outputs).sum().backward()
    return Explanation(tuple(graphs))


def _first_tensor(outputs: Any) -> Any:
    """The first tensor of a model's outputs that has a gradient."""
    import torch
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves(outputs)
    return next(each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad)
