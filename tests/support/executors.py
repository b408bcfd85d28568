"""Executors that tests put in the place of pools of processes."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import Any


class InTurn(Executor):
    """Whatever is asked for is done at once, here."""

    def submit(self, function: Any, *arguments: Any, **options: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        future.set_result(function(*arguments, **options))
        return future
