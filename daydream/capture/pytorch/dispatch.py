"""Every operator of a step written down while it is dispatched, below autograd."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from daydream.capture.captured import CapturedOperator, CapturedStorage
from daydream.capture.pytorch.arguments import inputs_of_call, ordered_arguments, recorded_tensor, tensors_in, traits_of
from daydream.capture.pytorch.autocast import Autocast
from daydream.capture.pytorch.meta_kernels import SHAPE_FUNCTIONS
from daydream.graph.graph import Phase
from daydream.trace.trace import NONE


class Storages:
    """Numbers of the memory that tensors share; says which are no longer held. ``device`` is where the model lies."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.records: list[CapturedStorage] = []
        self._numbers: dict[int, int] = {}
        self._held: dict[int, Any] = {}
        self._freed: list[int] = []

    def number(self, tensor: torch.Tensor, kind: str = "step") -> tuple[int, bool]:
        """The number of a tensor's storage, and whether it is a new one."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self._numbers.get(address)
        if known is not None:
            return known, False
        number = len(self.records)
        # Optimizers count their steps on the host.
        place = kind if tensor.device.type == self._device else "host"
        self.records.append(CapturedStorage(storage.nbytes(), place))
        self._numbers[address] = number
        self._held[number] = weakref.ref(storage, lambda _: self._release(address, number))
        return number, True

    def _release(self, address: int, number: int) -> None:
        if self._numbers.get(address) == number:
            del self._numbers[address]
        self._held.pop(number, None)
        self._freed.append(number)

    def take_freed(self) -> tuple[int, ...]:
        """Storages released since the last call."""
        freed, self._freed = tuple(self._freed), []
        return freed


class OperatorRecorder(TorchDispatchMode):
    """Writes down every operator.

    Args:
        modules: of the model, numbered.
        autocast: paused while an operator runs.
        device: where the model's tensors are; what an operator makes elsewhere is work on the host.

    Attributes:
        operators: written down so far.
        storages: the memory that they read and write.
        phase: of the step, set by whoever runs it.
        recording: whether operators are written down.
    """

    def __init__(self, modules: Mapping[Any, int], autocast: Autocast, device: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[CapturedOperator] = []
        self.storages = Storages(device)
        self.phase = Phase.NONE
        self.recording = False
        self._modules = modules
        self._around: list[int] = []
        self._parameters: dict[int, str] = {}
        self._parameter_modules: dict[str, int] = {}
        # Sequence number of autograd's node -> the first operator dispatched after it was made.
        self._made_by: dict[int, int] = {}
        self._device = device
        self._autocast = autocast

    def watch_parameters(self, named: Mapping[str, tuple[torch.Tensor, int]]) -> None:
        """Names of the parameters' tensors, and the modules that hold them."""
        for name, (tensor, module) in named.items():
            self._parameters[self.storages.number(tensor, "parameter")[0]] = name
            self._parameter_modules[name] = module

    @contextmanager
    def inside_modules(self) -> Iterator[None]:
        """Follows which module runs."""
        before = torch.nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = torch.nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: Any, _: Any) -> None:
        around = self._around[-1] if self._around else NONE
        self._around.append(self._modules.get(module, around))

    def _leave(self, *_: Any) -> None:
        if self._around:
            self._around.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs and writes down one operator."""
        traits = traits_of(func)
        # What an operator calls inside is its own affair.
        with self._autocast.paused():
            result = SHAPE_FUNCTIONS.get(func, func)(*args, **(kwargs or {}))
        if self.recording and not traits.name.startswith("profiler::"):
            self._record(traits, ordered_arguments(traits, args, kwargs or {}), result)
        return result

    def finish(self) -> None:
        """What nobody holds now counts as freed by the last operator."""
        freed = self.storages.take_freed()
        if freed and self.operators:
            self.operators[-1] = replace(self.operators[-1], freed=self.operators[-1].freed + freed)

    def _in_backward(self) -> bool:
        """Whether a gradient is made right now, and not a checkpoint computed again.

        The backward pass runs without autocast's cache. Checkpoints bring back the state that the forward pass had, and
        of that state the cache is what can be seen in here.
        """
        return self.phase == Phase.BACKWARD and not torch.is_autocast_cache_enabled()

    # Records

    def _record(self, traits: Any, arguments: list[Any], result: Any) -> None:
        storages = self.storages
        self.finish()
        read = tuple(dict.fromkeys(storages.number(tensor)[0] for tensor in tensors_in(arguments)))
        written, made = [], []
        for tensor in tensors_in(result):
            number, is_new = storages.number(tensor)
            if is_new:
                made.append(number)
            if is_new or traits.launches:
                written.append(number)
        module, forward = self._owner()
        results = tuple(tensors_in(result))
        places = {tensor.device.type for tensor in results or tensors_in(arguments)}
        self.operators.append(
            CapturedOperator(
                name=traits.name,
                overload=traits.overload,
                inputs=inputs_of_call(arguments),
                outputs=tuple(recorded_tensor(tensor) for tensor in results),
                module=module,
                phase=self.phase,
                forward=forward,
                launches=traits.launches and (not places or self._device in places),
                read=read,
                written=tuple(dict.fromkeys(written)),
                made=tuple(made),
            )
        )

    def _owner(self) -> tuple[int, int]:
        """The module of the operator that is recorded next, and the operator whose gradient it makes."""
        if not self._in_backward():
            self._made_by.setdefault(torch.autograd._get_sequence_nr() - 1, len(self.operators))
            around = self._around[-1] if self._around else self._module_of(torch._C._current_autograd_node())
            return around, NONE
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return NONE, NONE
        variable = getattr(node, "variable", None)
        if variable is not None:
            name = self._parameters.get(self.storages.number(variable)[0])
            return (NONE, NONE) if name is None else (self._parameter_modules[name], NONE)
        forward = self._made_by.get(node._sequence_nr(), NONE)
        return self._module_of(node), forward

    def _module_of(self, node: Any) -> int:
        """The module whose operator a node of autograd's makes the gradient of."""
        forward = NONE if node is None else self._made_by.get(node._sequence_nr(), NONE)
        return NONE if forward == NONE else self.operators[forward].module
