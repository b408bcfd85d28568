"""Pages, tables and pictures of programs whose lanes are elements of vectors."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from hal.catalog import load_device
from roller.cli import main
from roller.construct.program import DIRECT, RProgram
from roller.estimate.operators import estimate_items, estimate_table, load_items
from roller.estimate.schedules import score, score_table
from roller.explain.cpu_pace import cpu_reasons, cpu_stage_meanings
from roller.explain.cpu_page import cpu_program
from roller.explain.pace import schedule_text
from roller.explain.page import explain
from roller.explain.picture import draw
from roller.programs import Programs, find_programs
from roller.text.quantities import LONGEST_LINE, layer_name
from sokoban.kernel.form import kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data
from sokoban.model.cpu.anatomy import cpu_anatomy, is_resident, lane_counts
from sokoban.model.rational import estimate_schedules
from sokoban.schedule.cpu_tiles import pieces
from sokoban.schedule.files import schedules_from_json
from sokoban.schedule.tile import TileSchedule

DEVICES = ("xeon-platinum-8375c", "graviton3")

OPERATORS: dict[str, dict[str, Any]] = {
    "matmul": {"op": "matmul", "m": 256, "n": 256, "k": 256},
    "odd": {"op": "matmul", "m": 333, "n": 77, "k": 101},
    "conv": {"op": "conv2d", "n": 1, "c": 64, "h": 28, "w": 28, "f": 64, "kh": 3, "kw": 3, "padding": 1},
    "depthwise": {"op": "depthwise_conv2d", "n": 1, "c": 32, "h": 20, "w": 20, "kh": 3, "kw": 3, "padding": 1},
    "pool": {"op": "max_pool2d", "n": 1, "c": 64, "h": 56, "w": 56, "kh": 3, "kw": 3, "stride": 2, "padding": 1},
    "add": {"op": "elementwise", "function": "add", "shape": [512, 2048]},
    "transpose": {"op": "transpose", "shape": [512, 1024], "perm": [1, 0]},
    "sum of rows": {"op": "reduce", "function": "sum", "shape": [4096, 256], "axes": [1]},
    "mean of columns": {"op": "reduce", "function": "mean", "shape": [1024, 1024], "axes": [0]},
    "softmax": {"op": "softmax", "shape": [12, 128, 128]},
    "layer norm": {"op": "layer_norm", "shape": [512, 768]},
}  # fmt: skip

#: Words of boards whose lanes are threads.
FOREIGN = ("warp", "shared memory", "this board", "threads", "SM", "bank conflict", "occupancy")


def constructed(operator: dict[str, Any], device: str = DEVICES[0], top_k: int = 4) -> Programs:
    return _constructed(json.dumps(operator), device, top_k)


@cache
def _constructed(operator: str, device: str, top_k: int) -> Programs:
    form = kernel_form(operator_from_data(json.loads(operator)))
    return find_programs(form, load_device(device), top_k, "roller", (DIRECT,))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPERATORS)
def test_every_program_has_a_page_in_words_of_its_own(name: str, device: str) -> None:
    programs = constructed(OPERATORS[name], device)
    for rank, program in enumerate(programs.direct, start=1):
        text = explain(programs, rank)
        for line in text.splitlines():
            assert len(line) <= LONGEST_LINE and line == line.rstrip()
        numbers = text[text.index("\n  axes ") :]
        assert not re.search(r"\d[eE][+-]?\d|\bnan\b|\binf\b", numbers)
        assert [word for word in FOREIGN if re.search(rf"\b{word}", text)] == []
        assert f"How rank {rank} was constructed: {program.policy}" in text
        for stage, meaning in cpu_stage_meanings(programs.device).items():
            bar = re.search(rf"^  {stage} +(\S+)(.*)$", text, re.MULTILINE)
            assert bar is not None
            assert meaning in bar[2] or program.estimate.stage_seconds[stage] == 0.0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPERATORS)
def test_the_parts_of_a_time_sum_to_it(name: str, device: str) -> None:
    programs = constructed(OPERATORS[name], device)
    for program in programs.direct:
        found = cpu_anatomy(programs.placed, program.schedule)
        assert sum(found.parts.values()) == pytest.approx(program.estimate.seconds)
        assert min(found.parts.values()) >= -1e-12
        longest = max(program.estimate.stage_seconds, key=lambda stage: program.estimate.stage_seconds[stage])
        assert longest == "block_launch" or next(iter(found.parts)) == longest


def test_a_program_is_reported_in_blocks_vectors_and_copies() -> None:
    programs = constructed(OPERATORS["matmul"], top_k=50)
    place, program = next(
        (rank, each) for rank, each in enumerate(programs.direct, start=1) if "B" in each.schedule.cached
    )
    text = " ".join(explain(programs, place).split())
    blocks, units = program.schedule.grid_blocks(programs.form.sizes), programs.device.unit_count
    assert f"{blocks} blocks: {-(-blocks // units)} for the busiest of {units} cores" in text
    tile = program.schedule.register_tile
    vectors, rows = lane_counts(tile["n"], 16), tile["m"]
    assert f"register tile m={rows} n={tile['n']}: lanes along n" in text
    assert f"{len(vectors) * rows} vectors of sums, {program.estimate.registers // 16} of 31 registers" in text
    assert "B packed in panels of vectors along n" in text
    assert "of scratch memory per core" in text
    assert "packs " in schedule_text(program, "element")


def test_construction_is_reported_step_by_step_with_its_scores() -> None:
    programs = constructed(OPERATORS["matmul"])
    text, program = explain(programs), programs.direct[0]
    lines = [line.strip() for line in text.splitlines()]
    for reason in program.reasons[:-1]:
        line = next(line for line in lines if line.startswith(reason.action + "  "))
        assert ("saving" in line) == (dict(reason.numbers).get("score", 0.0) > 0) or reason.action.startswith("grow")
    assert any(
        line.startswith("Registers, the tile of an innermost loop: room for 31 vectors of 16 lanes") for line in lines
    )
    assert any(line.startswith("L2, the tiles of one block: room for ") for line in lines)
    packed = re.search(r"^    (packed|nothing is packed)", text, re.MULTILINE)
    assert packed is not None and (packed[1] == "packed") == bool(program.schedule.cached)


def test_the_slowest_stage_is_explained_in_numbers() -> None:
    add = constructed({"op": "elementwise", "function": "add", "shape": [8192, 8192]})
    text = " ".join(explain(add).split())
    size = 4 * 8192**2
    assert f"dram: into L3 and out of it go {size / 1e6:.0f} MB of X; {size / 1e6:.0f} MB of X2; " in text
    assert f"{size / 1e6:.0f} MB for results" in text
    matmul = constructed({"op": "matmul", "m": 1024, "n": 1024, "k": 1024})
    text = " ".join(explain(matmul).split())
    at = "on 32 cores at 94% of the peak, by what they sustain"
    assert re.search(rf"compute: [\d.]+ million vector instructions of 16 lanes, [\d.]+ µs {at}", text)


def test_uneven_blocks_are_named() -> None:
    form, device = kernel_form(operator_from_data({**OPERATORS["matmul"], "k": 2048})), load_device(DEVICES[0])
    schedule = TileSchedule(
        block=(("m", 64), ("n", 48)), thread=(("m", 8), ("n", 48)), step=(("k", 2048),), cached=("B",)
    )
    (estimate,) = estimate_schedules(form, device, [schedule]).rows([0])
    program = RProgram(
        form=form,
        schedule=schedule,
        estimate=estimate,
        register_tile=None,
        shared_tile=None,
        policy="scale up",
        epsilon=0.1,
        reasons=(),
    )
    text = " ".join(" ".join(cpu_reasons(PlacedForm(form, device), program)).split())
    assert schedule.grid_blocks(form.sizes) == 24 and device.unit_count == 32
    assert "24 blocks on 32 cores keep the busiest 33% longer than even shares would take" in text
    assert "of cores that wait for the busiest" in text
    text = " ".join(" ".join(cpu_program(PlacedForm(form, device), program)).split())
    assert "24 blocks: 1 for the busiest of 32 cores, 75% balanced" in text
    assert "n is 5 x 48 + 16" in text and "m is " not in text
    assert "B packed in panels of vectors along n, once a block" in text
    assert f"copies take {4 * 48 * 2048 / 1e3:.0f} kB of scratch memory per core" in text


def test_tensors_that_stay_in_the_last_cache_cost_no_memory() -> None:
    small, large = constructed(OPERATORS["add"]), constructed({**OPERATORS["add"], "shape": [8192, 8192]})
    for programs, stays in ((small, True), (large, False)):
        found = cpu_anatomy(programs.placed, programs.direct[0].schedule)
        assert is_resident(found) == stays
        assert ("stay in L3 from one call to the next" in " ".join(explain(programs).split())) == stays
        assert found.dram_traffic >= sum(tensor.size_bytes for tensor in programs.form.expr.inputs)


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_vectors_of_a_row_are_counted_as_the_model_counts_them(lanes: int) -> None:
    for extent in range(1, 70):
        counts = lane_counts(extent, lanes)
        assert sum(counts) == extent and max(counts) <= lanes
        assert len(counts) == int(pieces(np.array([extent]), lanes)[0])


def test_layers_are_written_as_people_write_them() -> None:
    assert [layer_name(name) for name in ("l1", "l3", "dram", "registers", "local")] == [
        "L1", "L3", "DRAM", "registers", "local",
    ]  # fmt: skip


def test_scores_have_the_stages_of_the_device() -> None:
    expr = operator_from_data(OPERATORS["matmul"])
    lines = [
        {"block": {"m": 64, "n": 96}, "thread": {"m": 8, "n": 48}, "step": {"k": 256}, "cached": ["B"]},
        {"block": {"m": 64, "n": 64}, "thread": {"m": 4, "n": 4}, "step": {"k": 8}, "cached": []},
    ]
    device = load_device(DEVICES[0])
    scores = score(schedules_from_json("\n".join(map(json.dumps, lines)).encode(), expr), device)
    assert scores.stages == tuple(cpu_stage_meanings(device))
    headings = [str(column.header) for column in score_table(scores, 10, range(2)).columns]
    assert "scratch B" in headings and "shared B" not in headings
    first, second = scores.rows([0, 1])
    assert first.estimate.seconds < second.estimate.seconds and first.reason is None
    assert first.record["shared_bytes"] == 256 * 96 * 4


def test_an_estimate_names_registers_and_packed_operands(tmp_path: Path) -> None:
    path = tmp_path / "ops.json"
    path.write_text(json.dumps([OPERATORS["matmul"], OPERATORS["softmax"], OPERATORS["conv"]]))
    device = load_device(DEVICES[0])
    results = estimate_items(load_items(path), device)
    cells = list(estimate_table(results, device.teu.lane).columns[-2].cells)
    assert "registers m=" in str(cells[0]) and "thread" not in "".join(map(str, cells))
    assert "registers" not in str(cells[1])
    packed = results[2].parts[0].schedule["cached"]  # type: ignore[union-attr]
    assert str(cells[2]).endswith(f"packs {' and '.join(packed)}") if packed else "packs" not in str(cells[2])


def test_the_picture_has_a_bar_per_stage() -> None:
    pytest.importorskip("matplotlib")
    programs = constructed(OPERATORS["matmul"])
    found = {axes.get_label(): axes for axes in draw(programs).axes}
    stages, count = tuple(programs.direct[0].estimate.stage_seconds), len(programs.direct)
    bars = [bar for bar in found["stages"].patches if bar.get_facecolor()[3] > 0]
    assert len(bars) == len(stages) * count
    assert len({bar.get_facecolor() for bar in bars}) == len(stages)
    labels = [line.get_label() for line in found["roofline"].lines]
    assert any(label.startswith("L3: ") for label in labels) and any(label.startswith("DRAM: ") for label in labels)


def test_the_commands_work_from_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "op.json"
    path.write_text(json.dumps(OPERATORS["conv"]))
    result = CliRunner().invoke(main, ["explain", str(path), "--device", DEVICES[0], "--top-k", "3"])
    assert result.exit_code == 0 and "Times of every stage" in result.output
    result = CliRunner().invoke(main, ["estimate", str(path), "--device", DEVICES[0]])
    assert result.exit_code == 0 and re.search(r"registers (n=1 )?f=\d+", result.output)
