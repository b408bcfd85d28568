"""A training or inference step of a model on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from daydream.capture.captured import Capture, CapturedModule, CapturedParameter
from daydream.capture.options import CACHES
from daydream.capture.pytorch.arguments import recorded_tensor, tensors_in
from daydream.capture.pytorch.autocast import Autocast
from daydream.capture.pytorch.checkpoints import repeated_blocks
from daydream.capture.pytorch.dispatch import OperatorRecorder
from daydream.capture.pytorch.optimizers import clip_gradients, fused_on_meta, optimizer_of, state_tensors
from daydream.graph.graph import Phase

#: Types that autocast computes in by the name of the option.
_AUTOCAST = {"amp": torch.float16, "amp-bfloat16": torch.bfloat16}
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
        source: file of the user's that made the model, None for a library's.
        cached: tokens of each sample that a cache holds before the step.
    """

    title: str
    model: Any
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Any] | None = None
    batch: int | None = None
    optimizer: str = "sgd"
    assumed: tuple[str, ...] = ()
    source: Path | None = None
    cached: int = 0


def capture(
    subject: Subject,
    *,
    training: bool = False,
    dtype: str = "float32",
    optimizer: str = "",
    implementation: str = "foreach",
    clip: bool = False,
    device: str = "meta",
    parameters: str = "",
) -> Capture:
    """One step written down.

    Args:
        subject: the model and its inputs.
        training: forward, backward and update; else forward alone, without gradients.
        dtype: of parameters and inputs; ``amp`` and ``amp-bfloat16`` leave them in float32 and cast to 16 bits as
            autocast does.
        optimizer: in place of the subject's.
        implementation: of the optimizer, one of :data:`daydream.capture.options.IMPLEMENTATIONS`.
        clip: whether gradients are clipped by the norm of all before the update.
        device: where the model's tensors are.
        parameters: type of parameters under autocast, as FSDP's mixed precision gathers them; empty for float32.
    """
    model = subject.model.train(training)
    parameter_type = parameters if dtype in _AUTOCAST and parameters else dtype
    if parameter_type in _CASTS:
        model = model.to(_CASTS[parameter_type])
    autocast = Autocast()
    recorder = OperatorRecorder({module: index for index, module in enumerate(model.modules())}, autocast, device)
    args, kwargs = _cast_inputs(subject, parameter_type)
    if subject.cached:
        names = signature(model.forward).parameters
        # No input is counted for it: layer by layer, a cache that has grown takes its place.
        cache = _filled_cache(model, kwargs, subject.cached)
        kwargs |= {"use_cache": True, next(name for name in CACHES if name in names): cache}
        del cache
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad] if training else []
    update = optimizer_of(trained, optimizer or subject.optimizer, implementation)
    owners = _parameters(model)
    _number_storages(recorder, model, owners, [args, kwargs], update)
    order: list[int] = []
    with ExitStack() as around:
        around.enter_context(autocast.effective())
        around.enter_context(recorder)
        around.enter_context(recorder.inside_modules())
        for parameter in trained:
            hook = parameter.register_post_accumulate_grad_hook(lambda each: order.append(id(each)))
            around.callback(hook.remove)
        casting = around.enter_context(ExitStack())
        if dtype in _AUTOCAST:
            casting.enter_context(torch.autocast("cuda", _AUTOCAST[dtype]))
        recorder.recording = True
        recorder.phase = Phase.FORWARD
        if training:
            # The loss has no name here, so that it ends with the backward pass.
            _backward(recorder, around, casting, (subject.loss or scalar_of)(model(*args, **kwargs)))
            recorder.phase = Phase.UPDATE
            if clip and trained:
                clip_gradients(trained, implementation)
            if update is not None:
                around.enter_context(fused_on_meta())
                update.step()
        else:
            with torch.no_grad():
                model(*args, **kwargs)
        recorder.finish()
    return Capture(
        title=subject.title,
        operators=tuple(recorder.operators),
        modules=tuple(CapturedModule(path, type(module).__name__) for path, module in model.named_modules()),
        parameters=_captured_parameters(recorder, owners, order, training=training),
        storages=tuple(recorder.storages.records),
        batch=subject.batch,
        training=training,
        dtype=dtype,
        assumed=subject.assumed,
        blocks=tuple(repeated_blocks(model)),
    )


