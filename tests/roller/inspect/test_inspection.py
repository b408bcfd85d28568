"""``roller inspect``: bundles, sources and cubins; what the model assumed beside what was found; errors in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from codegen.bundle.manifest import read_manifest
from codegen.bundle.operators import operator_of
from codegen.gpu.source.nvrtc import compile_cuda
from roller.cli import main
from roller.inspect.disassembly import nvdisasm_path
from roller.inspect.inspection import inspect_path
from roller.inspect.page import inspection_text
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import load_operators

needs_nvdisasm = pytest.mark.skipif(nvdisasm_path() is None, reason="nvdisasm is not installed: roller[inspect]")

OPERATORS = [
    {"name": "product", "op": "matmul", "m": 512, "n": 512, "k": 512},
    {"name": "half", "op": "matmul", "m": 512, "n": 512, "k": 512, "dtype": "float16"},
    {"name": "depthwise", "op": "depthwise_conv2d", "n": 4, "c": 8, "h": 28, "w": 28, "kh": 3, "kw": 3, "padding": 1},
    {"name": "probabilities", "op": "softmax", "shape": [64, 256]},
]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, device_compiler: None) -> Path:
    """Bundles for a board that nvdisasm reads and, below ``old``, for one that it does not."""
    directory = tmp_path_factory.mktemp("bundles")
    file = directory / "ops.json"
    for names, device, out in ((("product",), "v100", "old"), ((), "a100", ".")):
        file.write_text(json.dumps([op for op in OPERATORS if not names or op["name"] in names]))
        arguments = ["compile", str(file), "--device", device, "--search", "roller", "--top-k", "2", "--verify", "0"]
        arguments += ["--algorithms", "direct"]
        result = CliRunner().invoke(main, [*arguments, "--jobs", "2", "--out", str(directory / out)])
        assert result.exit_code == 0, result.output
    return directory


# What is shown


@needs_nvdisasm
def test_a_bundle_shows_loops_mix_density_and_banks(bundles: Path) -> None:
    result = run(bundles / "product")
    assert result.exit_code == 0
    kernel = read_manifest(bundles / "product").kernels[0]
    lines = result.output.splitlines()
    assert lines[0] == "product rank 1: roller_product_kernel for sm_80"
    assert (
        f"  {kernel.registers} registers per thread, {kernel.shared_bytes} bytes of shared memory per block" in lines[2]
    )
    assert sum(line.endswith("  the hottest") for line in lines) == 1
    assert any(line.startswith("  multiply-adds ") and "FFMA" in line for line in lines)
    assert any(line.startswith("  in all ") for line in lines)
    assert any((line.startswith("  A: ") and "passes per read" in line) or "pass per read" in line for line in lines)


@needs_nvdisasm
def test_json_has_the_same_figures(bundles: Path) -> None:
    record = json.loads(run(bundles / "product", "--json").output)
    (found,) = inspect_path(bundles / "product")
    hot = record["hot_loop"]
    assert hot["instructions"] == sum(hot["classes"].values()) == found.hot.mix.total
    assert hot["bytes"] == 16 * hot["instructions"]
    assert hot["classes"] == {name: sum(kinds.values()) for name, kinds in hot["kinds"].items()}
    assert record["spill_bytes"] == record["local_accesses"] == 0
    assert record["in_place_of"] is None
    assert {use["tensor"] for use in record["banks"]} == {"A", "B"}
    assert all(use["passes"] >= use["least"] >= 1 for use in record["banks"])
    assert record["density"]["assumed"]["total"] > 1
    assert record["density"]["found"]["total"] > 1
    assert hot["multiply_add_share"] == pytest.approx(hot["classes"]["multiply-adds"] / hot["instructions"], abs=1e-4)


@needs_nvdisasm
def test_the_density_found_is_that_of_a_whole_step(bundles: Path) -> None:
    """Instructions of a step counted by hand: the loop's turns are the step's multiply-adds over the loop's."""
    directory = bundles / "product"
    (found,) = inspect_path(directory)
    schedule = json.loads((directory / "kernel_1.schedule.json").read_bytes())
    tile = 1
    for axis, size in schedule["thread"].items():
        tile *= size * schedule["vthreads"][axis]
    multiply_adds = tile * schedule["step"]["k"]
    mix = found.hot.mix
    turns = multiply_adds / mix.count("multiply-adds", "arithmetic")
    fetches = mix.count("barriers", "async copies", "stores", "global loads")
    issued = turns * mix.total + (0 if fetches else len(found.hot.around))
    assert found.model is not None and found.model.found is not None
    assert found.model.found.total == pytest.approx(issued / multiply_adds)
    assert found.model.found.shared_loads == pytest.approx(turns * mix.count("shared loads") / multiply_adds)


