"""RATIONAL for gradients of attention: steps of :mod:`sokoban.model.gpu.kinds.attention`, more products in each.

A step computes logits and their gradients, and adds their products with rows that were walked to what the block makes;
everything else, the constants too, is that of the forward pass. No constant was chosen on a gradient.
"""

from __future__ import annotations

from dataclasses import replace

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES
from sokoban.kernel.attention_gradient import GRADIENT_INPUTS, AttentionGradientKernel, SlopeProduct
from sokoban.kernel.instructions import Instruction
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.kinds.attention import (
    GROUP_OTHER_REGISTERS,
    LOGIT_INSTRUCTIONS,
    OTHER_REGISTERS,
    PORT_BYTES,
    BlockWork,
    Resources,
    Walks,
    estimate_blocks,
    range_walks,
    starting_registers,
)
from sokoban.schedule.attention import (
    FRAGMENT_DEPTH,
    FRAGMENT_ROWS,
    GROUP_WARPS,
    LANES,
    PIECE_BYTES,
    padded,
    problem_band,
)
from sokoban.schedule.attention_gradient import (
    QUERY_NUMBERS,
    GradientFloats,
    GradientSchedule,
    gradient_shared_bytes,
    slope_shared_bytes,
)

#: Instructions per logit where warp groups multiply, besides those of products, as the compiled loops have them: one
#: that scales it, two for its gradient or, of keys, one, half a conversion each for the gradient and, of keys, the
#: probability, and of keys three eighths of a load of a query's two numbers.
GROUP_INSTRUCTIONS_OF_QUERIES, GROUP_INSTRUCTIONS_OF_KEYS = 3.5, 3.375
#: Of those of keys what every block does, where different ones make dK and dV: a scale, and an eighth of a load.
GROUP_INSTRUCTIONS_OF_SHARES = 1.125
#: Instructions of a thread per product of rows and of columns, each with an addition for every descriptor, and per
#: step, likewise: the means of ten loops of whole steps of two groups, which are off by 5 of 59 to 94 at most; single
#: groups have 20 more.
GROUP_ROWS_INSTRUCTIONS, GROUP_COLUMNS_INSTRUCTIONS = 3.0, 2.0
GROUP_STEP_OF_QUERIES, GROUP_STEP_OF_KEYS = 33.0, 28.6
#: The same where different blocks make dK and dV, the mean of both: of four pairs of loops, of 128 to 256 elements,
#: which are off by 6 of 126 to 172 at most.
GROUP_STEP_OF_SHARES = 35.6
#: Instructions per slope that is written: compiled loops have 2.0 to 2.4 more with slopes than without (an exchange,
#: three choices, a store and its guard for four of them).
SLOPE_INSTRUCTIONS = 2.2
#: Instructions of a thread of a product of slopes by warp groups, per sixteen keys (a load, a product, its descriptor,
#: an address) and per step: those of loops without a mask, of 64 to 256 elements, are off by 7 of 30 to 54 at most.
GROUP_SLOPE_INSTRUCTIONS, GROUP_SLOPE_STEP_INSTRUCTIONS = 4.0, 22.0
#: Registers of a thread of a product of slopes besides its sums and fragments, as the compiled kernels have them.
SLOPE_OTHER_REGISTERS = 40
#: Floats of a piece.
_PIECE = PIECE_BYTES // 4


def estimate_gradient(
    kernel: AttentionGradientKernel, schedule: GradientSchedule, device: DeviceSpec, registers: int | None = None
) -> Estimate:
    """The predicted time of a gradient of attention; it takes infinite time where no block fits.

    ``registers`` of a thread are those of :func:`gradient_registers` until the compiler has reported them.
    """
    registers = registers or starting_registers(gradient_registers(kernel, schedule), schedule, device)
    resources = Resources(schedule.threads, registers, gradient_shared_bytes(kernel, schedule))
    return estimate_blocks(_work(kernel, schedule), resources, device)


