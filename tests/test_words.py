"""Names are nouns of the field, and docstrings begin with them."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("hal", "sokoban", "codegen", "roller", "daydream", "bench")

#: Words that say of a value how it came about, or nothing, where a noun would say what it is.
VAGUE = frozenset(("found", "own", "left", "apart", "here", "known", "whole", "kept", "held", "told", "plain", "rest"))
#: Share of names that may be vague: what other code bases have.
MOST_VAGUE = 0.007

_CLAUSE = re.compile(r"(What|Whether|How)\s")


class Words(NamedTuple):
    """Words of a package.

    Attributes:
        names: names that files bind, once for every place: targets of assignments, loops, comprehensions, ``with`` and
            ``except``, parameters, functions and classes.
        clauses: places of public docstrings that begin with a clause.
    """

    names: list[str]
    clauses: list[str]


@cache
def words_of(package: str) -> Words:
    """The words of a package, its files read once."""
    names, clauses = [], []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                    names.append(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    names.append(name)
                    if not name.startswith("_") and _CLAUSE.match(ast.get_docstring(node) or ""):
                        clauses.append(f"{path.relative_to(ROOT)}: {name}")
                case ast.Module() if _CLAUSE.match(ast.get_docstring(node) or ""):
                    clauses.append(str(path.relative_to(ROOT)))
    return Words(names, clauses)


def is_vague(name: str) -> bool:
    """True if the first or the last of a name's words, underscores between them, is a vague one."""
    words = name.strip("_").lower().split("_")
    return words[0] in VAGUE or words[-1] in VAGUE


def test_a_vague_word_counts_at_either_end_of_a_name() -> None:
    names = ("found", "_told", "found_path", "KEPT", "last_known_size", "founder")
    assert [name for name in names if is_vague(name)] == ["found", "_told", "found_path", "KEPT"]


@pytest.mark.parametrize("package", PACKAGES)
def test_few_names_are_vague(package: str) -> None:
    names = words_of(package).names
    vague = [name for name in names if is_vague(name)]
    assert len(vague) <= MOST_VAGUE * len(names), sorted(vague)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_of_public_names_begin_with_a_noun(package: str) -> None:
    assert words_of(package).clauses == []
