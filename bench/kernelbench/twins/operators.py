"""Level 1 of the twins: single operators of PyTorch. Sums over rows are long, images are many, as theirs are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, empty, nn
from torch.nn import functional

#: What a problem makes when it is asked for, on tensors without data: a module or function, and its inputs.
Made = tuple[Callable[..., Any], list[Tensor]]


def _reversed_sums(tensor: Tensor) -> Tensor:
    return tensor.flip(1).cumsum(1).flip(1)


def _sums_before(tensor: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(tensor[:, :1]), tensor[:, :-1]], dim=1).cumsum(1)


def _classes(rows: int, classes: int) -> list[Tensor]:
    return [empty(rows, classes), empty(rows, dtype=torch.int64)]


def _rows() -> list[Tensor]:
    return [empty(8192, 49152)]


def _image() -> list[Tensor]:
    return [empty(48, 64, 320, 352)]


OPERATORS: dict[str, Callable[[], Made]] = {
    "1_square_matrix_product": lambda: (torch.matmul, [empty(4608, 4608), empty(4608, 4608)]),
    "2_matrix_product": lambda: (torch.matmul, [empty(3072, 6144), empty(6144, 2560)]),
    "4_matrix_times_vector": lambda: (torch.matmul, [empty(2048, 1_048_576), empty(1_048_576, 1)]),
    "6_matrix_product_of_large_k": lambda: (torch.matmul, [empty(192, 655_360), empty(655_360, 320)]),
    "9_tall_and_skinny_product": lambda: (torch.matmul, [empty(24_576, 48), empty(48, 24_576)]),
    "10_tensor_of_3_by_matrix": lambda: (torch.matmul, [empty(24, 768, 1536), empty(1536, 640)]),
    "11_tensor_of_4_by_matrix": lambda: (
        lambda a, b: torch.einsum("bijl,lk->bijk", a, b),
        [empty(6, 192, 384, 320), empty(320, 640)],
    ),
    "13_product_of_symmetric_matrices": lambda: (torch.matmul, [empty(3584, 3584), empty(3584, 3584)]),
    "14_product_of_upper_triangular_matrices": lambda: (
        lambda a, b: torch.triu(a @ b),
        [empty(3584, 3584), empty(3584, 3584)],
    ),
    "17_matrix_product_with_transposed_b": lambda: (
        lambda a, b: a @ b.T,
        [empty(2304, 5120), empty(3840, 5120)],
    ),
    "19_relu": lambda: (torch.relu, _rows()),
    "20_leaky_relu": lambda: (lambda x: functional.leaky_relu(x, negative_slope=0.02), _rows()),
    "21_sigmoid": lambda: (torch.sigmoid, _rows()),
    "22_tanh": lambda: (torch.tanh, _rows()),
    "23_softmax": lambda: (lambda x: torch.softmax(x, dim=1), _rows()),
    "26_gelu": lambda: (functional.gelu, _rows()),
    "27_selu": lambda: (torch.selu, _rows()),
    "28_hard_sigmoid": lambda: (functional.hardsigmoid, _rows()),
    "30_softsign": lambda: (lambda x: x / (1 + x.abs()), _rows()),
    "33_batch_norm": lambda: (nn.BatchNorm2d(64), _image()),
    "37_frobenius_norm": lambda: (lambda x: x / torch.norm(x, p="fro"), _image()),
    "38_l1_norm": lambda: (lambda x: x / x.abs().mean(dim=1, keepdim=True), _rows()),
    "39_l2_norm": lambda: (lambda x: x / torch.norm(x, p=2, dim=1, keepdim=True), _rows()),
    "40_layer_norm": lambda: (nn.LayerNorm((64, 192, 224)), [empty(24, 64, 192, 224)]),
    "45_average_pooling_2d": lambda: (nn.AvgPool2d(9), [empty(12, 48, 2048, 1920)]),
    "46_average_pooling_3d": lambda: (nn.AvgPool3d(3, stride=2, padding=1), [empty(16, 32, 128, 136, 256)]),
    "47_sum_over_a_dimension": lambda: (lambda x: x.sum(dim=1, keepdim=True), [empty(96, 3840, 3000)]),
    "49_maximum_over_a_dimension": lambda: (lambda x: x.max(dim=1)[0], [empty(96, 3840, 3000)]),
    "50_convolution_2d_of_square_image": lambda: (
        nn.Conv2d(3, 96, 11, stride=4, padding=2),
        [empty(192, 3, 224, 224)],
    ),
    "51_place_of_maximum": lambda: (lambda x: torch.argmax(x, dim=1), [empty(96, 3840, 3000)]),
    "52_place_of_minimum": lambda: (lambda x: torch.argmin(x, dim=1), [empty(96, 3840, 3000)]),
    "54_convolution_3d_of_square_image": lambda: (
        nn.Conv3d(3, 48, 3, bias=False),
        [empty(12, 3, 56, 56, 56)],
    ),
    "57_transposed_convolution_2d": lambda: (
        nn.ConvTranspose2d(48, 64, 3, bias=False),
        [empty(6, 48, 640, 640)],
    ),
    "58_transposed_convolution_3d_of_oblong_window": lambda: (
        nn.ConvTranspose3d(24, 16, (3, 5, 7), bias=False),
        [empty(12, 24, 16, 24, 40)],
    ),
    "59_convolution_3d_of_flat_window": lambda: (
        nn.Conv3d(3, 64, (3, 3, 1), bias=False),
        [empty(12, 3, 224, 192, 12)],
    ),
    "62_convolution_2d_of_oblong_window": lambda: (
        nn.Conv2d(32, 96, (5, 9), bias=False),
        [empty(6, 32, 448, 448)],
    ),
    "63_convolution_2d_of_square_window": lambda: (
        nn.Conv2d(16, 96, 3, bias=False),
        [empty(12, 16, 768, 768)],
    ),
    "64_transposed_convolution_1d": lambda: (
        nn.ConvTranspose1d(96, 128, 3, bias=False),
        [empty(24, 96, 49_152)],
    ),
    "65_transposed_convolution_2d_of_oblong_window": lambda: (
        nn.ConvTranspose2d(48, 64, (3, 7), bias=False),
        [empty(6, 48, 448, 448)],
    ),
    "67_convolution_1d": lambda: (nn.Conv1d(48, 96, 3, bias=False), [empty(24, 48, 98_304)]),
    "70_transposed_convolution_3d_of_oblong_image": lambda: (
        nn.ConvTranspose3d(32, 24, 3, bias=False),
        [empty(6, 32, 64, 80, 48)],
    ),
    "71_transposed_convolution_2d_of_oblong_image": lambda: (
        nn.ConvTranspose2d(32, 24, 3, bias=False),
        [empty(6, 32, 448, 832)],
    ),
    "73_transposed_convolution_3d_strided_padded_grouped": lambda: (
        nn.ConvTranspose3d(32, 24, 3, stride=2, padding=1, groups=4, bias=False),
        [empty(4, 32, 24, 48, 80)],
    ),
    "74_transposed_convolution_1d_dilated": lambda: (
        nn.ConvTranspose1d(32, 48, 5, padding=0, dilation=3, bias=False),
        [empty(24, 32, 98_304)],
    ),
    "76_convolution_1d_dilated_strided": lambda: (
        nn.Conv1d(48, 96, 3, stride=3, dilation=4, bias=False),
        [empty(24, 48, 196_608)],
    ),
    "81_transposed_convolution_2d_strided_padded_dilated": lambda: (
        nn.ConvTranspose2d(24, 48, 3, stride=5, padding=1, dilation=2, bias=False),
        [empty(12, 24, 56, 112)],
    ),
    "82_depthwise_convolution_2d": lambda: (
        nn.Conv2d(96, 96, 3, groups=96, bias=False),
        [empty(12, 96, 448, 448)],
    ),
    "85_depthwise_convolution_2d_of_oblong_window": lambda: (
        nn.Conv2d(96, 96, (3, 7), groups=96, bias=False),
        [empty(24, 96, 112, 224)],
    ),
    "89_sums_of_all_before": lambda: (lambda x: x.cumsum(dim=1), [empty(24_576, 24_576)]),
    "90_products_of_all_before": lambda: (lambda x: x.cumprod(dim=1), [empty(24_576, 24_576)]),
    "91_sums_of_all_behind": lambda: (_reversed_sums, [empty(24_576, 24_576)]),
    "92_sums_of_all_before_without_own": lambda: (_sums_before, [empty(24_576, 24_576)]),
    "93_sums_of_all_before_under_mask": lambda: (
        lambda x, mask: (x * mask).cumsum(dim=1),
        [empty(24_576, 24_576), empty(24_576, 24_576, dtype=torch.bool)],
    ),
    "95_cross_entropy": lambda: (functional.cross_entropy, _classes(24_576, 3072)),
    "97_scaled_dot_product_attention": lambda: (
        functional.scaled_dot_product_attention,
        [empty(24, 24, 384, 768) for _ in range(3)],
    ),
    "100_hinge_loss": lambda: (
        lambda x, y: torch.clamp(1 - x * y, min=0).mean(),
        [empty(24_576, 24_576), empty(24_576)],
    ),
}
