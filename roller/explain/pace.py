"""Pace of a program and what would make it faster, in words: stages, their reasons, the rivals.

The numbers are those that RATIONAL itself computed on the way (:mod:`sokoban.model.gpu.anatomy`). Reasons here are
those of lanes that are threads; what else differs by lanes is looked up in tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from hal.spec.device import DeviceSpec
from roller.construct.program import Program, RProgram
from roller.explain.cpu_pace import cpu_stage_meanings
from roller.programs import Programs
from roller.text.quantities import (
    clipped,
    count_text,
    layer_below,
    scratchpad,
    si_text,
    three_digits,
    time_text,
    wrapped,
)
from roller.text.schedules import SCHEDULE_TEXTS
from sokoban.kernel.placed import PlacedForm
from sokoban.model.cpu.anatomy import REMAINDERS as CPU_REMAINDERS
from sokoban.model.cpu.anatomy import cpu_anatomy
from sokoban.model.estimates import Estimate
from sokoban.model.gpu.anatomy import REMAINDERS, GpuAnatomy, gpu_anatomy
from sokoban.model.gpu.breakdown import STAGES
from sokoban.model.gpu.fetch import fetch
from sokoban.model.gpu.issue import ARITHMETIC
from sokoban.model.gpu.occupancy import blocks_per_unit
from sokoban.model.gpu.transactions import stored_transactions
from sokoban.schedule.table import ScheduleTable, one, product
from sokoban.schedule.tile import TileSchedule

#: Error of predicted times, about: the medians of whole measured spaces are 9 and 11 % (docs/accuracy.md).
MODEL_ERROR = 0.10

STAGE_MEANING = {
    "compute": "the arithmetic units",
    "issue": "issuing instructions",
    "shared": "shared memory and the load/store unit",
    "l2": "the way to the units",
    "dram": "the way from DRAM",
    "latency": "one block by itself, its waiting included",
    "block_launch": "starting the blocks",
}

#: Stages in words, by what the lanes of a device are.
_STAGE_MEANINGS: Mapping[str, Callable[[DeviceSpec], Mapping[str, str]]] = {
    "thread": lambda device: STAGE_MEANING,
    "element": cpu_stage_meanings,
}

_PART_MEANING = {
    "l2": "of L2",
    "dram": "of DRAM",
    "unhidden": "of other stages that it does not hide",
    "waiting": "of waiting that no other block fills",
    "stores": "of storing results",
    "finishing": "between the last step of a block and the first of the next, final statements included",
    "dram overlap": "of DRAM that the units do not hide",
    "hoisting": "risked by operands hoisted without registers",
    "power limit": "that the power limit adds",
    "launch": "of launching",
}

#: Shares of the time from which on a part is named, and a stage's reasons are given.
_NAMED, _CLOSE = 0.005, 0.6

#: Losses from which on they are named.
_LOSS = 1.02


def prediction(placed: PlacedForm, program: RProgram) -> Iterator[str]:
    """The predicted time, a bar per stage, and the rates reached."""
    form, device = placed.form, placed.device
    estimate, meanings = program.estimate, _STAGE_MEANINGS[device.teu.lane](device)
    yield (
        f"Predicted {time_text(estimate.seconds)}, {time_text(device.launch_overhead_seconds)} of it the launch; "
        f"{meanings[estimate.bound]} set the pace"
    )
    yield from stage_bars(estimate, meanings)
    rate, name = placed.ordinary_rate if not program.schedule.uses_matrix else placed.rate
    useful = f"{si_text(form.compulsory_bytes / estimate.seconds, 'B/s')} of useful traffic"
    share = 100 * form.compulsory_bytes / estimate.seconds / device.dram.bandwidth_bytes_per_second
    traffic = f"{useful}, {share:.0f}% of {layer_below(device)}'s rate"
    if estimate.stage_seconds.get(device.dram.name) == 0.0:
        traffic = f"{useful}, none of it from {layer_below(device)}"
    if form.flops:
        done = form.flops / estimate.seconds
        yield f"  in all {si_text(done, 'FLOP/s')}, {100 * done / rate:.0f}% of what {name} sustains, and {traffic}"
    else:
        yield f"  in all {traffic}"


def stage_bars(estimate: Estimate, meanings: Mapping[str, str] = STAGE_MEANING) -> Iterator[str]:
    """A bar per stage, in the order of ``meanings``."""
    longest = max(estimate.stage_seconds.values()) or 1.0
    for stage in meanings:
        seconds = estimate.stage_seconds[stage]
        if seconds == 0.0:
            yield f"  {stage:12} {'-':>8}"
            continue
        bar = "█" * round(30 * seconds / longest) or "▏"
        yield f"  {stage:12} {time_text(seconds):>8}  {bar:30}  {meanings[stage]}"


# Reasons


def reasons(placed: PlacedForm, program: RProgram) -> Iterator[str]:
    """Parts of the time, and why the stages that matter take what they take."""
    seconds = program.estimate.seconds
    anatomy = gpu_anatomy(placed, program.schedule)
    yield "Why it takes that long"
    yield from wrapped(_sum_text(anatomy, seconds))
    arguments = {
        "compute": _compute,
        "issue": _issue,
        "shared": _shared,
        "l2": _l2,
        "dram": _dram,
        "latency": _latency,
        "block_launch": _block_launch,
    }
    stages = program.estimate.stage_seconds
    close = [stage for stage in STAGES if stages[stage] >= _CLOSE * max(stages.values())]
    for stage in sorted(close, key=lambda stage: -stages[stage]):
        yield from wrapped(f"{stage.replace('_', ' ')}: {arguments[stage](anatomy, program)}")
    for remark in _remarks(anatomy):
        yield from wrapped(remark)


def _sum_text(anatomy: GpuAnatomy, seconds: float) -> str:
    """``752 µs is 668 µs of compute, 80 µs of other stages that it does not hide, ...``"""
    parts = []
    for name, part in anatomy.parts.items():
        if part >= _NAMED * seconds:
            meaning = _PART_MEANING.get(name) or "of " + name.replace("_", " ")
            if name == "compute":
                meaning += " at the peak clock"
            parts.append(f"{time_text(part)} {meaning}")
    return f"{time_text(seconds)} is {' and '.join([', '.join(parts[:-1]), parts[-1]] if parts[1:] else parts)}"


def _compute(anatomy: GpuAnatomy, program: RProgram) -> str:
    """The arithmetic at the peak, and every factor by which this program takes longer."""
    table, occupancy, device = anatomy.table, anatomy.step.occupancy, anatomy.device
    seconds = program.estimate.stage_seconds["compute"]
    if one(table.warp_tile):
        return f"{time_text(seconds)} on the matrix units"
    blocks, units = one(table.block_count), device.unit_count
    block_places = one(anatomy.step.occupancy.rounds) * anatomy.running
    group = device.teu.group_size
    busiest = math.ceil(one(occupancy.warps) * anatomy.running / group)
    losses = {
        "tiles past the edges": _covered(anatomy),
        "partial warps": one(occupancy.warps) * device.warp_lanes / one(table.threads_per_block),
        f"{count_text(int(one(occupancy.warps)) * anatomy.running, 'warp')} on {group} schedulers": (
            busiest * group / (one(occupancy.warps) * anatomy.running)
        ),
        f"{count_text(int(blocks), 'block')} on {units} {device.unit_name}s": block_places * units / blocks,
    }
    raw = one(occupancy.rounds * table.step_count) * anatomy.step_busy["compute"]
    if seconds > raw * _LOSS:
        losses["the clock under the power limit"] = seconds / raw
    named = [f"{name} {100 * (loss - 1):+.0f}%" for name, loss in losses.items() if loss >= _LOSS]
    ideal = seconds / math.prod(losses.values())
    return f"{time_text(ideal)} at the peak" + (f"; {', '.join(named)} make it {time_text(seconds)}" if named else "")


def _covered(anatomy: GpuAnatomy) -> float:
    """Points that the tiles cover over those that the operator has."""
    table, form = anatomy.table, anatomy.form
    points = one(table.block_count * product(table.block.values(), 1) * table.reduced_points)
    return points / math.prod(form.sizes[axis] for axis in (*form.spatial, *form.reduced))


def _issue(anatomy: GpuAnatomy, program: RProgram) -> str:
    counts = anatomy.instructions
    total = sum(counts.values())
    others = ", ".join(f"{three_digits(count)} {name}" for name, count in counts.items() if name != ARITHMETIC)
    share = 100 * counts[ARITHMETIC] / total
    return f"a thread issues {three_digits(total)} instructions per step, {share:.0f}% of them arithmetic: {others}"


def _shared(anatomy: GpuAnatomy, program: RProgram) -> str:
    """Passes of the port per warp and step, by what needs them."""
    warps = one(anatomy.step.occupancy.warps)
    texts = []
    for load, part in anatomy.step.fetches.items():
        read = anatomy.step.reads.get(load)
        if read is not None and not one(anatomy.table.warp_tile):
            passes, instructions = one(read.passes), one(read.instructions)
            each = passes / instructions if instructions else 1.0
            width = int(one(read.width))
            how = f" of {width}" if width > 1 else ""
            conflict = f" with {three_digits(each)} passes each" if each >= _LOSS else ""
            texts.append(
                f"{three_digits(passes)} for {three_digits(instructions)} reads{how} from {load.tensor}{conflict}"
            )
        if one(anatomy.table.cached[load.tensor]):
            texts.append(f"{three_digits(one(part.wavefronts) / warps)} to fetch {load.tensor}")
    homeless = "accumulators in local memory" if one(anatomy.step.nest.local) else "spilled values"
    if one(anatomy.step.nest.local) or one(anatomy.step.occupancy.spilled) > 0:
        texts.append(f"the rest for {homeless}")
    busy = anatomy.step_busy["shared"]
    return f"a step keeps the port busy for {time_text(busy)}; passes per warp: {', '.join(texts) or 'none'}"


def _l2(anatomy: GpuAnatomy, program: RProgram) -> str:
    texts = []
    for load, part in anatomy.step.fetches.items():
        useful = one(part.elements) * anatomy.form.expr.tensor_by_name[load.tensor].element_bytes
        wasted = one(part.bytes) / useful
        more = f" ({three_digits(wasted)} times what it uses: rows end within transactions)" if wasted >= 1.1 else ""
        texts.append(f"{si_text(one(part.bytes), 'B')} of {load.tensor}{more}")
    layer = anatomy.device.l2 or anatomy.device.dram
    output = anatomy.form.expr.output
    stored = one(stored_transactions(anatomy.table, anatomy.device)) * layer.transaction_bytes / output.element_bytes
    text = f"a step of a block moves {' and '.join(texts)}"
    if stored >= 1.1:
        text += f"; its stores touch {three_digits(stored)} times the bytes of the result, in pieces of transactions"
    return text


def _dram(anatomy: GpuAnatomy, program: RProgram) -> str:
    texts = []
    for load, moved in anatomy.dram_bytes.items():
        size = anatomy.form.expr.tensor_by_name[load.tensor].size_bytes
        times = f", {three_digits(moved / size)} times over, as L2 does not keep it" if moved > 1.1 * size else ""
        texts.append(f"{si_text(moved, 'B')} of {load.tensor}{times}")
    texts.append(f"{si_text(anatomy.form.expr.output.size_bytes, 'B')} of results")
    rate = si_text(anatomy.device.dram.bandwidth_bytes_per_second, "B/s")
    slower = (
        program.estimate.stage_seconds["dram"] * anatomy.device.dram.bandwidth_bytes_per_second / anatomy.dram_traffic
    )
    rows = f", {three_digits(slower)} times as long, as every lane opens a row of its own" if slower >= _LOSS else ""
    return f"{'; '.join(texts)}; at {rate}{rows}"


def _latency(anatomy: GpuAnatomy, program: RProgram) -> str:
    """Number of blocks that would fill a block's waiting, and of those that there are."""
    running = anatomy.running
    work = anatomy.step_alone - anatomy.step_waiting
    wanted = math.ceil(anatomy.step_alone / work) if work > 0 else 0
    text = f"a step of one block is {time_text(work)} of work and {time_text(anatomy.step_waiting)} of waiting"
    if running >= wanted:
        return f"{text}; the {count_text(running, 'block')} of a unit fill it but for a rest"
    if one(anatomy.step.occupancy.resident) > running:
        return f"{text}: {wanted} blocks at a time would fill it, but a unit gets {running} in all"
    limit = residency(anatomy.step.placed, program)
    return f"{text}: {wanted} blocks at a time would fill it, {running} fit, as {limit}"


