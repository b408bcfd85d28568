"""Wave scaling worked out by hand."""

from __future__ import annotations

import pytest

from daydream.operators.wave_scaling import (
    Launch,
    habitat_ratio,
    launch_of,
    memory_share,
    sustained_rate,
    wave_blocks,
    wave_ratio,
)
from hal.catalog import load_device

V100, P100, A100, T4 = (load_device(name) for name in ("v100", "p100", "a100", "t4"))


def test_a_launch_is_read_from_the_arguments_of_a_kernel():
    arguments = {"grid": [50, 2, 1], "block": [256, 1, 1], "registers per thread": 38, "shared memory": 1024}
    assert launch_of(arguments) == Launch(100, 256, 38, 1024)
    assert launch_of({"grid": [4, 1, 1], "block": [32, 2, 1]}) == Launch(4, 64)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"grid": [4, 1, 1]},
        {"grid": [0, 1, 1], "block": [32, 1, 1]},
        {"grid": [4, 1], "block": [32, 1, 1]},
        {"grid": "4", "block": [32, 1, 1]},
        {"grid": [4.5, 1, 1], "block": [32, 1, 1]},
    ],
)
def test_what_is_no_launch_is_none(arguments):
    assert launch_of(arguments) is None


def test_a_wave_is_what_the_tightest_limit_leaves():
    # Of 2048 threads, 32 blocks, 65536 registers and 96 KiB a unit of a V100 has; 80 units.
    assert wave_blocks(Launch(10**6, 256), V100) == 8 * 80
    assert wave_blocks(Launch(10**6, 32), V100) == 32 * 80
    assert wave_blocks(Launch(10**6, 256, registers=64), V100) == 4 * 80
    assert wave_blocks(Launch(10**6, 64, shared_bytes=30_000), V100) == 3 * 80
    # 33 threads are two warps; 65 registers of 32 lanes are 2304 in steps of 256.
    assert wave_blocks(Launch(10**6, 33), V100) == 32 * 80
    assert wave_blocks(Launch(10**6, 128, registers=65), V100) == (65536 // (4 * 2304)) * 80
    assert wave_blocks(Launch(10**6, 1024, shared_bytes=90_000), T4) == T4.unit_count, "what does not fit counts as one"


def test_gamma_falls_from_one_by_way_of_a_half():
    # Habitat's selection of gamma: 1 - 0.5 x / R below the ridge, 0.5 R / x above.
    assert [memory_share(x, 10.0) for x in (0.0, 4.0, 10.0, 40.0)] == [1.0, 0.8, 0.5, 0.125]


def test_kernels_bound_by_memory_take_the_ratio_of_sustained_bandwidths():
    expected = V100.dram.bandwidth_bytes_per_second / P100.dram.bandwidth_bytes_per_second
    assert wave_ratio(V100, P100) == pytest.approx(expected)
    assert wave_ratio(V100, P100, launch=Launch(81, 256)) == pytest.approx(expected), "waves are arithmetic's alone"


def test_kernels_bound_by_arithmetic_wait_for_the_fullest_unit():
    rates = V100.sustained_flops("float32") / P100.sustained_flops("float32")
    assert wave_ratio(V100, P100, share=0.0) == pytest.approx(rates)
    # 81 blocks: two on one of 80 units, so 160 places; two on most of 56 units, so 112.
    assert wave_ratio(V100, P100, share=0.0, launch=Launch(81, 256)) == pytest.approx(rates * 112 / 160)
    # 30 blocks: one unit each, on both; what counts is the rate of one unit.
    assert wave_ratio(V100, P100, share=0.0, launch=Launch(30, 256)) == pytest.approx(rates * 56 / 80)


def test_in_between_both_count_by_gamma():
    memory = V100.dram.bandwidth_bytes_per_second / A100.dram.bandwidth_bytes_per_second
    rates = V100.sustained_flops("float32") / A100.sustained_flops("float32")
    assert wave_ratio(V100, A100, share=0.25) == pytest.approx(memory**0.25 * rates**0.75)


def test_products_take_matrix_units_where_there_are_any():
    halves = V100.best_matrix_instruction("float16")
    assert halves is not None
    assert sustained_rate(V100, "float16", products=True) == halves.sustained_flops
    assert sustained_rate(P100, "float16", products=True) == P100.sustained_flops("float32")
    assert sustained_rate(V100, "tfloat32", products=True) == V100.sustained_flops("float32")
    assert sustained_rate(A100, "tfloat32", products=True) > A100.sustained_flops("float32")
    assert sustained_rate(V100, "float64", products=False) == V100.sustained_flops("float64")


def test_habitats_equation_by_hand():
    # Waves of 640 and 448 blocks: 1000 blocks are two and three. Bandwidth decides half.
    launch = Launch(1000, 256)
    assert (wave_blocks(launch, V100), wave_blocks(launch, P100)) == (640, 448)
    memory = V100.dram.bandwidth_bytes_per_second / P100.dram.bandwidth_bytes_per_second
    clocks = V100.clocks.sustained_hz / P100.clocks.sustained_hz
    expected = 3 / 2 * (memory * 448 / 640) ** 0.5 * clocks**0.5
    assert habitat_ratio(V100, P100, launch, share=0.5) == pytest.approx(expected)


def test_a_board_is_as_fast_as_itself():
    for launch in (None, Launch(1000, 256, 40, 5000)):
        assert wave_ratio(V100, V100, share=0.3, launch=launch) == 1.0
    assert habitat_ratio(V100, V100, Launch(1000, 256, 40, 5000), share=0.3) == 1.0
