"""Patch transforms: what they say of themselves, and what RATIONAL makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hal.catalog import load_device
from sokoban.kernel.patches import COLUMN, OUT_COLUMN, OUT_ROW, RESULT, ROW, PatchTransform
from sokoban.language.expression import AffineIndex, Axis, Load, Tensor
from sokoban.model.gpu.breakdown import STAGES
from sokoban.model.gpu.kinds.patches import estimate_patches
from sokoban.schedule.patches import PatchSchedule

V100 = load_device("v100")


def windows(count: int, height: int, width: int, *, pad: int = 1, step: int = 2) -> PatchTransform:
    """Patches of 4x4 every ``step`` elements of an image, as they are, in rows of tiles."""
    down, across = -(-height // step), -(-width // step)
    matrix = tuple(tuple(float(i == j) for j in range(4)) for i in range(4))
    source = Load(
        "X",
        (
            AffineIndex.axis("c"),
            AffineIndex.of({"y": step, ROW: 1}, -pad),
            AffineIndex.of({"x": step, COLUMN: 1}, -pad),
        ),
        0.0,
    )
    target = (
        AffineIndex.of({OUT_ROW: 4, OUT_COLUMN: 1}),
        AffineIndex.axis("c"),
        AffineIndex.of({"y": across, "x": 1}),
    )
    axes = (Axis("c", count), Axis("y", down), Axis("x", across))
    inputs = (Tensor("X", (count, height, width), "float32"),)
    output = Tensor("V", (16, count, down * across), "float32")
    return PatchTransform(
        name="op",
        axes=axes,
        matrix=matrix,
        source=source,
        target=target,
        value=Load(RESULT, ()),
        inputs=inputs,
        output=output,
        accumulate="float32",
    )


def tiles_back(count: int, height: int, width: int) -> PatchTransform:
    """The first 2x2 of every 4x4, as tiles of an image."""
    down, across = -(-height // 2), -(-width // 2)
    source = Load(
        "M",
        (AffineIndex.of({ROW: 4, COLUMN: 1}), AffineIndex.axis("c"), AffineIndex.of({"y": across, "x": 1})),
    )
    target = (
        AffineIndex.axis("c"),
        AffineIndex.of({"y": 2, OUT_ROW: 1}),
        AffineIndex.of({"x": 2, OUT_COLUMN: 1}),
    )
    axes = (Axis("c", count), Axis("y", down), Axis("x", across))
    inputs = (Tensor("M", (16, count, down * across), "float32"),)
    output = Tensor("Y", (count, height, width), "float32")
    matrix = ((1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0))
    return PatchTransform(
        name="op",
        axes=axes,
        matrix=matrix,
        source=source,
        target=target,
        value=Load(RESULT, ()),
        inputs=inputs,
        output=output,
        accumulate="float32",
    )


def test_it_knows_its_patches_and_whether_they_reach_out() -> None:
    padded = windows(3, 8, 8)
    assert (padded.patch, padded.transformed, padded.points) == (4, 4, 3 * 4 * 4)
    assert padded.is_padded
    inside = windows(3, 10, 10, pad=0)
    assert not replace(inside, axes=(Axis("c", 3), Axis("y", 4), Axis("x", 4))).is_padded


def test_rows_are_stored_as_vectors_where_they_are_aligned() -> None:
    assert tiles_back(3, 8, 8).store_width == 2
    assert tiles_back(3, 8, 7).store_width == 1
    # Tiles of one element each lie next to each other.
    assert windows(3, 8, 8).store_width == 1


def test_ones_and_zeros_cost_no_multiplication() -> None:
    # A copied element still is an instruction, and so is every sum of two.
    identity = windows(3, 8, 8)
    assert identity.multiply_adds == 4 * (4 + 4)
    sums = replace(identity, matrix=((1.0, 0.0, -1.0, 0.0),) * 3 + ((2.0, 0.0, 3.0, 1.0),))
    assert sums.multiply_adds == (3 * 1 + 2) * (4 + 4)


def test_its_text_names_source_and_target() -> None:
    text = windows(3, 8, 8).statement_text()
    assert text.startswith("V[4*:a + :b, c, x + 4*y] = (M X Mᵀ), 4x4 patches X[c, :i + 2*y - 1")


def test_large_transforms_take_the_time_of_their_traffic() -> None:
    transform = windows(256, 256, 256)
    found = estimate_patches(transform, PatchSchedule(128), V100)
    moved = sum(tensor.size_bytes for tensor in (*transform.inputs, transform.output))
    least = moved / V100.dram.bandwidth_bytes_per_second
    assert found.bound == "dram"
    assert least <= found.seconds - V100.launch_overhead_seconds < 1.2 * least
    assert tuple(found.stage_seconds) == STAGES


def test_small_transforms_take_a_latency_and_a_launch() -> None:
    found = estimate_patches(windows(1, 8, 8), PatchSchedule(64), V100)
    assert V100.launch_overhead_seconds < found.seconds < 4 * V100.launch_overhead_seconds
    assert found.bound == "latency"


def test_twice_the_points_take_about_twice_the_time() -> None:
    one, two = (estimate_patches(windows(c, 128, 128), PatchSchedule(128), V100) for c in (128, 256))
    overhead = V100.launch_overhead_seconds
    assert (two.seconds - overhead) / (one.seconds - overhead) == pytest.approx(2.0, rel=0.1)


def test_stores_one_by_one_move_sectors_again() -> None:
    aligned, odd = (estimate_patches(tiles_back(256, 128, w), PatchSchedule(128), V100) for w in (128, 127))
    assert odd.stage_seconds["l2"] > 1.15 * aligned.stage_seconds["l2"]


def test_blocks_too_large_for_the_board_take_for_ever() -> None:
    found = estimate_patches(windows(1, 8, 8), PatchSchedule(2048), V100)
    assert found.seconds == float("inf") and found.blocks_per_unit == 0


def test_registers_limit_the_blocks_of_a_unit() -> None:
    found = estimate_patches(windows(64, 64, 64), PatchSchedule(256), V100)
    held = found.registers * 256 * found.blocks_per_unit
    assert held <= V100.limits.registers_per_unit < held + found.registers * 256 or found.blocks_per_unit == 8
