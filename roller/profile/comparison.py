"""Predictions against measurements: kernels of a harvest or of profiled bundles, and the numbers of their board."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct

from codegen.bundle.reader import find_bundles, read_bundle
from hal.catalog import load_device
from hal.spec.file import device_from_text
from hal.spec.numbers import leaves
from hal.support.errors import InputError
from roller.profile.harvested import HARVEST, HARVEST_FORMAT, kernel_kind

#: A prediction further off than this share is to be explained or mended.
FAR_OFF = 0.15

#: A measured number of a board that is further than this share from its device file's is worth a look.
FAR_NUMBER = 0.05

#: Kernels that have to agree before their stage is held responsible.
ENOUGH_KERNELS = 3

#: Stage that sets a kernel's pace -> the numbers of a device file that its time follows from.
NUMBERS_OF_STAGE = {
    "compute": "sustained_flops of throughput and matrix_instructions",
    "issue": "clocks.sustained_hz",
    "shared": "clocks.boost_hz",
    "l2": "layers.l2.bandwidth_bytes_per_second",
    "dram": "layers.dram.bandwidth_bytes_per_second",
    "latency": "latency_seconds of layers",
    "block_launch": "block_launch_seconds",
    "launch": "launch_overhead_seconds",
}


@dataclass(frozen=True, kw_only=True)
class ComparedKernel:
    """A kernel that was timed.

    Attributes:
        operator: name of its operator; ``op`` the kind of operator, empty where a bundle does not say.
        kind: what it multiplies by and how operands reach it (:func:`roller.profile.harvested.kernel_kind`).
        bound: stage that sets its predicted time; empty in harvests of before.
        rank: as predicted, 1 is the best.
        predicted, measured: seconds.
    """

    operator: str
    op: str
    kind: str
    bound: str
    rank: int
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted by measured."""
        return self.predicted / self.measured


@dataclass(frozen=True, kw_only=True)
class GroupErrors:
    """Errors of the predictions of some kernels.

    Attributes:
        operators, kernels: counts.
        mean_error: mean of \\|predicted - measured\\| / measured.
        median_ratio: median of predicted / measured.
        first_is_best: share of operators whose rank 1 comes within 5 % of their fastest kernel; None where no rank 1
            was timed.
    """

    name: str
    operators: int
    kernels: int
    mean_error: float
    median_ratio: float
    first_is_best: float | None


@dataclass(frozen=True)
class BoardNumber:
    """A number of the board as measured and as its device file has it; ``path`` leads to it in the file."""

    path: str
    measured: float
    known: float


@dataclass(frozen=True)
class Comparison:
    """Timed kernels of a board, and those of its numbers that were measured.

    Attributes:
        board: name of the device that the kernels were predicted for.
        is_dry: the times come from a dry run and mean nothing.
    """

    board: str
    kernels: tuple[ComparedKernel, ...]
    numbers: tuple[BoardNumber, ...] = ()
    is_dry: bool = False


def read_comparison(path: Path) -> Comparison:
    """The comparison that a harvest's folder or ``results.json`` holds, or a folder of bundles that were profiled.

    Raises:
        InputError: neither is there, it is damaged, or nothing in it was timed.
    """
    results = path / HARVEST if path.is_dir() else path
    comparison = read_harvest(results) if results.is_file() else _of_bundles(path)
    if not comparison.kernels:
        raise InputError(str(path), "holds no kernel that was timed", "run roller profile or the harvest on a GPU")
    return comparison


class _Median(Struct):
    median: float


class _Kernel(Struct):
    rank: int
    predicted_seconds: float
    kind: str = ""
    bound: str = ""
    cold: _Median | None = None


class _Profile(Struct):
    key: str
    op: str
    device: str
    kernels: list[_Kernel]


class _Microbench(Struct):
    figures: dict[str, Any]


class _Harvest(Struct):
    format: int
    profile: list[_Profile]
    microbench: list[_Microbench] = []
    dry_run: bool = False


