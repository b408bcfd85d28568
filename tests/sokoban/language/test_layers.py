"""Layers as JSON data: what is read, and what is refused with the field and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from hal.support.errors import InputError
from sokoban.language.layers import is_layer, layer_from_data
from sokoban.language.operators import operator_from_data

SCALED = {"op": "scaled_matmul", "m": 64, "n": 128, "k": 256}
EXPERTS = {"op": "experts", "tokens": 64, "hidden": 128, "intermediate": 64, "experts": 8, "top_k": 2}


def test_layers_have_names_of_their_sizes() -> None:
    assert layer_from_data(SCALED).stem == "scaled_matmul_64x128x256_fp8-rowwise"
    grouped = layer_from_data({"op": "grouped_matmul", "n": 4, "k": 8, "sizes": [1, 2]})
    assert grouped.stem == "grouped_matmul_3x4x8_2groups_bfloat16"
    divided = layer_from_data({**EXPERTS, "expert_parallel": 4, "tensor_parallel": 2})
    assert divided.stem == "experts_64x128x64_2of8_ep4_tp2_bfloat16"


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
    ],
)
def test_wrong_layers_are_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        layer_from_data(data)
    assert message in str(error.value)


def test_kernels_of_ours_are_no_layers() -> None:
    with pytest.raises(InputError, match="--implementation library prices it"):
        operator_from_data(SCALED)
