"""Autocast for tensors without data, for which PyTorch's own does nothing.

The lists are those of CUDA boards (:mod:`daydream.operators.autocast`). The dispatcher has a key for autocast of every
kind of device, above autograd: kernels registered there under a key that nobody else uses cast the arguments as
PyTorch's do, so that casts are part of the graph and operators are composed of others after the casts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.checkpoint

from daydream.operators.autocast import LOWER, PROMOTED, SINGLE, SINGLE_RESULT

#: The dispatcher's key for autocast of devices that PyTorch does not know.
_KEY = "AutocastPrivateUse1"


class Autocast:
    """What ``torch.autocast("cuda", ...)`` does, for tensors on ``meta``."""

    def __init__(self) -> None:
        self._cast_parameters: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._key = getattr(torch._C.DispatchKey, _KEY)
        self._keys = torch._C.DispatchKeySet(self._key)

    @contextmanager
    def effective(self) -> Iterator[None]:
        """Within, autocast for CUDA casts on ``meta``, also where a model or a checkpoint turns it on by itself."""
        library, everything = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(self._key)
        with ExitStack() as around:
            around.callback(library._destroy)
            around.callback(everything._destroy)
            everything.fallback(torch.library.fallthrough_kernel, _KEY)
            self._register(library)
            for owner, name, function in self._replaced():
                around.enter_context(patch.object(owner, name, function))
            # Keys of autocast are shut out until somebody turns them on.
            torch._C._dispatch_tls_set_dispatch_key_excluded(self._key, False)
            around.callback(torch._C._dispatch_tls_set_dispatch_key_excluded, self._key, excluded)
            with torch._C._IncludeDispatchKeyGuard(self._key):
                yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing is cast."""
        with torch._C._ExcludeDispatchKeyGuard(self._keys):
            yield

    def _register(self, library: Any) -> None:
        for names, policy in (
            (LOWER, self._lower),
            (SINGLE, self._single),
            (SINGLE_RESULT, self._single_result),
            (PROMOTED, self._promote),
        ):
            for name in names:
                library.impl(name, self._kernel(_overload(name), policy), _KEY)
        for name in ("norm.Scalar", "norm.ScalarOpt_dim"):
            library.impl(name, self._kernel(_overload(name), self._norm), _KEY)

    def _replaced(self) -> Sequence[tuple[Any, str, Callable[..., Any]]]:
        """What in PyTorch asks for a board, with what it would do beside one."""
        checkpoint: Any = torch.utils.checkpoint
        device_type, clear = checkpoint._infer_device_type, torch.clear_autocast_cache

        def cleared() -> None:
            self._cast_parameters.clear()
            clear()

        return (
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.cuda, "is_bf16_supported", lambda *_: True),
            (torch, "clear_autocast_cache", cleared),
            (checkpoint, "_infer_device_type", lambda *args: device_type(*args).replace("meta", "cuda")),
        )

    def _kernel(self, operator: Any, policy: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self._keys):
                if torch.is_autocast_enabled("cuda"):
                    operator_now, args, kwargs = policy(operator, args, kwargs)
                    return operator_now(*args, **kwargs)
                return operator(*args, **kwargs)

        return call

    def _lower(self, operator: Any, args: Any, kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype("cuda")
        return operator, self._cast(args, dtype), self._cast(kwargs, dtype)

    def _single(self, operator: Any, args: Any, kwargs: Any) -> Any:
        return operator, self._cast(args, torch.float32), self._cast(kwargs, torch.float32)

    def _single_result(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if not _eligible(args[0]):
            return operator, args, kwargs
        position = [argument.name for argument in operator._schema.arguments].index("dtype")
        if position < len(args):
            return operator, [*args[:position], args[position] or torch.float32, *args[position + 1 :]], kwargs
        return operator, args, {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}

    def _promote(self, operator: Any, args: Any, kwargs: Any) -> Any:
        types = {tensor.dtype for tensor in _eligible_in([*args, *kwargs.values()])}
        return self._single(operator, args, kwargs) if len(types) > 1 else (operator, args, kwargs)

    def _norm(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if not _eligible(args[0]):
            return operator, args, kwargs
        overload = "ScalarOpt_dtype" if operator._schema.overload_name == "Scalar" else "ScalarOpt_dim_dtype"
        wanted = getattr(torch.ops.aten.norm, overload)
        names = [argument.name for argument in operator._schema.arguments]
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        defaults = {"p": 2, "dim": [], "keepdim": False}
        ordered = [values.get(name, defaults.get(name)) for name in names]
        return wanted, ordered, {"dtype": torch.float32}

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._cast(each, dtype) for each in value)
        if isinstance(value, dict):
            return {name: self._cast(each, dtype) for name, each in value.items()}
        if not _eligible(value) or value.dtype == dtype or not value.numel():
            return value
        is_parameter = value.requires_grad and value.is_leaf and not value._is_view()
        if dtype == torch.float32 or not is_parameter or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        if id(value) not in self._cast_parameters:
            # Holding the parameter keeps another from getting its address.
            self._cast_parameters[id(value)] = value, value.to(dtype)
        return self._cast_parameters[id(value)][1]


def _overload(name: str) -> Any:
    stem, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, stem), overload or "default")


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _eligible_in(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _eligible_in(value)
        elif _eligible(value):
            yield value
