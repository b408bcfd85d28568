"""The trace behind a hand-made graph, for passes that look at operators and their recorded sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from daydream.trace.trace import NONE, Category, ThreadName, Trace


def traced(
    names: Sequence[str],
    enclosing: Sequence[int],
    dims: Mapping[int, Any] | None = None,
    arguments: Mapping[int, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Fields `trace` and `enclosing` of a graph whose operators have these names; `dims` by trace row (float32)."""
    count = len(names)
    recorded: list[dict[str, Any]] = [{} for _ in names]
    for row, sizes in (dims or {}).items():
        recorded[row] = {"Input Dims": sizes, "Input type": ["float" if size else "" for size in sizes]}
    for row, given in (arguments or {}).items():
        recorded[row] = given
    texts = tuple(dict.fromkeys(names))
    whole = np.full(count, NONE)
    trace = Trace(
        path="hand-made",
        names=texts,
        threads=(ThreadName(1, 1),),
        name=np.array([texts.index(name) for name in names], np.int64),
        category=np.full(count, int(Category.OPERATOR)),
        start_us=np.arange(count, dtype=np.float64),
        duration_us=np.ones(count),
        thread=np.zeros(count, np.int64),
        correlation=whole,
        external=whole,
        sequence=whole,
        forward_thread=whole,
        bytes=np.full(count, np.nan),
        arguments=tuple(recorded),
        forward_backward=np.empty((0, 2), np.int64),
    )
    return {"trace": trace, "enclosing": np.array(enclosing, np.int64)}
