"""``roller score`` of attention: the times that its programs have, and why a schedule cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hal.catalog import load_device
from roller.algorithms import composed_programs
from roller.cli import main
from roller.estimate.schedules import Scores, score_file
from sokoban.kernel.form import kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data

PREFILL = {"op": "attention", "b": 1, "heads": 8, "queries": 1024, "head_dim": 64, "causal": True, "dtype": "float16"}
DECODE = {"op": "attention", "b": 1, "heads": 32, "kv_heads": 8, "queries": 1, "keys": 8192, "head_dim": 128}
GRADIENT = PREFILL | {"op": "attention_gradient", "of": "keys"}


def scores(tmp_path: Path, operator: dict[str, Any], device: str, *schedules: dict[str, Any]) -> Scores:
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in schedules))
    return score_file(path, operator_from_data(operator), load_device(device))


@pytest.mark.parametrize("device", ["a100", "h100", "v100"])
@pytest.mark.parametrize("operator", [PREFILL, DECODE | {"dtype": "float16"}, DECODE, GRADIENT])
def test_programs_score_what_construction_says(tmp_path: Path, operator: dict[str, Any], device: str) -> None:
    board = load_device(device)
    programs = composed_programs(PlacedForm(kernel_form(operator_from_data(operator)), board), 5).programs
    found = scores(tmp_path, operator, device, *(program.parts[0].schedule_json for program in programs))
    assert found.seconds.tolist() == [program.estimate.seconds for program in programs]


def test_a_limit_or_a_missing_instruction_is_the_reason(tmp_path: Path) -> None:
    groups = {"rows": 128, "keys": 128, "warps": 8, "instruction": "wgmma_64xNx16"}
    large = {"rows": 64, "keys": 1024, "warps": 4}
    deep = {"rows": 128, "keys": 256, "warps": 1}
    reasons = [each.reason for each in scores(tmp_path, PREFILL, "a100", groups, large, deep).rows([0, 1, 2])]
    assert reasons == [
        "a100-pcie-40gb has no wgmma_64xNx16 for float16",
        "304128 bytes of shared memory per block, at most 166912",
        "32 threads with 1360 registers each: no block fits on one of the SMs",
    ]


def test_the_command_prints_a_line_per_schedule(tmp_path: Path) -> None:
    (tmp_path / "op.json").write_text(json.dumps(PREFILL))
    (tmp_path / "s.jsonl").write_text('{"rows": 64, "keys": 64, "warps": 4}\n{"rows": 64, "keys": 1024, "warps": 4}\n')
    arguments = ["score", str(tmp_path / "op.json"), "--device", "a100", "--schedules", str(tmp_path / "s.jsonl")]
    invoked = CliRunner().invoke(main, arguments)
    assert invoked.exit_code == 0 and "1 cannot run; fastest: schedule 1" in invoked.stdout
    records = [json.loads(line) for line in CliRunner().invoke(main, [*arguments, "--json"]).stdout.splitlines()]
    assert [record["seconds"] is None for record in records] == [False, True]


def test_copies_in_bulk_that_no_page_allows_are_a_reason(tmp_path: Path) -> None:
    groups = {"rows": 128, "keys": 128, "warps": 8, "instruction": "wgmma_64xNx16"}
    of_warps = {"rows": 64, "keys": 64, "warps": 4}
    paged = PREFILL | {"page": 4, "pool": 300}
    reasons = [each.reason for each in scores(tmp_path, paged, "h100", groups, of_warps).rows([0, 1])]
    assert reasons == ["copies in bulk take 8 rows of a page together, and a step has 4", None]
