"""Inputs of models of transformers without data, by the names of what their forward passes take."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

#: Tokens of a text by default.
SEQUENCE = 128

#: What is said of models that could write a cache.
UNCACHED = "no cache of keys and values is written"

#: Samples of sound by default: ten seconds at 16 kHz. Frames of a video, where its model does not say.
_SOUND, _FRAMES = 160_000, 16


#: Pictures of a sample where a configuration does not say it and images have a dimension for them: one, and the frames
#: that a processor takes of a video.
_PICTURES = {"idefics": 1, "pi0": 1, "instructblipvideo": 4}


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """Sizes of the inputs of a model; still images have no frames, whatever else its kind takes."""

    config: Any
    batch: int
    tokens: int
    sound: int
    image: int | None
    is_still: bool = False

    @property
    def vision(self) -> Any:
        """The part of the configuration that is about images."""
        whole = getattr(self.config, "vlm_config", self.config)
        return getattr(whole, "vision_config", whole)


def inputs_of_model(
    model: Any, batch: int, sequence: int | None, image: int | None, training: bool
) -> tuple[dict[str, Any], list[str]]:
    """Inputs of a model, by the name of its main input, and what is assumed of them.

    Besides the main input a model gets what it cannot do without, labels in training, and images where it compares them
    with texts.
    """
    parameters = inspect.signature(model.forward).parameters
    config = model.config
    main = model.main_input_name if isinstance(model.main_input_name, str) else model.main_input_name[0]
    tokens = sequence or min(SEQUENCE, _longest(config))
    is_still = "ForImageClassification" in type(model).__name__
    sample = _Sample(
        config=config, batch=batch, tokens=tokens, sound=sequence or _SOUND, image=image, is_still=is_still
    )
    inputs: dict[str, Any] = {}
    assumed: list[str] = []
    # Models of two models have names for none of their inputs.
    first = (
        main
        if main in _MAKERS
        else next((name for name in _MAKERS if name in parameters and "decoder" not in name), "input_ids")
    )
    wanted = [first, *_needed(parameters, config, main)]
    for name in dict.fromkeys(wanted):
        inputs[name] = _MAKERS[name](sample)
    if "input_features" in inputs:
        assumed.append(f"sound of {max(inputs['input_features'].shape[1:])} frames")
    if "input_values" in inputs:
        assumed.append(f"{inputs['input_values'].shape[1]} samples of sound")
    if "input_ids" in inputs:
        assumed.append("texts have no padding: no attention mask")
    if config.is_encoder_decoder and "decoder_input_ids" in parameters:
        # Decoders of several streams of tokens at once have a column for each, and a row of labels.
        streams = getattr(getattr(config, "decoder_config", None), "num_channels", 1)
        inputs["decoder_input_ids"] = _tokens(batch, tokens, streams) if streams > 1 else _tokens(batch, tokens)
        assumed.append(f"the decoder gets {tokens} tokens")
    window = config.__dict__.get("sliding_window")
    if isinstance(window, int) and window < tokens:
        assumed.append(f"the window of {window} tokens is a mask, as transformers gives it to PyTorch's attention")
    if "mamba" in config.model_type:
        assumed.append("state spaces run without the kernels of mamba-ssm, as transformers does without that package")
    if "use_cache" in parameters:
        inputs["use_cache"] = False
        assumed.append(UNCACHED)
    language = next(iter(getattr(config, "languages", None) or ()), None)
    if language and getattr(config, "default_language", "") is None and hasattr(model, "set_default_language"):
        model.set_default_language(language)
        assumed.append(f"texts are of the language {language}")
    if training:
        labels = _labels(model, parameters, inputs, batch, tokens)
        inputs.update(labels)
        if not labels:
            assumed.append("the loss is the sum of the result, for want of labels")
        if "mm_token_type_ids" in parameters:
            inputs["mm_token_type_ids"] = torch.zeros(batch, tokens, dtype=torch.long)
    return inputs, assumed


def _needed(parameters: Mapping[str, inspect.Parameter], config: Any, main: str) -> list[str]:
    """Inputs besides the main one."""
    needed = [name for name, each in parameters.items() if each.default is inspect.Parameter.empty and name in _MAKERS]
    parts = config.sub_configs
    if main == "input_ids" and "vision_config" in parts and "return_loss" in parameters:
        needed.append("pixel_values")
    if main == "pixel_values" and "input_ids" in parameters:
        needed.append("input_ids")
    if "encoder_inputs_embeds" in parameters and "input_features" in parameters:
        needed.append("input_features")
    if "spatial_shapes" in parameters and main == "pixel_values":
        needed += ["pixel_attention_mask", "spatial_shapes"]
    if "image_embeds_position_mask" in parameters:
        needed.append("image_embeds_position_mask")
    if "bbox" in parameters and "pixel_values" not in needed:
        needed.append("bbox")
    if "image_attention_mask" in parameters and "image_encoder_embeddings" in parameters:
        needed += ["pixel_values", "image_attention_mask"]
    if config.model_type == "git":
        # Its loss looks for a text behind an image.
        needed.append("pixel_values")
    if main == "state":
        needed += ["noise", "timestep", "input_ids", "pixel_values", "pixel_attention_mask"]
    return needed


def _longest(config: Any) -> int:
    """Tokens of the longest text that a model has places for, of those that it says itself."""
    text = getattr(config, "text_config", config)
    places = getattr(text, "__dict__", {}).get("max_position_embeddings")
    return places if isinstance(places, int) and places > 1 else SEQUENCE


def _tokens(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.long)


def _images(sample: _Sample) -> torch.Tensor:
    vision = sample.vision
    shapes = _patches(sample)
    if shapes is not None:
        return torch.empty(sample.batch, shapes, getattr(vision, "num_channels", 3) * vision.patch_size**2)
    backbone: Any = getattr(vision, "backbone_config", None)
    usual = getattr(vision, "image_size", None) or getattr(backbone, "image_size", None) or _least(vision)
    size: Any = sample.image or usual
    # Windows of patches divide an image.
    windows = getattr(backbone, "num_windows", None)
    if isinstance(windows, int) and isinstance(size, int):
        size -= size % (windows * backbone.patch_size)
    height, width = (size, size) if isinstance(size, int) else size
    frames = getattr(vision, "num_frames", None) or _PICTURES.get(sample.config.model_type)
    lead = (sample.batch, frames) if isinstance(frames, int) and not sample.is_still else (sample.batch,)
    return torch.empty(*lead, getattr(vision, "num_channels", 3), height, width)


def _least(vision: Any) -> int:
    """Height of images where the configuration says none: 224, or what makes the smallest copy one patch."""
    ratios = getattr(vision, "scaled_images_ratios", None)
    return round(vision.patch_size / min(ratios)) if ratios else 224


def _patches(sample: _Sample) -> int | None:
    """Patches that a model takes in place of images; None for those that take images."""
    count = getattr(sample.vision, "num_patches", None)
    has_patches = isinstance(count, int) and getattr(sample.vision, "image_size", None) is None
    return count if has_patches and "siglip2" in sample.config.model_type else None


def _spectrum(sample: _Sample) -> torch.Tensor:
    whole = sample.config
    config = getattr(whole, "audio_config", getattr(whole, "encoder_config", whole))
    bins: Any = getattr(config, "num_mel_bins", None) or getattr(config, "feature_size", 80)
    places = getattr(config, "max_source_positions", None)
    frames = getattr(whole, "audio_length_per_tok", None)
    if isinstance(frames, int):
        # A text has a token for so many frames, which are columns.
        return torch.empty(sample.batch, bins, sample.tokens * frames)
    bins = getattr(config, "feature_projection_input_dim", bins)
    if "granite_speech5" in whole.model_type:
        # Frames come four at a time.
        bins *= 4
    if places is None or hasattr(config, "input_feat_per_channel") or hasattr(config, "feature_projection_input_dim"):
        # A hundred frames a second, each a row.
        return torch.empty(
            sample.batch,
            sample.sound // 160,
            getattr(config, "input_feat_per_channel", getattr(config, "input_dim", bins)),
        )
    # Whisper's encoder halves the frames, which are columns.
    return torch.empty(sample.batch, bins, 2 * places)


def _sound(sample: _Sample) -> torch.Tensor:
    """Samples of sound; of models of spectrograms as images their frames."""
    config = sample.config
    frames, bins = getattr(config, "max_length", None), getattr(config, "num_mel_bins", None)
    if "spectrogram" in config.model_type and isinstance(frames, int) and isinstance(bins, int):
        return torch.empty(sample.batch, frames, bins)
    return torch.empty(sample.batch, sample.sound)


def _pieces(sample: _Sample) -> torch.Tensor:
    """Pieces of an image as rows: two places, then the elements of three colours."""
    vision = sample.vision
    return torch.empty(sample.batch, vision.seq_len, 2 + vision.patch_embed_hidden_size)


def _videos(sample: _Sample) -> torch.Tensor:
    still = _images(sample)
    return still if still.dim() == 5 else still.unsqueeze(1).repeat(1, _FRAMES, 1, 1, 1)


def _boxes(sample: _Sample) -> torch.Tensor:
    """Boxes of a text's tokens on its page: places, or shares of the page."""
    sizes = (sample.batch, sample.tokens, 4)
    return torch.empty(sizes) if sample.config.model_type == "udop" else _tokens(*sizes)


