"""Gradients of attention as PyTorch calls, from the sums of exponentials and the sums of rows that kernels take.

PyTorch's fused backward pass computes both gradients at once, from its own forward pass; what is called here is the
operator's definition, product by product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from bench.calls.problem import Problem, Spec, Tensor, torch_module


def gradient_problem(suite: str, spec: Spec) -> Problem:
    """The gradient of attention after its queries, or after keys and values, with or without slopes between them."""
    b, heads, queries, width = spec["b"], spec["heads"], spec["queries"], spec["head_dim"]
    key_heads, keys = spec.get("kv_heads", heads), spec.get("keys", queries)
    values, group = spec.get("value_dim", width), heads // key_heads
    of_keys, has_slopes = spec["of"] == "keys", bool(spec.get("slopes"))
    row = width + values + (group * queries if has_slopes else 0)
    by_query, by_key = (b, heads, queries), (b, key_heads, keys)
    inputs: dict[str, tuple[int, ...]] = {
        "Q": (*by_query, width), "K": (*by_key, width), "L": by_query, "dY": (*by_query, values),
        "V": (*by_key, values), "D": by_query,
    }  # fmt: skip
    if has_slopes and not of_keys:
        inputs = {"dKVS": (*by_key, row), "K": (*by_key, width)}

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        scale = spec.get("scale", 1 / math.sqrt(width))
        seen = seen_keys(spec, queries, keys, tensors["K"].device)
        if not of_keys and has_slopes:
            return lambda: _of_slopes(tensors, group, width + values, queries, seen) * scale
        return lambda: _of_all(tensors, group, scale, seen, of_keys=of_keys, has_slopes=has_slopes)

    pairs = b * heads * seen_pairs(spec, queries, keys)
    products = 2 * (width + values) if of_keys else width if has_slopes else 2 * width + values
    return Problem(
        suite=suite, spec=spec, inputs=inputs, output=(*by_key, row) if of_keys else (*by_query, width),
        leading=dict.fromkeys(inputs, 0), flop=2.0 * pairs * products, run=bind, scales=("L", "D"),
    )  # fmt: skip


def _window(spec: Spec, queries: int, keys: int) -> int:
    return int(spec.get("window") or keys + queries)


def seen_pairs(spec: Spec, queries: int, keys: int) -> int:
    """Pairs of a query and a key that it sees."""
    if not spec.get("causal"):
        return queries * keys
    return sum(min(query + keys - queries + 1, _window(spec, queries, keys)) for query in range(queries))


def seen_keys(spec: Spec, queries: int, keys: int, device: Any) -> Tensor:
    """Truth of a query seeing a key, counted from the last of either; None where all do."""
    if not spec.get("causal"):
        return None
    torch = torch_module()
    last = torch.arange(queries, device=device)[:, None] + keys - queries
    at = torch.arange(keys, device=device)[None, :]
    return (at <= last) & (at > last - _window(spec, queries, keys))


def _of_all(
    tensors: Mapping[str, Tensor], group: int, scale: float, seen: Tensor, *, of_keys: bool, has_slopes: bool
) -> Tensor:
    """A gradient from queries, keys, values and what the forward pass saved."""
    torch = torch_module()
    q, dy, sums, dots = (tensors[name] for name in ("Q", "dY", "L", "D"))
    k, v = (tensors[name].repeat_interleave(group, 1) for name in "KV")
    weights = (q @ k.mT * scale - sums[..., None]).exp()
    weights = weights if seen is None else weights * seen
    slopes = weights * (dy @ v.mT - dots[..., None])
    weights, slopes = weights.to(q.dtype), slopes.to(q.dtype)
    if not of_keys:
        return slopes @ k * scale
    parts = [_summed(slopes.mT @ q * scale, group), _summed(weights.mT @ dy, group)]
    if has_slopes:
        b, heads, queries, keys = slopes.shape
        parts.append(slopes.view(b, heads // group, group, queries, keys).permute(0, 1, 4, 2, 3).flatten(3))
    return torch.cat(parts, dim=-1)


def _summed(of_heads: Tensor, group: int) -> Tensor:
    """Sums over the heads that share keys."""
    b, heads, keys, width = of_heads.shape
    return of_heads.view(b, heads // group, group, keys, width).sum(2)


def _of_slopes(tensors: Mapping[str, Tensor], group: int, before: int, queries: int, seen: Tensor) -> Tensor:
    """The gradient of queries, not scaled, from the slopes behind those of keys and values."""
    slopes, k = tensors["dKVS"][..., before:], tensors["K"].repeat_interleave(group, 1)
    b, key_heads, keys, _ = slopes.shape
    slopes = slopes.reshape(b, key_heads, keys, group, queries).permute(0, 1, 3, 4, 2).flatten(1, 2)
    return (slopes if seen is None else slopes * seen) @ k
