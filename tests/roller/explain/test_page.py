"""The explanation: everything that decided is in it, in lines that fit a terminal."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

import pytest

from hal.catalog import load_device
from roller.construct.program import DIRECT, Construction, RProgram
from roller.explain.pace import reasons
from roller.explain.page import explain
from roller.programs import Programs, find_programs
from roller.text.quantities import LONGEST_LINE, time_text
from sokoban.kernel.form import kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import statement_text
from sokoban.language.operators import operator_from_data
from sokoban.model.gpu.anatomy import REMAINDERS, gpu_anatomy
from sokoban.model.gpu.breakdown import STAGES
from sokoban.model.gpu.step import busiest_scheduler
from sokoban.model.rational import estimate_schedules
from sokoban.schedule.tile import TileSchedule

SUITE = {data["name"]: data for data in json.loads(files("bench.suites").joinpath("roller119.json").read_text())}


def constructed(device: str = "v100", **operator: Any) -> Programs:
    return _constructed(device, json.dumps(operator))


@cache
def _constructed(device: str, operator: str) -> Programs:
    form = kernel_form(operator_from_data(json.loads(operator)))
    return find_programs(form, load_device(device), 10, "roller", (DIRECT,))


OPERATORS: dict[str, dict[str, Any]] = {
    "M0": SUITE["M0"], "C0": SUITE["C0"], "D0": SUITE["D0"], "E0": SUITE["E0"], "R0": SUITE["R0"], "P0": SUITE["P0"],
    "small": {"op": "matmul", "m": 128, "n": 256, "k": 256},
    "halves": {"op": "matmul", "m": 1024, "n": 768, "k": 512, "dtype": "float16", "epilogue": ["gelu"]},
    "softmax": {"op": "softmax", "shape": [517, 1000]},
    "layer_norm": {"op": "layer_norm", "shape": [517, 3, 1000], "axis": 1},
    "transpose": {"op": "transpose", "shape": [1000, 777], "perm": [1, 0]},
    "renamed columns": {
        "expr": "M[i] = max([k,l], A[i,k,l]); Y[i,p] = X[i,p] - M[i]", "sizes": {"i": 5, "k": 7, "l": 3, "p": 21},
    },
    "long names": {
        "expr": "Result[first_spatial_axis, second_spatial_axis] = sum([first_reduced_axis, second_reduced_axis], "
        "Left[first_spatial_axis, first_reduced_axis, second_reduced_axis] * "
        "Right[second_reduced_axis, second_spatial_axis, first_reduced_axis])",
        "sizes": {
            "first_spatial_axis": 512, "second_spatial_axis": 768, "first_reduced_axis": 96, "second_reduced_axis": 64,
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("device", ["v100", "a100", "h200", "k80"])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_program_can_be_explained(name: str, device: str) -> None:
    programs = constructed(device, **OPERATORS[name])
    # All ten of one board; of the others every third, their pages differ in layers and lanes.
    for rank in range(1, len(programs.direct) + 1, 1 if device == "v100" else 3):
        text = explain(programs, rank)
        assert text.endswith("\n") and not text.endswith("\n\n")
        for line in text.splitlines():
            assert len(line) <= LONGEST_LINE <= 150, line
            assert line == line.rstrip()
        numbers = text[text.index("\n  axes ") :]
        assert not re.search(r"\d[eE][+-]?\d|\bnan\b|\binf\b", numbers)
        assert f"How rank {rank} was constructed: {programs.direct[rank - 1].policy}" in text


@pytest.mark.parametrize("name", OPERATORS)
def test_statement_layers_and_stages_are_named(name: str) -> None:
    programs = constructed(**OPERATORS[name])
    text = explain(programs)
    flat = " ".join(text.split())
    for statement in programs.form.source.statements:
        assert statement_text(statement) in flat
    best = programs.direct[0]
    for layer in {reason.layer for reason in best.reasons}:
        heading = {"registers": "registers", "shared": "shared", "scale out": "Scale out over 80 SMs"}[layer]
        assert heading.lower() in text.lower()
    for stage in STAGES:
        assert re.search(rf"^  {stage} +\S", text, re.MULTILINE)
    bars = {match[1]: len(match[2]) for match in re.finditer(r"^  (\w+) +[\d.]+ \w+  (█+) ", text, re.MULTILINE)}
    assert max(bars, key=lambda stage: bars[stage]) == best.estimate.bound or (
        bars[best.estimate.bound] == max(bars.values())
    )
    assert "set the pace" in text


def test_a_memory_bound_product_says_so_with_its_numbers() -> None:
    lines = explain(constructed(**SUITE["M0"])).splitlines()
    m, n, k = 65536, 1024, 2
    flops, bytes_ = 2 * m * n * k, 4 * (m * k + k * n + m * n)
    v100 = load_device("v100")
    best_us = 1e6 * bytes_ / v100.dram.bandwidth_bytes_per_second
    assert lines[:4] == [
        "M0 on NVIDIA Tesla V100 SXM2 16 GB (v100-sxm2-16gb)",
        "",
        "  C[m, n] = sum([k], (A[m, k] * B[k, n]))",
        "  axes m=65536, n=1024, k=2",
    ]
    assert lines[4].startswith(
        f"  {flops / 1e6:.0f} MFLOP on at least {bytes_ / 1e6:.0f} MB is {flops / bytes_:.3g} FLOP"
    )
    assert lines[5].startswith(f"  so memory bounds it: {best_us:.0f} µs at 813 GB/s sustained")


def test_an_arithmetic_bound_convolution_says_so() -> None:
    text = explain(constructed(**SUITE["C0"]))
    assert "so arithmetic bounds it" in text
    assert "a block owns its outputs and walks c, kh, kw alone" in text


def test_growth_shows_axis_tile_traffic_and_score() -> None:
    """The first step of M0: n grows to 2, and Q falls from 4 M N K (1 + 1) to 4 M N K (1 + 1/2)."""
    programs = constructed(**SUITE["M0"])
    first = programs.direct[0].reasons[0]
    assert first.action == "grow n"
    moved = 4 * 65536 * 1024 * 2 * (1 + 1 / 2)
    saved_per_value = (4 * 65536 * 1024 * 2 / 2) / ((2 + 1 + 2) - (1 + 1 + 1))
    line = next(line for line in explain(programs).splitlines() if line.startswith("    grow n"))
    assert re.split(r" {2,}", line.strip()) == [
        "grow n",
        "n=2",
        f"{moved / 1e6:.0f} MB from shared memory, saving {saved_per_value / 1e6:.0f} MB per value held",
    ]


def test_a_small_operator_tells_how_it_shrank() -> None:
    programs = constructed(**OPERATORS["small"])
    rank = next(
        rank
        for rank, program in enumerate(programs.direct, start=1)
        if any(reason.layer == "scale out" for reason in program.reasons)
    )
    text = explain(programs, rank)
    assert "Scale out over 80 SMs" in text
    assert re.search(r"\d+ blocks leave units idle: shrink [mn], whose reuse is worth least, to ", text)


def test_more_padding_than_usual_is_explained() -> None:
    form = kernel_form(operator_from_data({"op": "matmul", "m": 17, "n": 33, "k": 1009}))
    programs = find_programs(form, load_device("v100"), 200, "roller", (DIRECT,))
    rank = next(n for n, program in enumerate(programs.direct, start=1) if program.epsilon > 0.1)
    assert "at 10% too few programs exist for these sizes" in explain(programs, rank)
    assert "axes may be padded by up to 10% to fit whole tiles\n" in explain(constructed(**SUITE["M0"]))


def test_halves_are_measured_against_the_matrix_instructions() -> None:
    text = explain(constructed(**OPERATORS["halves"]))
    assert "a warp computes" in text
    assert "(float16 by matrix instructions)" in " ".join(text.split())
    share = re.search(r"(\d+)% of what float16 by matrix instructions sustains", text)
    assert share is not None and 0 < int(share[1]) <= 100


def test_programs_that_the_model_cannot_tell_apart_are_named_with_the_one_that_wastes_least() -> None:
    programs = constructed(op="matmul", m=128, n=256, k=64)
    text = " ".join(explain(programs).split())
    near = sum(each.estimate.seconds <= 1.1 * programs.direct[0].estimate.seconds for each in programs.direct)
    found = re.search(r"(\d+) of them lie within 10 % of the best.* Rank (\d+) wastes least: (\d+) threads?", text)
    assert found is not None and int(found[1]) == near > 1 and int(found[2]) <= near
    assert int(found[3]) == programs.direct[int(found[2]) - 1].main.tiles.threads_per_block


def test_rivals_are_all_listed_with_the_stage_that_costs_them() -> None:
    programs = constructed(**SUITE["D0"])
    text = explain(programs, 2)
    page = text[text.index("Its rivals") :].splitlines()
    rivals = page[: 1 + len(programs.direct)]
    assert rivals[0].startswith(f"Its rivals, the best of {programs.constructed_count} programs")
    assert len(rivals) == 1 + len(programs.direct)
    assert [int(line[3:7]) for line in rivals[1:]] == list(range(1, len(programs.direct) + 1))
    assert [line.startswith("  →") for line in rivals[1:4]] == [False, True, False]
    seconds = [program.estimate.seconds for program in programs.direct]
    for rank, line in enumerate(rivals[1:], start=1):
        if rank == 2:
            continue
        percent = 100 * (seconds[rank - 1] / seconds[1] - 1)
        if abs(percent) < 0.05:
            assert " equal " in line
        else:
            causes = "|".join(name.replace("_", " ") for name in (*STAGES, *REMAINDERS))
            assert re.search(rf"{re.escape(f'{percent:+.1f}%')}, ({causes}) [{'+' if percent > 0 else '−'}]", line)


def section(text: str, start: str) -> list[str]:
    """The lines from one that starts so to the next empty one."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(start))
    return [*lines[first:], ""][: [*lines[first:], ""].index("")]


