"""From operator files to kernels on this machine's cores: compile, load, profile, verify, inspect, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

import roller
from codegen.bundle.manifest import read_manifest
from codegen.target import Target
from codegen.verify.cpu import verify_cpu_chain
from hal.catalog import load_device
from hal.microbench.cpu.native import host_architecture
from hal.microbench.cpu.topology import read_topology
from hal.microbench.numbers import toml_text
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller import cli
from roller.algorithms import algorithms_of
from roller.construct.construct import construct
from roller.profile import profile
from roller.profile.cpu import CpuMeasureOptions
from roller.programs import finders
from sokoban.kernel.form import kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data
from tests.codegen.bundles import write_bundle

#: A shipped processor by the width of its vectors, in bits: this one, as far as kernels are concerned.
SPECS = {512: "xeon-platinum-8375c", 256: "epyc-7763"}
WIDTH = read_topology().simd_bits

pytestmark = [
    pytest.mark.usefixtures("c_compiler"),
    pytest.mark.skipif(WIDTH not in SPECS, reason=f"no shipped processor has vectors of {WIDTH} bits"),
]

OPERATORS = [
    {"name": "product", "op": "matmul", "m": 24, "n": 48, "k": 20, "epilogue": ["relu"]},
    {"name": "rows", "op": "softmax", "shape": [6, 50]},
    {"name": "conv", "op": "conv2d", "n": 1, "c": 3, "h": 8, "w": 8, "f": 16, "kh": 1, "kw": 1},
]


class Here(Executor):
    """Runs what is submitted at once, in this process."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


@contextmanager
def here_pool(jobs: int | None) -> Iterator[Executor]:
    yield Here()


def processor() -> DeviceSpec:
    return msgspec.structs.replace(load_device(SPECS[WIDTH]), name="mine", aliases=(), architecture=host_architecture())


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments], prog_name="roller")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a device file, operators, and what ``roller compile`` makes of them."""
    folder = tmp_path_factory.mktemp("processor")
    (folder / "mine.toml").write_text(toml_text(processor()))
    (folder / "ops.json").write_text(json.dumps(OPERATORS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "kernel_pool", here_pool)
        options = ("--device", folder / "mine.toml", "--out", folder / "out", "--top-k", 2, "--json")
        result = run("compile", folder / "ops.json", *options)
    assert result.exit_code == 0, result.output
    (folder / "compiled.jsonl").write_text(result.output)
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures in no time."""
    monkeypatch.setattr(CpuMeasureOptions.__init__, "__defaults__", (3, 0.0, 0.0))


def test_a_bundle_has_libraries_and_their_assembly(place: Path) -> None:
    record = read_manifest(place / "out" / "product")
    assert (record.device, record.architecture, record.reference) == ("mine", host_architecture(), None)
    first = record.kernels[0]
    assert (first.entry, first.source, first.binary) == ("roller_product", "kernel_1.s", "kernel_1.so")
    assert first.block == (1, 1, 1) and first.grid[1:] == (1, 1)
    assert first.verified is True and first.verification is not None and first.verification.method == "native"
    assert set(first.tiles) == {"registers", "l2"} and set(first.tiles["l2"]) == {"m", "n", "k"}
    files = {path.name for path in (place / "out" / "product").iterdir()}
    assert files >= {"kernel_1.s", "kernel_1.so", "kernel_1.schedule.json", "manifest.json"}
    lines = [json.loads(line) for line in (place / "compiled.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["product", "rows", "conv"]
    assert all(line["construct_seconds"] > 0 and line["searched"] == 0 for line in lines)


def test_a_loaded_operator_computes_it(place: Path) -> None:
    generator = np.random.default_rng(0)

    def result(name: str) -> tuple[Any, Any]:
        operator = roller.load(place / "out" / name)
        arrays = [generator.standard_normal(argument.shape, np.float32) for argument in operator.inputs]
        return operator(*arrays), arrays

    found, (a, b) = result("product")
    np.testing.assert_allclose(found, np.maximum(a @ b, 0), atol=1e-4)
    found, (x,) = result("rows")
    powers = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(found, powers / powers.sum(1, keepdims=True), atol=1e-6)
    found, (x, w) = result("conv")
    np.testing.assert_allclose(found, np.einsum("nchw,fc->nfhw", x, w[:, :, 0, 0]), atol=1e-4)


def test_a_profile_ranks_by_time_and_says_how_long_it_took(place: Path, quick: None) -> None:
    result = run("profile", place / "out", "--json")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.output.splitlines()]
    assert [line["name"] for line in lines] == ["conv", "product", "rows"]
    for line in lines:
        times = [kernel["profiled_seconds"] for kernel in line["kernels"]]
        assert times == sorted(times) and times[0] > 0
        record = read_manifest(Path(line["out"]))
        assert record.profiling_seconds[len(times)] == pytest.approx(line["profiling_seconds"], rel=1e-3)
        assert record.kernels[0].profiled_seconds == pytest.approx(times[0], rel=1e-4)
        assert record.kernels[0].profile is not None and record.kernels[0].profile.loaded == "library"
    shown = run("profile", place / "out" / "rows", "--repeats", 3)
    assert shown.exit_code == 0 and "library" in shown.output
    assert f"of 1 operator timed on {read_topology().title}; predictions off by" in shown.output


def test_the_right_profiler_is_named_by_the_files(place: Path, tmp_path: Path) -> None:
    assert profile.is_for_cpu(place / "out")
    write_bundle(tmp_path)
    assert not profile.is_for_cpu(tmp_path)
    (tmp_path / "product").symlink_to(place / "out" / "product")
    with pytest.raises(InputError, match="product is for processors, twice for GPUs; profile them one by one"):
        profile.is_for_cpu(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("profile", "out", "--device", "cuda:0"), "roller: --device: out holds kernels for processors, which are tim"),
        (("profile", "out", "--jobs", "tcp://x:1"), "roller: --jobs: out holds kernels for processors, which are tim"),
        (
            ("inspect", "out/rows", "--arch", "sm_80"),
            "roller: --arch: is for GPU kernels; leave it out; the whole as",
        ),
        (("inspect", "out/rows", "--rank", 99), "roller: --rank: rows has "),
        (
            ("verify", "ops.json", "--device", "mine.toml", "--engine", "opencl"),
            "roller: --engine: 'opencl' does not run kernels of this device; use native",
        ),
        (
            ("compile", "ops.json", "--device", "mine.toml", "--search", "sokoban"),
            "roller: --search sokoban: is for lanes that are threads; those of mine are elements of vectors; leave it",
        ),
        (
            ("compile", "ops.json", "--device", "mine.toml", "--algorithms", "winograd"),
            "roller: --algorithms: none applies to product (winograd: it is for lanes that are threads; those of mine ",
        ),
    ],
)
def test_mistakes_are_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], message: str
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(cli, "kernel_pool", here_pool)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


