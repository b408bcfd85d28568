"""Ansor's programs as schedules: factors multiplied as its loops nest, padding by its rule, files as the fast path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from bench.accuracy.data import default_directory
from bench.accuracy.kernels.ansor import kernels_of, load_logs, operator_data

DATA = default_directory() / "v100_schedules"
measured_data = pytest.mark.skipif(not DATA.is_dir(), reason="the measured schedules are not next to this checkout")


def conv(**changes: Any) -> dict[str, Any]:
    """The columns of two programs of one convolution: 4 filters of 3x3 over 2 channels of 8x8."""
    factors = {
        "n": (1, 1, 1, 1, 1), "f": (1, 2, 1, 1, 2), "y": (2, 1, 2, 2, 1), "x": (1, 1, 8, 1, 1),
        "rc": (1, 2, 1), "ry": (3, 1, 1), "rx": (1, 1, 3),
    }  # fmt: skip
    columns: dict[str, Any] = {"n": 1, "c": 2, "h": 8, "w": 8, "f": 4, "kh": 3, "kw": 3, "stride": 1, "padding": "SAME"}
    for axis, values in factors.items():
        names = ("blk", "vt", "thr", "in1", "in2") if len(values) == 5 else ("out", "mid", "in")
        columns |= {f"{axis}_{name}": value for name, value in zip(names, values, strict=True)}
    columns |= {"vec_data": 1, "vec_kernel": 2, "unroll_max_step": 512, "trial": 0, **changes}
    return {name: np.array([value, value]) for name, value in columns.items()}


def flat(kind: str, **columns: Any) -> list[Any]:
    return kernels_of(kind, {name: np.array(values) for name, values in columns.items()})


def row(columns: Mapping[str, Any]) -> dict[str, int]:
    return {axis: int(values[0]) for axis, values in columns.items()}


def test_the_tiles_are_products_of_the_factors() -> None:
    (kernel,) = kernels_of("conv", conv())
    table = kernel.table
    assert row(table.block) == {"n": 1, "f": 4, "oh": 4, "ow": 8}
    assert row(table.thread) == {"n": 1, "f": 2, "oh": 2, "ow": 1}
    assert row(table.vthreads) == {"n": 1, "f": 2, "oh": 1, "ow": 1}
    assert row(table.step) == {"c": 2, "kh": 1, "kw": 3}
    assert row(table.vector) == {"X": 1, "W": 2, "Y": 1}
    assert table.threads_per_block.tolist() == [16, 16] and table.block_count.tolist() == [2, 2]
    assert all(values.all() for values in table.cached.values()) and table.unroll.tolist() == [512, 512]


@pytest.mark.parametrize(
    ("size", "stride", "padding"),
    [(3, 1, [1, 1, 1, 1]), (7, 2, [3, 3, 3, 3]), (2, 2, [1, 1, 0, 0]), (1, 1, [0, 0, 0, 0])],
)
def test_same_pads_by_the_kernel_alone(size: int, stride: int, padding: list[int]) -> None:
    assert operator_data("conv", conv(kh=size, kw=size, stride=stride))["padding"] == padding
    assert operator_data("conv", conv(padding="VALID"))["padding"] == "VALID"


def test_average_pooling_is_a_sum_and_a_division() -> None:
    shared = {"kh": [3], "kw": [3], "stride": [2], "w": [9], "outputs": [4096], "unroll_max_step": [16]}
    total, division = flat("pooling", pool=["avg"], kernels=[2], sum_threads=[64], div_threads=[32], **shared)
    assert (total.name, division.name) == ("sum", "division")
    assert row(total.table.block) == {"i": 64} and row(total.table.step) == {"kh": 3, "kw": 3}
    assert row(division.table.block) == {"i0": 32} and division.operator["value"] == 9.0
    assert (total.table.block_count[0], division.table.block_count[0]) == (64, 128)
    (maximum,) = flat("pooling", pool=["max"], kernels=[1], sum_threads=[8], div_threads=[np.nan], **shared)
    assert maximum.table.block_count[0] == 512 and "max(" in maximum.operator["expr"]


def test_the_threads_of_a_cross_thread_reduction_share_an_output() -> None:
    (kernel,) = flat(
        "reduction", shape=["8x16x64"] * 2, axes=["2"] * 2, structure=["flat", "cross_thread"],
        threads_per_block=[32, 16], unroll_max_step=[0, 64],
    )  # fmt: skip
    table = kernel.table
    assert (table.block_count.tolist(), table.threads_per_block.tolist()) == ([4, 128], [32, 16])
    assert table.reduce_threads.tolist() == [1, 16]


def test_relu_is_one_element_per_thread_along_one_axis() -> None:
    (kernel,) = flat("elementwise", shape=["8x16x4"], threads_per_block=[16])
    assert row(kernel.table.block) == {"i0.i1.i2": 16} and kernel.table.block_count[0] == 32


@measured_data
def test_grids_and_blocks_are_the_recorded_ones() -> None:
    from bench.accuracy.kernels.ansor import read_columns

    columns = read_columns(DATA / "matmul.csv.gz")
    tables = [log.kernels[0].table for log in load_logs(DATA, ["matmul"])]
    assert (
        np.concatenate([table.threads_per_block for table in tables]).tolist() == columns["threads_per_block"].tolist()
    )
    assert np.concatenate([table.block_count for table in tables]).tolist() == columns["grid_blocks"].tolist()
