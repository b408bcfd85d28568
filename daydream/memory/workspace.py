"""Scratch memory of cuDNN: of convolutions by the algorithm that their price assumes, of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from daydream.capture.captured import CapturedOperator
from daydream.operators.calls import OperatorPrice
from daydream.operators.inputs import Inputs
from sokoban.language.expression import DTYPE_BYTES

#: Numbers that F(4x4, 3x3) makes of a tile of 4x4 outputs, each a float.
_TRANSFORMED_BYTES = 36 * 4

#: Where ``aten::_cudnn_rnn`` and its backward pass have the layers' weights and their first hidden states.
_WEIGHTS, _STATES = 1, 4


def workspaces(operators: Sequence[CapturedOperator], prices: Sequence[OperatorPrice]) -> dict[int, int]:
    """Bytes of scratch memory by the number of the operator that needs them while it runs.

    Non-fused Winograd writes transformed data, filters and products to memory; a transposed copy is made of tensors
    that a kernel for channels-last takes. Other kernels of convolutions need little.

    Args:
        operators: of a captured step.
        prices: of each.
    """
    needed = {}
    for number, (operator, price) in enumerate(zip(operators, prices, strict=True)):
        if operator.name.startswith("aten::_cudnn_rnn"):
            needed[number] = recurrent_bytes(operator.inputs)
        if price.work is None or price.work.kind != "convolution":
            continue
        names = " ".join(kernel.name for kernel in price.kernels)
        # The others add a bias, or sum its gradient.
        parts = [part.data for part in price.work.parts if part.data and "kh" in part.data]
        scratch = max((_scratch(data, names) for data in parts), default=0)
        if scratch:
            needed[number] = scratch
    return needed


def _scratch(data: Mapping[str, Any], kernels: str) -> int:
    if "winograd_nonfused" in kernels:
        return winograd_bytes(data)
    if "nchwToNhwc" in kernels or "nhwcToNchw" in kernels:
        out_h, out_w = _outputs(data)
        pixels = data["c"] * data["h"] * data["w"] + data["f"] * out_h * out_w
        return int(data["n"] * pixels * DTYPE_BYTES[data.get("dtype", "float32")])
    return 0


def winograd_bytes(data: Mapping[str, Any]) -> int:
    """Bytes that non-fused Winograd F(4x4, 3x3) writes besides its output.

    >>> winograd_bytes({"n": 1, "c": 64, "f": 64, "h": 8, "w": 8, "kh": 3, "kw": 3, "padding": 1})
    663552
    """
    out_h, out_w = _outputs(data)
    tiles = data["n"] * ceil(out_h / 4) * ceil(out_w / 4)
    return int(_TRANSFORMED_BYTES * (tiles * (data["c"] + data["f"]) + data["c"] * data["f"]))


def recurrent_bytes(inputs: Inputs) -> int:
    """Bytes that cuDNN's recurrent layers need besides their reserve, forward or backward; 0 where sizes are unknown.

    That is a copy of all matrices, and three numbers for each gate less one for each element of the states. So it was
    printed for four layers of 320 units, of LSTM and GRU (PyTorch issue 2895; docs/memory.md).
    """
    states = inputs.tensor(_STATES)
    weights = inputs.lists[_WEIGHTS] if len(inputs.lists) > _WEIGHTS else ()
    if states is None or not weights or len(states.dims) != 3:
        return 0
    layers, batch, width = states.dims
    scratch = layers * batch * (3 * weights[0].dims[0] - width) * states.bytes // max(states.elements, 1)
    return scratch + sum(each.bytes for each in weights if len(each.dims) == 2)


def _outputs(data: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of the output, where the padding is a number or one for each side."""
    stride, padding = data.get("stride", 1), data.get("padding", 0)
    strides = stride if isinstance(stride, list) else [stride, stride]
    sides = padding if isinstance(padding, list) else [padding] * 4
    sides = sides if len(sides) == 4 else [*sides, *sides]
    dilation = data.get("dilation", 1)
    dilations = dilation if isinstance(dilation, list) else [dilation, dilation]
    rows = (data["h"] + sides[0] + sides[2] - dilations[0] * (data["kh"] - 1) - 1) // strides[0] + 1
    columns = (data["w"] + sides[1] + sides[3] - dilations[1] * (data["kw"] - 1) - 1) // strides[1] + 1
    return rows, columns