@pytest.mark.parametrize("name", OPERATORS)
def test_the_stages_of_every_candidate_are_in_a_table_with_the_bound_marked(name: str) -> None:
    programs = constructed(**OPERATORS[name])
    _, head, *rows = section(explain(programs, 1), "Times of every stage")
    assert head.split() == ["predicted", *STAGES[:-1], "launch"]
    assert [row[2] for row in rows] == ["→", *" " * (len(rows) - 1)]
    for position, (row, program) in enumerate(zip(rows, programs.direct, strict=True), start=1):
        cells = re.findall(r"(-|[\d.]+ \w+)(\*?)(?: |$)", row[8:])
        estimate = program.estimate
        assert int(row[3:6]) == position
        assert cells[0] == (time_text(estimate.seconds), "")
        shown = [time_text(seconds) if seconds else "-" for seconds in estimate.stage_seconds.values()]
        assert [text for text, _ in cells[1:]] == shown
        assert [stage for stage, (_, mark) in zip(STAGES, cells[1:], strict=True) if mark] == [estimate.bound]


@pytest.mark.parametrize("device", ["v100", "h200", "k80", "mi50", "ipu-mk1"])
@pytest.mark.parametrize("name", ["M0", "C0", "D0", "E0", "R0", "P0", "small", "softmax", "halves"])
def test_the_parts_of_a_time_add_up_to_it(name: str, device: str) -> None:
    programs = constructed(device, **OPERATORS[name])
    for program in programs.direct:
        parts = gpu_anatomy(programs.placed, program.schedule).parts
        assert sum(parts.values()) == pytest.approx(program.estimate.seconds, rel=1e-9)
        assert set(parts) <= {*STAGES, *REMAINDERS, "launch"} and min(parts.values()) >= 0


