"""One pass over an ONNX graph: what its sizes tell is worked out on the CPU, the rest becomes steps on ``meta``."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from daydream.capture.onnx import layers as onnx_layers  # noqa: F401
from daydream.capture.onnx import operators as onnx_operators  # noqa: F401
from daydream.capture.onnx.file import VALUE_LIMIT, Node, OnnxFile, nodes_of
from daydream.capture.onnx.registry import OPERATORS, Call, Operator, numbers
from hal.support.errors import InputError

#: What PyTorch raises where an operator does not fit its inputs.
_FAILURES = (
    RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError, OverflowError,
    AssertionError, ZeroDivisionError, MemoryError,
)  # fmt: skip

#: Operators whose results differ from call to call.
_RANDOM = frozenset({"RandomNormalLike", "RandomUniformLike", "Dropout"})

_WEIGHT_NAMES = ("input", "weight", "bias", "running_mean", "running_var")


class Held(NamedTuple):
    """A parameter or buffer: the module that holds it, and its name there."""

    scope: str
    name: str


class Step(NamedTuple):
    """A node that runs.

    Attributes:
        operator: of the node.
        call: what it is told.
        scope: path of its module.
        slots: its inputs: the name of a value, a :class:`Held`, or a constant.
        outputs: names of its results.
    """

    operator: Operator
    call: Call
    scope: str
    slots: tuple[Any, ...]
    outputs: tuple[str, ...]

    def run(self, values: Sequence[Any], device: str, training: bool, state: Any) -> Any:
        """The results for values of the slots."""
        call = self.call
        call.device, call.training, call.state = device, training, state
        try:
            return self.operator.function(call, *values)
        finally:
            call.state = None

    def named(self, results: Any) -> dict[str, Any]:
        """Results by name, those that the node leaves out left out."""
        many = results if isinstance(results, list | tuple) else (results,)
        return {name: result for name, result in zip(self.outputs, many, strict=False) if name}


class Evaluation:
    """A graph worked out for sizes of its inputs.

    Attributes:
        steps: nodes that run, in order.
        outputs: where the graph's results are, as slots.
        held: parameters and buffers.
        reshapes: sizes of the input and of the result of each Reshape and Expand.
    """

    def __init__(
        self,
        file: OnnxFile,
        inputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        rebatched: tuple[Mapping[str, tuple[int, torch.Size]], float] | None = None,
    ) -> None:
        self._file = file
        self._rebatched = rebatched
        self.steps: list[Step] = []
        self.held: dict[Held, torch.Tensor] = {}
        self.reshapes: dict[str, tuple[int, torch.Size]] = {}
        # Values by ONNX's name: on the CPU where they are known.
        self._values: dict[str, torch.Tensor] = {}
        self._slots: dict[str, Any] = {}
        self._made_weights: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._as_numbers, self._as_weights, self._transposed = _uses(file.nodes)
        for index, (name, (shape, dtype)) in enumerate(inputs.items()):
            self._values[name] = self._sized(name, shape, dtype)
            self._slots[name] = f"input {index}"
        pending = deque(file.nodes)
        while pending:
            node = pending.popleft()
            if node.kind == "If":
                pending.extendleft(reversed(self._branch(node)))
            else:
                self._evaluate(node)
        for name in file.outputs:
            self._resolve(name, "", name, 0)
        self.outputs = [self._slot(name) for name in file.outputs]
        self._prune()

    # Values

    def _sized(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device="meta")
        except _FAILURES as error:
            raise self._error(name, f"has sizes that no tensor has: {_first_line(error)}") from None

    def _error(self, name: str, problem: str) -> InputError:
        return InputError(f"{self._file.path}: {name}", problem)

    def _resolve(self, name: str, scope: str, user: str, position: int, kind: str = "") -> torch.Tensor:
        """The value of an input; weights are made where they are used first."""
        value = self._values.get(name)
        if value is not None:
            return value
        if name in self._made_weights:
            shape, dtype = self._made_weights[name]
        elif name in self._file.weights:
            shape, dtype = self._file.sizes(name)
        else:
            raise self._error(user, f"reads {name}, which no node makes and the file does not hold")
        elements = math.prod(shape)
        is_number = name in self._as_numbers or not dtype.is_floating_point or elements == 1
        if name in self._file.weights and is_number and name not in self._as_weights and elements <= VALUE_LIMIT:
            self._values[name] = self._file.value(name)
            return self._values[name]
        if name in self._transposed:
            tensor = self._sized(name, shape[::-1], dtype).t()
        else:
            tensor = self._sized(name, shape, dtype)
        if dtype.is_floating_point and not (kind == "BatchNormalization" and position > 2):
            tensor = torch.nn.Parameter(tensor)
        self._values[name] = tensor
        self._hold(name, tensor, scope, _parameter_name(name, kind, position))
        return tensor

    def _hold(self, name: str, tensor: torch.Tensor, scope: str, title: str) -> None:
        number = 2
        place = Held(scope, title)
        while place in self.held:
            place, number = Held(scope, f"{title}_{number}"), number + 1
        self.held[place] = tensor
        self._slots[name] = place

    def _slot(self, name: str) -> Any:
        """Where a step takes a value from; constants become buffers."""
        if not name:
            return None
        if name not in self._slots:
            self._hold(name, self._values[name].to("meta"), "", _identifier(name))
        return self._slots[name]

    # Nodes

    def _branch(self, node: Node) -> tuple[Node, ...]:
        """The nodes of the branch that is taken."""
        condition = self._resolve(node.inputs[0], node.scope, node.name, 0)
        if condition.is_meta:
            raise self._error(node.name, "takes a branch that depends on data")
        graph = node.attributes["then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"]
        self._file.weights.update({weight.name: weight for weight in graph.initializer})
        ends = tuple(
            Node(kind="Identity", name=node.name, inputs=(each.name,), outputs=(name,), attributes={}, scope=node.scope)
            for each, name in zip(graph.output, node.outputs, strict=False)
        )
        inner = nodes_of(self._file.path, graph)
        for each in inner:
            if each.kind not in OPERATORS and each.kind not in ("Constant", "If"):
                raise self._error(each.name, f"is a {each.kind}, which is not supported")
        numbers_here, weights_here, _ = _uses(inner)
        self._as_numbers |= numbers_here
        self._as_weights |= weights_here
        return (*(replace(each, scope=node.scope) for each in inner), *ends)

    def _evaluate(self, node: Node) -> None:
        if node.kind == "Constant":
            self._values[node.outputs[0]] = self._constant(node)
            return
        operator = OPERATORS[node.kind]
        call = Call(kind=node.kind, attributes=node.attributes, version=self._file.version, results=len(node.outputs))
        if node.kind == "ConstantOfShape" and self._is_weight(node):
            sizes = tuple(int(size) for size in numbers(self._file.value(node.inputs[0])))
            self._made_weights[node.outputs[0]] = (sizes, torch.float32)
            return
        if node.kind == "BatchNormalization":
            node = self._with_own_statistics(node)
        inputs = [
            self._resolve(name, node.scope, node.name, position, node.kind) if name else None
            for position, name in enumerate(node.inputs)
        ]
        step = Step(operator, call, node.scope, (), node.outputs)
        try:
            self._run(node, step, inputs)
        except _FAILURES as error:
            if isinstance(error, InputError):
                raise
            problem = f"is a {node.kind} that cannot be worked out: {_first_line(error)}"
            if self._rebatched is not None:
                raise InputError(
                    f"{self._file.path}: {node.name}", problem, "export it with a first size that is left open"
                ) from None
            raise self._error(node.name, problem) from None

    def _run(self, node: Node, step: Step, inputs: list[torch.Tensor | None]) -> None:
        known = node.kind not in _RANDOM and all(each is None or not each.is_meta for each in inputs)
        arguments, slots = self._arguments(node, step.operator, inputs, self._target(node, inputs))
        # On no data first, which tells the sizes of the results before memory is taken for them.
        named = {} if known and node.kind == "NonZero" else step.named(step.run(arguments, "meta", False, None))
        if known and all(each.numel() <= VALUE_LIMIT for each in named.values()):
            named = step.named(step.run(inputs, "cpu", False, None))
        if not any(each.is_meta for each in named.values()):
            self._values.update(named)
            return
        if node.kind in ("Reshape", "Expand") and inputs[0] is not None:
            self.reshapes[node.outputs[0]] = (inputs[0].numel(), named[node.outputs[0]].shape)
        self._values.update(named)
        self._slots.update({name: name for name in named})
        taken = tuple(self._slot(slot) if isinstance(slot, str) else slot for slot in slots)
        self.steps.append(step._replace(slots=taken))

    def _arguments(
        self, node: Node, operator: Operator, inputs: list[torch.Tensor | None], target: torch.Tensor | None
    ) -> tuple[list[Any], list[Any]]:
        """Inputs on ``meta``, and where the step takes them from: numbers as numbers, constants as they are."""
        arguments: list[Any] = []
        slots: list[Any] = []
        ranks = [each.dim() for each in inputs if each is not None]
        others = any(each is not None and each.is_meta for each in inputs)
        for position, (name, value) in enumerate(zip(node.inputs, inputs, strict=True)):
            fixed: Any = None
            if value is not None and not value.is_meta:
                is_index = node.kind == "Gather" and position == 1 and value.dim() == 0
                if operator.reads_number(position) or is_index:
                    fixed = target if position == 1 and target is not None else value
                elif operator.scalars and others and value.numel() == 1 and value.dim() <= max(ranks):
                    fixed = value.item()
            if fixed is not None:
                arguments.append(fixed)
                slots.append(fixed)
                continue
            arguments.append(None if value is None else value.to("meta"))
            slots.append(None if value is None else name)
        return arguments, slots

    def _target(self, node: Node, inputs: list[torch.Tensor | None]) -> torch.Tensor | None:
        """The sizes of a Reshape in another batch than the file's: the first one grows with the batch."""
        if self._rebatched is None or node.kind != "Reshape" or len(inputs) < 2:
            return None
        before = self._rebatched[0].get(node.outputs[0])
        tensor, ratio = inputs[0], self._rebatched[1]
        if before is None or tensor is None or not tensor.is_meta or tensor.numel() == before[0]:
            return None
        return torch.tensor([round(before[1][0] * ratio), *before[1][1:]], dtype=torch.int64, device="cpu")

    def _with_own_statistics(self, node: Node) -> Node:
        """A norm with statistics under names of its own: files hold them once with weights of equal values."""
        inputs = list(node.inputs)
        for position, name in list(enumerate(inputs))[3:]:
            inputs[position] = f"{name} of {node.outputs[0]}"
            for weights in (self._file.weights, self._made_weights):
                if name in weights:
                    weights[inputs[position]] = weights[name]
                    self._as_weights.add(inputs[position])
                    break
            else:
                inputs[position] = name
        return replace(node, inputs=tuple(inputs))

    def _constant(self, node: Node) -> torch.Tensor:
        for key, value in node.attributes.items():
            if isinstance(value, torch.Tensor):
                return value
            if key in ("value_float", "value_floats"):
                return torch.tensor(value, dtype=torch.float32, device="cpu")
            if key in ("value_int", "value_ints"):
                return torch.tensor(value, dtype=torch.int64, device="cpu")
        raise self._error(node.name, "is a Constant that is no tensor of numbers")

    def _is_weight(self, node: Node) -> bool:
        """Whether a constant of a size that the file holds stands for a weight: onnx's own tests are without any."""
        name = node.inputs[0]
        value = node.attributes.get("value")
        return name in self._file.weights and (value is None or value.is_floating_point())

    def _prune(self) -> None:
        """Takes out steps whose results nobody reads, and what only they held."""
        needed = {slot for slot in self.outputs if slot is not None}
        kept = []
        for step in reversed(self.steps):
            if any(name in needed for name in step.outputs):
                kept.append(step)
                needed.update(slot for slot in step.slots if isinstance(slot, str | Held))
        self.steps = kept[::-1]
        self.held = {place: tensor for place, tensor in self.held.items() if place in needed}


