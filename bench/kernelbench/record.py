"""Calls of a function recorded while it runs on tensors without data, with the memory that each reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.kernelbench.problem import DTYPES, Call, Layout, Listed, Problem
from daydream.capture.pytorch.arguments import inputs_of_call, ordered_arguments, recorded_tensor, tensors_in, traits_of
from daydream.capture.pytorch.meta_kernels import SHAPE_FUNCTIONS
from daydream.operators.rules import launches_nothing


def recorded(name: str, function: Any, inputs: Sequence[Any]) -> Problem:
    """A function of tensors, a module in training mode for one, as a problem.

    Tensors that share memory have one number; what a call reads otherwise than in order has its layout.
    """
    given = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in inputs]
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        function(*given)
    return Problem(name=name, listed=tuple(recorder.listed), recorded=tuple(recorder.calls))


class _Recorder(TorchDispatchMode):
    """Writes calls down, and holds their tensors, so that none has another's memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.listed: list[Listed] = []
        self.calls: list[Call] = []
        self._tensors: list[Any] = []
        self._numbers: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = SHAPE_FUNCTIONS.get(func, func)(*args, **(kwargs or {}))
        traits = traits_of(func)
        arguments = ordered_arguments(traits, args, kwargs or {})
        read, made = list(tensors_in(arguments)), list(tensors_in(result))
        self._tensors += [*read, *made]
        inputs, outputs = inputs_of_call(arguments), tuple(recorded_tensor(tensor) for tensor in made)
        kinds = [recorded_tensor(tensor).dtype for tensor in read]
        shapes = [tuple(tensor.shape) for tensor in read]
        values = tuple(inputs.values)
        self.listed.append(
            (traits.name, [[list(shape), kind] for shape, kind in zip(shapes, kinds, strict=True)], list(values),
             [list(tensor.shape) for tensor in made])
        )  # fmt: skip
        if launches_nothing(traits.name, inputs, outputs) or not made:
            return result
        numbers, stem = tuple(map(self._number, read)), traits.name.removeprefix("aten::")
        if self._number(made[0]) in numbers and _layout(made[0]) is not None:
            stem = f"{stem} into a part of a tensor"
        self.calls.append(
            Call(
                stem=stem, shapes=tuple(shapes),
                dtypes=tuple(DTYPES.get(kind, kind) for kind in kinds), values=values,
                outputs=tuple(tuple(tensor.shape) for tensor in made), read=numbers, written=self._number(made[0]),
                layouts=tuple(map(_layout, read)),
            )
        )  # fmt: skip
        return result

    def _number(self, tensor: torch.Tensor) -> int:
        return self._numbers.setdefault(tensor.untyped_storage()._cdata, len(self._numbers))


def _layout(tensor: torch.Tensor) -> Layout | None:
    """Layout of a tensor; None where it is all of its memory in order."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.is_contiguous() and tensor.numel() == elements:
        return None
    return Layout(tuple(tensor.stride()), int(tensor.storage_offset()), elements)
