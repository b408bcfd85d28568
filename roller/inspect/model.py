"""RATIONAL's assumptions of a kernel's instructions and banks, next to its disassembly.

Assumed figures come from the functions of the model; nothing is estimated again in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from codegen.gpu.matrix.operands import OperandTile
from hal.spec.device import DeviceSpec
from roller.inspect.disassembly import HotLoop
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.matrix import FRAGMENT, swizzle_of
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import Load
from sokoban.model.gpu.anatomy import GpuAnatomy, gpu_anatomy
from sokoban.model.gpu.banks import busiest_bank, cycles_of_request, lane_words, read_parts
from sokoban.model.gpu.issue import ARITHMETIC
from sokoban.model.gpu.step import busiest_scheduler
from sokoban.schedule.table import one
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import PANEL_BYTES

#: Bytes of a row of the matrices that ``ldmatrix`` reads, and their rows.
_MATRIX_ROW_BYTES, _MATRIX_ROWS = 16, 8


@dataclass(frozen=True)
class Density:
    """Instructions of a thread per arithmetic instruction, over a step of the reduction (thesis 5.5.2); with
    ``mma.sync`` per 16x8 product.

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
    taken = gpu_anatomy(PlacedForm(form, device), schedule)
    banks = tuple(
        _fragment_use(taken, load, schedule) if _is_matrix(taken) else _bank_use(taken, load)
        for load in form.body_loads
        if one(taken.table.cached[load.tensor]) and (load in taken.step.reads or _is_matrix(taken))
    )
    if _is_matrix(taken) and not schedule.instruction.is_mma:
        return ModelView(None, None, f"RATIONAL tells no density of kernels with {schedule.instruction}", banks)
    if not form.is_tile or form.reduction is None:
        return ModelView(None, None, "RATIONAL assumes a density for reductions of tiles alone", banks)
    counted = _counted(taken, hot)
    if counted is None:
        return ModelView(None, None, "there is no arithmetic in the hottest loop", banks)
    return ModelView(_matrix_assumed(taken) if _is_matrix(taken) else _assumed(taken), counted, "", banks)


def _is_matrix(taken: GpuAnatomy) -> bool:
    return bool(one(taken.table.warp_tile))


def _issued(taken: GpuAnatomy) -> float:
    """The issue stage turned back into instructions of a thread per step."""
    per_instruction = one(busiest_scheduler(taken.step)) / taken.device.clocks.boost_hz
    return taken.step_busy["issue"] / per_instruction


