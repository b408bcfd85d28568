"""Tiles copied in bulk: which are proposed, what clusters read, what fits."""

from __future__ import annotations

import numpy as np
import pytest

from hal.catalog import load_device
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data
from sokoban.model.gpu.breakdown import breakdown
from sokoban.model.gpu.occupancy import shared_bytes
from sokoban.schedule.bulk_copies import (
    MOST_PERSISTENT,
    bulk_schedules,
    clustered_blocks,
    form_problem,
    read_share,
    schedule_problem,
    units_of_clusters,
)
from sokoban.schedule.table import ScheduleTable

H100 = load_device("h100-sxm-80gb")
SQUARE = {"op": "matmul", "m": 4096, "n": 4096, "k": 4096, "dtype": "bfloat16", "transpose_b": True}


def form_of(**changes: object) -> KernelForm:
    return kernel_form(operator_from_data({**SQUARE, **changes}))


def proposed(form: KernelForm) -> ScheduleTable:
    return ScheduleTable.of(form, list(bulk_schedules(PlacedForm(form, H100))))


def test_what_is_proposed_fits_the_board_and_the_instruction() -> None:
    form = form_of()
    schedules = list(bulk_schedules(PlacedForm(form, H100)))
    table = ScheduleTable.of(form, schedules)
    assert len(set(schedules)) == len(schedules) > 50
    assert form.roles is not None
    assert not [schedule for schedule in schedules if schedule_problem(form, form.roles, schedule)]
    assert {schedule.cluster for schedule in schedules} == {1, 2, 4}
    assert {schedule.block_of["n"] for schedule in schedules} == {64, 96, 128, 160, 192, 224, 256}
    step = breakdown(table, PlacedForm(form, H100)).step
    assert (step.occupancy.resident >= 1).all() and (step.occupancy.spilled == 0).all()
    assert (shared_bytes(table) <= H100.limits.shared_bytes_per_block_opt_in).all()
    assert (step.occupancy.registers * table.threads_per_block <= H100.limits.registers_per_unit).all()


def test_only_clusters_that_always_run_together_walk_from_tile_to_tile() -> None:
    """A persistent cluster for which no GPC has room would start when the others have ended."""
    schedules = list(bulk_schedules(PlacedForm(form_of(), H100)))
    assert all(schedule.launched == 0 for schedule in schedules if schedule.cluster > MOST_PERSISTENT)
    assert {schedule.launched for schedule in schedules if schedule.cluster <= MOST_PERSISTENT} == {132, 264}
    few = bulk_schedules(PlacedForm(form_of(m=512, n=512), H100))
    assert all(schedule.launched == 0 for schedule in few)


@pytest.mark.parametrize(("units", "cluster", "usable"), [(132, 2, 132), (132, 4, 128), (114, 4, 112), (18, 4, 16)])
def test_gpcs_bound_how_many_clusters_run(units: int, cluster: int, usable: int) -> None:
    assert units_of_clusters(units, cluster) == usable


def test_blocks_of_a_cluster_read_what_they_have_in_common_once() -> None:
    form = form_of()
    roles, table = form.roles, proposed(form)
    assert roles is not None
    wide = table.block["n"] >= table.block["m"]
    of_a, of_b = (np.broadcast_to(read_share(table, load), table.count) for load in (roles.a, roles.b))
    np.testing.assert_array_equal(of_a, np.where((table.cluster == 4) | ((table.cluster == 2) & ~wide), 0.5, 1.0))
    np.testing.assert_array_equal(of_b, np.where((table.cluster == 4) | ((table.cluster == 2) & wide), 0.5, 1.0))
    l2 = breakdown(table, PlacedForm(form, H100)).busy["l2"]
    square = (table.block["m"] == 128) & (table.block["n"] == 128) & (table.launched == 132)
    alone, pair = l2[square & (table.cluster == 1)], l2[square & (table.cluster == 2)]
    np.testing.assert_allclose(pair[0] / alone[0], 0.75)


