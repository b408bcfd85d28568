"""Garbage collection around compilations."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.callback import callback_handler  # noqa: E402

from roller.dynamo.garbage import leave_out_older_objects  # noqa: E402


class Node:
    """Something that refers to itself."""

    def __init__(self) -> None:
        self.node = self


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Callbacks of a test alone, and nothing left out before it, as the suite leaves out what it imported."""
    were_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    before = [list(each) for each in (callback_handler.start_callbacks, callback_handler.end_callbacks)]
    callback_handler.clear()
    yield
    callback_handler.start_callbacks[:], callback_handler.end_callbacks[:] = before
    if were_frozen:
        gc.freeze()


def compiled(seen: list[Any]) -> Any:
    """A function, compiled by a backend that looks at what is left out, and collects garbage of its own."""

    def backend(module: Any, _: Any) -> Any:
        node = Node()
        young = weakref.ref(node)
        del node
        frozen = gc.get_freeze_count()
        gc.collect()
        seen.extend((frozen, young()))
        return module

    torch._dynamo.reset()
    leave_out_older_objects()
    return torch.compile(lambda value: value + 1, backend=backend)


def test_older_objects_are_left_out_until_a_compilation_ends() -> None:
    seen: list[Any] = []
    function = compiled(seen)
    function(torch.ones(3))
    frozen, young = seen
    assert frozen > 1000
    assert young is None
    assert gc.get_freeze_count() == 0


def test_what_a_program_leaves_out_itself_stays_out() -> None:
    seen: list[Any] = []
    function = compiled(seen)
    gc.freeze()
    try:
        function(torch.ones(3))
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_nothing_is_left_out_where_nothing_is_collected() -> None:
    seen: list[Any] = []
    function = compiled(seen)
    gc.disable()
    try:
        function(torch.ones(3))
    finally:
        gc.enable()
    assert seen[0] == 0
