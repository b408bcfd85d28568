"""Scratch memory of convolutions and recurrent layers, worked out by hand."""

from __future__ import annotations

import pytest

from daydream.memory.workspace import recurrent_bytes, winograd_bytes, workspaces
from daydream.operators.calls import KernelPrice, OperatorPrice
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.operators.work import Work, WorkPart
from tests.daydream.captures import operator

CONVOLUTION = {"op": "conv2d", "n": 1, "c": 64, "f": 64, "h": 8, "w": 8, "kh": 3, "kw": 3, "padding": 1}
BIAS = {"op": "elementwise", "function": "add", "shape": [4096], "scalar": True}


def price(kernel: str, *parts: dict[str, object]) -> OperatorPrice:
    work = Work(kind="convolution", parts=tuple(WorkPart(part) for part in parts), flops=0.0, bytes=0.0)
    return OperatorPrice(kernels=(KernelPrice(kernel, 1e-3, "compute", "convolutions"),), work=work)


def test_a_bias_needs_no_scratch_memory_of_its_own() -> None:
    prices = [OperatorPrice(), price("winograd_nonfused", CONVOLUTION, BIAS), price("implicit_gemm", CONVOLUTION, BIAS)]
    assert workspaces([operator("aten::convolution")] * 3, prices) == {1: winograd_bytes(CONVOLUTION)}
    # 36 numbers of 4 bytes for each of 4 tiles and 64 + 64 channels, and for each of 64 x 64 filters.
    assert winograd_bytes(CONVOLUTION) == 144 * (4 * 128 + 64 * 64)


@pytest.mark.parametrize(("gates", "printed"), [(4, 17_730_560), (3, 13_169_920)])
def test_recurrent_layers_need_what_was_printed(gates: int, printed: int) -> None:
    # PyTorch issue 2895: four layers of 320 units, 123 inputs; 100 sequences explain it, of LSTM and of GRU.
    def tensor(*dims: int) -> RecordedTensor:
        return RecordedTensor(dims, "float")

    rows = 320 * gates
    weights = [
        each for width in (123, 320, 320, 320) for each in (*(tensor(rows, w) for w in (width, 320)), tensor(rows))
    ]
    some = (tensor(250, 100, 123), None, None, tensor(0), tensor(4, 100, 320))
    inputs = Inputs(some, ("",) * 5, ((), tuple(weights), (), (), ()))
    assert recurrent_bytes(inputs) == printed
    assert workspaces([operator("aten::_cudnn_rnn", inputs=inputs)], [OperatorPrice()]) == {0: printed}
    assert recurrent_bytes(Inputs(some, ("",) * 5)) == 0