def _block_launch(anatomy: GpuAnatomy, program: RProgram) -> str:
    blocks = int(one(anatomy.table.block_count))
    each = time_text(anatomy.device.block_launch_seconds)
    return f"{count_text(blocks, 'block')}, one every {each}: larger blocks start faster"


def _remarks(anatomy: GpuAnatomy) -> Iterator[str]:
    """Effects of compilers on the program, where they cost."""
    table, nest, occupancy = anatomy.table, anatomy.step.nest, anatomy.step.occupancy
    if one(table.warp_tile):
        return
    granted, spilled = int(one(occupancy.registers)), int(one(occupancy.spilled))
    if spilled:
        threads = int(one(table.threads_per_block))
        yield (
            f"registers: a thread needs {anatomy.needed_registers} and gets {granted} in a block of {threads}: "
            f"{spilled} values spill to local memory"
        )
    if one(nest.local):
        count = int(one(table.accumulators))
        yield f"loops: the {count} accumulators live in local memory, as a loop that indexes them is not unrolled"
    if anatomy.step.reads and one(nest.unrolled_points) < anatomy.points:
        sizes = {axis: (int(one(size)), int(one(table.step[axis]))) for axis, size in nest.unrolled.items()}
        body = ", ".join(
            f"{axis} {part} of {axis_size}" for axis, (part, axis_size) in sizes.items() if part < axis_size
        )
        shared = f"{three_digits(one(nest.unrolled_points))} of {three_digits(anatomy.points)} points share their reads"
        if body:
            yield f"loops: unrolled along {body}: {shared}"


