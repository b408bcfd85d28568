"""Tensors of other frameworks: borrowed without a copy, answered in kind."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from codegen.runtime.arrays import CupyTensors, DlpackTensors, TorchTensors, holds, tensors_of
from codegen.runtime.gpu import GpuOperator
from hal.support.errors import InputError
from tests.codegen import fake_cupy
from tests.codegen.bundles import write_bundle

pytestmark = pytest.mark.usefixtures("emulator")

X = np.arange(40, dtype=np.float32).reshape(5, 8)
B = np.arange(8, dtype=np.float32)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.Gpu:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)  # type: ignore[arg-type]
    return fake_cupy.reset()


class OnGpu(torch.Tensor):
    """A tensor that says it lies on GPU 0."""

    is_cuda = True  # type: ignore[assignment]
    device = SimpleNamespace(index=0)  # type: ignore[assignment]


def on_gpu(array: np.ndarray[Any, Any]) -> OnGpu:
    placed = fake_cupy.asarray(array)
    return torch.from_numpy(np.asarray(placed)).as_subclass(OnGpu)


@pytest.fixture
def cuda_torch(gpu: fake_cupy.Gpu, monkeypatch: pytest.MonkeyPatch) -> fake_cupy.Gpu:
    """PyTorch as it would be with a GPU: outputs there, and a stream of its own."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: object) -> OnGpu:
        assert device is OnGpu.device
        bits = torch.zeros(shape, dtype=dtype).view(torch.uint8).numpy()
        return torch.from_numpy(np.asarray(fake_cupy.asarray(bits))).view(dtype).as_subclass(OnGpu)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=4711))
    return gpu


def test_torch_tensors_run_on_torch_streams_and_come_back_as_such(cuda_torch: fake_cupy.Gpu, tmp_path: Path) -> None:
    result = GpuOperator.load(write_bundle(tmp_path))(on_gpu(X), on_gpu(B))
    assert isinstance(result, OnGpu)
    np.testing.assert_array_equal(result.numpy(), 2 * X + B)
    assert [launch[4].ptr for launch in cuda_torch.launches] == [4711]


def test_streams_are_passed_to_older_versions_of_cupy_too(
    cuda_torch: fake_cupy.Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(fake_cupy.Stream, "from_external")
    GpuOperator.load(write_bundle(tmp_path))(on_gpu(X), on_gpu(B))
    assert [launch[4].ptr for launch in cuda_torch.launches] == [4711]


def test_half_precision_that_numpy_lacks_is_named(cuda_torch: fake_cupy.Gpu, tmp_path: Path) -> None:
    operator = GpuOperator.load(write_bundle(tmp_path, ("if (i < 40) Y[i] = X[i];",), dtype="bfloat16"))
    x = on_gpu(X.astype("uint16")).view(torch.bfloat16)
    b = on_gpu(B.astype("uint16")).view(torch.bfloat16)
    result = operator(x, b)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result.view(torch.int16), x.view(torch.int16))
    with pytest.raises(InputError, match=r"twice\.X: is float32; it takes bfloat16"):
        operator(on_gpu(X), b)
    bits = operator(fake_cupy.asarray(X.astype("uint16")), fake_cupy.asarray(B.astype("uint16")))
    assert bits.dtype == np.uint16
    np.testing.assert_array_equal(bits, X.astype("uint16"))


def test_torch_tensors_on_the_cpu_are_refused(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        GpuOperator.load(write_bundle(tmp_path))(torch.from_numpy(X), torch.from_numpy(B))
    assert str(caught.value) == "twice.X: is on the cpu; move it to a GPU with .cuda()"


class Foreign:
    """A tensor of a framework that has DLPack."""

    def __init__(self, host: np.ndarray[Any, Any]) -> None:
        self.host = host

    def __dlpack__(self) -> None:
        raise AssertionError("the pretended CuPy reads the memory itself")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def test_any_tensor_with_dlpack_is_borrowed_and_lent_back(
    gpu: fake_cupy.Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework = ModuleType("framework")
    framework.from_dlpack = lambda array: Foreign(np.asarray(array))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "framework", framework)
    monkeypatch.setattr(Foreign, "__module__", "framework.arrays")
    x, b = Foreign(np.asarray(fake_cupy.asarray(X))), Foreign(np.asarray(fake_cupy.asarray(B)))
    operator = GpuOperator.load(write_bundle(tmp_path))
    result = operator(x, b)
    assert isinstance(result, Foreign)
    np.testing.assert_array_equal(result.host, 2 * X + B)
    del framework.from_dlpack
    assert isinstance(operator(x, b), fake_cupy.ndarray)


def test_frameworks_do_not_mix(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    operator = GpuOperator.load(write_bundle(tmp_path))
    with pytest.raises(InputError, match="twice: the tensors are of CuPy and PyTorch; give all of one framework"):
        operator(fake_cupy.asarray(X), on_gpu(B))


def test_a_tensor_is_known_by_its_type(gpu: fake_cupy.Gpu) -> None:
    assert isinstance(tensors_of(fake_cupy.asarray(X)), CupyTensors)
    assert isinstance(tensors_of(torch.zeros(1)), TorchTensors)
    assert isinstance(tensors_of(Foreign(X)), DlpackTensors)
    with pytest.raises(InputError, match="is a list"):
        tensors_of([1.0])


def test_bits_stand_for_dtypes_that_numpy_lacks() -> None:
    assert holds("bfloat16", "uint16") and holds("bfloat16", "bfloat16") and holds("float8_e4m3fn", "uint8")
    assert not holds("bfloat16", "float16") and not holds("float16", "uint16")
