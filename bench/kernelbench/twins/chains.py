"""Level 2 of the twins: a product or convolution, and what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, empty, nn
from torch.nn import functional

from bench.kernelbench.twins.operators import Made

#: Shape of the rows of most products, the product, and that of the images that are made larger in three dimensions.
ROWS = (768, 6144)
VOLUMES = (96, 3, 12, 24, 28)


class Step(nn.Module):
    """A function of a tensor and of parameters of the given shapes."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.own = nn.ParameterList(empty(shape) for shape in shapes)

    def forward(self, tensor: Tensor) -> Tensor:
        return self.function(tensor, *self.own)


class ProductWithInput(nn.Module):
    """A product of rows, normalized as images of one point each, with a second input added and multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.product = _product()
        self.norm = nn.InstanceNorm2d(1)

    def forward(self, tensor: Tensor, other: Tensor) -> Tensor:
        tensor = self.norm(self.product(tensor)[:, None, None])[:, 0, 0]
        return (tensor + other) * other


class ConvolutionWithInput(nn.Module):
    """A transposed convolution with a second input added, times its hard swish."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.ConvTranspose3d(24, 48, 3, stride=2, padding=1, output_padding=1)

    def forward(self, tensor: Tensor, other: Tensor) -> Tensor:
        tensor = self.convolution(tensor) + other
        return tensor * functional.hardswish(tensor)


