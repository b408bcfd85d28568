"""``roller profile --sanitize`` with a program in compute-sanitizer's place, over a pretended GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hal.support.errors import InputError
from roller.cli import main
from roller.profile import sanitizer
from roller.profile.sanitizer import SanitizingRunner, find_sanitizer, first_finding
from tests.codegen.bundles import RIGHT, WRONG, write_bundle, write_chain
from tests.roller.profile.test_gpu_worker import QUICK, ROOT

pytestmark = pytest.mark.usefixtures("emulator")

WRITE = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at twice_kernel+0x70
=========     by thread (40,0,0) in block (0,0,0)
=========     Access to 0x7f52c5e000a0 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: python3 [0x1a2b]
=========
========= ERROR SUMMARY: 1 error
"""
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at twice_kernel+0x90
=========     and Read access at twice_kernel+0xb0 [24 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""

#: Runs what it is given, and reports what it was told to, by tool and rank.
STAND_IN = """#!{python}
import json, subprocess, sys
from pathlib import Path
arguments = sys.argv[1:]
assert arguments[:6:2] == ["--tool", "--error-exitcode", "--log-file"], arguments
tool, status, log, program = arguments[1], int(arguments[3]), Path(arguments[5]), arguments[6:]
done = subprocess.run(program)
with open({calls!r}, "a") as calls:
    calls.write(json.dumps([tool, *program[-2:], done.returncode]) + "\\n")
report = {reports!r}.get(tool + " " + program[-2], "")
log.write_text(report or "========= COMPUTE-SANITIZER\\n========= ERROR SUMMARY: 0 errors\\n")
sys.exit(status if report else done.returncode)
"""

#: What a child finds as CuPy.
CHILDS_CUPY = (
    "import sys\nsys.path.insert(0, {root!r})\nfrom tests.codegen import fake_cupy\nsys.modules['cupy'] = fake_cupy\n"
)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, reports: dict[str, str]) -> Path:
    """Puts the program on PATH and the pretended CuPy into children; gives the file that tells of its calls."""
    (folder / "site").mkdir()
    (folder / "site" / "cupy.py").write_text(CHILDS_CUPY.format(root=str(ROOT)))
    monkeypatch.syspath_prepend(str(folder / "site"))
    (folder / "bin").mkdir()
    program, calls = folder / "bin" / "compute-sanitizer", folder / "calls"
    program.write_text(STAND_IN.format(python=sys.executable, calls=str(calls), reports=reports))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return calls


def roller(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["profile", *map(str, arguments)], prog_name="roller")


def test_what_a_tool_finds_strikes_a_kernel_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(tmp_path, monkeypatch, {"memcheck 2": WRITE, "racecheck 3": RACE})
    folder = write_bundle(tmp_path / "out", (RIGHT, WRONG, RIGHT))
    result = roller(folder, "--repeats", 3, "--sanitize", "--json")
    assert result.exit_code == 0, result.output
    kernels = {kernel["predicted_rank"]: kernel for kernel in json.loads(result.stdout)["kernels"]}
    assert kernels[1]["struck_out"] == "" and kernels[1]["profiled_seconds"] == pytest.approx(1e-5)
    assert kernels[2]["struck_out"] == (
        "memcheck: Invalid __global__ write of size 4 bytes, at twice_kernel+0x70, by thread (40,0,0) in block "
        "(0,0,0), Access to 0x7f52c5e000a0 is out of bounds"
    )
    assert kernels[3]["struck_out"] == (
        "racecheck: Error: Race reported between Write access at twice_kernel+0x90, "
        "and Read access at twice_kernel+0xb0 [24 hazards]"
    )
    # A kernel that a tool found fault with is neither given to the next one nor timed.
    assert [json.loads(line) for line in calls.read_text().splitlines()] == [
        ["memcheck", "1", "0", 0], ["racecheck", "1", "0", 0], ["synccheck", "1", "0", 0],
        ["memcheck", "2", "0", 0], ["memcheck", "3", "0", 0], ["racecheck", "3", "0", 0],
    ]  # fmt: skip


def test_a_summary_says_what_is_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "TOOLS", ("memcheck",))
    stand_in(tmp_path, monkeypatch, {})
    result = roller(write_chain(tmp_path / "out"), "--repeats", 3, "--sanitize")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "1 of 1 kernel clean under compute-sanitizer: memcheck"


def test_a_program_that_does_not_come_to_the_launch_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, {})
    folder = write_bundle(tmp_path / "out", kernel={"entry": "another"})
    runner = SanitizingRunner(0, QUICK)
    ((rank, measurement),) = runner.measure(folder, [1])
    runner.close()
    assert rank == 1 and measurement.struck_out.startswith("memcheck: kernel_1.cu: cannot be loaded (cubin): ")
    with pytest.raises(InputError, match="was interrupted"):
        list(runner.measure(folder, [1]))


def test_without_the_program_a_line_says_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "PROGRAM", "no-such-sanitizer")
    result = roller(write_bundle(tmp_path), "--sanitize")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "roller: --sanitize: there is no no-such-sanitizer; install the CUDA toolkit, whose bin folder has it, or set "
        "CUDA_HOME to one\n"
    )
    result = roller(write_bundle(tmp_path, name="b"), "--sanitize", "--jobs", "tcp://host:8786")
    assert result.stderr == "roller: --sanitize: watches processes of this machine, no cluster's; leave --jobs out\n"


def test_the_program_is_also_found_next_to_the_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, {})
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_sanitizer() == str(tmp_path / "bin" / "compute-sanitizer")


def test_a_report_without_a_finding_has_none() -> None:
    assert first_finding("========= COMPUTE-SANITIZER\nhello\n========= ERROR SUMMARY: 0 errors\n") == ""
