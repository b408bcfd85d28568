"""Manifests as a GPU's machine reads them: the same as the compiler's reader, and one line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from codegen.bundle.manifest import read_manifest
from codegen.bundle.reader import choose_kernel, find_bundles, read_bundle
from codegen.bundle.records import ITEM_BYTES, SHARED_OBJECT_SUFFIX, ProfileRecord
from codegen.generators import GENERATORS
from hal.support.errors import InputError
from sokoban.language.expression import DTYPE_BYTES, DTYPES
from tests.codegen.bundles import RIGHT, write_bundle, write_chain


def struck_out(reason: str) -> dict[str, Any]:
    """A profile, as JSON, that refuses a kernel."""
    return {
        "predicted_rank": 1, "spread_seconds": None, "repeats": 0, "launches": 0, "prediction_error": None,
        "relative_error": None, "tolerance": 1e-4, "struck_out": reason, "loaded": "cubin", "board": "a board",
        "capability": "9.0", "versions": {},
    }  # fmt: skip


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_it_reads_what_the_compiler_wrote(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, (RIGHT, RIGHT), kernel={"zero_output": True, "dynamic_shared_bytes": 64})
    bundle = read_bundle(folder)
    assert bundle.directory == folder and bundle.manifest == read_manifest(folder)
    for kernel in bundle.kernels:
        assert kernel.zero_output and kernel.dynamic_shared_bytes == 64 and kernel.predicted_rank == kernel.rank
    assert bundle.reference is not None and bundle.reference.workspace == {"Y": 40}
    assert [argument.name for argument in bundle.inputs] == ["X", "B"] and bundle.output.name == "Y"


def test_what_stands_next_to_the_gpu_agrees_with_the_compiler() -> None:
    assert {dtype: DTYPE_BYTES[dtype] for dtype in DTYPES}.items() <= ITEM_BYTES.items()
    assert f".{GENERATORS['llvm'].binary_suffix}" == SHARED_OBJECT_SUFFIX


def test_a_measured_bundle_is_read_whole(tmp_path: Path) -> None:
    profile = ProfileRecord(
        predicted_rank=2, spread_seconds=None, repeats=20, launches=100, prediction_error=None, relative_error=1e-7,
        tolerance=1e-4, struck_out="", loaded="cubin", board="NVIDIA H100", capability="9.0", versions={"cupy": "14"},
    )  # fmt: skip
    changes = {"profile": profile, "profiled_seconds": 3e-6, "architecture": "sm_90a"}
    folder = write_bundle(tmp_path, kernel=changes, profiling_seconds={1: 2.5}, allow_tf32=True)
    bundle = read_bundle(folder)
    assert bundle.manifest == read_manifest(folder)
    assert bundle.manifest.profiling_seconds == {1: 2.5} and bundle.kernels[0].predicted_rank == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "is no manifest of format 1; compile the operator again"),
        ({"kernels": []}, "has no kernel or no output; compile the operator again"),
        ({"kernels": [{}]}, "lacks 'rank'; compile the operator again"),
        ({"name": 7}, "is damaged: 7 where a text should stand; compile the operator again"),
        (
            {"arguments": [{"name": "X", "role": "output", "dtype": "int4", "shape": [1]}]},
            "is damaged: argument of unknown dtype 'int4'; compile the operator again",
        ),
        (
            {"reference": {"source": "../x", "launches": [], "workspace": {}, "tolerance": 1, "ranges": {}}},
            "is damaged: '../x' is no file name; compile the operator again",
        ),
    ],
)
def test_a_manifest_of_another_shape_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_bundle(tmp_path)
    edit(folder, **changes)
    with pytest.raises(InputError) as caught:
        read_bundle(folder)
    assert str(caught.value) == f"{folder / 'manifest.json'}: {message}"


def test_folders_and_files_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no manifest\.json; give a folder that roller compile wrote"):
        read_bundle(tmp_path)
    with pytest.raises(InputError, match="nor does a folder in it"):
        find_bundles(tmp_path)
    folder = write_bundle(tmp_path)
    (folder / "kernel_1.cubin").unlink()
    with pytest.raises(InputError, match=r"kernel_1\.cubin: is missing; copy the whole folder"):
        read_bundle(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="is no JSON"):
        read_bundle(folder)


def test_opencl_bundles_are_refused(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, kernel={"source": "kernel_1.cl", "binary": None})
    with pytest.raises(InputError, match="holds OpenCL kernels"):
        read_bundle(folder)


def test_a_folder_is_a_bundle_or_holds_some(tmp_path: Path) -> None:
    second, first = write_bundle(tmp_path, name="b"), write_bundle(tmp_path, name="a")
    write_bundle(tmp_path, name=".half-written")
    assert find_bundles(tmp_path) == [first, second]
    assert find_bundles(first) == [first]


def test_the_fastest_measured_kernel_is_taken_else_the_first(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, (RIGHT,) * 3)
    assert choose_kernel(read_bundle(folder), None).rank == 1
    assert choose_kernel(read_bundle(folder), 3).rank == 3
    with pytest.raises(InputError, match="rank: twice has no kernel of rank 4; it has 3"):
        choose_kernel(read_bundle(folder), 4)
    kernels = json.loads((folder / "manifest.json").read_text())["kernels"]
    for kernel, seconds in zip(kernels, (None, 3e-6, 2e-6), strict=True):
        kernel["profiled_seconds"] = seconds
    edit(folder, kernels=kernels)
    assert choose_kernel(read_bundle(folder), None).rank == 3


def test_struck_out_kernels_are_passed_over(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path, (RIGHT,) * 2)
    kernels = json.loads((folder / "manifest.json").read_text())["kernels"]
    kernels[0]["profile"] = struck_out("relative error 1")
    edit(folder, kernels=kernels)
    assert choose_kernel(read_bundle(folder), None).rank == 2
    kernels[1]["profile"] = struck_out("relative error 2")
    edit(folder, kernels=kernels)
    with pytest.raises(InputError, match="all kernels were struck out: relative error 1; ask for one by its rank"):
        choose_kernel(read_bundle(folder), None)
    assert choose_kernel(read_bundle(folder), 2).rank == 2


def test_a_kernel_of_several_launches_is_read_whole(tmp_path: Path) -> None:
    folder = write_chain(tmp_path, tolerance=3e-4)
    bundle = read_bundle(folder)
    assert bundle.manifest == read_manifest(folder)
    (kernel,) = bundle.kernels
    assert kernel.workspace == {"T": 160} and kernel.tolerance == 3e-4
    assert [launch.tensors for launch in kernel.launches] == [("X", "T"), ("T", "B", "Y")]
    assert kernel.parts(bundle.arguments) == kernel.launches


def test_a_kernel_that_does_it_alone_is_one_launch_over_all_arguments(tmp_path: Path) -> None:
    bundle = read_bundle(write_bundle(tmp_path))
    (part,) = bundle.kernels[0].parts(bundle.arguments)
    assert part.tensors == ("X", "B", "Y") and part.entry == bundle.kernels[0].entry


@pytest.mark.parametrize(
    ("launches", "message"),
    [
        ([{"tensors": ["X", "Z"]}], "is damaged: a launch of 'Z', no argument and no workspace"),
        ([{"tensors": []}], "is damaged: a launch of 'nothing', no argument and no workspace"),
        ([{"tensors": ["X", "T"]}], "is damaged: the last launch of kernel 1 does not write Y"),
        ([{"tensors": ["X", "Y"], "source": "../k.cu"}], "is damaged: '../k.cu' is no file name"),
    ],
)
def test_launches_of_another_shape_are_refused(tmp_path: Path, launches: list[dict[str, Any]], message: str) -> None:
    folder = write_chain(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    whole = manifest["kernels"][0]["launches"][0]
    manifest["kernels"][0]["launches"] = [{**whole, **launch} for launch in launches]
    edit(folder, kernels=manifest["kernels"])
    with pytest.raises(InputError) as caught:
        read_bundle(folder)
    assert message in str(caught.value)


def test_a_launch_without_its_file_is_named(tmp_path: Path) -> None:
    folder = write_chain(tmp_path)
    (folder / "kernel_1_part_2.cubin").unlink()
    with pytest.raises(InputError, match=r"kernel_1_part_2\.cubin: is missing"):
        read_bundle(folder)
