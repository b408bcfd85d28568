"""TVM is imported without PyTorch, and both work in one process whichever comes first."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from codegen.tir.tvm_import import HidingFinder, hide_torch_from_tvm
from roller.compile.workers import worker_pool

ROOT = Path(__file__).resolve().parents[3]

LOWER = """
from dataclasses import replace

from codegen.compile.build import build_kernel
from codegen.compile.request import BuildRequest
from codegen.target import Target
from hal.catalog import load_device
from roller.construct.construct import construct
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import operator_from_data

def lower():
    device = load_device("v100")
    form = kernel_form(operator_from_data({"op": "matmul", "m": 256, "n": 128, "k": 64}))
    schedule = construct(form, device, 1).programs[0].schedule
    target = replace(Target.of(device), generator="cuda-source")
    return build_kernel(BuildRequest(form=form, schedule=schedule, entry="f", target=target)).source
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded(*names: str) -> list[str]:
    """Those of the modules that this process has loaded."""
    return [name for name in names if name in sys.modules]


@pytest.mark.usefixtures("device_compiler")
def test_lowering_loads_no_torch() -> None:
    code = f"{LOWER}\nassert '__global__' in lower()\nimport sys; print('tvm' in sys.modules, 'torch' in sys.modules)"
    assert run(code) == "True False"


@pytest.mark.usefixtures("device_compiler")
def test_workers_load_no_torch() -> None:
    with worker_pool(1) as pool:
        assert pool.submit(loaded, "tvm", "torch").result() == ["tvm"]


@pytest.mark.slow
@pytest.mark.usefixtures("device_compiler", "pytorch")
def test_torch_works_next_to_tvm() -> None:
    use = "import torch; assert (torch.ones(3) @ torch.ones(3)).item() == 3 and torch.nn.Linear(2, 2) is not None"
    assert run(f"{LOWER}\nbefore = lower()\n{use}\nassert lower() == before\nprint('both')") == "both"


@pytest.mark.usefixtures("device_compiler", "pytorch")
def test_tvm_has_torch_where_it_is_loaded_already() -> None:
    code = "import torch, codegen, tvm, tvm_ffi._convert as c; print(c.torch is torch)"
    assert run(code) == "True"


@pytest.mark.usefixtures("device_compiler")
def test_tvm_keeps_its_own_loader() -> None:
    code = "import codegen, tvm; print(type(tvm.__loader__).__name__, type(tvm.__spec__.loader).__name__)"
    assert run(code) == "SourceFileLoader SourceFileLoader"


def test_torch_is_hidden_from_one_thread_alone() -> None:
    finder, seen = HidingFinder(), []

    def look() -> None:
        seen.append(finder.find_spec("torch", None))

    with finder.hiding():
        with pytest.raises(ModuleNotFoundError, match="No module named 'torch' while TVM is imported"):
            finder.find_spec("torch", None)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [None]
    assert finder.find_spec("torch", None) is None


def test_other_modules_are_left_to_other_finders() -> None:
    finder = HidingFinder()
    with finder.hiding():
        assert finder.find_spec("json", None, ModuleType("json")) is None


def test_installing_it_again_changes_nothing() -> None:
    before = list(sys.meta_path)
    hide_torch_from_tvm()
    assert sys.meta_path == before


@pytest.mark.usefixtures("device_compiler")
def test_workers_do_without_what_building_kernels_needs_nothing_of() -> None:
    """The names are there, which TVM imports; nothing that belongs to them is."""
    with worker_pool(1) as pool:
        assert pool.submit(loaded, "tvm.relax", "tvm.relax.transform", "tvm.s_tir.meta_schedule.tune").result() == [
            "tvm.relax"
        ]


@pytest.mark.usefixtures("device_compiler")
def test_kernels_are_the_same_where_the_rest_of_tvm_is_left_out() -> None:
    """Workers are forked from what this module has imported."""
    without = "import codegen.compile.preload\n"
    look = "import sys; print(lower()); print('tvm.backend.cuda.script' in sys.modules)"
    whole, part = (run(f"{before}{LOWER}\n{look}").splitlines() for before in ("", without))
    assert whole[:-1] == part[:-1] and "__global__" in "".join(part)
    assert (whole[-1], part[-1]) == ("True", "False")