def residency(placed: PlacedForm, program: RProgram) -> str:
    """Which limit of a unit keeps another block out, as the end of a sentence: ``65536 registers allow``."""
    device = placed.device
    schedule, estimate, limits = program.schedule, program.estimate, device.limits
    table = ScheduleTable.of(placed.form, [schedule])

    def with_use(registers: int, shared: int) -> int:
        one = blocks_per_unit(table, device, table.block_count * 0 + registers, table.block_count * 0 + shared)
        return int(one[0])

    if with_use(estimate.registers, 0) == estimate.blocks_per_unit < with_use(1, 0):
        return f"{limits.registers_per_unit} registers allow"
    if with_use(1, estimate.shared_bytes) == estimate.blocks_per_unit < with_use(1, 0):
        return f"{si_text(limits.shared_bytes_per_unit, 'B')} of {scratchpad(device)} allow"
    if estimate.blocks_per_unit == limits.blocks_per_unit:
        return "no unit holds more"
    return f"{limits.threads_per_unit} threads allow"


# All candidates


def stage_times(programs: Sequence[Program], rank: int) -> Iterator[str]:
    """One row per candidate: the prediction and every stage; ``*`` marks the one that bounds it."""
    yield "Times of every stage, * the one that sets the pace"
    stages = tuple(programs[0].estimate.stage_seconds)
    names = ["launch" if stage == "block_launch" else stage for stage in stages]
    yield f"  {'':4} {'predicted':>9}  " + " ".join(f"{name:>9}" for name in names).rstrip()
    for position, program in enumerate(programs, start=1):
        estimate = program.estimate
        cells = [
            f"{time_text(estimate.stage_seconds[stage]) if estimate.stage_seconds[stage] else '-':>8}"
            + ("*" if stage == estimate.bound else " ")
            for stage in stages
        ]
        mark = "→" if position == rank else " "
        yield f"  {mark}{position:3} {time_text(estimate.seconds):>9}  {' '.join(cells)}".rstrip()


