"""Compiled code and NumPy: the same bits for every schedule that construction proposes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest

from bench.suites import suite_path
from hal.catalog import load_device
from hal.support.native import NativeLibrary
from roller.construct.construct import Proposals, construct
from sokoban.kernel.form import kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import load_operators, operator_from_data
from sokoban.model.gpu import compiled
from sokoban.model.gpu.breakdown import STAGE_OVERLAP, stages_by_columns
from sokoban.model.gpu.step import BlockStep, Occupancy
from sokoban.schedule.pipelines import fully_staged, with_layouts
from sokoban.schedule.table import ScheduleTable
from sokoban.search.padding import bank_padding, padding_by_columns
from sokoban.search.search import search

FORMS = {
    expr.name: kernel_form(expr) for suite in ("roller119", "modern") for expr in load_operators(suite_path(suite))[::7]
}
DEVICES = {name: load_device(name) for name in ("v100", "a100", "mi50")}


@pytest.fixture
def _library(c_compiler: None, native: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "native_library", lambda source: native)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeLibrary]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROLLER_CACHE", "1")
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        library = NativeLibrary(compiled.SOURCE)
        assert library.built() is not None
        yield library


def variants(placed: PlacedForm) -> ScheduleTable | None:
    """What construction proposes by multiply-adds: as it is, laid out, two ways of fetching ahead, in bands."""
    proposed = [c.schedule for c in Proposals(placed).within(0.25) if not c.schedule.uses_matrix]
    if not proposed:
        return None
    one = ScheduleTable.of(placed.form, proposed * 4)
    kind = np.arange(one.count) // len(proposed)
    stages, past = np.array([1, 1, 2, 3])[kind], kind == 3
    table = with_layouts(one, fully_staged(one) & (kind > 0), stages, past)
    return table.with_raster(np.arange(table.count) % 5 * 3)


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("device", DEVICES)
def test_stages_and_padding_have_the_bits_that_numpy_gives_them(device: str) -> None:
    compared = 0
    for name, form in FORMS.items():
        placed = PlacedForm(form, DEVICES[device])
        table = variants(placed) if form.kind == "tile" else None
        if table is None:
            continue
        padding = padding_by_columns(table, placed.device)
        for tensor, amounts in (compiled.compiled_padding(table, placed) or {}).items():
            np.testing.assert_array_equal(amounts, padding[tensor], f"{name}: padding of {tensor}")
        table = table.with_padding(padding)
        found = compiled.compiled_stages(table, placed, 1.0 / STAGE_OVERLAP)
        assert found is not None, name
        step = BlockStep(table, placed)
        for stage, seconds in stages_by_columns(step).items():
            np.testing.assert_array_equal(found.seconds[stage], seconds + np.zeros(table.count), f"{name}: {stage}")
        for field in fields(Occupancy):
            figures = (getattr(each, field.name) for each in (found.occupancy, step.occupancy))
            np.testing.assert_array_equal(*figures, f"{name}: {field.name}")
        compared += table.count
    assert compared > 1000


@pytest.mark.usefixtures("_library")
def test_what_the_c_file_does_not_know_is_left_to_numpy() -> None:
    rows = next(form for form in FORMS.values() if form.kind == "rows")
    for form, device in ((rows, "v100"), (FORMS["C7"], "a100")):
        placed = PlacedForm(form, DEVICES[device])
        schedules = [candidate.schedule for candidate in Proposals(placed).within(0.25)]
        table = ScheduleTable.of(form, schedules)
        known = form.kind == "tile" and not table.has_warp_tiles
        assert (compiled.compiled_stages(table, placed, 1.0 / STAGE_OVERLAP) is not None) == known
        assert bank_padding(table, placed).keys() == table.padding.keys()


def test_programs_are_the_same_with_and_without(
    _library: None, monkeypatch: pytest.MonkeyPatch, native: NativeLibrary
) -> None:
    def constructed() -> list[object]:
        programs = construct(FORMS["C7"], DEVICES["v100"]).programs
        return [(program.schedule, program.estimate, program.reasons) for program in programs]

    with_it = constructed()
    monkeypatch.setattr(native, "library", lambda: None)
    assert constructed() == with_it


@pytest.mark.usefixtures("_library")
def test_searches_come_back_from_other_processes() -> None:
    form = kernel_form(operator_from_data({"op": "matmul", "m": 65, "n": 33, "k": 17}))
    found = search(form, DEVICES["v100"], 2)
    assert "compiled" in found.placed.remembered
    returned = pickle.loads(pickle.dumps(found))
    assert returned.schedules == found.schedules and returned.placed == found.placed
    assert returned.placed.remembered == {}
