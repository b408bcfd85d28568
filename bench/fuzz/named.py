"""Named operators drawn by chance: those with kernels or algorithms of their own, at sizes that those take."""

from __future__ import annotations

import random
from typing import Any

from bench.fuzz.targets import Target

Data = dict[str, Any]

_FLOATS = ("float16", "bfloat16", "float32")
_HEADS = (16, 32, 40, 64, 72, 80, 128)


def attention(chance: random.Random) -> Data:
    """Attention with any mask, heads that share keys or not, one query or many."""
    kv_heads = chance.choice((1, 2, 4))
    queries = chance.choice((1, 1, 5, 64, 100, 257, 512, 1000))
    data: Data = {
        "op": "attention", "b": chance.choice((1, 2)), "heads": kv_heads * chance.choice((1, 2, 4)),
        "kv_heads": kv_heads, "queries": queries, "keys": max(queries, chance.choice((64, 100, 300, 1000, 4000))),
        "head_dim": chance.choice(_HEADS), "causal": chance.random() < 0.6, "dtype": chance.choice(_FLOATS),
    }  # fmt: skip
    return _with_options(chance, data)


def _with_options(chance: random.Random, data: Data) -> Data:
    if data["op"] == "attention" and chance.random() < 0.35:
        # What warp groups of the H100 take.
        data |= {"queries": 1024, "keys": chance.choice((1024, 2000)), "head_dim": chance.choice((64, 128))}
        data["dtype"] = chance.choice(_FLOATS[:2])
    if data["causal"] and chance.random() < 0.3:
        data["window"] = chance.choice((1, 17, 64, 130))
    if chance.random() < 0.2:
        data["value_dim"] = chance.choice((16, 32, 64))
    return data


