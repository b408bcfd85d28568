"""``roller cache``, and what ``roller compile`` keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from codegen.compile import toolchain
from roller.cli import main


def roller(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ROLLER_CACHE", "1")
    return tmp_path


def test_the_size_is_kept_and_a_wrong_one_refused(here: Path) -> None:
    empty = (
        f"{here}/cache/roller/kernels: 0 results, 0 B of at most 1.5 MiB\n"
        f"{here}/cache/roller/captures: 0 captured steps, 0 B of at most 1 GiB\n"
        f"{here}/cache/roller: native 0 B, emulator 0 B, pocl 0 B, compiled for this machine\n"
    )
    assert roller("cache", "--size", "1.5M").output == empty
    assert roller("cache", "--clear").output == empty
    refused = roller("cache", "--size", "much")
    assert (refused.exit_code, refused.stderr) == (
        2,
        "roller: --size: 'much' is no number of bytes; write it as 512M or 2G\n",
    )


def test_what_was_compiled_for_this_machine_is_reported_and_cleared_and_what_was_measured_stays(here: Path) -> None:
    cache = here / "cache" / "roller"
    for name, size in {
        "native/a.so": 2048, "emulator/b.o": 1024, "pocl/AB/c/d.so": 512, "captures/ab/cd": 5, "devices/cpu.toml": 9,
    }.items():  # fmt: skip
        (cache / name).parent.mkdir(parents=True)
        (cache / name).write_bytes(bytes(size))
    ending = "native 2 KiB, emulator 1 KiB, pocl 512 B, compiled for this machine\n"
    assert roller("cache").output.endswith(ending)
    assert roller("cache", "--clear").output.endswith("native 0 B, emulator 0 B, pocl 0 B, compiled for this machine\n")
    assert [path.name for path in cache.rglob("*") if path.is_file()] == ["cpu.toml"]


#: The command in a process that cannot import what builds or finds programs.
KNOWN = """
import sys
for name in ("tvm", "numpy", "sokoban.search.search"):
    sys.modules[name] = None
from roller.cli import main
main(sys.argv[1:])
"""


@pytest.mark.usefixtures("device_compiler")
def test_the_second_time_needs_no_compiler_and_writes_the_same(here: Path) -> None:
    operator = {"op": "matmul", "m": 67, "n": 35, "k": 19, "dtype": "float32", "name": "odd"}
    (here / "op.json").write_text(json.dumps(operator))
    arguments = ["compile", "op.json", "--device", "v100", "--top-k", "1", "--verify", "0", "--search", "roller"]
    first = json.loads(roller(*arguments, "--out", "first", "--json").output)
    command = [sys.executable, "-c", KNOWN, *arguments, "--out", "second", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    second = json.loads(done.stdout)
    assert second["kernels"][0]["binary"] == "second/odd/kernel_1.cubin"
    contents = [{path.name: path.read_bytes() for path in Path(out, "odd").iterdir()} for out in ("first", "second")]
    assert contents[0] == contents[1]
    assert first.keys() == second.keys()


@pytest.mark.usefixtures("device_compiler")
def test_what_is_damaged_is_built_again(here: Path) -> None:
    (here / "op.json").write_text(json.dumps({"op": "matmul", "m": 64, "n": 64, "k": 32, "name": "small"}))
    arguments = ["compile", "op.json", "--device", "a100", "--top-k", "1", "--verify", "0", "--search", "roller"]
    assert "known from an earlier run" not in roller(*arguments, "--out", "first").output
    for path in (here / "cache" / "roller" / "kernels").glob("??/*"):
        path.write_bytes(path.read_bytes()[:-1])
    assert "known from an earlier run" not in roller(*arguments, "--out", "second").output
    assert "known from an earlier run" in roller(*arguments, "--out", "third").output
    contents = [
        {path.name: path.read_bytes() for path in Path(out, "small").iterdir()} for out in ("first", "second", "third")
    ]
    assert contents[0] == contents[1] == contents[2]


def test_other_code_has_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    before = toolchain.toolchain()
    monkeypatch.setattr(toolchain, "_PACKAGES", ("hal",))
    assert toolchain.toolchain.__wrapped__() != before
