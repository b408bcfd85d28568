"""Scratch memory of convolutions, worked out by hand."""

from __future__ import annotations

from daydream.memory.workspace import winograd_bytes, workspaces
from daydream.operators.calls import KernelPrice, OperatorPrice
from daydream.operators.work import Work, WorkPart

CONVOLUTION = {"op": "conv2d", "n": 1, "c": 64, "f": 64, "h": 8, "w": 8, "kh": 3, "kw": 3, "padding": 1}
BIAS = {"op": "elementwise", "function": "add", "shape": [4096], "scalar": True}


def price(kernel: str, *parts: dict[str, object]) -> OperatorPrice:
    work = Work(kind="convolution", parts=tuple(WorkPart(part) for part in parts), flops=0.0, bytes=0.0)
    return OperatorPrice(kernels=(KernelPrice(kernel, 1e-3, "compute", "convolutions"),), work=work)


def test_a_bias_needs_no_scratch_memory_of_its_own() -> None:
    prices = [OperatorPrice(), price("winograd_nonfused", CONVOLUTION, BIAS), price("implicit_gemm", CONVOLUTION, BIAS)]
    assert workspaces(prices) == {1: winograd_bytes(CONVOLUTION)}
    # 36 numbers of 4 bytes for each of 4 tiles and 64 + 64 channels, and for each of 64 x 64 filters.
    assert winograd_bytes(CONVOLUTION) == 144 * (4 * 128 + 64 * 64)