def test_dram_traffic_is_what_the_dram_stage_takes() -> None:
    programs = constructed(**SUITE["C0"])
    v100 = programs.device
    for program in programs.direct:
        moved = gpu_anatomy(programs.placed, program.schedule).dram_traffic
        seconds = program.estimate.stage_seconds["dram"]
        assert moved / v100.dram.bandwidth_bytes_per_second == pytest.approx(seconds)


@pytest.mark.parametrize("name", ["C0", "D0", "M0", "P0", "R0", "E0", "softmax"])
def test_the_instructions_shown_are_those_of_the_issue_stage(name: str) -> None:
    programs = constructed(**OPERATORS[name])
    v100 = programs.device
    for program in programs.direct:
        found = gpu_anatomy(programs.placed, program.schedule)
        cycles = sum(found.instructions.values()) * busiest_scheduler(found.step)[0]
        assert found.step_busy["issue"] == pytest.approx(cycles / v100.clocks.boost_hz)


def reasons_of(schedule: TileSchedule, device: str = "v100", **operator: Any) -> str:
    """The reasons for the time of a schedule of one's own, as one line."""
    form, board = kernel_form(operator_from_data(operator)), load_device(device)
    estimate = estimate_schedules(form, board, [schedule]).row(0)
    program = RProgram(
        form=form,
        schedule=schedule,
        estimate=estimate,
        register_tile=None,
        shared_tile=None,
        policy="own",
        epsilon=0.0,
        reasons=(),
    )
    return " ".join(" ".join(reasons(PlacedForm(form, board), program)).split())


