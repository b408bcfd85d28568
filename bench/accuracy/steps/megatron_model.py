"""Megatron-LM's GPT as it ran in 2022: fused softmax, bias and GELU, bias, dropout and residual, tensors as [s, b, h].

Its kernels cost the bytes that they read and write: they are operators that no rule of ours knows. Softmax of
causal scores (``scaled_upper_triang_masked_softmax.h``) reads what the mask leaves, half of them, and writes all. Layer
norm is apex's persistent one (``--no-persist-layer-norm`` is off), which reads its input once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from daydream.capture.pytorch.step import Subject

#: Tokens of GPT-2's vocabulary, padded so that eight ranks share them in multiples of 128 (Megatron's default).
VOCABULARY = 51_200

_LIBRARY = torch.library.Library("megatron", "FRAGMENT")
for _schema in (
    "masked_softmax(Tensor kept, int[] size) -> Tensor",
    "masked_softmax_backward(Tensor gradient, Tensor kept, int[] size) -> Tensor",
    "fast_layer_norm(Tensor x, Tensor weight, Tensor bias) -> (Tensor, Tensor, Tensor)",
    "fast_layer_norm_backward(Tensor gradient, Tensor x, Tensor mean, Tensor rstd, Tensor weight) -> "
    "(Tensor, Tensor, Tensor)",
    "bias_gelu(Tensor x, Tensor bias) -> Tensor",
    "bias_gelu_backward(Tensor gradient, Tensor x, Tensor bias) -> Tensor",
    "bias_dropout_add(Tensor x, Tensor bias, Tensor residual) -> (Tensor, Tensor)",
    "bias_dropout_add_backward(Tensor gradient, Tensor mask) -> Tensor",
):
    _LIBRARY.define(_schema)
for _name in ("bias_gelu", "bias_gelu_backward", "bias_dropout_add_backward"):
    _LIBRARY.impl(_name, lambda first, *_: torch.empty_like(first), "Meta")
for _name in ("masked_softmax", "masked_softmax_backward"):
    _LIBRARY.impl(_name, lambda first, *others: first.new_empty(others[-1]), "Meta")
_LIBRARY.impl("bias_dropout_add", lambda x, *_: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)), "Meta")


def _normed(x: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float) for _ in range(2))
    return torch.empty_like(x), mean, rstd


_LIBRARY.impl("fast_layer_norm", _normed, "Meta")
_LIBRARY.impl(
    "fast_layer_norm_backward",
    lambda _, x, mean, rstd, weight: (torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)),
    "Meta",
)


def _kept(square: torch.Tensor) -> torch.Tensor:
    """As many scores as a causal mask leaves."""
    return square.flatten()[: square.numel() // 2]


class _MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, scores: torch.Tensor) -> torch.Tensor:
        result = torch.ops.megatron.masked_softmax(_kept(scores), scores.shape)
        context.save_for_backward(result)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        (result,) = context.saved_tensors
        return torch.ops.megatron.masked_softmax_backward(_kept(gradient), _kept(result), result.shape)


class _LayerNormed(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        result, mean, rstd = torch.ops.megatron.fast_layer_norm(x, weight, bias)
        context.save_for_backward(x, mean, rstd, weight)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return torch.ops.megatron.fast_layer_norm_backward(gradient, *context.saved_tensors)


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x, bias)
        return torch.ops.megatron.bias_gelu(x, bias)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        result = torch.ops.megatron.bias_gelu_backward(gradient, *context.saved_tensors)
        return result, result.sum((0, 1))


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        result, mask = torch.ops.megatron.bias_dropout_add(x, bias, residual)
        context.save_for_backward(mask)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        result = torch.ops.megatron.bias_dropout_add_backward(gradient, *context.saved_tensors)
        return result, result.sum((0, 1)), gradient


def _apply(function: Any, *tensors: torch.Tensor) -> torch.Tensor:
    """The function with its gradient."""
    result: torch.Tensor = function.apply(*tensors)
    return result


class _LayerNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _apply(_LayerNormed, x, self.weight, self.bias)


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s, b, _ = x.shape
        mixed = self.query_key_value(x).view(s, b, -1, 3 * self.width)
        query, key, value = (each.reshape(s, -1, self.width) for each in mixed.split(self.width, -1))
        # The array that receives the scores is allocated beforehand, and read with a factor of 0.
        scores = torch.baddbmm(
            query.new_empty(query.shape[1], s, s), query.transpose(0, 1), key.permute(1, 2, 0), beta=0.0, alpha=0.1
        )
        probabilities = functional.dropout(_apply(_MaskedSoftmax, scores), 0.1, self.training)
        context = torch.bmm(probabilities, value.transpose(0, 1)).view(b, -1, s, self.width)
        return self.dense(context.permute(2, 0, 1, 3).contiguous().view(s, b, -1))


class _Layer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = _LayerNorm(hidden), _LayerNorm(hidden)
        self.attention = _Attention(hidden, heads)
        self.dense_h_to_4h = _Unbiased(hidden, 4 * hidden)
        self.dense_4h_to_h = nn.Linear(4 * hidden, hidden, bias=False)
        self.attention_bias, self.bias = nn.Parameter(torch.zeros(hidden)), nn.Parameter(torch.zeros(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _apply(_BiasDropoutAdd, self.attention(self.input_layernorm(x)), self.attention_bias, x)
        inner = self.dense_4h_to_h(self.dense_h_to_4h(self.post_attention_layernorm(x)))
        return _apply(_BiasDropoutAdd, inner, self.bias, x)


class _Unbiased(nn.Linear):
    """A layer whose bias is added with what follows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _apply(_BiasGelu, functional.linear(x, self.weight), self.bias)


class Gpt(nn.Module):
    """GPT with learned positions and the embedding as head."""

    def __init__(self, *, layers: int, hidden: int, heads: int, sequence: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.layers = nn.ModuleList(_Layer(hidden, heads) for _ in range(layers))
        self.norm = _LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits as [s, b, vocabulary]."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = functional.dropout(self.embedding(tokens) + self.positions(places), 0.1, self.training)
        x = x.transpose(0, 1).contiguous()
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def gpt_subject(*, layers: int, hidden: int, heads: int, sequence: int, batch: int) -> Subject:
    """The model with a micro-batch of tokens and the loss over logits in float32."""
    with torch.device("meta"):
        model = Gpt(layers=layers, hidden=hidden, heads=heads, sequence=sequence)
        tokens = torch.zeros(batch, sequence, dtype=torch.long)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        # A tensor rank has a part of the vocabulary.
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens.t().flatten())

    return Subject(title="Megatron GPT", model=model, args=(tokens,), loss=loss, batch=batch, optimizer="adamw")
