"""Operators as functions of GPU tensors, over a pretended CuPy that really computes."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from codegen.runtime.gpu import GpuOperator, runs_on
from hal.support.errors import InputError
from tests.codegen import fake_cupy
from tests.codegen.bundles import ADDS, RIGHT, write_bundle, write_chain

pytestmark = pytest.mark.usefixtures("emulator")

X = np.arange(40, dtype=np.float32).reshape(5, 8)
B = np.arange(8, dtype=np.float32)
EXPECTED = 2 * X + B


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.Gpu:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)  # type: ignore[arg-type]
    return fake_cupy.reset()


@pytest.fixture
def twice(gpu: fake_cupy.Gpu, tmp_path: Path) -> GpuOperator:
    return GpuOperator.load(write_bundle(tmp_path, (RIGHT, RIGHT)))


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_80", (8, 0), True), ("sm_80", (8, 6), True), ("sm_86", (8, 0), False), ("sm_70", (8, 0), False),
        ("sm_90", (8, 9), False), ("sm_90a", (9, 0), True), ("sm_100a", (10, 3), False), ("sm_120", (12, 0), True),
        ("gfx90a", (9, 0), False),
    ],
)  # fmt: skip
def test_a_cubin_runs_on_its_major_architecture_from_its_minor_on(
    architecture: str, capability: tuple[int, int], runs: bool
) -> None:
    assert runs_on(architecture, capability) is runs


def test_an_operator_is_a_function_of_arrays(twice: GpuOperator, gpu: fake_cupy.Gpu) -> None:
    result = twice(fake_cupy.asarray(X), fake_cupy.asarray(B))
    assert isinstance(result, fake_cupy.ndarray) and result.dtype == np.float32
    np.testing.assert_array_equal(result, EXPECTED)
    assert [launch[:4] for launch in gpu.launches] == [("twice_kernel", (1, 1, 1), (64, 1, 1), 0)]
    assert gpu.loaded == ["kernel_1.cubin"] and gpu.compiled == []
    assert repr(twice).startswith("<twice(X: float32[5, 8], B: float32[8]) -> Y: float32[5, 8], rank 1")


def test_it_loads_once_and_launches_on_the_current_stream(twice: GpuOperator, gpu: fake_cupy.Gpu) -> None:
    stream = fake_cupy.Stream(non_blocking=True)
    x, b = fake_cupy.asarray(X), fake_cupy.asarray(B)
    twice(x, b)
    with stream:
        twice(x, b)
    assert [launch[4] for launch in gpu.launches] == [fake_cupy.Stream.null, stream]
    assert gpu.loaded == ["kernel_1.cubin"]


def test_the_rank_can_be_chosen(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    GpuOperator.load(write_bundle(tmp_path, (RIGHT, RIGHT)), rank=2)(fake_cupy.asarray(X), fake_cupy.asarray(B))
    assert gpu.loaded == ["kernel_2.cubin"]


def test_the_output_may_be_given(twice: GpuOperator) -> None:
    out = fake_cupy.empty((5, 8))
    assert twice(fake_cupy.asarray(X), fake_cupy.asarray(B), out=out) is out
    np.testing.assert_array_equal(out, EXPECTED)


def test_on_another_architecture_the_source_is_compiled_and_that_is_said(
    twice: GpuOperator, gpu: fake_cupy.Gpu
) -> None:
    gpu.capability = "90"
    with pytest.warns(UserWarning, match=r"twice was compiled for sm_70, here by NVRTC for sm_90; its rank was"):
        result = twice(fake_cupy.asarray(X), fake_cupy.asarray(B))
    np.testing.assert_array_equal(result, EXPECTED)
    ((options, source),) = gpu.compiled
    assert "--std=c++17" in options and "twice_kernel" in source and gpu.loaded == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twice(fake_cupy.asarray(X), fake_cupy.asarray(B))


@pytest.mark.parametrize(("capability", "loaded"), [("90", 1), ("100", 0)])
def test_a_kernel_may_be_for_another_architecture_than_its_bundle(
    gpu: fake_cupy.Gpu, tmp_path: Path, capability: str, loaded: int
) -> None:
    gpu.capability = capability
    operator = GpuOperator.load(
        write_bundle(tmp_path, (RIGHT,), kernel={"architecture": "sm_90a"}, architecture="sm_90")
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operator(fake_cupy.asarray(X), fake_cupy.asarray(B))
    assert (len(gpu.loaded), len(gpu.compiled)) == (loaded, 1 - loaded)


def test_more_shared_memory_than_usual_is_asked_for(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, kernel={"dynamic_shared_bytes": 65536})
    operator = GpuOperator.load(folder)
    operator(fake_cupy.asarray(X), fake_cupy.asarray(B))
    assert gpu.launches[0][3] == 65536
    assert operator.loaded[0, 1].steps[0][1].max_dynamic_shared_size_bytes == 65536
    large = GpuOperator.load(write_bundle(tmp_path, name="large", kernel={"dynamic_shared_bytes": 131072}))
    with pytest.raises(InputError, match="needs 131072 bytes of shared memory a block, this GPU gives 98304"):
        large(fake_cupy.asarray(X), fake_cupy.asarray(B))


def test_an_output_that_is_added_to_is_cleared_first(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    operator = GpuOperator.load(write_bundle(tmp_path, (ADDS,), kernel={"zero_output": True}))
    out = fake_cupy.asarray(np.full((5, 8), 7, np.float32))
    np.testing.assert_array_equal(operator(fake_cupy.asarray(X), fake_cupy.asarray(B), out=out), EXPECTED)
    assert gpu.launches[0][:3] == ("memset", 0, 160)


def test_several_launches_pass_a_workspace_on(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    operator = GpuOperator.load(write_chain(tmp_path))
    result = operator(fake_cupy.asarray(X), fake_cupy.asarray(B))
    np.testing.assert_array_equal(result, EXPECTED)
    assert [launch[0] for launch in gpu.launches] == ["doubles_kernel", "adds_kernel"]
    assert gpu.loaded == ["kernel_1_part_1.cubin", "kernel_1_part_2.cubin"]


def test_every_stream_has_a_workspace_of_its_own(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    operator = GpuOperator.load(write_chain(tmp_path))
    x, b, stream = fake_cupy.asarray(X), fake_cupy.asarray(B), fake_cupy.Stream(non_blocking=True)
    operator(x, b)
    (first,) = [operator.loaded[0, operator.kernel.rank].workspace()["T"]]
    with stream:
        operator(x, b)
        second = operator.loaded[0, operator.kernel.rank].workspace()["T"]
    assert first.nbytes == second.nbytes == 160
    assert first.data.ptr != second.data.ptr
    operator(x, b)
    assert operator.loaded[0, operator.kernel.rank].workspace()["T"] is first
    assert len(operator.loaded[0, operator.kernel.rank].streams) == 2


def test_a_workspace_that_is_added_to_is_cleared_first(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    folder = write_chain(tmp_path, ("if (i < 40) T[i] += 2.0f * X[i];", "if (i < 40) Y[i] = T[i] + B[i % 8];"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["kernels"][0]["launches"][0]["zero_output"] = True
    (folder / "manifest.json").write_text(json.dumps(manifest))
    operator = GpuOperator.load(folder)
    for _ in range(2):
        np.testing.assert_array_equal(operator(fake_cupy.asarray(X), fake_cupy.asarray(B)), EXPECTED)
    assert [launch[:3] for launch in gpu.launches if launch[0] == "memset"] == 2 * [("memset", 0, 160)]


def test_all_launches_are_compiled_on_another_architecture(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    gpu.capability = "90"
    with pytest.warns(UserWarning, match="here by NVRTC for sm_90"):
        result = GpuOperator.load(write_chain(tmp_path))(fake_cupy.asarray(X), fake_cupy.asarray(B))
    np.testing.assert_array_equal(result, EXPECTED)
    assert len(gpu.compiled) == 2 and gpu.loaded == []


def test_a_kernel_that_cannot_be_loaded_is_one_line(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    operator = GpuOperator.load(write_bundle(tmp_path, kernel={"entry": "other"}))
    with pytest.raises(InputError, match=r"^kernel_1\.cu: cannot be loaded \(cubin\): CUDA_ERROR_NOT_FOUND"):
        operator(fake_cupy.asarray(X), fake_cupy.asarray(B))


def unaligned() -> Any:
    store = fake_cupy.empty(48)
    return store[1:41].reshape(5, 8)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda: [X[0]], "twice: given 1 tensors; it takes 2: X, B"),
        (lambda: [fake_cupy.asarray(X.T.copy()), 0], "twice.X: has shape [8, 5]; it takes [5, 8]"),
        (lambda: [fake_cupy.asarray(X.astype("float64")), 0], "twice.X: is float64; it takes float32"),
        (lambda: [fake_cupy.asarray(X.T.copy()).T, 0], "twice.X: is not dense and row-major; give a contiguous copy"),
        (
            lambda: [unaligned(), 0],
            "twice.X: starts at an address that is no multiple of 16 bytes; give a copy with memory of its own",
        ),
        (
            lambda: [fake_cupy.asarray(X), 3],
            "twice.B: is a int; give a CuPy array, a PyTorch tensor or another with DLPack",
        ),
        (lambda: [X, B], "twice.X: is on the CPU; move it to a GPU first"),
    ],
)
def test_other_tensors_are_refused_in_one_line(twice: GpuOperator, tensors: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        twice(*tensors())
    assert str(caught.value) == message


def test_tensors_have_to_be_on_one_gpu_and_apart(twice: GpuOperator) -> None:
    x, b = fake_cupy.asarray(X), fake_cupy.asarray(B)
    b.on = 1
    with pytest.raises(InputError, match=r"twice: the tensors are on GPUs \[0, 1\]; move all to one"):
        twice(x, b)
    b.on = 0
    with pytest.raises(InputError, match=r"twice\.Y: overlaps X; give it memory of its own"):
        twice(x, b, out=x)
    out = fake_cupy.empty((5, 8))
    out.on = 1
    with pytest.raises(InputError, match=r"twice\.Y: is on GPU 1; the inputs are on 0"):
        twice(x, b, out=out)


def test_without_cupy_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # type: ignore[arg-type]
    operator = GpuOperator.load(write_bundle(tmp_path))
    tensor = SimpleNamespace(__dlpack__=lambda: None, __dlpack_device__=lambda: (2, 0))
    with pytest.raises(InputError, match=r"cannot be imported .*pip install cupy-cuda13x"):
        operator(tensor, tensor)


#: Everything that the project depends on but that a GPU's machine need not have.
BLOCKED = (
    "tvm", "tvm_ffi", "sympy", "sokoban", "msgspec", "lark", "numba", "pyopencl", "cuda", "click", "rich", "torch",
)  # fmt: skip

PROGRAM = """
import sys
blocked = sys.argv[2].split()
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import numpy as np
from tests.codegen import fake_cupy
sys.modules["cupy"] = fake_cupy
import roller
operator = roller.load(sys.argv[1])
x, b = np.ones((5, 8), np.float32), np.ones(8, np.float32)
print(float(operator(fake_cupy.asarray(x), fake_cupy.asarray(b)).sum()))
import roller.profile.profile, roller.profile.clusters
"""


def test_loading_imports_no_compiler(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(write_bundle(tmp_path)), " ".join(BLOCKED)]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 120.0


def test_roller_itself_imports_nothing_else() -> None:
    heavy = ("codegen", "msgspec", "numpy", "sokoban")
    code = f"import sys; import roller; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert not hasattr(builtins, "roller")
