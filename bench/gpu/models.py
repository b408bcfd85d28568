"""Networks that are trained: ResNet-50, BERT-large and a GPT-2 of medium size, with random weights.

ResNet-50 is defined here. The transformers are the library's of that name where it is installed; else those below,
which have the same layers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Tensor = torch.Tensor


@dataclass(frozen=True)
class Training:
    """A model with the inputs of a step.

    Attributes:
        loss: the step's loss; called with the model, which may be compiled, and nothing else.
        definition: where the model's code comes from.
        images: the inputs that have a memory format.
    """

    model: nn.Module
    loss: Callable[[Any], Tensor]
    definition: str
    images: tuple[Tensor, ...] = ()


# ResNet (He et al., CVPR 2016), the stride in the 3x3 convolution as everybody trains it


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        shortcut: Tensor = x if self.downsample is None else self.downsample(x)
        return self.relu(y + shortcut)


class ResNet(nn.Module):
    """Bottleneck blocks in stages of doubling width; ``ResNet()`` is ResNet-50."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels, stages = width, []
        for number, count in enumerate(blocks):
            inner = width << number
            stage = [_Bottleneck(channels, inner, 1 if number == 0 else 2)]
            stage += [_Bottleneck(4 * inner, inner, 1) for _ in range(count - 1)]
            stages.append(nn.Sequential(*stage))
            channels = 4 * inner
        self.layers = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layers(y)), 1))


# Transformers, where the library is missing


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a transformer; `causal` makes it a GPT-2, else it is a BERT."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int
    length: int
    causal: bool


class _Block(nn.Module):
    """Attention written out, as in 2019, so that its kernels show; norms first for GPT-2, last for BERT."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.heads, self.causal = sizes.heads, sizes.causal
        self.query, self.key, self.value, self.output = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.causal:
            x = x + self._attention(self.norm1(x), mask)
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(x + self._attention(x, mask))
        return self.norm2(x + self._feed_forward(x))

    def _attention(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        split = (batch, length, self.heads, hidden // self.heads)
        q, k, v = (part(x).view(split).transpose(1, 2) for part in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) * (hidden // self.heads) ** -0.5 + mask
        context = self.dropout(torch.softmax(scores, -1)).to(v.dtype) @ v
        return self.dropout(self.output(context.transpose(1, 2).reshape(batch, length, hidden)))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(functional.gelu(self.up(x))))


class Transformer(nn.Module):
    """BERT that marks a span, or GPT-2 that predicts the next token."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.places = nn.Embedding(sizes.positions, sizes.hidden)
        self.norm, self.dropout = nn.LayerNorm(sizes.hidden), nn.Dropout(0.1)
        self.layers = nn.ModuleList(_Block(sizes) for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary if sizes.causal else 2, bias=not sizes.causal)
        mask = torch.zeros(sizes.length, sizes.length)
        if sizes.causal:
            mask = torch.full_like(mask, float("-inf")).triu(1)
            self.head.weight = self.tokens.weight
        self.register_buffer("mask", mask)
        self.register_buffer("order", torch.arange(sizes.length))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits: (batch, length, vocabulary), of a BERT (batch, length, 2)."""
        x = self.dropout(self.norm(self.tokens(ids) + self.places(self.order)))
        for layer in self.layers:
            x = layer(x, self.mask)
        return self.head(x)


# What is trained

BERT_LARGE = Sizes(layers=24, hidden=1024, heads=16, vocabulary=30522, positions=512, length=384, causal=False)
GPT2_MEDIUM = Sizes(layers=24, hidden=1024, heads=16, vocabulary=50257, positions=1024, length=512, causal=True)
SMALL_BERT = Sizes(layers=2, hidden=16, heads=2, vocabulary=40, positions=12, length=12, causal=False)
SMALL_GPT2 = Sizes(layers=2, hidden=16, heads=2, vocabulary=40, positions=12, length=12, causal=True)

MODELS = ("resnet50", "bert-large", "gpt2-medium")


def training(name: str, batch: int, device: str, *, small: bool = False, is_local: bool = False) -> Training:
    """A model on a device, in training mode, with a batch of random inputs.

    `small` is for tests on the CPU; `is_local` takes the definitions here even where transformers is installed.
    """
    torch.manual_seed(0)
    with torch.device(device):
        if name == "resnet50":
            return _resnet(batch, small)
        causal = name == "gpt2-medium"
        sizes = (SMALL_GPT2 if causal else SMALL_BERT) if small else (GPT2_MEDIUM if causal else BERT_LARGE)
        return _transformer(sizes, batch, is_local)


def _resnet(batch: int, small: bool) -> Training:
    model = ResNet((1, 1), 8, 10) if small else ResNet()
    side, classes = (32, 10) if small else (224, 1000)
    images, labels = torch.randn(batch, 3, side, side), torch.randint(0, classes, (batch,))

    def loss(model: Any) -> Tensor:
        return functional.cross_entropy(model(images).float(), labels)

    return Training(model.train(), loss, "bench.gpu.models", (images,))


def _transformer(sizes: Sizes, batch: int, is_local: bool) -> Training:
    ids = torch.randint(0, sizes.vocabulary, (batch, sizes.length))
    try:
        if is_local:
            raise ImportError("not wanted")
        model, definition, loss = _from_library(sizes, ids)
    except Exception:  # missing, or of a version whose names have changed
        model, definition, loss = Transformer(sizes), "bench.gpu.models", _loss_of(sizes, ids)
    return Training(model.train(), loss, definition)


def _from_library(sizes: Sizes, ids: Tensor) -> tuple[nn.Module, str, Callable[[Any], Tensor]]:
    library = importlib.import_module("transformers")
    common = {"vocab_size": sizes.vocabulary, "attn_implementation": "eager"}
    if sizes.causal:
        config = library.GPT2Config(
            n_layer=sizes.layers, n_embd=sizes.hidden, n_head=sizes.heads, n_positions=sizes.positions, **common
        )
        model, more = library.GPT2LMHeadModel(config), {"labels": ids}
    else:
        config = library.BertConfig(
            num_hidden_layers=sizes.layers, hidden_size=sizes.hidden, num_attention_heads=sizes.heads,
            intermediate_size=4 * sizes.hidden, max_position_embeddings=sizes.positions, **common,
        )  # fmt: skip
        starts = torch.randint(0, sizes.length, (2, len(ids)))
        model = library.BertForQuestionAnswering(config)
        more = {"start_positions": starts[0], "end_positions": starts[1]}

    def loss(model: Any) -> Tensor:
        return model(input_ids=ids, use_cache=False, **more).loss if sizes.causal else model(input_ids=ids, **more).loss

    return model, f"transformers {library.__version__}", loss


def _loss_of(sizes: Sizes, ids: Tensor) -> Callable[[Any], Tensor]:
    spans = torch.randint(0, sizes.length, (len(ids), 2))

    def loss(model: Any) -> Tensor:
        logits = model(ids).float()
        if sizes.causal:
            return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return functional.cross_entropy(logits, spans)  # the classes are the places

    return loss
