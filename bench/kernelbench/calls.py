"""Problems read: from rows of measured ones, or from a user's own copy of KernelBench.

A row has calls as ``[name, [[sizes, type], ...], values, [sizes, ...]]``; problems of a copy are run on tensors without
data, which says besides which memory each call reads.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.kernelbench.problem import Problem
from hal.support.errors import InputError


def read_rows(path: Path, board: str, levels: Sequence[str]) -> list[Problem]:
    """Problems of a file of rows, a JSON object a line, those of a board and of some levels.

    Raises:
        InputError: a line is no such row.
    """
    problems = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            name, listed, measured_on = row["problem"], tuple(row["operators"]), row.get("board", board)
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path}:{number}", "no row with problem and operators", "give problems.jsonl") from None
        if measured_on == board and name.partition("/")[0] in levels:
            problems.append(Problem(name=name, listed=listed, board=board, eager_ms=row.get("eager_ms")))
    return problems


def read_folder(folder: Path, levels: Sequence[str]) -> Iterator[Problem | tuple[str, str]]:
    """Problems of a copy of KernelBench, ``level1/1_....py``: each file's own ``Model`` called with its
    ``get_inputs()`` on tensors without data; or its name and why it could not be called.

    Raises:
        InputError: the folder has no such levels.
    """
    files = [path for level in levels for path in sorted((folder / level).glob("*.py"), key=_number)]
    if not files:
        problem = f"no {' or '.join(f'{level}/*.py' for level in levels)}"
        raise InputError(
            str(folder), problem, "give the folder KernelBench of a copy of ScalingIntelligence/KernelBench"
        )
    for path in files:
        name = f"{path.parent.name}/{path.name}"
        try:
            yield _called(path)
        except Exception as error:  # what a stranger's file may raise
            yield name, f"cannot be called without data: {type(error).__name__}: {str(error).splitlines()[0][:100]}"


def read_twins(levels: Sequence[str]) -> Iterator[Problem]:
    """Problems of our own after the titles of KernelBench that are not among the measured rows."""
    import torch

    from bench.kernelbench.record import recorded
    from bench.kernelbench.twins.chains import CHAINS
    from bench.kernelbench.twins.operators import OPERATORS

    for level, problems in (("level1", OPERATORS), ("level2", CHAINS)):
        for title, make in problems.items() if level in levels else ():
            with torch.device("meta"):
                yield recorded(f"{level}/{title}", *make())


def _number(path: Path) -> int:
    digits = path.name.partition("_")[0]
    return int(digits) if digits.isdigit() else 0


def _called(path: Path) -> Problem:
    """A problem by its file."""
    import torch

    from bench.kernelbench.record import recorded

    spec = importlib.util.spec_from_file_location(f"kernelbench_{_number(path)}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Distributions look at their parameters, which have no data.
    torch.distributions.Distribution.set_default_validate_args(False)
    with torch.device("meta"):
        spec.loader.exec_module(module)
        model = module.Model(*module.get_init_inputs())
        inputs = module.get_inputs()
    return recorded(f"{path.parent.name}/{path.name}", model, inputs)
