"""The page of a program whose lanes are elements of vectors: how it was constructed, what it is, why it takes so long.

The counterpart of what :mod:`roller.explain.page` and :mod:`roller.explain.pace` say of threads; nothing is decided
here either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from roller.construct.performance import MicroModel
from roller.construct.program import Reason, RProgram
from roller.construct.rtile import TileSpace
from roller.text.quantities import (
    clipped,
    count_text,
    layer_below,
    layer_name,
    short_sizes,
    si_text,
    sizes_text,
    wrapped,
)
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.model.cpu.anatomy import CpuAnatomy, cpu_anatomy, lane_counts
from sokoban.model.cpu.work import copies_of
from sokoban.schedule.cpu_tiles import PARTIAL_SUMS, CpuTiles, in_panels, lane_axis, vector_axis
from sokoban.schedule.table import one
from sokoban.schedule.tile import TileSchedule

_POLICY_MEANING = {
    "scale up": (
        "outputs share operands: a register tile is vectors along one axis and rows along others, blocks of such tiles "
        "stay in a core's own cache, and both grow along the axis whose growth saves most traffic"
    ),
    "element-wise": "nothing is read twice, so no tile saves traffic: vectors of neighbours, in blocks for every core",
    "rows": "a core has whole rows: what it reads for one reduction it still has for the next and for the results",
}

_UNPADDED = "nothing is padded: what whole tiles leave over of an axis gets tiles of its own size"

_TRIED_TOO = "not full: of all tiles on the way the predicted times decide"

# The construction


def cpu_story(placed: PlacedForm, program: RProgram, rank: int) -> Iterator[str]:
    """Construction of a program, from the reasons that it recorded."""
    yield f"How rank {rank} was constructed: {program.policy}"
    yield from wrapped(_POLICY_MEANING[program.policy])
    yield from wrapped(_UNPADDED)
    form, device = placed.form, placed.device
    space = TileSpace.of(form)
    rate = placed.rate.flops
    model = MicroModel(space, device, rate, float(max(1, form.body_operations)))
    steps = {
        layer: [reason for reason in program.reasons if reason.layer == layer] for layer in ("registers", "shared")
    }
    yield ""
    if steps["shared"]:
        yield from _register_steps(program, steps["registers"], model)
        yield ""
        yield from _block_steps(program, steps["shared"], model)
        return
    for reason in program.reasons:
        yield from wrapped(f"{reason.layer}: {reason.action} ({reason.tile})")


def _register_steps(program: RProgram, reasons: Sequence[Reason], model: MicroModel) -> Iterator[str]:
    form, device = model.space.form, model.device
    lanes = PlacedForm(form, device).vector_lanes
    room = device.limits.registers_per_thread_usable // device.teu.lanes
    yield f"  Registers, the tile of an innermost loop: room for {count_text(room, 'vector')} of {lanes} lanes"
    yield from _growth(reasons, model, "caches", "value")
    vectors = program.estimate.registers // lanes
    tile = short_sizes(tuple(program.schedule.register_tile.items()))
    yield from wrapped(f"kept {tile}: {vectors} of {count_text(room, 'vector')}, operands among them", "    ")
    least = _one_more_row(program.schedule, form, lanes)
    if least > room:
        yield f"    full: one more row would take {least}"
    else:
        yield f"    {_TRIED_TOO}"


def _one_more_row(schedule: TileSchedule, form: KernelForm, lanes: int) -> int:
    """Vectors of the smallest register tile with a row more."""
    tile = {axis: min(size, form.sizes[axis]) for axis, size in schedule.register_tile.items()}
    along = vector_axis(form.final.axes, tile, lanes)
    vectors = len(lane_counts(tile[along], lanes))
    rows = math.prod(size for axis, size in tile.items() if axis != along)
    longest = max((size for axis, size in tile.items() if axis != along), default=1)
    return (rows // longest * (longest + 1) + 1) * vectors + 1


def _block_steps(program: RProgram, reasons: Sequence[Reason], model: MicroModel) -> Iterator[str]:
    device, unit = model.device, model.device.unit_name
    room = si_text(device.limits.shared_bytes_per_block, "B")
    yield f"  {layer_name(device.shared.name)}, the tiles of one block: room for {room}"
    walk, choice = reasons[:-1], reasons[-1]
    yield from _growth(walk, model, layer_below(device), "byte")
    shape = choice.tile
    assert not isinstance(shape, str)
    footprint = si_text(model.footprint("shared", shape), "B")
    tile = short_sizes(tuple(zip(model.space.axes, shape, strict=True)))
    fed, wanted = model.mem_perf("shared", shape), model.max_compute_perf()
    verdict = "enough for" if fed >= wanted else "short of"
    yield from wrapped(
        f"kept {tile} ({footprint}): {layer_below(device)} feeds it {si_text(fed, 'FLOP/s')}, {verdict} the "
        f"{si_text(wanted, 'FLOP/s')} of the arithmetic units",
        "    ",
    )
    blocks = program.schedule.grid_blocks(model.space.form.sizes)
    if fed >= wanted:
        yield f"    {layer_below(device)} keeps up: a larger block would save traffic that nothing waits for"
    elif blocks < 2 * device.unit_count:
        yield f"    {count_text(blocks, 'block')}: larger ones would leave some of {device.unit_count} {unit}s without"
    else:
        yield f"    {_TRIED_TOO}"
    yield from wrapped(f"{_packing(choice.action)}; the other choices are among the rivals", "    ")


def _packing(action: str) -> str:
    """Reason ``pack A, B`` of construction, in words."""
    names = action.removeprefix("pack ")
    if names == "nothing":
        return "nothing is packed: operands are read where they lie"
    return f"packed {' and '.join(names.split(', '))}: copied in the order in which the innermost loop reads"


def _growth(reasons: Sequence[Reason], model: MicroModel, source: str, unit: str) -> Iterator[str]:
    """One line per step: what was done, the tile, what it moves, and the score in words."""
    rows = []
    for reason in reasons:
        assert not isinstance(reason.tile, str)
        text = short_sizes(tuple(zip(model.space.axes, reason.tile, strict=True)))
        moved = f"{si_text(model.traffic(reason.tile), 'B'):>8} from {source}"
        score = dict(reason.numbers).get("score")
        saving = f", saving {si_text(score, 'B')} per {unit} held" if score is not None and score > 0 else ""
        rows.append((reason.action, text, moved + saving))
    columns = [max((len(row[place]) for row in rows), default=0) for place in (0, 1)]
    for action, text, moved in rows:
        yield clipped(f"    {action:{columns[0]}}  {text:{columns[1]}}  {moved}")


# The program


def cpu_program(placed: PlacedForm, program: RProgram) -> Iterator[str]:
    """The program: its blocks, its register tile in vectors, what it copies."""
    anatomy, device = cpu_anatomy(placed, program.schedule), placed.device
    blocks, units, unit = anatomy.blocks, device.unit_count, device.unit_name
    yield "The program"
    spread = f"{anatomy.busiest} for the busiest of {count_text(units, unit)}" if blocks > 1 else f"one {unit} works"
    yield f"  {count_text(blocks, 'block')}: {spread}, {100 * blocks / (anatomy.busiest * units):.0f}% balanced"
    if anatomy.tiles is None:
        yield from _row_lines(anatomy)
        return
    yield from _tile_lines(anatomy, anatomy.tiles, program.schedule)


def _row_lines(anatomy: CpuAnatomy) -> Iterator[str]:
    form, lanes, unit = anatomy.form, anatomy.lanes, anatomy.device.unit_name
    along = lane_axis(form)
    walks = len(form.reductions) + 1
    yield f"  a {unit} works on one block at a time, row by row: no partial results cross {unit}s"
    if along:
        yield from wrapped(f"{lanes} lanes lie along {along}: each reduces a row of its own")
    else:
        shared = f"{lanes} lanes share a row, {PARTIAL_SUMS} vectors of partial results wide, folded at its end"
        yield from wrapped(shared)
    yield f"  a row is walked {walks} times: once for each reduction, and once for the results"


def _tile_lines(anatomy: CpuAnatomy, tiles: CpuTiles, schedule: TileSchedule) -> Iterator[str]:
    form, device = anatomy.form, anatomy.device
    unit = device.unit_name
    if form.reduced:
        walk = f"a {unit} works on one block at a time and walks {', '.join(form.reduced)} alone"
        yield from wrapped(f"{walk}: no partial results cross {unit}s")
    block = tuple((axis, int(one(size))) for axis, size in tiles.block.items())
    yield from wrapped(f"block tile {sizes_text(block) or 'of one'}{_steps_text(anatomy, tiles)}")
    if tiles.axis:
        yield from wrapped(_register_text(anatomy, tiles, schedule))
    partial_tiles = [
        f"{axis} is {size // tile_size} x {tile_size} + {size % tile_size}"
        for axis, tile_size in ((axis, int(one(tile))) for axis, tile in tiles.tile.items())
        if (size := form.sizes[axis]) % tile_size
    ]
    if partial_tiles:
        yield from wrapped(f"tiles of their own size for what is left over: {', '.join(partial_tiles)}")
    yield from _copies(anatomy, tiles)


def _steps_text(anatomy: CpuAnatomy, tiles: CpuTiles) -> str:
    steps = int(one(tiles.steps)) if anatomy.form.reduced else 1
    if steps == 1:
        return ""
    step = sizes_text(tuple((axis, int(one(size))) for axis, size in tiles.step.items()))
    return f", in {steps} reduction steps of {step}: partial sums rest in the output between them"


def _register_text(anatomy: CpuAnatomy, tiles: CpuTiles, schedule: TileSchedule) -> str:
    """``register tile m=7 n=48: lanes along n, 3 vectors of 16 in each of 7 rows; 21 sums, 25 of 31 registers``"""
    device, lanes = anatomy.device, anatomy.lanes
    tile = tuple((axis, int(one(size))) for axis, size in tiles.tile.items())
    counts = lane_counts(dict(tile)[tiles.axis], lanes)
    full_vectors, partial = [count for count in counts if count == lanes], [count for count in counts if count < lanes]
    vectors = f"{count_text(len(full_vectors), 'vector')} of {lanes}" if full_vectors else ""
    if partial:
        vectors += (" and " if full_vectors else "") + f"one of {' and one of '.join(map(str, partial))}"
    rows, used = int(one(tiles.rows)), int(one(anatomy.stages.registers)) // lanes
    room = device.limits.registers_per_thread_usable // device.teu.lanes
    sums = "sums" if anatomy.form.reduced else "results"
    text = f"register tile {short_sizes(tile)}: lanes along {tiles.axis}, {vectors}"
    text += f" in each of {rows} rows" if rows > 1 else ""
    text += f"; {len(counts) * rows} vectors of {sums}, {used} of {room} registers"
    spilled = int(one(anatomy.stages.spilled))
    return text + (f", {spilled} too many" if spilled else "")


def _copies(anatomy: CpuAnatomy, tiles: CpuTiles) -> Iterator[str]:
    """Packed operands: how they lie, and how often they are copied."""
    copies = copies_of(tiles)
    for load, depth in copies.items():
        loops = tiles.tile_loops[: int(one(depth))]
        walked = [axis for axis in loops if one(tiles.tiles_per_block[axis]) > 1]
        often = f"anew for every tile along {' and '.join(walked)}" if walked else "once a block"
        often += " and step" if one(tiles.steps) > 1 and not walked else ""
        panels = in_panels(load, tiles.axis)
        how = f"in panels of vectors along {tiles.axis}" if panels else "row by row"
        border = ", its border with it" if load.pad is not None else ""
        yield from wrapped(f"{load.tensor} packed {how}{border}, {often}")
    if copies:
        yield f"  copies take {si_text(one(anatomy.stages.scratch_bytes), 'B')} of scratch memory per {_unit(anatomy)}"


def _unit(anatomy: CpuAnatomy) -> str:
    return anatomy.device.unit_name
