"""Kernels of earlier runs: found again, bounded, removed, and built anew where they are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from codegen.compile import toolchain
from hal.support.store import Store
from roller.cli import main


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A cache of the test's own, turned on."""
    own = Store(tmp_path / "cache")
    monkeypatch.setenv("ROLLER_CACHE", "1")
    for module in ("codegen.compile.toolchain", "codegen.compile.cache", "roller.command.known"):
        monkeypatch.setattr(f"{module}.kernel_store", lambda: own)
    return own


@pytest.fixture
def operator(tmp_path: Path) -> Path:
    path = tmp_path / "op.json"
    path.write_text(json.dumps({"op": "matmul", "m": 64, "n": 64, "k": 32}))
    return path


def _compiled(operator: Path, out: str, *options: str) -> Result:
    arguments = ("compile", operator, "--device", "a100", "--top-k", 2, "--verify", 0, "--jobs", 1)
    result = CliRunner().invoke(main, [*map(str, (*arguments, "--out", operator.parent / out)), *options])
    assert result.exit_code == 0, result.output
    return result


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("device_compiler")
def test_the_second_time_gives_the_same_bundle_without_a_compiler(store: Store, operator: Path) -> None:
    first = _compiled(operator, "one")
    assert "known from an earlier run" not in first.output
    count, _ = store.usage()
    assert count == 3  # the answer, and both kernels
    second = _compiled(operator, "two")
    assert "known from an earlier run" in second.output
    assert _files(operator.parent / "one") == _files(operator.parent / "two")
    # Another question finds the kernels that it shares with the first.
    _compiled(operator, "three", "--search", "both", "--json")
    assert store.usage()[0] <= count + 1


@pytest.mark.usefixtures("device_compiler")
def test_what_is_damaged_is_built_again(store: Store, operator: Path) -> None:
    _compiled(operator, "one")
    for path in store.folder.glob("??/*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert "known from an earlier run" not in _compiled(operator, "two").output
    assert _files(operator.parent / "one") == _files(operator.parent / "two")


def test_other_code_has_other_kernels(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = toolchain.toolchain()
    monkeypatch.setattr(toolchain, "_PACKAGES", ("hal",))
    assert toolchain.toolchain.__wrapped__() != before


def test_the_command_tells_bounds_and_clears(store: Store) -> None:
    store.write("ab" * 32, b"x" * 3000)
    store.write("cd" * 32, b"y" * 3000)

    def said(*options: str) -> str:
        return CliRunner().invoke(main, ["cache", *options]).output

    assert "2 results" in said() and "1 GiB" in said()
    assert "1 result" in said("--size", "4K")
    assert "0 results" in said("--clear")


def test_a_size_that_is_none_is_one_line() -> None:
    result = CliRunner().invoke(main, ["cache", "--size", "much"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and "--size" in result.stderr
