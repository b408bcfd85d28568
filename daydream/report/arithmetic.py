"""FLOPs and bytes of recorded kernels, and the peak that each is compared with.

FLOPs are those of the operators' definitions, a multiply-add being two, as :mod:`daydream.operators` reads them from
the recorded sizes. A kernel that saves some of them (Winograd, FFT) may exceed the peak; TBD counted instructions.
Bytes are those that an operator cannot avoid: every tensor read or written once. What a cache holds back, as of tensors
that the kernel before has just written, may exceed the rate of memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from daydream.graph.graph import TaskGraph, TaskKind
from daydream.operators.families import algorithm_of
from daydream.operators.pricing import CallPrice, describe_calls, device_of, is_auxiliary
from daydream.operators.work import Work
from daydream.trace.trace import NONE, Flags, Floats, Ints
from hal.support.errors import InputError

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: Work whose FLOPs are the model's: what PyTorch's ``FlopCounterMode`` counts, too.
MODEL_WORK = ("convolution", "matrix product", "attention")


class Rate(NamedTuple):
    """Element type and unit, and the FLOP/s of the data sheet: boost clock, dense operands."""

    name: str
    flops_per_second: float


class PeakShare(NamedTuple):
    """A peak, and the share of all FLOPs that were compared with it."""

    rate: Rate
    share: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Arithmetic:
    """FLOPs and bytes of every task of a graph, one entry per task in each column.

    Attributes:
        flops: that the task executes; 0 where that is unknown.
        bytes: that it reads and writes at least; 0 where that is unknown. A copy's are what the trace says.
        peak_us: what they would take at peak.
        known: whether its FLOPs are known.
        of_model: whether it belongs to a convolution, a matrix product or attention.
        peak: which of `rates` they are compared with, -1 where unknown.
        rates: the peaks.
        bandwidth: bytes/s of the board's memory under load; NaN without a board.
        board: title of the board whose peaks they are; empty where no FLOPs are known.
        note: which board it stands in for, or why no FLOPs are known; may be empty.
    """

    flops: Floats
    bytes: Floats
    peak_us: Floats
    known: Flags
    of_model: Flags
    peak: Ints
    rates: tuple[Rate, ...] = ()
    bandwidth: float = math.nan
    board: str = ""
    note: str = ""

    def peaks(self, rows: Ints) -> tuple[PeakShare, ...]:
        """The peaks of these tasks, that with most FLOPs first."""
        rows = rows[self.known[rows]]
        flops = np.bincount(self.peak[rows], self.flops[rows], len(self.rates)).tolist()
        whole = sum(flops) or 1.0
        shares = [PeakShare(rate, amount / whole) for rate, amount in zip(self.rates, flops, strict=True) if amount]
        return tuple(sorted(shares, key=lambda each: -each.share))


def kernels_of(graph: TaskGraph) -> Ints:
    """Tasks that keep a GPU's cores busy: kernels, those of collectives included; neither copies nor sets."""
    return np.flatnonzero(graph.on_gpu & np.isin(graph.kind, (TaskKind.KERNEL, TaskKind.COMMUNICATION)))


def arithmetic_of(graph: TaskGraph, kernels: Ints, device: str = "auto") -> Arithmetic:
    """The FLOPs and bytes of these kernels, compared with the peaks of a board.

    The FLOPs and bytes of a call are spread over its kernels by their durations, those left out that serve another one
    of the call (:func:`daydream.operators.pricing.is_auxiliary`).

    Args:
        graph: with the trace it was built from.
        kernels: rows of it.
        device: the board's name, ``auto`` for the one that the trace was recorded on. Without one that is known
            there are no FLOPs, and the note says why.

    Raises:
        InputError: there is no board of that name.
    """
    board, note = _board(graph, device)
    nothing = np.zeros(len(graph))
    work = Arithmetic(
        flops=nothing,
        bytes=np.where(np.isin(graph.kind, (TaskKind.MEMCPY, TaskKind.MEMSET)), np.nan_to_num(graph.bytes), 0.0),
        peak_us=nothing.copy(),
        known=nothing > 0,
        of_model=nothing > 0,
        peak=np.full(len(graph), NONE),
        bandwidth=math.nan if board is None else board.dram.bandwidth_bytes_per_second,
        note=note,
    )
    return work if board is None else _filled(work, graph, kernels, board)


def _filled(work: Arithmetic, graph: TaskGraph, kernels: Ints, board: DeviceSpec) -> Arithmetic:
    """The columns with what is known of each kernel written into them."""
    serves = np.array([is_auxiliary(name) for name in graph.names] or [False], np.bool_)[graph.name]
    place_of: dict[Rate, int] = {}
    unknown_us: dict[str, float] = {}
    for call in describe_calls(graph, kernels, board).calls:
        rate = _peak_of(call, graph, board)
        if call.work is None or isinstance(rate, str):
            unknown_us[str(rate)] = unknown_us.get(str(rate), 0.0) + call.recorded_us
            continue
        working = call.rows[~serves[call.rows]]
        working = working if len(working) else call.rows
        durations = graph.duration_us[working]
        whole = float(durations.sum())
        parts = durations / whole if whole > 0 else np.full(len(working), 1 / len(working))
        work.flops[working], work.bytes[working] = call.work.flops * parts, call.work.bytes * parts
        work.peak_us[working] = work.flops[working] / rate.flops_per_second * 1e6
        work.known[call.rows] = True
        work.of_model[call.rows] = call.work.kind in MODEL_WORK
        work.peak[call.rows] = place_of.setdefault(rate, len(place_of))
    if place_of:
        return replace(work, rates=tuple(place_of), board=board.title, bandwidth=board.dram.bandwidth_bytes_per_second)
    return replace(work, note=max(unknown_us, key=unknown_us.__getitem__, default="no kernel ran on a GPU"))


def _peak_of(call: CallPrice, graph: TaskGraph, board: DeviceSpec) -> Rate | str:
    """The peak that a call's work is compared with, or why there is none."""
    if call.work is None:
        return call.reason
    rate = peak_of(board, call.work, [graph.text(row) for row in call.rows.tolist()])
    return f"{board.title} has no arithmetic rate for {call.work.dtype}" if rate is None else rate


def _board(graph: TaskGraph, device: str) -> tuple[DeviceSpec | None, str]:
    """The board, and which one it stands in for; or None, and why it is not known."""
    try:
        return device_of(graph, device)
    except InputError as error:
        if device and device != "auto":
            raise
        return None, f"{error.problem}; name a board with --device"


def peak_of(device: DeviceSpec, work: Work, kernels: Sequence[str]) -> Rate | None:
    """The peak that this work is compared with; None where the board has none for its type.

    Products in 16 bits have that of matrix units wherever the board has them, those in float32 where the names of
    their kernels tell that operands were rounded to TF32, or where the units take float32 as it is (AMD's do). All
    other arithmetic in 16 bits is done in float32.
    """
    dtype = work.dtype
    if work.kind in MODEL_WORK:
        is_tf32 = algorithm_of(kernels) == "TF32" or any(part.variant == "tfloat32" for part in work.parts)
        matrix_dtype = "tfloat32" if dtype == "float32" and is_tf32 else dtype
        instruction = device.best_matrix_instruction(matrix_dtype)
        if instruction is not None:
            units = "Matrix" if instruction.is_by_wavefronts else "Tensor"
            return Rate(f"{matrix_dtype} on {units} Cores", instruction.peak_flops)
    if dtype in ("float16", "bfloat16"):
        dtype = "float32"
    return Rate(dtype, device.peak_flops(dtype)) if dtype in device.dtypes else None
