"""Products of rows in groups, and products whose scales belong to blocks of eight-bit numbers, as PyTorch calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.calls.problem import Problem, Spec, Tensor, functional_module, torch_module
from hal.support.errors import InputError

EIGHT_BITS, SIXTEEN_BITS = "float8_e4m3fn", "bfloat16"
#: Precision of eight bits with scales of blocks.
BLOCKS = "fp8-block"
#: Numbers that have a scale in common: of a row of activations, and along either side of weights.
BLOCK = 128


def grouped_problem(suite: str, spec: Spec) -> Problem:
    """A product of every tile of rows with the matrix of its group, ``X[b,r,k] * W[G[b],n,k]``; tiles of a group follow
    each other. The library's call takes 16 bits alone."""
    n, k = spec["n"], spec["k"]
    if spec.get("distribution", "uniform") != "uniform":
        raise InputError(suite, "has groups by a power law, whose rows are not known", "give their sizes")
    groups, tiles, rows = _tiles(spec)
    extra = _scales(suite, spec, SIXTEEN_BITS)
    is_scaled = "scales" in extra
    shape: dict[str, tuple[int, ...]] = {"X": (tiles, rows, k), "W": (groups, n, k), "G": (tiles,)}
    if is_scaled:
        shape |= {"SX": (k // BLOCK, tiles, rows), "SW": (groups, n // BLOCK, k // BLOCK)}

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
    128 x 128 of W. PyTorch's call takes k in multiples of 512."""
    m, n, k = spec["m"], spec["n"], spec["k"]
    extra = _scales(suite, spec, "fp8-rowwise")
    shape = {"X": (m, k), "W": (n, k), "SX": (k // BLOCK, m), "SW": (n // BLOCK, k // BLOCK)}

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


def _tiles(spec: Spec) -> tuple[int, int, int]:
    """Groups, tiles of all of them, and rows of a tile; rows are divided evenly where sizes are not given.

    As :class:`sokoban.language.layers.GroupedMatmul` has them, which machines with a GPU cannot import.
    """
    rows, groups = spec.get("tile", BLOCK), len(spec["sizes"]) if "sizes" in spec else spec["groups"]
    sizes = spec.get("sizes") or [(spec["m"] + number) // groups for number in range(groups)]
    return groups, sum(-(-size // rows) for size in sizes), rows


def _scales(suite: str, spec: Spec, default: str) -> dict[str, Any]:
    """Types of a problem: of eight bits with scales of blocks, or of 16."""
    precision = spec.get("precision", default)
    if precision not in (BLOCKS, SIXTEEN_BITS):
        raise InputError(suite, f"has no PyTorch call for products of {precision}", "leave it out")
    if precision == SIXTEEN_BITS:
        return {"dtype": SIXTEEN_BITS}
    return {"dtype": EIGHT_BITS, "scales": ("SX", "SW"), "output_dtype": SIXTEEN_BITS}


def _scaled(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Both operands times their scales, in float64."""
    x, w, of_rows, of_blocks = (tensors[name] for name in ("X", "W", "SX", "SW"))
    x = x * of_rows.moveaxis(0, -1).repeat_interleave(BLOCK, -1)
    return x, w * of_blocks.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
