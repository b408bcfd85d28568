"""An ONNX file read without its weights: nodes with attributes, weights with sizes, and what they are called."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
import onnx.numpy_helper
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from daydream.capture.onnx.registry import OPERATORS, TYPES
from hal.support.errors import InputError

#: Bytes of the largest file: protobuf has no longer messages. Weights may lie in other files.
FILE_LIMIT = 2**31
#: Bytes of the largest file that ONNX's checker looks at; it copies the whole file.
_CHECKED_LIMIT = 2**28
#: Elements of the largest constant whose values are read.
VALUE_LIMIT = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of the graph.

    Attributes:
        kind: its operator.
        name: as the file has it, or that of its first result.
        inputs: names of its inputs, ``""`` where one is left out.
        outputs: names of its results.
        attributes: by name; strings decoded, tensors as PyTorch's on the CPU.
        scope: path of the module that it belongs to.
    """

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    scope: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFile:
    """The graph of a file.

    Attributes:
        path: of the file.
        version: of ONNX's operator set.
        nodes: in an order in which they can run.
        inputs: sizes (numbers, names, or None) and type by name, without weights.
        outputs: names of the results.
        weights: tensors with values that the file holds, by name; values are read by :meth:`value`.
    """

    path: Path
    version: int
    nodes: tuple[Node, ...]
    inputs: Mapping[str, tuple[tuple[int | str | None, ...], torch.dtype]]
    outputs: tuple[str, ...]
    weights: dict[str, Any]

    def value(self, name: str) -> torch.Tensor:
        """A weight's values on the CPU; InputError where they lie in a file that is missing."""
        return _tensor(self.weights[name], self.path, name)

    def sizes(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Sizes and type of a weight."""
        weight = self.weights[name]
        if weight.data_type not in TYPES:
            raise InputError(f"{self.path}: {name}", f"has the element type {weight.data_type}, which is not supported")
        return tuple(weight.dims), TYPES[weight.data_type]


def read(path: Path) -> OnnxFile:
    """The graph of an ONNX file; InputError where it is none, is damaged, or has operators that are not known."""
    model = _model(path)
    graph = model.graph
    weights = {weight.name: weight for weight in graph.initializer}
    version = max((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), default=1)
    inputs = {}
    for each in graph.input:
        if each.name in weights:
            continue
        kind = each.type.tensor_type
        if not each.type.HasField("tensor_type") or kind.elem_type not in TYPES:
            raise InputError(f"{path}: {each.name}", "is an input that is no tensor of numbers")
        sizes = tuple(
            axis.dim_value if axis.HasField("dim_value") else axis.dim_param or None for axis in kind.shape.dim
        )
        inputs[each.name] = (sizes, TYPES[kind.elem_type])
    nodes = nodes_of(path, graph)
    if not nodes:
        raise InputError(str(path), "is no ONNX model", "its graph has no nodes")
    _check_operators(path, nodes)
    nodes = _without_second_names(nodes, weights, {each.name for each in graph.output})
    nodes = _with_silu(nodes, {each.name for each in graph.output})
    nodes = _with_linear_layers(nodes, weights, {each.name for each in graph.output})
    return OnnxFile(
        path=path,
        version=version,
        nodes=tuple(replace(node, scope=scope_of(node, weights)) for node in nodes),
        inputs=inputs,
        outputs=tuple(each.name for each in graph.output),
        weights=weights,
    )


def _model(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size > FILE_LIMIT:
            raise InputError(
                str(path), f"has {size} bytes", "an ONNX file has 2 GiB at most; weights lie in files next to it"
            )
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror or error}") from None
    except (DecodeError, ValueError, RuntimeError):
        raise InputError(str(path), "is no ONNX file, or is cut off") from None
    if not model.graph.node and not model.opset_import:
        raise InputError(str(path), "is no ONNX file, or is cut off")
    outside = any(each.data_location == onnx.TensorProto.EXTERNAL for each in model.graph.initializer)
    custom = {node.domain for node in model.graph.node} - {"", "ai.onnx"} - {each.domain for each in model.functions}
    try:
        if size <= _CHECKED_LIMIT and not outside and not custom:
            onnx.checker.check_model(model)
        return onnx.inliner.inline_local_functions(model) if model.functions else model
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise InputError(str(path), f"is damaged: {str(error).strip().splitlines()[0]}") from None


def nodes_of(path: Path, graph: Any) -> tuple[Node, ...]:
    """The nodes of a graph, or of a branch."""
    return tuple(_node(path, node) for node in graph.node)


def _node(path: Path, node: Any) -> Node:
    name = node.name or next((each for each in node.output if each), node.op_type)
    attributes = {}
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        elif isinstance(value, onnx.TensorProto):
            value = _tensor(value, path, name)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            value = [each.decode("utf-8", "replace") if isinstance(each, bytes) else each for each in value]
        attributes[attribute.name] = value
    scopes = next((each.value for each in node.metadata_props if each.key == "pkg.torch.onnx.name_scopes"), "")
    return Node(
        kind=node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}:{node.op_type}",
        name=name,
        inputs=tuple(node.input),
        outputs=tuple(node.output),
        attributes=attributes,
        scope=scopes,
    )


def _tensor(proto: Any, path: Path, name: str) -> torch.Tensor:
    try:
        values = onnx.numpy_helper.to_array(proto, str(path.parent))
        if values.dtype.kind not in "fiub" or values.dtype.name == "bfloat16":  # NumPy's of other libraries
            return torch.from_numpy(values.astype("float32")).to(TYPES[proto.data_type])
        return torch.from_numpy(values.copy())
    except (OSError, onnx.checker.ValidationError):
        raise InputError(
            f"{path}: {name}", "has its values in a file that is missing", "put it next to the model"
        ) from None
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise InputError(f"{path}: {name}", f"has no readable values: {error}") from None


def _check_operators(path: Path, nodes: Sequence[Node]) -> None:
    unknown = Counter(node.kind for node in nodes if node.kind not in OPERATORS and node.kind not in ("Constant", "If"))
    if not unknown:
        return
    first = next(node for node in nodes if node.kind in unknown)
    others = sorted(set(unknown) - {first.kind})
    also = f" (and {', '.join(others)})" if others else ""
    supported = " ".join(sorted(set(OPERATORS) - {"Linear", "Silu"}))
    raise InputError(
        f"{path}: {first.name}", f"is a {first.kind}{also}, which is not supported",
        f"supported: {len(OPERATORS)} operators, {supported}",
    )  # fmt: skip


# Second names, and layers that exporters take apart


def _without_second_names(nodes: Sequence[Node], weights: Mapping[str, Any], results: set[str]) -> tuple[Node, ...]:
    """The nodes without those that only give a weight another name: exporters write weights of equal values once."""
    first: dict[str, str] = {}
    others = []
    for node in nodes:
        inputs = tuple(first.get(name, name) for name in node.inputs)
        if node.kind == "Identity" and inputs[0] in weights and node.outputs[0] not in results:
            first[node.outputs[0]] = inputs[0]
        else:
            others.append(replace(node, inputs=inputs) if inputs != node.inputs else node)
    return tuple(others)


def _with_silu(nodes: Sequence[Node], results: set[str]) -> tuple[Node, ...]:
    """The nodes with products of a tensor and its sigmoid as SiLU, which exporters take apart."""
    users = Counter(name for node in nodes for name in node.inputs)
    sigmoids = {
        node.outputs[0]: node for node in nodes
        if node.kind == "Sigmoid" and users[node.outputs[0]] == 1 and node.outputs[0] not in results
    }  # fmt: skip
    others: list[Node] = []
    gone = set()
    for node in nodes:
        factor = next((name for name in node.inputs if name in sigmoids), "") if node.kind == "Mul" else ""
        if factor and sigmoids[factor].inputs[0] in node.inputs:
            others.append(replace(node, kind="Silu", inputs=sigmoids[factor].inputs))
            gone.add(factor)
        else:
            others.append(node)
    return tuple(node for node in others if node.kind != "Sigmoid" or node.outputs[0] not in gone)


def _with_linear_layers(nodes: Sequence[Node], weights: Mapping[str, Any], results: set[str]) -> tuple[Node, ...]:
    """The nodes with products of weights, and biases added to them, as linear layers.

    Exporters write PyTorch's linear layer on three axes as MatMul and Add, on two as Gemm.
    """
    users: dict[str, list[int]] = {}
    for index, node in enumerate(nodes):
        for name in node.inputs:
            users.setdefault(name, []).append(index)
    merged: dict[int, Node] = {}
    gone: set[int] = set()
    for index, node in enumerate(nodes):
        if node.kind == "Gemm" and _is_plain_gemm(node):
            merged[index] = replace(node, kind="Linear")
        if node.kind != "MatMul" or not _is_matrix(weights, node.inputs[1]):
            continue
        layer = replace(node, kind="Linear", attributes={})
        after = users.get(node.outputs[0], [])
        add = nodes[after[0]] if len(after) == 1 and node.outputs[0] not in results else None
        if add is not None and add.kind == "Add":
            bias = next((name for name in add.inputs if name != node.outputs[0]), "")
            if _is_bias(weights, bias, weights[node.inputs[1]].dims[1]):
                # The sum is made where the product was: both its inputs are there already.
                layer = replace(layer, inputs=(*node.inputs, bias), outputs=add.outputs)
                gone.add(after[0])
        merged[index] = layer
    return tuple(merged.get(index, node) for index, node in enumerate(nodes) if index not in gone)


def _is_plain_gemm(node: Node) -> bool:
    attributes = node.attributes
    scales = (attributes.get("alpha", 1.0), attributes.get("beta", 1.0))
    return scales == (1.0, 1.0) and not attributes.get("transA", 0)


def _is_matrix(weights: Mapping[str, Any], name: str) -> bool:
    return name in weights and len(weights[name].dims) == 2


def _is_bias(weights: Mapping[str, Any], name: str, size: int) -> bool:
    return name in weights and list(weights[name].dims) == [size]


# Names

_WEIGHT_NAME = re.compile(r"[._/](?:w|b|s|bias|weight|gamma|beta|scale|mean|var|kernel|rm|riv)(?:_\d+)?$")


@cache
def _scopes_of(text: str) -> str:
    """The module that PyTorch's exporter notes at a node, as Python's list of strings."""
    try:
        scopes = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    names = [each for each in scopes[:-1] if isinstance(each, str) and each] if isinstance(scopes, list) else []
    return names[-1] if names else ""


def scope_of(node: Node, weights: Mapping[str, Any]) -> str:
    """Path of the module that a node belongs to.

    PyTorch's exporters write ``/layer1/layer1.0/conv1/Conv``, or note the module at the node; in other files the
    names of the weights tell it, or the node stands for itself.

    >>> node = Node(kind="Conv", name="/f/f.0/conv/Conv", inputs=("x", "w"), outputs=("y",), attributes={})
    >>> scope_of(node, {}), scope_of(replace(node, name="n1", inputs=("x", "conv1_w_0")), {"conv1_w_0": None})
    ('f.0.conv', 'conv1')
    """
    if node.scope:
        return _scopes_of(node.scope)
    parts = [part for part in node.name.split("/") if part]
    if node.name.startswith("/"):
        path: list[str] = []
        for part in parts[:-1]:
            # "/f/f.0" writes the container's name twice.
            path = [*path[:-1], part] if path and part.startswith(path[-1] + ".") else [*path, part]
        return ".".join(path)
    for name in node.inputs[1:]:
        match = _WEIGHT_NAME.search(name)
        if match is not None:
            return name[: match.start()].strip("/.").replace("/", ".")
    return ".".join(part.strip(".") for part in parts) or node.kind
