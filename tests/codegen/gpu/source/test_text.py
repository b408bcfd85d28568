"""CUDA text as TVM prints it, mended where no compiler would take it."""

from __future__ import annotations

from codegen.gpu.source.text import paired_words


def test_eight_equal_words_are_four_pairs() -> None:
    eight = ", ".join(["(uint)16"] * 8)
    pair = "(unsigned long long)16 << 32 | (unsigned long long)16"
    assert paired_words(f"v = make_ulonglong4({eight});") == f"v = make_ulonglong4({', '.join([pair] * 4)});"


def test_four_arguments_stay() -> None:
    text = "make_ulonglong4((uint)16, (uint)16, (uint)16, (uint)16)"
    assert paired_words(text) == text
