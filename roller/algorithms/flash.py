"""Attention in one kernel: tiles of queries walk the keys and update a running softmax.

No table of logits passes through memory (T. Dao et al., "FlashAttention", 2022). Tiles grow under the rules of every
rTile (thesis 6.3.1): rows and keys are whole fragments of the instruction, a warp's sums, logits and queries fit its
registers, the tiles of a block fit shared memory. What a tile of queries saves is what it reuses: every key read for it
serves all of its rows. RATIONAL prices all that fit, and decides.

Where the queries are few, as in decoding, blocks share the keys of the same rows, and a second kernel brings their
results together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from codegen.tolerance import HALF_UNITS, tolerance_of
from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES
from hal.support.errors import InputError
from roller.algorithms.chain import ChainProgram, Considered
from roller.algorithms.row_tiles import (
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
from sokoban.kernel.attention import SLICE_NUMBERS, AttentionKernel, SliceSum
from sokoban.kernel.form import KernelForm, attention_of, kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.problem import Problem
from sokoban.language.expression import Tensor
from sokoban.language.named.attention_gradient import AttentionGradient
from sokoban.language.named.expressions import program_as
from sokoban.language.names import unused_name
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.kinds.attention import estimate_attention, estimate_slice_sum
from sokoban.schedule.attention import (
    FRAGMENT_ROWS,
    AttentionSchedule,
    SliceSumSchedule,
    padded,
    shared_bytes,
)
from sokoban.schedule.cutting import cut

#: The name of the algorithm.
NAME = "flash"

#: Blocks per unit that slices of the keys are to give, and steps of a slice at least.
BLOCKS_PER_UNIT = (1, 2, 4)
LEAST_STEPS = 2
#: Threads of a block that brings slices together: a warp per row.
SUM_THREADS = 128
#: Bytes of an element of each type that there are kernels for.
ELEMENT_BYTES = {dtype: DTYPE_BYTES[dtype] for dtype in ("float32", "float16", "bfloat16")}


@dataclass(frozen=True)
class KeySlices:
    """Attention as one kernel, or as two where the keys are cut into ``count`` slices."""

    count: int

    def problems(self, form: KernelForm) -> tuple[Problem, ...]:
        """The kernels of the chain, in order."""
        return (self.kernel(form), *self.sums(form))

    def kernel(self, form: KernelForm) -> AttentionKernel:
        """The kernel that multiplies."""
        expr = form.expr
        return AttentionKernel(
            name=expr.name, attention=form.attention, slices=self.count, inputs=expr.operands(operand_names(form)),
            output=expr.output if self.count == 1 else self._parts(form),
        )  # fmt: skip

    def sums(self, form: KernelForm) -> tuple[SliceSum, ...]:
        """The kernel that brings several slices together."""
        if self.count == 1:
            return ()
        return (SliceSum(name=form.expr.name, source=self._parts(form), output=form.expr.output),)

    def _parts(self, form: KernelForm) -> Tensor:
        """The partial results between the kernels."""
        expr, attention = form.expr, form.attention
        rows = attention.b * attention.heads * attention.queries
        name = unused_name("Parts", {tensor.name for tensor in (*expr.inputs, expr.output)})
        return Tensor(name, (self.count, rows, attention.value_size + SLICE_NUMBERS), "float32")

    def cut_down(self, form: KernelForm, schedules: Sequence[AttentionSchedule]) -> tuple[KernelForm, KeySlices]:
        """Attention of a few heads, over which queries and keys still make several tiles and steps: of keys, or of a
        window, which is at most half of them, enough to use a buffer again that was used in the loop.
        """
        schedule = schedules[0]
        attention = form.attention
        rows = -(-schedule.rows * attention.key_heads // attention.heads)
        steps = (schedule.stages + 2) * (2 if attention.window_size else 1)
        keys = cut(attention.key_count, schedule.keys, steps * self.count)
        if attention.pages is not None:  # more than one page a sequence
            keys = max(keys, cut(attention.key_count, attention.pages.tokens))
        small = attention.smaller(
            b=min(2, attention.b), key_heads=min(2, attention.key_heads), queries=cut(attention.queries, rows),
            keys=keys,
        )  # fmt: skip
        return kernel_form(program_as(small, form.expr)), self

    def tolerance(self, form: KernelForm) -> float | None:
        """More than the rounding of results, since exponentials are rounded, too, before they multiply values."""
        halves = HALF_UNITS.get(form.attention.dtype)
        return None if halves is None else min(tolerance_of(form.expr), ROUNDINGS * halves)

    @property
    def text(self) -> str:
        """In words: ``4 slices of the keys``; empty for one kernel."""
        return "" if self.count == 1 else f"{self.count} slices of the keys"


def operand_names(form: KernelForm) -> tuple[str, ...]:
    """Names that the operands of the kernel have in the program of attention."""
    return ("Q", "K", "V", *form.attention.integer_inputs)


def consider(placed: PlacedForm, top_k: int) -> Considered:
    """The ``top_k`` best programs of attention.

    Raises:
        InputError: the device or the kernels have nothing for its type or widths.
    """
    form, device = placed.form, placed.device
    check_attention(form, device)
    proposed = [_programs(form, slices, device, top_k) for slices in _slices(form, device)]
    programs = [program for some, _ in proposed for program in some]
    if not programs:
        raise InputError(form.expr.name, f"no tile fits the memory of {device.name}", "use smaller heads")
    programs.sort(key=lambda program: program.estimate.seconds)
    return Considered(NAME, tuple(programs[:top_k]), scored=sum(count for _, count in proposed))


def check_attention(form: KernelForm, device: DeviceSpec) -> None:
    """Raise what the kernels of attention and its gradients have nothing for.

    Raises:
        InputError: the device is no GPU, or the element type or a width is none of theirs.
    """
    attention = attention_of(form.source)
    assert attention is not None
    where = form.expr.name
    if device.teu.lane != "thread":
        problem = f"attention has no kernels of ours for {device.name}"
        raise InputError(where, problem, "name a GPU, or use roller estimate --implementation library")
    if attention.dtype not in ELEMENT_BYTES:
        problem = f"attention has no kernels of ours for {attention.dtype}"
        raise InputError(where, problem, f"use one of {', '.join(sorted(ELEMENT_BYTES))}")
    # Elements that are copied at once: rows consist of so many.
    grain = 8 if has_matrix_instructions(attention.dtype, device) else 4
    for name, width in (("head_dim", attention.head_dim), ("value_dim", attention.value_size)):
        if width % grain:
            bytes_each = grain * ELEMENT_BYTES[attention.dtype]
            problem = f"rows of {width} elements are no multiple of {bytes_each} bytes"
            raise InputError(f"{where}: {name}", problem, f"use a multiple of {grain}")
    if isinstance(attention, AttentionGradient) and attention.slopes:
        if not has_matrix_instructions(attention.dtype, device):
            problem = f"slopes have no kernels of ours in {attention.dtype} on {device.name}"
            raise InputError(f"{where}: slopes", problem, "leave them out, or use 16 bits from sm_80 on")
        if attention.queries % grain:
            raise InputError(
                f"{where}: queries",
                f"slopes of {attention.queries} are no multiple of 16 bytes",
                f"use a multiple of {grain}",
            )


def has_instruction(dtype: str, instruction: Instruction, device: DeviceSpec) -> bool:
    """True if a device multiplies elements of a type by an instruction."""
    if instruction is Instruction.FMA:
        return True
    if instruction is Instruction.WGMMA:
        return device.warp_group_instruction(dtype) is not None
    return has_matrix_instructions(dtype, device)


def _slices(form: KernelForm, device: DeviceSpec) -> list[KeySlices]:
    """One kernel, and where the rows leave units idle, slices that give every unit a block or some."""
    attention = form.attention
    rows = attention.queries * (attention.heads // attention.key_heads)
    problems = attention.b * attention.key_heads
    counts = {1}
    for tile in {min(padded(rows), FRAGMENT_ROWS * warps) for warps in WARPS}:
        blocks = problems * -(-rows // tile)
        for per_unit in BLOCKS_PER_UNIT:
            count = device.unit_count * per_unit // blocks
            if count > 1:
                counts.add(min(count, max(1, attention.key_count // (STEPS[1] * LEAST_STEPS))))
    return [KeySlices(count) for count in sorted(counts)]


def _programs(form: KernelForm, slices: KeySlices, device: DeviceSpec, top_k: int) -> tuple[list[ChainProgram], int]:
    """The best programs of one number of slices, and how many were priced."""
    kernel = slices.kernel(form)
    schedules = _schedules(kernel, slices, device)
    best, count = fitting(schedules, lambda schedule: estimate_attention(kernel, schedule, device))
    return [_program(form, slices, schedule, estimate, device) for estimate, schedule in best[:top_k]], count


def program_of(form: KernelForm, schedule: AttentionSchedule, slices: int, device: DeviceSpec) -> ChainProgram:
    """The program of a schedule that somebody else made; its estimate is infinite where no block of it fits.

    Raises:
        InputError: the device or the kernels have nothing for its type, widths or instruction.
    """
    check_attention(form, device)
    return _program(
        form,
        KeySlices(slices),
        schedule,
        estimate_attention(KeySlices(slices).kernel(form), schedule, device),
        device,
    )


def _program(
    form: KernelForm, slices: KeySlices, schedule: AttentionSchedule, estimate: Estimate, device: DeviceSpec
) -> ChainProgram:
    """A schedule with its estimate, and what brings slices together."""
    label = f"attention over each of {slices.text}" if slices.count > 1 else ""
    parts = [ProgramPart(label, slices.kernel(form), schedule, estimate, NAME)]
    for combined in slices.sums(form):
        sums = SliceSumSchedule(SUM_THREADS)
        priced = estimate_slice_sum(combined, sums, device)
        parts.append(ProgramPart("brings the slices together", combined, sums, priced, NAME))
    variant = ", ".join(filter(None, (schedule.text, slices.text)))
    return ChainProgram(NAME, variant, form, slices, tuple(parts))


def _schedules(kernel: AttentionKernel, slices: KeySlices, device: DeviceSpec) -> Iterator[AttentionSchedule]:
    """Tiles that are not mostly beyond the rows or the keys that there are."""
    dtype = kernel.attention.dtype
    candidates = multiply_add_tiles(AttentionSchedule)
    if has_matrix_instructions(dtype, device):
        candidates = matrix_tiles(AttentionSchedule, (False, True))
        if device.warp_group_instruction(dtype) is not None:
            groups = group_tiles(AttentionSchedule, lambda schedule: shared_bytes(kernel, schedule), device, (False,))
            candidates = chain((each for each in groups if each.misfit(kernel) is None), candidates)
    return within(candidates, kernel.rows, kernel.attention.key_count, max(1, slices.count))
