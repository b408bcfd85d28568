"""The construction told in words: what was tried, what decided, what limits the result."""

from __future__ import annotations

from collections.abc import Iterator

from hal import DeviceSpec
from roller.construct import Construction, Reason, RProgram
from roller.rtile import TileSpace
from sokoban import STAGES, KernelForm, statement_text

_STAGE_MEANING = {
    "compute": "the arithmetic units",
    "shared": "shared memory",
    "l2": "the way from L2 to the units",
    "dram": "DRAM",
    "latency": "waiting for memory, step by step",
    "block_launch": "starting the blocks",
}


def explain(construction: Construction, rank: int = 1) -> str:
    """A page on one program of a construction: the operator, the steps, the schedule, the times, the rivals."""
    return "\n".join(_lines(construction, rank)) + "\n"


def _lines(construction: Construction, rank: int) -> Iterator[str]:
    form, device = construction.form, construction.device
    program = construction.programs[rank - 1]
    yield f"{form.expr.name} on {device.title} ({device.name})"
    yield ""
    yield from _operator(form, device)
    yield ""
    yield f"How rank {rank} was constructed ({program.policy}, tensor padding up to {program.epsilon:g})"
    for number, reason in enumerate(program.reasons, start=1):
        yield f"  {number:2}. {_step(reason, TileSpace.of(form))}"
    yield ""
    yield from _schedule(form, program)
    yield ""
    yield from _times(form, device, program)
    yield ""
    yield from _rivals(construction, rank)


def _operator(form: KernelForm, device: DeviceSpec) -> Iterator[str]:
    for statement in form.source.statements:
        yield f"  {statement_text(statement)}"
    yield "  axes " + ", ".join(f"{axis.name}={axis.size}" for axis in form.source.axes)
    for name, parts in form.fused:
        yield f"  {' and '.join(parts)} are adjacent in every tensor and fuse into {name}={form.sizes[name]}"
    size_bytes = sum(tensor.size_bytes for tensor in (*form.expr.inputs, form.expr.output))
    flops = form.flops
    rate = device.sustained_flops("float32")
    compute, memory = flops / rate, size_bytes / device.dram.bandwidth_bytes_per_second
    yield (
        f"  {_si(flops, 'FLOP')} on at least {_si(size_bytes, 'B')}: {flops / size_bytes:.1f} FLOP per byte, "
        f"the board balances at {rate / device.dram.bandwidth_bytes_per_second:.1f}"
    )
    bound = "arithmetic" if compute > memory else "memory"
    yield f"  so {bound} bounds it: {_time(max(compute, memory))} at best in float32"


def _step(reason: Reason, space: TileSpace) -> str:
    tile = reason.tile
    if not isinstance(tile, str):
        tile = " ".join(f"{axis}={size}" for axis, size in zip(space.axes, tile, strict=True))
    numbers = ", ".join(f"{name} {_number(value)}" for name, value in reason.numbers)
    return f"{reason.layer:9}  {tile:40}  {reason.action}" + (f" ({numbers})" if numbers else "")


def _schedule(form: KernelForm, program: RProgram) -> Iterator[str]:
    schedule, estimate = program.schedule, program.estimate
    blocks = schedule.grid_blocks(form.sizes)
    yield "The program"
    yield f"  {blocks} blocks of {schedule.threads_per_block} threads; {estimate.blocks_per_unit} blocks share a unit, {estimate.wave_count} waves"
    yield f"  block tile {_sizes(schedule.block)}" + (f", reduction step {_sizes(schedule.step)}" if schedule.step else "")
    owner = "warp" if schedule.instruction != "fma" else "thread"
    yield f"  a {owner} computes {_sizes(tuple(schedule.register_tile.items()))}, about {estimate.registers} registers per thread"
    if schedule.reduce_threads:
        yield f"  threads along the reduction: {_sizes(schedule.reduce_threads)}"
    if schedule.cached:
        padding = ", ".join(f"{name} rows padded by {amount}" for name, amount in schedule.padding)
        yield (
            f"  {', '.join(schedule.cached)} staged in {estimate.shared_bytes} bytes of shared memory"
            + (f"; {padding} against bank conflicts" if padding else "; no bank conflicts to pad against")
        )
    waste = 1.0
    for axis, block in (*schedule.block, *schedule.step):
        waste *= -(-form.sizes[axis] // block) * block / form.sizes[axis]
    if waste > 1.0:
        yield f"  tiles cover {100 * (waste - 1):.1f}% more points than the operator has"


def _times(form: KernelForm, device: DeviceSpec, program: RProgram) -> Iterator[str]:
    estimate = program.estimate
    yield f"Predicted {_time(estimate.seconds)}, {_time(device.launch_overhead_seconds)} of it the launch; {_STAGE_MEANING[estimate.bound]} set the pace"
    longest = max(estimate.stage_seconds.values()) or 1.0
    for stage in STAGES:
        seconds = estimate.stage_seconds[stage]
        bar = "█" * round(30 * seconds / longest)
        yield f"  {stage:12} {_time(seconds):>10}  {bar}"
    rate = form.flops / estimate.seconds
    yield f"  {_si(rate, 'FLOP/s')}, {100 * rate / device.peak_flops('float32'):.0f}% of the float32 peak"


def _rivals(construction: Construction, rank: int) -> Iterator[str]:
    yield f"Its rivals ({construction.considered} programs considered)"
    for position, program in enumerate(construction.programs, start=1):
        mark = "→" if position == rank else " "
        schedule = program.schedule
        yield (
            f"  {mark}{position:2} {_time(program.estimate.seconds):>10}  {program.estimate.bound:12}"
            f" block {_sizes(schedule.block)} thread {_sizes(tuple(schedule.register_tile.items()))}"
            + (f" step {_sizes(schedule.step)}" if schedule.step else "")
        )


def _sizes(pairs: tuple[tuple[str, int], ...]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in pairs)


def _time(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _si(value: float, unit: str) -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) >= 1e4 or value != int(value) else str(int(value))
