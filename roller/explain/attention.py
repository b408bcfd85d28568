"""Explanation of attention: the sizes of its tiles and their reasons, and the time of a step."""

from __future__ import annotations

from collections.abc import Iterator

from hal.spec.device import DeviceSpec
from roller.explain.pace import stage_bars
from roller.text.quantities import count_text, si_text, time_text, wrapped
from sokoban.kernel.attention import AttentionKernel, SliceSum, attention_flops
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.pages import rows_in_a_page
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.kinds.attention import lookups, matrix_rates, registers_per_thread, walks
from sokoban.schedule.attention import GROUP_WARPS, LANES, AttentionSchedule, SliceSumSchedule, one_columns, padded
from sokoban.schedule.warp_groups import GROUP_ROWS

#: What the stages of attention are.
MEANINGS = {
    "compute": "both products, matrix units busy with nothing else",
    "issue": "exponentials and the arithmetic of the softmax",
    "shared": "keys, values and queries out of shared memory, every warp or warp group its own",
    "l2": "tiles of keys and values to every block",
    "dram": "queries, keys, values and results through DRAM",
    "latency": "the units with all that their blocks do, were memory infinitely fast",
    "block_launch": "starting every block",
}
#: What of it is otherwise where threads multiply and add.
SCALAR_MEANINGS = {
    "compute": "multiply-adds of both products, with what they load from shared memory",
    "shared": "queries and weights once for a row's threads, keys and values once a warp",
}


def attention_origin(kernel: AttentionKernel, schedule: AttentionSchedule) -> Iterator[str]:
    """Reasons for an attention program."""
    attention, written = kernel.attention, _written_bytes(kernel)
    yield from wrapped(
        f"no logits pass through memory: written out they are {si_text(written, 'B')}, read and written "
        f"{count_text(4, 'time')} in all; a row keeps its largest logit and the sum of its exponentials instead"
    )
    reuse = schedule.rows
    yield from wrapped(
        f"tiles: {schedule.rows} rows of queries meet every tile of {schedule.keys} keys, so that a byte of keys and "
        f"values from L2 serves {reuse} rows ({reuse} FLOP a byte); larger tiles save more, until registers or shared "
        "memory are full"
    )
    if kernel.group > 1:
        yield from wrapped(f"the {kernel.group} heads that share keys are rows of one product")
    if attention.pages is not None:
        yield from wrapped(_page_text(kernel, schedule))
    if kernel.lengths is not None:
        yield from wrapped(
            f"keys end where {kernel.lengths.name} says, sequence by sequence; the time is that of sequences which all "
            f"have {attention.key_count}"
        )
    if attention.causal:
        seen = attention_flops(attention) / (
            2.0 * attention.b * attention.heads * attention.queries * attention.key_count
            * (attention.head_dim + attention.value_size)
        )  # fmt: skip
        yield from wrapped(f"the mask leaves {100 * seen:.0f} % of all pairs; tiles that it hides are not walked")
    if kernel.slices > 1:
        yield from wrapped(
            f"few rows leave units idle: {kernel.slices} blocks share the keys of the same rows, and a second kernel "
            "brings their results together"
        )


def _page_text(kernel: AttentionKernel, schedule: AttentionSchedule) -> str:
    """Reads of the table of pages: whose, and how many a step."""
    pages = kernel.attention.pages
    assert pages is not None
    place = f"keys and values lie in pages of {pages.tokens} tokens"
    if schedule.instruction.is_by_groups:
        rows = rows_in_a_page(schedule.keys, pages.tokens)
        return f"{place}: a copy in bulk brings {rows} rows, whose page its thread looks up while buffers are full"
    each = lookups(kernel, schedule) / schedule.threads
    return f"{place}: a thread reads the table {each:.3g} times a step, and copies when it knows the places"


