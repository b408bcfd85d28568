"""Two products in a row as one kernel sees them: which axes play which part, and what is none."""

from __future__ import annotations

from typing import Any

import pytest

from hal.support.errors import InputError
from sokoban.kernel.pair import ProductPair, product_pair
from sokoban.language.operators import operator_from_data

LAYERS = "H[b,s,n] = sum(k, X[b,s,k] * A[n,k]); G[b,s,n] = gelu(H[b,s,n] + c[n]); Z[b,s,k] = sum(n, G[b,s,n] * B[n,k])"
SIZES = {"b": 3, "s": 5, "n": 24, "k": 16}


def pair_of(text: str, sizes: dict[str, int] | None = None, **more: Any) -> ProductPair:
    return product_pair(operator_from_data({"expr": text, "sizes": sizes or SIZES, "dtype": "float16", **more}))


def test_axes_of_rows_fuse_and_one_name_may_be_depth_and_width() -> None:
    pair = pair_of(f"{LAYERS}; Y[b,s,k] = Z[b,s,k] + X[b,s,k]")
    assert (pair.row, pair.depth, pair.middle, pair.width, pair.batch) == ("b.s", "k", "n", "k", ())
    assert dict(pair.sizes) == {"problem": 1, "row": 15, "middle": 24, "width": 32}
    assert (pair.is_first_turned, pair.is_second_turned) == (False, False)
    assert pair.flops == 2 * 15 * 24 * (16 + 16) and pair.middle_bytes == 15 * 24 * 2
    assert [load.tensor for load in (*pair.inner_loads, *pair.final_loads)] == ["c", "X"]


def test_a_factor_of_every_problem_keeps_the_batch_apart() -> None:
    pair = pair_of(LAYERS.replace("B[n,k]", "B[b,k,n]"))
    assert pair.batch == ("b",) and pair.row == "s" and pair.is_second_turned
    assert [pair.stride(pair.second, axis) for axis in ("b", "k", "n")] == [16 * 24, 24, 1]
    assert pair.stride(pair.first, "b") == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("C[b,s,n] = sum(k, X[b,s,k] * A[k,n])", "it sums 1 times, not twice"),
        (f"{LAYERS}; Y[b,s,k] = Z[b,s,k] * Z[b,k,s]", "reads more than its own element"),
        (LAYERS.replace("X[b,s,k] *", "X[b,k,s] *"), "rows of X do not lie along k"),
        (LAYERS.replace("G[b,s,n] * B[n,k]", "G[b,s,n] * exp(B[n,k])"), "sums no products of H and of a tensor's"),
        (f"{LAYERS}; R[b,s] = max(k, Z[b,s,k]); Y[b,s,k] = Z[b,s,k] - R[b,s]", "it sums 3 times, not twice"),
    ],
)
def test_what_is_no_pair_says_why(text: str, why: str) -> None:
    sizes = SIZES | {"s": 16} if "[b,k,s]" in text else SIZES
    with pytest.raises(InputError, match=why):
        pair_of(text, sizes)


def test_factors_of_several_types_are_no_pair() -> None:
    with pytest.raises(InputError, match="all of one of float16, bfloat16, float32"):
        pair_of(LAYERS, dtypes={"A": "float32"})
