"""``results.json`` as types; what a harvest wrote is checked here before anything is made of it."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

from msgspec import Struct

from bench.timed.files import read_file
from bench.timed.statistics import Check, Spread
from hal.support.errors import InputError
from roller.profile.harvested import HARVEST, HARVEST_FORMAT


class _Timed(Struct, frozen=True, kw_only=True):
    """Result of a run, checked and timed. Without ``cold`` and ``warm`` it was not timed, for the ``reason`` given.

    Attributes:
        cold, warm: after L2 was flushed; as one of several calls in a row.
        graph: whether it ran from a CUDA graph.
    """

    check: Check | None = None
    reason: str = ""
    cold: Spread | None = None
    warm: Spread | None = None
    graph: bool | None = None


class Candidate(_Timed, frozen=True, kw_only=True):
    """One who computed an operator; ``who`` is ``library``, ``compile``, ``triton`` or ``roller``."""

    name: str
    who: str
    precision: str
    detail: str = ""
    setup_seconds: float = 0.0


class KernelResult(_Timed, frozen=True, kw_only=True):
    """A kernel of a bundle, with the time predicted for it, what it multiplies by and the stage that sets its pace."""

    entry: str
    rank: int
    predicted_seconds: float
    kind: str = ""
    bound: str = ""


class _OfSuite(Struct, frozen=True, kw_only=True):
    """Known facts of an operator of a suite."""

    key: str
    suite: str
    operator: str
    op: str
    dtype: str
    flop: float
    bytes: float


class OperatorResult(_OfSuite, frozen=True, kw_only=True):
    """An operator by everyone who computes it."""

    bundle: str | None
    candidates: list[Candidate]


class ProfileResult(_OfSuite, frozen=True, kw_only=True):
    """The kernels of a bundle, fastest first."""

    device: str
    kernels: list[KernelResult]


class TrainingResult(Struct, frozen=True, kw_only=True):
    """Steps of a model; ``profiled`` those under the profiler, ``trace`` is ``ARCHIVE.tar/NAME.json.gz``."""

    key: str
    model: str
    batch: int
    variant: str
    definition: str
    parameters: int
    setup_seconds: float
    steps: Spread
    wall_seconds: float
    peak_bytes: int
    profiled: Spread | None = None
    trace: str | None = None
    trace_error: str = ""
    loss: float | None = None


class MicrobenchResult(Struct, frozen=True, kw_only=True):
    """Results of hal.microbench, as it gave them."""

    key: str
    figures: dict[str, Any]
    took_seconds: float


class SectionSummary(Struct, frozen=True, kw_only=True):
    """Progress of a section; ``until`` tells runs apart."""

    done: int
    failed: int
    left_out: int
    seconds: float
    until: float = 0.0


class LoggedCheck(Struct, frozen=True, kw_only=True):
    """A line of the correctness log."""

    where: str
    what: str
    passed: bool
    check: Check | None
    reason: str


class Failure(Struct, frozen=True, kw_only=True):
    """An item that gave nothing, and why."""

    section: str
    key: str
    error: str


class Results(Struct, frozen=True, kw_only=True):
    """``results.json``; docs/harvest.md describes it."""

    format: int
    dry_run: bool
    started: str
    environment: dict[str, Any]
    sections: dict[str, SectionSummary]
    microbench: list[MicrobenchResult]
    profile: list[ProfileResult]
    operators: list[OperatorResult]
    training: list[TrainingResult]
    correctness: list[LoggedCheck]
    samples: list[list[float | None]]
    errors: list[Failure]

    @property
    def board(self) -> str:
        """``NVIDIA H200``"""
        return str(self.environment.get("properties", {}).get("name", "unknown board"))


def read_results(directory: Path) -> Results:
    """The results of a harvest.

    Raises:
        InputError: there are none, or they are not of this format; names the key that is wrong.
    """
    made_by = "the directory that bench/gpu/harvest.py wrote with --out"
    return read_file(directory / HARVEST, Results, HARVEST_FORMAT, made_by, "harvest again with this version")


def extract_trace(directory: Path, trace: str, target: Path) -> Path:
    """The trace ``ARCHIVE.tar/NAME`` as a file in `target`.

    Raises:
        InputError: there is no such archive, or no such trace in it.
    """
    archive, _, name = trace.partition("/")
    try:
        with tarfile.open(directory / archive) as tar:
            member = tar.extractfile(name)
            if member is None:
                raise KeyError(name)
            data = member.read()
    except (OSError, KeyError, tarfile.TarError):
        raise InputError(str(directory / archive), f"has no trace {name!r}", "copy it next to results.json") from None
    path = target / Path(name).name
    path.write_bytes(data)
    return path
