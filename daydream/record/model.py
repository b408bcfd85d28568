"""Watching a model while it trains: the path of each module, and the order in which its gradients are complete."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

FIRST_BUCKET_BYTES = 1 << 20
#: Buckets of DistributedDataParallel by default: a small one first.
BUCKET_BYTES = 25 << 20

#: Modules that only hold another one: it is that one's paths which name parameters.
_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}


class ModelWatch:
    """Follows every model that is called, or one given, with PyTorch's global module hooks.

    Attributes:
        recording: whether the profiler records now, so that ranges are worth their time.
        batch: length of the first tensor that a model was called with, or None.
    """

    def __init__(self, torch: Any, *, annotate: bool, model: Any = None) -> None:
        self._torch = torch
        self._annotate = annotate
        self._model = model
        self.recording = False
        self.batch: int | None = None
        self._paths: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        self._parameters: dict[int, tuple[str, Any]] = {}
        self._replicated: list[Any] = []
        self._ready: dict[int, None] = {}
        self._order: dict[int, None] = {}
        self._module_hooks: list[Any] = []
        self._gradient_hooks: list[Any] = []
        self._threads = threading.local()

    def install(self) -> None:
        """Begin to watch."""
        modules = self._torch.nn.modules.module
        self._module_hooks = [
            modules.register_module_forward_pre_hook(self._before),
            modules.register_module_forward_hook(self._after, always_call=True),
        ]
        if self._model is not None:
            self._adopt(self._model)

    def remove(self) -> None:
        """Leave no hook behind."""
        for hook in (*self._module_hooks, *self._gradient_hooks):
            hook.remove()
        self._module_hooks, self._gradient_hooks = [], []

    def step(self) -> None:
        """A training step is complete: its gradients came in the order of every step."""
        if self._ready:
            for key in self._ready:
                self._order.setdefault(key)
            self._ready.clear()
            # They have served, and would slow down the backward passes that are recorded.
            for hook in self._gradient_hooks:
                hook.remove()
            self._gradient_hooks = []

    def gradients(self) -> list[dict[str, Any]]:
        """Every gradient that was computed, in the order in which they were complete.

        Each has `name`, `module`, `bytes`, `elements`, `dtype` and `order`, which counts from 0.
        """
        self.step()
        return [
            {
                "name": name,
                "module": name.rpartition(".")[0],
                "bytes": parameter.numel() * parameter.element_size(),
                "elements": parameter.numel(),
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "order": order,
            }
            for order, (name, parameter) in enumerate(self._parameters[key] for key in self._order)
        ]

    def buckets(self) -> list[list[str]]:
        """Names of the gradients that DistributedDataParallel sends together, in its order; empty without it."""
        return [bucket for replicated in self._replicated for bucket in self._buckets_of(replicated)]

    def _buckets_of(self, replicated: Any) -> list[list[str]]:
        ignored = set(getattr(replicated, "parameters_to_ignore", ()))
        parameters = [
            parameter
            for name, parameter in replicated.module.named_parameters()
            if parameter.requires_grad and name not in ignored
        ]
        names = [self._parameters[id(parameter)][0] for parameter in parameters if id(parameter) in self._parameters]
        if len(names) == len(parameters):
            buckets = _reported_buckets(replicated, names)
            if buckets:
                return buckets
        # The reducer's private interface is not what it was: its documented rule then.
        watched = {id(parameter): parameter for parameter in parameters if id(parameter) in self._parameters}
        order = [key for key in self._order if key in watched] or list(reversed(watched))
        cap = getattr(replicated, "bucket_bytes_cap", BUCKET_BYTES)
        return bucketed([(*self._parameters[key], watched[key].device) for key in order], cap)

    def _before(self, module: Any, inputs: Sequence[Any]) -> None:
        if self._torch.compiler.is_compiling():
            return
        stack = self._stack()
        if not stack and module not in self._paths and self._model is None:
            self._adopt(module)
        if self.batch is None and self._parameters:
            self.batch = self._length(inputs)
        path = self._paths.get(module, "")
        scope = None
        if self.recording and self._annotate and path:
            scope = self._torch.profiler.record_function(f"nn.Module: {path}")
            scope.__enter__()
        stack.append(scope)

    def _after(self, *_: Any) -> None:
        if self._torch.compiler.is_compiling():
            return
        # Empty where the watch began within this call.
        stack = self._stack()
        scope = stack.pop() if stack else None
        if scope is not None:
            scope.__exit__(None, None, None)

    def _stack(self) -> list[Any]:
        if not hasattr(self._threads, "stack"):
            self._threads.stack = []
        return self._threads.stack

    def _adopt(self, module: Any) -> None:
        """Learn the paths and parameters below a model; those of a second model begin with its class."""
        while type(module).__name__ in _WRAPPERS:
            if type(module).__name__ == "DistributedDataParallel":
                self._replicated.append(module)
            self._paths[module] = ""  # has a range of its own, or needs none
            module = getattr(module, _WRAPPERS[type(module).__name__])
        prefix = f"{self._unused(type(module).__name__)}." if self._parameters else ""
        for path, part in module.named_modules():
            self._paths.setdefault(part, prefix + path if path else type(module).__name__)
        for name, parameter in module.named_parameters():
            lazy = self._torch.nn.parameter.is_lazy(parameter)
            if parameter.requires_grad and parameter.is_leaf and not lazy and id(parameter) not in self._parameters:
                self._parameters[id(parameter)] = (prefix + name, parameter)
                self._gradient_hooks.append(parameter.register_post_accumulate_grad_hook(self._complete))

    def _unused(self, name: str) -> str:
        taken = {path.partition(".")[0] for path, _ in self._parameters.values()}
        numbered = (f"{name}_{number}" for number in range(1, len(taken) + 2))
        return next(candidate for candidate in (name, *numbered) if candidate not in taken)

    def _complete(self, parameter: Any) -> None:
        # With several backward passes in a step it is the last one that completes a gradient.
        self._ready.pop(id(parameter), None)
        self._ready[id(parameter)] = None

    def _length(self, inputs: Any) -> int | None:
        parts: Iterable[Any] = inputs.values() if isinstance(inputs, Mapping) else inputs
        for part in parts:
            if isinstance(part, self._torch.Tensor):
                if part.dim():
                    return int(part.shape[0])
            elif isinstance(part, Mapping | list | tuple):
                length = self._length(part)
                if length is not None:
                    return length
        return None


def _reported_buckets(replicated: Any, names: Sequence[str]) -> list[list[str]] | None:
    """The buckets that the reducer made after its first step, as its log tells them; None if it does not."""
    try:
        indices = replicated._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
        buckets = [[names[int(index)] for index in bucket.split()] for bucket in indices.split(",")]
    except Exception:  # whatever a private interface may come to raise
        return None
    return buckets if sorted(chain.from_iterable(buckets)) == sorted(names) else None


def bucketed(gradients: Sequence[tuple[str, Any, Any]], cap: int = BUCKET_BYTES) -> list[list[str]]:
    """The buckets of gradients (name, parameter, device) given in the order in which they are ready.

    A bucket holds one type on one device and is closed by the gradient that fills it: the first one at 1 MiB, the
    others at `cap` bytes.
    """
    limits: dict[Any, int] = {}
    filling: dict[Any, tuple[list[str], int]] = {}
    closed: list[list[str]] = []
    for name, parameter, device in gradients:
        kind = (parameter.dtype, device)
        names, filled = filling.pop(kind, ([], 0))
        names.append(name)
        filled += parameter.numel() * parameter.element_size()
        if filled >= limits.get(kind, min(FIRST_BUCKET_BYTES, cap)):
            closed.append(names)
            limits[kind] = cap
        else:
            filling[kind] = (names, filled)
    return closed + [names for names, _ in filling.values()]
