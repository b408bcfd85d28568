"""Operators of the suites as PyTorch calls: their inputs, the library's call, how to take a part of the output.

Only the named operators of the suites are known; their keys are those of docs/operators.md. ``bind`` does beforehand
what a network would do once (weights in the library's layout, padding that the library has no argument for), so that a
time is the library's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.calls.gradients import gradient_problem, seen_keys, seen_pairs
from bench.calls.groups import BLOCK, grouped_problem, scaled_problem
from bench.calls.problem import Problem as Problem
from bench.calls.problem import Spec, Tensor, epilogue_of, function_of, functional_module, torch_module
from bench.calls.windows import conv2d_problem, pair, pool_problem
from hal.support.errors import InputError

SUITES = Path(__file__).parents[1] / "suites"

#: Kinds for which torch.compile generates code of its own; the others it leaves to the library.
GENERATED = ("elementwise", "reduce", "softmax", "layer_norm", "transpose", "avg_pool2d", "max_pool2d")
CONTRACTIONS = ("matmul", "batch_matmul", "conv2d", "depthwise_conv2d")


def read_suite(name: str, *, small: bool = False) -> list[Problem]:
    """The operators of a suite; `small` cuts every size down to a few elements."""
    specs = json.loads((SUITES / f"{name}.json").read_bytes())
    return [problem(name, shrunk(spec) if small else spec) for spec in specs]


def problem(suite: str, spec: Spec) -> Problem:
    """One operator of a suite.

    Raises:
        InputError: no PyTorch call is written for its kind, its pages or its epilogue.
    """
    if spec.get("op") not in _KINDS:
        raise InputError(suite, f"has no PyTorch call for operator {spec.get('op', 'expr')!r}", "leave it out")
    if spec.get("pool"):
        raise InputError(suite, "has no PyTorch call for attention over pages of a pool", "leave it out")
    if spec.get("lengths"):
        raise InputError(suite, "has no PyTorch call for attention of sequences with lengths", "leave it out")
    return _KINDS[str(spec["op"])](suite, spec)


def by_turns(problems: Sequence[Problem]) -> list[Problem]:
    """Round-robin over kinds and suites, so that a harvest that is cut short has some of each."""
    groups: dict[tuple[str, str], list[Problem]] = {}
    for one in problems:
        groups.setdefault((one.suite, one.op), []).append(one)
    longest = max(map(len, groups.values()), default=0)
    return [group[i] for i in range(longest) for group in groups.values() if i < len(group)]


def shrunk(spec: Spec) -> dict[str, Any]:
    """The operator with every size cut down, windows and strides as they are."""
    small = dict(spec)
    if spec["op"] in ("grouped_matmul", "scaled_matmul"):
        sizes = {"m": 20, "groups": 3, "tile": 8, "n": BLOCK, "k": 4 * BLOCK}
        return {key: min(value, sizes[key]) if key in sizes else value for key, value in small.items()}
    for key, most in (("m", 7), ("n", 5), ("k", 3 if spec["op"] == "topk" else 9), ("b", 2), ("rows", 5),
                      ("columns", 4), ("count", 7)):  # fmt: skip
        if key in small:
            small[key] = min(small[key], most)
    for size, window in (("h", "kh"), ("w", "kw")):
        if size in small:
            dilation = pair(spec.get("dilation", 1))[size == "w"]
            small[size] = min(spec[size], dilation * (spec[window] - 1) + 4)
    if "groups" in spec:
        groups = small["groups"] = min(spec["groups"], 2)
        small["c"], small["f"] = 2 * groups, 3 * groups
    for key in ("c", "f"):
        small.update({key: min(small[key], 4)} if key in small and "groups" not in spec else {})
    # Slopes are of whole pieces of queries.
    for key, most in (("queries", 8 if spec.get("slopes") else 9), ("keys", 11), ("head_dim", 8), ("window", 3)):
        small.update({key: min(small[key], most)} if key in small else {})
    if "heads" in small:
        group = spec["heads"] // spec.get("kv_heads", spec["heads"])
        small["heads"] = 2 * group
        small.update({"kv_heads": 2} if "kv_heads" in small else {})
    if "shape" in small:
        small["shape"] = [min(extent, 6) for extent in small["shape"]]
    if "shapes" in small:
        small["shapes"] = [[min(extent, 6) for extent in shape] for shape in small["shapes"]]
    return small


# Products


def _matmul(suite: str, spec: Spec) -> Problem:
    m, n, k = spec["m"], spec["n"], spec["k"]
    ta, tb = bool(spec.get("transpose_a")), bool(spec.get("transpose_b"))
    batch = (spec["b"],) if spec["op"] == "batch_matmul" else ()
    first = len(batch)
    epilogue = epilogue_of(spec, ("b", "m", "n") if batch else ("m", "n"))
    output = (*batch, m, n)

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        a = tensors["A"].transpose(-1, -2) if ta else tensors["A"]
        b = tensors["B"].transpose(-1, -2) if tb else tensors["B"]
        matmul, addmm = torch_module().matmul, torch_module().addmm
        fused = epilogue.bias_first and epilogue.bias == 1 and not batch

        def run() -> Tensor:
            value = addmm(tensors["bias"], a, b) if fused else matmul(a, b)
            return epilogue.apply(value, tensors, skip_bias=fused)

        return run

    inputs = {"A": (*batch, *((k, m) if ta else (m, k))), "B": (*batch, *((n, k) if tb else (k, n)))}
    leading = {"A": 0 if first else int(ta), "B": 0 if first else None}
    return Problem(
        suite=suite,
        spec=spec,
        inputs=inputs | epilogue.inputs(output),
        output=output,
        leading=leading | epilogue.leading(),
        flop=2.0 * math.prod(output) * k,
        run=bind,
    )


# Attention


def _attention(suite: str, spec: Spec) -> Problem:
    b, heads, queries, width = spec["b"], spec["heads"], spec["queries"], spec["head_dim"]
    key_heads, keys = spec.get("kv_heads", heads), spec.get("keys", queries)
    values, window = spec.get("value_dim", width), spec.get("window", 0)
    is_causal, ahead = bool(spec.get("causal")), keys - queries
    # The library counts a causal mask from the first key, the operator from the last.
    needs_mask = bool(window) or (is_causal and ahead > 0 and queries > 1)

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        attend = functional_module().scaled_dot_product_attention
        mask = seen_keys(spec, queries, keys, tensors["Q"].device) if needs_mask else None
        options = {"attn_mask": mask, "is_causal": is_causal and queries > 1 and mask is None}
        options |= {"scale": spec["scale"]} if "scale" in spec else {}
        options |= {"enable_gqa": True} if key_heads != heads else {}
        return lambda: attend(tensors["Q"], tensors["K"], tensors["V"], **options)

    pairs = seen_pairs(spec, queries, keys)
    inputs = {
        "Q": (b, heads, queries, width), "K": (b, key_heads, keys, width), "V": (b, key_heads, keys, values)
    }  # fmt: skip
    return Problem(
        suite=suite,
        spec=spec,
        inputs=inputs,
        output=(b, heads, queries, values),
        leading=dict.fromkeys(inputs, 0),
        flop=2.0 * b * heads * pairs * (width + values),
        run=bind,
    )


# Tensors of any shape


def _elementwise(suite: str, spec: Spec) -> Problem:
    binary = spec["function"] in ("add", "sub", "mul", "div", "pow", "min", "max")
    count = 2 if binary and not spec.get("scalar") else 1
    shapes = [tuple(shape) for shape in spec.get("shapes") or [spec["shape"]] * count]
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    output = tuple(map(max, zip(*aligned, strict=True)))
    names = ("X", "X2")[:count]

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        function = function_of(spec["function"])
        operands = [tensors[name] for name in names]
        if spec.get("scalar"):
            operands.append(torch_module().tensor(spec.get("value", 2.0)).to(operands[0]))
        return lambda: function(*operands)

    inputs = dict(zip(names, shapes, strict=True))
    leading = {name: 0 if len(shape) == rank and shape[0] == output[0] else None for name, shape in inputs.items()}
    return Problem(
        suite=suite, spec=spec, inputs=inputs, output=output, leading=leading, flop=float(math.prod(output)), run=bind
    )


def _reduce(suite: str, spec: Spec) -> Problem:
    shape = tuple(spec["shape"])
    axes = tuple(sorted(axis % len(shape) for axis in spec["axes"]))
    remaining = [axis for axis in range(len(shape)) if axis not in axes]

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        names = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}
        function = getattr(torch_module(), names[spec["function"]])
        # Without a dimension kept, kernels of a bundle write a vector of one element.
        return lambda: function(tensors["X"], axes) if remaining else function(tensors["X"], axes).view(1)

    output = tuple(shape[axis] for axis in remaining) or (1,)
    leading = {"X": remaining[0]} if remaining else None
    return Problem(
        suite=suite,
        spec=spec,
        inputs={"X": shape},
        output=output,
        leading=leading,
        flop=float(math.prod(shape)),
        run=bind,
    )


def _rows(suite: str, spec: Spec) -> Problem:
    shape = tuple(spec["shape"])
    axis = spec.get("axis", -1) % len(shape)
    norm = spec["op"] == "layer_norm"

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        x = tensors["X"]
        if not norm:
            softmax = torch_module().softmax
            return lambda: softmax(x, axis)
        layer_norm, last = functional_module().layer_norm, x.movedim(axis, -1)
        gamma, beta, eps = tensors["gamma"], tensors["beta"], spec.get("eps", 1e-5)
        return lambda: layer_norm(last, (shape[axis],), gamma, beta, eps).movedim(-1, axis)

    line = (shape[axis],)
    inputs = {"X": shape, "gamma": line, "beta": line} if norm else {"X": shape}
    leading = {name: 0 if name == "X" else None for name in inputs} if axis != 0 else None
    return Problem(
        suite=suite, spec=spec, inputs=inputs, output=shape, leading=leading, flop=5.0 * math.prod(shape), run=bind
    )


def _transpose(suite: str, spec: Spec) -> Problem:
    shape, perm = tuple(spec["shape"]), tuple(spec["perm"])

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        view = tensors["X"].permute(perm)
        if view.is_contiguous():  # by chance; it has to be copied too
            return lambda: view.clone()
        return lambda: view.contiguous()

    output = tuple(shape[axis] for axis in perm)
    return Problem(
        suite=suite,
        spec=spec,
        inputs={"X": shape},
        output=output,
        leading={"X": perm[0]},
        flop=float(math.prod(output)),
        run=bind,
    )


# What goes along an axis in order


def _scan(suite: str, spec: Spec) -> Problem:
    shape = tuple(spec["shape"])
    axis = spec.get("axis", -1) % len(shape)
    if spec.get("exclusive"):
        raise InputError(suite, "has no PyTorch call for a scan that leaves its own element out", "leave it out")

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        torch, x, name = torch_module(), tensors["X"], spec["function"]
        scan = getattr(torch, f"cum{name}")

        def run(given: Tensor) -> Tensor:
            value = scan(given, axis)
            return value if name in ("sum", "prod") else value.values

        return (lambda: run(x.flip(axis)).flip(axis)) if spec.get("reverse") else (lambda: run(x))

    leading = {"X": 0} if axis != 0 else None
    flop = float(math.prod(shape))
    return Problem(suite=suite, spec=spec, inputs={"X": shape}, output=shape, leading=leading, flop=flop, run=bind)


def _topk(suite: str, spec: Spec) -> Problem:
    shape = tuple(spec["shape"])
    axis, k = spec.get("axis", -1) % len(shape), spec["k"]
    if spec.get("result", "values") != "values":
        raise InputError(suite, "has no PyTorch call that makes places of int32", "leave it out")

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        topk, largest = torch_module().topk, bool(spec.get("largest", True))
        return lambda: topk(tensors["X"], k, axis, largest).values

    output = (*shape[:axis], k, *shape[axis + 1 :])
    leading = {"X": 0} if axis != 0 else None
    flop = float(math.prod(shape))
    return Problem(suite=suite, spec=spec, inputs={"X": shape}, output=output, leading=leading, flop=flop, run=bind)


def _scatter(suite: str, spec: Spec) -> Problem:
    rows, columns, count = spec["rows"], spec["columns"], spec["count"]

    def bind(tensors: Mapping[str, Tensor]) -> Callable[[], Tensor]:
        x, places = tensors["X"], tensors["I"].long()
        return lambda: x.new_zeros(rows, columns).index_add_(0, places, x)

    return Problem(
        suite=suite, spec=spec, inputs={"I": (count,), "X": (count, columns)}, output=(rows, columns), leading=None,
        flop=float(count * columns), run=bind, numbers={"I": rows},
    )  # fmt: skip


_KINDS: Mapping[str, Callable[[str, Spec], Problem]] = {
    "matmul": _matmul, "batch_matmul": _matmul, "conv2d": conv2d_problem, "depthwise_conv2d": conv2d_problem,
    "avg_pool2d": pool_problem, "max_pool2d": pool_problem, "elementwise": _elementwise, "reduce": _reduce,
    "softmax": _rows, "layer_norm": _rows, "transpose": _transpose, "attention": _attention,
    "attention_gradient": gradient_problem, "scan": _scan, "topk": _topk, "scatter_add": _scatter,
    "grouped_matmul": grouped_problem, "scaled_matmul": scaled_problem,
}  # fmt: skip
