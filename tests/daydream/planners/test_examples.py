"""The examples of the planners' page are the files, and run without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "planners.md").read_text("utf-8")
EXAMPLES = sorted((ROOT / "examples").glob("planners_*.py"))

#: A line that each prints.
PRINTED = {
    "planners_budget": r"gradient of the first layer: \(256, 256\)",
    "planners_compiler": r"\d+\.\d us  torch\.ops\._c10d_functional\.all_reduce",
    "planners_modules": r"Sequential\.3 fw: \d+\.\d{3}ms bw: \d+\.\d{3}ms",
    "planners_profile": r"\d+\.\d us  aten\.mm\.default",
}


def test_the_page_shows_the_files() -> None:
    shown = dict(re.findall(r"^<!-- file: (\S+) -->\n```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
    assert shown == {f"examples/{path.name}": path.read_text("utf-8") for path in EXAMPLES}
    assert {path.stem for path in EXAMPLES} == set(PRINTED)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_without_a_gpu(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, str(path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[path.stem], done.stdout), done.stdout
