"""Recurrent layers and cells on ``meta`` as a board runs them: one call of cuDNN for a layer, one kernel for a cell.

PyTorch unrolls a recurrent layer over time wherever cuDNN does not take it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

#: cuDNN's numbers of recurrent layers (``cudnnRNNMode_t``).
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}

#: Numbers that cuDNN keeps for the backward pass of each element of a layer's hidden state besides that element, by its
#: numbers of layers: what is made of the one gate, of four gates and the cell, of three gates of two products each. So
#: it was printed for layers of 320 units (PyTorch issue 2895; docs/memory.md has the sums).
_RESERVED = {0: 1, 1: 1, 2: 5, 3: 6}


def _layers(kind: str) -> Callable[..., Any]:
    """``aten::lstm.input`` and its relatives."""

    def run(tensor: Any, hidden: Any, weights: Sequence[Any], *settings: Any) -> Any:
        return _cudnn(kind, tensor, hidden, weights, settings, [])

    return run


def _packed_layers(kind: str) -> Callable[..., Any]:
    """``aten::lstm.data`` and its relatives: sequences of several lengths, one row after the other."""

    def run(tensor: Any, batch_sizes: Any, hidden: Any, weights: Sequence[Any], *settings: Any) -> Any:
        return _cudnn(kind, tensor, hidden, weights, (*settings, False), batch_sizes.tolist())

    return run


def _cudnn(
    kind: str, tensor: Any, hidden: Any, weights: Sequence[Any], settings: Sequence[Any], batch_sizes: list[int]
) -> Any:
    has_biases, num_layers, dropout, train, bidirectional, batch_first = settings
    state, cell = (hidden[0], hidden[1]) if kind == "lstm" else (hidden, None)
    # Weights of the input and of the state have as many rows per gate as the layer has hidden units.
    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    width = weights[0].shape[0] // gates
    projected = state.shape[2] if state.shape[2] != width else 0
    result = torch.ops.aten._cudnn_rnn.default(
        tensor, weights, (4 if has_biases else 2) + bool(projected), tensor.new_empty(0), state, cell, _MODES[kind],
        width, projected, num_layers, batch_first, dropout, train, bidirectional, batch_sizes, None,
    )  # fmt: skip
    return result[:3] if kind == "lstm" else result[:2]


def _lstm_cell(
    tensor: Any, hidden: Sequence[Any], w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> tuple[Any, Any]:
    linear = torch.nn.functional.linear
    state, cell = torch.ops.aten._thnn_fused_lstm_cell.default(
        linear(tensor, w_ih), linear(hidden[0], w_hh), hidden[1], b_ih, b_hh
    )[:2]
    return state, cell


def _gru_cell(tensor: Any, hidden: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    linear = torch.nn.functional.linear
    return torch.ops.aten._thnn_fused_gru_cell.default(linear(tensor, w_ih), linear(hidden, w_hh), hidden, b_ih, b_hh)[
        0
    ]


def _rnn(tensor: Any, weights: Sequence[Any], stride: int, buffer: Any, hx: Any, cx: Any, *others: Any) -> Any:
    """``aten::_cudnn_rnn``: PyTorch's own for ``meta`` returns an empty reserve."""
    mode, width, projected, layers, batch_first, _, train, bidirectional, batch_sizes, _ = others
    ways, wide = 1 + bidirectional, projected or width
    rows = tensor.shape[:-1]
    batch = batch_sizes[0] if batch_sizes else rows[0 if batch_first else 1]
    output = tensor.new_empty(*rows, wide * ways)
    final = hx.new_empty(layers * ways, batch, wide)
    cell = tensor.new_empty(0) if cx is None else cx.new_empty(layers * ways, batch, width)
    numbers = reserved_numbers(mode, width, projected, layers) * ways * rows.numel() if train else 0
    reserve = tensor.new_empty(numbers * tensor.element_size(), dtype=torch.uint8)
    return output, final, cell, reserve, buffer


def reserved_numbers(mode: int, width: int, projected: int, layers: int) -> int:
    """Number of elements of cuDNN's reserve space for one step of one sequence in one direction.

    The hidden state of the last layer is the call's result and no part of the reserve. Of projections nothing is
    published: the state before them is taken to be kept with its successor.

    >>> reserved_numbers(2, 320, 0, 4) * 25_000 * 4, reserved_numbers(3, 320, 0, 4) * 25_000 * 4
    (736000000, 864000000)
    """
    projections = layers * width if projected else 0
    return layers * _RESERVED[mode] * width + (layers - 1) * (projected or width) + projections


def _rnn_backward(
    tensor: Any, weights: Sequence[Any], stride: int, buffer: Any, hx: Any, cx: Any, *others: Any
) -> tuple[Any, Any, Any, list[Any]]:
    mask = others[-1]
    return (
        torch.empty_like(tensor) if mask[0] else None,
        torch.empty_like(hx) if mask[1] else None,
        torch.empty_like(cx) if mask[2] and cx is not None else None,
        [torch.empty_like(weight) for weight in weights] if mask[3] else [],
    )


def _fused_gru(input_gates: Any, hidden_gates: Any, hidden: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    return torch.empty_like(hidden), hidden.new_empty(hidden.shape[0], 5 * hidden.shape[1])


def _fused_gru_backward(gradient: Any, workspace: Any, has_bias: bool) -> Any:
    rows, width = gradient.shape
    gates, other_gates = (gradient.new_empty(rows, 3 * width) for _ in range(2))
    biases = (gradient.new_empty(3 * width), gradient.new_empty(3 * width)) if has_bias else (None, None)
    return gates, other_gates, torch.empty_like(gradient), *biases


#: What a board composes recurrent operators of, by the name of the operator.
BOARD_RECURRENCE: Mapping[str, Callable[..., Any]] = {
    **{f"{kind}.input": _layers(kind) for kind in _MODES},
    **{f"{kind}.data": _packed_layers(kind) for kind in _MODES},
    "lstm_cell": _lstm_cell,
    "gru_cell": _gru_cell,
}

#: Kernels that PyTorch has for boards alone.
META_RECURRENCE: Mapping[str, Callable[..., Any]] = {
    "_cudnn_rnn": _rnn,
    "_cudnn_rnn_backward": _rnn_backward,
    "_thnn_fused_gru_cell": _fused_gru,
    "_thnn_fused_gru_cell_backward": _fused_gru_backward,
}