def _backward(recorder: OperatorRecorder, around: ExitStack, casting: ExitStack, loss: torch.Tensor) -> None:
    """The backward pass, outside of the forward pass's casts."""
    casting.close()
    recorder.phase = Phase.BACKWARD
    # The recorder knows by it what checkpoints compute anew.
    around.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
    torch.set_autocast_cache_enabled(False)
    loss.backward()


def _number_storages(
    recorder: OperatorRecorder, model: Any, owners: Mapping[str, tuple[torch.Tensor, int]], inputs: Any, update: Any
) -> None:
    """Numbers what exists before the step, by what it is."""
    recorder.watch_parameters(owners)
    for buffer in model.buffers():
        recorder.storages.number(buffer, "buffer")
    for tensor in tensors_in(inputs):
        recorder.storages.number(tensor, "input")
    for tensor in state_tensors(update) if update is not None else ():
        recorder.storages.number(tensor, "optimizer")


def _captured_parameters(
    recorder: OperatorRecorder,
    owners: Mapping[str, tuple[torch.Tensor, int]],
    order: Sequence[int],
    *,
    training: bool,
) -> tuple[CapturedParameter, ...]:
    """The parameters; ``order`` names their tensors as the gradients came."""
    places = {parameter: place for place, parameter in enumerate(dict.fromkeys(order))}
    return tuple(
        CapturedParameter(
            name=name,
            tensor=recorded_tensor(tensor),
            storage=recorder.storages.number(tensor)[0],
            trained=training and tensor.requires_grad,
            order=places.get(id(tensor), -1),
        )
        for name, (tensor, _) in owners.items()
    )


def _parameters(model: Any) -> dict[str, tuple[torch.Tensor, int]]:
    """Parameters by the first of their names, each with the index of the module that holds it."""
    owners: dict[str, tuple[torch.Tensor, int]] = {}
    seen = set()
    for index, (path, module) in enumerate(model.named_modules()):
        for name, tensor in module.named_parameters(recurse=False):
            if tensor in seen:
                continue
            seen.add(tensor)
            owners[f"{path}.{name}" if path else name] = (tensor, index)
    return owners


def _filled_cache(model: Any, kwargs: Mapping[str, Any], tokens: int) -> Any:
    """A cache of so many tokens, whose keys and values the model's own code has put there."""
    name, given = next((name, each) for name, each in kwargs.items() if isinstance(each, torch.Tensor))
    with torch.no_grad():
        result = model(**{name: given.new_empty(given.shape[0], tokens)}, use_cache=True)
    return next(result[name] for name in CACHES if name in result)


def _cast_inputs(subject: Subject, dtype: str) -> tuple[Any, Any]:
    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(_CASTS[dtype]) if dtype in _CASTS and value.is_floating_point() else value
        if isinstance(value, Mapping):
            return {name: cast(each) for name, each in value.items()}
        return type(value)(cast(each) for each in value) if type(value) in (list, tuple) else value

    return cast(list(subject.args)), cast(dict(subject.kwargs))


def scalar_of(result: Any) -> Any:
    """Scalar that training minimises by default: the result's ``loss``, or the sum of its floating tensors.

    Raises:
        ValueError: the result depends on no parameter.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = [tensor for tensor in tensors_in(result) if tensor.is_floating_point() and tensor.requires_grad]
    if not tensors:
        raise ValueError("the model's result has no gradient: no loss can be made of it")
    total = tensors[0].sum()
    for tensor in tensors[1:]:
        total = total + tensor.sum()
    return total
