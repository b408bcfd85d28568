"""Autocast emulated below autograd: on tensors without data PyTorch's own does nothing.

The dispatcher's lists (``aten/src/ATen/autocast_mode.h``) name operators that run in half precision and operators that
run in float32. PyTorch casts their arguments before autograd sees them; the emulation casts when the operator is
dispatched, so that autograd has saved the arguments as they were: where the backward pass uses them again they are
taken in the type that the forward pass had, without another cast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Operators that autocast runs in half precision, by ATen name.
LOWER = frozenset({
    "convolution", "_convolution", "addmm", "_addmm_activation", "addmv", "addr", "mm", "mv", "bmm", "baddbmm",
    "addbmm", "chain_matmul", "linalg_multi_dot", "prelu", "_prelu_kernel", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell", "_cudnn_rnn", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
})  # fmt: skip

#: Operators that autocast runs in float32.
SINGLE = frozenset({
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "native_layer_norm", "native_group_norm", "_fused_rms_norm", "linalg_vector_norm",
    "linalg_matrix_norm", "norm", "nll_loss_forward", "nll_loss2d_forward", "smooth_l1_loss", "huber_loss", "mse_loss",
    "multi_margin_loss", "multilabel_margin_loss_forward", "binary_cross_entropy_with_logits", "dist", "_pdist_forward",
    "_cdist_forward", "renorm", "logsumexp",
})  # fmt: skip

#: Operators that autocast gives the result type float32: they cast while they read.
SINGLE_RESULT = frozenset({"_softmax", "_log_softmax", "cumsum", "cumprod", "prod", "sum"})

_HALVES = (torch.float16, torch.bfloat16)


class Autocast:
    """Casts of the arguments of operators.

    Args:
        dtype: half precision of :data:`LOWER`.
        is_parameter: whether a tensor lies in a parameter's memory: its cast is kept until the step ends.
        cast: makes and records the cast of a tensor to a type.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        is_parameter: Callable[[torch.Tensor], bool],
        cast: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
    ) -> None:
        self.dtype = dtype
        self._is_parameter = is_parameter
        self._cast = cast
        self._known: dict[tuple[int, tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}

    def forward(self, stem: str, arguments: list[Any]) -> list[Any]:
        """The arguments of a forward operator in the types that autocast gives them."""
        if stem in LOWER:
            return [self._lowered(argument) for argument in arguments]
        if stem in SINGLE:
            return [self._single(argument) for argument in arguments]
        return arguments

    def backward(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments of a gradient's operator in one type: that of the gradient, which comes first as a rule.

        The forward pass has cast what was saved, so this takes no time.
        """
        tensors = [each for each in arguments if isinstance(each, torch.Tensor) and each.is_floating_point()]
        types = {tensor.dtype for tensor in tensors}
        if len(types) < 2 or not tensors:
            return list(arguments)
        narrow = next((dtype for dtype in types if dtype in _HALVES), None)
        target = tensors[0].dtype if narrow is None or tensors[0].dtype == torch.float32 else narrow
        return [
            torch.empty_strided(each.shape, each.stride(), dtype=target, device=each.device)
            if isinstance(each, torch.Tensor) and each.is_floating_point() and each.dtype != target
            else each
            for each in arguments
        ]

    def _lowered(self, argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return type(argument)(self._lowered(each) for each in argument)
        if not isinstance(argument, torch.Tensor) or argument.dtype != torch.float32:
            return argument
        if not self._is_parameter(argument):
            return self._cast(argument, self.dtype)
        key = (argument.untyped_storage()._cdata, tuple(argument.shape), tuple(argument.stride()))
        if key not in self._known:
            self._known[key] = self._cast(argument, self.dtype)
        return self._known[key]

    def _single(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor) and argument.dtype in _HALVES:
            return self._cast(argument, torch.float32)
        return argument