def test_tiles_that_complete_a_cluster_are_computed_too() -> None:
    form = form_of(m=128 * 3, n=256 * 3)
    table = proposed(form)
    rows = np.flatnonzero((table.block["m"] == 128) & (table.block["n"] == 256))
    found = {int(table.cluster[row]): int(clustered_blocks(table)[row]) for row in rows}
    assert found == {1: 9, 2: 12, 4: 16}


@pytest.mark.parametrize(
    ("operator", "problem"),
    [
        ({}, None),
        ({"k": 4100}, "rows of an operand are no multiples of 16 bytes"),
        ({"op": "conv2d", "n": 2, "c": 64, "h": 9, "w": 9, "f": 64, "kh": 3, "kw": 3}, "is no axis of its own"),
        (
            {
                "expr": "acc[m,n] = sum(k, A[m,k] * B[k,n])\nC[m,n] = acc[m,n] + A[m,n]",
                "sizes": {"m": 128, "n": 128, "k": 128},
            },
            "A is read again by the final statement",
        ),
    ],
)
def test_what_cannot_be_copied_in_bulk_is_left_to_threads(operator: dict[str, object], problem: str | None) -> None:
    data = {"dtype": "bfloat16", **operator} if "op" in operator or "expr" in operator else {**SQUARE, **operator}
    form = kernel_form(operator_from_data(data))
    if form.roles is None:
        assert problem is not None
        return
    found = form_problem(form, form.roles)
    assert found is None if problem is None else problem in str(found)
    assert (problem is None) == bool(list(bulk_schedules(PlacedForm(form, H100))))


def test_persistent_blocks_fill_their_pipeline_once() -> None:
    form = form_of()
    table = proposed(form)
    filling = breakdown(table, PlacedForm(form, H100)).filling
    wide = (table.block["m"] == 128) & (table.block["n"] == 256) & (table.cluster == 2)
    once = filling[np.flatnonzero(wide & (table.launched == 132))[0]]
    each = filling[np.flatnonzero((table.block["m"] == 128) & (table.block["n"] == 256) & (table.cluster == 4))[0]]
    np.testing.assert_allclose(once * 4, each)


def scaled_of(c: int = 32, n: int = 128) -> KernelForm:
    data = {
        "expr": "Y[i,c,n] = sum((b, k), A[i,b,k] * W[c,n,b,k] * S[i,b] * T[c,b])",
        "sizes": {"i": 4096, "c": c, "n": n, "b": 16, "k": 128}, "dtype": "float8_e4m3fn",
        "dtypes": {"S": "float32", "T": "float32", "Y": "bfloat16"},
    }  # fmt: skip
    return kernel_form(operator_from_data(data))


def test_tiles_with_two_sets_of_sums_are_narrower() -> None:
    form = scaled_of(n=256)
    schedules = list(bulk_schedules(PlacedForm(form, H100)))
    widest = {
        rows: max(schedule.block_of["n"] for schedule in schedules if schedule.block_of["i"] == rows)
        for rows in (64, 128, 192)
    }
    assert widest == {64: 192, 128: 192, 192: 128}
    step = breakdown(ScheduleTable.of(form, schedules), PlacedForm(form, H100)).step
    assert (step.occupancy.resident >= 1).all() and (step.occupancy.spilled == 0).all()


def test_clusters_lie_across_blocks_of_columns() -> None:
    """Each of the blocks of columns is one tile: those side by side read rows of A together."""
    form = scaled_of()
    assert form.roles is not None
    table = proposed(form)
    chosen = (table.block["i"] == 192) & (table.block["n"] == 128) & (table.cluster == 2)
    assert chosen.any()
    assert set(read_share(table, form.roles.a)[chosen]) == {0.5} and set(read_share(table, form.roles.b)[chosen]) == {
        1.0
    }
    odd = proposed(scaled_of(c=33))
    chosen = (odd.block["i"] == 192) & (odd.block["n"] == 128) & (odd.cluster == 2)
    assert set(clustered_blocks(odd)[chosen]) == {22 * 34}
