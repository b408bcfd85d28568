"""Constants of graphs in memory."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from roller.dynamo import constants  # noqa: E402
from roller.dynamo.constants import HUGE_PAGE_BYTES, dense_copies, is_looked_up, storages_of, use_huge_pages  # noqa: E402


def test_whole_huge_pages_of_parameters_are_asked_for_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(constants, "_madvise", lambda: lambda start, size, advice: asked.append((start, size)))
    large = torch.empty(3 * HUGE_PAGE_BYTES, dtype=torch.uint8)
    address = large.data_ptr()
    others = [torch.empty(10), torch.empty(1 << 24, device="meta"), torch.nn.Linear(2, 2)]
    use_huge_pages([large, *others], storages_of([large]))
    ((start, size),) = asked
    assert large.data_ptr() == address
    assert start % HUGE_PAGE_BYTES == size % HUGE_PAGE_BYTES == 0
    assert address <= start
    assert start + size <= address + large.nbytes
    assert size >= 2 * HUGE_PAGE_BYTES


def test_constants_move_together_and_keep_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(constants, "_madvise", lambda: lambda start, size, advice: asked.append(start))
    first, second = torch.arange(1 << 20), torch.randn(999, 7)
    view, parameter = second[3:].t(), torch.nn.Parameter(torch.ones(5))
    wanted = [each.clone() for each in (first, second, view, parameter)]
    use_huge_pages([first, second, view, parameter])
    for tensor, numbers in zip((first, second, view, parameter), wanted, strict=True):
        assert torch.equal(tensor, numbers)
    assert asked[0] % HUGE_PAGE_BYTES == 0
    assert first.data_ptr() == asked[0]
    assert second.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert parameter.untyped_storage().nbytes() == parameter.nbytes


def test_numbers_stay_what_they_are_where_the_system_moves_pages() -> None:
    numbers = torch.arange(1 << 20)
    use_huge_pages([numbers])
    assert torch.equal(numbers, torch.arange(1 << 20))


@pytest.mark.parametrize("rows", [3, 1 << 18])
def test_copies_are_those_that_clone_makes(rows: int) -> None:
    images = torch.randn(2, rows // 2 + 1, 3, 2)
    sources = [
        (torch.randn(rows, 4).t(), torch.contiguous_format), (torch.randn(rows, 4).t(), torch.preserve_format),
        (images, torch.channels_last), (torch.randn(5).expand(7, 5), torch.preserve_format),
        (torch.arange(11, dtype=torch.int8), torch.preserve_format),
    ]  # fmt: skip
    copies, filled = dense_copies(sources)
    filled.result()
    for (source, order), copy in zip(sources, copies, strict=True):
        wanted = source.clone(memory_format=order)
        assert torch.equal(copy, wanted) and copy.dtype == wanted.dtype and copy.stride() == wanted.stride()
    are_together = len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    assert are_together == (rows > 3 and constants._madvise() is not None)


def test_a_thread_puts_copies_into_huge_pages_later(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def madvise(start: int, size: int, advice: int) -> int:
        asked.append((start, size, advice))
        return 0

    monkeypatch.setattr(constants, "_madvise", lambda: madvise)
    monkeypatch.setattr(constants, "_can_collapse", lambda: True)
    monkeypatch.setattr(constants, "_LATER_SECONDS", 0.0)
    monkeypatch.setattr(constants, "_PAUSE_SECONDS", 0.0)
    threads = set(threading.enumerate())
    numbers = torch.arange(1 << 20)
    (copy,), filled = dense_copies([(numbers, torch.preserve_format)])
    filled.result()
    for thread in set(threading.enumerate()) - threads:
        thread.join()
    pages = copy.nbytes // HUGE_PAGE_BYTES
    wanted = [copy.data_ptr() + page * HUGE_PAGE_BYTES for page in range(pages)]
    assert set(wanted) <= {start for start, _, _ in asked}
    assert {each[1:] for each in asked} == {(HUGE_PAGE_BYTES, constants._MADV_COLLAPSE)}
    assert torch.equal(copy, numbers)


def test_copies_of_shapes_alone_have_no_numbers() -> None:
    (copy,), filled = dense_copies([(torch.empty(1 << 22, device="meta"), torch.preserve_format)])
    assert copy.device.type == "meta" and filled.done()


def test_tables_of_embeddings_are_looked_up() -> None:
    graph = torch.fx.Graph()
    rows, table, matrix = graph.placeholder("rows"), graph.get_attr("table"), graph.get_attr("matrix")
    found = graph.call_function(torch.ops.aten.embedding.default, (table, rows))
    graph.output(graph.call_function(torch.ops.aten.mm.default, (found, matrix)))
    assert is_looked_up(table) and not is_looked_up(matrix)
    graph.call_function(torch.ops.aten.t.default, (table,))
    assert not is_looked_up(table)
