"""The tests' own rules hold: tools are asked for, long tests are marked, kernels are compiled once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.pace import processor_seconds
from tests.support.site.kernel_cache import AS_WRITTEN, keep_cubins

BUSY = "import time\nwhile time.process_time() < {seconds}: pass\n"


def outcome(folder: Path, text: str, *options: str) -> str:
    """What pytest says of a file of tests under the plugins of the project."""
    (folder / "test_it.py").write_text(text)
    plugins = [f"-ptests.support.{name}" for name in ("pace", "tools")]
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(folder), *plugins, *options]
    path = os.pathsep.join(filter(None, sys.path))
    variables = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run([*command, str(folder)], env=variables, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import torch", "imports torch and has not asked for it: let it request the fixture 'pytorch'"),
        ("import tvm", "let it request the fixture 'device_compiler'"),
        ("import pyopencl", "let it request the fixture 'opencl'"),
        ("import subprocess; subprocess.run(['g++'])", "starts g++ and has not asked for it"),
        ("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import tvm'], check=True)", "child"),
    ],
)
def test_a_tool_has_to_be_asked_for(tmp_path: Path, body: str, message: str) -> None:
    said = outcome(tmp_path, f"def test_it():\n    {body}\n", "--no-tools")
    assert message in said and "1 failed" in said


@pytest.mark.slow
def test_without_tools_what_asks_for_them_is_left_out(tmp_path: Path) -> None:
    text = "def test_it(emulator): pass\ndef test_that(): pass\ndef test_other(c_compiler): pass\n"
    assert "1 passed, 2 deselected" in outcome(tmp_path, text, "--no-tools")
    assert "2 deselected" in outcome(tmp_path, text, "-m", "not emulator and not c_compiler")
    assert "1 skipped" in outcome(tmp_path, "import torch\ndef test_it(): pass\n", "--no-tools")


@pytest.mark.slow
def test_a_long_test_that_is_not_marked_is_named(tmp_path: Path) -> None:
    busy = BUSY.format(seconds=0.5)
    text = f"def test_it():\n    subprocess.run([sys.executable, '-c', {busy!r}])\n"
    text = f"import pytest, subprocess, sys\n{text}@pytest.mark.slow\n{text.replace('it', 'that')}"
    said = outcome(tmp_path, text, "--longest=0.02")
    assert "2 passed" in said
    assert "test_it.py::test_it took " in said and "make it faster than 0.02 s, or mark it slow" in said
    assert "test_that took" not in said and " took " not in outcome(tmp_path, text)


def test_seconds_of_children_count_while_they_live_and_when_they_have_ended() -> None:
    before = processor_seconds()
    code = f"{BUSY.format(seconds=0.3)}print('done', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"done\n"
        alive = processor_seconds() - before
        child.communicate(b"\n")
    assert alive >= 0.25
    assert processor_seconds() - before >= 0.25


def test_a_cubin_is_compiled_once_by_source_and_options(tmp_path: Path) -> None:
    calls = []

    def compile_anew(source: str, options: Sequence[bytes], name: str) -> tuple[bytes, str]:
        calls.append((source, *options))
        return b"\x7fELF\n" + source.encode(), f"said\nof {source}"

    for _ in range(2):
        compiler = SimpleNamespace(_cubin_and_log=compile_anew, nvrtc_version=lambda: (12, 9))
        keep_cubins(compiler, tmp_path)
        keep_cubins(compiler, tmp_path)
        assert getattr(compiler._cubin_and_log, AS_WRITTEN) is compile_anew
        for source, option in (("a", b"-x"), ("b", b"-x"), ("a", b"-y")):
            found = compiler._cubin_and_log(source, [option], "any")
            assert found == (b"\x7fELF\n" + source.encode(), f"said\nof {source}")
    assert calls == [("a", b"-x"), ("b", b"-x"), ("a", b"-y")]
    assert len(list((tmp_path / "nvrtc").iterdir())) == 3
