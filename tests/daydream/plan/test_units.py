"""Units: which operators belong to which block, and few blocks that stand for many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daydream.capture.captured import CapturedModule
from daydream.graph.graph import Phase
from daydream.plan.layout import Layout
from daydream.plan.memory import rank_memory
from daydream.plan.units import units_of
from hal.catalog import load_device
from hal.support.errors import InputError
from tests.daydream.captures import operator, step_of

pytestmark = pytest.mark.usefixtures("pytorch")


def test_operators_belong_to_their_blocks_and_what_lies_between(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("three")
    assert units.whole and units.blocks == ("blocks.0", "blocks.1", "blocks.2")
    names = [[units.capture.operators[row].name for row in units.rows[unit, Phase.FORWARD]] for unit in range(5)]
    assert "aten::embedding" in names[0] and "aten::gelu" in names[1] and "aten::_log_softmax" in names[4]
    assert names[1] == names[2] == names[3]
    backward = [[units.capture.operators[row].name for row in units.rows[unit, Phase.BACKWARD]] for unit in range(5)]
    assert "aten::embedding_dense_backward" in backward[0] and "aten::gelu_backward" in backward[3]
    assert units.elements.tolist() == [512 * 256, *[2 * 256 + 2 * 4 * 256 * 256 + 5 * 256] * 3, 512 * 256 + 512]


def test_three_blocks_stand_for_six(units_of_model: Callable[..., Any], model_file: Any) -> None:
    from daydream.capture.options import CaptureOptions
    from daydream.capture.sources import captured

    few = units_of_model("six")
    whole = units_of(captured(f"{model_file}:six", CaptureOptions(batch=8, optimizer="adamw", implementation="fused")))
    assert (few.whole, whole.whole) == (False, True) and few.blocks == whole.blocks
    assert few.elements.tolist() == whole.elements.tolist()
    assert few.captured.tolist() == [0, 1, 2, 2, 2, 2, 3, 4]
    device = load_device("h100")
    for layout in (Layout(), Layout(data=4, shard="fsdp"), Layout(pipeline=3, micro_batches=4)):
        for stage in range(layout.pipeline):
            ours, theirs = (rank_memory(each, layout, stage, device) for each in (few, whole))
            assert (ours.allocated, ours.owners) == (theirs.allocated, theirs.owners)


def test_one_board_holds_what_a_prediction_says(units_of_model: Callable[..., Any]) -> None:
    from daydream.prediction.step import predicted

    units, device = units_of_model("three"), load_device("h100")
    (step,) = predicted(units.capture, [device])
    memory = rank_memory(units, Layout(), 0, device)
    assert memory.main.peak_bytes == step.memory.footprint.peak_bytes
    assert memory.allocated == step.memory.allocated


def test_a_model_without_blocks_is_all_root() -> None:
    step = step_of([operator("aten::mm"), operator("aten::relu")], (1, 1), ((1,), (1,)))
    units = units_of(step.capture)
    assert units.blocks == () and units.count == 2 and len(set(units.unit.tolist())) == 1
    with pytest.raises(InputError, match="--pipeline"):
        units.stages(2)


def test_blocks_that_run_twice_are_refused() -> None:
    from dataclasses import replace

    modules = (*(CapturedModule(path, "Block") for path in ("", "layers.0", "layers.1")),)
    calls = [operator("aten::mm", module=module) for module in (1, 2, 1)]
    capture = replace(step_of(calls, (1,) * 3, ((1,),) * 3).capture, modules=modules, blocks=("layers.0", "layers.1"))
    with pytest.raises(InputError, match="one after the other"):
        units_of(capture)


def test_blocks_are_compiled_each_by_itself(units_of_model: Callable[..., Any]) -> None:
    compiled, plain = units_of_model("three", compiles=True), units_of_model("three")
    names = [each.name for each in compiled.capture.operators]
    assert any(name.startswith("inductor::") for name in names)
    fused = np.array([name.startswith("inductor::") for name in names])
    kernels = [fused[compiled.rows[unit, Phase.FORWARD]].sum() for unit in range(5)]
    assert kernels[0] == kernels[4] == 0 and kernels[1] == kernels[2] > 0
    assert compiled.elements.tolist() == plain.elements.tolist()


def test_what_lies_around_the_blocks_may_be_parts_of_its_own(units_of_model: Callable[..., Any]) -> None:
    units = units_of_model("six")
    assert units.stages(7) == [[0, 1], [2], [3], [4], [5], [6], [7]]
    assert units.stages(8) == [[0], [1], [2], [3], [4], [5], [6], [7]]
    with pytest.raises(InputError, match="repeats 6 blocks"):
        units.stages(9)


#: Two narrow blocks in front of five equal ones, as models with experts have dense layers first.
PREFIXED = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, within):
        super().__init__()
        self.up, self.down = nn.Linear(64, within), nn.Linear(within, 64)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(within) for within in (32, 32, 128, 128, 128, 128, 128))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def prefixed(batch=8):
    return Model(), (torch.zeros(batch, 16, 64),)
"""


def test_blocks_in_front_of_equal_ones_are_all_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from daydream.capture.options import CaptureOptions
    from daydream.plan.source import planned_units

    path = tmp_path / "prefixed.py"
    path.write_text(PREFIXED)
    options = CaptureOptions(batch=8, optimizer="adamw", implementation="fused")
    few = planned_units(f"{path}:prefixed", options)
    assert len(few.capture.blocks) == 5 and len(few.blocks) == 7
    assert few.many == (4, (4, 5, 6)) and few.captured.tolist() == [0, 1, 2, 3, 4, 4, 4, 5, 6]
    monkeypatch.setattr("daydream.plan.source.FEW", 99)
    whole = planned_units(f"{path}:prefixed", options)
    assert whole.whole and whole.elements.tolist() == few.elements.tolist()
    for layout in (Layout(), Layout(data=4, pipeline=3, shard="zero1", micro_batches=6)):
        curves = [rank_memory(each, layout, 0, load_device("h100")).main.allocated.max() for each in (few, whole)]
        assert curves[0] == curves[1]
