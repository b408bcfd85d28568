"""ONNX operators with weights, windows or states as PyTorch runs them: products, convolutions, norms, recurrence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from daydream.capture.onnx.registry import Call, numbers, operator

# Products


@operator("Linear", weights=(1, 2))
def _linear(call: Call, x: Any, weight: Any, bias: Any = None) -> Any:
    # What Gemm, or MatMul and Add, of weights stand for.
    weight = weight if call.get("transB", 0) else weight.t()
    if bias is not None and bias.dim() != 1:
        return torch.addmm(bias, x, weight.t())
    return F.linear(x, weight, bias)


@operator("MatMul")
def _matmul(call: Call, a: Any, b: Any) -> Any:
    return torch.matmul(a, b)


@operator("Gemm", weights=(1, 2))
def _gemm(call: Call, a: Any, b: Any, c: Any = None) -> Any:
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    a = a.t() if call.get("transA", 0) else a
    b = b.t() if call.get("transB", 0) else b
    if c is None or beta == 0:
        return a @ b if alpha == 1 else (a @ b) * alpha
    return torch.addmm(c, a, b, beta=beta, alpha=alpha)


@operator("Einsum")
def _einsum(call: Call, *values: Any) -> Any:
    return torch.einsum(call.get("equation"), *values)


# Windows


def window_pads(call: Call, sizes: Sequence[int], windows: Sequence[int]) -> tuple[list[int], list[int]]:
    """Rows and columns put before and after an input for windows over it.

    ``auto_pad`` makes ceil(size / stride) windows, the odd row after (``SAME_UPPER``) or before the input.

    >>> window_pads(Call(kind="Conv", attributes={"auto_pad": "SAME_UPPER", "strides": [2]}, version=20), [224], [3])
    ([0], [1])
    """
    rank = len(windows)
    pads = call.get("pads", [0] * (2 * rank))
    kind = call.get("auto_pad", "NOTSET")
    if kind in ("NOTSET", ""):
        return list(pads[:rank]), list(pads[rank:])
    if kind == "VALID":
        return [0] * rank, [0] * rank
    strides, dilations = call.get("strides", [1] * rank), call.get("dilations", [1] * rank)
    total = [
        max((math.ceil(size / stride) - 1) * stride + (window - 1) * dilation + 1 - size, 0)
        for size, window, stride, dilation in zip(sizes, windows, strides, dilations, strict=True)
    ]
    less, more = [each // 2 for each in total], [each - each // 2 for each in total]
    return (less, more) if kind == "SAME_UPPER" else (more, less)


def _padded(x: Any, before: list[int], after: list[int], value: float) -> tuple[Any, list[int]]:
    """The input, with zeros around it where its sides differ, and what the layer itself is to pad."""
    if before == after:
        return x, before
    # Caffe's rounding up is exported as pads of one side.
    order = [width for pair in zip(reversed(before), reversed(after), strict=True) for width in pair]
    return F.pad(x, order, value=value), [0] * len(before)


@operator("Conv", weights=(1, 2))
def _conv(call: Call, x: Any, weight: Any, bias: Any = None) -> Any:
    windows = call.get("kernel_shape", list(weight.shape[2:]))
    rank = len(windows)
    x, pads = _padded(x, *window_pads(call, x.shape[2:], windows), value=0.0)
    run = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rank]
    return run(
        x, weight, bias, stride=call.get("strides", [1] * rank), padding=pads,
        dilation=call.get("dilations", [1] * rank), groups=call.get("group", 1),
    )  # fmt: skip


@operator("ConvTranspose", weights=(1, 2))
def _conv_transpose(call: Call, x: Any, weight: Any, bias: Any = None) -> Any:
    rank = weight.dim() - 2
    pads = call.get("pads", [0] * (2 * rank))
    if (
        pads[:rank] != pads[rank:]
        or call.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
        or call.get("output_shape")
    ):
        raise ValueError("only pads that are the same before and after are supported")
    run = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[rank]
    return run(
        x, weight, bias, stride=call.get("strides", [1] * rank), padding=pads[:rank],
        output_padding=call.get("output_padding", [0] * rank), groups=call.get("group", 1),
        dilation=call.get("dilations", [1] * rank),
    )  # fmt: skip


@operator("MaxPool")
def _max_pool(call: Call, x: Any) -> Any:
    windows = call.get("kernel_shape")
    x, pads = _padded(x, *window_pads(call, x.shape[2:], windows), value=-math.inf)
    run: Any = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[len(windows)]
    return run(
        x, windows, call.get("strides", [1] * len(windows)), pads, call.get("dilations", [1] * len(windows)),
        bool(call.get("ceil_mode", 0)), call.results > 1,
    )  # fmt: skip


@operator("AveragePool")
def _average_pool(call: Call, x: Any) -> Any:
    windows = call.get("kernel_shape")
    x, pads = _padded(x, *window_pads(call, x.shape[2:], windows), value=0.0)
    run = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[len(windows)]
    strides = call.get("strides", [1] * len(windows))
    return run(x, windows, strides, pads, bool(call.get("ceil_mode", 0)), bool(call.get("count_include_pad", 0)))


@operator("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(call: Call, x: Any) -> Any:
    if call.kind == "GlobalMaxPool":
        return torch.amax(x, tuple(range(2, x.dim())), keepdim=True)
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


_RESIZES = {("nearest", 1): "nearest", ("nearest", 2): "nearest", ("nearest", 3): "nearest", ("linear", 1): "linear",
            ("linear", 2): "bilinear", ("linear", 3): "trilinear", ("cubic", 2): "bicubic"}  # fmt: skip


@operator("Resize", "Upsample", known=None)
def _resize(call: Call, x: Any, *others: Any) -> Any:
    # Resize takes roi, scales and sizes from version 11 on, scales alone before.
    scales, sizes = (others[0], None) if len(others) == 1 else ((*others, None, None)[1:3] if others else (None, None))
    factors, wanted = numbers(call.get("scales", scales)), numbers(sizes)
    rank = x.dim() - 2
    chosen = call.get("axes", list(range(x.dim())))
    if not wanted:
        wanted = [int(x.shape[axis] * factor) for axis, factor in zip(chosen, factors, strict=True)]
    shape = list(x.shape)
    for axis, size in zip(chosen, wanted, strict=True):
        shape[axis] = int(size)
    mode = _RESIZES.get((call.get("mode", "nearest"), rank))
    if mode is None or shape[:2] != list(x.shape[:2]):
        raise ValueError(f"mode {call.get('mode')} over these axes is not supported")
    corners = call.get("coordinate_transformation_mode") == "align_corners"
    return F.interpolate(x, shape[2:], mode=mode, align_corners=None if mode == "nearest" else corners)


@operator("GridSample")
def _grid_sample(call: Call, x: Any, grid: Any) -> Any:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(call.get("mode", "linear"), call.get("mode", "bilinear"))
    return F.grid_sample(x, grid, mode, call.get("padding_mode", "zeros"), bool(call.get("align_corners", 0)))


# Norms


@operator("BatchNormalization", weights=(1, 2, 3, 4))
def _batch_norm(call: Call, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    if call.training and call.state is not None:
        # PyTorch's module counts its batches with a kernel of its own.
        call.state.num_batches_tracked.add_(1)
    momentum = 1 - call.get("momentum", 0.9)
    result = F.batch_norm(x, mean, variance, scale, bias, call.training, momentum, call.get("epsilon", 1e-5))
    return (result, mean, variance, mean, variance)[: call.results]


@operator("InstanceNormalization", weights=(1, 2))
def _instance_norm(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    return F.instance_norm(x, weight=scale, bias=bias, eps=call.get("epsilon", 1e-5))


@operator("GroupNormalization", weights=(1, 2))
def _group_norm(call: Call, x: Any, scale: Any, bias: Any) -> Any:
    groups, channels = call.get("num_groups"), x.shape[1]
    if scale.shape[0] != channels:  # one for each group before version 21
        scale, bias = (each.repeat_interleave(channels // groups) for each in (scale, bias))
    return F.group_norm(x, groups, scale, bias, call.get("epsilon", 1e-5))


@operator("LayerNormalization", weights=(1, 2))
def _layer_norm(call: Call, x: Any, scale: Any, bias: Any = None) -> Any:
    return F.layer_norm(x, x.shape[call.get("axis", -1) :], scale, bias, call.get("epsilon", 1e-5))


@operator("RMSNormalization", "SimplifiedLayerNormalization", weights=(1,))
def _rms_norm(call: Call, x: Any, scale: Any) -> Any:
    return F.rms_norm(x, x.shape[call.get("axis", -1) :], scale, call.get("epsilon", 1e-5))


@operator("LRN")
def _local_response_norm(call: Call, x: Any) -> Any:
    return F.local_response_norm(
        x, call.get("size"), call.get("alpha", 1e-4), call.get("beta", 0.75), call.get("bias", 1.0)
    )


@operator("LpNormalization")
def _lp_norm(call: Call, x: Any) -> Any:
    return F.normalize(x, call.get("p", 2), call.get("axis", -1))


@operator("Dropout", known=(1, 2))
def _dropout(call: Call, x: Any, ratio: Any = None, _training: Any = None) -> Any:
    share = (numbers(ratio) or [call.get("ratio", 0.5)])[0]
    result = torch.dropout(x, share, True) if call.training and share > 0 else x
    return (result, result)[: call.results] if call.results > 1 else result


# Attention and recurrence


@operator("Attention")
def _attention(call: Call, q: Any, k: Any, v: Any, mask: Any = None, past_k: Any = None, past_v: Any = None) -> Any:
    flat = q.dim() == 3
    if flat:
        heads, key_heads = call.get("q_num_heads"), call.get("kv_num_heads")
        q, k, v = (
            each.unflatten(-1, (count, -1)).transpose(1, 2)
            for each, count in ((q, heads), (k, key_heads), (v, key_heads))
        )
    if past_k is not None:
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    if call.get("softcap", 0.0) or call.results > 3:
        raise ValueError("softcap and the scores as a result are not supported")
    result = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=bool(call.get("is_causal", 0)), scale=call.get("scale"),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    result = result.transpose(1, 2).flatten(2) if flat else result
    return (result, k, v)[: call.results]


@operator("RotaryEmbedding", weights=())
def _rotary(call: Call, x: Any, cos: Any, sin: Any, positions: Any = None) -> Any:
    flat = x.dim() == 3
    if flat:
        x = x.unflatten(-1, (call.get("num_heads"), -1)).transpose(1, 2)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.chunk(2, -1)
    result = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return result.transpose(1, 2).flatten(2) if flat else result


@operator("LSTM", "GRU", "RNN", weights=(1, 2, 3))
def _recurrent(
    call: Call, x: Any, weight: Any, recurrence: Any, bias: Any = None, _lengths: Any = None, hidden: Any = None,
    cell: Any = None, peepholes: Any = None,
) -> Any:  # fmt: skip
    if (
        peepholes is not None
        or call.get("layout", 0)
        or (call.kind == "GRU" and not call.get("linear_before_reset", 0))
    ):
        raise ValueError("peepholes, layout 1 and resets before the product are not supported")
    directions, size = recurrence.shape[0], recurrence.shape[2]
    rows = recurrence.shape[1]
    # The order of the gates differs from PyTorch's, not their work.
    weights = []
    for direction in range(directions):
        weights += [weight[direction], recurrence[direction]]
        if bias is not None:
            weights += [bias[direction, :rows], bias[direction, rows:]]
    if hidden is None:
        hidden = x.new_zeros(directions, x.shape[1], size)
    options = (weights, bias is not None, 1, 0.0, call.training, directions == 2, False)
    if call.kind == "LSTM":
        state = (hidden, cell if cell is not None else x.new_zeros(directions, x.shape[1], size))
        result, *last = torch.lstm(x, state, *options)
    else:
        result, *last = (torch.gru if call.kind == "GRU" else torch.rnn_tanh)(x, hidden, *options)
    result = result.unflatten(-1, (directions, size)).transpose(1, 2)
    return (result, *last)[: call.results]
