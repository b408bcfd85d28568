"""What ``roller doctor`` advises on machines that lack this or that."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from typing import Any

import pytest
from click.testing import CliRunner, Result

from codegen.verify import emulator, opencl
from roller.cli import main
from roller.command import doctor


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """A machine with the tools that a test puts into the set, by what is asked of the system."""
    has: set[str] = {"apache-tvm", "nvidia-cuda-nvrtc-cu12"}

    def version(name: str) -> str:
        if name not in has:
            raise metadata.PackageNotFoundError(name)
        return "1.2.3"

    def said(command: list[str]) -> str | None:
        return f"{command[0]} says so" if command[0] in has else None

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in has else None)
    monkeypatch.setattr(doctor, "_first_line", said)
    monkeypatch.setattr(opencl, "opencl_available", lambda: None if "opencl" in has else "there is no OpenCL device")
    monkeypatch.setattr(opencl, "device_name", lambda: "cpu (Portable Computing Language 3.1)")
    monkeypatch.setattr(emulator, "emulator_available", lambda: None if "g++" in has else "there is no g++")
    monkeypatch.setattr(emulator, "prepare_emulator", lambda: None)
    return has


def _asked(*options: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *options])


def _by_tool() -> dict[str, Any]:
    return {each["tool"]: each for each in map(json.loads, _asked("--json").stdout.splitlines())}


def test_a_bare_machine_gets_a_command_for_everything(machine: set[str]) -> None:
    found = _by_tool()
    assert found["OpenCL"]["found"] is None and found["OpenCL"]["remedy"] == "apt-get install pocl-opencl-icd"
    assert found["g++"]["found"] is None and found["g++"]["remedy"] == "apt-get install g++"
    assert found["PyTorch"]["remedy"] == "pip install 'roller[models]'"
    assert found["CuPy"]["remedy"] == "pip install 'roller[gpu]'"
    missing = [each for each in found.values() if each["found"] is None]
    assert all(each["remedy"] for each in missing if each["tool"] != "GPU")
    shown = _asked()
    assert shown.exit_code == 0
    assert "neither OpenCL nor g++" in shown.stdout


@pytest.mark.parametrize(
    ("tools", "sentence"),
    [
        ({"g++"}, "proved by the emulator."),
        ({"opencl"}, "proved by OpenCL."),
        ({"opencl", "g++"}, "proved by OpenCL and the emulator."),
        ({"g++", "nvidia-smi", "cupy-cuda13x"}, "proved by the emulator and timed on this GPU."),
    ],
)
def test_what_is_at_hand_says_what_can_be_done(machine: set[str], tools: set[str], sentence: str) -> None:
    machine |= tools
    assert _asked().stdout.splitlines()[-1] == f"Kernels are compiled here, {sentence}"


def test_without_a_compiler_nothing_works(machine: set[str]) -> None:
    machine.remove("apache-tvm")
    shown = _asked()
    assert shown.exit_code == 1
    assert "MISSING" in shown.stdout and shown.stdout.splitlines()[-1] == "Kernels cannot be compiled here."


def test_a_tool_that_is_broken_is_not_at_hand() -> None:
    assert doctor._first_line(["python3", "-c", "raise SystemExit(1)"]) is None
    assert doctor._first_line(["no-such-program"]) is None
    assert doctor._first_line(["echo", "twelve"]) == "twelve"
