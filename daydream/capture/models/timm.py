"""Networks of timm by name."""

from __future__ import annotations

import difflib
from typing import Any

import torch

from daydream.capture.failures import failures_as_errors
from daydream.capture.models.deferred import frames_without_source
from daydream.capture.models.torchvision_operators import import_torchvision
from daydream.capture.pytorch.step import Subject
from hal.support.errors import InputError, listed


@frames_without_source()
def timm_subject(name: str, *, batch: int | None, image: int | None, training: bool) -> Subject:
    """A network of timm on images.

    Args:
        name: as ``timm.create_model`` takes it.
        batch: images; None for 1.
        image: height and width; None for the size that the network was trained on or, for inference, tested on.
        training: the loss is cross entropy over the classes.

    Raises:
        InputError: timm does not know the name, or cannot build the network for images of this size.
    """
    import_torchvision()
    import timm

    title = f"timm:{name}"
    if not timm.is_model(name):
        close = difflib.get_close_matches(name.partition(".")[0], timm.list_models(), n=3, cutoff=0.6)
        near = f"did you mean {listed(close)}?" if close else "timm.list_models() has all names"
        raise InputError(title, "timm has no model of this name", near)
    with failures_as_errors(title), torch.device("meta"):
        model = _created(name, image)
        config = model.pretrained_cfg
        channels, *usual = config["input_size"]
        if not training and config.get("test_input_size"):
            usual = list(config["test_input_size"][1:])
        sizes = [image, image] if image is not None else usual
        tensor = torch.empty(batch or 1, channels, *sizes)
    assumed = [f"images of {sizes[0]} x {sizes[1]} pixels"] if image is None else []
    if training:
        assumed.append("the loss is cross entropy, the optimizer SGD with momentum unless another is asked for")
    return Subject(
        title=title, model=model, args=(tensor,), batch=batch or 1, loss=cross_entropy, assumed=tuple(assumed)
    )


def _created(name: str, image: int | None) -> Any:
    """The network, for images of a size where it is built for one."""
    import timm

    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    usual = tuple(config.input_size[1:]) if config is not None else ()
    if image is None or usual == (image, image):
        return timm.create_model(name, pretrained=False)
    try:
        return timm.create_model(name, pretrained=False, img_size=image)
    except TypeError:
        # Networks that take every size have no such argument.
        return timm.create_model(name, pretrained=False)


def cross_entropy(result: Any) -> torch.Tensor:
    """Cross entropy of class scores against labels without data; the sum of a result of other dimensions."""
    from daydream.capture.pytorch.step import scalar_of

    scores = result[0] if isinstance(result, list | tuple) else result
    if not isinstance(scores, torch.Tensor) or scores.dim() != 2:
        return scalar_of(result)
    return torch.nn.functional.cross_entropy(scores, torch.empty(len(scores), dtype=torch.long, device=scores.device))
