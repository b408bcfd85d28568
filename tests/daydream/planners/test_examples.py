"""The examples of the planners' page are the files, and run without a GPU."""

from __future__ import annotations

import json
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


#: Runs one after the other, each with names of its own: PyTorch is imported once.
PROGRAM = """
import contextlib, io, json, runpy, sys
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(path, run_name="__main__")
    print(json.dumps([path, output.getvalue()]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("pytorch")
def test_examples_run_without_a_gpu(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    # What changes settings of the compiler comes last.
    paths = sorted(map(str, EXAMPLES), key=lambda path: ("compiler" in path, "budget" in path))
    command = [sys.executable, "-c", PROGRAM, *paths]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = dict(json.loads(line) for line in done.stdout.splitlines())
    for path in EXAMPLES:
        assert re.search(PRINTED[path.stem], printed[str(path)]), printed[str(path)]