def test_without_a_linker_nothing_is_started(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place))
    result = run("compile", place / "ops.json", "--device", place / "mine.toml", "--out", place / "nothing")
    message = "roller: --device: its kernels are linked by a C compiler, and there is none; install gcc or clang\n"
    assert (result.exit_code, result.stderr) == (2, message)
    assert not (place / "nothing").exists()


def test_schedules_are_verified_on_this_processor(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "kernel_pool", here_pool)
    result = run("verify", place / "ops.json", "--device", place / "mine.toml", "--top-k", 1)
    assert result.exit_code == 0, result.output
    assert result.output.startswith("3 of 3 schedules of 3 operators agree with the reference")
    assert "run by native)" in result.output


def test_the_hottest_loop_is_shown(place: Path) -> None:
    text = run("inspect", place / "out" / "product").output
    assert text.startswith(f"product rank 1: assembly for {host_architecture()} in kernel_")
    assert f"vectors of {WIDTH} bits at most" in text
    data = json.loads(run("inspect", place / "out" / "product", "--json").output)
    assert data["hot"]["multiply_adds"] > 0 and data["hot"]["vector_bits"] == WIDTH


def test_search_and_transforms_are_for_lanes_that_are_threads() -> None:
    device = processor()
    assert finders(device, "both") == finders(device, "roller") == (True, False)
    form = kernel_form(operator_from_data({"op": "matmul", "m": 8, "n": 8, "k": 4096}))
    best = construct(form, device, 1).programs[0]
    considered = algorithms_of(PlacedForm(form, device), best)
    declined = {one.algorithm for one in considered if "it is for lanes that are threads" in one.declined}
    assert declined == {"winograd", "flat-image"}


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"op": "softmax", "shape": [1, 131072]}, "split-rows"),
        ({"op": "reduce", "function": "sum", "shape": [1 << 22], "axes": [0]}, "split-k"),
    ],
    ids=["few rows", "one sum"],
)  # fmt: skip
def test_few_long_rows_and_sums_are_for_all_cores(data: dict[str, Any], name: str) -> None:
    device = load_device("epyc-7763")
    form = kernel_form(operator_from_data(data))
    best = construct(form, device, 1).programs[0]
    (considered,) = algorithms_of(PlacedForm(form, device), best, (name,))
    chain = considered.programs[0]
    assert 4 * chain.estimate.seconds < best.estimate.seconds
    result = verify_cpu_chain(chain.check(), Target.of(device))
    assert result.passed, result.reason


def test_attention_is_kernels_one_after_the_other(tmp_path: Path, place: Path, quick: None) -> None:
    sizes = {"b": 2, "heads": 4, "kv_heads": 2, "queries": 9, "keys": 40, "head_dim": 8, "causal": True, "window": 30}
    (tmp_path / "op.json").write_text(json.dumps({"name": "attention", "op": "attention", **sizes}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "kernel_pool", here_pool)
        options = ("--device", place / "mine.toml", "--out", tmp_path / "out", "--top-k", 2)
        result = run("compile", tmp_path / "op.json", *options)
    assert result.exit_code == 0, result.output
    first = read_manifest(tmp_path / "out" / "attention").kernels[0]
    assert [launch.tensors[-1] for launch in first.launches] == ["Logits", "P", "Y"] and first.verified is True
    operator = roller.load(tmp_path / "out" / "attention")
    generator = np.random.default_rng(0)
    q, k, v = arrays = [generator.standard_normal(argument.shape, np.float32) for argument in operator.inputs]
    logits = q @ np.repeat(k, 2, axis=1).swapaxes(2, 3) / np.sqrt(8)
    i, j = np.ogrid[:9, :40]
    powers = np.exp(np.where((j <= i + 31) & (j > i + 1), logits, -np.inf))
    expected = powers / powers.sum(-1, keepdims=True) @ np.repeat(v, 2, axis=1)
    np.testing.assert_allclose(operator(*arrays), expected, atol=1e-5)
    np.testing.assert_allclose(operator.bound(*arrays)(), expected, atol=1e-5)
    assert run("profile", tmp_path / "out").exit_code == 0
