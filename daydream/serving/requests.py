"""Requests that are served: when each arrives, tokens of its prompt and of its answer."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.trace.trace import Floats, Ints

#: Columns of a file of requests: seconds of arrival, tokens of prompt and answer.
COLUMNS = ("arrival", "prompt", "output")

#: Most requests of a simulation, and most tokens of one.
MOST, LONGEST = 1_000_000, 1_000_000


@dataclass(frozen=True, eq=False, kw_only=True)
class Requests:
    """Requests in the order in which they arrive.

    Attributes:
        arrival: seconds, ascending.
        prompt: tokens of each prompt.
        output: tokens of each answer.
        concurrency: requests at most that are under way at a time, the next being sent when one is answered; 0 for any.
        shared: first tokens that all prompts have in common, computed and cached already.
        carried: whether keys and values of prompts arrive with the requests, and with them the first token.
    """

    arrival: Floats
    prompt: Ints
    output: Ints
    concurrency: int = 0
    shared: int = 0
    carried: bool = False

    @property
    def longest(self) -> int:
        """Most tokens of a prompt and its answer together."""
        return int((self.prompt + self.output).max())


def drawn(
    count: int, *, rate: float | None, prompt: str, output: str, seed: int, concurrency: int = 0, shared: int = 0
) -> Requests:
    """Requests of a Poisson process.

    Args:
        count: how many.
        rate: of a second; None sends all at once.
        prompt: tokens of each, ``1000``, or ``500..1500`` for all between equally often.
        output: likewise of answers.
        seed: of all that is drawn.
        concurrency: see :class:`Requests`.
        shared: likewise.

    Raises:
        InputError: a length cannot be read.
    """
    random = np.random.default_rng(seed)
    arrival = np.zeros(count) if rate is None else np.cumsum(random.exponential(1 / rate, count))
    lengths = [_lengths(text, count, field, random) for field, text in (("--prompt", prompt), ("--output", output))]
    return Requests(
        arrival=arrival, prompt=lengths[0], output=lengths[1], concurrency=concurrency,
        shared=min(shared, int(lengths[0].min())),
    )  # fmt: skip


def _lengths(text: str, count: int, field: str, random: np.random.Generator) -> Ints:
    first, dots, last = text.partition("..")
    bounds = [part.strip() for part in (first, last if dots else first)]
    if not all(part.isdecimal() and 1 <= int(part) <= LONGEST for part in bounds) or int(bounds[0]) > int(bounds[1]):
        raise InputError(field, f"got {text!r}", f"write tokens as 1000 or 500..1500, at most {LONGEST}")
    return random.integers(int(bounds[0]), int(bounds[1]), count, dtype=np.int64, endpoint=True)


def read_requests(path: Path, *, concurrency: int = 0, shared: int = 0) -> Requests:
    """Requests of a CSV file with columns ``arrival``, ``prompt`` and ``output``, in any order of time.

    Raises:
        InputError: the file cannot be read, or a row holds no such numbers.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(path), f"cannot be read: {error}", "give a CSV file of requests") from None
    if not rows or len(rows) > MOST:
        raise InputError(str(path), f"holds {len(rows)} requests", f"write 1 to {MOST} below a line of names")
    missing = [name for name in COLUMNS if name not in rows[0]]
    if missing:
        raise InputError(f"{path}: {missing[0]}", "is no column", f"the first line names {', '.join(COLUMNS)}")
    numbers = np.array([[_number(path, line, name, row[name]) for name in COLUMNS] for line, row in enumerate(rows, 2)])
    numbers = numbers[np.argsort(numbers[:, 0], kind="stable")]
    prompt, output = numbers[:, 1].astype(np.int64), numbers[:, 2].astype(np.int64)
    return Requests(
        arrival=numbers[:, 0] - numbers[0, 0], prompt=prompt, output=output, concurrency=concurrency,
        shared=min(shared, int(prompt.min())),
    )  # fmt: skip


def _number(path: Path, line: int, name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    is_count = name != "arrival"
    if not math.isfinite(value) or value < is_count or (is_count and (value > LONGEST or value % 1)):
        kind = f"a whole number from 1 to {LONGEST}" if is_count else "seconds from 0"
        raise InputError(f"{path}: line {line}: {name}", f"got {text!r}", f"write {kind}")
    return value
