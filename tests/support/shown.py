"""Commands of the pages run in the process of a test, where everything that they import already lies."""

from __future__ import annotations

import importlib
import importlib.util
import shlex
from contextlib import chdir
from functools import cache
from pathlib import Path
from types import ModuleType

from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]


@cache
def update() -> ModuleType:
    """The script that runs the documentation's commands; ``docs`` is no package.

    Its ``roller`` and ``daydream`` run here, with the terminal and the folder that it gives them; what a page runs by
    ``python`` has a process.
    """
    spec = importlib.util.spec_from_file_location("update_docs", ROOT / "docs" / "update.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run_apart = module.run

    def run(command: str) -> str:
        program, *arguments = shlex.split(command)
        if program == "python":
            output: str = run_apart(command)
            return output
        main = importlib.import_module(f"{program}.cli").main
        with chdir(module._workplace()):
            result = CliRunner(env=module.TERMINAL).invoke(main, arguments, prog_name=program)
        assert result.exit_code == 0, f"{command}: exit code {result.exit_code}\n{result.output}"
        return str(module.trimmed(result.stdout))

    module.run = run  # type: ignore[attr-defined]
    return module


def shown_blocks() -> dict[str, str]:
    """The text of every block of output in the pages, by its name."""
    return {
        name: text for path in update().PAGES for name, text in update().blocks_of((ROOT / path).read_text()).items()
    }
