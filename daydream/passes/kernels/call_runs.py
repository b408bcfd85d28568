"""Runs of calls that one kernel can take the place of: an operator, and what follows it point by point as its epilogue.

`conv2d, batch_norm, add_, relu_` is a convolution whose weights and bias hold the batch norm, with a residual and an
activation. That each call takes the result of the one before it, no trace says: calls count as a run where they follow
each other at once and their sizes fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from daydream.graph.graph import TaskGraph
from daydream.operators.convolutions import Convolutions
from daydream.operators.inputs import DTYPES, Dims, Inputs, RecordedTensor
from daydream.operators.rules import describe
from daydream.passes.kernels.operator_calls import OperatorCall
from hal.support.errors import InputError
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import operators_from_json

_CONVOLUTIONS = ("aten::conv2d",)
_PRODUCTS = ("aten::linear", "aten::addmm", "aten::mm", "aten::bmm")
_NORMS = ("aten::batch_norm",)
_ADDS = ("aten::add", "aten::add_")
_ACTIVATIONS = {"aten::relu": "relu", "aten::relu_": "relu", "aten::gelu": "gelu", "aten::sigmoid": "sigmoid",
                "aten::tanh": "tanh", "aten::silu": "silu", "aten::silu_": "silu"}  # fmt: skip


@dataclass(frozen=True)
class CallRun:
    """Calls that follow each other, and the one operator that computes what they do.

    Attributes:
        calls: in the order in which they ran.
        data: the operator as in op.json.
    """

    calls: tuple[OperatorCall, ...]
    data: dict[str, Any]

    @property
    def expression(self) -> TensorExpr:
        """The operator."""
        return expression(msgspec.json.encode(self.data))

    @property
    def duration_us(self) -> float:
        """From the beginning of the first call to the end of the last one."""
        return sum(call.duration_us for call in self.calls) + sum(call.tail_us for call in self.calls[:-1])


@lru_cache(maxsize=4096)
def expression(data: bytes) -> TensorExpr:
    """The operator of a JSON object."""
    return operators_from_json(data, "trace")[0]


class CallRuns:
    """The runs that begin at each call of a graph."""

    def __init__(self, graph: TaskGraph, calls: Sequence[OperatorCall]) -> None:
        self.calls = calls
        self._convolutions = Convolutions(graph.trace, graph.enclosing) if graph.trace is not None else None

    def at(self, position: int) -> list[CallRun]:
        """All runs from the call at this position on, the longest first; empty where no operator computes the call."""
        data = self._head(self.calls[position])
        if data is None:
            return []
        try:
            output = expression(msgspec.json.encode(data)).output.caller_shape
        except InputError:
            return []
        runs = [CallRun((self.calls[position],), data)]
        if data["op"] in _FUSING:
            runs += self._longer(runs[0], position, output)
        return runs[::-1]

    def _head(self, call: OperatorCall) -> dict[str, Any] | None:
        """The call alone as an operator, None where there is none or its tensors are not as kernels need them."""
        inputs = call.inputs
        if inputs is None or call.name not in _HEADS or not _is_supported(inputs):
            return None
        if call.name in _CONVOLUTIONS:
            assert self._convolutions is not None
            work = self._convolutions.describe(call.event)
            if isinstance(work, str) or work.assumed:
                return None
            data = work.parts[0].data
            return _biased(data, _CHANNELS[data["op"]], inputs.tensor(2))
        return _HEADS[call.name](call.name, inputs)

    def _longer(self, run: CallRun, position: int, output: Dims) -> Iterator[CallRun]:
        """The run with one more call at a time, as long as there is one that fits."""
        stage = 0
        for call in self.calls[position + 1 : position + 4]:
            if call.step != run.calls[0].step or call.inputs is None or not _is_supported(call.inputs):
                return
            follower = _follower(call, call.inputs, run, output)
            if follower is None or follower.stage <= stage:
                return
            stage = follower.stage
            data = {**run.data, "epilogue": follower.epilogue}
            run = CallRun((*run.calls, call), data)
            yield run


class _Follower(NamedTuple):
    """A call as part of an epilogue: its stage (batch norm 1, residual 2, activation 3), and the epilogue up to it."""

    stage: int
    epilogue: list[Any]


def _follower(call: OperatorCall, inputs: Inputs, run: CallRun, output: Dims) -> _Follower | None:
    """The call as the next part of a run's epilogue, None where it is none."""
    first, second = inputs.tensor(0), inputs.tensor(1)
    epilogue = list(run.data.get("epilogue", []))
    if first is None or not _same(first.dims, output):
        return None
    channels = _CHANNELS.get(run.data["op"])
    if call.name in _NORMS and channels is not None and inputs.value(5) is False:
        return _Follower(1, epilogue or [{"function": "bias_add", "axis": channels}])
    if call.name in _ADDS and second is not None and second.dims == first.dims and inputs.value(2) in (1, None):
        return _Follower(2, [*epilogue, {"function": "residual_add"}])
    if call.name in _ACTIVATIONS and _exact(call.name, inputs):
        return _Follower(3, [*epilogue, _ACTIVATIONS[call.name]])
    return None