def _products(taken: GpuAnatomy) -> float:
    """16x8 products of a warp per step."""
    roles = taken.form.roles
    assert roles is not None
    return one(taken.table.accumulators) / (FRAGMENT * FRAGMENT // 2) * one(taken.table.step_points) / roles.depth


def _matrix_assumed(taken: GpuAnatomy) -> Density:
    """Instructions that the model counts for products by ``mma.sync``; their reads are those of fragments."""
    roles, table, products = taken.form.roles, taken.table, _products(taken)
    assert roles is not None
    fragments = {load: one(elements) / FRAGMENT for load, elements in table.operand_elements.items()}
    reads = sum(count * roles.fragment_loads(load) for load, count in fragments.items())
    reads *= one(table.step_points) / roles.depth
    return Density(reads / products, (_issued(taken) - products - reads) / products)


def _assumed(taken: GpuAnatomy) -> Density:
    """Instructions that the model counts for multiply-adds."""
    arithmetic = taken.instructions[ARITHMETIC]
    cached, operands = taken.table.cached, taken.step.reads
    reads = sum(one(part.instructions) for load, part in operands.items() if one(cached[load.tensor]))
    return Density(reads / arithmetic, (_issued(taken) - arithmetic - reads) / arithmetic)


def _counted(taken: GpuAnatomy, hot: HotLoop) -> Density | None:
    """Instructions that a step really issues.

    The text tells no trip counts, but the schedule tells the arithmetic of a step, and so how often the loop turns in
    it. Where the loop is a part of a step, whatever the loop around it does comes on top.
    """
    step_arithmetic, arithmetic = taken.instructions[ARITHMETIC], float(hot.mix.count("multiply-adds", "arithmetic"))
    if _is_matrix(taken):
        # Eight-bit floats that are widened take two instructions a product.
        step_arithmetic, arithmetic = _products(taken), hot.mix.matrix / (2 if taken.step.placed.is_widened else 1)
    if not arithmetic:
        return None
    turns = step_arithmetic / arithmetic
    around = 0 if _holds_step(hot) else len(hot.around)
    loads = hot.mix.count("shared loads") * turns
    issued = hot.mix.total * turns + around
    return Density(loads / step_arithmetic, (issued - loads) / step_arithmetic - 1.0)


def _holds_step(hot: HotLoop) -> bool:
    """True if the loop fetches, and so is the loop over the steps."""
    return bool(hot.mix.count("barriers", "async copies", "stores", "global loads"))


def _bank_use(taken: GpuAnatomy, load: Load) -> BankUse:
    """Reads of a thread's operands, all lanes of a warp together."""
    device, table = taken.device, taken.table
    banks, bank_bytes = _banks(device)
    element_bytes = taken.form.expr.tensor_by_name[load.tensor].element_bytes
    reads = taken.step.reads[load]
    read_bytes = int(one(reads.width)) * element_bytes
    words = min(max(read_bytes // bank_bytes, 1), banks)
    lanes = lane_words(table, load, device)
    pieces = len(np.unique(lanes[0] // words))
    passes_per_read = one(reads.passes) / max(one(reads.instructions), 1e-12)
    least = max(one(read_parts(lanes, words)), cycles_of_request(device))
    return BankUse(load.tensor, read_bytes, passes_per_read, max(-(-pieces * words // banks), int(least)))


def _fragment_use(taken: GpuAnatomy, load: Load, schedule: TileSchedule) -> BankUse:
    """Reads of one 8x8 matrix: eight rows of 16 bytes, or the 32 words that ``mma.sync`` reads where those cannot be
    turned; one pass where they meet in no bank. Warp groups read their operands in the same pieces."""
    table = taken.table
    banks, bank_bytes = _banks(taken.device)
    element_bytes = taken.form.expr.tensor_by_name[load.tensor].element_bytes
    columns = int(one(table.extents(load)[-1])) + int(one(table.padding[load.tensor]))
    if schedule.instruction.is_mma:
        return _addressed_use(taken, load, columns)
    row_bytes = PANEL_BYTES if schedule.instruction == Instruction.WGMMA else columns * element_bytes
    rows = np.arange(_MATRIX_ROWS, dtype=np.int64)
    pieces = rows * row_bytes // _MATRIX_ROW_BYTES
    if schedule.instruction == Instruction.WGMMA:
        divisor, count = swizzle_of(row_bytes // _MATRIX_ROW_BYTES)
        pieces = pieces + rows // divisor % count
    passes = busiest_bank(pieces[None, :], max(1, banks * bank_bytes // _MATRIX_ROW_BYTES))
    return BankUse(load.tensor, _MATRIX_ROW_BYTES, one(passes), 1)


def _addressed_use(taken: GpuAnatomy, load: Load, columns: int) -> BankUse:
    """Reads of a fragment in a tile of rows of ``columns`` elements, by the addresses as they are generated."""
    roles, (banks, bank_bytes) = taken.form.roles, _banks(taken.device)
    assert roles is not None
    element_bytes = taken.form.expr.tensor_by_name[load.tensor].element_bytes
    tile = OperandTile.of(roles, load, columns, element_bytes, start=0)
    _, places = tile.fragment(0, np.arange(taken.device.warp_lanes), 0, 0)
    words = np.asarray(places[0])[None, :] // bank_bytes
    if roles.fragment_loads(load) > 1:
        return BankUse(load.tensor, bank_bytes, one(busiest_bank(words, banks)), 1)
    words = words.reshape(-1, _MATRIX_ROWS, 1) + np.arange(_MATRIX_ROW_BYTES // bank_bytes)
    passes = busiest_bank(words.reshape(len(words), -1), banks)
    return BankUse(load.tensor, _MATRIX_ROW_BYTES, float(np.mean(passes)), 1)


def _banks(device: DeviceSpec) -> tuple[int, int]:
    """Banks of shared memory and the bytes of one."""
    return device.shared.bank_count or 32, device.shared.bank_width_bytes or 4


def density_record(density: Density | None) -> Mapping[str, float] | None:
    """A density for JSON."""
    if density is None:
        return None
    parts = {"shared_loads": density.shared_loads, "others": density.others, "total": density.total}
    return {name: round(value, 4) for name, value in parts.items()}
