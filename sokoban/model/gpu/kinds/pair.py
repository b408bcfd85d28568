"""RATIONAL for two products in a row: the steps of :mod:`sokoban.model.gpu.kinds.attention` without a softmax.

Fragments, bytes and what is done with every element are counted. How much of the shorter of products and element-wise
arithmetic other warps fill, and how long a step and a block wait, are the constants of attention's loop, which this one
shares; no constant was chosen on a pair of products.
"""

from __future__ import annotations

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES
from sokoban.kernel.instructions import (
    FUNCTION_INSTRUCTIONS,
    NEAR_INSTRUCTIONS,
    Instruction,
    value_instructions,
)
from sokoban.kernel.pair import ProductPair
from sokoban.language.expression import Load
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.issue import ASYNCHRONOUS_STEP_INSTRUCTIONS, MMA_COPY_INSTRUCTIONS, STEP_INSTRUCTIONS
from sokoban.model.gpu.kinds.attention import (
    BlockWork,
    Resources,
    Walks,
    estimate_blocks,
    fragment_bytes,
    loads_per_product,
)
from sokoban.schedule.attention import FRAGMENT_ROWS, padded
from sokoban.schedule.pair import PairSchedule, pair_shared_bytes

#: Registers of a thread besides those that are counted. 16 more than attention's, for tensors whose rows lie apart each
#: in its own way: with fewer, wide tiles of random pairs spilled (compiler reports for sm_80 and sm_90).
OTHER_REGISTERS = 64
#: Instructions by which two elements of H are rounded and packed, and those that put one into shared memory.
PACK_INSTRUCTIONS, STORE_INSTRUCTIONS = 1.0, 1.0


def estimate_pair(
    kernel: ProductPair, schedule: PairSchedule, device: DeviceSpec, registers: int | None = None
) -> Estimate:
    """The predicted time of a pair of products in one kernel; it takes infinite time where no block fits.

    ``registers`` of a thread are those of :func:`pair_registers` until the compiler has reported them.
    """
    registers = registers or pair_registers(kernel, schedule)
    resources = Resources(schedule.threads, registers, pair_shared_bytes(kernel, schedule))
    return estimate_blocks(_work(kernel, schedule), resources, device)


def pair_registers(kernel: ProductPair, schedule: PairSchedule) -> int:
    """Registers that a thread needs: sums of the result, elements of H, what these need of its columns, X if held."""
    depth, width = _widths(kernel, schedule)
    if schedule.instruction is Instruction.FMA:
        # Four elements of every row's X or H, and of four rows of B.
        factors = 4 * schedule.thread_rows + 16
        return schedule.thread_rows * (width + schedule.step) // schedule.lanes + factors + OTHER_REGISTERS
    fragments = schedule.rows // schedule.warps // FRAGMENT_ROWS
    # Fragments of X that are not held come while those before them are multiplied.
    x_registers = depth // 4 if schedule.held else 2 * 4
    # Elements of other tensors that are under way together, those of rows with addresses of their rows.
    gates = sum(_is_of_rows(kernel, load) for load in kernel.inner_loads)
    fetched = (len(kernel.inner_loads) - gates) * schedule.step // 4
    rows = width // 2 + schedule.step // 2 + x_registers + gates * (schedule.step // 2 + 4)
    return fragments * rows + fetched + OTHER_REGISTERS


