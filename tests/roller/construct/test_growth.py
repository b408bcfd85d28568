"""Paths grown in C are those grown in Python: the same steps, scores, costs and reasons to stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.suites import suite_path
from hal.catalog import load_device
from hal.support.native import NativeLibrary
from roller.construct import growth
from roller.construct.growth import Growth
from roller.construct.performance import MicroModel
from roller.construct.rtile import TileSpace
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import load_operators

V100 = load_device("v100")
SPACES = {
    expr.name: TileSpace.of(kernel_form(expr))
    for expr in load_operators(suite_path("roller119"))
    if expr.name in ("M1", "C0", "C39", "D7")
}
SIZES = (1, 2, 3, 4, 7, 8, 16, 30, 32, 64)


def walked(space: TileSpace, rank: int, capacity: int, layer: str) -> tuple[object, ...]:
    model = MicroModel(space, V100, 1e12, 2.0)
    walk = Growth(model)
    menu = [tuple(size for size in SIZES if size <= max(1, 2 * whole)) for whole in space.sizes]
    path = list(walk.path(layer, (1,) * len(space.axes), menu, capacity, rank))
    return path, walk.blocked, [model.costs_by_shape[shape] for _, _, shape in path]


@pytest.mark.usefixtures("c_compiler")
@pytest.mark.parametrize("name", SPACES)
def test_c_and_python_walk_the_same_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [(rank, capacity, layer) for rank in (0, 1) for capacity, layer in ((96, "registers"), (49152, "shared"))]
    by_python = [walked(SPACES[name], *case) for case in cases]
    monkeypatch.setenv("ROLLER_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = NativeLibrary(growth.SOURCE)
    assert library.built() is not None
    monkeypatch.setattr(growth, "native_library", lambda source: library)
    assert [walked(SPACES[name], *case) for case in cases] == by_python
    assert any(path for path, _, _ in by_python)


def test_numbers_too_large_for_c_are_left_to_python() -> None:
    program = load_operators(suite_path("roller119"))[0]
    space = TileSpace.of(kernel_form(program))
    larger = TileSpace(**{**space.__dict__, "sizes": tuple(size << 20 for size in space.sizes)})
    assert Growth(MicroModel(larger, V100, 1e12, 2.0)).library is None