def _shapes(sample: _Sample) -> torch.Tensor:
    side = math.isqrt(_patches(sample) or 1)
    # Models read the sizes of images on the host.
    return torch.tensor([[side, side]] * sample.batch, device="cpu")


#: What makes an input, by its name.
_MAKERS: Mapping[str, Callable[[_Sample], torch.Tensor]] = {
    "input_ids": lambda sample: _tokens(sample.batch, sample.tokens),
    "qformer_input_ids": lambda sample: _tokens(sample.batch, sample.tokens),
    "decoder_input_ids": lambda sample: _tokens(sample.batch, sample.tokens),
    "bbox": _boxes,
    "task_inputs": lambda sample: _tokens(sample.batch, sample.config.text_encoder_context_length),
    "image_attention_mask": lambda sample: _tokens(sample.batch, sample.tokens, 1),
    "state": lambda sample: torch.empty(sample.batch, sample.config.max_state_dim),
    "noise": lambda sample: torch.empty(sample.batch, sample.config.chunk_size, sample.config.max_action_dim),
    "timestep": lambda sample: torch.empty(sample.batch),
    "pixel_values": _images,
    "pixel_values_videos": _videos,
    "spatial_shapes": _shapes,
    "pixel_attention_mask": lambda sample: _tokens(sample.batch, _patches(sample) or 1),
    "input_values": _sound,
    "input_features": _spectrum,
    "image_embeds_position_mask": lambda sample: torch.empty(sample.batch, sample.tokens, dtype=torch.bool),
    "flattened_patches": _pieces,
}


