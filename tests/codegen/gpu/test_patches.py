"""Patch transforms as kernels: their text for every target, and what they compute."""

from __future__ import annotations

import re

import numpy as np
import pytest

from codegen.compile.build import build_kernel
from codegen.compile.request import BuildRequest
from codegen.gpu.source.text import opencl_source
from codegen.target import Target
from codegen.tir.lowered import KERNEL_SUFFIX
from codegen.verify.opencl import run_opencl
from roller.algorithms.winograd import MATRICES, Tiles
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.patches import PatchTransform
from sokoban.language.operators import operator_from_data
from sokoban.schedule.patches import PatchSchedule
from tests.codegen.lowering import lower

RESNET = {
    "op": "conv2d", "n": 4, "c": 16, "h": 20, "w": 20, "f": 24, "kh": 3, "kw": 3, "padding": "SAME",
    "epilogue": [{"function": "bias_add", "axis": "f"}, "relu"],
}  # fmt: skip


def transforms(size: int, **changes: object) -> list[PatchTransform]:
    """Those of filters, input and output."""
    form = kernel_form(operator_from_data({**RESNET, **changes}))
    return [problem for problem in Tiles(size).problems(form) if not isinstance(problem, KernelForm)]


@pytest.mark.parametrize("architecture", ["sm_70", "sm_80", "sm_90"])
@pytest.mark.parametrize("size", MATRICES)
def test_cuda_text_compiles_without_spills_or_local_memory(size: int, architecture: str) -> None:
    for transform in transforms(size):
        request = BuildRequest(
            form=transform,
            schedule=PatchSchedule(64),
            entry="patches",
            target=Target("cuda", architecture, 32),
        )
        built = build_kernel(request)
        assert built.error == "" and built.binary is not None
        assert built.spill_bytes == 0 and built.registers is not None and built.registers <= 96
        assert built.block == (64, 1, 1) and built.grid == (-(-transform.points // 64), 1, 1)
        assert "__syncthreads" not in built.source and "#include" not in built.source


def test_places_are_divided_out_once_and_moved_inside_once() -> None:
    patches = transforms(4)[1]
    text = opencl_source(lower(patches, PatchSchedule(64), entry="k"), names(patches))
    assert text.count("places_ptr[3] = ") == text.count("nearest_ptr[3] = ") == 1
    loads = [line for line in text.splitlines() if "= X_ptr[" in line]
    assert loads and all("/" not in line and "%" not in line for line in loads)


def test_rows_of_the_output_leave_as_vectors() -> None:
    texts = []
    for width in (20, 18, 19):
        output = transforms(4, w=width)[2]
        texts.append(opencl_source(lower(output, PatchSchedule(64), entry="k"), names(output)))
    vectors = [len(re.findall(r"vstore4|\(\*\(__global float4\*\)|\*\(__global float4\*\)", text)) for text in texts]
    assert vectors[0] > 0 and vectors[1] == vectors[2] == 0


def names(transform: PatchTransform) -> list[str]:
    return [tensor.name for tensor in transform.tensors]


@pytest.mark.usefixtures("opencl")
@pytest.mark.parametrize("size", MATRICES)
def test_filters_and_input_become_what_numpy_says(size: int) -> None:
    filters, patches, _ = transforms(size, h=9, w=7)
    generator = np.random.default_rng(1)
    _, data, taps = (np.array(matrix, dtype=np.float64) for matrix in MATRICES[size])
    weights = generator.uniform(-1, 1, (24, 16, 3, 3)).astype(np.float32)
    expected = np.einsum("ai,fcij,bj->abcf", taps, weights, taps)
    np.testing.assert_allclose(run(filters, weights).reshape(expected.shape), expected, atol=1e-6)
    image = generator.uniform(-1, 1, (4, 16, 9, 7)).astype(np.float32)
    down, across = -(-9 // size), -(-7 // size)
    padded = np.pad(image, ((0, 0), (0, 0), (1, size + 1), (1, size + 1)))
    edge = size + 2
    cut = np.array([
        [padded[:, :, size * y : size * y + edge, size * x : size * x + edge] for x in range(across)]
        for y in range(down)
    ])  # fmt: skip
    expected = np.einsum("ai,yxncij,bj->abcnyx", data, cut, data)
    np.testing.assert_allclose(run(patches, image).reshape(expected.shape), expected, atol=2e-5)


@pytest.mark.usefixtures("opencl")
def test_the_output_gets_its_epilogue_and_no_element_beyond_it() -> None:
    output = transforms(2, h=9, w=7)[2]
    generator = np.random.default_rng(2)
    products = generator.uniform(-1, 1, output.inputs[0].shape).astype(np.float32)
    bias = generator.uniform(-1, 1, 24).astype(np.float32)
    matrix = np.array(MATRICES[2][0], dtype=np.float64)
    tiles = np.einsum("ai,ijfnyx,bj->nfyaxb", matrix, products.reshape(4, 4, 24, 4, 5, 4), matrix)
    expected = np.maximum(tiles.reshape(4, 24, 10, 8)[:, :, :9, :7] + bias[:, None, None], 0)
    np.testing.assert_allclose(run(output, products, bias).reshape(expected.shape), expected, atol=1e-6)


def run(transform: PatchTransform, *inputs: np.ndarray) -> np.ndarray:
    """The output of a transform, with a guard behind it that is looked at."""
    lowered = lower(transform, PatchSchedule(64), entry="k")
    output = np.full(transform.output.element_count + 64, np.nan, np.float32)
    arrays = [*(np.ascontiguousarray(each).ravel() for each in inputs), output]
    total = [blocks * threads for blocks, threads in zip(lowered.grid, lowered.block, strict=True)]
    source = opencl_source(lowered, names(transform))
    run_opencl(source, f"k{KERNEL_SUFFIX}", arrays, total, lowered.block, output_indices=[len(arrays) - 1])
    assert np.isnan(output[-64:]).all() and not np.isnan(output[:-64]).any()
    return output[:-64]
