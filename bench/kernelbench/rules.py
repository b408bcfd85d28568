"""Operators of PyTorch that have a text in the language, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.kernelbench.pointwise import POINTWISE, pointwise
from bench.kernelbench.problem import Call
from bench.kernelbench.rows import (
    CROSS_ENTROPY,
    batch_norm,
    diagonal,
    embedding,
    filled,
    flip,
    gather,
    group_norm,
    index_select,
    joined,
    layer_norm,
    logsumexp,
    loss,
    loss_of_classes,
    norm,
    place,
    reduction,
    scan,
    softmax,
    triangle,
)
from bench.kernelbench.sums import convolution, pool, product
from bench.kernelbench.texts import Said, Unsaid


def said(call: Call) -> Said:
    """A call in the language.

    Raises:
        Unsaid: it is not said, and why.
    """
    stem = call.stem.removesuffix("_")
    if stem in POINTWISE:
        return pointwise(call)
    if stem not in _RULES:
        raise Unsaid(_REASONS.get(stem, f"{stem} has no rule"))
    return _RULES[stem](call)


_RULES: Mapping[str, Callable[[Call], Said]] = {
    "mm": product, "bmm": product, "addmm": product, "baddbmm": product, "convolution": convolution,
    "max_pool1d": pool("max"), "max_pool2d_with_indices": pool("max"), "max_pool3d_with_indices": pool("max"),
    "avg_pool1d": pool("sum"), "avg_pool2d": pool("sum"), "avg_pool3d": pool("sum"),
    "sum": reduction("sum(A, X)"), "mean": reduction("sum(A, X)", behind="{} / COUNT"),
    "amax": reduction("max(A, X)"),
    "amin": reduction("min(A, X)"), "max": reduction("max(A, X)"), "min": reduction("min(A, X)"),
    "prod": reduction("prod(A, X)"), "norm": norm, "linalg_vector_norm": norm, "argmax": place("argmax"),
    "argmin": place("argmin"), "cumsum": scan("cumsum"), "cumsum_reversed": scan("cumsum"),
    "cumprod_reversed": scan("cumprod"),
    "diag_embed": diagonal, "_safe_softmax": softmax, "cumprod": scan("cumprod"), "cummax": scan("cummax"),
    "_softmax": softmax, "_log_softmax": softmax, "logsumexp": logsumexp, "native_layer_norm": layer_norm,
    "native_group_norm": group_norm, "native_batch_norm": batch_norm,
    "tril": triangle("<="), "triu": triangle(">="),
    "nll_loss_forward": loss_of_classes, CROSS_ENTROPY: loss_of_classes, "embedding": embedding, "gather": gather,
    "index_select": index_select,
    "mse_loss": loss("(X - Z) * (X - Z)"), "flip": flip, "cat": joined,
    "zeros": filled(0), "zeros_like": filled(0), "ones": filled(1), "ones_like": filled(1),
    "scalar_tensor": filled(), "full": filled(place=1), "full_like": filled(place=1),
    "smooth_l1_loss": loss("select(abs(X - Z) < 1, 0.5 * (X - Z) * (X - Z), abs(X - Z) - 0.5)"),
}  # fmt: skip

#: Operators that the language has no words for.
_REASONS: Mapping[str, str] = {
    "native_dropout": "random numbers", "bernoulli": "random numbers", "index": "reads by several index tensors",
    "_cudnn_rnn": "a recurrent network", "topk": "several largest values", "sort": "an order of values",
}  # fmt: skip
