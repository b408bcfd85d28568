"""Kinds of rows of the data of today's servers: which operator each row is, its work, and which were chosen on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sokoban.schedule.table import Floats

#: Precision by the data's word.
PRODUCTS = {"fp8": "fp8-rowwise", "fp8_block": "fp8-block", "nvfp4": "nvfp4"}
EXPERTS = {
    "bfloat16": "bfloat16", "fp8": "fp8-tensorwise", "fp8_block": "fp8-block", "nvfp4": "nvfp4",
    "int4_wo": "int4-weights", "w4a16_mxfp4": "mxfp4-weights", "w4a8_mxfp4_mxfp8": "mxfp4-mxfp8",
}  # fmt: skip

#: Part and phase of a gated delta network by its kernel.
DELTA_NETS = {
    "causal_conv1d_fn": "convolution", "causal_conv1d_update": "convolution@decode",
    "chunk_gated_delta_rule_flashinfer": "rule", "chunk_gated_delta_rule_triton": "rule",
    "fused_recurrent_gated_delta_rule_packed_decode": "rule@decode",
}  # fmt: skip
#: What rows of all-reduces hold: kernels, or calls from Python.
ALL_REDUCES = {"vllm_graph": "seconds", "vllm_eager": "call_seconds"}
LATENT = {"bfloat16": "bfloat16", "fp8_block": "fp8-block", "nvfp4": "nvfp4"}

#: Bytes of an element of the weights, and FLOP of the matrix units over those of 16 bits.
WEIGHT_BYTES = {
    "bfloat16": (2.0, 1.0), "fp8": (1.0, 2.0), "fp8_block": (1.0, 2.0), "nvfp4": (0.5625, 4.0), "int4_wo": (0.516, 1.0),
    "w4a16_mxfp4": (0.53, 1.0), "w4a8_mxfp4_mxfp8": (0.53, 2.0),
}  # fmt: skip

Columns = Mapping[str, np.ndarray[Any, Any]]
Operator = dict[str, Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Kind:
    """One file of rows.

    Attributes:
        file: of the data.
        title: in words.
        bar: largest mean error asked for.
        precisions: by the data's word, which the column ``column`` has.
        operators: of rows in one precision.
        work: FLOP and bytes of rows.
        chosen: of rows, whether constants were chosen on their shapes.
        has_calls: words of rows that hold calls from the host, not kernels in a CUDA graph.
        left_out: name of the constants that were chosen with a board left out.
    """

    file: str
    title: str
    bar: float
    column: str
    precisions: Mapping[str, str]
    operators: Callable[[Columns, str], list[Operator]]
    work: Callable[[Columns, str], tuple[Floats, Floats]]
    chosen: Callable[[Columns], np.ndarray[Any, np.dtype[np.bool_]]]
    has_calls: tuple[str, ...] = ()
    left_out: str = ""


# Products


def _products(rows: Columns, precision: str) -> list[Operator]:
    sizes = zip(*(rows[name].tolist() for name in ("m", "n", "k")), strict=True)
    return [{"op": "scaled_matmul", "m": m, "n": n, "k": k, "precision": precision} for m, n, k in sizes]


def _product_work(rows: Columns, word: str) -> tuple[Floats, Floats]:
    m, n, k = (rows[name].astype(np.float64) for name in ("m", "n", "k"))
    size = WEIGHT_BYTES[word][0]
    return 2 * m * n * k, size * (m * k + n * k) + 2 * m * n


def _product_half(rows: Columns) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Shapes by a hash of their weights."""
    return np.asarray((rows["n"] * 7919 + rows["k"] * 104729) % 97 % 2 == 0)


# Experts


def _experts(rows: Columns, precision: str) -> list[Operator]:
    names = {
        "num_tokens": "tokens", "hidden_size": "hidden", "inter_size": "intermediate", "topk": "top_k",
        "num_experts": "experts", "moe_tp_size": "tensor_parallel", "moe_ep_size": "expert_parallel",
    }  # fmt: skip
    sizes = zip(*(rows[name].tolist() for name in names), strict=True)
    spreads = map(_spread, rows["distribution"].tolist(), rows["software"].tolist())
    return [
        {
            "op": "experts",
            **dict(zip(names.values(), each, strict=True)),
            "distribution": spread,
            "precision": precision,
        }
        for each, spread in zip(sizes, spreads, strict=True)
    ]


