"""Tensor maps: what the driver is asked to encode, and kernels that take them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.bundle.manifest import to_json
from codegen.bundle.reader import read_bundle
from codegen.bundle.records import FORMAT, MANIFEST, Argument, Manifest
from codegen.compile.build import build_kernel
from codegen.compile.request import BuildRequest
from codegen.runtime import tensor_maps
from codegen.runtime.gpu import GpuOperator
from codegen.target import Target
from codegen.tensor_map import TensorMap
from hal.support.errors import InputError
from tests.codegen import fake_cupy
from tests.codegen.bundles import kernel_record
from tests.codegen.matrix_kernels import form_of, wgmma_schedule_of

SEEN = TensorMap(tensor="A", dtype="bfloat16", shape=(3, 70, 64), box=(1, 32, 64))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_cupy.Gpu:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)  # type: ignore[arg-type]
    monkeypatch.setattr(tensor_maps, "driver", fake_cupy.Driver)
    tensor_maps.encoded.cache_clear()
    return fake_cupy.reset(capability="90")


def test_a_map_is_128_bytes_that_the_driver_fills(gpu: fake_cupy.Gpu) -> None:
    argument = tensor_maps.encoded(SEEN, 4096)
    assert (argument.size, argument.itemsize, argument.ctypes.data % 64) == (1, 128, 0)
    (known,) = gpu.tensor_maps.values()
    assert (known.dtype, known.shape, known.box) == (SEEN.dtype, SEEN.shape, SEEN.box)
    assert tensor_maps.encoded(SEEN, 4096) is argument


def test_what_the_driver_refuses_is_said_in_one_line(gpu: fake_cupy.Gpu) -> None:
    with pytest.raises(InputError, match="A: cannot be seen by bulk copies: driver error 1"):
        tensor_maps.encoded(SEEN, 4104)


def test_a_driver_without_tensor_maps_is_said(monkeypatch: pytest.MonkeyPatch, gpu: fake_cupy.Gpu) -> None:
    monkeypatch.setattr(tensor_maps, "driver", object)
    with pytest.raises(InputError, match="use a driver of CUDA 12 or later"):
        tensor_maps.encoded(SEEN, 8192)


@pytest.mark.usefixtures("emulator")
def test_a_kernel_of_a_bundle_takes_its_operands_as_maps(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    """From the schedule to the launch: the manifest holds what the launcher has the driver encode."""
    form = form_of(op="matmul", m=136, n=72, k=72)
    schedule = wgmma_schedule_of(form, 64, 64, 3, cluster=2, launched=2)
    target = Target("cuda-source", "sm_90", 32)
    built = build_kernel(BuildRequest(form=form, schedule=schedule, entry="product", target=target))
    assert built.error == "" and [seen.tensor for seen in built.tensor_maps] == ["A", "B"]
    changes: dict[str, Any] = {
        "entry": built.entry, "grid": built.grid, "block": built.block, "binary": None,
        "dynamic_shared_bytes": built.dynamic_shared_bytes, "tensor_maps": built.tensor_maps,
    }  # fmt: skip
    arguments = tuple(
        Argument(name=name, role="output" if name == "C" else "input", dtype="float16", shape=shape)
        for name, shape in (("A", (136, 72)), ("B", (72, 72)), ("C", (136, 72)))
    )
    manifest = Manifest(
        format=FORMAT, name="product", device="h200", architecture="sm_90", statements=(), axes={}, fused_axes={},
        accumulate="float32", arguments=arguments, notes=(), kernels=(kernel_record(1, **changes),),
    )  # fmt: skip
    (tmp_path / MANIFEST).write_bytes(to_json(manifest))
    (tmp_path / "kernel_1.cu").write_text(built.source)
    assert read_bundle(tmp_path).kernels[0].tensor_maps == built.tensor_maps
    a, b = (np.random.default_rng(0).integers(-3, 4, shape).astype(np.float16) for shape in ((136, 72), (72, 72)))
    result = GpuOperator.load(tmp_path)(fake_cupy.asarray(a), fake_cupy.asarray(b))
    np.testing.assert_array_equal(np.asarray(result), a.astype(np.float32) @ b.astype(np.float32))
