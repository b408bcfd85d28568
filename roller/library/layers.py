"""Layers of :mod:`sokoban.language.layers` as library calls, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hal.support.errors import InputError
from roller.library.calls import LibraryCall
from roller.library.experts.loads import Loads, loads, loads_of
from roller.library.latent.call import SIZES as LATENT_SIZES
from roller.library.streaming.elementwise import Direction
from sokoban.language.latent_layer import LatentAttention
from sokoban.language.layers import KERNELS, Experts, GroupedMatmul, Layer, ScaledMatmul, layer_from_data
from sokoban.language.state_layers import DeltaNet, Mamba2


def layer_calls(data: Mapping[str, Any], direction: Direction = "forward") -> list[LibraryCall]:
    """The calls for a layer's JSON object, or for the gradients of its activations and of its weights.

    Raises:
        InputError: the object is no layer.
    """
    layer = layer_from_data(data)
    return _MAKERS[type(layer)](layer, direction)


def _scaled(layer: ScaledMatmul, direction: Direction) -> list[LibraryCall]:
    """A product, or two: what comes in is quantised for each of them, since scales go along what is summed."""
    if direction == "forward":
        return [_scaled_call("scaled_matmul", layer.m, layer.n, layer.k, layer)]
    return [
        _scaled_call("gradient of the activations", layer.m, layer.k, layer.n, layer),
        _scaled_call("gradient of the weights", layer.n, layer.k, layer.m, layer),
    ]


def _scaled_call(label: str, m: int, n: int, k: int, layer: ScaledMatmul) -> LibraryCall:
    dtype = "int8" if layer.precision.startswith("int8") else "float8_e4m3fn"
    variant = layer.precision if layer.kernels == KERNELS[0] else f"{layer.precision}@{layer.kernels}"
    return LibraryCall(kind="scaled", label=label, sizes=(float(m), float(n), float(k)), dtype=dtype, variant=variant)


def _grouped(layer: GroupedMatmul, direction: Direction) -> list[LibraryCall]:
    """One call; both gradients are products of the same groups, that of the weights summed along their rows."""
    if layer.sizes:
        routed, groups = loads_of(layer.sizes), len(layer.sizes)
    else:
        groups = layer.groups or 1
        routed = loads(layer.m or 1, groups, 1, layer.distribution, 1)
    made = _grouped_call("grouped_matmul", routed, groups, layer.n, layer.k, layer.precision)
    if direction == "forward":
        return [made]
    back = _grouped_call("gradient of the activations", routed, groups, layer.k, layer.n, layer.precision)
    return [back, _grouped_call("gradient of the weights", routed, groups, layer.n, layer.k, layer.precision)]


def _grouped_call(label: str, routed: Loads, groups: int, n: int, k: int, precision: str) -> LibraryCall:
    sizes = (routed.pairs, k, n, routed.pairs, groups, *routed.sizes)
    return LibraryCall(kind="experts", label=label, sizes=sizes, variant=f"{precision}@product")


def _experts(layer: Experts, direction: Direction) -> list[LibraryCall]:
    """The layer; its backward pass is twice its work, as both operands of every product have a gradient."""
    boards = layer.expert_parallel
    routed = loads(layer.tokens, layer.experts, layer.top_k, layer.distribution, boards)
    sizes = (
        layer.tokens, layer.hidden, max(1, layer.intermediate // layer.tensor_parallel), layer.tokens * layer.top_k,
        max(1, layer.experts // boards), *routed.sizes,
    )  # fmt: skip
    variant = f"{layer.precision}@divided" if boards > 1 else layer.precision
    if direction == "forward":
        return [LibraryCall(kind="experts", label="experts", sizes=sizes, variant=variant)]
    labels = ("gradient of the activations", "gradient of the weights")
    return [LibraryCall(kind="experts", label=label, sizes=sizes, variant=variant) for label in labels]


def _delta_net(layer: DeltaNet, direction: Direction) -> list[LibraryCall]:
    sizes = (layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim)
    return _recurrent(layer, "rule", sizes, direction)


def _mamba2(layer: Mamba2, direction: Direction) -> list[LibraryCall]:
    """Groups are what heads of keys are, elements of the state those of a key."""
    return _recurrent(layer, "scan", (layer.groups, layer.heads, layer.state, layer.head_dim), direction)


def _recurrent(
    layer: DeltaNet | Mamba2, rule: str, heads: tuple[int, int, int, int], direction: Direction
) -> list[LibraryCall]:
    """Convolution, then rule; the backward pass walks the tokens once more in either direction."""
    chosen = {"both": ("convolution", rule), "convolution": ("convolution",), "rule": (rule,)}[layer.part]
    if direction != "forward" and layer.phase == "decode":
        raise InputError("phase", "decoding has no backward pass", "write prefill, or estimate it forward")
    passes = 1 if direction == "forward" else 2
    sizes = tuple(float(size) for size in (layer.batch, layer.tokens, *heads))
    return [
        LibraryCall(
            kind="recurrent", label=part if direction == "forward" else f"gradient of the {part}", sizes=sizes,
            dtype=layer.precision, variant=f"{part}@decode" if layer.phase == "decode" else part,
        )
        for part in chosen
        for _ in range(passes)
    ]  # fmt: skip


def _latent(layer: LatentAttention, direction: Direction) -> list[LibraryCall]:
    """The module; its backward pass is twice its work, and makes keys and values of every head."""
    sizes = tuple(float(getattr(layer, name)) for name in LATENT_SIZES)
    variant = f"{layer.precision}@{layer.cache}@{layer.attention}"
    if direction == "forward":
        return [LibraryCall(kind="latent", label="latent attention", sizes=sizes, variant=variant)]
    labels = ("gradient of the activations", "gradient of the weights")
    return [LibraryCall(kind="latent", label=label, sizes=sizes, variant=variant) for label in labels]


_MAKERS: Mapping[type[Layer], Callable[[Any, Direction], list[LibraryCall]]] = {
    ScaledMatmul: _scaled, GroupedMatmul: _grouped, Experts: _experts, DeltaNet: _delta_net, Mamba2: _mamba2,
    LatentAttention: _latent,
}  # fmt: skip
