"""Explanation of construction: the operator's bound, the growth of its tiles, its end, and the rivals that lost.

Nothing is decided here. Sentences are made of the reasons that construction recorded, of the micro-performance model
asked again about the tiles on the way, and of RATIONAL's estimates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hal.spec.device import DeviceSpec
from roller.construct.construct import EPSILON_STEPS
from roller.construct.performance import MicroModel
from roller.construct.program import Program, ProgramPart, Reason, RProgram
from roller.construct.rtile import TileSpace
from roller.construct.scale_up import LARGEST_BLOCK_AXIS, LARGEST_THREAD_AXIS, LARGEST_WARP_AXIS
from roller.construct.warp_groups import WARP_GROUPS_POLICY
from roller.construct.warp_tiles import WARP_TILES_POLICY
from roller.explain.chains import chain_page, considered_lines
from roller.explain.cpu_pace import cpu_reasons
from roller.explain.cpu_page import cpu_program, cpu_story
from roller.explain.kinds import KINDS
from roller.explain.pace import prediction, reasons, residency, rivals, stage_times
from roller.programs import SEARCH_POLICY, Programs
from roller.text.quantities import (
    clipped,
    count_text,
    layer_below,
    scratchpad,
    short_sizes,
    si_text,
    sizes_text,
    three_digits,
    time_text,
    wrapped,
)
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.language.expression import statement_text
from sokoban.schedule.raster import raster_axes
from sokoban.schedule.rows import column_bytes_of, row_plan
from sokoban.schedule.tile import TileSchedule

_POLICY_MEANING = {
    "scale up": "outputs share operands: tiles grow layer by layer along the axis whose growth saves most traffic",
    "scale up, Tensor Core": (
        "a matrix product in 16-bit floats: warps own 16x16x16 fragments, and tiles grow layer by layer from there"
    ),
    WARP_GROUPS_POLICY: ("a matrix product: warp groups multiply from shared memory, and all their tiles are scored"),
    WARP_TILES_POLICY: (
        "a matrix product by single warps: the largest tiles of a warp in blocks of a few, for their rounds"
    ),
    "element-wise": (
        "nothing is read twice, so no tile saves traffic: threads take a few elements each from the bottom layer"
    ),
    "transpose through shared memory": "reading and writing along different axes: square tiles turn in shared memory",
    "direct": "nothing is staged: windows overlap between neighbouring threads, which share lines through L1",
    "staged windows": "windows overlap: rows arrive in shared memory once, and a thread computes a column of outputs",
    "staged reduction": "one thread per output; rows arrive in shared memory in contiguous pieces",
    SEARCH_POLICY: (
        "not constructed: the best of all tiles, aligned or not, that passed every layer's condition in closed form"
    ),
    "shared rows": "the threads of a block share each reduction and combine their partial results at the end",
}

_TRIED_TOO = "larger tiles fit: what they save is weighed against occupancy and waves in the predicted times below"


def explain(programs: Programs, rank: int = 1, ranked: Sequence[Program] | None = None) -> str:
    """A page on one program: the operator, the steps, the program, its times, its rivals.

    ``ranked`` are all, best first, as :meth:`roller.programs.Programs.ranked` gives them; by default those of one
    kernel. ``rank`` counts from 1.
    """
    return "\n".join(_lines(programs, rank, programs.direct if ranked is None else ranked)) + "\n"


def _lines(programs: Programs, rank: int, ranked: Sequence[Program]) -> Iterator[str]:
    placed, form, device = programs.placed, programs.form, programs.device
    program = ranked[rank - 1]
    yield f"{form.expr.name} on {device.title} ({device.name})"
    yield ""
    page = _PAGES[device.teu.lane]
    yield from _operator(placed, page.noun)
    yield ""
    if not isinstance(program, RProgram):
        yield from chain_page(programs, program, rank)
        several = len(program.parts) > 1
        for number, part in enumerate(program.parts, start=1):
            yield ""
            yield f"Kernel {number} of {len(program.parts)}: {part.label}" if several else "The kernel"
            yield from _kernel(part, device)
    else:
        yield from page.story(placed, program, rank)
        yield ""
        yield from page.program(placed, program)
        yield ""
        yield from prediction(placed, program)
        yield ""
        yield from page.reasons(placed, program)
    yield ""
    yield from stage_times(ranked, rank)
    yield ""
    yield from rivals(programs, rank, ranked)
    if programs.considered and (programs.direct or len(programs.considered) > 1):
        yield ""
        yield from considered_lines(programs)


def _kernel(part: ProgramPart, device: DeviceSpec) -> Iterator[str]:
    """One kernel of a chain: what it computes, its program, its times."""
    yield from wrapped(part.problem.statement_text())
    kind = KINDS.get(type(part.problem))
    if kind is not None:
        yield from kind.lines(part.problem, part.schedule, part.estimate, device)
        return
    program = part.program
    placed, page = PlacedForm(program.form, device), _PAGES[device.teu.lane]
    yield from page.program(placed, program)
    yield from prediction(placed, program)
    yield from page.reasons(placed, program)


# The operator


def _operator(placed: PlacedForm, noun: str) -> Iterator[str]:
    form, device = placed.form, placed.device
    for statement in form.source.statements:
        yield from wrapped(statement_text(statement))
    yield from wrapped("axes " + ", ".join(f"{axis.name}={axis.size}" for axis in form.source.axes))
    for name, parts in form.fused:
        yield from wrapped(
            f"{' and '.join(parts)} are adjacent in every tensor and fuse into {name}={form.sizes[name]}"
        )
    size_bytes = form.compulsory_bytes
    rate, unit = placed.rate
    bandwidth = device.dram.bandwidth_bytes_per_second
    compute, memory = form.flops / rate, size_bytes / bandwidth
    balance = rate / bandwidth
    if not form.flops:
        moved = si_text(size_bytes, "B")
        at = f"{time_text(memory)} at {si_text(bandwidth, 'B/s')} sustained"
        yield f"  no arithmetic, and at least {moved} to move: {at}"
        return
    intensity = three_digits(form.flops / size_bytes)
    yield from wrapped(
        f"{si_text(form.flops, 'FLOP')} on at least {si_text(size_bytes, 'B')} is {intensity} FLOP "
        f"per byte; this {noun} can do {three_digits(balance)} for every byte from {layer_below(device)} ({unit})"
    )
    if compute > memory:
        at = f"{time_text(compute)} at {si_text(rate, 'FLOP/s')} sustained"
        yield f"  so arithmetic bounds it: {at}, {time_text(memory)} of memory behind"
    else:
        at = f"{time_text(memory)} at {si_text(bandwidth, 'B/s')} sustained"
        yield f"  so memory bounds it: {at}, {time_text(compute)} of arithmetic behind"


# The construction


def _story(placed: PlacedForm, program: RProgram, rank: int) -> Iterator[str]:
    form, device = placed.form, placed.device
    yield f"How rank {rank} was {'found' if program.policy == SEARCH_POLICY else 'constructed'}: {program.policy}"
    meaning = _POLICY_MEANING.get(program.policy)
    if meaning is not None:
        yield from wrapped(meaning)
    if program.policy != WARP_GROUPS_POLICY:
        yield from wrapped(_epsilon(program))
    space = TileSpace.of(form)
    uses_matrix = program.schedule.uses_matrix
    rate = (placed.rate if uses_matrix else placed.ordinary_rate).flops
    model = MicroModel(space, device, rate, float(form.body_operations))
    layers = list(dict.fromkeys(reason.layer for reason in program.reasons))
    before: tuple[int, ...] | None = None
    for layer in layers:
        reasons = [reason for reason in program.reasons if reason.layer == layer]
        if all(isinstance(reason.tile, str) for reason in reasons):
            yield ""
            for reason in reasons:
                yield from wrapped(f"{layer}: {reason.action} ({reason.tile})")
        elif layer == "registers":
            yield ""
            yield from _register_steps(placed, program, reasons, model)
        elif layer == "shared":
            yield ""
            yield from _shared_steps(program, reasons, model)
        else:
            yield ""
            yield from _shrink_steps(device, reasons, space, before)
        tiles = [reason.tile for reason in reasons if not isinstance(reason.tile, str)]
        before = tiles[-1] if tiles else before


def _epsilon(program: RProgram) -> str:
    if program.epsilon <= EPSILON_STEPS[0] or program.policy == SEARCH_POLICY:
        return f"axes may be padded by up to {100 * program.epsilon:g}% to fit whole tiles"
    return (
        f"axes may be padded by up to {100 * program.epsilon:g}% to fit whole tiles: "
        f"at {100 * EPSILON_STEPS[0]:g}% too few programs exist for these sizes"
    )


def _register_steps(
    placed: PlacedForm, program: RProgram, reasons: Sequence[Reason], model: MicroModel
) -> Iterator[str]:
    limits, lanes = model.device.limits, model.device.warp_lanes
    uses_matrix, room = program.schedule.uses_matrix, limits.registers_per_thread_usable
    if program.schedule.instruction.is_mma:
        room = (limits.registers_per_thread - placed.mma_other_registers) // placed.form.sum_sets
    owner, room = ("warp", room * lanes) if uses_matrix else ("thread", room)
    yield f"  Registers, the tile of one {owner}: room for {room} values, accumulators and operands"
    yield from _growth("registers", reasons, model, "value")
    shape = _last_tile(reasons)
    if shape is None:
        return
    values = model.footprint("registers", shape)
    yield from _chosen_tile("registers", shape, model, f"{values} of {room} values")
    largest = LARGEST_WARP_AXIS if uses_matrix else LARGEST_THREAD_AXIS
    grown = _cheapest_doubling("registers", shape, model, largest)
    if grown is None:
        yield f"    no axis is left that saves traffic: a {owner} takes at most {largest} elements along one"
    elif model.footprint("registers", grown) > room:
        yield f"    full: doubling any axis would hold {model.footprint('registers', grown)} values or more"
    else:
        yield f"    {_TRIED_TOO}"


def _shared_steps(program: RProgram, reasons: Sequence[Reason], model: MicroModel) -> Iterator[str]:
    limits = model.device.limits
    room = limits.shared_bytes_per_block
    below = layer_below(model.device)
    name = scratchpad(model.device).capitalize()
    yield f"  {name}, the tile of one block: room for {si_text(room, 'B')}, at most {limits.threads_per_block} threads"
    yield from _growth("shared", reasons, model, "byte")
    chosen = next((reason for reason in reversed(reasons) if reason.action.startswith("keep")), None)
    shape = _last_tile([chosen] if chosen else reasons)
    if shape is None:
        return
    threads = dict(chosen.numbers).get("threads") if chosen else None
    size = f"{si_text(model.footprint('shared', shape), 'B')}" + (f", {threads:g} threads" if threads else "")
    yield from _chosen_tile("shared", shape, model, size)
    grown = _cheapest_doubling("shared", shape, model, LARGEST_BLOCK_AXIS)
    if model.mem_perf("shared", shape) >= model.max_compute_perf():
        yield f"    {below} keeps up: a larger tile would save traffic that nothing waits for, and cost parallelism"
    elif grown is not None and model.footprint("shared", grown) > room:
        yield f"    full: doubling any axis would hold {si_text(model.footprint('shared', grown), 'B')} or more"
    elif threads and 2 * threads > limits.threads_per_block:
        yield f"    full: twice the outputs would take {2 * threads:g} threads of {limits.threads_per_block}"
    elif grown is not None:
        yield f"    {_TRIED_TOO}"
    for reason in reasons:
        if reason.action.startswith("variant"):
            action = reason.action.removeprefix("variant: ")
            yield from wrapped(f"{action}: {_tile_text(reason.tile, model.space)}", "    ")


def _growth(layer: str, reasons: Sequence[Reason], model: MicroModel, unit: str) -> Iterator[str]:
    """One line per step: the axis, the tile, what it holds, what it moves, and the score in words."""
    space = model.space
    steps: list[tuple[str, tuple[int, ...], float | None]] = []
    for reason in reasons:
        if isinstance(reason.tile, str) or reason.action.startswith(("keep", "variant", "full", "stop")):
            continue
        is_growth = reason.action.startswith("grow ")
        name = reason.action.removeprefix("grow ") if is_growth else "start"
        steps.append((name, reason.tile, dict(reason.numbers).get("score") if is_growth else None))
    tiles = [_tile_text(tile, space) for _, tile, _ in steps]
    column = max((len(text) for text in tiles), default=0)
    source = _source(layer, model.device)
    for (name, tile, score), text in zip(steps, tiles, strict=True):
        moved = si_text(model.traffic(tile), "B")
        line = f"    {name if score is None else f'grow {name}':10} {text:{column}}  {moved:>8} from {source}"
        if score is not None:
            line += f", saving {si_text(score, 'B')} per {unit} held"
        yield clipped(line)


def _chosen_tile(layer: str, shape: tuple[int, ...], model: MicroModel, size: str) -> Iterator[str]:
    source = _source(layer, model.device)
    fed, wanted = model.mem_perf(layer, shape), model.max_compute_perf()
    verdict = "enough for" if fed >= wanted else "short of"
    yield from wrapped(
        f"kept {_tile_text(shape, model.space)} ({size}): {source} feeds it {si_text(fed, 'FLOP/s')}, "
        f"{verdict} the {si_text(wanted, 'FLOP/s')} of the arithmetic units",
        "    ",
    )


def _shrink_steps(
    device: DeviceSpec, reasons: Sequence[Reason], space: TileSpace, before: tuple[int, ...] | None
) -> Iterator[str]:
    yield f"  Scale out over {device.unit_count} {device.unit_name}s"
    for reason in reasons:
        blocks = dict(reason.numbers).get("blocks")
        axis = "a tile"
        if before is not None and not isinstance(reason.tile, str):
            changed = [n for n, old, new in zip(space.axes, before, reason.tile, strict=True) if new < old]
            axis = " and ".join(changed) or axis
        had = f"{blocks:g} blocks leave units idle: " if blocks else ""
        yield from wrapped(
            f"{had}shrink {axis}, whose reuse is worth least, to {_tile_text(reason.tile, space)}", "    "
        )
        before = before if isinstance(reason.tile, str) else reason.tile


def _last_tile(reasons: Sequence[Reason]) -> tuple[int, ...] | None:
    return next((reason.tile for reason in reversed(reasons) if not isinstance(reason.tile, str)), None)


def _cheapest_doubling(layer: str, shape: tuple[int, ...], model: MicroModel, largest: int) -> tuple[int, ...] | None:
    """Of the tiles with one spatial axis doubled that move less, the one that holds least; None where there is none."""
    space, traffic = model.space, model.traffic(shape)
    grown = [
        (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])
        for axis in range(space.spatial_count)
        if shape[axis] < space.sizes[axis] and 2 * shape[axis] <= largest
    ]
    saving = [tile for tile in grown if model.traffic(tile) < traffic]
    return min(saving, key=lambda tile: model.footprint(layer, tile), default=None)


# The program


def _program(placed: PlacedForm, program: RProgram) -> Iterator[str]:
    form, device = placed.form, placed.device
    schedule, estimate = program.schedule, program.estimate
    blocks, units = schedule.grid_blocks(form.sizes), device.unit_count
    yield "The program"
    busiest = -(-blocks // units)
    spread = f"{busiest} for the busiest of {units} {device.unit_name}s" if blocks > 1 else "one unit works"
    balance = f"{100 * blocks / (busiest * units):.0f}% balanced"
    yield f"  {count_text(blocks, 'block')} of {count_text(schedule.threads_per_block, 'thread')}: {spread}, {balance}"
    if form.reduced and not schedule.reduce_threads:
        yield f"  a block owns its outputs and walks {', '.join(form.reduced)} alone: no partial results cross units"
    yield (
        f"  {count_text(estimate.blocks_per_unit, 'block')} at a time on a unit, "
        f"as {residency(placed, program)}; {count_text(estimate.wave_count, 'wave')}"
    )
    step = f", reduction step {sizes_text(schedule.step)}" if schedule.step else ""
    yield from wrapped(f"block tile {sizes_text(schedule.block)}{step}")
    owner = "warp" if schedule.uses_matrix else "thread"
    yield from wrapped(
        f"a {owner} computes {sizes_text(tuple(schedule.register_tile.items()))}, "
        f"about {estimate.registers} registers per thread"
    )
    if schedule.reduce_threads:
        yield f"  {sizes_text(schedule.reduce_threads)} threads share a reduction"
        yield from _row_lines(schedule, form)
    if schedule.cached:
        padding = ", ".join(f"{name} rows padded by {amount}" for name, amount in schedule.padding)
        yield from wrapped(
            f"{' and '.join(schedule.cached)} staged in {si_text(estimate.shared_bytes, 'B')} of "
            f"{scratchpad(device)}{_buffers(schedule)}; "
            + (f"{padding} against bank conflicts" if padding else _without_padding(schedule))
        )
    band = raster_axes({axis: -(-form.sizes[axis] // size) for axis, size in schedule.block})
    if schedule.raster and band:
        yield from wrapped(
            f"blocks are launched in bands, {schedule.raster} next to each other along {band[1]} and all the way down "
            f"{band[0]}: those that run together share more of what L2 holds"
        )
    waste = math.prod(
        -(-form.sizes[axis] // size) * size / form.sizes[axis] for axis, size in (*schedule.block, *schedule.step)
    )
    if waste > 1.0:
        yield f"  tiles cover {100 * (waste - 1):.1f}% more points than the operator has"


def _row_lines(schedule: TileSchedule, form: KernelForm) -> Iterator[str]:
    """Where the columns of a row lie between the statements that read them."""
    if not column_bytes_of(form):
        return
    plan = row_plan(form, math.prod(count for _, count in schedule.reduce_threads), schedule.kept_columns)
    parts = (
        (plan.register_turns, "in registers"),
        (plan.shared_turns, "in shared memory"),
        (plan.turns - plan.register_turns - plan.shared_turns, "read again by every statement"),
    )
    places = " and ".join(f"{turns} of {plan.turns} {where}" for turns, where in parts if turns)
    yield from wrapped(f"a thread takes {count_text(plan.turns, 'vector')} of {plan.vector} of a row: {places}")


def _buffers(schedule: TileSchedule) -> str:
    """Buffers by which steps are fetched ahead; empty where there are none."""
    if schedule.stages == 1:
        return ""
    past = ", copied asynchronously past the registers" if schedule.asynchronous else ""
    return f", {schedule.stages} buffers of each{past}"


def _without_padding(schedule: TileSchedule) -> str:
    swizzled = schedule.instruction.is_swizzled
    return "swizzled against bank conflicts" if swizzled else "no bank conflicts to pad against"


# Words and numbers


def _tile_text(tile: str | tuple[int, ...], space: TileSpace) -> str:
    """A tile without its axes of one."""
    if isinstance(tile, str):
        return tile
    return short_sizes(tuple(zip(space.axes, tile, strict=True)))


def _source(layer: str, device: DeviceSpec) -> str:
    """Layer that fills a layer."""
    return scratchpad(device) if layer == "registers" else layer_below(device)


# Pages by what the lanes of a device are


@dataclass(frozen=True)
class _Page:
    """Parts of pages that depend on the kind of lane: a word for the device, and sections of their own."""

    noun: str
    story: Callable[[PlacedForm, RProgram, int], Iterator[str]]
    program: Callable[[PlacedForm, RProgram], Iterator[str]]
    reasons: Callable[[PlacedForm, RProgram], Iterator[str]]


_PAGES: Mapping[str, _Page] = {
    "thread": _Page("board", _story, _program, reasons),
    "element": _Page("processor", cpu_story, cpu_program, cpu_reasons),
}