def _same(dims: Dims, output: Dims) -> bool:
    """True if a tensor has the elements of an output in its order: leading dimensions may be cut otherwise."""
    elements = RecordedTensor(dims, "float").elements
    return elements == RecordedTensor(output, "float").elements and bool(dims) and dims[-1] == output[-1]


def _is_supported(inputs: Inputs) -> bool:
    """float32 and dense, in the order of dimensions or with the last two turned around."""
    tensors = [tensor for tensor in inputs.tensors if tensor is not None and tensor.dims]
    return bool(tensors) and all(DTYPES.get(tensor.dtype) == "float32" and is_dense(tensor) for tensor in tensors)


def is_dense(tensor: RecordedTensor, *, turned: bool = True) -> bool:
    """True if a tensor is row-major without holes, or with `turned` its last two dimensions are column-major.

    Traces without strides count as row-major.

    >>> is_dense(RecordedTensor((2, 3), "float", strides=(3, 1)))
    True
    >>> column_major = RecordedTensor((2, 3), "float", strides=(1, 2))
    >>> is_dense(column_major), is_dense(column_major, turned=False)
    (True, False)
    """
    if not tensor.strides:
        return True
    row_major = list(range(len(tensor.dims)))
    orders = [row_major]
    if turned and len(row_major) > 1:
        orders.append([*row_major[:-2], *row_major[-1:], *row_major[-2:-1]])
    return any(_is_packed(tensor, order) for order in orders)


def _is_packed(tensor: RecordedTensor, order: Sequence[int]) -> bool:
    """True if a tensor's elements are adjacent when its dimensions stand in this order, the last one fastest."""
    expected = 1
    for dimension in reversed(order):
        if tensor.dims[dimension] != 1 and tensor.strides[dimension] != expected:
            return False
        expected *= tensor.dims[dimension]
    return True


# Single calls


def _biased(data: dict[str, Any], axis: str, bias: RecordedTensor | None) -> dict[str, Any]:
    return data if bias is None else {**data, "epilogue": [{"function": "bias_add", "axis": axis}]}


def _product(name: str, inputs: Inputs) -> dict[str, Any] | None:
    work = describe(name, inputs)
    if isinstance(work, str):
        return None
    data = work.parts[0].data
    if name == "aten::addmm" and "epilogue" not in data:
        return None
    return data


def _elementwise(name: str, inputs: Inputs) -> dict[str, Any] | None:
    tensor = inputs.tensor(0)
    if tensor is None or not is_dense(tensor, turned=False) or not _exact(name, inputs) or not tensor.dims:
        return None
    return {"op": "elementwise", "function": _ACTIVATIONS[name], "shape": list(tensor.dims)}


def _exact(name: str, inputs: Inputs) -> bool:
    """True if an activation is exact: PyTorch has an approximate GELU besides the exact one."""
    approximate = inputs.values[1] if len(inputs.values) > 1 else ""
    return name != "aten::gelu" or approximate in ("", "none")


def _add(_: str, inputs: Inputs) -> dict[str, Any] | None:
    first, second = inputs.tensor(0), inputs.tensor(1)
    if (
        first is None
        or second is None
        or first.dims != second.dims
        or not first.dims
        or inputs.value(2) not in (1, None)
    ):
        return None
    if not (is_dense(first, turned=False) and is_dense(second, turned=False)):
        return None
    return {"op": "elementwise", "function": "add", "shape": list(first.dims)}


def _softmax(_: str, inputs: Inputs) -> dict[str, Any] | None:
    tensor, axis = inputs.tensor(0), inputs.value(1)
    if tensor is None or type(axis) is not int or not is_dense(tensor, turned=False):
        return None
    return {"op": "softmax", "shape": list(tensor.dims), "axis": axis}


def _layer_norm(_: str, inputs: Inputs) -> dict[str, Any] | None:
    tensor, gamma, beta, eps = inputs.tensor(0), inputs.tensor(2), inputs.tensor(3), inputs.value(4)
    if tensor is None or gamma is None or beta is None or not isinstance(eps, float):
        return None
    if gamma.dims != tensor.dims[-1:] or not is_dense(tensor, turned=False):
        return None
    return {"op": "layer_norm", "shape": list(tensor.dims), "axis": -1, "eps": eps}


#: Convolutions, and the axis of their output's channels.
_CHANNELS = {"conv2d": "f", "depthwise_conv2d": "c"}

_FUSING = (*_CHANNELS, "matmul", "batch_matmul")
#: How a call alone becomes an operator. In-place additions only follow others.
_HEADS: dict[str, Callable[[str, Inputs], dict[str, Any] | None]] = {
    **dict.fromkeys(_CONVOLUTIONS, lambda name, inputs: None),
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(_ACTIVATIONS, _elementwise),
    "aten::add": _add,
    "aten::softmax": _softmax,
    "aten::layer_norm": _layer_norm,
}