def _spread(name: str, software: str) -> str:
    """Tokens over experts as we name it; rows of vLLM 0.14 were routed by an older version of the data's script.

    Of its versions (``_generate_power_law_distribution`` of AIConfigurator's ``collector/helper.py``) that of commit
    526f823b, which gives leftovers to the least loaded, is nearer to the rows of one half of the shapes than the first
    (to the busiest) and the last (boards in turn); docs/accuracy.md has all three.
    """
    if name == "balanced":
        return "uniform"
    return f"{name}_in_order" if software.startswith("vllm 0.14.") else name


def _experts_work(rows: Columns, word: str) -> tuple[Floats, Floats]:
    """Three products of every pair of a token and an expert, divided evenly; weights of experts that may have one."""
    hidden, pairs = rows["hidden_size"].astype(np.float64), (rows["num_tokens"] * rows["topk"]).astype(np.float64)
    inter = rows["inter_size"] / rows["moe_tp_size"]
    boards = rows["moe_ep_size"].astype(np.float64)
    active = np.minimum(rows["num_experts"], pairs) / boards
    moved = 3 * active * hidden * inter * WEIGHT_BYTES[word][0] + 4 * hidden * pairs / boards
    return 6 * pairs / boards * hidden * inter, moved


def _experts_half(rows: Columns) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Shapes by a hash of experts and how they are divided."""
    parts = {"hidden_size": 7919, "inter_size": 104729, "moe_tp_size": 31, "moe_ep_size": 17, "num_experts": 13}
    return np.asarray(sum(rows[name] * factor for name, factor in parts.items()) % 97 % 2 == 0)


# Gated delta networks


def _delta_nets(rows: Columns, part: str) -> list[Operator]:
    names = {
        "batch_size": "batch", "seq_len": "tokens", "num_k_heads": "key_heads", "num_v_heads": "value_heads",
        "head_k_dim": "key_dim", "head_v_dim": "value_dim",
    }  # fmt: skip
    part, _, phase = part.partition("@")
    sizes = zip(*(rows[name].tolist() for name in names), strict=True)
    fixed = {"op": "delta_net", "part": part, "phase": phase or "prefill"}
    return [{**fixed, **dict(zip(names.values(), each, strict=True))} for each in sizes]


def _delta_net_work(rows: Columns, word: str) -> tuple[Floats, Floats]:
    """Activations that are read and written, and the states of a rule twice; six products of a state's size a token."""
    tokens, batch = (rows["batch_size"] * rows["seq_len"]).astype(np.float64), rows["batch_size"].astype(np.float64)
    keys, values = (rows[f"num_{name}_heads"] * rows[f"head_{name}_dim"] for name in ("k", "v"))
    moved = 4 * tokens * (2 * keys + values)
    if "conv" in word:
        return np.zeros_like(tokens), moved
    states = values * rows["head_k_dim"]
    return 6 * tokens * states, moved + 8 * batch * states


def _delta_net_half(rows: Columns) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Shapes by a hash of the model's sizes."""
    parts = {"d_model": 7919, "num_k_heads": 104729, "num_v_heads": 31}
    return np.asarray(sum(rows[name] * factor for name, factor in parts.items()) % 97 % 2 == 0)


# Latent attention


def _latent(rows: Columns, precision: str) -> list[Operator]:
    names = {"batch_size": "batch", "isl": "tokens", "step": "context", "num_heads": "heads"}
    narrow = {"kv_cache_dtype": "cache", "mla_dtype": "attention"}
    columns = zip(*(rows[name].tolist() for name in (*names, *narrow)), strict=True)
    keys = (*names.values(), *narrow.values())
    return [
        {"op": "latent_attention", "precision": precision, **dict(zip(keys, each, strict=True))} for each in columns
    ]


