"""The comparison of construction and search says what it is called."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from bench.agreement import THESIS_EXAMPLE, Comparison, compare, kind_of, main, summary
from bench.speed.construction import suite_forms
from bench.speed.test_search import SINGLE, peak_bytes
from hal.catalog import load_device
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import operator_from_data

V100 = load_device("v100")


def form_of(**operator: Any) -> KernelForm:
    return kernel_form(operator_from_data(operator))


@pytest.mark.parametrize(
    ("kind", "operator"),
    [
        ("small", THESIS_EXAMPLE),
        ("regular", {"op": "matmul", "m": 65536, "n": 1024, "k": 2}),
        ("irregular", {"op": "matmul", "m": 65536, "n": 1023, "k": 1024}),
        ("irregular", {"op": "conv2d", "n": 128, "c": 64, "h": 28, "w": 28, "f": 64, "kh": 3, "kw": 3}),
    ],
)
def test_an_operators_kind_is_its_size_and_its_shape(kind: str, operator: dict[str, Any]) -> None:
    assert kind_of(form_of(**operator), V100) == kind


def test_the_thesiss_small_operator_loses_most_without_adjustment() -> None:
    row = compare(form_of(**THESIS_EXAMPLE), V100)
    assert row.unadjusted is not None
    assert row.searched < row.constructed < row.unadjusted
    assert row.ratio == row.constructed / row.searched > 1.0


def test_the_summary_counts_what_agrees() -> None:
    def row(name: str, kind: str, constructed: float) -> Comparison:
        return Comparison(
            name=name,
            kind=kind,
            constructed=constructed,
            unadjusted=None,
            searched=1.0,
            constructed_bound="compute",
            searched_bound="dram",
        )

    rows = [row("a", "regular", 1.0), row("b", "regular", 1.04), row("c", "regular", 1.2), row("d", "small", 3.0)]
    assert list(summary(rows)) == [
        "regular      2 of   3 within 5%, construction takes 1.04 times as long in the middle, 1.20 times at worst (c)",
        "small        0 of   1 within 5%, construction takes 3.00 times as long in the middle, 3.00 times at worst (d)",
    ]


def test_the_command_prints_a_line_per_operator_and_kind() -> None:
    result = CliRunner().invoke(main, ["--name", "M2", "--name", "M0", "--name", "E0"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["M0", "regular"], ["E0", "regular"], ["M2", "small"]]
    assert [line.split()[0] for line in lines[4:]] == ["regular", "small"]
    assert "none of Q9 is in roller119" in CliRunner().invoke(main, ["--name", "Q9"]).output


def test_the_benchmarked_searches_are_operators_of_the_suite() -> None:
    forms = suite_forms("roller119")
    assert set(SINGLE) <= set(forms)
    assert 0 < peak_bytes(forms["R2"], V100) < 2**30
