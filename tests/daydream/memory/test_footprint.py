"""The memory of a step worked out by hand: who holds what when, and what the allocator reserves for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daydream.capture.captured import Capture, CapturedModule, CapturedStorage
from daydream.graph.graph import Phase
from daydream.memory.footprint import MemoryKind, StepOutOfMemoryError, footprint, replayed
from tests.daydream.captures import operator

MIB = 1 << 20

#: A weight of 4 MiB and its momentum; the forward pass makes 8 MiB that the backward pass needs and 2 MiB that it does
#: not; the backward pass makes the weight's gradient.
STEP = Capture(
    title="by hand",
    training=True,
    operators=(
        operator("aten::mm", module=1, made=(2,)),
        operator("aten::relu", module=1, made=(3,)),
        operator("aten::sum", made=(4,), freed=(3,)),
        operator("aten::mm", Phase.BACKWARD, 1, made=(5,), freed=(2, 4)),
        operator("aten::_foreach_add_", Phase.UPDATE),
    ),
    modules=(CapturedModule("", "Net"), CapturedModule("layer", "Linear")),
    parameters=(),
    storages=(
        CapturedStorage(4 * MIB, "parameter"),
        CapturedStorage(4 * MIB, "optimizer"),
        CapturedStorage(8 * MIB, "step"),
        CapturedStorage(2 * MIB, "step"),
        CapturedStorage(512, "step"),
        CapturedStorage(4 * MIB, "step"),
    ),
)


def test_bytes_are_counted_while_operators_run() -> None:
    memory = footprint(STEP)
    before = 8 * MIB
    assert memory.allocated.tolist() == [
        before + 8 * MIB,
        before + 10 * MIB,
        before + 10 * MIB + 512,
        before + 12 * MIB + 512,
        before + 4 * MIB,
    ]
    assert memory.peak == 3 and memory.peak_bytes == 20 * MIB + 512


def test_memory_is_reported_by_what_it_holds() -> None:
    owners = footprint(STEP).owners()
    assert owners[MemoryKind.WEIGHTS] == owners[MemoryKind.OPTIMIZER] == owners[MemoryKind.GRADIENTS] == 4 * MIB
    assert owners[MemoryKind.FEATURE_MAPS] == 8 * MIB + 512
    assert owners[MemoryKind.TEMPORARY] == 0
    assert [each.bytes for each in footprint(STEP).at_peak()][:2] == [8 * MIB, 4 * MIB]


def test_scratch_memory_lasts_as_long_as_its_operator() -> None:
    memory = footprint(STEP, {1: 32 * MIB})
    assert memory.peak == 1 and memory.by_kind(MemoryKind.WORKSPACE).tolist() == [0, 32 * MIB, 0, 0, 0]


def test_the_allocator_reserves_what_three_steps_need() -> None:
    replay = replayed(footprint(STEP))
    # Weight, momentum (made by the first update), maps and gradient fill a segment of 20 MiB; 512 bytes take 2 more.
    assert replay.peak_allocated == 20 * MIB + 512
    assert replay.peak_reserved == 22 * MIB
    assert (replay.reserved >= replay.allocated).all()


def test_what_does_not_fit_names_the_operator() -> None:
    with pytest.raises(StepOutOfMemoryError) as caught:
        replayed(footprint(STEP), capacity=21 * MIB)
    assert (caught.value.operator, caught.value.needed) == (2, MIB)


def test_inference_has_no_feature_maps() -> None:
    step = Capture(
        title="forward",
        operators=STEP.operators[:3],
        modules=STEP.modules,
        parameters=(),
        storages=STEP.storages[:1] + STEP.storages[:1] + STEP.storages[2:5],
    )
    assert footprint(step).owners()[MemoryKind.FEATURE_MAPS] == 0


def test_what_a_fused_step_never_makes_is_held_by_nobody() -> None:
    unmade = replace(STEP, storages=(*STEP.storages, CapturedStorage(64 * MIB, "step"), CapturedStorage(4, "host")))
    assert footprint(unmade).allocated.tolist() == footprint(STEP).allocated.tolist()
