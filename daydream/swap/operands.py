"""The tensors of a kernel by name, from the nodes of a model that it takes the place of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from daydream.operators.inputs import Dims
from daydream.swap.plan import Replacement


@dataclass(frozen=True)
class Operands:
    """Operands of a kernel's call.

    Attributes:
        values: name of each input -> a node, or a tensor that never changes.
        shapes: how the model shapes those that it may shape otherwise than the kernel.
        output: how it shapes the result, None where as the kernel does.
        dead: nodes that are not needed any more if they have no users left.
    """

    values: dict[str, Any]
    shapes: dict[str, Dims] = field(default_factory=dict)
    output: Dims | None = None
    dead: tuple[Any, ...] = ()


def operands_of(traced: Any, replacement: Replacement, nodes: Sequence[Any]) -> Operands | str:
    """The operands of a kernel, or in words why they cannot be had."""
    head, data = nodes[0], replacement.run.data
    module = traced.get_submodule(head.target) if head.op == "call_module" else None
    rule = _RULES.get(data["op"])
    if rule is None:
        return f"no rule for the operands of {data['op']}"
    operands = rule(replacement, head, module)
    if isinstance(operands, str):
        return operands
    if replacement.run.normed:
        norm = next(node for node, call in zip(nodes, replacement.run.calls, strict=True) if "norm" in call.name)
        if module is None or norm.op != "call_module":
            return "a batch norm that is no module"
        operands.values.update(_folded(module, traced.get_submodule(norm.target)))
    for node, before in zip(nodes[1:], nodes, strict=False):
        others = [arg for arg in node.args if hasattr(arg, "users") and arg is not before]
        if others:
            operands.values["residual"] = others[0]
            operands.shapes["residual"] = _shape(replacement, "add")
    return operands


def _shape(replacement: Replacement, word: str) -> Dims:
    """The first tensor's dimensions of the call of that name."""
    call = next(call for call in replacement.run.calls if word in call.name)
    assert call.inputs is not None
    tensor = call.inputs.tensor(0)
    assert tensor is not None
    return tensor.dims


def _with_bias(values: dict[str, Any], bias: Any) -> dict[str, Any]:
    return values if bias is None else {**values, "bias": _constant(bias)}


def _constant(tensor: Any) -> Any:
    return tensor.detach().contiguous() if hasattr(tensor, "detach") else tensor


def _convolution(replacement: Replacement, head: Any, module: Any) -> Operands | str:
    if module is None:
        return "a convolution that is no module"
    return Operands(_with_bias({"X": head.args[0], "W": _constant(module.weight)}, module.bias))


def _product(replacement: Replacement, head: Any, module: Any) -> Operands | str:
    call = replacement.run.calls[0]
    assert call.inputs is not None
    if module is not None:
        return _linear(replacement, head, module)
    if call.name == "aten::linear":
        return "a linear function that is no module"
    values: dict[str, Any] = {}
    operand_nodes = list(head.args)
    if call.name == "aten::addmm":
        values["bias"] = operand_nodes.pop(0)
    dead: tuple[Any, ...] = ()
    for name, key, value in zip("AB", ("transpose_a", "transpose_b"), operand_nodes, strict=False):
        turned = bool(replacement.run.data.get(key))
        values[name] = _turned(value) if turned else value
        if values[name] is None:
            return f"{name} is turned around, and not by a transposition"
        dead = (*dead, value) if turned else dead
    return Operands(values, dead=dead)


def _linear(replacement: Replacement, head: Any, module: Any) -> Operands:
    dims = _shape(replacement, "linear")
    values = _with_bias({"A": head.args[0], "B": _constant(module.weight)}, module.bias)
    return Operands(values, {"A": dims}, (*dims[:-1], module.out_features) if len(dims) != 2 else None)


def _turned(node: Any) -> Any:
    """The tensor whose last two dimensions a node exchanges; None where it does something else."""
    torch = import_module("torch")
    is_transpose = node.target == "transpose" or node.target is torch.transpose
    pairs = ((-2, -1), (-1, -2), (1, 2), (2, 1))
    return node.args[0] if is_transpose and tuple(node.args[1:]) in pairs else None


def _layer_norm(replacement: Replacement, head: Any, module: Any) -> Operands | str:
    if module is None:
        return "a layer norm that is no module"
    return Operands({"X": head.args[0], "gamma": _constant(module.weight), "beta": _constant(module.bias)})


def _elementwise(replacement: Replacement, head: Any, module: Any) -> Operands | str:
    nodes = [arg for arg in head.args if hasattr(arg, "users")]
    return Operands(dict(zip(("X", "X2"), nodes, strict=False)))


def _folded(convolution: Any, norm: Any) -> dict[str, Any]:
    """Weights and bias of a convolution with the batch norm behind it.

    gamma * (conv(x) + b - mean) / sqrt(variance + eps) + beta = conv(x; scale * W) + scale * (b - mean) + beta
    with scale = gamma / sqrt(variance + eps), per output channel.
    """
    scale = (norm.running_var.detach() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach()
    bias = -norm.running_mean.detach()
    if convolution.bias is not None:
        bias = bias + convolution.bias.detach()
    bias = scale * bias
    if norm.bias is not None:
        bias = bias + norm.bias.detach()
    return {"W": (convolution.weight.detach() * scale[:, None, None, None]).contiguous(), "bias": bias.contiguous()}


_RULES: dict[str, Callable[[Replacement, Any, Any], Operands | str]] = {
    "conv2d": _convolution,
    "depthwise_conv2d": _convolution,
    "matmul": _product,
    "batch_matmul": _product,
    "softmax": _elementwise,
    "layer_norm": _layer_norm,
    "elementwise": _elementwise,
}