def _written_bytes(kernel: AttentionKernel) -> float:
    attention = kernel.attention
    element = kernel.inputs[0].element_bytes
    return float(attention.b * attention.heads * attention.queries * attention.key_count * element)


def attention_lines(
    kernel: AttentionKernel, schedule: AttentionSchedule, estimate: Estimate, device: DeviceSpec
) -> Iterator[str]:
    """An attention kernel: its launch, what a step does and holds, its stages."""
    attention, walk = kernel.attention, walks(kernel, schedule)
    fragments, by_groups = schedule.rows // schedule.warps, schedule.instruction.is_by_groups
    yield (
        f"  {count_text(schedule.blocks(kernel), 'block')} of {count_text(schedule.threads // LANES, 'warp')}, "
        f"{estimate.blocks_per_unit} at a time on a unit; a warp has {fragments} rows, and all keys of a step"
    )
    if by_groups:
        yield from wrapped(
            f"warp groups of {GROUP_WARPS} warps multiply {GROUP_ROWS} rows together; one more copies keys and values "
            "in bulk"
        )
    yield from wrapped(
        f"a block walks {walk.mean:.3g} tiles of keys in the mean, {walk.longest:.0f} at most, {walk.edges:.2g} "
        "of them masked element by element"
    )
    ones = one_columns(kernel, schedule)
    sums, logits = (each * fragments // LANES for each in (padded(attention.value_size) + ones, schedule.keys))
    queries = "queries" if schedule.held else "queries read again every step"
    if by_groups:
        queries = f"{logits // 2} pairs of exponentials that are multiplied while the next logits come"
    yield from wrapped(
        f"registers of a thread, about {estimate.registers} of {device.limits.registers_per_thread}: {sums} sums, "
        f"{logits} logits, {queries}, addresses ({registers_per_thread(kernel, schedule)} by count)"
    )
    if ones:
        yield from wrapped(
            f"{ones} columns of ones behind the values: their product with the exponentials is the sum of a row"
        )
    rates = matrix_rates(kernel, schedule, device)
    buffers = "keys arrive while values are used and the other way round"
    if rates is None:
        buffers = "the queries, one tile that keys and values take in turns, the exponentials, all in float32"
    elif by_groups:
        buffers = f"in 128-byte swizzle, {schedule.stages} buffers of keys and of values, each with barriers of its own"
    elif schedule.stages > 1:
        buffers = "the next keys and values arrive during a whole step"
    yield from wrapped(f"shared memory of a block, {si_text(estimate.shared_bytes, 'B')}: {buffers}")
    unit = "multiply-adds" if rates is None else str(Instruction(schedule.instruction))
    yield f"Predicted {time_text(estimate.seconds)}, {time_text(device.launch_overhead_seconds)} of it the launch"
    yield from stage_bars(estimate, MEANINGS if rates is not None else MEANINGS | SCALAR_MEANINGS)
    reached = attention_flops(attention) / estimate.seconds
    peak = rates.peak_flops if rates is not None else device.peak_flops("float32")
    why = "a warp takes its exponentials after its products, and other warps of its scheduler fill only part of that"
    if by_groups:
        why = "values are multiplied while their group takes the next exponentials, other groups fill part of the rest"
    if rates is None:
        why = "products and exponentials take turns at the same schedulers, and wait for copies through registers"
    yield from wrapped(f"{si_text(reached, 'FLOP/s')}, {100 * reached / peak:.0f} % of the peak of {unit}: {why}")


def slice_lines(kernel: SliceSum, schedule: SliceSumSchedule, estimate: Estimate, device: DeviceSpec) -> Iterator[str]:
    """The kernel that brings slices together: its launch and its stages."""
    yield f"  {count_text(schedule.blocks(kernel), 'block')} of {schedule.threads // 32} warps, a row each"
    yield f"Predicted {time_text(estimate.seconds)}, {time_text(device.launch_overhead_seconds)} of it the launch"
    yield from stage_bars(estimate, MEANINGS)
