"""A planted fault, one wrong index in an emitted text, never reaches a bundle: not by the command, from Python, from
processes of their own, or from the cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from codegen.bundle.manifest import read_manifest
from codegen.compile.cache import stored_first
from codegen.gpu import sources
from hal.catalog import load_device
from roller import cli
from roller.compile.bundles import WrongKernelError, write_bundle
from roller.compile.pipeline import CompiledOperator, compile_operators
from sokoban.language.operators import operator_from_data
from tests.conftest import ROOT
from tests.support.executors import InTurn

OPERATOR = {"name": "product", "op": "matmul", "m": 70, "n": 45, "k": 19}

pytestmark = pytest.mark.usefixtures("emulator", "device_compiler")


def spoilt(source: str) -> str:
    """A text that stores its first result at the place of the second, and so on."""
    return source.replace("C_ptr[", "C_ptr[1 + ")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("op.json").write_text(json.dumps(OPERATOR))
    return tmp_path


def plant(monkeypatch: pytest.MonkeyPatch, *, texts: int) -> None:
    """The first ``texts`` different texts of products that are emitted are spoilt, wherever they are emitted for."""
    original, seen = sources.cuda_source, {}

    def cuda_source(lowered: Any, *arguments: Any) -> str:
        source = original(lowered, *arguments)
        # A schedule is known by its launch, whatever the kernel is called and however large the problem.
        number = seen.setdefault((lowered.block, lowered.shared_bytes), len(seen))
        return spoilt(source) if number < texts else source

    monkeypatch.setattr(sources, "cuda_source", cuda_source)

    @contextmanager
    def in_turn(jobs: int | None) -> Iterator[InTurn]:
        yield InTurn()

    monkeypatch.setattr(cli, "kernel_pool", in_turn)


def compile_command(*more: str) -> Result:
    return CliRunner().invoke(cli.main, ["compile", "op.json", "--device", "v100", "--top-k", "2", *more])


def test_the_command_takes_the_next_rank_and_says_what_it_struck_out(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, texts=1)
    result = compile_command("--no-cache")
    assert result.exit_code == 0, result.output
    assert re.search(r"roller compile: product: struck out \S.* \(.*\): cuda, emulated: ", result.stderr)
    kernels = read_manifest(Path("out/product")).kernels
    assert [kernel.verified for kernel in kernels] == [True, None] and "NO" not in result.stdout
    assert all("C_ptr[1 + " not in Path("out/product", kernel.source).read_text() for kernel in kernels[:1])


@pytest.mark.parametrize("form", ["--no-json", "--json"])
def test_without_a_right_kernel_the_command_writes_nothing_and_exits_with_1(
    here: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    plant(monkeypatch, texts=1000)
    result = compile_command("--no-cache", form)
    assert result.exit_code == 1
    assert re.search(
        r"roller compile: product: all \d+ kernels tried failed verification by cuda, emulated: .*; "
        r"nothing was written for it\n$",
        result.stderr,
    )
    assert not os.path.exists("out/product")
    if form == "--json":
        assert json.loads(result.stdout)["kernels"] == [] and json.loads(result.stdout)["error"]


def compiled(pool: Any) -> CompiledOperator:
    return next(compile_operators([operator_from_data(OPERATOR)], load_device("v100"), top_k=2, verify=1, pool=pool))


def test_python_gets_no_kernel_and_no_bundle(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, texts=1000)
    result = compiled(InTurn())
    assert result.kernels == () and result.error.startswith("all ")
    with pytest.raises(WrongKernelError, match="product: all "):
        write_bundle(result, load_device("v100"), here / "out")
    assert not (here / "out").exists()


def test_the_cache_keeps_no_wrong_kernel(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as planted:
        plant(planted, texts=1000)
        assert compiled(stored_first(InTurn())).kernels == ()
        assert compile_command().exit_code == 1
    result = compiled(stored_first(InTurn()))
    assert result.struck_out == () and all("C_ptr[1 + " not in k.built.parts[0].source for k in result.kernels)


#: Run when any Python starts that finds it: what the commands' own processes are spoilt by.
_SITE = """
import importlib.abc, importlib.machinery, sys

class Spoil(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "codegen.gpu.sources":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            original = module.cuda_source
            module.cuda_source = lambda *arguments: original(*arguments).replace("C_ptr[", "C_ptr[1 + ")
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Spoil())
"""


@pytest.mark.slow
def test_processes_hand_out_no_wrong_kernel(here: Path) -> None:
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text(_SITE)
    paths = os.pathsep.join([str(here / "site"), str(ROOT)])
    command = [
        sys.executable,
        "-m",
        "roller.cli",
        "compile",
        "op.json",
        "--device",
        "v100",
        "--top-k",
        "1",
        "--jobs",
        "2",
    ]
    process = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(here / "cache")}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 1 and "failed verification by cuda, emulated" in process.stderr, process.stderr
    assert not os.path.exists("out/product")