def _latent_work(rows: Columns, word: str) -> tuple[Floats, Floats]:
    """Products of DeepSeek-V3's module, and attention over the cache or over keys of every head; weights and cache."""
    heads, batch = rows["num_heads"].astype(np.float64), rows["batch_size"].astype(np.float64)
    tokens, keys = rows["isl"].astype(np.float64), (rows["step"] + (rows["isl"] + 1) / 2).astype(np.float64)
    weights = 7168 * (1536 + 576 + 128 * heads) + 192 * heads * 1536 + 256 * heads * 512
    pairs = 2 * batch * tokens * keys * heads * np.where(tokens == 1, 2 * 512 + 64, 192 + 128)
    cache = batch * (rows["step"] + tokens) * 576 * np.where(rows["kv_cache_dtype"] == "fp8", 1, 2)
    return 2 * batch * tokens * weights + pairs, weights * WEIGHT_BYTES[word][0] + cache


def _latent_half(rows: Columns) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Calls by a hash of all sizes."""
    parts = {"num_heads": 7919, "batch_size": 104729, "isl": 31, "step": 17}
    return np.asarray(sum(rows[name] * factor for name, factor in parts.items()) % 97 % 2 == 0)


# All-reduces


#: Bytes of an element: the data's sizes of messages are elements (``collect_all_reduce.py`` of AIConfigurator).
ELEMENT_BYTES = 2

#: Sizes of messages that constants were chosen on, as exponents of two.
CHOSEN_EXPONENTS = (9, 14, 19, 21, 23)


def _all_reduces(rows: Columns, _: str) -> list[Operator]:
    pairs = zip((ELEMENT_BYTES * rows["message_size"]).tolist(), rows["num_gpus"].tolist(), strict=True)
    return [{"op": "all_reduce", "bytes": size, "ranks": ranks, "kernels": "vllm"} for size, ranks in pairs]


def _all_reduce_work(rows: Columns, _: str) -> tuple[Floats, Floats]:
    """A sum, and what is read and written."""
    elements = rows["message_size"].astype(np.float64)
    return elements * (rows["num_gpus"] - 1), 2 * ELEMENT_BYTES * elements


def _all_reduce_half(rows: Columns) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Calls in graphs of every other size; of more than two L40S the shortest and the longest among four alone."""
    exponents = np.log2(rows["message_size"])
    every_other = np.isin(exponents, CHOSEN_EXPONENTS)
    ends = (rows["num_gpus"] == 4) & ((exponents == 9) | (exponents == 24))
    by_host = (rows["board"] == "l40s") & (rows["num_gpus"] > 2)
    return np.asarray((rows["backend"] == "vllm_graph") & np.where(by_host, ends, every_other))


#: Every kind of the data.
KINDS: tuple[Kind, ...] = (
    Kind(
        file="products", title="Products with scales", bar=0.10, column="gemm_dtype", precisions=PRODUCTS,
        operators=_products, work=_product_work, chosen=_product_half, left_out="scaled",
        has_calls=("fp8_block",),
    ),
    Kind(
        file="experts", title="Layers of experts", bar=0.15, column="moe_dtype", precisions=EXPERTS,
        operators=_experts, work=_experts_work, chosen=_experts_half,
    ),
    Kind(
        file="delta_net", title="Gated delta networks", bar=0.15, column="kernel_source", precisions=DELTA_NETS,
        operators=_delta_nets, work=_delta_net_work, chosen=_delta_net_half,
    ),
    Kind(
        file="latent_context", title="Latent attention, new tokens", bar=0.15, column="gemm_type",
        precisions=LATENT, operators=_latent, work=_latent_work, chosen=_latent_half,
    ),
    Kind(
        file="latent_generation", title="Latent attention, a token after the cached ones", bar=0.15, column="gemm_type",
        precisions=LATENT, operators=_latent, work=_latent_work, chosen=_latent_half,
    ),
    Kind(
        file="all_reduce", title="All-reduces within a node", bar=0.15, column="backend", precisions=ALL_REDUCES,
        operators=_all_reduces, work=_all_reduce_work, chosen=_all_reduce_half,
        has_calls=("vllm_eager",),
    ),
)  # fmt: skip
