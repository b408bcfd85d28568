"""A rank's step captured for a plan: a few of the model's equal blocks, each with a tensor rank's part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from inspect import signature
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from daydream.capture.sources import CaptureOptions, captured, load_subject
from daydream.capture.stored import StoredStep, known_or_captured
from daydream.plan.units import FEW, Units, compiled_blocks, units_of
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.capture.captured import Capture
    from daydream.capture.pytorch.step import Subject


def planned_units(
    model: str | Callable[[], Subject],
    options: CaptureOptions,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    in_place: bool = False,
    compiles: bool = False,
) -> Units:
    """The units of a rank's step.

    Args:
        model: as :func:`daydream.capture.sources.load_subject` takes it, or what builds it.
        options: of the capture; the batch is that of a micro-batch of one copy of the model.
        tensor: ranks that share every layer.
        sequence_parallel: whether they hold a part of the sequence each between the layers that they share.
        in_place: whether products read parts of the sequence where they arrive, as Megatron's do.
        compiles: whether blocks are compiled, each by itself.

    Raises:
        InputError: the model cannot be built, captured or divided.
    """
    divided = {"tensor": tensor, "sequence_parallel": sequence_parallel, "in_place": in_place}

    def step() -> StoredStep:
        return known_or_captured(model, (options, divided), lambda: _step(model, options, **divided))

    def compiled() -> StoredStep:
        eager = step()
        return replace(eager, capture=compiled_blocks(eager.capture))

    chosen = known_or_captured(model, (options, divided, "compiled"), compiled) if compiles else step()
    return units_of(chosen.capture, chosen.blocks)


def _step(model: str | Callable[[], Subject], options: CaptureOptions, **divided: Any) -> StoredStep:
    """The step with a few of the model's equal blocks where it can be captured so."""
    if isinstance(model, str):
        from daydream.capture.models.deferred import load_torch_library

        load_torch_library()
        # Other modules that a plan needs, imported while PyTorch's library is loaded.
        import_module("daydream.plan.planned")
    subject, blocks = _few(_loaded(model, options))
    try:
        return StoredStep(_captured(subject, options, **divided), blocks)
    except InputError:
        if blocks is None:
            raise
        # Its forward pass may count the blocks.
        return StoredStep(_captured(_loaded(model, options), options, **divided))


def _captured(
    subject: Subject, options: CaptureOptions, tensor: int, *, sequence_parallel: bool, in_place: bool
) -> Capture:
    if tensor > 1:
        subject = _divided(subject, tensor, sequence_parallel=sequence_parallel, in_place=in_place)
    try:
        return captured(subject, options)
    except InputError as error:
        if tensor == 1 or not sequence_parallel:
            raise
        problem = f"the model counts tokens where a rank holds a part of them: {error.problem}"
        raise InputError("--sequence-parallel", problem, "make attention a module of its own") from error


def _loaded(model: str | Callable[[], Subject], options: CaptureOptions) -> Subject:
    if not isinstance(model, str):
        return model()
    return load_subject(
        model, batch=options.batch, sequence=options.tokens, image=options.image, class_name=options.class_name,
        training=options.mode == "training", attention=options.built_with,
    )  # fmt: skip


def _few(subject: Subject) -> tuple[Subject, int | None]:
    """The subject with a few (:data:`~daydream.plan.units.FEW`) of the equal blocks at its end, and how many it had.

    None where all are kept.
    """
    from daydream.capture.pytorch.checkpoints import repeated_blocks

    paths = repeated_blocks(subject.model)
    signatures = [_signature(subject.model.get_submodule(path)) for path in paths]
    equal = sum(1 for _ in takewhile(lambda each: each == signatures[-1], reversed(signatures)))
    if equal <= FEW:
        return subject, None
    blocks = subject.model.get_submodule(paths[0].rpartition(".")[0])
    del blocks[len(paths) - equal + 2 : len(paths) - 1]
    return subject, len(paths)


def _signature(block: Any) -> str:
    """Common features of two blocks that compute the same: classes, sizes, and numbers that are no positions."""
    parts = []
    for path, module in block.named_modules():
        numbers = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, bool | int | float | str)
            and not any(word in name for word in ("idx", "index", "layer"))
        }
        sizes = {name: tuple(each.shape) for name, each in module.named_parameters(recurse=False)}
        parts.append((path, type(module).__name__, sorted(numbers.items()), sorted(sizes.items())))
    return repr(parts)


def _divided(subject: Subject, ranks: int, *, sequence_parallel: bool, in_place: bool) -> Subject:
    import torch

    from daydream.capture.failures import failures_as_errors
    from daydream.capture.models.hugging_face import positions_without_data
    from daydream.capture.pytorch.arguments import tensors_in
    from daydream.capture.pytorch.meta_kernels import ShapeFunctions, board_kernels
    from daydream.plan.tensor import divide

    model, args, kwargs = subject.model, subject.args, subject.kwargs
    given = [each for each in tensors_in([args, kwargs]) if each.dim() > 1 and not each.is_floating_point()]
    if sequence_parallel and not given:
        raise InputError("--sequence-parallel", "the model reads no tokens", "leave it out")
    tokens = given[0].shape[1] if sequence_parallel else 0
    if tokens % ranks:
        raise InputError("--sequence-parallel", f"{tokens} tokens are no multiple of {ranks}", "choose --sequence so")
    if tokens and "position_ids" in signature(model.forward).parameters:
        # Models of transformers count positions in what they are given: with a part of the sequence that is too few.
        kwargs = {**kwargs, "position_ids": torch.zeros(1, tokens, dtype=torch.long, device=given[0].device)}
    kernels, shapes = board_kernels("efficient"), ShapeFunctions()  # type: ignore[no-untyped-call]
    with failures_as_errors(subject.title, subject.source), kernels, shapes, positions_without_data():
        assumed = divide(model, lambda: model(*args, **kwargs), ranks, sequence=tokens, in_place=in_place)
    return replace(subject, kwargs=kwargs, assumed=(*subject.assumed, *assumed))
