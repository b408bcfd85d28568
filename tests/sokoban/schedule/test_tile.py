"""A schedule's own arithmetic: threads, register tiles, blocks."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sokoban.kernel.instructions import Instruction
from sokoban.schedule.tile import TileSchedule, sizes
from tests.sokoban.schedules import matmul_schedule


def test_a_block_is_copies_times_threads_times_adjacent_elements() -> None:
    schedule = matmul_schedule((60, 112), (5, 4), 7, vthreads=(3, 2))
    assert dict(schedule.threads_of) == {"m": 60 // (5 * 3), "n": 112 // (4 * 2)}
    assert dict(schedule.register_tile) == {"m": 5 * 3, "n": 4 * 2}
    assert schedule.threads_per_block == (60 // 15) * (112 // 8)


def test_copies_default_to_one() -> None:
    schedule = TileSchedule(block=(("m", 12),), thread=(("m", 3),))
    assert dict(schedule.vthreads_of) == {"m": 1}
    assert dict(schedule.register_tile) == {"m": 3}
    assert schedule.threads_per_block == 12 // 3


def test_threads_of_a_shared_reduction_multiply() -> None:
    schedule = TileSchedule(block=(("m", 3),), thread=(("m", 1),), reduce_threads=(("k", 32), ("l", 2)))
    assert schedule.threads_per_block == 3 * 32 * 2


def test_a_matrix_instruction_has_a_warp_per_tile() -> None:
    schedule = matmul_schedule((64, 96), (32, 32), 16, instruction=Instruction.WMMA)
    assert schedule.threads_per_block == (64 // 32) * (96 // 32) * 32


def test_partial_blocks_count_whole() -> None:
    assert matmul_schedule((60, 112), (5, 4), 7).grid_blocks({"m": 121, "n": 113, "k": 99}) == 3 * 2
    assert matmul_schedule((60, 112), (5, 4), 7).grid_blocks({"m": 120, "n": 112, "k": 99}) == 2 * 1


def test_schedules_are_values() -> None:
    one, other = matmul_schedule((60, 112), (5, 4), 7), matmul_schedule((60, 112), (5, 4), 7)
    assert one == other and hash(one) == hash(other)
    changed = one.with_(padding=(("A", 1),))
    assert changed.padding_of == {"A": 1} and one.padding_of == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.unroll = 1  # type: ignore[misc]


def test_sizes_keep_the_order_of_the_mapping() -> None:
    assert sizes({"z": 3, "a": 5}) == (("z", 3), ("a", 5))


def test_json_names_every_axis() -> None:
    schedule = matmul_schedule((60, 112), (5, 4), 7, vthreads=(3, 2), padding=(("A", 1),), vector=(("B", 4),))
    assert json.loads(json.dumps(schedule.to_json())) == {
        "block": {"m": 60, "n": 112},
        "thread": {"m": 5, "n": 4},
        "threads": {"m": 4, "n": 14},
        "vthreads": {"m": 3, "n": 2},
        "step": {"k": 7},
        "reduce_threads": {},
        "cached": ["A", "B"],
        "vector": {"B": 4},
        "padding": {"A": 1},
        "unroll": 64,
        "instruction": "fma",
    }