def rivals(programs: Programs, rank: int, ranked: Sequence[Program]) -> Iterator[str]:
    """One row per candidate: the difference in time, the stage behind it, the schedule."""
    chosen = ranked[rank - 1]
    lane = programs.device.teu.lane
    scored = programs.constructed_count + programs.searched_count + sum(each.scored for each in programs.considered)
    yield f"Its rivals, the best of {scored} programs: what each gains or loses, and where"
    rows = []
    for position, program in enumerate(ranked, start=1):
        mark = "→" if position == rank else " "
        change = "" if position == rank else _change(programs, program, chosen)
        rows.append(
            (f"{mark}{position:3} {time_text(program.estimate.seconds):>8}  {change}", schedule_text(program, lane))
        )
    column = max(len(head) for head, _ in rows)
    for head, text in rows:
        yield clipped(f"  {head:{column}}  {text}")
    yield from _alike(programs, ranked)


def _alike(programs: Programs, ranked: Sequence[Program]) -> Iterator[str]:
    """Programs that the model cannot tell from the best one, and which of them asks least of what it does not know."""
    most = ranked[0].estimate.seconds * (1.0 + MODEL_ERROR)
    alike = [
        (rank, program)
        for rank, program in enumerate(ranked, start=1)
        if isinstance(program, RProgram) and program.estimate.seconds <= most
    ]
    if programs.device.teu.lane != "thread" or len(alike) < 2:
        return
    wastes = [_wastes(program, programs.device) for _, program in alike]
    threads = [program.main.tiles.threads_per_block for _, program in alike]
    best = min(range(len(alike)), key=lambda i: (round(sum(wastes[i]), 3), -threads[i]))
    idle, unused = wastes[best]
    yield from wrapped(
        f"{len(alike)} of them lie within {100 * MODEL_ERROR:.0f} % of the best, about the model's own error: it "
        f"cannot tell them apart. Rank {alike[best][0]} wastes least: {count_text(threads[best], 'thread')} a block, "
        f"{100 * idle:.0f} % of its lanes idle, {100 * unused:.0f} % of its transactions unused"
    )


