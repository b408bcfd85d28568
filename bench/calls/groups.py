"""Products of rows in groups, and products whose scales belong to blocks of eight-bit numbers, as PyTorch calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.calls.problem import Problem, Spec, Tensor, functional_module, torch_module
from hal.support.errors import InputError
from sokoban.language.operators import operator_from_data

EIGHT_BITS = "float8_e4m3fn"
#: Numbers that have a scale in common: of a row of activations, and along either side of weights.
BLOCK = 128


def grouped_problem(suite: str, spec: Spec) -> Problem:
    """A product of every tile of rows with the matrix of its group, ``X[b,r,k] * W[G[b],n,k]``; tiles of a group follow
    each other. The library's call takes 16 bits alone."""
    shape, extra = _inputs(spec)
    tiles, rows, k = shape["X"]
    groups, n, _ = shape["W"]
    is_scaled = "SX" in shape

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        x, w, group = tensors["X"], tensors["W"], tensors["G"].long()
        if x.dtype == getattr(torch_module(), EIGHT_BITS):
            raise InputError(suite, "has no PyTorch call for groups of rows with scales of blocks", "leave it out")
        if x.is_floating_point() and x.element_size() == 8:
            x, w = _scaled(tensors) if is_scaled else (x, w)
            stack = torch_module().stack
            return lambda: stack([tile @ w[place].T for tile, place in zip(x, group.tolist(), strict=True)])
        ends = (rows * group.bincount(minlength=groups)).cumsum(0).int()
        grouped_mm, of_rows, columns = functional_module().grouped_mm, x.reshape(-1, k), w.transpose(1, 2)
        return lambda: grouped_mm(of_rows, columns, offs=ends).view(-1, rows, n)

    return Problem(
        suite=suite, spec=spec, inputs=shape, output=(tiles, rows, n),
        leading={"X": 0, "W": None, "G": 0} | ({"SX": 1, "SW": None} if is_scaled else {}),
        flop=2.0 * tiles * rows * n * k, run=bind, numbers={"G": groups}, are_numbers_ordered=True, **extra,
    )  # fmt: skip


def scaled_problem(suite: str, spec: Spec) -> Problem:
    """A product of eight-bit numbers, ``X[m,k] * W[n,k]``, with a scale of every 128 numbers of a row of X and of every
    128 x 128 of W."""
    shape, extra = _inputs(spec)
    (m, k), (n, _) = shape["X"], shape["W"]

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        if tensors["X"].element_size() == 8:
            x, w = _scaled(tensors)
            return lambda: x @ w.T
        functional, torch = functional_module(), torch_module()
        kind, multiply = functional.ScalingType, functional.scaled_mm
        x, columns, of_rows, of_blocks = tensors["X"], tensors["W"].T, tensors["SX"].T, tensors["SW"].T
        return lambda: multiply(
            x, columns, of_rows, kind.BlockWise1x128, of_blocks, kind.BlockWise128x128, output_dtype=torch.bfloat16
        )

    return Problem(
        suite=suite, spec=spec, inputs=shape, output=(m, n), leading={"X": 0, "W": None, "SX": 1, "SW": None},
        flop=2.0 * m * n * k, run=bind, **extra,
    )  # fmt: skip


def _inputs(spec: Spec) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Shapes of a kernel's inputs, and their types."""
    expr = operator_from_data(dict(spec))
    shapes = {tensor.name: tensor.caller_shape for tensor in expr.inputs}
    dtypes = {tensor.name: tensor.dtype for tensor in expr.inputs}
    scales = tuple(name for name, dtype in dtypes.items() if dtype == "float32")
    return shapes, {"dtype": dtypes["X"], "scales": scales, "output_dtype": expr.output.dtype}


def _scaled(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Both operands times their scales, in float64."""
    x, w, of_rows, of_blocks = (tensors[name] for name in ("X", "W", "SX", "SW"))
    x = x * of_rows.moveaxis(0, -1).repeat_interleave(BLOCK, -1)
    return x, w * of_blocks.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
