"""CUDA text as TVM prints it, mended where no compiler would take it."""

from __future__ import annotations

import pytest

from codegen.gpu.source.text import paired_words, static_shared_bytes


def test_eight_equal_words_are_four_pairs() -> None:
    eight = ", ".join(["(uint)16"] * 8)
    pair = "(unsigned long long)16 << 32 | (unsigned long long)16"
    assert paired_words(f"v = make_ulonglong4({eight});") == f"v = make_ulonglong4({', '.join([pair] * 4)});"


def test_four_arguments_stay() -> None:
    text = "make_ulonglong4((uint)16, (uint)16, (uint)16, (uint)16)"
    assert paired_words(text) == text


def test_eight_equal_halves_of_words_are_four_words() -> None:
    eight, word = ", ".join(["(ushort)5"] * 8), "(unsigned)5 << 16 | (unsigned)5"
    assert paired_words(f"make_uint4({eight})") == f"make_uint4({', '.join([word] * 4)})"


@pytest.mark.parametrize(
    ("array", "size"),
    [("nv_bfloat164 kept[24]", 192), ("ushort2 staged[8]", 32), ("char4 a[3]", 12), ("ulonglong4 kept[2]", 64)],
)
def test_shared_arrays_of_vectors_are_counted(array: str, size: int) -> None:
    assert static_shared_bytes(f"  __shared__ {array};\n") == size
