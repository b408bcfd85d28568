"""Why a program on vectors takes as long as it does: what its stages do, in numbers.

The counterpart of the reasons of :mod:`roller.explain.pace`; the numbers are those of :mod:`sokoban.model.cpu.anatomy`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

from hal.spec.device import DeviceSpec
from roller.construct.program import RProgram
from roller.text.quantities import count_text, layer_name, si_text, three_digits, time_text, wrapped
from sokoban.kernel.placed import PlacedForm
from sokoban.model.cpu.anatomy import ROWS, CpuAnatomy, Way, cpu_anatomy, is_resident
from sokoban.model.cpu.stages import CHAIN_CYCLES, LINES_IN_FLIGHT, TILE_CYCLES, arithmetic_flops
from sokoban.model.cpu.traffic import LINES_AHEAD
from sokoban.schedule.table import one

#: Shares of the time from which on a part is named, and a stage's reasons are given.
_NAMED, _CLOSE = 0.005, 0.6

#: Losses from which on they are named.
_LOSS = 1.02


def cpu_stage_meanings(device: DeviceSpec) -> Mapping[str, str]:
    """The stages of a device with vectors in words, in the order in which they are shown."""
    first = layer_name(device.layers[1].name)
    ways = {
        below.name: f"transfers from {layer_name(below.name)} into {layer_name(above.name)}"
        for above, below in itertools.pairwise(device.layers[1:])
    }
    return {
        "compute": "the arithmetic units",
        "issue": "instructions to start",
        "l1": f"requests of {first}",
        "chain": "sums that wait for themselves",
        "drain": "pipelines that empty between register tiles",
        "latency": "lines not fetched ahead",
        "copying": "copies, while nothing is computed",
        "contention": f"lines of results that {device.unit_name}s take from each other",
        **ways,
        "block_launch": "starts of blocks",
    }


def _part_meanings(device: DeviceSpec) -> Mapping[str, str]:
    """Parts of a time, in words."""
    unit = device.unit_name
    return {
        **cpu_stage_meanings(device),
        "compute": "arithmetic",
        "uneven blocks": f"{unit}s that wait for the busiest",
        "core": f"other stages of a {unit} that it does not hide",
        "layers": f"layers outside a {unit} that it does not hide",
        "copying": "copies during which nothing is computed",
        "contention": f"{unit}s that wait for lines of results which others have fetched",
        "block_launch": "starting blocks",
        "launch": "launching",
    }


def cpu_reasons(placed: PlacedForm, program: RProgram) -> Iterator[str]:
    """Parts of the time, and why the stages that matter take what they take."""
    anatomy = cpu_anatomy(placed, program.schedule)
    yield "Why it takes that long"
    yield from wrapped(_sum_text(anatomy, program.estimate.seconds))
    stages = program.estimate.stage_seconds
    close = [stage for stage in stages if stages[stage] >= _CLOSE * max(stages.values())]
    ways = {way.below.name: way for way in anatomy.ways}
    for stage in sorted(close, key=lambda stage: -stages[stage]):
        text = _way(anatomy, ways[stage]) if stage in ways else _ARGUMENTS[stage](anatomy, stages[stage])
        yield from wrapped(f"{stage.replace('_', ' ')}: {text}")
    uneven = _uneven(anatomy)
    if uneven:
        yield from wrapped(uneven)
    if is_resident(anatomy):
        way = anatomy.ways[-1]
        tensor_bytes = sum(tensor.size_bytes for tensor in (*placed.form.expr.inputs, placed.form.expr.output))
        yield from wrapped(
            f"{layer_name(way.below.name)}: no part of it, as all tensors, {si_text(tensor_bytes, 'B')}, stay in "
            f"{layer_name(way.above.name)} from one call to the next"
        )


def _sum_text(anatomy: CpuAnatomy, seconds: float) -> str:
    """``75 µs is 61 µs of arithmetic, 9 µs of other stages of a core that it does not hide, ...``"""
    meanings = _part_meanings(anatomy.device)
    parts = [
        f"{time_text(part)} of {meanings[name]}" for name, part in anatomy.parts.items() if part >= _NAMED * seconds
    ]
    return f"{time_text(seconds)} is {' and '.join([', '.join(parts[:-1]), parts[-1]] if parts[1:] else parts)}"


def _many(count: float) -> str:
    """``1.05 million``"""
    for scale, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= scale:
            return f"{three_digits(count / scale)} {word}"
    return three_digits(count)


def _per_turn(anatomy: CpuAnatomy, total: object) -> float:
    return one(total) / max(1.0, one(anatomy.work.chain_turns))


def _has_turns(anatomy: CpuAnatomy) -> bool:
    """True if an innermost loop adds to sums that stay in registers."""
    return anatomy.tiles is not None and bool(anatomy.form.reduced)


def _compute(anatomy: CpuAnatomy, seconds: float) -> str:
    """The instructions, the lanes that hold nothing, the cores that have nothing."""
    units, unit = anatomy.device.unit_count, anatomy.device.unit_name
    text = f"{_many(one(anatomy.work.arithmetic))} vector instructions of {anatomy.lanes} lanes, {time_text(seconds)}"
    rate = arithmetic_flops(anatomy.placed)
    peak = anatomy.device.peak_flops(anatomy.placed.arithmetic_dtype)
    at = f"{100 * rate / peak:.0f}% of the peak, by what they sustain" if rate * _LOSS < peak else "the peak"
    text += f" on {count_text(units, unit)} at {at}"
    filled = _lanes_filled(anatomy)
    if filled * _LOSS < 1.0:
        text += f"; {100 * filled:.0f}% of the lanes have something to do"
    return text


def _lanes_filled(anatomy: CpuAnatomy) -> float:
    """Share of lanes that hold a result, over all register tiles."""
    if anatomy.tiles is None or not anatomy.tiles.axis:
        return 1.0
    return anatomy.form.sizes[anatomy.tiles.axis] / (one(anatomy.tiles.all_pieces) * anatomy.lanes)


def _uneven(anatomy: CpuAnatomy) -> str:
    """Loss by the blocks of the busiest unit; empty where all have as many."""
    units, blocks = anatomy.device.unit_count, anatomy.blocks
    loss = anatomy.busiest * units / blocks
    if loss < _LOSS:
        return ""
    unit = anatomy.device.unit_name
    longer = f"{100 * (loss - 1):.0f}% longer than even shares would take"
    return f"blocks: {count_text(blocks, 'block')} on {count_text(units, unit)} keep the busiest {longer}"


def _issue(anatomy: CpuAnatomy, seconds: float) -> str:
    work, device = anatomy.work, anatomy.device
    width = device.teu.issue_per_cycle or device.teu.group_size
    total, arithmetic, accesses = one(work.instructions), one(work.arithmetic), one(work.accesses)
    first = layer_name(device.layers[1].name)
    others = 100 * (total - arithmetic - accesses) / total
    text = f"{_many(total)} instructions, {three_digits(width)} a cycle: {100 * arithmetic / total:.0f}% of them "
    text += f"arithmetic, {100 * accesses / total:.0f}% requests of {first}, {others:.0f}% addresses and loops"
    return text


def _requests(anatomy: CpuAnatomy, seconds: float) -> str:
    layer = anatomy.device.layers[1]
    requests = one(anatomy.work.accesses)
    each = f"each {layer.transaction_bytes} bytes of {si_text(layer.bandwidth_bytes_per_second, 'B/s')}"
    if not _has_turns(anatomy):
        ratio = one(anatomy.work.accesses) / one(anatomy.work.arithmetic)
        return f"{_many(requests)} requests, {three_digits(ratio)} per arithmetic instruction, {each}"
    made, adds = _per_turn(anatomy, anatomy.work.accesses), _per_turn(anatomy, anatomy.work.arithmetic)
    text = f"a turn of the innermost loop makes {three_digits(made)} requests for {three_digits(adds)} arithmetic "
    text += f"instructions on average: {_many(requests)} in all, {each}"
    return text


def _chain(anatomy: CpuAnatomy, seconds: float) -> str:
    teu = anatomy.device.teu
    cycles = teu.chain_cycles or CHAIN_CYCLES
    text = f"a sum can be added to again after {three_digits(cycles)} cycles"
    if anatomy.tiles is None or not anatomy.form.reduced:
        return f"{text}, and results of a row are folded one after the other" if anatomy.tiles is None else text
    sums = one(anatomy.tiles.rows) * one(anatomy.tiles.tile_pieces)
    wanted = cycles * teu.group_size
    return f"{text}; a turn adds to {three_digits(sums)} of them, {three_digits(wanted)} would keep the units busy"


def _drain(anatomy: CpuAnatomy, seconds: float) -> str:
    tiles = one(anatomy.work.tiles)
    text = f"{_many(tiles)} register tiles, each of which takes {three_digits(TILE_CYCLES)} cycles to begin and to end"
    return f"{text}: longer steps of the sum have fewer"


def _latency(anatomy: CpuAnatomy, seconds: float) -> str:
    """Sources of the cache lines that were not prefetched."""
    return _lines_unprefetched(anatomy, {way.below.name: way.unprefetched_bytes for way in anatomy.ways})


def _lines_unprefetched(anatomy: CpuAnatomy, unprefetched_bytes: Mapping[str, float]) -> str:
    """Sources of the cache lines that were not prefetched, by the unprefetched bytes of each layer."""
    texts = []
    for way in anatomy.ways:
        lines = unprefetched_bytes[way.below.name] / way.below.transaction_bytes
        if lines >= 1.0 and way.moved_bytes > 0.0:
            longer = max(0.0, (way.below.latency_seconds or 0.0) - (way.above.latency_seconds or 0.0))
            above, below = layer_name(way.above.name), layer_name(way.below.name)
            texts.append(f"{_many(lines)} lines from {below}, each {time_text(longer)} longer than from {above}")
    most = f"a {anatomy.device.unit_name} waits for {three_digits(LINES_IN_FLIGHT)} at a time at most"
    return f"short pieces that lie apart, whose lines no prefetcher asks for: {'; '.join(texts)}; {most}"


def _copying(anatomy: CpuAnatomy, seconds: float) -> str:
    """Copies that a core makes while it does nothing else."""
    texts = [
        f"{si_text(way.copied_bytes, 'B')} from {layer_name(way.below.name)}"
        for way in anatomy.ways
        if way.copied_bytes and way.moved_bytes
    ]
    text = f"{_many(one(anatomy.work.copying))} instructions to copy operands into scratch memory"
    if texts:
        text += f", {' and '.join(texts)} of which tiles before have no turns to ask for"
    unprefetched = {way.below.name: way.copied_unprefetched_bytes for way in anatomy.ways}
    return f"{text}; {_lines_unprefetched(anatomy, unprefetched)}" if any(unprefetched.values()) else text


def _contention(anatomy: CpuAnatomy, seconds: float) -> str:
    """Lines that cores take from each other."""
    unit = anatomy.device.unit_name
    text = f"{unit}s write parts of the same rows, {_many(anatomy.contested_lines)} lines of which prefetchers of one "
    text += f"fetch while another writes them again, up to {three_digits(LINES_AHEAD)} beyond its own"
    return f"{text}; a {unit} waits for {three_digits(LINES_IN_FLIGHT)} at a time at most"


def _way(anatomy: CpuAnatomy, way: Way) -> str:
    """Bytes that come into a cache, by tensor, and how often."""
    sizes = {tensor.name: tensor.size_bytes for tensor in anatomy.form.expr.inputs}
    sizes[ROWS] = sum(sizes.values())
    above, texts = layer_name(way.above.name), []
    for name, read in sorted(way.read_bytes.items(), key=lambda each: -each[1]):
        if read < 0.01 * way.moved_bytes:
            continue
        size = sizes.get(name)
        copied = name.endswith("'")
        what = f"the copy of {name[:-1]}" if copied else name
        times = f", {three_digits(read / size)} times over" if size and read > 1.1 * size else ""
        texts.append(f"{si_text(read, 'B')} of {what}{times}")
    written = way.moved_bytes - sum(way.read_bytes.values())
    if written >= 0.01 * way.moved_bytes:
        texts.append(f"{si_text(written, 'B')} for results")
    return (
        f"into {above} and out of it go {'; '.join(texts)}; at {si_text(way.below.bandwidth_bytes_per_second, 'B/s')}"
    )


def _block_launch(anatomy: CpuAnatomy, seconds: float) -> str:
    each = time_text(anatomy.device.block_launch_seconds)
    return f"{count_text(anatomy.blocks, 'block')}, one every {each}: larger blocks start faster"


_ARGUMENTS: Mapping[str, Callable[[CpuAnatomy, float], str]] = {
    "compute": _compute,
    "issue": _issue,
    "l1": _requests,
    "chain": _chain,
    "drain": _drain,
    "latency": _latency,
    "copying": _copying,
    "contention": _contention,
    "block_launch": _block_launch,
}
