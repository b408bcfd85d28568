"""The four alignment rules, each alone, and the sizes they allow together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.catalog import load_device
from roller.construct.alignment import (
    BankRule,
    ExecutionUnitRule,
    TensorShapeRule,
    TransactionRule,
    aligned_axis_sizes,
    default_rules,
)
from roller.construct.rtile import TileSpace
from tests.sokoban.schedules import form_of

MATMUL = TileSpace.of(form_of(op="matmul", m=91, n=370, k=230))
M, N, K = 0, 1, 2


# Rule 1


@pytest.mark.parametrize(
    ("threads", "epsilon", "whole"),
    [(32, 0.0, True), (64, 0.0, True), (31, 0.0, False), (33, 0.1, False), (29, 0.1, True), (28, 0.1, False),
     (224, 0.0, True), (250, 0.1, True), (20, 0.4, True), (1, 1.0, True)],
)  # fmt: skip
def test_threads_fill_warps_within_epsilon(threads: int, epsilon: float, whole: bool) -> None:
    """Of 29 threads three lanes in 32 are idle, 9.4%; of 28 four, 12.5%."""
    assert ExecutionUnitRule(32).fills(threads, epsilon) is whole


def test_wavefronts_have_their_own_lanes() -> None:
    assert not ExecutionUnitRule(64).fills(32, 0.1)
    assert ExecutionUnitRule(64).fills(64, 0.0)


def test_matrix_instructions_take_multiples_on_their_axes_alone() -> None:
    rule = ExecutionUnitRule(32, ((M, 16), (K, 16)))
    assert list(rule.allowed(MATMUL, "shared", M, (8, 16, 24, 48))) == [16, 48]
    assert rule.allowed(MATMUL, "registers", N, (1, 7, 8, 24)) == (1, 7, 8, 24)
    assert ExecutionUnitRule(32).allowed(MATMUL, "shared", M, (1, 7, 24)) == (1, 7, 24)


# Rule 2


def test_leading_dimensions_are_whole_transactions() -> None:
    rule = TransactionRule(32)
    # k leads A, n leads B: multiples of eight floats. m leads nothing.
    for axis in (K, N):
        assert list(rule.allowed(MATMUL, "shared", axis, (4, 8, 12, 64))) == [8, 64]
    assert rule.allowed(MATMUL, "shared", M, (1, 3, 91)) == (1, 3, 91)


def test_registers_have_no_transactions() -> None:
    assert TransactionRule(32).allowed(MATMUL, "registers", K, (1,)) == (1,)


def test_a_tile_of_whole_rows_is_contiguous() -> None:
    assert list(TransactionRule(32).allowed(MATMUL, "shared", K, (229, 230, 231))) == [230, 231]


def test_halves_need_twice_the_elements() -> None:
    space = TileSpace.of(form_of(op="matmul", m=91, n=370, k=230, dtype="float16"))
    assert list(TransactionRule(32).allowed(space, "shared", K, (8, 16))) == [16]


def test_rows_of_a_sliding_window_are_free() -> None:
    space = TileSpace.of(form_of(op="conv2d", n=3, c=5, h=33, w=35, f=7, kh=3, kw=3))
    ow = space.axes.index("ow")
    assert TransactionRule(32).allowed(space, "shared", ow, (1, 3, 5)) == (1, 3, 5)


# Rule 3


@pytest.mark.parametrize(
    ("stored", "read", "banks", "length", "padding"),
    [
        (4, 1, 4, 1, 1),  # figure 6.5 (b)
        (4, 2, 4, 1, 2),
        (5, 1, 4, 1, 0),  # 5 = 1 (mod 4): rows already start one bank apart
        (7, 1, 4, 1, 2),
        (8, 1, 32, 1, (32 - 8 + 1) % 32),
        (32, 1, 32, 1, 1),
        (33, 1, 32, 1, 0),
        (64, 8, 32, 1, 8),
        (32, 8, 32, 2, (64 - 32 + 2 * 4) % 64),
        (64, 3, 32, 2, (64 - 0 + 2 * 2) % 64),
    ],
)
def test_padding_is_the_printed_formula(stored: int, read: int, banks: int, length: int, padding: int) -> None:
    """(B L - N % (B L) + L ceil(n / L)) % (B L), with L elements per bank."""
    assert BankRule(banks, 4).padding(stored, read, element_bytes=4 // length) == padding


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([2, 4, 8]))
def test_padded_rows_start_one_read_apart(stored: int, read: int, element_bytes: int) -> None:
    """The formula's purpose: rows start L ceil(n / L) elements apart, modulo all banks."""
    length = max(1, 4 // element_bytes)
    row = 32 * length
    padding = BankRule(32, 4).padding(stored, read, element_bytes)
    assert 0 <= padding < row
    assert (stored + padding) % row == length * -(-read // length) % row


def test_banks_refuse_no_size() -> None:
    assert BankRule(32, 4).allowed(MATMUL, "shared", K, range(1, 99)) == range(1, 99)


# Rule 4


@pytest.mark.parametrize(
    ("size", "epsilon", "allowed"),
    [
        (13, 0.0, True),  # 91 = 7 x 13: nothing is padded, though the formula as printed gives 13 / 91
        (91, 0.0, True),
        (16, 0.05, False),  # six tiles cover 96: 5 / 91 = 5.49%
        (16, 0.055, True),
        (32, 0.05, False),  # three tiles cover 96, too
        (90, 0.97, False),  # 89 / 91 = 97.8%
        (90, 0.98, True),
        (128, 0.40, False),  # 37 / 91 = 40.7%
        (128, 0.41, True),
    ],
)
def test_padding_a_tensor_wastes_at_most_epsilon(size: int, epsilon: float, allowed: bool) -> None:
    """(S - N % S) / N <= epsilon for N = 91, and always where S divides N."""
    assert list(TensorShapeRule(epsilon).allowed(MATMUL, "shared", M, (size,))) == [size] * allowed


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 200), st.floats(0, 2))
def test_the_tensor_rule_is_the_printed_inequality_off_the_divisors(total: int, size: int, epsilon: float) -> None:
    space = TileSpace.of(form_of(op="reduce", function="sum", shape=[total + 1, 3], axes=[1]))
    n = total + 1
    expected = n % size == 0 or (size - n % size) / n <= epsilon
    assert list(TensorShapeRule(epsilon).allowed(space, "shared", 0, (size,))) == [size] * expected


