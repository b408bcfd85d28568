"""How threads walk the rows they share: widths, what stays in registers, and what that costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hal.catalog import load_device
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.expression import Reduction, value_text
from sokoban.language.operators import operator_from_data
from sokoban.model.gpu.row_work import row_work
from sokoban.model.rational import estimate_schedules
from sokoban.schedule.rows import REMEMBERED, ROW_REGISTERS, column_bytes_of, row_plan
from sokoban.schedule.tile import TileSchedule, sizes


def form_of(**data: Any) -> KernelForm:
    return kernel_form(operator_from_data(data))


@pytest.mark.parametrize(
    ("operator", "threads", "width"),
    [
        ({"op": "softmax", "shape": [5, 512]}, 128, 4),
        # Half of the threads have no vector of four, which costs less than narrower ones; three quarters do not.
        ({"op": "softmax", "shape": [5, 512]}, 256, 4),
        ({"op": "softmax", "shape": [5, 512]}, 512, 2),
        ({"op": "softmax", "shape": [5, 510]}, 32, 2),
        ({"op": "softmax", "shape": [5, 511]}, 32, 1),
        ({"op": "softmax", "shape": [512, 5], "axis": 0}, 32, 1),
        ({"op": "layer_norm", "shape": [5, 512], "dtype": "float16"}, 64, 8),
        ({"op": "reduce", "function": "sum", "shape": [5, 512], "axes": [1]}, 128, 4),
        ({"op": "reduce", "function": "sum", "shape": [512, 5], "axes": [0]}, 128, 1),
        ({"op": "reduce", "function": "sum", "shape": [6, 5, 8], "axes": [0, 2]}, 4, 4),
        ({"op": "matmul", "m": 3, "n": 5, "k": 512}, 128, 4),
        # A diagonal, and a column.
        ({"expr": "Y[i] = sum(k, X[k,k] * Z[k,i])", "sizes": {"i": 5, "k": 512}}, 128, 1),
    ],
)
def test_rows_are_walked_in_the_widest_vectors_that_some_access_allows(
    operator: dict[str, Any], threads: int, width: int
) -> None:
    plan = row_plan(form_of(**operator), threads)
    assert plan.vector == width
    assert bool(plan.wide) == (width > 1)


def test_only_contiguous_operands_are_read_as_vectors() -> None:
    """A[m,k] lies along k, B[k,n] does not."""
    plan = row_plan(form_of(op="matmul", m=3, n=5, k=512), 128)
    assert {load.tensor for load in plan.wide} == {"A"}


def test_softmax_keeps_its_row_and_remembers_its_exponentials() -> None:
    plan = row_plan(form_of(op="softmax", shape=[5, 512]), 32)
    assert [load.tensor for load in plan.kept] == ["X"]
    assert plan.remembered is not None and value_text(plan.remembered).startswith("exp(")
    assert plan.stores_wide
    # One division per row, and nothing of the input: what is stored is a product of two numbers in registers.
    final = plan.values[-1]
    assert value_text(final).count("exp") == 0 and plan.reads[-1] == ()
    assert not isinstance(final, Reduction) and REMEMBERED in getattr(final, "arguments", ())


def test_a_row_that_is_too_long_for_registers_is_read_again() -> None:
    form = form_of(op="softmax", shape=[5, 64 * (ROW_REGISTERS + 4)])
    plan = row_plan(form, 64)
    assert plan.kept == () and plan.remembered is None
    (x,) = form.body_loads
    work = row_work(form, np.array([64, 128]), np.zeros(2, np.int64))
    # Maximum, sum and result; with twice the threads the row stays.
    assert work.walks[x].tolist() == [3.0, 1.0]
    assert work.kept_registers[0] == 0 < work.kept_registers[1] <= ROW_REGISTERS
    assert work.batches[0] > work.batches[1]


def test_a_row_that_is_too_long_for_registers_is_kept_in_shared_memory() -> None:
    threads = 64
    form = form_of(op="softmax", shape=[5, threads * (ROW_REGISTERS + 4)])
    columns = form.sizes[form.reduced[-1]]
    plan = row_plan(form, threads, columns)
    assert (plan.shared_turns, plan.register_turns) == (plan.turns, 0)
    (x,) = form.body_loads
    # All of it, or half of it and the other half in registers: read once. Nothing: three times.
    kept = row_work(form, np.array([threads] * 3), np.array([columns, columns // 2, 0]))
    assert kept.walks[x].tolist() == [1.0, 1.0, 3.0]
    assert column_bytes_of(form) == 4
    assert column_bytes_of(form_of(op="reduce", function="sum", shape=[5, 64], axes=[1])) == 0


def test_wide_accesses_are_fewer_instructions() -> None:
    wide, narrow = (form_of(op="reduce", function="sum", shape=[5, n], axes=[1]) for n in (1024, 1023))
    per_row = [row_work(form, np.array([32]), np.zeros(1, np.int64)) for form in (wide, narrow)]
    loads = [sum(column[0] for column in work.loads.values()) for work in per_row]
    assert loads == [8.0, 32.0]
    assert per_row[0].arithmetic[0] == per_row[1].arithmetic[0]
    assert per_row[0].instructions[0] < per_row[1].instructions[0]


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_large_rows_take_as_long_as_reading_and_writing_them_once(name: str) -> None:
    """4096 rows of 1024 columns that one warp each keeps in registers."""
    device = load_device("a100")
    form = form_of(op=name, shape=[4096, 1024])
    schedule = TileSchedule(
        block=sizes({"i0": 8}), thread=sizes({"i0": 1}), reduce_threads=sizes({form.reduced[-1]: 32})
    )
    (seconds,) = estimate_schedules(form, device, [schedule]).seconds
    once = 2 * 4096 * 1024 * 4 / device.dram.bandwidth_bytes_per_second
    assert once < seconds - device.launch_overhead_seconds < 1.1 * once
