"""Compiled operators on a real GPU: loaded, registered with PyTorch, profiled. Skipped where there is none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import roller
from codegen.bundle.manifest import read_manifest
from hal.catalog import load_device
from roller.compile.bundles import write_bundle
from roller.compile.pipeline import compile_operators
from roller.compile.workers import worker_pool
from roller.profile.gpu import MeasureOptions
from roller.profile.profile import ProfileOptions, profile
from sokoban.language.operators import operator_from_data
from sokoban.language.reference import evaluate


def why_not() -> str:
    """Why these tests cannot run here; empty where they can."""
    try:
        import cupy

        return "" if cupy.cuda.runtime.getDeviceCount() else "there is no GPU"
    except Exception as error:  # CuPy is missing, or its driver is
        return str(error)


pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"needs CuPy and a GPU: {why_not()}")

OPERATORS: dict[str, dict[str, Any]] = {
    "matmul": {"op": "matmul", "m": 520, "n": 264, "k": 200},
    "half": {"op": "matmul", "m": 256, "n": 256, "k": 256, "dtype": "float16"},
    "brain": {"op": "matmul", "m": 256, "n": 128, "k": 64, "dtype": "bfloat16"},
    "conv": {"op": "conv2d", "n": 2, "c": 16, "h": 30, "w": 30, "f": 32, "kh": 3, "kw": 3, "padding": 1},
    "softmax": {"op": "softmax", "shape": [100, 1000]},
    "norm": {"op": "layer_norm", "shape": [64, 768], "dtype": "float16"},
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All operators, compiled for the A100 and thus by NVRTC where the GPU is another."""
    out = tmp_path_factory.mktemp("bundles")
    device = load_device("a100")
    expressions = [operator_from_data({**data, "name": name}) for name, data in OPERATORS.items()]
    with worker_pool(2) as pool:
        for compiled in compile_operators(expressions, device, top_k=3, verify=0, pool=pool, method="roller"):
            write_bundle(compiled, device, out)
    return out


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.filterwarnings("ignore:.*was compiled for")
def test_every_rank_computes_the_operator(bundles: Path, name: str) -> None:
    expr = operator_from_data({**OPERATORS[name], "name": name})
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, expr.output.dtype)
    inputs = [torch.rand(t.caller_shape, generator=generator).to(dtype) for t in expr.inputs]
    values = {t.name: i.double().numpy() for t, i in zip(expr.inputs, inputs, strict=True)}
    expected = evaluate(expr, values).reshape(expr.output.caller_shape)
    tolerance = 1e-4 if expr.output.dtype == "float32" else 2e-2
    for kernel in read_manifest(bundles / name).kernels:
        result = roller.load(bundles / name, rank=kernel.rank)(*(i.cuda() for i in inputs))
        assert result.dtype == dtype and result.is_cuda
        np.testing.assert_allclose(result.double().cpu().numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:.*was compiled for")
def test_cupy_arrays_and_its_streams(bundles: Path) -> None:
    import cupy

    operator = roller.load(bundles / "softmax")
    x = cupy.random.rand(100, 1000, dtype=cupy.float32)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.wait_event(cupy.cuda.Stream.null.record())
        result = operator(x)
    stream.synchronize()
    assert float(abs(result.sum(axis=1) - 1).max()) < 1e-5


@pytest.mark.filterwarnings("ignore:.*was compiled for")
def test_torch_runs_traces_and_compiles_it(bundles: Path) -> None:
    op = roller.torch_op(bundles / "matmul", name="on_gpu_matmul")
    a, b = torch.rand(520, 200, device="cuda"), torch.rand(200, 264, device="cuda")
    torch.testing.assert_close(op(a, b), (a.double() @ b.double()).float(), rtol=1e-4, atol=1e-4)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        torch.ops.roller.on_gpu_matmul(a, b)
        torch.cuda.synchronize()
    names = {event.name for event in trace.events()}
    assert "roller::on_gpu_matmul" in names and any("roller_matmul" in name for name in names)
    compiled = torch.compile(lambda x, y: op(x, y) + 1, backend="aot_eager")
    torch.testing.assert_close(compiled(a, b), op(a, b) + 1)


def test_profiling_checks_times_and_ranks(bundles: Path) -> None:
    options = ProfileOptions(measure=MeasureOptions(repeats=5, warmup_seconds=0.1))
    results = list(profile(bundles, [0], options))
    assert sorted(result.name for result in results) == sorted(OPERATORS)
    for result in results:
        assert all(kernel.measurement.struck_out == "" for kernel in result.kernels), result
        kernels = list(read_manifest(result.directory).kernels)
        times = [kernel.profiled_seconds or math.inf for kernel in kernels]
        assert times == sorted(times) and 5e-7 < times[0] < 1e-2


def test_a_kernel_that_breaks_the_gpu_costs_itself_alone(bundles: Path, tmp_path: Path) -> None:
    folder = tmp_path / "softmax"
    folder.mkdir()
    for file in (bundles / "softmax").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest.replace('"kernel_1.cubin"', "null"))
    source = (folder / "kernel_1.cu").read_text()
    start = source.rindex("{", 0, source.index(";"))
    (folder / "kernel_1.cu").write_text(source[: start + 1] + " *(volatile int*)8 = 1; " + source[start + 1 :])
    (result,) = profile(folder, [0], ProfileOptions(measure=MeasureOptions(repeats=3, warmup_seconds=0.0)))
    reasons = {kernel.entry.source: kernel.measurement.struck_out for kernel in result.kernels}
    assert "illegal" in reasons["kernel_1.cu"].lower()
    assert reasons["kernel_2.cu"] == ""
