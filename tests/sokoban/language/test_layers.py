"""Layers as JSON data: what is read, and what is refused with the field and the remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hal.support.errors import InputError
from sokoban.language.layers import is_layer, layer_from_data
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate

SCALED = {"op": "scaled_matmul", "m": 64, "n": 128, "k": 256}
EXPERTS = {"op": "experts", "tokens": 64, "hidden": 128, "intermediate": 64, "experts": 8, "top_k": 2}
NET = {"op": "delta_net", "batch": 2, "tokens": 64, "key_heads": 4, "value_heads": 8}
MAMBA = {"op": "mamba2", "batch": 2, "tokens": 64, "heads": 8}
LATENT = {"op": "latent_attention", "batch": 2, "tokens": 64, "heads": 8}


def test_layers_have_names_of_their_sizes() -> None:
    assert layer_from_data(SCALED).stem == "scaled_matmul_64x128x256_fp8-rowwise"
    grouped = layer_from_data({"op": "grouped_matmul", "n": 4, "k": 8, "sizes": [1, 2]})
    assert grouped.stem == "grouped_matmul_3x4x8_2groups_bfloat16"
    divided = layer_from_data({**EXPERTS, "expert_parallel": 4, "tensor_parallel": 2})
    assert divided.stem == "experts_64x128x64_2of8_ep4_tp2_bfloat16"
    assert layer_from_data(NET).stem == "delta_net_2x64_4to8heads"
    scan = layer_from_data({**MAMBA, "tokens": 1, "part": "rule", "phase": "decode"})
    assert scan.stem == "mamba2_2x1_8heads64x128_rule_decode"
    narrow = layer_from_data({**LATENT, "context": 3, "cache": "fp8", "precision": "nvfp4"})
    assert narrow.stem == "latent_attention_2x64+3_8heads_nvfp4_fp8cache"


def test_other_values_are_no_layers() -> None:
    assert not is_layer({"op": "matmul"})
    assert not is_layer(["scaled_matmul"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({**SCALED, "m": 0}, "m: got 0, expected 1 or more; write a size"),
        ({**SCALED, "precision": "fp9"}, "precision: there is no 'fp9'; use one of fp8-tensorwise, fp8-rowwise"),
        ({**SCALED, "scale": 1}, "Object contains unknown field"),
        ({**EXPERTS, "top_k": 9}, "top_k: got 9 of 8 experts"),
        ({**EXPERTS, "expert_parallel": 16}, "expert_parallel: got 16 boards for 8 experts"),
        ({**EXPERTS, "distribution": "zipf"}, "distribution: there is no 'zipf'"),
        ({"op": "grouped_matmul", "n": 4, "k": 8}, "sizes: is missing; give the rows of every group"),
        ({"op": "grouped_matmul", "n": 4, "k": 8, "sizes": [0, 0]}, "sizes: got a negative one, or no rows"),
        ({"op": "grouped_matmul", "n": 4, "k": 8, "sizes": [1], "m": 1}, "sizes: stand next to m and groups"),
        ({**NET, "value_heads": 6}, "value_heads: got 6 for 4 heads of keys; every head of keys serves as many"),
        ({**NET, "phase": "decode"}, "tokens: got 64 while decoding; a sequence gets one token at a time: write 1"),
        ({**NET, "phase": "train"}, "phase: there is none called 'train'; use one of prefill and decode"),
        ({**MAMBA, "part": "conv"}, "part: there is none called 'conv'; use one of both, convolution and rule"),
        ({**MAMBA, "groups": 3}, "groups: got 3 for 8 heads; groups have as many heads each"),
        ({**LATENT, "context": -1}, "context: got -1, expected 0 or more; write a size"),
        ({**LATENT, "cache": "int8"}, "cache: there is no 'int8'; use one of bfloat16 and fp8"),
        ({**LATENT, "precision": "int4-weights"}, "precision: there is no 'int4-weights'; use one of bfloat16"),
    ],
)
def test_wrong_layers_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        layer_from_data(data)
    assert message in str(error.value)


GROUPED = {"op": "grouped_matmul", "n": 64, "k": 32, "sizes": [0, 1, 20, 16], "tile": 16}


def test_grouped_products_of_16_bits_are_kernels_of_ours() -> None:
    expr = operator_from_data(GROUPED)
    assert expr.name == "grouped_matmul_37x64x32_4groups_bfloat16_16rows"
    assert {tensor.name: (tensor.shape, tensor.dtype) for tensor in (*expr.inputs, expr.output)} == {
        "X": ((4, 16, 32), "bfloat16"), "W": ((4, 64, 32), "bfloat16"), "G": ((4,), "int32"),
        "Y": ((4, 16, 64), "bfloat16"),
    }  # fmt: skip


IN_BLOCKS = {**SCALED, "precision": "fp8-block"}


def test_products_with_scales_of_blocks_are_kernels_of_ours() -> None:
    """The caller's tensors are matrices: activations and weights of eight bits, and the scales of both."""
    expr = operator_from_data(IN_BLOCKS)
    assert expr.name == "scaled_matmul_64x128x256_fp8-block"
    assert {tensor.name: (tensor.caller_shape, tensor.dtype) for tensor in (*expr.inputs, expr.output)} == {
        "X": ((64, 256), "float8_e4m3fn"), "W": ((128, 256), "float8_e4m3fn"), "SX": ((2, 64), "float32"),
        "SW": ((1, 2), "float32"), "Y": ((64, 128), "bfloat16"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "dtype", "scales"),
    [
        ("fp8-rowwise", "float8_e4m3fn", (64, 128)),
        ("int8-rowwise", "int8", (64, 128)),
        ("fp8-tensorwise", "float8_e4m3fn", (1, 1)),
    ],
)
def test_products_with_scales_of_rows_are_kernels_of_ours(precision: str, dtype: str, scales: tuple[int, int]) -> None:
    expr = operator_from_data({**SCALED, "precision": precision})
    assert {tensor.name: (tensor.shape, tensor.dtype) for tensor in (*expr.inputs, expr.output)} == {
        "X": ((64, 256), dtype), "W": ((128, 256), dtype), "SX": (scales[:1], "float32"),
        "SW": (scales[1:], "float32"), "Y": ((64, 128), "bfloat16"),
    }  # fmt: skip
    inputs = random_inputs(expr, 1)
    expected = (inputs["X"] @ inputs["W"].T) * inputs["SX"][:, None] * inputs["SW"]
    np.testing.assert_allclose(evaluate(expr, inputs), expected, rtol=1e-9)