@pytest.mark.usefixtures("device_compiler")
@needs_nvdisasm
def test_of_several_launches_every_one_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "op.json"
    file.write_text(json.dumps({"name": "tall", "op": "matmul", "m": 64, "n": 64, "k": 8192}))
    arguments = ["compile", str(file), "--device", "a100", "--search", "roller", "--top-k", "1", "--verify", "0"]
    result = CliRunner().invoke(main, [*arguments, "--algorithms", "split-k", "--jobs", "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    launches = read_manifest(tmp_path / "tall").kernels[0].launches
    found = inspect_path(tmp_path / "tall")
    assert [one.function.name for one in found] == [launch.entry for launch in launches]
    assert [one.registers for one in found] == [launch.registers for launch in launches]
    assert all(one.model is None and "one kernel of several" in one.model_reason for one in found)
    (second,) = inspect_path(tmp_path / "tall" / "kernel_1_part_2.cubin")
    assert second.function.name == launches[1].entry
    lines = [json.loads(line) for line in run(tmp_path / "tall", "--json").output.splitlines()]
    assert [line["name"] for line in lines] == [f"tall rank 1, {launch.label}" for launch in launches]


@needs_nvdisasm
def test_a_listing_is_the_code_of_the_loop(bundles: Path) -> None:
    (found,) = inspect_path(bundles / "product")
    lines = inspection_text(found, listing=True).splitlines()
    code = lines[lines.index("The code of the hottest loop") + 1 :]
    assert len(code) == found.hot.mix.total
    assert code[0].split("*/")[1].strip() == found.hot.instructions[0].text


@needs_nvdisasm
def test_an_old_architecture_is_compiled_again_and_that_is_said(bundles: Path) -> None:
    result = run(bundles / "old" / "product")
    assert "roller_product_kernel for sm_75" in result.output
    assert "compiled from its source for sm_75: nvdisasm does not read sm_70" in result.output
    kernel = read_manifest(bundles / "old" / "product").kernels[0]
    assert f"for sm_70 it has {kernel.registers} registers and no bytes of spills" in result.output


@needs_nvdisasm
def test_another_architecture_can_be_asked_for(bundles: Path) -> None:
    record = json.loads(run(bundles / "old" / "product", "--arch", "sm_80", "--json").output)
    assert (record["architecture"], record["in_place_of"]) == ("sm_80", None)


@needs_nvdisasm
def test_matrix_instructions_have_a_density_and_banks(bundles: Path) -> None:
    record = json.loads(run(bundles / "half", "--json").output)
    if "HMMA" not in record["hot_loop"]["kinds"]["multiply-adds"]:
        pytest.skip("construction found no Tensor Core program")
    assumed, counted = record["density"]["assumed"], record["density"]["found"]
    assert 1 < assumed["total"] < 10 and 1 < counted["total"] < 10
    assert record["banks"] and all(use["passes"] >= 1 for use in record["banks"])


@needs_nvdisasm
def test_kernels_without_a_density_say_why(bundles: Path) -> None:
    result = run(bundles / "probabilities")
    assert "No density to compare: RATIONAL assumes a density for reductions of tiles alone" in result.output


def test_the_operator_of_a_manifest_is_the_one_that_was_compiled(bundles: Path) -> None:
    for expr in load_operators(bundles / "ops.json"):
        again = operator_of(read_manifest(bundles / expr.name))
        assert kernel_form(again).sizes == kernel_form(expr).sizes
        assert again.statements == expr.statements


# Files


@needs_nvdisasm
def test_a_file_of_a_bundle_is_its_rank(bundles: Path) -> None:
    by_rank = run(bundles / "product", "--rank", 2).output
    assert by_rank.startswith("product rank 2: ")
    assert run(bundles / "product" / "kernel_2.cubin").output == by_rank
    assert run(bundles / "product" / "kernel_2.cu").output == by_rank


@needs_nvdisasm
def test_a_source_and_a_cubin_by_themselves(bundles: Path, tmp_path: Path) -> None:
    shutil.copy(bundles / "product" / "kernel_1.cu", tmp_path / "mine.cu")
    shutil.copy(bundles / "product" / "kernel_1.cubin", tmp_path / "mine.cubin")
    source, cubin = run(tmp_path / "mine.cu", "--arch", "sm_80"), run(tmp_path / "mine.cubin")
    assert source.output.splitlines()[1:] == cubin.output.splitlines()[1:]
    assert "No density to compare: the schedule is known for kernels of a bundle alone" in cubin.output


@pytest.mark.usefixtures("device_compiler")
@needs_nvdisasm
def test_every_kernel_of_a_file_is_shown(tmp_path: Path) -> None:
    source = "".join(
        f'extern "C" __global__ void {name}(float* a, int n) {{ for (int i = 0; i < n; ++i) a[i] = a[i] * 3 + 1; }}\n'
        for name in ("first", "second")
    )
    (tmp_path / "two.cubin").write_bytes(compile_cuda(source, "sm_80", name="two").cubin)
    records = [json.loads(line) for line in run(tmp_path / "two.cubin", "--json").output.splitlines()]
    assert {record["entry"] for record in records} == {"first", "second"}
    assert all(record["hot_loop"]["kinds"]["multiply-adds"]["FFMA"] > 0 for record in records)


# Errors


@needs_nvdisasm
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere: no such file; give a bundle's folder"),
        ((".",), "has no manifest.json; give the folder of one operator"),
        (("product", "--rank", "9"), "--rank: product has 2 kernels, none of rank 9"),
        (("product", "--arch", "volta"), "--arch: 'volta' is not a CUDA architecture; write it like sm_80"),
        (("ops.json",), "ops.json: is neither CUDA source nor a cubin"),
        (("mine.cu",), "--arch: mine.cu is a source: for which architecture?; add --arch sm_80"),
        (("mine.cu", "--rank", "1"), "--rank: mine.cu is one file, not a bundle"),
        (("mine.cu", "--arch", "sm_80"), "mine.cu: does not compile for sm_80: "),
        (("mine.cubin", "--arch", "sm_80"), "--arch: a cubin is what it was compiled for"),
        (("mine.cubin",), "mine.cubin: nvdisasm cannot read it"),
        (("broken",), "manifest.json: is no manifest"),
        (("opencl",), "kernel_1.cl is no CUDA source"),
    ],
)
def test_bad_input_is_one_line(
    bundles: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    (bundles / "mine.cu").write_text("no kernel;")
    (bundles / "mine.cubin").write_bytes(b"no cubin")
    (bundles / "broken").mkdir(exist_ok=True)
    (bundles / "broken" / "manifest.json").write_text("{")
    (bundles / "opencl").mkdir(exist_ok=True)
    manifest = (bundles / "product" / "manifest.json").read_text()
    (bundles / "opencl" / "manifest.json").write_text(manifest.replace('kernel_1.cu"', 'kernel_1.cl"'))
    monkeypatch.chdir(bundles)
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1
