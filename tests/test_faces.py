"""The faces of the packages name what there is, and import it when it is first used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from click.testing import CliRunner

PACKAGES = ("hal", "sokoban", "codegen", "roller")


def unusable(package: str) -> list[str]:
    face = importlib.import_module(package)
    return [name for name in face.__all__ if getattr(face, name, None) is None]


@pytest.mark.parametrize("package", [each for each in PACKAGES if each != "roller"])
def test_every_name_of_a_face_can_be_used(package: str) -> None:
    assert unusable(package) == []


@pytest.mark.usefixtures("pytorch")
def test_every_name_of_rollers_face_can_be_used() -> None:
    assert unusable("roller") == []


def test_compiling_loads_tvm_in_workers_alone() -> None:
    code = "import sys, roller.compile.pipeline; print([name for name in ('torch', 'tvm') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_face_imports_nothing_before_it_is_used() -> None:
    heavy = ("msgspec", "numpy", "tvm")
    code = f"import sys, {', '.join(PACKAGES)}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_help_of_every_command_needs_none_of_the_large_packages() -> None:
    code = (
        "import sys, click.testing\n"
        "from bench.speed.startup import helps\n"
        "from roller.cli import main as roller\n"
        "from daydream.cli import main as daydream\n"
        "for module, *arguments in helps():\n"
        "    program = {'roller.cli': roller, 'daydream.cli': daydream}[module]\n"
        "    assert click.testing.CliRunner().invoke(program, arguments).exit_code == 0, arguments\n"
        "names = 'codegen.gpu.source.nvrtc_library cupy lark matplotlib numba numpy onnx pandas '\n"
        "names += 'pyopencl scipy sympy timm torch transformers tvm'\n"
        "print([name for name in names.split() if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "command", ("predict timm:resnet18 --device h100", "plan timm:resnet18 --device h100 --nodes 2")
)
def test_models_without_pytorch_are_an_error_of_one_line(command: str) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        f"sys.argv = {['daydream', *command.split()]}\n"
        "from daydream.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "daydream: daydream predict: needs torch; run pip install 'roller[models]'\n"


@pytest.mark.parametrize("shell", ("bash", "zsh", "fish"))
@pytest.mark.parametrize("program", ("roller", "daydream"))
def test_shells_complete_commands_and_options(program: str, shell: str) -> None:
    def asked(words: str, count: int) -> str:
        position = {"COMP_WORDS": words, "COMP_CWORD": words.split()[-1] if shell == "fish" else str(count)}
        variables = {f"_{program.upper()}_COMPLETE": f"{shell}_complete", **position}
        result = CliRunner().invoke(importlib.import_module(f"{program}.cli").main, [], env=variables)
        return result.output

    command = {"roller": "compile", "daydream": "predict"}[program]
    assert command in asked(f"{program} {command[:4]}", 1)
    assert "--device" in asked(f"{program} {command} --de", 2)