def attention_gradient(chance: random.Random) -> Data:
    """A gradient of attention after the queries, or after keys and values."""
    kv_heads = chance.choice((1, 2))
    queries = chance.choice((5, 64, 100, 257, 512))
    data: Data = {
        "op": "attention_gradient", "of": chance.choice(("queries", "keys")), "b": chance.choice((1, 2)),
        "heads": kv_heads * chance.choice((1, 2)), "kv_heads": kv_heads, "queries": queries,
        "keys": queries + chance.choice((0, 0, 33)), "head_dim": chance.choice((16, 32, 64, 128)),
        "causal": chance.random() < 0.6, "dtype": chance.choice(_FLOATS),
    }  # fmt: skip
    if chance.random() < 0.4:
        data |= {"slopes": True, "queries": queries // 8 * 8 or 8, "dtype": chance.choice(_FLOATS[:2])}
        data["keys"] = max(data["keys"], data["queries"])
    return _with_options(chance, data)


def convolution(chance: random.Random) -> Data:
    """A convolution large enough for flat images and, where its window is 3x3 or 5x5, for Winograd."""
    window = chance.choice((1, 3, 3, 3, 5))
    data: Data = {
        "op": "conv2d", "n": chance.choice((1, 4, 16)), "c": chance.choice((16, 32, 64, 128)),
        "h": chance.choice((7, 14, 28, 29, 56)), "w": chance.choice((7, 14, 28, 30, 56)),
        "f": chance.choice((16, 33, 64, 128)), "kh": window, "kw": window, "stride": chance.choice((1, 1, 1, 2)),
        "padding": window // 2, "layout": chance.choice(("NCHW", "NHWC")), "dtype": chance.choice(_FLOATS),
    }  # fmt: skip
    if data["dtype"] == "float32" and chance.random() < 0.6:
        data["allow_tf32"] = True
    return _with_epilogue(chance, data, "f")


def large_convolution(chance: random.Random) -> Data:
    """A convolution of float32 by 3x3 or 5x5 that Winograd's transforms gain on."""
    side, window = chance.choice((14, 28, 29, 56)), chance.choice((3, 3, 5))
    data: Data = {
        "op": "conv2d", "n": chance.choice((1, 2, 4, 8, 16)), "c": chance.choice((64, 128, 130, 256)), "h": side,
        "w": side + chance.choice((0, 0, 1)), "f": chance.choice((64, 128, 256)), "kh": window, "kw": window,
        "padding": chance.choice((0, window // 2)), "layout": chance.choice(("NCHW", "NCHW", "NHWC")),
    }  # fmt: skip
    return _with_epilogue(chance, data, "f")


def matmul(chance: random.Random) -> Data:
    """A product of matrices of any type with an epilogue of steps."""
    dtype = chance.choice((*_FLOATS, "float64", "int8"))
    data: Data = {
        "op": "matmul", "m": chance.choice((1, 16, 64, 127, 512, 1024)), "n": chance.choice((64, 65, 256, 1000, 2048)),
        "k": chance.choice((32, 64, 100, 512, 4096)), "transpose_a": chance.random() < 0.3,
        "transpose_b": chance.random() < 0.5, "dtype": dtype,
    }  # fmt: skip
    return data if dtype == "int8" else _with_epilogue(chance, data, "n")


def line(chance: random.Random) -> Data:
    """A softmax or a layer norm."""
    shape = [chance.choice((1, 3, 17, 33)), chance.choice((1, 31, 128, 1000, 2049))]
    return {"op": chance.choice(("softmax", "layer_norm")), "shape": shape, "axis": chance.choice((-1, 0)),
            "dtype": chance.choice((*_FLOATS, "float64"))}  # fmt: skip


def ranks(chance: random.Random) -> Data:
    """The largest or smallest of lines, or their places."""
    length = chance.choice((1, 8, 31, 64, 256, 1000, 4097))
    shape = [chance.choice((1, 3, 17, 70)), length]
    return {"op": "topk", "shape": shape, "k": min(length, chance.choice((1, 2, 6, 8, 33, 64))),
            "axis": chance.choice((-1, -1, 1)), "largest": chance.random() < 0.7,
            "result": chance.choice(("values", "indices")), "dtype": chance.choice((*_FLOATS, "float64"))}  # fmt: skip


def scattered(chance: random.Random) -> Data:
    """Rows added where places say."""
    data: Data = {
        "op": "scatter_add", "rows": chance.choice((1, 5, 33, 64, 1000)),
        "columns": chance.choice((2, 7, 64, 100, 768)),
        "count": chance.choice((1, 31, 128, 500, 2049)), "dtype": chance.choice((*_FLOATS, "float64")),
    }  # fmt: skip
    return _with_epilogue(chance, data, "c")


def _with_epilogue(chance: random.Random, data: Data, axis: str) -> Data:
    steps: list[Any] = []
    if chance.random() < 0.4:
        steps.append({"function": "bias_add", "axis": axis})
    if chance.random() < 0.3:
        steps.append({"function": "residual_add"})
    if chance.random() < 0.5:
        steps.append(chance.choice(("relu", "gelu", "tanh", "sigmoid", "silu")))
    return {**data, "epilogue": steps} if steps else data


def named(chance: random.Random) -> Data:
    """Any of them."""
    products = (convolution, large_convolution, large_convolution, matmul)
    return chance.choice((attention, attention, attention_gradient, *products, line, ranks, scattered))(chance)


def wanted(chance: random.Random, target: Target) -> Data:
    """A named operator for one of its lowerings or algorithms."""
    if target.lowering == "winograd":
        # Small enough to be run, and large enough to gain.
        sizes = {"n": chance.choice((1, 2)), "c": chance.choice((128, 130, 192)), "h": chance.choice((13, 14, 16))}
        return large_convolution(chance) | sizes | {"w": chance.choice((14, 15)), "kh": 3, "kw": 3, "padding": 1}
    if target.lowering == "flat-image":
        # Images whose rows no tile of matrix instructions divides; those take float32 as TensorFloat-32.
        data: Data = {"n": chance.choice((1, 2)), "c": 64, "h": chance.choice((14, 28)), "w": 30, "kh": 3, "kw": 3,
                      "f": chance.choice((16, 64)), "padding": 1, "stride": 1, "layout": "NHWC"}  # fmt: skip
        data |= {"dtype": target.name, "allow_tf32": target.name == "float32"}
        return convolution(chance) | data
    if target.lowering == "ranks":
        return ranks(chance) | {"dtype": target.name, "shape": [chance.choice((3, 17, 70)), chance.choice((256, 1000))]}
    if target.lowering.endswith("scatters"):
        sizes = {"rows": chance.choice((5, 33, 64, 1000)), "count": chance.choice((31, 128, 500, 2049))}
        return scattered(chance) | {"dtype": target.name} | sizes
    return _wanted_attention(chance, target)


def _wanted_attention(chance: random.Random, target: Target) -> Data:
    """Attention or a gradient of it, with an option, for one of its lowerings."""
    is_gradient = "gradient" in target.lowering
    data: Data = (attention_gradient if is_gradient else attention)(chance)
    if target.lowering.endswith("groups"):
        data |= {"b": 1, "heads": 2, "kv_heads": 2, "queries": 1024, "keys": 1024, "head_dim": chance.choice((64, 128))}
    elif target.lowering.endswith("slices"):
        data |= {"b": 1, "queries": 1, "keys": chance.choice((4000, 8000))}
    if target.lowering.endswith(("groups", "warps")):
        data["dtype"] = chance.choice(_FLOATS[:2])
    if target.name == "every key seen":
        data["causal"] = False
        data.pop("window", None)
    elif target.name in ("causal", "window"):
        data["causal"] = True
    if target.name == "window":
        data["window"] = chance.choice((17, 64, 130))
    elif target.name == "heads share keys":
        data["heads"] = 2 * data["kv_heads"]
    elif target.name == "a head for every key":
        data["heads"] = data["kv_heads"]
    elif target.name == "more keys than queries":
        data["keys"] = data["queries"] + chance.choice((33, 64, 1000))
    elif target.name == "values of another size":
        data["value_dim"] = 32 if data["head_dim"] != 32 else 64
    return data