def read_harvest(path: Path) -> Comparison:
    """The comparison that a harvest's ``results.json`` holds, be it empty.

    Raises:
        InputError: it cannot be read, is damaged or of another format.
    """
    try:
        harvest = msgspec.json.decode(path.read_bytes(), type=_Harvest)
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read", "name the folder of a harvest") from None
    except msgspec.DecodeError as error:
        raise InputError(str(path), str(error), "harvest again with this version") from None
    if harvest.format != HARVEST_FORMAT:
        raise InputError(f"{path}: format", f"is {harvest.format}, not {HARVEST_FORMAT}", "harvest again")
    kernels = tuple(
        ComparedKernel(
            operator=profile.key, op=profile.op, kind=kernel.kind or "unknown", bound=kernel.bound, rank=kernel.rank,
            predicted=kernel.predicted_seconds, measured=kernel.cold.median,
        )
        for profile in harvest.profile
        for kernel in profile.kernels
        if kernel.cold is not None and kernel.cold.median > 0
    )  # fmt: skip
    board = harvest.profile[0].device if harvest.profile else ""
    texts = [text for each in harvest.microbench if isinstance(text := each.figures.get("device"), str)]
    numbers = tuple(_numbers(texts[-1], board, f"{path}: microbench")) if texts and board else ()
    return Comparison(board, kernels, numbers, harvest.dry_run)


def _numbers(text: str, board: str, shown: str) -> Iterator[BoardNumber]:
    known = dict(leaves(load_device(board)))
    for path, value in leaves(device_from_text(text.encode(), f"{shown}.toml")):
        if known.get(path) and path != "compute_capability" and not path.endswith(".shape"):
            yield BoardNumber(path, value, known[path])


def _of_bundles(directory: Path) -> Comparison:
    bundles = [read_bundle(folder, runs_opencl=True) for folder in find_bundles(directory)]
    kernels = tuple(
        ComparedKernel(
            operator=bundle.manifest.name, op="", bound=kernel.bound,
            kind=kernel_kind(bundle.directory, kernel.schedule, kernel.policy if kernel.launches else ""),
            rank=kernel.profile.predicted_rank if kernel.profile else kernel.rank,
            predicted=kernel.seconds, measured=kernel.profiled_seconds,
        )
        for bundle in bundles
        for kernel in bundle.kernels
        if kernel.profiled_seconds
    )  # fmt: skip
    return Comparison(bundles[0].manifest.device, kernels)


def group_errors(kernels: Sequence[ComparedKernel], group: Callable[[ComparedKernel], str]) -> list[GroupErrors]:
    """Errors by group, in the order of their names, then of all kernels together."""
    names = sorted({group(kernel) for kernel in kernels})
    parts = [(name, [kernel for kernel in kernels if group(kernel) == name]) for name in names]
    return [_errors(name, part) for name, part in (*parts, ("all", kernels)) if part]


def _errors(name: str, kernels: Sequence[ComparedKernel]) -> GroupErrors:
    by_operator: dict[str, dict[int, float]] = {}
    for kernel in kernels:
        by_operator.setdefault(kernel.operator, {})[kernel.rank] = kernel.measured
    leads = [times[1] <= 1.05 * min(times.values()) for times in by_operator.values() if 1 in times]
    return GroupErrors(
        name=name,
        operators=len(by_operator),
        kernels=len(kernels),
        mean_error=sum(abs(kernel.ratio - 1) for kernel in kernels) / len(kernels),
        median_ratio=median(kernel.ratio for kernel in kernels),
        first_is_best=sum(leads) / len(leads) if leads else None,
    )


def far_off(kernels: Sequence[ComparedKernel]) -> list[ComparedKernel]:
    """Every first kernel of an operator whose prediction is more than :data:`FAR_OFF` off, the worst first."""
    far = [kernel for kernel in kernels if kernel.rank == 1 and abs(kernel.ratio - 1) > FAR_OFF]
    return sorted(far, key=lambda kernel: abs(math.log(kernel.ratio)), reverse=True)


def remedies(comparison: Comparison) -> Iterator[str]:
    """Lines on what to mend, the numbers of the board first: the others follow from them."""
    for number in comparison.numbers:
        if abs(number.measured / number.known - 1) > FAR_NUMBER:
            yield f"{number.path}: measured {number.measured:.4g}, the device file has {number.known:.4g}"
    *stages, _ = group_errors(comparison.kernels, lambda kernel: kernel.bound)
    for stage in stages:
        numbers = NUMBERS_OF_STAGE.get(stage.name)
        if numbers and stage.kernels >= ENOUGH_KERNELS and abs(stage.median_ratio - 1) > FAR_OFF:
            word = "fast" if stage.median_ratio < 1 else "slow"
            yield (
                f"{stage.kernels} kernels bound by {stage.name} are predicted too {word}, {stage.median_ratio:.2f} of "
                f"measured: look at {numbers} of its device file"
            )