def _uses(nodes: Sequence[Node]) -> tuple[set[str], set[str], set[str]]:
    """Names that are read as numbers, that are weights, and that are weights of products whose rows are inputs."""
    as_numbers: set[str] = set()
    as_weights: set[str] = set()
    transposed: set[str] = set()
    for node in nodes:
        operator = OPERATORS.get(node.kind)
        if operator is None:
            continue
        for position, name in enumerate(node.inputs):
            if operator.reads_number(position):
                as_numbers.add(name)
            if position in operator.weights:
                as_weights.add(name)
        if node.kind == "Linear" and not node.attributes.get("transB", 0):
            transposed.add(node.inputs[1])
    return as_numbers, as_weights, transposed


def _parameter_name(name: str, kind: str, position: int) -> str:
    last = name.rpartition(".")[2]
    if "." in name and last.isidentifier():
        return last
    is_layer = kind in OPERATORS and position in OPERATORS[kind].weights and position < len(_WEIGHT_NAMES)
    return _WEIGHT_NAMES[position] if is_layer else _identifier(name)


def _identifier(name: str) -> str:
    text = "".join(letter if letter.isalnum() or letter == "_" else "_" for letter in name).strip("_")
    return f"value_{text}" if not text or hasattr(torch.nn.Module, text) else text


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
