"""A picture of an operator's best programs: the time of every stage, and where they stand under the board's roofline.

Needs matplotlib, the optional extra ``plot``.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hal.support.atomic import write_atomic
from hal.support.errors import InputError
from roller.construct.program import RProgram
from roller.explain.pace import schedule_text
from roller.programs import Programs
from roller.text.quantities import layer_name, si_text, time_text
from sokoban.kernel.placed import PlacedForm
from sokoban.model.cpu.anatomy import cpu_anatomy
from sokoban.model.gpu.anatomy import gpu_anatomy
from sokoban.schedule.tile import TileSchedule

#: Kinds of file by ending.
FORMATS = ("png", "svg", "pdf")

#: Programs shown, at most.
MOST_PROGRAMS = 10

#: Colour-blind safe (Okabe and Ito), in the order of the stages.
_COLOURS = (
    "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#999999", "#CC79A7", "#F0E442", "#882255", "#332288",
    "#117733", "#AA4499",
)  # fmt: skip

#: Bytes that DRAM reads and writes for a program, by what the lanes of a device are; without what a cache kept of the
#: call before.
_DRAM_TRAFFIC: Mapping[str, Callable[[PlacedForm, TileSchedule], float]] = {
    "thread": lambda placed, schedule: gpu_anatomy(placed, schedule).dram_traffic,
    "element": lambda placed, schedule: cpu_anatomy(placed, schedule).dram_traffic,
}


def check_plot(path: Path) -> None:
    """Refuse what cannot be drawn, before any work is done.

    Raises:
        InputError: matplotlib is missing, the ending is unknown, or there is no such directory.
    """
    if path.suffix.lower().removeprefix(".") not in FORMATS:
        raise InputError("--plot", f"{path} has no ending that is known", f"use .{', .'.join(FORMATS)}")
    if not path.parent.is_dir():
        raise InputError("--plot", f"there is no directory {path.parent}", "make it first")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise InputError("--plot", "matplotlib is not installed", "pip install 'roller[plot]'") from None


def plot(programs: Programs, path: Path, rank: int = 1) -> None:
    """Draw the best programs of one kernel into ``path``, which appears whole or not at all.

    Raises:
        InputError: as :func:`check_plot`.
        OSError: the file cannot be written.
    """
    check_plot(path)
    from matplotlib import rc_context

    buffer = io.BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    # No date and no random names, so that the same programs give the same bytes.
    with rc_context({"svg.hashsalt": "roller"}):
        draw(programs, rank).savefig(buffer, format=kind, dpi=120, metadata=_undated(kind))
    write_atomic(path, buffer.getvalue())


def _undated(kind: str) -> dict[str, Any] | None:
    return {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)


def draw(programs: Programs, rank: int = 1) -> Any:
    """The figure: stage times on the left, the roofline on the right, its neighbourhood of the programs below."""
    from matplotlib.figure import Figure

    placed, form, device = programs.placed, programs.form, programs.device
    shown = programs.direct[: max(MOST_PROGRAMS, rank)]
    figure = Figure(figsize=(17, 2.2 + 0.75 * max(8, len(shown))))
    figure.set_layout_engine("constrained", w_pad=0.15)
    panels = figure.subplot_mosaic(
        [["stages", "roofline"], ["stages", "near"]], width_ratios=(1.15, 1), height_ratios=(1.7, 1)
    )
    _stages(panels["stages"], shown, rank, device.teu.lane)
    _roofline(panels["roofline"], panels["near"], placed, shown, rank)
    figure.suptitle(f"{form.expr.name} on {device.title}, as predicted")
    return figure


def _stages(axes: Any, programs: Sequence[RProgram], rank: int, lane: str) -> None:
    """A group of bars per program, one bar per stage; a line across the group is the predicted time."""
    stages = tuple(programs[0].estimate.stage_seconds)
    thickness = 0.8 / len(stages)
    for number, (stage, colour) in enumerate(zip(stages, itertools.cycle(_COLOURS), strict=False)):
        times = [1e6 * program.estimate.stage_seconds[stage] for program in programs]
        places = [group - 0.4 + (number + 0.5) * thickness for group in range(len(programs))]
        axes.barh(places, times, 0.92 * thickness, color=colour, label=stage.replace("_", " "))
        name = f"{stage.replace('_', ' ')} "
        for place, time, program in zip(places, times, programs, strict=True):
            if program.estimate.bound == stage:
                axes.barh(place, time, 0.92 * thickness, facecolor="none", edgecolor="black", linewidth=1.4)
                axes.text(time, place, name, va="center", ha="right", fontsize=8, fontweight="bold", color="white")
    for group, program in enumerate(programs):
        seconds = 1e6 * program.estimate.seconds
        axes.plot([seconds, seconds], [group - 0.42, group + 0.42], color="black", linewidth=2)
    axes.plot([], [], color="black", linewidth=2, label="predicted")
    names = [
        f"{'→ ' if position == rank else ''}{position}: {time_text(program.estimate.seconds)}\n"
        f"{_two_lines(program, lane)}"
        for position, program in enumerate(programs, start=1)
    ]
    axes.set_yticks(range(len(programs)), names, fontsize=8)
    axes.set_ylim(len(programs) - 0.5, -0.5)
    axes.set_xlim(0, 1.12 * max(1e6 * program.estimate.seconds for program in programs))
    axes.set_xlabel("µs")
    axes.set_title("Time of every stage; the outlined one sets the pace", fontsize=11)
    axes.grid(axis="x", alpha=0.25)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=4, fontsize=8, frameon=False)


def _two_lines(program: RProgram, lane: str) -> str:
    parts = schedule_text(program, lane).split(" · ")
    return "\n".join(part for part in (parts[0], " · ".join(parts[1:])) if part)


def _roofline(axes: Any, near: Any, placed: PlacedForm, programs: Sequence[RProgram], rank: int) -> None:
    """FLOP/s over FLOP per byte of DRAM traffic; the slopes of other layers are what they would feed at that rate."""
    form, device = placed.form, placed.device
    if not form.flops:
        axes.text(0.5, 0.5, "no arithmetic:\nnothing to place under a roofline", ha="center", va="center")
        axes.set_axis_off()
        near.set_axis_off()
        return
    traffic = _DRAM_TRAFFIC[device.teu.lane]
    points = [
        (form.flops / traffic(placed, program.schedule), form.flops / program.estimate.seconds) for program in programs
    ]
    flats = _flats(placed, matrix=any(program.schedule.uses_matrix for program in programs))
    layers = [layer for layer in (device.dram, device.l2, device.shared) if layer is not None]
    top, dram = max(rate for _, rate in flats), device.dram.bandwidth_bytes_per_second
    xs, ys = [x for x, _ in points], [y for _, y in points]
    ridge = flats[0][1] / dram
    ends = min(*xs, ridge / 30) / 3, max(*xs, ridge) * 8
    for panel in (axes, near):
        for layer, colour in zip(layers, ("#D55E00", "#E69F00", "#009E73"), strict=True):
            bandwidth, name = layer.bandwidth_bytes_per_second, layer_name(layer.name)
            corners = (ends[0], min(max(top / bandwidth, ends[0]), ends[1]), ends[1])
            width, label = 1.8 if layer is device.dram else 1.1, f"{name}: {si_text(bandwidth, 'B/s')}"
            panel.plot(corners, [min(x * bandwidth, top) for x in corners], color=colour, linewidth=width, label=label)
        for (name, rate), style in zip(flats, ("-", "--", "-.", ":"), strict=False):
            label = f"{name}: {si_text(rate, 'FLOP/s')}"
            panel.axhline(rate, color="#0072B2", linestyle=style, linewidth=1.4, label=label)
        for position, (x, y) in enumerate(points, start=1):
            mine = position == rank
            panel.plot(x, y, "o", color="black" if mine else "#CC79A7", markersize=7, zorder=4 if mine else 3)
        panel.set(ylabel="FLOP/s", xlabel="FLOP per byte of DRAM traffic")
        panel.grid(which="both", alpha=0.15)
    low = min(*ys, ends[0] * dram * 4) / 2
    axes.set(xlim=ends, ylim=(low, 2 * top), xscale="log", yscale="log", title="Roofline")
    axes.legend(loc="lower right", fontsize=8)
    _close_up(near, points, flats[0][1])


def _close_up(axes: Any, points: Sequence[tuple[float, float]], sustained: float) -> None:
    """The part of the roofline around the programs, with their ranks; dots that lie together share a label."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    # No closer than a tenth of the values, lest nothing looks like something; a ceiling nearby is kept in sight.
    wide = max(0.6 * (max(xs) - min(xs)), 0.1 * max(xs))
    high = max(0.3 * (max(ys) - min(ys)), 0.05 * max(ys))
    above = max(ys) + high
    if sustained < 1.3 * max(ys):
        above = max(above, sustained + 0.2 * high)
    axes.set(xlim=(min(xs) - wide, max(xs) + wide), ylim=(min(ys) - high, above), title="Close up; numbers are ranks")
    axes.yaxis.set_major_formatter(lambda rate, _: si_text(rate, "FLOP/s"))
    axes.set_ylabel("")
    groups: dict[tuple[int, int], list[int]] = {}
    for position, (x, y) in enumerate(points, start=1):
        place = round(25 * (x - min(xs)) / wide / 2), round(12 * (y - min(ys)) / (above - min(ys) + high))
        groups.setdefault(place, []).append(position)
    for ranks in groups.values():
        text = ", ".join(map(str, ranks))
        axes.annotate(text, points[ranks[0] - 1], xytext=(8, -3), textcoords="offset points", fontsize=9, zorder=5)


def _flats(placed: PlacedForm, *, matrix: bool) -> list[tuple[str, float]]:
    """The ceilings of arithmetic: sustained, then peak, for the operator's accumulator and its matrix instruction."""
    form, device, dtype = placed.form, placed.device, placed.arithmetic_dtype
    flats = [(f"{dtype} sustained", device.sustained_flops(dtype)), (f"{dtype} peak", device.peak_flops(dtype))]
    instruction = device.best_matrix_instruction(form.input_dtype) if matrix else None
    if instruction is not None:
        name = f"{form.input_dtype} by matrix instructions"
        flats += [(f"{name}, sustained", instruction.sustained_flops), (f"{name}, peak", instruction.peak_flops)]
    return flats