def test_grouped_products_have_scales_of_blocks_as_well() -> None:
    sizes = {"n": 256, "k": 384, "precision": "fp8-block"}
    expr = operator_from_data({**GROUPED, **sizes})
    assert {tensor.name: (tensor.caller_shape, tensor.dtype) for tensor in (*expr.inputs, expr.output)} == {
        "X": ((4, 16, 384), "float8_e4m3fn"), "W": ((4, 256, 384), "float8_e4m3fn"), "G": ((4,), "int32"),
        "SX": ((3, 4, 16), "float32"), "SW": ((4, 2, 3), "float32"), "Y": ((4, 16, 256), "bfloat16"),
    }  # fmt: skip
    with pytest.raises(InputError, match="n: 200 is no multiple of 128"):
        operator_from_data({**GROUPED, **sizes, "n": 200})


def test_a_product_in_blocks_is_that_of_what_its_numbers_stand_for() -> None:
    expr = operator_from_data(IN_BLOCKS)
    inputs = random_inputs(expr, 1)
    x, w = inputs["X"].reshape(64, 2, 128), inputs["W"].reshape(1, 128, 2, 128)
    meant = (x * inputs["SX"].T[:, :, None]).reshape(64, 256), (w * inputs["SW"][:, None, :, None]).reshape(128, 256)
    np.testing.assert_allclose(evaluate(expr, inputs).reshape(64, 128), meant[0] @ meant[1].T, rtol=1e-9)


@pytest.mark.parametrize(
    ("distribution", "rows", "tiles"),
    [("uniform", 64, 4), ("uniform", 66, 6), ("power_law_1.2", 64, 7), ("power_law_1.2", 2, 2)],
)
def test_rows_of_groups_take_whole_tiles(distribution: str, rows: int, tiles: int) -> None:
    data = {"op": "grouped_matmul", "n": 8, "k": 8, "m": rows, "groups": 4, "distribution": distribution, "tile": 16}
    assert operator_from_data(data).output.shape[0] == tiles


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {**SCALED, "precision": "mxfp8"},
            "precision: mxfp8 needs several kernels of a library: those of ours multiply fp8-rowwise, fp8-tensorwise,",
        ),
        ({**IN_BLOCKS, "n": 100}, "n: 100 is no multiple of 128, the elements that have a scale in common; pad the"),
        ({**IN_BLOCKS, "k": 130}, "k: 130 is no multiple of 128, the elements that have a scale in common; pad the"),
        ({**IN_BLOCKS, "m": {"up to": 64}}, "m: cannot be left to the launch; write the most"),
        (
            {"op": "experts", "tokens": 8, "hidden": 8, "intermediate": 8, "experts": 2, "top_k": 1},
            "op: 'experts' is a layer of several kernels of a library and no kernel of ours",
        ),
        (
            {**GROUPED, "precision": "nvfp4"},
            "precision: nvfp4 needs several kernels of a library: those of ours multiply b",
        ),
        ({**GROUPED, "n": {"up to": 64}}, "n: cannot be left to the launch; write the most"),
    ],
)
def test_other_layers_are_no_kernels_of_ours(data: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        operator_from_data(data)
    assert message in str(error.value)
