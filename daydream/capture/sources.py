"""A model as the command line names it, built and captured."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daydream.capture.options import CACHES, CaptureOptions
from daydream.capture.stored import StoredStep, known_or_captured
from daydream.operators.convolutions import is_convolution
from daydream.operators.variants import CAPTURED
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.capture.captured import Capture
    from daydream.capture.pytorch.step import Subject

__all__ = ["CaptureOptions", "captured", "load_subject"]

#: What a step with convolutions of float32 says of them.
ROUNDED = "convolutions of float32 round to TF32 where a board can, as PyTorch lets them by default; not by --no-tf32"

_REMEDY = "give FILE.py:function, timm:NAME, hf:config.json or onnx:model.onnx"


def load_subject(
    text: str,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    image: int | None = None,
    class_name: str | None = None,
    training: bool = True,
    attention: str = "auto",
) -> Subject:
    """A model on ``meta`` with its inputs, from the text that names it.

    Args:
        text: ``FILE.py:function``, ``timm:NAME``, ``hf:config.json`` or ``onnx:model.onnx``.
        batch: samples; None for what the source says, else 1.
        sequence: tokens of a text.
        image: height and width of images.
        class_name: of a model of transformers.
        training: whether labels and a loss are needed.
        attention: ``math`` and ``eager`` have models of transformers write their attention out.

    Raises:
        InputError: the text names nothing, or what it names fails.
    """
    _check_packages()
    from daydream.capture.models.deferred import frames_without_source
    from daydream.capture.models.deferred_dynamo import defer_dynamo

    defer_dynamo()
    with frames_without_source():
        import_module("torch")
    kind, _, name = text.partition(":")
    file = re.fullmatch(r"(.+\.py)(?::(\w+))?", text)
    if kind == "timm" and name:
        from daydream.capture.models.timm import timm_subject

        return timm_subject(name, batch=batch, image=image, training=training)
    if kind == "hf" and name:
        from daydream.capture.models.hugging_face import hugging_face_subject

        return hugging_face_subject(
            Path(name), batch=batch, sequence=sequence, image=image, class_name=class_name, training=training,
            attention=attention,
        )  # fmt: skip
    if kind == "onnx" and name:
        onnx_model = import_module("daydream.capture.onnx.model")
        return onnx_model.subject_of(Path(name), batch, sequence=sequence, image=image)
    if file:
        from daydream.capture.models.files import file_subject

        return file_subject(
            Path(file[1]), file[2] or "", batch=batch, sequence=sequence, image=image, training=training
        )
    raise InputError(text, "names no model", _REMEDY)


def captured(source: str | Subject, options: CaptureOptions) -> Capture:
    """One step of a model, from its name or built already.

    The capture changes the model: its type, its layout, its checkpoints. A step that is known from an earlier run
    (:mod:`daydream.capture.stored`) is taken from there.

    Raises:
        InputError: the model cannot be built, or fails on tensors without data, or a package is missing.
    """
    return known_or_captured(source, options, lambda: StoredStep(_captured(source, options))).capture


def _captured(source: str | Subject, options: CaptureOptions) -> Capture:
    if isinstance(source, str):
        _check_packages()
    from daydream.capture.assumptions import assumption_texts, parse_assumptions, values_assumed
    from daydream.capture.failures import failures_as_errors
    from daydream.capture.models.hugging_face import positions_without_data
    from daydream.capture.models.inputs import UNCACHED
    from daydream.capture.narrow import with_precision
    from daydream.capture.pytorch.adapters import apply_adapters, parse_adapters
    from daydream.capture.pytorch.checkpoints import apply_checkpoints, attention_recomputed
    from daydream.capture.pytorch.meta_kernels import board_kernels
    from daydream.capture.pytorch.step import capture

    training = options.mode == "training"
    subject = (
        load_subject(
            source, batch=options.batch, sequence=options.tokens, image=options.image, training=training,
            class_name=options.class_name, attention=options.built_with,
        )
        if isinstance(source, str)
        else source
    )  # fmt: skip
    kernel = options.attention
    kernel = CAPTURED.get(kernel, kernel)
    if kernel == "auto":
        kernel = "flash" if options.flash else "efficient"
    assumed = [each for each in subject.assumed if not (options.cached and each == UNCACHED)]
    if options.lora:
        assumed.append(apply_adapters(subject.model, parse_adapters(options.lora)))
    paths = apply_checkpoints(subject.model, options.checkpoint) if training else []
    if paths:
        assumed.append(f"modules like {paths[0]} are computed again in the backward pass")
    if options.dtype == "amp":
        assumed.append("autocast to float16 without scaling of the loss")
    if options.dtype == "tf32":
        assumed.append("products of float32 are multiplied as TensorFloat-32 where the board has it")
    if options.channels_last:
        subject = _channels_last(subject)
    if options.packed:
        assumed.append(f"samples are packed of documents of {options.packed} tokens, which do not see each other")
    if training and options.checkpoint == "attention":
        assumed.append("attention is computed again in the backward pass")
    if options.cached:
        subject = _with_cache(subject, options.cached, training=training)
        assumed.append(
            f"{options.cached} tokens are in the cache of keys and values, which transformers copies as it grows"
        )
    values = parse_assumptions(options.assume)
    assumed += assumption_texts(values)
    again = attention_recomputed() if training and options.checkpoint == "attention" else nullcontext()
    with (
        failures_as_errors(subject.title, subject.source), board_kernels(kernel), positions_without_data(),
        values_assumed(values), again,
    ):  # fmt: skip
        step = capture(
            replace(subject, assumed=tuple(assumed)), training=training, dtype=options.dtype,
            optimizer=options.optimizer or "", implementation=options.implementation, clip=options.clip,
            parameters=options.parameters,
        )  # fmt: skip
    step = replace(step, attention=options.attention, expert_kernels=options.expert_kernels, packed=options.packed or 0)
    step = with_precision(step, options.precision)
    return _rounded(step) if options.tf32 else replace(step, tf32=False)


def _rounded(step: Capture) -> Capture:
    """The step, which says that its convolutions of float32, where it has some, round their operands."""
    for operator in step.operators:
        data = operator.inputs.tensor(0)
        if is_convolution(operator.name) and data is not None and data.dtype == "float":
            return replace(step, assumed=(*step.assumed, ROUNDED))
    return step


def _with_cache(subject: Subject, tokens: int, *, training: bool) -> Subject:
    """The subject behind so many tokens.

    Raises:
        InputError: a step of training has no cache, or the model takes none.
    """
    if training:
        raise InputError("--cached", "is of no step of training", "add --mode inference")
    if not set(CACHES) & set(signature(subject.model.forward).parameters):
        raise InputError("--cached", f"{subject.title} keeps no cache of keys and values", "name a decoder by hf:")
    return replace(subject, cached=tokens)


def _channels_last(subject: Subject) -> Subject:
    """Images, and weights of four dimensions, with channels last in memory."""
    import torch

    def laid(value: Any) -> Any:
        is_image = isinstance(value, torch.Tensor) and value.dim() == 4
        return value.contiguous(memory_format=torch.channels_last) if is_image else value

    subject.model.to(memory_format=torch.channels_last)
    kwargs = {name: laid(value) for name, value in subject.kwargs.items()}
    return replace(subject, args=[laid(value) for value in subject.args], kwargs=kwargs)


def _check_packages() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("torch", "timm", "transformers", "onnx") if find_spec(name) is None]
    if missing:
        raise InputError("daydream predict", f"needs {missing[0]}", "run pip install 'roller[models]'")
