"""``roller score``: predicted times of given schedules, in their order, and reasons where there are none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hal.catalog import load_device
from roller.cli import main
from roller.construct.construct import construct
from roller.estimate.schedules import json_lines, score, summary
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.model.rational import estimate_schedules
from sokoban.schedule.files import schedules_from_json

MATMUL = {"op": "matmul", "m": 1024, "n": 1024, "k": 1024}
RELU = {"op": "elementwise", "function": "relu", "shape": [64, 32, 32]}
GOOD = {"block": {"m": 64, "n": 64}, "thread": {"m": 4, "n": 4}, "step": {"k": 16}}
CROWDED = {"block": {"m": 128, "n": 128}}
LARGE = {"block": {"m": 128, "n": 128}, "thread": {"m": 8, "n": 8}, "step": {"k": 256}}


def lines(*items: Any) -> str:
    return "".join(json.dumps(item) + "\n" for item in items)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def call(operator: Any, schedules: str, *options: str) -> Result:
        Path("op.json").write_text(json.dumps(operator))
        Path("s.jsonl").write_text(schedules)
        arguments = ["score", "op.json", "--device", "v100", "--schedules", "s.jsonl", *options]
        return CliRunner().invoke(main, arguments, prog_name="roller")

    return call


def records(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_has_a_record_per_schedule_in_their_order(run: Any) -> None:
    found = records(run(MATMUL, lines(GOOD, CROWDED, {**GOOD, "step": {"k": 8}}), "--json"))
    assert len(found) == 3
    first = found[0]
    assert set(first) == {
        "schedule", "seconds", "bound", "stage_seconds", "registers", "shared_bytes", "blocks_per_unit", "waves",
    }  # fmt: skip
    assert first["bound"] in first["stage_seconds"]
    assert first["seconds"] >= max(0.0, first["stage_seconds"]["compute"])
    assert [record["shared_bytes"] for record in found] == [8192, 2 * 128 * 0, 4096]


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (CROWDED, "16384 threads per block, at most 1024"),
        (LARGE, "262144 bytes of shared memory per block, at most 98304"),
    ],
)
def test_a_schedule_that_cannot_run_has_a_reason_instead_of_a_time(run: Any, schedule: Any, reason: str) -> None:
    (found,) = records(run(MATMUL, lines(schedule), "--json"))
    assert (found["seconds"], found["bound"], found["waves"], found["reason"]) == (None, None, None, reason)
    result = run(MATMUL, lines(schedule))
    assert f"cannot run: {reason}" in result.stdout and "1 cannot run" in result.stdout


def test_a_matrix_instruction_needs_a_device_that_has_one() -> None:
    expr = operator_from_data({**MATMUL, "dtype": "float16"})
    schedule = {
        "block": {"m": 64, "n": 64}, "thread": {"m": 32, "n": 32}, "step": {"k": 16}, "instruction": "wmma_16x16x16",
    }  # fmt: skip
    groups = schedules_from_json(lines(schedule).encode(), expr)
    on_v100, on_k80 = (score(groups, load_device(name)) for name in ("v100", "k80"))
    assert on_v100.rows([0])[0].reason is None
    assert on_k80.rows([0])[0].reason == "k80 has no matrix instruction for this operator"
    assert math.isinf(on_k80.seconds[0])


def test_mma_needs_compute_capability_8() -> None:
    expr = operator_from_data({**MATMUL, "dtype": "float16"})
    schedule = {
        "block": {"m": 64, "n": 64}, "thread": {"m": 32, "n": 32}, "step": {"k": 16}, "instruction": "mma_16x8x16",
        "stages": 3,
    }  # fmt: skip
    groups = schedules_from_json(lines(schedule).encode(), expr)
    on_a100, on_v100 = (score(groups, load_device(name)) for name in ("a100", "v100"))
    assert on_a100.rows([0])[0].reason is None
    assert "has no matrix instruction" in str(on_v100.rows([0])[0].reason)


@pytest.mark.parametrize("operator", (MATMUL, RELU), ids=lambda operator: operator["op"])
def test_the_programs_of_roller_score_as_they_were_ranked(operator: Any) -> None:
    expr, device = operator_from_data(operator), load_device("v100")
    schedules = [program.schedule for program in construct(kernel_form(expr), device, 10).programs]
    text = lines(*(schedule.to_json() for schedule in schedules)).encode()
    scores = score(schedules_from_json(text, expr), device)
    assert scores.seconds.tolist() == estimate_schedules(kernel_form(expr), device, schedules).seconds.tolist()


def test_own_and_fused_axes_in_one_file_keep_their_order(run: Any) -> None:
    fused, own = {"block": {"i0.i1.i2": 256}}, {"block": {"i2": 32, "i1": 8}}
    found = records(run(RELU, lines(fused, own, CROWDED | {"block": {"i0.i1.i2": 4096}}, own), "--json"))
    assert [record["seconds"] is None for record in found] == [False, False, True, False]
    assert found[1] | {"schedule": 4} == found[3] and found[0]["registers"] == found[1]["registers"]


def test_pieces_of_a_long_file_are_put_together_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    expr, device = operator_from_data(RELU), load_device("v100")
    kinds = [{"block": {"i0.i1.i2": 64 << n}} for n in range(5)] + [{"block": {"i2": 1 << n}} for n in range(5)]
    text = lines(*(kinds[3 * n % 10] for n in range(25))).encode()
    whole = score(schedules_from_json(text, expr), device)
    monkeypatch.setattr("roller.estimate.schedules.PIECE", 4)
    pieces = score(schedules_from_json(text, expr), device)
    assert pieces.seconds.tolist() == whole.seconds.tolist()
    assert pieces.rows(range(25)) == whole.rows(range(25)) == [*pieces.rows(range(7)), *pieces.rows(range(7, 25))]
    assert json_lines(pieces, range(25)) == json_lines(whole, range(25))


def test_the_table_shows_the_first_lines_and_the_fastest(run: Any) -> None:
    slow = {"block": {"m": 8, "n": 8}}
    result = run(MATMUL, lines(slow, slow, GOOD), "--limit", "2")
    rows = result.stdout.splitlines()
    assert rows[0].split()[:3] == ["schedule", "predicted", "compute"]
    assert [row.split()[0] for row in rows[1:3]] == ["1", "2"]
    assert rows[3].startswith(
        "3 schedules of matmul_1024x1024x1024 on NVIDIA Tesla V100 SXM2 16 GB; fastest: schedule 3"
    )
    assert rows[3].endswith("1 more with --limit or --json")


def test_a_summary_without_any_time_has_no_fastest() -> None:
    expr = operator_from_data(MATMUL)
    scores = score(schedules_from_json(lines(CROWDED).encode(), expr), load_device("v100"))
    assert summary(scores, expr, 10).endswith(
        "1 schedule of matmul_1024x1024x1024 on NVIDIA Tesla V100 SXM2 16 GB, 1 cannot run"
    )


@pytest.mark.parametrize(
    ("operator", "schedules", "options", "message"),
    [
        (
            MATMUL,
            lines(GOOD, {"block": {"q": 1}}),
            (),
            "s.jsonl[2].block.q: no spatial axis 'q'; spatial axes: m and n",
        ),
        (MATMUL, "", (), 's.jsonl: holds no schedules; write one a line: {"block": {...}, "thread": {...}}'),
        (
            [MATMUL, RELU],
            lines(GOOD),
            (),
            "op.json: holds 2 operators; pick one with --name, such as matmul_1024x1024x1024",
        ),
        (MATMUL, lines(GOOD), ("--name", "x"), "--name: 'x' is not in op.json; try matmul_1024x1024x1024"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    run: Any, operator: Any, schedules: str, options: tuple[str, ...], message: str
) -> None:
    result = run(operator, schedules, *options)
    assert (result.exit_code, result.stderr, result.stdout) == (2, f"roller: {message}\n", "")


def test_an_operator_of_a_list_is_picked_by_name(run: Any) -> None:
    found = records(run([RELU, MATMUL], lines(GOOD), "--json", "--name", "matmul_1024x1024x1024"))
    assert found == records(run(MATMUL, lines(GOOD), "--json"))


def test_bulk_copies_need_a_board_and_an_operator_that_have_them() -> None:
    schedule = {
        "block": {"m": 128, "n": 256}, "thread": {"m": 16, "n": 256}, "step": {"k": 64},
        "instruction": "wgmma_64xNx16", "stages": 4, "cluster": 2,
    }  # fmt: skip
    expr = operator_from_data({"op": "matmul", "m": 512, "n": 512, "k": 512, "dtype": "float16"})
    groups = schedules_from_json(lines(schedule).encode(), expr)
    assert score(groups, load_device("h100")).rows([0])[0].reason is None
    assert "has no matrix instruction" in str(score(groups, load_device("a100")).rows([0])[0].reason)
    again = operator_from_data(
        {
            "expr": "acc[m,n] = sum(k, A[m,k] * B[k,n])\nC[m,n] = acc[m,n] + A[m,n]",
            "sizes": {"m": 512, "n": 512, "k": 512}, "dtype": "float16",
        }
    )  # fmt: skip
    groups = schedules_from_json(lines(schedule).encode(), again)
    assert math.isinf(score(groups, load_device("h100")).seconds[0])