class ConvolutionWithResidual(nn.Module):
    """A convolution, a group norm of it, and the sum of the convolution and a function of the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 48, 3)
        self.norm = nn.GroupNorm(12, 48)

    def forward(self, tensor: Tensor) -> Tensor:
        tensor = self.convolution(tensor)
        tensor = tensor + functional.hardswish(torch.tanh(self.norm(tensor)))
        return torch.logsumexp(tensor, dim=1, keepdim=True)


def _problem(shape: tuple[int, ...], *steps: Any) -> Made:
    """Modules and functions, one after the other."""
    modules = [each if isinstance(each, nn.Module) else Step(each) for each in steps]
    return nn.Sequential(*modules), [empty(shape)]


def _product() -> nn.Module:
    return nn.Linear(6144, 5120)


def _doubled_image(*rest: Any) -> Made:
    return _problem((48, 48, 96, 112), nn.ConvTranspose2d(48, 40, 3, stride=2, padding=1, output_padding=1), *rest)


def _doubled_volume(*rest: Any) -> Made:
    return _problem(VOLUMES, nn.ConvTranspose3d(3, 16, 3, stride=2, padding=1), *rest)


def _swish(tensor: Tensor) -> Tensor:
    return tensor * torch.sigmoid(tensor)


def _twice(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: function(function(tensor))


def _log_sum(tensor: Tensor) -> Tensor:
    return torch.logsumexp(tensor, dim=1, keepdim=True)


def _largest_of_sums(tensor: Tensor) -> Tensor:
    return torch.max(tensor.sum(dim=1, keepdim=True), dim=1, keepdim=True)[0].mean(dim=1, keepdim=True)


def _hard_swish_of_three(tensor: Tensor) -> Tensor:
    return tensor * torch.sigmoid(tensor + 3) / 6


CHAINS: dict[str, Callable[[], Made]] = {
    "2_transposed_convolution_bias_clamp_scale_clamp_divide": lambda: _doubled_image(
        Step(lambda x, bias: ((x + bias).clamp(0.0, 1.0) * 2.0).clamp(0.0, 1.0) / 2.0, (40, 1, 1))
    ),
    "7_convolution_3d_relu_leaky_relu_gelu_sigmoid_bias": lambda: _problem(
        (48, 8, 24, 56, 56),
        nn.Conv3d(8, 24, 3),
        lambda x: functional.gelu(functional.leaky_relu(torch.relu(x), 0.01)),
        Step(lambda x, bias: torch.sigmoid(x) + bias, (24, 1, 1, 1)),
    ),
    "8_convolution_3d_divide_maximum_mean_bias_sum": lambda: _problem(
        (96, 8, 18, 56, 56),
        nn.Conv3d(8, 24, 3),
        lambda x: functional.adaptive_avg_pool3d(functional.max_pool3d(x / 2.0, 2), 1),
        Step(lambda x, bias: (x + bias).sum(dim=1), (24, 1, 1, 1)),
    ),
    "9_product_subtract_multiply_relu": lambda: _problem(ROWS, _product(), lambda x: torch.relu((x - 2.0) * 1.5)),
    "12_product_multiply_leaky_relu": lambda: _problem(ROWS, _product(), lambda x: functional.leaky_relu(x * 2.0, 0.1)),
    "16_transposed_convolution_mish_add_hardtanh_scale": lambda: _doubled_image(
        lambda x: functional.hardtanh(functional.mish(x) + 0.5, -1, 1) * 2.0
    ),
    "18_product_sum_maximum_mean_logsumexp_twice": lambda: _problem(
        ROWS, _product(), _largest_of_sums, _twice(_log_sum)
    ),
    "22_product_scale_residual_clamp_logsumexp_mish": lambda: _problem(
        ROWS,
        _product(),
        lambda x: x * 2.0,
        lambda x: _log_sum((x + x).clamp(-10.0, 10.0)),
        lambda x: x * functional.mish(x),
    ),
    "25_convolution_minimum_tanh_tanh": lambda: _problem(
        (48, 16, 224, 192), nn.Conv2d(16, 48, 3), lambda x: x.min(dim=1, keepdim=True)[0], _twice(torch.tanh)
    ),
    "26_transposed_convolution_3d_add_hardswish": lambda: (
        ConvolutionWithInput(),
        [empty(48, 24, 12, 16, 20), empty(48, 48, 24, 32, 40)],
    ),
    "28_product_instance_norm_sum_residual_multiply": lambda: (ProductWithInput(), [empty(ROWS), empty(768, 5120)]),
    "29_product_mish_mish": lambda: _problem(ROWS, _product(), _twice(functional.mish)),
    "30_product_group_norm_hardtanh": lambda: _problem(
        ROWS, _product(), nn.GroupNorm(20, 5120), nn.Hardtanh(-2.0, 2.0)
    ),
    "33_product_scale_batch_norm": lambda: _problem(ROWS, _product(), Step(torch.mul, (5120,)), nn.BatchNorm1d(5120)),
    "37_product_swish_sum_group_norm": lambda: _problem(
        (24_576, 1024), nn.Linear(1024, 3072), _swish, Step(torch.add, (3072,)), nn.GroupNorm(48, 3072)
    ),
    "42_transposed_convolution_mean_bias_logsumexp_sum_multiply": lambda: _problem(
        (12, 48, 320, 320),
        nn.ConvTranspose2d(48, 96, 3),
        lambda x: x.mean(dim=(2, 3), keepdim=True),
        Step(lambda x, bias: _log_sum(x + bias).sum(dim=(2, 3)) * 10.0, (96, 1, 1)),
    ),
    "44_transposed_convolution_multiply_mean_mean": lambda: _doubled_image(
        lambda x: x * 0.5, _twice(lambda x: x.mean(dim=[2, 3], keepdim=True))
    ),
    "45_product_sigmoid_product_logsumexp": lambda: _problem(
        (12_288, 1536), nn.Linear(1536, 3072), nn.Sigmoid(), nn.Linear(3072, 768), lambda x: torch.logsumexp(x, dim=1)
    ),
    "50_transposed_convolution_3d_scale_mean_bias_scale": lambda: _doubled_volume(
        Step(torch.mul, ()), nn.AvgPool3d(2), Step(torch.add, (16, 1, 1, 1)), Step(torch.mul, ())
    ),
    "54_convolution_multiply_leaky_relu_gelu": lambda: _problem(
        (48, 48, 192, 224), nn.Conv2d(48, 56, 3), Step(torch.mul, (56, 1, 1)), nn.LeakyReLU(), nn.GELU()
    ),
    "56_product_sigmoid_sum": lambda: _problem(
        (96, 12_288), nn.Linear(12_288, 10_240), lambda x: torch.sigmoid(x).sum(dim=1, keepdim=True)
    ),
    "58_transposed_convolution_3d_logsumexp_hardswish_subtract_clamp": lambda: _doubled_volume(
        _log_sum, _hard_swish_of_three, Step(torch.sub, (1, 1, 1, 1)), lambda x: torch.clamp(x, min=-1, max=1)
    ),
    "59_product_swish_scale": lambda: _problem((96, 12_288), nn.Linear(12_288, 10_240), lambda x: _swish(x) * 2.0),
    "60_transposed_convolution_3d_swish_group_norm_hardswish": lambda: _doubled_volume(
        _swish, nn.GroupNorm(4, 16), functional.hardswish
    ),
    "61_transposed_convolution_3d_relu_group_norm": lambda: _problem(
        (12, 48, 24, 24, 28), nn.ConvTranspose3d(48, 96, 3, bias=False), torch.relu, nn.GroupNorm(8, 96)
    ),
    "63_product_relu_divide": lambda: _problem(ROWS, _product(), lambda x: torch.relu(x) / 2.0),
    "64_product_logsumexp_leaky_relu_twice_gelu_twice": lambda: _problem(
        ROWS, _product(), _log_sum, _twice(functional.leaky_relu), _twice(functional.gelu)
    ),
    "65_convolution_mean_sigmoid_sum": lambda: _problem(
        (48, 8, 320, 320), nn.Conv2d(8, 48, 3), nn.AvgPool2d(4), lambda x: torch.sigmoid(x).sum(dim=[1, 2, 3])
    ),
    "70_product_sigmoid_scale_residual": lambda: _problem(ROWS, _product(), lambda x: torch.sigmoid(x) * 2.0 + x),
    "73_convolution_batch_norm_scale": lambda: _problem(
        (96, 8, 112, 128), nn.Conv2d(8, 48, 3), nn.BatchNorm2d(48), lambda x: x * 2.0
    ),
    "75_product_group_norm_minimum_bias": lambda: _problem(
        ROWS,
        _product(),
        nn.GroupNorm(320, 5120),
        lambda x: x.min(dim=1, keepdim=True)[0],
        Step(torch.add, (1, 5120, 1, 1)),
    ),
    "77_transposed_convolution_3d_scale_batch_norm_mean": lambda: _problem(
        (12, 48, 12, 28, 28),
        nn.ConvTranspose3d(48, 96, 5),
        lambda x: x * 2.0,
        nn.BatchNorm3d(96),
        nn.AdaptiveAvgPool3d(1),
    ),
    "78_transposed_convolution_3d_maximum_maximum_sum": lambda: _problem(
        (12, 24, 24, 24, 28),
        nn.ConvTranspose3d(24, 48, 5, stride=2, padding=2),
        nn.MaxPool3d(2),
        nn.MaxPool3d(3),
        lambda x: x.sum(dim=1, keepdim=True),
    ),
    "83_convolution_3d_group_norm_minimum_clamp_dropout": lambda: _problem(
        (96, 3, 16, 56, 56),
        nn.Conv3d(3, 16, 3),
        nn.GroupNorm(8, 16),
        lambda x: torch.clamp(torch.minimum(x, torch.tensor(0.0)), min=0.0, max=1.0),
        nn.Dropout(0.2),
    ),
    "84_product_batch_norm_scale_softmax": lambda: _problem(
        ROWS, _product(), nn.BatchNorm1d(5120), Step(torch.mul, (1,)), nn.Softmax(dim=1)
    ),
    "87_convolution_subtract_subtract_mish": lambda: _problem(
        (96, 8, 192, 224), nn.Conv2d(8, 48, 3), lambda x: functional.mish(x - 0.5 - 0.2)
    ),
    "88_product_group_norm_swish_multiply_swish": lambda: _problem(
        ROWS, _product(), nn.GroupNorm(160, 5120), _swish, Step(torch.mul, (5120,)), _swish
    ),
    "92_convolution_group_norm_tanh_hardswish_residual_logsumexp": lambda: (
        ConvolutionWithResidual(),
        [empty(96, 8, 112, 128)],
    ),
    "94_product_bias_hardtanh_mish_group_norm": lambda: _problem(
        ROWS, _product(), Step(torch.add, (5120,)), nn.Hardtanh(), nn.Mish(), nn.GroupNorm(160, 5120)
    ),
    "96_transposed_convolution_3d_multiply_maximum_mean_clamp": lambda: _doubled_volume(
        lambda x: x * 0.5, nn.MaxPool3d(2), nn.AdaptiveAvgPool3d(1), lambda x: torch.clamp(x, min=0.0, max=1.0)
    ),
    "97_product_batch_norm_bias_divide_swish": lambda: _problem(
        ROWS, _product(), nn.BatchNorm1d(5120), Step(torch.add, (1,)), lambda x: _swish(x / 1.5)
    ),
    "98_product_mean_gelu_scale_maximum": lambda: _problem(
        ROWS,
        _product(),
        lambda x: functional.avg_pool1d(x[:, None], 16)[:, 0],
        lambda x: torch.max(functional.gelu(x) * 2.0, dim=1)[0],
    ),
}
