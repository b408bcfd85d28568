"""Kinds of kernels are rows of tables: nothing asks a problem or a schedule of which kind it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from codegen.gpu.lower import KINDS as LOWERED
from roller.explain.kinds import KINDS as PAGES
from sokoban.kernel.form import KernelForm
from sokoban.kernel.problem import Problem
from sokoban.model.compiled import KINDS as PRICED
from sokoban.schedule.patches import Schedule

ROOT = Path(__file__).parents[1]
PACKAGES = ("sokoban", "codegen", "roller", "daydream", "bench")

#: Types of problems and of schedules, by name.
NAMES = {each.__name__ for each in (*get_args(Problem), *get_args(Schedule))}
#: Calls of ``isinstance`` on them that there may be.
MOST_QUESTIONS = 12
#: Kinds of operators in canonical form.
FORMS = {"tile", "rows", "attention", "attention_gradient", "sequence"}


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                yield path, node


def test_few_ask_which_kind_a_problem_or_a_schedule_is() -> None:
    asking = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        if NAMES & {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
    ]
    assert len(asking) <= MOST_QUESTIONS, asking


def test_the_kind_of_a_form_is_compared_where_it_is_defined_alone() -> None:
    comparing = {
        str(path.relative_to(ROOT))
        for path, node in nodes()
        if isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("form.kind")
        if FORMS & {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    }
    assert not comparing


def test_every_kind_has_a_row_in_every_table() -> None:
    kinds = set(get_args(Problem))
    assert set(LOWERED) == kinds
    assert set(PRICED) == kinds
    assert set(PAGES) == kinds - {KernelForm}, "tiles have the page of programs of one kernel"