# Together


SPACES = {
    "matmul": MATMUL,
    "primes": TileSpace.of(form_of(op="matmul", m=1009, n=997, k=13)),
    "conv2d": TileSpace.of(form_of(op="conv2d", n=3, c=48, h=35, w=35, f=56, kh=3, kw=3, stride=2)),
    "halves": TileSpace.of(form_of(op="matmul", m=17, n=1000, k=33, dtype="float16")),
}


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(sorted(SPACES)), st.sampled_from(["registers", "shared"]), st.integers(0, 6),
    st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(1, 1024), st.sampled_from([0.0, 0.1, 0.4, 1.0]),
)  # fmt: skip
def test_aligned_sizes_ascend_and_obey_every_rule(
    name: str, layer: str, axis: int, base: int, largest: int, epsilon: float
) -> None:
    space = SPACES[name]
    axis %= len(space.axes)
    rules = default_rules(load_device("v100"), epsilon)
    sizes = aligned_axis_sizes(space, rules, layer, axis, base, largest)
    assert list(sizes) == sorted(set(sizes))
    for size in sizes:
        assert size % base == 0 and size <= largest
        assert all(list(rule.allowed(space, layer, axis, (size,))) == [size] for rule in rules)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(SPACES)), st.integers(0, 6), st.sampled_from([1, 2, 4]))
def test_a_larger_epsilon_only_adds_sizes(name: str, axis: int, base: int) -> None:
    space, device = SPACES[name], load_device("v100")
    axis %= len(space.axes)
    menus = [
        set(aligned_axis_sizes(space, default_rules(device, epsilon), "shared", axis, base, 1024))
        for epsilon in (0.0, 0.1, 0.4, 4.0)
    ]
    assert menus[0] <= menus[1] <= menus[2] <= menus[3]


def test_sizes_by_hand() -> None:
    rules = default_rules(load_device("v100"), 0.0)
    # 91 = 7 x 13: divisors alone waste nothing.
    assert aligned_axis_sizes(MATMUL, rules, "registers", M, 1, 1024) == (1, 7, 13, 91)
    # n = 370 leads B: multiples of 8 that divide 370 do not exist, whole rows are contiguous.
    assert aligned_axis_sizes(MATMUL, rules, "shared", N, 1, 1024) == (370,)
    loose = default_rules(load_device("v100"), 0.1)
    assert aligned_axis_sizes(MATMUL, loose, "shared", N, 8, 1024) == (8, 16, 32, 64, 128, 376)


def test_the_whole_axis_is_always_a_candidate() -> None:
    space = TileSpace.of(form_of(op="matmul", m=1021, n=8, k=8))
    sizes = aligned_axis_sizes(space, default_rules(load_device("v100"), 0.0), "shared", 0, 1, 1024)
    assert sizes == (1, 1021)


@dataclass(frozen=True)
class OddRule:
    """A rule that nobody has thought of yet."""

    name: str = "odd"

    def allowed(self, space: TileSpace, layer: str, axis: int, sizes: Sequence[int]) -> Sequence[int]:
        return [size for size in sizes if size % 2]


def test_another_rule_is_another_value() -> None:
    rules = default_rules(load_device("v100"), 0.1)
    plain = aligned_axis_sizes(MATMUL, rules, "registers", M, 1, 1024)
    odd = aligned_axis_sizes(MATMUL, (*rules, OddRule()), "registers", M, 1, 1024)
    assert odd == tuple(size for size in plain if size % 2) != plain


def test_default_rules_come_from_the_device() -> None:
    unit, transaction, bank, shape = default_rules(load_device("mi50"), 0.25, ((M, 16),))
    mi50 = load_device("mi50")
    assert unit == ExecutionUnitRule(64, ((M, 16),))
    assert transaction == TransactionRule(mi50.dram.transaction_bytes)
    assert bank == BankRule(32, 4)
    assert shape == TensorShapeRule(0.25)
    assert [rule.name for rule in (unit, transaction, bank, shape)] == [
        "execution unit", "memory transaction", "memory bank", "tensor shape",
    ]  # fmt: skip
