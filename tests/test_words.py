"""Names are nouns of the field, and docstrings begin with them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("hal", "sokoban", "codegen", "roller", "daydream", "bench")

#: Words that say of a value how it came about, or nothing, where a noun would say what it is.
VAGUE = frozenset(("found", "own", "left", "apart", "here", "known", "whole", "kept", "held", "told", "plain", "rest"))
#: Share of names that may be vague: what other code bases have.
MOST_VAGUE = 0.007

_CLAUSE = re.compile(r"(What|Whether|How)\s")


@cache
def trees(package: str) -> dict[Path, ast.Module]:
    """Syntax trees of a package's files."""
    return {path: ast.parse(path.read_text("utf-8")) for path in sorted((ROOT / package).rglob("*.py"))}


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Names that a file binds, once for every place: targets of assignments, loops, comprehensions, ``with`` and
    ``except``, parameters, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler) and node.name:
            yield node.name


def is_vague(name: str) -> bool:
    """True if the first or the last of a name's words, underscores between them, is a vague one."""
    words = name.strip("_").lower().split("_")
    return words[0] in VAGUE or words[-1] in VAGUE


def test_a_vague_word_counts_at_either_end_of_a_name() -> None:
    names = ("found", "_told", "found_path", "KEPT", "last_known_size", "founder")
    assert [name for name in names if is_vague(name)] == ["found", "_told", "found_path", "KEPT"]


@pytest.mark.parametrize("package", PACKAGES)
def test_few_names_are_vague(package: str) -> None:
    names = [name for tree in trees(package).values() for name in bound_names(tree)]
    vague = [name for name in names if is_vague(name)]
    assert len(vague) <= MOST_VAGUE * len(names), sorted(vague)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_of_public_names_begin_with_a_noun(package: str) -> None:
    clauses = [
        f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}"
        for path, tree in trees(package).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not getattr(node, "name", "").startswith("_")
        and _CLAUSE.match(ast.get_docstring(node) or "")
    ]
    assert clauses == []
