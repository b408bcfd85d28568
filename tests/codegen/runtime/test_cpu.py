"""Bundles of CPU kernels: written, loaded without TVM, called with NumPy arrays, and refused with a reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from codegen.bundle.manifest import read_manifest
from codegen.runtime.cpu import CpuOperator
from codegen.runtime.gpu import GpuOperator
from hal.microbench.cpu.native import host_architecture
from hal.support.errors import InputError
from tests.codegen.cpu_bundles import CpuKernel, write_cpu_bundle
from tests.codegen.cpu_kernels import built, form_of, schedule_for

pytestmark = pytest.mark.usefixtures("c_compiler")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    form = form_of(op="matmul", m=40, n=48, k=32, epilogue=["relu"])
    schedule = schedule_for(form)
    folder = tmp_path_factory.mktemp("bundles") / "op"
    kernel = CpuKernel(built(form, schedule), schedule, 1e-6)
    return write_cpu_bundle(folder, form, [kernel], device="cpu", architecture=host_architecture())


def test_an_operator_is_a_function_of_arrays(bundle: Path) -> None:
    operator = CpuOperator.load(bundle)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(argument.shape, np.float32) for argument in operator.inputs)
    out = np.empty(operator.output.shape, np.float32)
    assert operator(a, b, out=out) is out
    np.testing.assert_allclose(out, np.maximum(a @ b, 0), atol=1e-4)
    np.testing.assert_array_equal(operator(a, b), out)
    assert read_manifest(bundle).kernels[0].binary == "kernel_1.so"


def test_arrays_that_stay_are_checked_once(bundle: Path) -> None:
    operator = CpuOperator.load(bundle)
    a, b = (np.ones(argument.shape, np.float32) for argument in operator.inputs)
    call = operator.bound(a, b)
    out = call()
    np.testing.assert_array_equal(out, np.full((40, 48), 32.0))
    a[:] = 2.0
    assert call() is out and (out == 64.0).all()
    with pytest.raises(InputError, match=r"op.B: is float64; it takes float32"):
        operator.bound(a, b.astype(np.float64))


def test_the_gpu_loader_refuses_it(bundle: Path) -> None:
    with pytest.raises(InputError, match=r"holds shared libraries, no GPU kernels; load it with roller.load"):
        GpuOperator.load(bundle)


def test_it_is_loaded_without_a_compiler(bundle: Path) -> None:
    script = (
        "import sys\nfrom codegen.runtime.cpu import CpuOperator\nimport numpy as np\n"
        f"op = CpuOperator.load({str(bundle)!r})\nop(*(np.ones(a.shape, a.dtype) for a in op.inputs))\n"
        "print([name for name in ('tvm', 'sympy', 'llvmlite', 'msgspec') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert run.stdout.strip() == "[]"


def test_a_forked_process_starts_threads_of_its_own(bundle: Path) -> None:
    operator = CpuOperator.load(bundle)
    arrays = [np.ones(argument.shape, argument.dtype) for argument in operator.inputs]
    wanted = operator(*arrays)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(operator(*arrays), wanted) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_arrays_that_the_kernel_does_not_take_are_refused(bundle: Path) -> None:
    operator = CpuOperator.load(bundle)
    a, b = (np.ones(argument.shape, np.float32) for argument in operator.inputs)
    both = np.ones(40 * 48 + 32 * 48, np.float32)
    for arrays, out, message in (
        ((a,), None, "op: given 1 arrays; it takes 2: A, B"),
        ((a, b.T), None, r"op.B: has shape \[48, 32\]; it takes \[32, 48\]"),
        ((a, b.astype(np.float64)), None, "op.B: is float64; it takes float32"),
        ((a[:, ::-1], b), None, "op.A: is not dense and row-major"),
        ((a, both[: 32 * 48].reshape(32, 48)), both[: 40 * 48].reshape(40, 48), "op.Out: overlaps B"),
    ):
        with pytest.raises(InputError, match=message):
            operator(*arrays, out=out)


def test_a_damaged_library_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "op"
    copy.mkdir()
    for file in bundle.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "kernel_1.so").write_bytes(b"no library")
    with pytest.raises(InputError, match="cannot be loaded"):
        CpuOperator.load(copy)
