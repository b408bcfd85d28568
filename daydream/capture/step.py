"""A training or inference step of a model on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from daydream.capture.arguments import recorded_tensor, tensors_in
from daydream.capture.captured import Capture, CapturedModule, CapturedParameter
from daydream.capture.dispatch import OperatorRecorder
from daydream.graph.graph import Phase

#: Types that autocast computes in by the name of the option.
_AUTOCAST = {"amp": torch.float16}
_CASTS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model on ``meta`` and what a step of it is made of.

    Attributes:
        title: the model as the user named it.
        model: the module.
        args: positional inputs.
        kwargs: named inputs.
        loss: from the model's result to a scalar; None sums up what the result has of floating-point tensors, or takes
            the ``loss`` that it says.
        batch: samples of the step; None where that is unknown.
        optimizer: ``sgd``, ``adam``, ``adamw`` or ``none``.
        assumed: what had to be supposed.
    """

    title: str
    model: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Any] | None = None
    batch: int | None = None
    optimizer: str = "sgd"
    assumed: tuple[str, ...] = ()


def capture(subject: Subject, *, training: bool = False, dtype: str = "float32", optimizer: str = "") -> Capture:
    """One step written down.

    Args:
        subject: the model and its inputs.
        training: forward, backward and update; else forward alone, without gradients.
        dtype: of parameters and inputs; ``amp`` leaves them in float32 and emulates autocast to float16.
        optimizer: in place of the subject's.
    """
    model = subject.model.train(training)
    if dtype in _CASTS:
        model = model.to(_CASTS[dtype])
    modules = {module: index for index, module in enumerate(model.modules())}
    recorder = OperatorRecorder(modules, _AUTOCAST.get(dtype))
    owners = _parameters(model, modules)
    recorder.watch_parameters(owners)
    for buffer in model.buffers():
        recorder.storages.number(buffer, "buffer")
    args, kwargs = _cast_inputs(subject, dtype)
    for tensor in tensors_in([*args, *kwargs.values()]):
        recorder.storages.number(tensor, "input")
    update = _optimizer(model, optimizer or subject.optimizer) if training else None
    with recorder, recorder.inside_modules():
        recorder.recording = True
        recorder.phase = Phase.FORWARD
        if training:
            result = model(*args, **kwargs)
            loss = (subject.loss or scalar_of)(result)
            del result
            recorder.phase = Phase.BACKWARD
            loss.backward()
            recorder.phase = Phase.UPDATE
            if update is not None:
                update.step()
        else:
            with torch.no_grad():
                model(*args, **kwargs)
        recorder.recording = False
    names = {module: path for path, module in model.named_modules()}
    return Capture(
        title=subject.title,
        operators=tuple(recorder.operators),
        modules=tuple(CapturedModule(names[module], type(module).__name__) for module in modules),
        parameters=tuple(
            CapturedParameter(
                name=name,
                tensor=recorded_tensor(tensor),
                storage=recorder.storages.number(tensor)[0],
                trained=training and tensor.requires_grad,
            )
            for name, (tensor, _) in owners.items()
        ),
        storages=tuple(recorder.storages.records),
        batch=subject.batch,
        training=training,
        dtype=dtype,
        assumed=subject.assumed,
    )


def _parameters(model: Any, modules: Mapping[Any, int]) -> dict[str, tuple[torch.Tensor, int]]:
    owners = {}
    for path, module in model.named_modules():
        for name, tensor in module.named_parameters(recurse=False):
            owners[f"{path}.{name}" if path else name] = (tensor, modules[module])
    return owners


def _cast_inputs(subject: Subject, dtype: str) -> tuple[list[Any], dict[str, Any]]:
    def cast(value: Any) -> Any:
        if dtype in _CASTS and isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(_CASTS[dtype])
        return value

    return [cast(value) for value in subject.args], {name: cast(value) for name, value in subject.kwargs.items()}


def _optimizer(model: Any, name: str) -> Any:
    """The optimizer with its state made, as it is from the second step on."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    makers: dict[str, Callable[[], Any]] = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
        "adam": lambda: torch.optim.Adam(parameters, lr=1e-3, foreach=True),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    }
    if name == "none" or not parameters:
        return None
    optimizer = makers[name]()
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def scalar_of(result: Any) -> Any:
    """What training minimises where nobody says: the result's ``loss``, or the sum of its first floating tensor."""
    loss = result.get("loss") if hasattr(result, "get") else getattr(result, "loss", None)
    if loss is not None:
        return loss
    values = result.values() if hasattr(result, "values") else [result]
    tensors = [tensor for tensor in tensors_in(list(values)) if tensor.is_floating_point() and tensor.requires_grad]
    return tensors[0].sum()