def estimate_slopes(
    kernel: SlopeProduct, schedule: GradientSchedule, device: DeviceSpec, registers: int | None = None
) -> Estimate:
    """The predicted time of a product of slopes and keys; it takes infinite time where no block fits."""
    registers = registers or starting_registers(slope_registers(kernel, schedule), schedule, device)
    resources = Resources(schedule.threads, registers, slope_shared_bytes(kernel, schedule))
    return estimate_blocks(_slope_work(kernel, schedule), resources, device)


def slope_registers(kernel: SlopeProduct, schedule: GradientSchedule) -> int:
    """Registers that a thread needs: sums, and fragments of both factors, of warp groups of slopes alone."""
    if schedule.instruction.is_by_groups:
        return padded(kernel.attention.head_dim) // 2 + schedule.step // 4 + GROUP_OTHER_REGISTERS
    fragments = schedule.warp_rows // FRAGMENT_ROWS
    return fragments * (padded(kernel.attention.head_dim) // 2 + 4) + 4 + SLOPE_OTHER_REGISTERS


def slope_walks(kernel: SlopeProduct, schedule: GradientSchedule) -> Walks:
    """Number of tiles of keys that the blocks walk."""
    return range_walks(kernel.block_range, schedule.rows, schedule.step)


def _slope_work(kernel: SlopeProduct, schedule: GradientSchedule) -> BlockWork:
    """Work of the blocks of a product of slopes and keys. Slopes have no other block to read them again."""
    attention, rows, step = kernel.attention, schedule.rows, schedule.step
    depth, element = padded(attention.head_dim), DTYPE_BYTES[attention.dtype]
    walk, blocks = slope_walks(kernel, schedule), schedule.blocks(kernel)
    slope_bytes = min(walk.mean * step * rows * blocks, kernel.problems * kernel.rows * attention.key_count) * element
    readers, instructions = schedule.warps, _slope_instructions(kernel, schedule)
    if schedule.instruction.is_by_groups:
        readers = schedule.warps // GROUP_WARPS
    output = float(kernel.output.size_bytes)
    return BlockWork(
        dtype=attention.dtype,
        schedule=schedule,
        blocks=blocks,
        row_blocks=schedule.row_blocks(kernel),
        problems=kernel.problems,
        slices=1,
        products=depth,
        loads_per_product=0.0,
        exponentials=instructions,
        special=0.0,
        port_bytes=element * step * (readers * depth + rows + rows + depth),
        step_bytes=step * (rows + attention.head_dim) * element,
        once_bytes=output,
        walked_bytes=float(kernel.inputs[1].size_bytes),
        own_bytes=slope_bytes + output,
        walk=walk,
        band=problem_band(kernel, schedule.row_blocks(kernel)),
    )


def _slope_instructions(kernel: SlopeProduct, schedule: GradientSchedule) -> float:
    """Instructions per slope: its part of loads and products of fragments, and of copies."""
    depth, rows = padded(kernel.attention.head_dim), schedule.rows
    if schedule.instruction.is_by_groups:
        # A thread has half as many slopes as the step has rows.
        each = GROUP_SLOPE_INSTRUCTIONS / FRAGMENT_DEPTH + GROUP_SLOPE_STEP_INSTRUCTIONS / schedule.step
        return 2 * each
    fragments = schedule.warp_rows // FRAGMENT_ROWS
    # A load of 16 by 16 elements for a fragment of either factor, two products of each pair, 16 bytes a copy.
    loads = (depth / FRAGMENT_DEPTH / fragments + 1) * LANES / (FRAGMENT_ROWS * FRAGMENT_DEPTH)
    products = depth / FRAGMENT_DEPTH * 2 * LANES / (FRAGMENT_ROWS * FRAGMENT_DEPTH)
    copies = (rows + depth) * DTYPE_BYTES[kernel.attention.dtype] / PIECE_BYTES / rows
    return loads + products + copies


def gradient_registers(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> int:
    """Registers that a thread needs: sums of results, logits, their gradients, fragments."""
    results = _result_widths(kernel, schedule)
    columns = max(results) if schedule.shares > 1 else sum(results)
    if schedule.instruction is Instruction.FMA:
        # Four elements of every row's own tile, and of four walked rows.
        factors = _PIECE * schedule.thread_rows + 4 * _PIECE
        logits = 2 * schedule.step // schedule.lanes
        return schedule.thread_rows * (columns // schedule.lanes + logits + 2) + factors + OTHER_REGISTERS
    if schedule.instruction.is_by_groups:
        # Factors of products that still run while the next logits and what is wanted of them come; two numbers of two
        # rows.
        factors = schedule.step // 2 // schedule.shares if kernel.is_of_keys else schedule.step // 4 + 4
        return columns // 2 + schedule.step + factors + GROUP_OTHER_REGISTERS
    fragments = schedule.warp_rows // FRAGMENT_ROWS
    return fragments * ((columns // 2 + schedule.step) // schedule.columns + 8) + OTHER_REGISTERS


def gradient_walks(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> Walks:
    """Number of tiles of the other side that the blocks walk.

    >>> from sokoban.language.named.attention_gradient import AttentionGradient
    >>> causal = AttentionGradient(of="keys", b=1, heads=1, queries=256, head_dim=64, causal=True)
    >>> kernel = AttentionGradientKernel(name="", attention=causal, inputs=(), output=None)
    >>> gradient_walks(kernel, GradientSchedule(rows=64, step=64, warps=4, stages=1, instruction=Instruction.FMA))
    Walks(mean=2.5, longest=4.0, edges=1.0)
    """
    if schedule.instruction is Instruction.FMA or not kernel.is_of_keys:
        return range_walks(kernel.block_range, schedule.rows, schedule.step)
    # Matrix instructions walk the queries of every head of a group by themselves.
    one = range_walks(replace(kernel.block_range, group=1), schedule.rows, schedule.step)
    return Walks(one.mean * kernel.group, one.longest * kernel.group, one.edges * kernel.group, one.lengths)


def _widths(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> tuple[int, int]:
    """Elements of a row of keys and of values as products take them."""
    attention = kernel.attention
    multiple = _PIECE if schedule.instruction is Instruction.FMA else FRAGMENT_ROWS
    return padded(attention.head_dim, multiple), padded(attention.value_size, multiple)


def _result_widths(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> tuple[int, ...]:
    """Elements of a row of every result."""
    depth, width = _widths(kernel, schedule)
    if schedule.instruction is Instruction.FMA:
        floats = GradientFloats.of(kernel, schedule)
        depth, width = floats.depth, floats.width
    return (depth, width) if kernel.is_of_keys else (depth,)


def _work(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> BlockWork:
    """Work of the blocks of a gradient."""
    attention, (depth, width) = kernel.attention, _widths(kernel, schedule)
    results, shares = sum(_result_widths(kernel, schedule)), schedule.shares
    # Of two shares one computes logits alone, the other their gradients, too; the mean of both.
    dots = depth + width / shares
    by_name = {name: float(tensor.size_bytes) for name, tensor in zip(GRADIENT_INPUTS, kernel.inputs, strict=True)}
    keys, queries = by_name["K"] + by_name["V"], sum(by_name[name] for name in ("Q", "dY", "L", "D"))
    block_side, walked = (keys, queries) if kernel.is_of_keys else (queries, keys)
    row = (attention.head_dim + attention.value_size) * DTYPE_BYTES[attention.dtype]
    row += kernel.is_of_keys * QUERY_NUMBERS * DTYPE_BYTES["float32"]
    output = float(kernel.output.size_bytes)
    # Slopes leave during the walk.
    row += kernel.writes_slopes * schedule.rows * DTYPE_BYTES[attention.dtype]
    ends = output * (attention.head_dim + attention.value_size) / attention.row_size if kernel.is_of_keys else output
    return BlockWork(
        dtype=attention.dtype,
        schedule=schedule,
        blocks=schedule.blocks(kernel),
        row_blocks=schedule.row_blocks(kernel) * shares,
        problems=kernel.problems,
        slices=1,
        products=dots + results / shares,
        loads_per_product=_loads_per_product(schedule, dots, results),
        exponentials=_instructions(kernel, schedule, depth, width) + SLOPE_INSTRUCTIONS * kernel.writes_slopes / shares,
        port_bytes=_port_bytes(kernel, schedule, dots, results / shares),
        step_bytes=schedule.step * row,
        once_bytes=block_side * shares + ends,
        walked_bytes=walked,
        own_bytes=block_side + output,
        walk=gradient_walks(kernel, schedule),
        band=1 if schedule.instruction is Instruction.FMA else problem_band(kernel, schedule.row_blocks(kernel)),
        waits=1 if schedule.columns > 1 else 0,
    )


def _instructions(kernel: AttentionGradientKernel, schedule: GradientSchedule, depth: int, width: int) -> float:
    """Instructions per logit besides its exponential and the mask."""
    if not schedule.instruction.is_by_groups:
        return LOGIT_INSTRUCTIONS
    of_keys, shares = kernel.is_of_keys, schedule.shares
    # A thread has half as many logits as the step has rows; products are along both widths, and along the step. Of two
    # shares the mean: one has no part of what the other does beyond logits.
    products = GROUP_ROWS_INSTRUCTIONS * (depth + width / shares)
    products += GROUP_COLUMNS_INSTRUCTIONS * schedule.step * (1 + of_keys) / shares
    each = GROUP_INSTRUCTIONS_OF_KEYS if of_keys else GROUP_INSTRUCTIONS_OF_QUERIES
    each_step = GROUP_STEP_OF_KEYS if of_keys else GROUP_STEP_OF_QUERIES
    if shares > 1:
        each = GROUP_INSTRUCTIONS_OF_SHARES + (each - GROUP_INSTRUCTIONS_OF_SHARES) / shares
        each_step = GROUP_STEP_OF_SHARES
    return each + (products / FRAGMENT_DEPTH + each_step) / (schedule.step / 2)


def _loads_per_product(schedule: GradientSchedule, dots: float, results: float) -> float:
    """Loads of four elements that threads issue per multiply-add; none that count with matrix instructions."""
    if schedule.instruction is not Instruction.FMA:
        return 0.0
    rows, logits, columns = schedule.thread_rows, schedule.step // schedule.lanes, results / schedule.lanes
    of_dots, of_results = (rows + logits) / (4 * rows * logits), (rows + columns) / (4 * rows * columns)
    return (dots * of_dots + results * of_results) / (dots + results)


def _port_bytes(kernel: AttentionGradientKernel, schedule: GradientSchedule, dots: float, results: float) -> float:
    """Bytes of shared memory's port that a step takes: every warp reads all that is walked, rows of it for logits and
    their gradients and columns for results, and its own rows; copies write."""
    depth, width = _widths(kernel, schedule)
    if schedule.instruction is Instruction.FMA:
        rows_at_once = LANES // schedule.lanes
        weights = schedule.step * (1 + kernel.is_of_keys)
        # A broadcast takes the port as long as 128 bytes do.
        broadcast = schedule.rows / rows_at_once * (dots + weights) / 4 * PORT_BYTES
        read = schedule.warps * schedule.step * (dots + results)
        return broadcast + 4.0 * (read + schedule.step * (depth + width) + 2 * schedule.rows * weights)
    readers, columns = schedule.warps, schedule.columns
    if schedule.instruction.is_by_groups:
        readers = schedule.warps // GROUP_WARPS
    read = readers * schedule.step * (dots + results) / columns + schedule.rows * dots * columns
    factors = schedule.rows * schedule.step
    # Of factors that warps pass on, each that divides columns reads all.
    passed = (1 + kernel.is_of_keys) * (1 + columns) * factors if columns > 1 else 0
    slopes = kernel.writes_slopes * factors
    return DTYPE_BYTES[kernel.attention.dtype] * (read + passed + schedule.step * (depth + width) + slopes)
