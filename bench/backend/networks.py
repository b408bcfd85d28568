"""The networks, with random weights, and what they are called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daydream.capture.models.torchvision_operators import import_torchvision

#: A module in evaluation mode and its inputs.
Network = tuple[Any, tuple[Any, ...]]


def _timm(name: str) -> Callable[[int], Network]:
    def make(batch: int) -> Network:
        import torch

        import_torchvision()
        import timm

        return timm.create_model(name).eval(), (torch.randn(batch, 3, 224, 224),)

    return make


def _bert(tokens: int) -> Callable[[int], Network]:
    def make(batch: int) -> Network:
        import torch

        import_torchvision()
        from transformers import BertConfig, BertModel

        return BertModel(BertConfig()).eval(), (torch.randint(0, 30000, (batch, tokens)),)

    return make


def _llama(tokens: int) -> Callable[[int], Network]:
    """Four layers of width 1,024; one token is a step of decoding without what it attends to."""

    def make(batch: int) -> Network:
        import torch

        import_torchvision()
        from transformers import LlamaConfig, LlamaModel

        config = LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
            num_key_value_heads=16, vocab_size=32000, use_cache=False,
        )  # fmt: skip
        return LlamaModel(config).eval(), (torch.randint(0, 32000, (batch, tokens)),)

    return make


NETWORKS: dict[str, Callable[[int], Network]] = {
    "resnet50": _timm("resnet50"),
    "mobilenetv3_large": _timm("mobilenetv3_large_100"),
    "convnext_tiny": _timm("convnext_tiny"),
    "vit_small": _timm("vit_small_patch16_224"),
    "bert_128": _bert(128),
    "bert_384": _bert(384),
    "llama_256": _llama(256),
    "llama_1": _llama(1),
}
