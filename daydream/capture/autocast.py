"""Autocast for tensors without data, for which PyTorch's own does nothing.

The lists are those of CUDA boards (``aten/src/ATen/autocast_mode.h``). The dispatcher has a key for autocast of every
kind of device, above autograd: kernels registered there under a key that nobody else uses cast the arguments as
PyTorch's do, so that casts are part of the graph and operators are composed of others after the casts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

#: Operators that autocast runs in half precision. The last two are cast where cuDNN's kernels are registered.
LOWER = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention", "_cudnn_rnn",
)  # fmt: skip

#: Operators that autocast runs in float32.
SINGLE = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip

#: Operators whose result autocast makes float32, where the call names no other type: they cast while they read.
SINGLE_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip

#: Operators whose arguments autocast brings to the widest type among them.
PROMOTED = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip

#: The dispatcher's key for autocast of devices that PyTorch does not know.
_KEY = "AutocastPrivateUse1"


class Autocast:
    """Casts of the arguments of operators, as within ``torch.autocast("cuda", dtype)``.

    Args:
        dtype: half precision of :data:`LOWER`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._cast_parameters: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._key = getattr(torch._C.DispatchKey, _KEY)
        self._keys = torch._C.DispatchKeySet(self._key)

    @contextmanager
    def registered(self) -> Iterator[None]:
        """The kernels stand in the dispatcher."""
        library, everything = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
        try:
            everything.fallback(torch.library.fallthrough_kernel, _KEY)
            for names, policy in (
                (LOWER, self._lower),
                (SINGLE, self._single),
                (SINGLE_RESULT, self._single_result),
                (PROMOTED, self._promote),
            ):
                for name in names:
                    library.impl(name, self._kernel(_overload(name), policy), _KEY)
            library.impl("norm.Scalar", self._norm, _KEY)
            library.impl("norm.ScalarOpt_dim", self._norm, _KEY)
            yield
        finally:
            library._destroy()
            everything._destroy()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within, operators are cast; the casts of parameters are kept until the end."""
        excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(self._key)
        # Modes for autocast are shut out until somebody turns them on.
        torch._C._dispatch_tls_set_dispatch_key_excluded(self._key, False)
        try:
            with torch._C._IncludeDispatchKeyGuard(self._key):
                yield
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(self._key, excluded)
            self._cast_parameters.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing is cast."""
        with torch._C._ExcludeDispatchKeyGuard(self._keys):
            yield

    def _kernel(self, operator: Any, policy: Callable[..., tuple[Sequence[Any], dict[str, Any]]]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self._keys):
                args, kwargs = policy(operator, args, kwargs)
                return operator(*args, **kwargs)

        return call

    def _lower(self, _: Any, args: Any, kwargs: Any) -> Any:
        return self._cast(args, self.dtype), self._cast(kwargs, self.dtype)

    def _single(self, _: Any, args: Any, kwargs: Any) -> Any:
        return self._cast(args, torch.float32), self._cast(kwargs, torch.float32)

    def _single_result(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if not _eligible(args[0]):
            return args, kwargs
        position = [argument.name for argument in operator._schema.arguments].index("dtype")
        if position < len(args):
            return [*args[:position], args[position] or torch.float32, *args[position + 1 :]], kwargs
        return args, {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}

    def _promote(self, _: Any, args: Any, kwargs: Any) -> Any:
        types = {tensor.dtype for tensor in _eligible_in([*args, *kwargs.values()])}
        if len(types) < 2:
            return args, kwargs
        return self._cast(args, torch.float32), self._cast(kwargs, torch.float32)

    def _norm(self, tensor: Any, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
        dtype = torch.float32 if _eligible(tensor) else tensor.dtype
        with torch._C._ExcludeDispatchKeyGuard(self._keys):
            if dim is None:
                return torch.ops.aten.norm.ScalarOpt_dtype(tensor, p, dtype=dtype)
            return torch.ops.aten.norm.ScalarOpt_dim_dtype(tensor, p, dim, keepdim, dtype=dtype)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._cast(each, dtype) for each in value)
        if isinstance(value, dict):
            return {name: self._cast(each, dtype) for name, each in value.items()}
        if not _eligible(value) or value.dtype == dtype:
            return value
        if dtype == torch.float32 or not value.requires_grad or not value.is_leaf or value._is_view():
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
