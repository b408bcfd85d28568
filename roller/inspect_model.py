"""What RATIONAL assumed about a kernel's instructions and banks, beside what its disassembly shows.

Assumed figures come from the functions of the model; nothing is estimated again in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from codegen.disassembly import HotLoop
from hal import DeviceSpec
from roller.anatomy import Anatomy, anatomy, one
from sokoban import KernelForm, TileSchedule, stages
from sokoban.banks import busiest_bank, lane_words
from sokoban.expression import Load
from sokoban.matrix import MMA, swizzle_of

#: Bytes of a row of the matrices that ``ldmatrix`` reads, and their rows.
_MATRIX_ROW_BYTES, _MATRIX_ROWS = 16, 8


@dataclass(frozen=True)
class Density:
    """Instructions of a thread per arithmetic instruction, over a step of the reduction (thesis 5.5.2).

    Attributes:
        shared_loads, others: reads of operands from shared memory; all but these and the arithmetic: fetch, addresses,
            loop control.
    """

    shared_loads: float
    others: float

    @property
    def total(self) -> float:
        """All instructions per arithmetic one; 1 is best."""
        return 1.0 + self.shared_loads + self.others


@dataclass(frozen=True)
class BankUse:
    """Reads of one staged operand by a warp, counted from the addresses of its lanes.

    Attributes:
        tensor: the operand's.
        bytes: what a lane reads at once.
        passes: through the banks, per read.
        least: passes if no two words of a bank met.
    """

    tensor: str
    bytes: int
    passes: float
    least: int

    @property
    def conflicts(self) -> float:
        """Passes too many, per read."""
        return max(0.0, self.passes - self.least)


@dataclass(frozen=True)
class ModelView:
    """A kernel as the model saw it.

    Attributes:
        assumed, found: the density; None where ``reason`` says why there is none.
        banks: operands in shared memory.
    """

    assumed: Density | None
    found: Density | None
    reason: str
    banks: tuple[BankUse, ...]


def model_view(form: KernelForm, device: DeviceSpec, schedule: TileSchedule, hot: HotLoop) -> ModelView:
    """Compare a schedule with the hottest loop of the kernel that was made of it."""
    taken = anatomy(form, device, schedule)
    banks = tuple(
        _fragment_use(taken, load, schedule) if _is_matrix(taken) else _bank_use(taken, load)
        for load in form.body_loads
        if one(taken.table.cached[load.tensor]) and (load in taken.reads or _is_matrix(taken))
    )
    if _is_matrix(taken):
        return ModelView(None, None, "RATIONAL counts no issue slots of kernels with matrix instructions", banks)
    if form.kind != "tile" or form.reduction is None:
        return ModelView(None, None, "RATIONAL assumes a density for reductions of tiles alone", banks)
    found = _found(taken, hot)
    if found is None:
        return ModelView(None, None, "there is no arithmetic in the hottest loop", banks)
    return ModelView(_assumed(taken), found, "", banks)


def _is_matrix(taken: Anatomy) -> bool:
    return bool(one(taken.table.warp_tile))


def _assumed(taken: Anatomy) -> Density:
    """The issue stage turned back into instructions of a thread per step."""
    per_instruction = one(stages.busiest_scheduler(taken.launch, taken.device)) / taken.device.clocks.boost_hz
    issued = taken.step_busy["issue"] / per_instruction
    reads = sum(one(part.instructions) for load, part in taken.reads.items() if one(taken.table.cached[load.tensor]))
    return Density(reads / taken.arithmetic, (issued - taken.arithmetic - reads) / taken.arithmetic)


def _found(taken: Anatomy, hot: HotLoop) -> Density | None:
    """What a step really issues.

    The text tells no trip counts, but the schedule tells the arithmetic of a step, and so how often the loop turns in
    it. Where the loop is a part of a step, whatever the loop around it does comes on top.
    """
    arithmetic = hot.mix.count("multiply-adds", "arithmetic")
    if not arithmetic:
        return None
    turns = taken.arithmetic / arithmetic
    around = 0 if _holds_step(hot) else len(hot.around)
    loads = hot.mix.count("shared loads") * turns
    issued = hot.mix.total * turns + around
    return Density(loads / taken.arithmetic, (issued - loads) / taken.arithmetic - 1.0)


def _holds_step(hot: HotLoop) -> bool:
    """Whether the loop fetches, and so is the loop over the steps."""
    return bool(hot.mix.count("barriers", "async copies", "stores", "global loads"))


def _bank_use(taken: Anatomy, load: Load) -> BankUse:
    """Reads of a thread's operands, all lanes of a warp together."""
    device, table = taken.device, taken.table
    banks, bank_bytes = _banks(device)
    element_bytes = taken.form.expr.tensor_by_name[load.tensor].element_bytes
    reads = taken.reads[load]
    read_bytes = int(one(reads.width)) * element_bytes
    words = min(max(read_bytes // bank_bytes, 1), banks)
    pieces = len(np.unique(lane_words(table, load, device)[0] // words))
    passes_per_read = one(reads.passes) / max(one(reads.instructions), 1e-12)
    return BankUse(load.tensor, read_bytes, passes_per_read, -(-pieces * words // banks))


def _fragment_use(taken: Anatomy, load: Load, schedule: TileSchedule) -> BankUse:
    """Reads of one 8x8 matrix: eight rows of 16 bytes, a stored row apart; one pass where they meet in no bank."""
    table = taken.table
    banks, bank_bytes = _banks(taken.device)
    element_bytes = taken.form.expr.tensor_by_name[load.tensor].element_bytes
    row_bytes = (int(one(table.extents(load)[-1])) + int(one(table.padding[load.tensor]))) * element_bytes
    rows = np.arange(_MATRIX_ROWS, dtype=np.int64)
    pieces = rows * row_bytes // _MATRIX_ROW_BYTES
    if schedule.instruction == MMA:
        divisor, count = swizzle_of(row_bytes // _MATRIX_ROW_BYTES)
        pieces = pieces + rows // divisor % count
    passes = busiest_bank(pieces[None, :], max(1, banks * bank_bytes // _MATRIX_ROW_BYTES))
    return BankUse(load.tensor, _MATRIX_ROW_BYTES, one(passes), 1)


def _banks(device: DeviceSpec) -> tuple[int, int]:
    """Banks of shared memory and the bytes of one."""
    return device.shared.bank_count or 32, device.shared.bank_width_bytes or 4


def density_record(density: Density | None) -> Mapping[str, float] | None:
    """A density for JSON."""
    if density is None:
        return None
    parts = {"shared_loads": density.shared_loads, "others": density.others, "total": density.total}
    return {name: round(value, 4) for name, value in parts.items()}
