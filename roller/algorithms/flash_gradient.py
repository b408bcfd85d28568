"""Gradients of attention in one kernel each: no table of logits passes through memory, and sums have a fixed order.

FlashAttention 2 walks the keys in one kernel and adds to the gradient of the queries atomically: five products, and
results that differ from run to run. Two kernels that each compute logits and their gradients anew take seven, need no
memory between them and give the same bits every time (its ``deterministic`` mode buys that with a copy of dQ for every
block of keys).

With ``slopes`` there are five products here as well: the kernel of keys writes the gradients of the scaled logits, and
that of queries is one product that reads them, at the price of memory for them. Tiles grow as those of
:mod:`roller.algorithms.flash` do, under the same rules, and RATIONAL decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product

from msgspec import structs

from codegen.tolerance import HALF_UNITS, tolerance_of
from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES
from hal.support.errors import InputError
from roller.algorithms.chain import ChainProgram, Considered
from roller.algorithms.flash import NAME, check_attention
from roller.algorithms.row_tiles import (
    FRAGMENTS,
    ROUNDINGS,
    STEPS,
    WARPS,
    fitting,
    group_tiles,
    has_matrix_instructions,
    matrix_tiles,
    multiply_add_tiles,
    within,
)
from roller.construct.program import ProgramPart
from sokoban.kernel.attention_gradient import (
    GRADIENT_INPUTS,
    SLOPE_INPUTS,
    AttentionGradientKernel,
    SlopeProduct,
)
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.problem import Problem
from sokoban.language.named.expressions import program_as
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.kinds.attention_gradient import estimate_gradient, estimate_slopes
from sokoban.model.gpu.stages import LINE_BYTES
from sokoban.schedule.attention import FRAGMENT_ROWS, LANES, padded
from sokoban.schedule.attention_gradient import SLOPE_PIECE, GradientSchedule, gradient_shared_bytes, slope_shared_bytes
from sokoban.schedule.cutting import cut

#: Warps that divide the columns of the same rows, where results of wide heads do not fit the registers of one.
COLUMNS = (2, 4)
#: Kind of kernel -> its predicted time.
ESTIMATES: Mapping[type, Callable[..., Estimate]] = {
    AttentionGradientKernel: estimate_gradient,
    SlopeProduct: estimate_slopes,
}
#: Kind of kernel -> shared memory of a block of a schedule.
SHARED_BYTES: Mapping[type, Callable[..., int]] = {
    AttentionGradientKernel: gradient_shared_bytes,
    SlopeProduct: slope_shared_bytes,
}


@dataclass(frozen=True)
class WholeGradient:
    """A gradient of attention as one kernel; see :class:`roller.algorithms.chain.Split`."""

    def problems(self, form: KernelForm) -> tuple[Problem, ...]:
        """The kernel."""
        return (gradient_kernel(form),)

    def cut_down(self, form: KernelForm, schedules: Sequence[GradientSchedule]) -> tuple[KernelForm, WholeGradient]:
        """A gradient of a few heads, over which both sides still make several tiles and steps: of what is walked, or of
        a window, which is at most half of it, enough to use a buffer again."""
        schedule = schedules[0]
        gradient = form.attention_gradient
        of_keys, steps = gradient.of == "keys", (schedule.stages + 1) * (2 if gradient.window_size else 1)
        key_tile, query_tile = (schedule.rows, schedule.step) if of_keys else (schedule.step, schedule.rows)
        group = gradient.heads // gradient.key_heads
        by_head = gradient.slopes or (of_keys and schedule.instruction is not Instruction.FMA)
        rows = query_tile if by_head else -(-query_tile // group)
        queries = cut(gradient.queries, rows, steps if of_keys else 1)
        keys = cut(gradient.key_count, key_tile, 1 if of_keys else steps)
        if gradient.slopes:
            queries = min(gradient.queries, padded(queries, SLOPE_PIECE))
        if gradient.causal:  # the first of more queries than keys would see none
            keys = min(gradient.key_count, max(queries, keys))
        small = gradient.smaller(b=min(2, gradient.b), key_heads=min(2, gradient.key_heads), queries=queries, keys=keys)
        if by_head:  # two heads of a group follow each other as many do
            small = structs.replace(small, heads=min(2, group) * small.key_heads)
        return kernel_form(program_as(small, form.expr)), self

    def tolerance(self, form: KernelForm) -> float | None:
        """More than the rounding of results, since probabilities and gradients of logits are rounded, too, before they
        are multiplied."""
        halves = HALF_UNITS.get(form.attention_gradient.dtype)
        return None if halves is None else min(tolerance_of(form.expr), ROUNDINGS * halves)


def gradient_kernel(form: KernelForm) -> AttentionGradientKernel | SlopeProduct:
    """The kernel of a gradient of attention."""
    expr, gradient = form.expr, form.attention_gradient
    of_slopes = gradient.slopes and gradient.of == "queries"
    kind, names = (SlopeProduct, SLOPE_INPUTS) if of_slopes else (AttentionGradientKernel, GRADIENT_INPUTS)
    return kind(name=expr.name, attention=gradient, inputs=expr.operands(names), output=expr.output)


def consider(placed: PlacedForm, top_k: int) -> Considered:
    """The ``top_k`` best programs of a gradient of attention.

    Raises:
        InputError: the device or the kernels have nothing for its type or widths.
    """
    form, device = placed.form, placed.device
    check_attention(form, device)
    kernel = gradient_kernel(form)
    price = ESTIMATES[type(kernel)]
    best, count = fitting(_schedules(kernel, device), lambda schedule: price(kernel, schedule, device))
    if not best:
        raise InputError(form.expr.name, f"no tile fits the memory of {device.name}", "use smaller heads")
    programs = tuple(_program(form, schedule, estimate) for estimate, schedule in best[:top_k])
    return Considered(NAME, programs, scored=count)


def program_of(form: KernelForm, schedule: GradientSchedule, device: DeviceSpec) -> ChainProgram:
    """The program of a schedule that somebody else made; its estimate is infinite where no block of it fits.

    Raises:
        InputError: the device or the kernels have nothing for its type or widths.
    """
    check_attention(form, device)
    kernel = gradient_kernel(form)
    problem = schedule.misfit(kernel)
    if problem is not None:
        raise InputError(form.expr.name, problem, "score schedules of other warps, or leave slopes out")
    return _program(form, schedule, ESTIMATES[type(kernel)](kernel, schedule, device))


def _program(form: KernelForm, schedule: GradientSchedule, estimate: Estimate) -> ChainProgram:
    part = ProgramPart("", gradient_kernel(form), schedule, estimate, NAME)
    return ChainProgram(NAME, schedule.text, form, WholeGradient(), (part,))


def _column_tiles(kernel: AttentionGradientKernel | SlopeProduct) -> Iterator[GradientSchedule]:
    """Tiles of which several warps divide the columns."""
    for columns, fragments, warps, step, stages in product(COLUMNS, FRAGMENTS, WARPS, STEPS, (1, 2)):
        if warps % columns or step % (FRAGMENT_ROWS * columns):
            continue
        schedule = GradientSchedule(
            rows=FRAGMENT_ROWS * fragments * warps // columns, step=step, warps=warps, stages=stages,
            instruction=Instruction.MMA_16X8X16, columns=columns,
        )  # fmt: skip
        if schedule.misfit(kernel) is None:
            yield schedule


def _schedules(kernel: AttentionGradientKernel | SlopeProduct, device: DeviceSpec) -> Iterator[GradientSchedule]:
    """Tiles that are not mostly beyond the rows that there are; the numbers of a step's rows are fetched by a thread
    each, but for warp groups, of which one copies. Of slopes blocks read whole lines of L2, as DRAM gives them."""
    attention = kernel.attention
    of_keys, dtype = attention.of == "keys", attention.dtype
    tiles = multiply_add_tiles(GradientSchedule)
    if has_matrix_instructions(dtype, device):
        tiles = chain(matrix_tiles(GradientSchedule, (1,)), _column_tiles(kernel))
    candidates: Iterator[GradientSchedule] = (each for each in tiles if each.step <= each.warps * LANES)
    if attention.slopes and not of_keys:
        line = min(LINE_BYTES // DTYPE_BYTES[dtype], padded(kernel.rows))
        candidates = (each for each in candidates if each.rows >= line)
    if device.warp_group_instruction(dtype) is not None:
        shares = (1, 2) if of_keys else (1,)
        groups = group_tiles(GradientSchedule, partial(SHARED_BYTES[type(kernel)], kernel), device, shares)
        candidates = chain(groups, candidates)
    return within(candidates, kernel.rows, kernel.sizes["walked"])
