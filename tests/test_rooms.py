"""A module in the wrong room, or in a room that no contract lists, fails the import contracts; rooms stay small."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
PACKAGES = ("hal", "sokoban", "codegen", "roller", "daydream", "bench")

#: Misplaced file -> its text, and the contract that it breaks.
MISPLACED = {
    "codegen/gpu/fastest.py": (
        "from sokoban.model.rational import estimate\n",
        "Code generation does not know what is fast BROKEN",
    ),
    "sokoban/schedule/priced.py": (
        "from sokoban.model.estimates import Estimate\n",
        "sokoban: what, form, how, how long, which BROKEN",
    ),
    "sokoban/model/gpu/lanes.py": (
        "from sokoban.model.cpu import stages\n",
        "The models of GPU and CPU do not know each other BROKEN",
    ),
    "codegen/runtime/checked.py": (
        "import msgspec\n",
        "What runs beside a GPU needs NumPy and CuPy alone BROKEN",
    ),
    "roller/explain/lowered.py": (
        "import tvm\n",
        "TVM stays where kernels are made and proved BROKEN",
    ),
    "daydream/graph/priced.py": (
        "from daydream.operators.pricing import price\n",
        "daydream: trace, graph, passes, report BROKEN",
    ),
    "hal/boards.py": (
        "",
        "hal: catalogue, this machine, measuring, spec, support BROKEN",
    ),
}


#: Most modules of a room's own, those of rooms inside it apart.
MOST = 20


def test_no_room_has_more_modules_than_one_can_survey() -> None:
    folders = [path for package in PACKAGES for path in (ROOT / package, *(ROOT / package).rglob("*")) if path.is_dir()]
    modules = {folder: [path for path in folder.glob("*.py") if path.stem != "__init__"] for folder in folders}
    assert {str(folder): len(own) for folder, own in modules.items() if len(own) > MOST} == {}


def test_a_wheel_has_every_package_but_the_bench() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]["find"]
    tops = {name.partition(".")[0] for name in find_packages(str(ROOT), include=found["include"])}
    assert tops == set(PACKAGES) - {"bench"}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages' Python files and the contracts, to add to."""
    copy = tmp_path_factory.mktemp("house")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, copy / package, ignore=_all_but_python)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def _all_but_python(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_file() and not name.endswith(".py")]


def test_misplaced_modules_break_their_contracts(house: Path) -> None:
    assert _linted(house).count("BROKEN") == 0
    for path, (text, _) in MISPLACED.items():
        (house / path).write_text(text)
    report = _linted(house)
    assert [contract for _, contract in MISPLACED.values() if contract not in report] == []


def _linted(house: Path) -> str:
    """What ``lint-imports`` says of the packages in a folder."""
    command = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run(
        [sys.executable, "-c", command],
        cwd=house,
        env={**os.environ, "PYTHONPATH": str(house)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Contracts:" in done.stdout, done.stderr
    return done.stdout
