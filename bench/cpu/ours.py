"""Our kernels, as the comparison takes them: from a folder of bundles, one per operator of the suite.

``roller compile bench/cpu/cpu24.json --device cpu --out DIR`` makes them, and ``roller profile DIR`` finds the fastest
of the ten that are predicted to be. With ``--top-k 50`` there are more, by which the first choice is judged.

Another adapter is a function of the same type, named with ``--ours module:function``; the keys of its facts are those
of `bench.cpu.results.Facts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bench.cpu.rivals import Array, Call, Operator, Prepared, Unable
from hal.support.errors import InputError

if TYPE_CHECKING:
    from codegen.bundle.records import Bundle, KernelRecord

#: Kernels, by predicted rank, of which the fastest measured one competes; others are there to judge the first choice.
PROFILED = 10

#: RATIONAL's first choice is compared with the best of so many of its best, by measurement.
FIRST_OF = 50


def from_bundle(operator: Operator) -> Prepared:
    """The kernel that a bundle puts first: the fastest measured one, or without a profile the one predicted to be it.

    Raises:
        Unable: there is no bundle of that name.
        InputError: it is damaged, or its kernels do not run here.
    """
    folder = Path(operator.options["bundles"]) / str(operator.spec["name"])
    if not folder.is_dir():
        raise Unable("no bundle: roller compile bench/cpu/cpu24.json --device cpu")
    from codegen.bundle.reader import read_bundle
    from codegen.runtime.cpu import CpuOperator

    bundle = read_bundle(folder)
    kernel = CpuOperator(bundle, competitor(bundle))
    facts = {
        "predicted_seconds": kernel.kernel.seconds,
        "first_choice": first_choice(bundle),
        "detail": f"rank {kernel.kernel.predicted_rank}",
    }
    out = np.full(kernel.output.shape, np.nan, np.float32)

    def bind(inputs: Mapping[str, Array]) -> Call:
        return kernel.bound(*(inputs[argument.name] for argument in kernel.inputs), out=out)

    return Prepared(bind, facts)


def competitor(bundle: Bundle) -> KernelRecord:
    """The fastest measured kernel of those that would have been profiled; without a profile the one predicted to be it.

    Raises:
        Unable: all of them were struck out.
    """
    kernels = [kernel for kernel in bundle.kernels if kernel.predicted_rank <= PROFILED and not kernel.struck_out]
    if not kernels:
        raise Unable("all its kernels were struck out by roller profile")
    measured = [kernel for kernel in kernels if kernel.profiled_seconds is not None]
    if measured:
        return min(measured, key=lambda kernel: kernel.profiled_seconds or 0.0)
    return min(kernels, key=lambda kernel: kernel.predicted_rank)


def first_choice(bundle: Bundle) -> float | None:
    """Measured time of the kernel predicted to be best over that of the best; None where it has no profile."""
    measured = {
        kernel.predicted_rank: kernel.profiled_seconds
        for kernel in bundle.kernels
        if kernel.profiled_seconds is not None and kernel.predicted_rank <= FIRST_OF
    }
    return measured[1] / min(measured.values()) if 1 in measured else None


def check_bundles(folder: Path | None) -> None:
    """Raises InputError where the folder that the command line names is none."""
    if folder is not None and not folder.is_dir():
        raise InputError("--bundles", f"there is no directory {folder}", "compile the suite into it first")
