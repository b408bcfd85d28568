"""Results are counted by kernel and by mutation, kept in files and written into a page."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.mutants.__main__ import main
from bench.mutants.results import Results, read_results, write_results
from bench.mutants.tables import summary, write_tables
from bench.mutants.verdicts import MutantOutcome
from hal.support.errors import InputError


def outcome(kind: str, verdict: str, by: str = "") -> MutantOutcome:
    return MutantOutcome(
        operator="softmax", device="a100", rank=1, part=0, kernel="rows", kind=kind, change="taken out", line=7,
        before="__syncthreads()", verdict=verdict, by=by,
    )  # fmt: skip


def results(*outcomes: MutantOutcome) -> Results:
    return Results(
        devices=("a100",), suite="mutants", top_k=1, sample=2, seed=0, kernels={"rows": 1},
        mutations={"barrier": 3, "guard": 9, "shuffle": 4}, outcomes=outcomes,
    )  # fmt: skip


FOUND = results(
    outcome("barrier", "noticed", "race"),
    outcome("barrier", "noticed", "value"),
    outcome("barrier", "needless", "the checker"),
    outcome("guard", "harmless", "same accesses and values"),
    outcome("guard", "noticed", "race"),
    outcome("shuffle", "missed"),
)


def test_the_share_noticed_leaves_out_what_is_harmless() -> None:
    assert list(summary(FOUND)) == [
        "1 kernel of mutants, rank 1, on a100: 6 of 16 mutants, all of synchronizations and 2 others of each, seed 0.",
        "Of 3 synchronizations 2 were noticed (100.0 % of those neither harmless nor needless), 0 are harmless, "
        "1 needless, 0 were missed.",
        "Of 3 others 1 were noticed (50.0 % of those neither harmless nor needless), 1 are harmless, "
        "0 needless, 1 were missed.",
    ]


def test_a_page_gets_the_tables_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "proof.md"
    page.write_text("# Proof\n\n<!-- mutants -->\nold\n<!-- end of mutants -->\n\nRest.\n")
    write_tables(FOUND, page)
    text = page.read_text()
    assert text.startswith("# Proof\n\n<!-- mutants -->\n") and text.endswith("<!-- end of mutants -->\n\nRest.\n")
    assert "old" not in text
    assert "| barrier | 3 | 3 | 2 | 0 | 1 | 0 | 100.0 % | race 1, value 1 |" in text
    assert "| softmax | a100 1 | rows | shuffle | taken out, line 7 | __syncthreads() |" in text
    page.write_text("# Proof\n")
    with pytest.raises(InputError, match="has no place for the tables; write <!-- mutants -->"):
        write_tables(FOUND, page)


def test_files_of_results_are_added_up(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    write_results(FOUND, first)
    write_results(results(outcome("guard", "noticed", "value")), second)
    assert read_results([first]) == FOUND
    both = read_results([first, second])
    assert len(both.outcomes) == 7 and both.kernels == {"rows": 2} and both.devices == ("a100",)
    shown = CliRunner().invoke(main, ["--read", str(first), "--read", str(second)])
    assert shown.exit_code == 0 and "Of 4 others 2 were noticed" in shown.output
    second.write_text("{}")
    refused = CliRunner().invoke(main, ["--read", str(second)])
    assert refused.exit_code == 2 and "is no file of results" in refused.stderr