def _wastes(program: RProgram, device: DeviceSpec) -> tuple[float, float]:
    """Shares of the lanes of a block's warps that have no thread, and of the bytes of a step's transactions that no
    thread asks for."""
    tiles, lanes = program.main.tiles, device.warp_lanes
    table = ScheduleTable.of(program.form, [tiles])
    parts = [(load, fetch(table, load, device)) for load in program.form.body_loads]
    size = program.form.expr.tensor_by_name
    asked = sum(float(part.elements[0]) * size[load.tensor].element_bytes for load, part in parts)
    moved, threads = sum(float(part.bytes[0]) for _, part in parts), tiles.threads_per_block
    return 1.0 - threads / (-(-threads // lanes) * lanes), max(0.0, 1.0 - asked / moved) if moved else 0.0


def _change(programs: Programs, program: Program, chosen: Program) -> str:
    """``+4.2%, compute +93 µs``: the difference in time, and the stage behind it."""
    ours, theirs = chosen.estimate, program.estimate
    difference = theirs.seconds - ours.seconds
    percent = 100 * difference / ours.seconds
    if abs(percent) < 0.05:
        return "equal"
    slower = program if difference > 0 else chosen
    stage = slower.estimate.bound
    change = theirs.stage_seconds[stage] - ours.stage_seconds[stage]
    if change * difference > 0 and abs(change) >= 0.2 * abs(difference):
        return f"{percent:+.1f}%, {_signed(stage, change)}"
    if not (isinstance(program, RProgram) and isinstance(chosen, RProgram)):
        return f"{percent:+.1f}%"
    # The stage that sets the pace is the same in both: what it does not hide of the others makes the difference.
    parts_of, remainders = _PARTS[programs.device.teu.lane]
    mine, other = (parts_of(programs.placed, each.main.tiles) for each in (chosen, program))
    changes = {name: other.get(name, 0.0) - mine.get(name, 0.0) for name in (*remainders, *ours.stage_seconds)}
    part = (max if difference > 0 else min)(changes, key=lambda name: changes[name])
    return f"{percent:+.1f}%, {_signed(part, changes[part])}"


#: What the predicted time of a program consists of, and those parts that are no stages, by what the lanes are.
_PARTS: Mapping[str, tuple[Callable[[PlacedForm, TileSchedule], Mapping[str, float]], tuple[str, ...]]] = {
    "thread": (lambda placed, schedule: gpu_anatomy(placed, schedule).parts, REMAINDERS),
    "element": (lambda placed, schedule: cpu_anatomy(placed, schedule).parts, CPU_REMAINDERS),
}


def _signed(stage: str, seconds: float) -> str:
    return f"{stage.replace('_', ' ')} {'+' if seconds >= 0 else '−'}{time_text(abs(seconds))}"


def schedule_text(program: Program, lane: str = "thread") -> str:
    """``block m=64 n=64 · thread m=4 n=8 · step k=8``; of several kernels how they came about. ``lane``: what the lanes
    of the device are."""
    if not isinstance(program, RProgram):
        if len(program.parts) == 1:
            return program.policy
        times = " + ".join(time_text(part.estimate.seconds) for part in program.parts)
        return f"{program.policy}: {times}"
    return SCHEDULE_TEXTS[lane](program.main.tiles)
