"""Outputs against a float64 reference on the device, before any of their times counts."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

from bench.calls.operators import Problem

Tensor = Any

#: Largest |out - reference| / (|reference| + rms of the reference) by precision, as for bundles (docs/bundles.md). TF32
#: rounds operands to as many bits as float16 has. Products of eight bits are written in bfloat16.
TOLERANCE = {"float32": 1e-4, "tf32": 2e-2, "float16": 2e-2, "bfloat16": 1e-1, "float64": 1e-9,
             "float8_e4m3fn": 1e-1}  # fmt: skip
#: Bytes of float64 copies that one part of the reference may need.
PART_BYTES = 256 << 20


def random_inputs(problem: Problem, dtype: str, device: str, seed: int = 1) -> dict[str, Tensor]:
    """Normal random inputs; positive ones for functions that need them, and numbers of what there is."""
    torch = importlib.import_module("torch")
    generator = torch.Generator(device=device).manual_seed(seed)
    positive = problem.spec.get("function") in ("log", "sqrt", "rsqrt", "pow", "div")
    inputs = {}
    for name, shape in problem.inputs.items():
        if name in problem.numbers:
            options = {"generator": generator, "device": device, "dtype": torch.int32}
            drawn = torch.randint(0, problem.numbers[name], shape, **options)
            inputs[name] = drawn.sort().values if problem.are_numbers_ordered else drawn
            continue
        tensor = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        is_positive = positive or name in problem.scales
        own = getattr(torch, problem.dtype_of(name, dtype))
        inputs[name] = (tensor.abs() + 0.5 if is_positive else tensor).to(own)
    return inputs


def parts(problem: Problem, most_flop: float) -> list[tuple[int, int]]:
    """Rows of the output to compare: all of them in parts that fit into memory, or evenly spaced ones.

    The first and the last rows are always among them.
    """
    rows = problem.output[0]
    if problem.leading is None:
        return [(0, rows)]
    moving = sum(math.prod(shape) for name, shape in problem.inputs.items() if problem.leading[name] is not None)
    row_bytes = 8 * (moving + 2 * math.prod(problem.output)) / rows
    length = max(1, min(rows, int(PART_BYTES / row_bytes)))
    affordable = max(2, int(most_flop / max(problem.flop / rows, 1)))
    if affordable >= rows:
        return [(start, min(start + length, rows)) for start in range(0, rows, length)]
    length = min(length, max(1, affordable // 8))
    count = max(2, affordable // length)
    starts = sorted({round(i * (rows - length) / (count - 1)) for i in range(count)})
    return [(start, start + length) for start in starts]


def check(
    problem: Problem, inputs: Mapping[str, Tensor], out: Tensor, precision: str, most_flop: float, slack: float = 1.0
) -> dict[str, Any]:
    """Error of `out` to the operator evaluated in float64 on these inputs; `slack` multiplies the tolerance.

    Returns:
        ``relative_error`` (null where it is not finite), ``tolerance``, ``passed`` and ``share``, the part of the
        output that was compared.
    """
    torch = importlib.import_module("torch")
    if tuple(out.shape) != problem.output:
        raise ValueError(f"the output has shape {tuple(out.shape)}, not {problem.output}")
    spans = parts(problem, most_flop)
    fixed = {name: inputs[name] for name in inputs if problem.leading is None or problem.leading[name] is None}
    double = {name: tensor.double() for name, tensor in fixed.items()}
    worst = 0.0
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
        for start, stop in spans:
            taken = dict(inputs) if problem.leading is None else problem.part(inputs, start, stop)
            taken = {name: double[name] if name in double else tensor.double() for name, tensor in taken.items()}
            worst = max(worst, _distance(out[start:stop].double(), problem.bind(taken)()))
    tolerance = slack * TOLERANCE[precision]
    return {
        "relative_error": worst if math.isfinite(worst) else None,
        "tolerance": tolerance,
        "passed": worst <= tolerance,
        "share": min(1.0, sum(stop - start for start, stop in spans) / problem.output[0]),
    }


def _distance(output: Tensor, wanted: Tensor) -> float:
    scale = wanted.abs() + wanted.square().mean().sqrt()
    error = ((output - wanted).abs() / scale.clamp_min(1e-300)).max()
    return math.inf if math.isnan(float(error)) else float(error)
