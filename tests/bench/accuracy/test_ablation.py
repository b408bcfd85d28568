"""The ablation takes out one effect, for the time of an evaluation, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table

from bench.accuracy import ablation, library_ablation
from bench.accuracy.__main__ import TABLES
from bench.accuracy.ablation import EFFECTS, Figures, chart, effect_table, figures
from bench.accuracy.data import default_directory
from bench.accuracy.effects import Effect, without
from bench.accuracy.library_ablation import Row, library_chart, library_rows, library_table
from hal.catalog import load_device
from roller.library import gemm_cost
from sokoban.kernel.form import kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data
from sokoban.model.gpu import breakdown
from sokoban.model.rational import estimate
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule

measured_data = pytest.mark.skipif(
    not (default_directory() / "v100_schedules").is_dir(), reason="the measured schedules are not beside this checkout"
)
measured_calls = pytest.mark.skipif(
    not (default_directory() / "library_kernels").is_dir(), reason="the measured calls are not beside this checkout"
)

FULL = Figures(
    first=1.2, best_of_ten=1.0, median_error=0.13, rank_correlation=0.65, flat_median=0.001, reduction_error=0.1
)
LESS = Figures(
    first=1.5, best_of_ten=1.1, median_error=0.23, rank_correlation=0.60, flat_median=0.001, reduction_error=0.4
)


def schedules() -> ScheduleTable:
    """A few schedules of an odd matrix product, one with partial warps, one with rows that no transaction fits."""
    form = kernel_form(operator_from_data({"op": "matmul", "m": 999, "n": 777, "k": 333}))
    tiles = [(32, 32, 4, 4, 8), (30, 42, 5, 3, 3), (64, 64, 8, 8, 16), (64, 128, 8, 16, 4), (8, 8, 1, 1, 1)]
    return ScheduleTable.of(
        form,
        [
            TileSchedule(block=(("m", m), ("n", n)), thread=(("m", tm), ("n", tn)), step=(("k", k),), cached=("A", "B"))
            for m, n, tm, tn, k in tiles
        ],
    )


def predicted(effect: Effect | None = None) -> list[float]:
    board = load_device("v100-pcie")
    with without([effect] if effect else []):
        table = schedules()
        return estimate(table, PlacedForm(table.form, effect.device(board) if effect else board)).seconds.tolist()


@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: effect.name)
def test_without_an_effect_every_schedule_still_has_a_time(effect: Effect) -> None:
    before = predicted()
    assert all(0 < seconds < np.inf for seconds in predicted(effect))
    assert predicted() == before


@pytest.mark.parametrize(
    "name", ["transactions", "density", "cost of the fetch", "latency", "overlap", "L2", "DRAM", "compilers: hoisting"]
)
def test_a_cost_that_is_left_out_makes_nothing_slower(name: str) -> None:
    effect = next(effect for effect in EFFECTS if effect.name == name)
    assert all(less <= full * (1 + 1e-9) for less, full in zip(predicted(effect), predicted(), strict=True))


@pytest.mark.parametrize("name", ["banks", "vectors", "thread mapping", "waves", "latency", "transactions", "L2"])
def test_an_effect_changes_some_schedule(name: str) -> None:
    effect = next(effect for effect in EFFECTS if effect.name == name)
    assert predicted(effect) != predicted()


def test_a_name_that_is_no_longer_there_is_an_error() -> None:
    gone = Effect("gone", ((breakdown, {"seconds_of_a_stage_that_was": 0.0}),))
    with pytest.raises(AttributeError, match="seconds_of_a_stage_that_was"), without([gone]):
        raise AssertionError


def test_constants_of_the_library_change_for_a_while_only() -> None:
    before = gemm_cost.CONSTANTS.hold_m
    with library_ablation._gemm_constants({"hold_m": 7.0}):
        assert gemm_cost.CONSTANTS.hold_m == 7.0
    assert before == gemm_cost.CONSTANTS.hold_m
    with pytest.raises(AttributeError, match="gone"), library_ablation._gemm_constants({"gone": 1.0}):
        raise AssertionError


def test_all_is_put_back_when_an_evaluation_fails() -> None:
    before = breakdown.UNHIDDEN
    with pytest.raises(RuntimeError), without([Effect("", ((breakdown, {"UNHIDDEN": 0.0}),))]):
        assert breakdown.UNHIDDEN == 0.0
        raise RuntimeError
    assert before == breakdown.UNHIDDEN


def test_names_of_effects_are_unique_and_parts_follow_their_whole() -> None:
    names = [effect.name for effect in EFFECTS]
    assert len(set(names)) == len(names)
    for position, name in enumerate(names):
        whole = name.partition(": ")[0]
        assert whole in names[: position + 1]


def test_the_table_shows_figures_and_their_differences() -> None:
    table = effect_table(FULL, [("banks", LESS), ("banks: of staging", FULL)])
    columns = [list(column.cells) for column in table.columns]
    assert columns[0] == ["nothing: the full model", "banks", "  banks: of staging"]
    assert columns[1] == ["1.200", "1.500 (+0.300)", "1.200 (+0.000)"]
    assert columns[3] == ["13.0%", "23.0% (+10.0%)", "13.0% (+0.0%)"]
    assert columns[4][1] == "0.600 (-0.050)"


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda path: chart(FULL, [("banks", LESS), ("waves", FULL)], path), "rational"),
        (lambda path: library_chart([Row("waves", "bmm", 0.1, 0.2), Row("host", "linear", 0.1, 0.1)], path), "library"),
    ],
    ids=["rational", "library"],
)
@pytest.mark.slow
def test_the_charts_are_pictures(draw: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / "below" / f"{name}.png")
    assert (tmp_path / "below" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_knows_the_table() -> None:
    assert "ablation" in TABLES
    assert callable(ablation.table)


@measured_data
@pytest.mark.slow
def test_waiting_for_memory_matters_on_measured_schedules() -> None:
    effect = next(effect for effect in EFFECTS if effect.name == "latency")
    full, less = figures(default_directory()), figures(default_directory(), effect)
    assert full.minus(full) == Figures(
        first=0, best_of_ten=0, median_error=0, rank_correlation=0, flat_median=0, reduction_error=0
    )
    assert less.median_error > full.median_error and less.rank_correlation < full.rank_correlation


@measured_calls
@pytest.mark.slow
def test_every_effect_of_the_library_has_a_row_per_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_ablation, "SAMPLE", 100)
    rows = library_rows(default_directory())
    assert len(rows) == sum(len(each.classes) for each in library_ablation.EFFECTS)
    assert all(0 < row.full < 1 and 0 < row.without < np.inf for row in rows)
    table: Table = library_table(rows)
    assert table.row_count == len(rows)
    host = next(row for row in rows if row.operation == "element-wise")
    assert host.effect == "host" and host.without > host.full