def pair_walk(kernel: ProductPair, schedule: PairSchedule) -> Walks:
    """Steps of every block, and how many of them reach beyond H's columns."""
    steps = -(-kernel.middle_size // schedule.step)
    return Walks(float(steps), float(steps), float(kernel.middle_size % schedule.step != 0))


def element_instructions(kernel: ProductPair, schedule: PairSchedule) -> float:
    """Instructions of a thread for every element of H besides products: what the expression makes of it, the final
    statement's share, and what brings fragments."""
    is_scalar = schedule.instruction is Instruction.FMA
    rows = schedule.thread_rows if is_scalar else 2 * schedule.rows // schedule.warps // FRAGMENT_ROWS
    # A load and what widens the element, once for all rows of a thread where all need the same.
    read = sum(
        (1.0 + (kernel.dtype != "float32")) / (1 if _is_of_rows(kernel, load) else rows) for load in kernel.inner_loads
    )
    costs = FUNCTION_INSTRUCTIONS if is_scalar else NEAR_INSTRUCTIONS
    final = value_instructions(kernel.final.value, None, costs) + sum(
        1.0 + (kernel.dtype != "float32") for _ in kernel.final_loads
    )
    stores = STORE_INSTRUCTIONS if is_scalar else PACK_INSTRUCTIONS / 2
    element = (
        value_instructions(kernel.inner, None, costs) + read + stores + final * kernel.width_size / kernel.middle_size
    )
    return element + (0.0 if is_scalar else _fragment_instructions(kernel, schedule))


def _fragment_instructions(kernel: ProductPair, schedule: PairSchedule) -> float:
    """Instructions of a thread for every element of H that fetch what matrix instructions multiply: a warp's loads of
    16 by 16 elements, copies of 16 bytes, and what every step takes."""
    depth, width = _widths(kernel, schedule)
    fragments = schedule.rows // schedule.warps // FRAGMENT_ROWS
    loads = (depth + width) / (128 * fragments) + (0 if schedule.held else depth / (8 * schedule.step))
    copies = MMA_COPY_INSTRUCTIONS * (depth + width) / (8 * schedule.rows)
    waits = 2 if schedule.stages == 1 else 1
    step = STEP_INSTRUCTIONS + waits * ASYNCHRONOUS_STEP_INSTRUCTIONS
    return loads + copies + step * schedule.threads / (schedule.rows * schedule.step)


def _is_of_rows(kernel: ProductPair, load: Load) -> bool:
    return any(kernel.row in index.axes for index in load.indices)


def _widths(kernel: ProductPair, schedule: PairSchedule) -> tuple[int, int]:
    """Elements of a row of X and of the result as products take them."""
    if schedule.instruction is Instruction.FMA:
        return padded(kernel.depth_size, 4), padded(kernel.width_size, 4 * schedule.lanes)
    return padded(kernel.depth_size), padded(kernel.width_size)


def _work(kernel: ProductPair, schedule: PairSchedule) -> BlockWork:
    """Work of the blocks of a pair of products."""
    (depth, width), tensors, element = _widths(kernel, schedule), kernel.expr.tensor_by_name, DTYPE_BYTES[kernel.dtype]
    is_scalar = schedule.instruction is Instruction.FMA
    walked = float(sum(tensors[load.tensor].size_bytes for load in (kernel.first, kernel.second)))
    gates = [load for load in kernel.inner_loads if _is_of_rows(kernel, load)]
    once_bytes = float(tensors[kernel.own.tensor].size_bytes + kernel.output.size_bytes)
    once_bytes += sum(tensors[load.tensor].size_bytes for load in kernel.final_loads)
    return BlockWork(
        dtype=kernel.dtype,
        schedule=schedule,
        blocks=schedule.blocks(kernel),
        row_blocks=schedule.row_blocks(kernel),
        problems=kernel.problems,
        slices=1,
        products=depth + width,
        loads_per_product=loads_per_product(schedule, schedule.step, width) if is_scalar else 0.0,
        exponentials=element_instructions(kernel, schedule),
        special=0.0,
        port_bytes=fragment_bytes(schedule, schedule.step, depth, width, kernel.dtype),
        step_bytes=schedule.step * (kernel.depth_size + kernel.width_size + len(gates) * schedule.rows) * element,
        once_bytes=once_bytes,
        walked_bytes=walked,
        own_bytes=once_bytes + sum(tensors[load.tensor].size_bytes for load in gates),
        walk=pair_walk(kernel, schedule),
    )