def product_schedule(m: int, n: int, k: int, thread_m: int, thread_n: int, **more: Any) -> TileSchedule:
    return TileSchedule(
        block=(("m", m), ("n", n)),
        thread=(("m", thread_m), ("n", thread_n)),
        step=(("k", k),),
        cached=("A", "B"),
        **more,
    )


PRODUCT: dict[str, Any] = {"op": "matmul", "m": 4096, "n": 4096, "k": 1024}


def test_spilled_values_are_reported_with_what_was_needed_and_given() -> None:
    text = reasons_of(product_schedule(256, 256, 8, 16, 16), **PRODUCT)
    needed, given, spilled = map(
        int,
        re.search(r"needs (\d+) and gets (\d+) in a block of 256: (\d+) values spill", text).groups(),  # type: ignore[union-attr]
    )
    assert needed == 16 * 16 + 16 + 16 + 20 and given == 255 and spilled == needed - given


def test_waiting_names_the_blocks_that_would_fill_it_and_what_keeps_them_out() -> None:
    """16 rows of A, 708 floats apart: 45 kB per block, of which two fit into the 96 kB of a V100's unit."""
    text = reasons_of(product_schedule(16, 16, 8, 4, 4, padding=(("A", 700),)), **PRODUCT)
    assert re.search(r"latency: a step of one block is [\d.]+ .s of work and [\d.]+ .s of waiting", text)
    assert re.search(r"blocks at a time would fill it, 2 fit, as 98.3 kB of shared memory allow", text)


def test_bank_conflicts_are_reported_as_passes() -> None:
    """A thread of its own row each: 32 words, 32 floats apart, all in one bank."""
    text = reasons_of(product_schedule(64, 8, 32, 1, 8, unroll=1), **PRODUCT)
    assert re.search(r"reads(?: of \d)? from A with (?:[89]|[1-3]\d)(?:\.\d+)? passes each", text)


def test_many_small_blocks_are_blamed_on_their_start() -> None:
    text = reasons_of(
        TileSchedule(block=(("i", 32),), thread=(("i", 1),)), expr="Y[i] = X[i] + 1", sizes={"i": 1 << 24}
    )
    assert f"block launch: {(1 << 24) // 32} blocks, one every " in text


def test_losses_of_arithmetic_multiply_up_to_its_time() -> None:
    """33 threads are two warps of 64 lanes; 100 blocks on 80 units take as long as 160."""
    schedule = product_schedule(33 * 4, 32, 8, 4, 32).with_(unroll=1024)
    text = reasons_of(schedule, op="matmul", m=33 * 4 * 100, n=32, k=4096)
    assert f"partial warps +{100 * (64 / 33 - 1):.0f}%" in text
    assert f"100 blocks on 80 SMs +{100 * (160 / 100 - 1):.0f}%" in text
    assert "4 warps on 4 schedulers" not in text


def test_copies_past_the_registers_and_bands_are_named() -> None:
    form, board = kernel_form(operator_from_data(PRODUCT)), load_device("a100")
    schedule = product_schedule(
        128, 128, 8, 8, 8, unroll=512, turned=("A",), stages=3, asynchronous=True, raster=8, padding=(("A", 4),)
    )
    estimate = estimate_schedules(form, board, [schedule]).row(0)
    program = RProgram(
        form=form,
        schedule=schedule,
        estimate=estimate,
        register_tile=None,
        shared_tile=None,
        policy="own",
        epsilon=0.0,
        reasons=(),
    )
    made = Construction(placed=PlacedForm(form, board), programs=(program,), considered=1, epsilon=0.1, seconds=0.0)
    text = " ".join(explain(Programs.of(made, top_k=1)).split())
    assert "3 buffers of each, copied asynchronously past the registers" in text
    assert "launched in bands, 8 next to each other along n and all the way down m" in text
    assert "3 buffers · cp.async · bands of 8" in text
