"""How many of timm's networks are captured, and why the others are not.

``python -m bench.daydream.capture_timm`` captures a step of every name that the installed timm knows, two images each,
with autocast to float16, and prints the failures with their reason.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from hal.support.errors import InputError


class Outcome(NamedTuple):
    """One network: its name, how many operators its step has, and what went wrong, empty if nothing."""

    name: str
    operators: int
    failure: str


def attempt(mode: str, name: str) -> Outcome:
    """Captures one network's step."""
    import torch

    from daydream.capture.sources import CaptureOptions, captured

    torch.set_num_threads(1)
    try:
        capture = captured(f"timm:{name}", CaptureOptions(batch=2, mode=mode, dtype="amp"))
    except InputError as error:
        return Outcome(name, 0, str(error))
    except Exception as error:
        return Outcome(name, 0, f"not told in one line: {type(error).__name__}: {error}"[:300])
    return Outcome(name, len(capture.operators), "")


def attempts(names: Sequence[str], mode: str, workers: int) -> Iterator[Outcome]:
    """Outcomes in the order in which they come, from so many processes."""
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=100) as pool:
        yield from pool.imap_unordered(partial(attempt, mode), names)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints progress to stderr, failures and their number to stdout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("training", "inference"), default="training")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="of so many names in a row only the first")
    parser.add_argument("names", nargs="*", help="networks; all if none is given")
    options = parser.parse_args(arguments)
    from daydream.capture.models.torchvision_operators import import_torchvision

    import_torchvision()
    import timm

    names = options.names or timm.list_models()[:: options.every]
    failures = []
    for count, outcome in enumerate(attempts(names, options.mode, options.workers), 1):
        if outcome.failure:
            failures.append(outcome)
        if count % 50 == 0 or count == len(names):
            print(f"{count} of {len(names)}, {len(failures)} failed", file=sys.stderr, flush=True)
    for outcome in sorted(failures):
        print(f"{outcome.name}: {outcome.failure}")
    share = 1 - len(failures) / len(names)
    print(f"{options.mode}: {len(names) - len(failures)} of {len(names)} networks captured, {share:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
