"""The shared layer: C and Python find the same tiles for the same reasons."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.suites import suite_path
from hal.catalog import load_device
from hal.support.native import NativeLibrary
from roller.construct import growth, shared_layer
from roller.construct.construct import Proposals
from roller.construct.growth import Menu
from roller.construct.performance import Shape
from roller.construct.program import Candidate
from roller.construct.shared_layer import SharedLayer, Walk
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import load_operators
from tests.sokoban.schedules import form_of

FORMS: dict[str, KernelForm] = {
    **{expr.name: kernel_form(expr) for expr in load_operators(suite_path("roller119"))[::13]},
    "small": form_of(op="matmul", m=64, n=96, k=4096),
    "primes": form_of(op="matmul", m=1009, n=997, k=13),
    "halves": form_of(op="matmul", m=512, n=1000, k=768, dtype="float16"),
    "window": form_of(op="conv2d", n=2, c=96, h=29, w=29, f=48, kh=7, kw=7, stride=2),
}
DEVICES = {name: load_device(name) for name in ("v100", "a100", "mi50")}
EPSILONS = (0.1, 0.4, 4.0)


@pytest.fixture
def _library(c_compiler: None, native: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "native_library", lambda source: native)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NativeLibrary]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("ROLLER_CACHE", "1")
        environment.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        library = NativeLibrary(growth.SOURCE)
        assert library.built() is not None
        yield library


def proposed(name: str, device: str) -> list[Candidate]:
    proposals = Proposals(PlacedForm(FORMS[name], DEVICES[device]))
    return [candidate for epsilon in EPSILONS for candidate in proposals.within(epsilon)]


@pytest.mark.usefixtures("_library")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMS)
def test_c_and_python_find_the_same_tiles_for_the_same_reasons(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, walks = SharedLayer.compiled, list[Walk | None]()

    def noted(self: SharedLayer, register_shape: Shape, menu: Menu) -> Walk | None:
        walks.append(compiled(self, register_shape, menu))
        return walks[-1]

    monkeypatch.setattr(SharedLayer, "compiled", noted)
    by_c = proposed(name, device)
    assert None not in walks
    monkeypatch.setattr(SharedLayer, "compiled", lambda self, register_shape, menu: None)
    assert proposed(name, device) == by_c


@pytest.mark.usefixtures("_library")
def test_walks_of_more_lines_than_there_is_room_for_are_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = proposed("small", "v100")
    monkeypatch.setattr(shared_layer, "MOST_LINES", 4)
    assert proposed("small", "v100") == whole


def test_every_kind_of_reason_is_given_somewhere() -> None:
    actions = {reason.action for name in FORMS for each in proposed(name, "v100") for reason in each.reasons}
    kinds = ("start", "grow", "keep: memory can", "keep: memory sets", "stop: the next", "stop: no axis", "shrink")
    for kind in (*kinds, "variant: a longer"):
        assert any(action.startswith(kind) for action in actions), kind
    assert any("would not fit" in action for action in actions)


def test_what_is_kept_is_a_tile_of_the_shape_it_is_said_to_be() -> None:
    for name in FORMS:
        for candidate in proposed(name, "a100"):
            if candidate.policy.startswith("scale up") and candidate.tiles is not None:
                shared = [reason for reason in candidate.reasons if reason.layer != "registers"]
                assert shared[0].action.startswith("start from the register tile")
                assert shared[-1].tile == candidate.tiles[1]
