"""Products in eight and four bits: which ones change, and that a step gets shorter by them."""

from __future__ import annotations

from typing import Any

import pytest

from daydream.operators.variants import PRECISIONS, narrowed
from daydream.operators.work import Work, WorkPart
from hal.catalog import load_device
from hal.support.errors import InputError
from roller.library import library_time

H100 = load_device("h100")


def work(**changes: Any) -> Work:
    data = {"op": "matmul", "m": 4096, "n": 4096, "k": 4096, "dtype": "bfloat16"} | changes
    return Work(kind="matrix product", parts=(WorkPart(data),), flops=1.0, bytes=1.0, dtype="bfloat16")


def test_products_of_two_matrices_become_scaled_ones() -> None:
    (part,) = narrowed(work(transpose_b=True), "fp8-tensorwise").parts
    assert part.data == {
        "op": "scaled_matmul", "m": 4096, "n": 4096, "k": 4096, "precision": "fp8-tensorwise", "kernels": "training",
    }  # fmt: skip


@pytest.mark.parametrize("changes", [{"m": 4097}, {"op": "batch_matmul", "b": 2}, {"dtype": "float32"}])
def test_other_products_stay(changes: dict[str, Any]) -> None:
    given = work(**changes)
    assert narrowed(given, "fp8-block").parts == given.parts


@pytest.mark.parametrize("precision", PRECISIONS[1:4])
def test_large_layers_of_training_are_faster_than_in_sixteen_bits(precision: str) -> None:
    wide = {"op": "matmul", "m": 16384, "n": 8192, "k": 8192, "dtype": "bfloat16"}
    narrow = {"op": "scaled_matmul", "m": 16384, "n": 8192, "k": 8192, "precision": precision, "kernels": "training"}
    assert library_time(narrow, H100).seconds < 0.8 * library_time(wide, H100).seconds


def test_whose_kernels_must_be_known() -> None:
    with pytest.raises(InputError, match="kernels: there are none of 'mine'; use one of serving"):
        library_time({"op": "scaled_matmul", "m": 16, "n": 16, "k": 16, "kernels": "mine"}, H100)
