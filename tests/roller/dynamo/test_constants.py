"""Constants of graphs in memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from roller.dynamo import constants  # noqa: E402
from roller.dynamo.constants import HUGE_PAGE_BYTES, use_huge_pages  # noqa: E402


def test_whole_huge_pages_of_tensors_with_numbers_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(constants, "_madvise", lambda: lambda start, size, advice: asked.append((start, size)))
    large = torch.empty(3 * HUGE_PAGE_BYTES, dtype=torch.uint8)
    use_huge_pages([large, torch.empty(10), torch.empty(1 << 24, device="meta"), torch.nn.Linear(2, 2)])
    ((start, size),) = asked
    assert start % HUGE_PAGE_BYTES == size % HUGE_PAGE_BYTES == 0
    assert large.data_ptr() <= start
    assert start + size <= large.data_ptr() + large.nbytes
    assert size >= 2 * HUGE_PAGE_BYTES


def test_numbers_stay_what_they_are() -> None:
    numbers = torch.arange(1 << 20)
    use_huge_pages([numbers])
    assert torch.equal(numbers, torch.arange(1 << 20))
