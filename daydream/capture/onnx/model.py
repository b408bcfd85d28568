"""An ONNX file as a model that runs in PyTorch on tensors without data.

What depends on sizes and constants alone is worked out when the file is read, on the CPU: shapes, masks and positions
are no operators of a step. What is left runs node by node, each within a module by the name that the file gives it.
Weights lose their values, and those that an exporter has transposed lie as PyTorch's layers have them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from daydream.capture.onnx.evaluation import Evaluation, Held, Step
from daydream.capture.onnx.file import OnnxFile, read
from daydream.capture.pytorch.step import Subject
from hal.support.errors import InputError

#: Sizes of inputs that a file leaves open and nobody says.
_SEQUENCE, _IMAGE = 128, 224


class Module(torch.nn.Module):
    """A module of the file: runs the nodes that bear its name, one at a call."""

    def forward(self, step: Step, values: list[Any], training: bool, held: Callable[[Held], Any]) -> Any:
        """The results of one node; ``held`` gives the parameters and buffers among its values."""
        return step.run([held(value) if isinstance(value, Held) else value for value in values], "meta", training, self)


class OnnxModel(torch.nn.Module):
    """The graph of a file.

    Args:
        steps: its nodes in order, without those that were worked out beforehand.
        outputs: where its results are.
        held: parameters and buffers by the names of their modules and their own.
        dtype: floating-point type of most weights in the file.
    """

    def __init__(
        self, steps: list[Step], outputs: list[Any], held: Mapping[Held, torch.Tensor], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._dtype = dtype
        self._outputs = outputs
        self._modules_by_path: dict[str, Any] = {"": self}
        kinds: dict[str, set[str]] = {}
        for step in steps:
            kinds.setdefault(step.scope, set()).add(step.call.kind)
        for step in steps:
            self._module(step.scope, kinds)
            step.call.floating = self._floating
        for place, tensor in held.items():
            module = self._module(place.scope, kinds)
            if isinstance(tensor, torch.nn.Parameter):
                module.register_parameter(place.name, tensor)
            else:
                module.register_buffer(place.name, tensor)
        for scope, names in kinds.items():
            if "BatchNormalization" in names:
                count = torch.zeros((), dtype=torch.int64, device="meta")
                self._module(scope, kinds).register_buffer("num_batches_tracked", count)
        self._steps = list(zip(steps, _released(steps, outputs), strict=True))

    def _module(self, path: str, kinds: Mapping[str, set[str]]) -> Any:
        if path not in self._modules_by_path:
            around, _, name = path.rpartition(".")
            names = kinds.get(path, set())
            title = next(iter(names)) if len(names) == 1 else "Module"
            module = type(title, (Module,), {})()
            parent = self._module(around, kinds)
            # A module may bear the name of an attribute of PyTorch's.
            parent.add_module(f"{name}_" if hasattr(parent, name) else name, module)
            self._modules_by_path[path] = module
        return self._modules_by_path[path]

    def _floating(self, dtype: torch.dtype) -> torch.dtype:
        """The type that a type of the file has become."""
        if dtype != self._dtype:
            return dtype
        return next((each.dtype for each in self.parameters() if each.is_floating_point()), dtype)

    def forward(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """All results of the graph."""
        values: dict[str, Any] = {f"input {index}": tensor for index, tensor in enumerate(inputs)}
        del inputs
        for step, released in self._steps:
            arguments = [values[slot] if isinstance(slot, str) else slot for slot in step.slots]
            module = self._modules_by_path[step.scope]
            run = partial(Module.forward, self) if module is self else module
            results = run(step, arguments, self.training, self._held)
            values.update(step.named(results))
            del arguments, results
            for name in released:
                del values[name]
        return tuple(values[slot] if isinstance(slot, str) else self._held(slot) for slot in self._outputs)

    def _held(self, place: Held) -> Any:
        return getattr(self._modules_by_path[place.scope], place.name)


def _released(steps: list[Step], outputs: list[Any]) -> list[tuple[str, ...]]:
    """Values that nobody reads after each step."""
    last: dict[str, int] = {}
    for index, step in enumerate(steps):
        for name in [*step.outputs, *(slot for slot in step.slots if isinstance(slot, str))]:
            if name:
                last[name] = index
    kept = {slot for slot in outputs if isinstance(slot, str)}
    released: list[list[str]] = [[] for _ in steps]
    for name, index in last.items():
        if name not in kept:
            released[index].append(name)
    return [tuple(names) for names in released]


def subject_of(
    path: Path, batch: int | None = None, *, sequence: int | None = None, image: int | None = None
) -> Subject:
    """The model of an ONNX file with its inputs.

    Args:
        path: of the file.
        batch: samples, in place of the first size of the inputs; None takes what the file says, else 1.
        sequence: tokens where the file leaves them open, 128 by default.
        image: rows and columns where the file leaves them open, 224 by default.

    Raises:
        InputError: the file is no ONNX file, is damaged or lacks parts, has operators that are not supported, sizes
            that depend on data, or cannot take this batch.
    """
    file = read(Path(path))
    sizes = _Sizes(file, sequence, image)
    given = sizes.of_inputs(None)
    wanted = sizes.of_inputs(batch)
    with torch.device("cpu"), torch.no_grad():
        evaluation = Evaluation(file, given)
        if wanted != given:
            # A file of a fixed batch has it in the shapes that it gives; the first run tells where.
            fixed = sizes.fixed_batch if batch is not None else None
            evaluation = Evaluation(file, wanted, (evaluation.reshapes, batch / fixed) if fixed and batch else None)
    types = Counter(each.dtype for each in evaluation.held.values() if each.is_floating_point())
    dtype = types.most_common(1)[0][0] if types else torch.float32
    model = OnnxModel(evaluation.steps, evaluation.outputs, evaluation.held, dtype)
    inputs = [torch.empty(shape, dtype=kind, device="meta") for shape, kind in wanted.values()]
    first = next(iter(wanted.values()), ((), None))[0]
    return Subject(
        title=f"onnx:{file.path.name}",
        model=model,
        args=inputs,
        batch=first[0] if first else None,
        assumed=(*sizes.assumed, *_merged(file)),
    )


def _merged(file: OnnxFile) -> Iterator[str]:
    if any(node.kind == "Linear" for node in file.nodes):
        yield "products with weights in the file are linear layers, with the sum after them as their bias"


class _Sizes:
    """Sizes of the inputs; says what it supposed in ``assumed``."""

    def __init__(self, file: OnnxFile, sequence: int | None, image: int | None) -> None:
        self._file = file
        self._sequence = sequence
        self._image = image
        self.assumed: list[str] = []
        firsts = [sizes[0] for sizes, _ in file.inputs.values() if sizes]
        #: The batch that the file fixes, None where it is open.
        self.fixed_batch = firsts[0] if firsts and isinstance(firsts[0], int) else None
        self._name = firsts[0] if firsts else None

    def of_inputs(self, batch: int | None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            name: (tuple(self._size(name, axis, sizes, batch) for axis in range(len(sizes))), dtype)
            for name, (sizes, dtype) in self._file.inputs.items()
        }

    def _size(self, name: str, axis: int, sizes: tuple[int | str | None, ...], batch: int | None) -> int:
        size = sizes[axis]
        if isinstance(size, int):
            if size < 0:
                raise InputError(f"{self._file.path}: {name}", f"has the size {size}")
            return batch if axis == 0 and batch is not None and size == self.fixed_batch else size
        if axis == 0 or (size is not None and size == self._name):
            return batch or 1
        return self._supposed(name, axis, len(sizes), size or "")

    def _supposed(self, name: str, axis: int, rank: int, symbol: str) -> int:
        words = symbol.lower()
        if "past" in words:
            return self._noted(f"{symbol} is 0: no past", 0)
        if "seq" in words or "len" in words or "token" in words or (rank == 2 and not words):
            size = self._sequence or _SEQUENCE
            return self._noted(f"{size} tokens where the file leaves {symbol or 'their number'} open", size)
        if "height" in words or "width" in words or words in ("h", "w") or (rank == 4 and axis > 1 and not words):
            size = self._image or _IMAGE
            return self._noted(f"{size} rows and columns where the file leaves {symbol or 'them'} open", size)
        raise InputError(
            f"{self._file.path}: {name}", f"leaves its size {axis} ({symbol or 'no name'}) open", "export it with sizes"
        )

    def _noted(self, sentence: str, size: int) -> int:
        if sentence not in self.assumed:
            self.assumed.append(sentence)
        return size
