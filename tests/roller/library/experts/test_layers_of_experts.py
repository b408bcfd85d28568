"""Layers of experts: weights of active experts, imbalance, parallelism, and the kernels that boards take."""

from __future__ import annotations

from typing import Any

import pytest

from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.library import library_time, library_times
from roller.library.experts.layer import family_of

H100, B200, A100 = load_device("h100"), load_device("b200"), load_device("a100-sxm-80gb")
LAYER: dict[str, Any] = {
    "op": "experts", "tokens": 4096, "hidden": 4096, "intermediate": 1024, "experts": 128, "top_k": 8,
}  # fmt: skip


def seconds(**changes: Any) -> float:
    return library_time({**LAYER, **changes}, H100).seconds


def test_few_tokens_read_the_weights_of_their_experts() -> None:
    read = 8 * 3 * 4096 * 1024 * 2 / H100.dram.bandwidth_bytes_per_second
    assert read < seconds(tokens=1) < read + 60e-6


def test_uneven_loads_take_longer_on_the_busiest_board() -> None:
    even, uneven = (seconds(expert_parallel=16, distribution=name) for name in ("uniform", "power_law_1.2"))
    assert uneven > 1.2 * even


def test_divided_experts_take_less() -> None:
    alone = seconds()
    assert seconds(expert_parallel=8) < 0.5 * alone
    assert seconds(tensor_parallel=8) < 0.5 * alone


def test_four_bits_of_weights_are_read_faster() -> None:
    assert seconds(tokens=32, precision="int4-weights") < 0.6 * seconds(tokens=32)


def test_tables_tuned_for_a_board_make_experts_faster() -> None:
    mixtral = {**LAYER, "tokens": 16384, "experts": 8, "top_k": 2}
    # vLLM has a table for 4096 columns of eight experts on sm_80, none for 8192.
    tuned, untuned = (library_time({**mixtral, "intermediate": size}, A100).seconds for size in (4096, 8192))
    assert 2 * tuned < 0.7 * untuned


@pytest.mark.parametrize("device", [A100, H100], ids=lambda device: device.name)
def test_rows_that_begin_anywhere_are_copied_by_single_elements(device: DeviceSpec) -> None:
    odd, even = (library_time({**LAYER, "intermediate": size}, device).seconds for size in (168, 176))
    assert odd > 1.1 * even


def test_gradients_are_twice_the_work() -> None:
    back = library_time(LAYER, H100, "backward")
    assert back.seconds == pytest.approx(2 * seconds())


def test_groups_of_given_sizes_take_longer_where_tiles_are_emptier() -> None:
    operators: list[dict[str, Any]] = [
        {"op": "grouped_matmul", "n": 4096, "k": 4096, "sizes": sizes} for sizes in ([1024] * 8, [16] * 512)
    ]
    full, empty = library_times(operators, H100)
    assert empty.seconds > 3 * full.seconds
    back = library_time(operators[0], H100, "backward")
    assert [part.label for part in back.parts] == ["gradient of the activations", "gradient of the weights"]


@pytest.mark.parametrize(
    ("board", "precision", "family"),
    [
        ("h100", "bfloat16", "triton, warp groups"), ("h100", "fp8-tensorwise", "cutlass"),
        ("a100", "bfloat16", "triton, warps"),
        ("b200", "bfloat16", "trtllm"), ("b200", "fp8-block", "trtllm block"), ("b200", "mxfp4-weights", "marlin"),
        ("rtx-pro-6000", "nvfp4", "cutlass"),
    ],
)  # fmt: skip
def test_boards_take_kernels(board: str, precision: str, family: str) -> None:
    assert family_of(precision, load_device(board)) == family


def test_boards_without_matrix_units_say_so() -> None:
    with pytest.raises(InputError, match="has no kernels for experts in nvfp4"):
        library_time({**LAYER, "precision": "nvfp4"}, H100)
