"""Models of transformers from a configuration file, built without network and without weights."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from daydream.capture.failures import failures_as_errors
from daydream.capture.models.deferred import deferred, frames_without_source, unbounded_caches
from daydream.capture.models.fused_attention import fused_if_written_out
from daydream.capture.models.inputs import inputs_of_model
from daydream.capture.models.torchvision_operators import import_torchvision
from daydream.capture.pytorch.step import Subject
from hal.support.errors import InputError, listed

_CONFIG = "config.json"


@frames_without_source()
def hugging_face_subject(
    path: Path,
    *,
    batch: int | None,
    sequence: int | None,
    image: int | None = None,
    class_name: str | None,
    training: bool,
    attention: str = "",
) -> Subject:
    """A model of transformers from its ``config.json``.

    Args:
        path: the file, or a folder that holds it.
        batch: samples; None for 1.
        sequence: tokens of a text, None for 128; samples of raw sound.
        image: height and width, None for what the configuration says.
        class_name: of the model, ``AutoModelForCausalLM``; None for the first of the configuration's ``architectures``.
        training: gives labels, from which the model makes its loss.
        attention: ``eager`` for attention written out; else the model's own choice, which is PyTorch's
            ``scaled_dot_product_attention`` as a rule; where that is written out, a fused version if one is named.

    Raises:
        InputError: the file cannot be read, is no configuration, names no known class, or its model cannot be built.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import_torchvision()
    # Losses of detection match boxes of real data; every model imports them.
    with deferred("scipy.optimize", "linear_sum_assignment"), unbounded_caches():
        import_module("transformers.loss.loss_utils")
    path = path / _CONFIG if path.is_dir() else path
    config = _configuration(path)
    builder = _builder(path, config, class_name)
    title = f"hf:{path}"
    with failures_as_errors(title), torch.device("meta"):
        # ``torch.Tensor(size)`` makes some parameters on the host, whatever the default device is.
        written_out = "eager" if attention in ("math", "eager") else fused_if_written_out(builder, attention)
        model = _built(builder, config, written_out).to("meta")
    return subject_of_model(model, title, batch=batch, sequence=sequence, image=image, training=training)


def subject_of_model(
    model: Any, title: str, *, batch: int | None, sequence: int | None, image: int | None, training: bool
) -> Subject:
    """A model of transformers with the inputs that its kind takes."""
    with failures_as_errors(title), torch.device("meta"):
        inputs, assumed = inputs_of_model(model, batch or 1, sequence, image, training)
    return Subject(title=title, model=model, kwargs=inputs, batch=batch or 1, optimizer="adamw", assumed=tuple(assumed))


def _configuration(path: Path) -> Any:
    from transformers import CONFIG_MAPPING

    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read", f"give a {_CONFIG} or its folder") from None
    except (ValueError, RecursionError) as error:
        raise InputError(str(path), f"is no JSON: {error}", f"give a {_CONFIG} of a model") from None
    if not isinstance(data, Mapping) or not isinstance(data.get("model_type"), str):
        raise InputError(f"{path}: model_type", "is missing", "a configuration says the kind of its model, as gpt2")
    kind = data["model_type"]
    if kind not in CONFIG_MAPPING:
        close = difflib.get_close_matches(kind, CONFIG_MAPPING.keys(), n=3, cutoff=0.6)
        remedy = f"did you mean {listed(close)}?" if close else "models that bring code of their own are not run"
        raise InputError(f"{path}: model_type", f"transformers knows no {kind!r}", remedy)
    with failures_as_errors(str(path)):
        config = CONFIG_MAPPING[kind].from_json_file(path)
        # The type of the elements is the user's choice, and code in the file's folder is never run.
        config.dtype = torch.float32
        config.__dict__.pop("auto_map", None)
        return config


def _builder(path: Path, config: Any, class_name: str | None) -> Any:
    """The class of the model."""
    import transformers

    name = class_name or next(iter(config.architectures or ()), None)
    if name is None:
        raise InputError(
            f"{path}: architectures", "is missing, so the class is unknown", "add --class, as AutoModelForCausalLM"
        )
    builder = getattr(transformers, name, None) if isinstance(name, str) else None
    if builder is None or not hasattr(builder, "_from_config" if not str(name).startswith("Auto") else "from_config"):
        names = [each for each in dir(transformers) if "For" in each or each.endswith("Model")]
        close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.6)
        where = "--class" if class_name else f"{path}: architectures"
        remedy = f"did you mean {listed(close)}?" if close else "give one of transformers by --class"
        raise InputError(where, f"transformers has no model class {name!r}", remedy)
    mapping = getattr(builder, "_model_mapping", None)
    takes = mapping is None or type(config) in mapping
    wanted = getattr(builder, "config_class", None)
    if not takes or (mapping is None and wanted is not None and not isinstance(config, wanted)):
        raise InputError("--class", f"{name} is not for models of the kind {config.model_type}", "choose another")
    return builder


def _built(builder: Any, config: Any, attention: str | None) -> Any:
    from transformers.initialization import no_init_weights
    from transformers.utils import logging

    # Hints at what configurations leave to defaults are of no use here.
    logging.set_verbosity_error()
    make = getattr(builder, "from_config", None) or builder._from_config
    with no_init_weights():
        model = make(config, **({"attn_implementation": attention} if attention else {}))
    # Ties are left out together with the initial values.
    model.tie_weights()
    return model


@contextmanager
def positions_without_data() -> Iterator[None]:
    """Within, transformers looks neither at positions and masks for several texts in a row or for padding, nor whether
    values of tensors are as its own code has made them.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    models: Any = sys.modules.get("transformers.modeling_utils")
    with ExitStack() as around:
        around.enter_context(patch.dict(os.environ, {"TRANSFORMERS_DISABLE_TORCH_CHECK": "1"}))
        # Distributions look at what they are given.
        around.enter_context(patch.object(torch.distributions.Distribution, "_validate_args", False))
        if masks is not None:
            around.enter_context(patch.object(masks, "find_packed_sequence_indices", lambda *_, **__: None))
            around.enter_context(patch.object(masks, "fast_all", lambda *_: True))
        if models is not None:
            kind = models.PreTrainedModel
            around.enter_context(patch.object(kind, "warn_if_padding_and_no_attention_mask", lambda *_: None))
        yield
