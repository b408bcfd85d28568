"""Inputs of models of transformers: by the names of what they take, as long as they have places for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from daydream.capture.models.hugging_face import hugging_face_subject  # noqa: E402
from daydream.capture.sources import CaptureOptions, captured  # noqa: E402

TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 90}
VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def write(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return path


def sizes(path: Path, **options: Any) -> dict[str, tuple[int, ...]]:
    """Dimensions of a model's inputs by name."""
    asked = {"batch": 3, "sequence": None, "class_name": None, "training": False} | options
    subject = hugging_face_subject(path, **asked)
    return {name: tuple(value.shape) for name, value in subject.kwargs.items() if isinstance(value, torch.Tensor)}


def test_texts_are_no_longer_than_the_places_of_a_model(tmp_path: Path) -> None:
    path = write(tmp_path, model_type="bert", architectures=["BertForMaskedLM"], max_position_embeddings=40, **TEXT)
    assert sizes(path) == {"input_ids": (3, 40)}
    assert sizes(path, sequence=24) == {"input_ids": (3, 24)}


def test_spectrograms_as_images_have_rows_of_frames(tmp_path: Path) -> None:
    kind = "audio-spectrogram-transformer"
    path = write(
        tmp_path, model_type=kind, architectures=["ASTForAudioClassification"], max_length=96, num_mel_bins=48, **VISION
    )  # fmt: skip
    assert sizes(path) == {"input_values": (3, 96, 48)}


def test_patches_of_images_come_with_their_shapes(tmp_path: Path) -> None:
    vision = {**VISION, "num_patches": 36, "patch_size": 4}
    path = write(
        tmp_path, model_type="siglip2", architectures=["Siglip2ForImageClassification"], vision_config=vision,
        text_config=TEXT,
    )  # fmt: skip
    assert sizes(path) == {"pixel_values": (3, 36, 48), "pixel_attention_mask": (3, 36), "spatial_shapes": (3, 2)}


def test_still_images_have_no_frames_and_pixels_as_texts_a_label_an_image(tmp_path: Path) -> None:
    path = write(
        tmp_path, model_type="perceiver", architectures=["PerceiverForImageClassificationLearned"], num_latents=4,
        d_latents=32, num_blocks=1, num_self_attends_per_block=1, image_size=16,
    )  # fmt: skip
    assert sizes(path, training=True) == {"pixel_values": (3, 3, 16, 16), "labels": (3,)}
    path = write(
        tmp_path, model_type="imagegpt", architectures=["ImageGPTForImageClassification"], n_embd=32, n_layer=1,
        n_head=2, n_positions=64, vocab_size=33,
    )  # fmt: skip
    assert sizes(path, training=True) == {"input_ids": (3, 128), "labels": (3,)}


def test_depths_have_no_labels_for_want_of_a_loss(tmp_path: Path) -> None:
    path = write(
        tmp_path, model_type="depth_anything", architectures=["DepthAnythingForDepthEstimation"], patch_size=14,
        backbone_config={"model_type": "dinov2", **VISION, "image_size": 28, "patch_size": 14},
        reassemble_factors=[1], neck_hidden_sizes=[8], fusion_hidden_size=8,
    )  # fmt: skip
    assert sizes(path, training=True) == {"pixel_values": (3, 3, 28, 28)}


def test_a_language_is_chosen_where_a_model_wants_one(tmp_path: Path) -> None:
    path = write(
        tmp_path, model_type="xmod", architectures=["XmodForMaskedLM"], languages=["de_DE"], max_position_embeddings=50,
        **TEXT,
    )  # fmt: skip
    step = captured(f"hf:{path}", CaptureOptions(mode="inference", assume=("nonzero=1",)))
    assert "texts are of the language de_DE" in step.assumed


def test_fills_by_a_number_on_the_host_are_captured(tmp_path: Path) -> None:
    path = write(
        tmp_path, model_type="sew-d", architectures=["SEWDForSequenceClassification"], hidden_size=32,
        num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, conv_dim=[32, 32], conv_stride=[5, 2],
        conv_kernel=[10, 3], squeeze_factor=1, classifier_proj_size=16, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, num_feat_extract_layers=2,
    )  # fmt: skip
    step = captured(f"hf:{path}", CaptureOptions(mode="inference", sequence=4000))
    assert any(operator.name == "aten::masked_fill" for operator in step.operators)
