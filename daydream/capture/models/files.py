"""Models that a function in a Python file of the user's makes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from daydream.capture.failures import failures_told
from daydream.capture.options import OPTIMIZERS
from daydream.capture.pytorch.arguments import tensors_in
from daydream.capture.pytorch.step import Subject
from daydream.whatif import module_of_file
from hal.support.errors import InputError, listed

_KEYS = ("model", "inputs", "loss", "optimizer", "batch")
_RETURN = "return (model, inputs), (model, inputs, loss) or a dict with model and inputs"


def file_subject(
    path: Path, name: str, *, batch: int | None, sequence: int | None, image: int | None, training: bool
) -> Subject:
    """The model that a function of a file returns.

    The function runs with ``meta`` as the default device. Those of ``batch``, ``sequence`` and ``image`` that it has
    parameters for and the user gave are passed.

    Raises:
        InputError: the file or the function fails, or what it returns is no model with inputs.
    """
    function = _function(path, name)
    title = f"{path}:{function.__name__}"
    sizes = {"batch": batch, "sequence": sequence, "image": image}
    wanted = inspect.signature(function).parameters
    given = {key: value for key, value in sizes.items() if key in wanted and value is not None}
    missing = [
        key for key, each in wanted.items()
        if each.default is each.empty and key not in given and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]  # fmt: skip
    if missing:
        known = [f"--{key}" for key in missing if key in sizes]
        raise InputError(title, f"needs {listed(missing)}", f"add {listed(known)}" if known else "give it a default")
    with failures_told(title, path), torch.device("meta"):
        result = function(**given)
    parts = _parts(title, result)
    model = parts["model"]
    if "inputs" not in parts:
        return _known_inputs(title, model, path, batch=batch, sequence=sequence, image=image, training=training)
    with failures_told(title, path):
        model = model.to("meta")
        inputs = _on_meta(parts["inputs"])
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    args = tuple(args) if isinstance(args, list | tuple) else (args,)
    samples = parts.get("batch", batch)
    if samples is None:
        first = next((tensor for tensor in tensors_in([args, kwargs]) if tensor.dim()), None)
        samples = None if first is None else first.shape[0]
    return Subject(
        title=title, model=model, args=args, kwargs=kwargs, loss=parts.get("loss"), batch=samples,
        optimizer=parts.get("optimizer", "sgd"), source=path,
    )  # fmt: skip


def _function(path: Path, name: str) -> Any:
    module = module_of_file(path, "daydream_model")
    functions = {
        key: value
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__code__.co_filename == str(path) and not key.startswith("_")
    }
    if not name and len(functions) == 1:
        return next(iter(functions.values()))
    if name not in functions:
        problem = f"has no function {name!r}" if name else "has several functions" if functions else "has no function"
        raise InputError(str(path), problem, f"it has {listed(list(functions))}" if functions else _RETURN)
    return functions[name]


def _parts(title: str, result: Any) -> dict[str, Any]:
    """What the function returned by the names of its parts."""
    if isinstance(result, torch.nn.Module):
        return {"model": result}
    if isinstance(result, Mapping):
        parts = dict(result)
        unknown = [str(key) for key in parts if key not in _KEYS]
        if unknown:
            raise InputError(title, f"returned a dict with {listed(unknown)}", f"its keys are {listed(_KEYS)}")
    elif isinstance(result, tuple) and 2 <= len(result) <= 3:
        parts = dict(zip(("model", "inputs", "loss"), result, strict=False))
    else:
        raise InputError(title, f"returned {type(result).__name__}, which is no model", _RETURN)
    model = parts.get("model")
    if not isinstance(model, torch.nn.Module):
        raise InputError(title, f"returned {type(model).__name__} as the model", "the model is a torch.nn.Module")
    parts = {key: value for key, value in parts.items() if value is not None}
    if "loss" in parts and not callable(parts["loss"]):
        raise InputError(title, "returned a loss that is no function", "give a function of the model's result")
    if parts.get("optimizer", "sgd") not in OPTIMIZERS:
        raise InputError(title, f"returned the optimizer {parts['optimizer']!r}", f"give {' or '.join(OPTIMIZERS)}")
    if "batch" in parts and (type(parts["batch"]) is not int or parts["batch"] < 1):
        raise InputError(title, f"returned the batch {parts['batch']!r}", "give a whole number of samples")
    if "inputs" in parts and not any(True for _ in tensors_in([parts["inputs"]])):
        raise InputError(title, "returned inputs without a tensor", _RETURN)
    return parts


def _known_inputs(title: str, model: Any, path: Path, **sizes: Any) -> Subject:
    """A model alone, whose inputs follow from what it is."""
    from daydream.capture.models import hugging_face

    if hasattr(model, "main_input_name") and hasattr(model, "config"):
        return hugging_face.subject_of_model(model.to("meta"), title, **sizes)
    raise InputError(title, "returned a model without inputs", _RETURN)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, Mapping):
        return {key: _on_meta(each) for key, each in value.items()}
    return type(value)(_on_meta(each) for each in value) if type(value) in (list, tuple) else value
