"""The loops that load a core compute what they say: a loop that skipped its work would measure nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hal.microbench.cpu.arithmetic import Product
from hal.microbench.cpu.latency import link
from hal.microbench.cpu.machine import Machine, this_machine
from hal.microbench.cpu.vector_ir import COPY_ELEMENTS, UNROLL, chains, tile_rows
from hal.microbench.sampling import Settings


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with this_machine(Settings(repeats=1, target_seconds=1e-5)) as machine:
        yield machine


@pytest.mark.parametrize("loop", ["read", "read_apart"])
def test_read_takes_every_element(machine: Machine, loop: str) -> None:
    lanes = machine.topology.lanes
    array = machine.array(1 << 14)
    bits = np.random.default_rng(1).integers(0, 1 << 32, array.size, np.uint32)
    array.view(np.uint32)[:] = bits
    out = np.zeros(UNROLL * lanes, np.uint32)
    machine.loops[loop](array.ctypes.data, out.ctypes.data, array.size, 1)
    assert np.bitwise_xor.reduce(out) == np.bitwise_xor.reduce(bits)
    machine.loops[loop](array.ctypes.data, out.ctypes.data, array.size, 2)
    assert not out.any()  # twice the same


def test_add_and_copy_write_every_element(machine: Machine) -> None:
    a, b, c = (machine.array(8 * 4 * COPY_ELEMENTS) for _ in range(3))
    a[:] = np.arange(a.size)
    b[:] = 2 * np.arange(a.size)
    machine.loops["add"](a.ctypes.data, b.ctypes.data, c.ctypes.data, a.size, 1)
    np.testing.assert_array_equal(c, a + b)
    machine.loops["copy"](a.ctypes.data, c.ctypes.data, a.size, 1)
    np.testing.assert_array_equal(c, a)


def test_multiply_adds_are_as_many_as_counted(machine: Machine) -> None:
    lanes, count = machine.topology.lanes, chains(machine.topology.vector_registers)
    operands = np.concatenate([np.full(lanes, 1, np.float32), np.full(lanes, 2, np.float32)])
    out = np.zeros(count * lanes, np.float32)
    for loop in ("fma", "issue"):
        machine.loops[loop](operands.ctypes.data, out.ctypes.data, 5, 3)
        np.testing.assert_array_equal(out, 1 + 2 * 15)  # x = x * 1 + 2, fifteen times from 1


def test_product_is_a_matrix_product(machine: Machine) -> None:
    rows, columns, k, tiles = tile_rows(machine.topology.vector_registers), 2 * machine.topology.lanes, 7, (3, 2)
    random = np.random.default_rng(1)
    a, b = machine.array(4 * 4096), machine.array(4 * 4096)
    c = machine.array(4 * (tiles[0] * tiles[1] * rows * columns + 512))
    c[:] = 1
    a_values = random.integers(-4, 5, (tiles[0], k, rows)).astype(np.float32)
    b_values = random.integers(-4, 5, (tiles[1], k, columns)).astype(np.float32)
    a[: a_values.size], b[: b_values.size] = a_values.ravel(), b_values.ravel()
    machine.loops["product"](a.ctypes.data, b.ctypes.data, c.ctypes.data, *tiles, k)
    expected = 1 + np.einsum("ikr,jkc->jirc", a_values, b_values)
    np.testing.assert_array_equal(c[: expected.size], expected.ravel())
    assert (c[expected.size :] == 1).all()


def test_chase_visits_every_line_and_comes_back(machine: Machine) -> None:
    cells = machine.array(1 << 14).view(np.int64)
    link(cells, 64)
    lines = cells.size // 8
    seen, at = set(), cells.ctypes.data
    for _ in range(lines):
        seen.add(at)
        at = int(cells[(at - cells.ctypes.data) // 8])
    assert at == cells.ctypes.data and len(seen) == lines
    out = np.zeros(1, np.int64)
    machine.loops["chase"](cells.ctypes.data, out.ctypes.data, 16)
    assert int(out[0]) in seen and int(out[0]) != cells.ctypes.data


def test_additions_are_as_many_as_counted(machine: Machine) -> None:
    out = np.zeros(1, np.int64)
    machine.loops["count"](3, out.ctypes.data, 640)
    assert out[0] == 3 * 640


def test_all_threads_pass_every_barrier(machine: Machine) -> None:
    from functools import partial

    counter, count = np.zeros(1, np.int64), machine.cores.count
    machine.cores.seconds([partial(machine.loops["barrier"], counter.ctypes.data, count, 50)] * count)
    assert counter[0] == 50 * count


def test_panels_fit_the_arrays(machine: Machine) -> None:
    product = Product(machine)
    assert product.operations == 2.0 * product.m * product.n * product.k * machine.cores.count
    assert product.seconds() > 0
    assert all(panel.size >= product.k for panel in product._panels)