def _labels(
    model: Any, parameters: Mapping[str, Any], inputs: Mapping[str, Any], batch: int, tokens: int
) -> dict[str, Any]:
    """Targets by the task that the name of the class says."""
    kind = type(model).__name__
    if "start_positions" in parameters and "labels" not in parameters:
        return {"start_positions": _tokens(batch), "end_positions": _tokens(batch)}
    if "return_loss" in parameters and "pixel_values" in inputs:
        return {"return_loss": True}
    # Losses over alignments read the lengths of texts on the host.
    # Those of objects match boxes to them there; those of depths are not in transformers.
    if "labels" not in parameters or kind.endswith(("CTC", "ObjectDetection", "DepthEstimation")):
        return {}
    if kind.endswith("SemanticSegmentation"):
        return {"labels": _tokens(batch, *inputs["pixel_values"].shape[-2:])}
    # A model of texts that is asked about images has labels for its tokens.
    is_asked = "ImageClassification" in kind and {"input_ids", "pixel_values"} <= set(parameters)
    classified = ("SequenceClassification", "ImageClassification", "AudioClassification", "NextSentencePrediction")
    if any(name in kind for name in classified) and not is_asked:
        return {"labels": _tokens(batch)}
    streams = inputs["decoder_input_ids"].numel() // tokens if "decoder_input_ids" in inputs else batch
    labels = {"labels": _tokens(streams, tokens)}
    if "next_sentence_label" in parameters:
        labels["next_sentence_label"] = _tokens(batch)
    return labels
