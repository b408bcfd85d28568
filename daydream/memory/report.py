"""The memory of a recording in words: tables for the terminal, a section of the HTML report, JSON, and counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.text import Text

from daydream.graph.simulate import Timeline
from daydream.memory.footprint import MemoryKind
from daydream.memory.owners import LayerBytes, layers_at
from daydream.memory.recorded import RecordedMemory, StepMemory
from daydream.report.area import Area, stacked
from daydream.report.spans import moved
from daydream.report.style import esc, legend
from daydream.report.style import table as html_table
from daydream.report.tables import ms, percent, short, table
from daydream.report.timeline import Counter
from daydream.trace.trace import NONE
from hal.support.tables import print_line, print_table

#: Class of the colour of each kind.
_CLASSES = {
    MemoryKind.WEIGHTS: "compute",
    MemoryKind.GRADIENTS: "backward",
    MemoryKind.OPTIMIZER: "update",
    MemoryKind.FEATURE_MAPS: "forward",
    MemoryKind.WORKSPACE: "copy",
    MemoryKind.INPUTS: "loading",
    MemoryKind.TEMPORARY: "other",
}

_OUTSIDE = "outside all layers"

#: Layers of the HTML report's table.
_ROWS = 15


def megabytes(amount: int) -> str:
    """Bytes as text, in units of 10^6.

    >>> megabytes(2_791_636_480)
    '2791.6'
    """
    return f"{amount / 1e6:.1f}"


def chosen_steps(memory: RecordedMemory, steps: Sequence[int]) -> list[StepMemory]:
    """These of a recording's steps in which anything is allocated."""
    return [step for step in memory.steps if step.index in set(steps) and step.peak != NONE]


def fullest(steps: Sequence[StepMemory]) -> StepMemory:
    """The step with the highest peak, of equal ones the first."""
    return max(steps, key=lambda step: step.peak_bytes)


def sentences(memory: RecordedMemory) -> list[str]:
    """Meaning and limits of the numbers, one sentence each."""
    texts = []
    if memory.before_bytes is None:
        texts.append("What was there before the recording is not recorded: weights and states of optimizers as a rule.")
    elif memory.before_bytes:
        before = megabytes(memory.before_bytes)
        texts.append(f"{before} MB on top are there throughout: weights and states of optimizers as a rule.")
    elif memory.device == NONE:
        texts.append("Of the CPU only what is allocated in the recording is known: weights come on top.")
    if not memory.by_address:
        texts.append("The trace holds no addresses: a free is taken for that of the latest allocation of its size.")
    if memory.replayed is not None:
        replay = memory.replayed.peak_reserved
        text = f"PyTorch's caching allocator, replayed from an empty cache, reserves {megabytes(replay)} MB for this"
        recorded = int(memory.reserved.max(initial=NONE))
        if recorded > 0:
            text += f"; recorded were {megabytes(recorded)} MB, {100 * (replay / recorded - 1):+.1f} % with the replay"
        texts.append(f"{text}.")
    return texts


def print_memory(memory: RecordedMemory, steps: Sequence[int], rows: int) -> None:
    """Peaks of the steps by kind, and of the fullest one by layer."""
    shown = chosen_steps(memory, steps)
    if not shown:
        return
    kinds = _kinds(memory, shown)
    title = f"Memory of {memory.title}, MB, by kind at the peak"
    made = table(title, "step", "at start", "peak", "above start", "at ms", *kinds)
    for step in shown:
        _add(made, *_step_cells(memory, step, kinds))
    print_table(made)
    for sentence in sentences(memory):
        print_line(sentence)
    print_line()
    most = fullest(shown)
    layers = layers_at(memory.footprint, most.peak, memory.layers)
    made = table(f"Memory at the peak of {most.name}, MB, by layer", "layer", "MB", "of it", *kinds)
    for layer in layers[:rows]:
        _add(made, *_layer_cells(layer, kinds, most.peak_bytes))
    print_table(made)


def _add(target: Any, *cells: str) -> None:
    # Names hold brackets, which would be markup.
    target.add_row(*(Text(cell) for cell in cells))


def _kinds(memory: RecordedMemory, shown: Sequence[StepMemory]) -> list[MemoryKind]:
    """Kinds that anything is held of at any of the peaks."""
    kinds = set().union(*(memory.kinds_at(step.peak) for step in shown))
    return [kind for kind in MemoryKind if kind in kinds]


def _step_cells(memory: RecordedMemory, step: StepMemory, kinds: Sequence[MemoryKind]) -> list[str]:
    at_peak = memory.kinds_at(step.peak)
    sizes = (step.start_bytes, step.peak_bytes, step.above_start)
    when = ms(float(memory.time_us[step.peak]) - step.begin_us)
    return [step.name, *map(megabytes, sizes), when, *(megabytes(at_peak.get(kind, 0)) for kind in kinds)]


def _layer_cells(layer: LayerBytes, kinds: Sequence[MemoryKind], total_bytes: int) -> list[str]:
    parts = [megabytes(layer.by_kind[kind]) if kind in layer.by_kind else "" for kind in kinds]
    return [short(layer.name) or _OUTSIDE, megabytes(layer.bytes), percent(layer.bytes, total_bytes), *parts]


def memory_section(memories: Sequence[RecordedMemory], steps: Sequence[int]) -> str:
    """The section of the HTML report: curves of the fullest step, peaks, and layers at the highest one."""
    parts = []
    for memory in memories:
        shown = chosen_steps(memory, steps)
        if not shown:
            continue
        most, kinds = fullest(shown), _kinds(memory, shown)
        areas = _areas(memory)
        label = f"Memory of {memory.title} in {most.name}"
        time_us = np.append(-np.inf, memory.time_us)
        picture = stacked(time_us, areas, most.begin_us, _end_us(memory, most), label)
        notes = "".join(f"<li>{esc(sentence)}</li>" for sentence in sentences(memory))
        columns = ["step", "at start, MB", "peak, MB", "above start, MB", "at ms", *kinds]
        peaks = [[esc(cell) for cell in _step_cells(memory, step, kinds)] for step in shown]
        layers = layers_at(memory.footprint, most.peak, memory.layers)[:_ROWS]
        owners = [[esc(cell) for cell in _layer_cells(layer, kinds, most.peak_bytes)] for layer in layers]
        parts.append(
            f"<h2>Memory of {esc(memory.title)}, {esc(most.name)}</h2>"
            f'<div class="scroll">{picture}</div>{legend((area.css, area.text) for area in areas)}'
            f'{html_table(columns, peaks)}<ul class="faint small">{notes}</ul>'
            f"<h3>By layer at the peak of {esc(most.name)}, MB</h3>"
            f"{html_table(['layer', 'MB', 'share', *kinds], owners, ['name'])}"
        )
    return "".join(parts)


def _areas(memory: RecordedMemory) -> list[Area]:
    """Curves by kind, what lasts longest lowest; the first amount is that before the recording."""
    existing = memory.kinds_at(NONE)
    return [
        Area(kind, css, np.append(existing.get(kind, 0), memory.by_kind[kind]))
        for kind, css in _CLASSES.items()
        if kind in memory.by_kind
    ]


def _end_us(memory: RecordedMemory, step: StepMemory) -> float:
    """Where the next step begins; of the last one the last moment."""
    following = [each.begin_us for each in memory.steps if each.index == step.index + 1]
    return following[0] if following else float(memory.time_us[step.end - 1])


def memory_record(memory: RecordedMemory, steps: Sequence[int], rows: int) -> dict[str, Any]:
    """The same as JSON."""
    shown = chosen_steps(memory, steps)
    layers = layers_at(memory.footprint, fullest(shown).peak, memory.layers)[:rows] if shown else []
    reserved = int(memory.reserved.max(initial=NONE))
    return {
        "device": None if memory.device == NONE else memory.device,
        "before_bytes": memory.before_bytes,
        "paired_by_address": memory.by_address,
        "peak_reserved_bytes": reserved if reserved > 0 else None,
        "replayed_peak_reserved_bytes": memory.replayed.peak_reserved if memory.replayed is not None else None,
        "steps": [
            {
                "name": step.name,
                "start_bytes": step.start_bytes,
                "peak_bytes": step.peak_bytes,
                "above_start_bytes": step.above_start,
                "kinds": {str(kind): size for kind, size in memory.kinds_at(step.peak).items()},
            }
            for step in shown
        ],
        "layers": [
            {"name": layer.name, "bytes": layer.bytes, "kinds": {str(kind): s for kind, s in layer.by_kind.items()}}
            for layer in layers
        ],
    }


def memory_counters(memories: Sequence[RecordedMemory], timeline: Timeline) -> list[Counter]:
    """Counters for the timeline of a recording as it was: bytes in use, by kind, and reserved where recorded."""
    trace = timeline.graph.trace
    counters = []
    for memory in memories:
        host = memory.thread[memory.thread != NONE][:1].tolist()
        process = trace.threads[host[0]].process if trace is not None and host else 0
        time_us = moved(timeline, memory.time_us, memory.thread)
        series = {"allocated": memory.footprint.allocated + (memory.before_bytes or 0)}
        series |= {str(kind): curve for kind, curve in memory.by_kind.items()}
        if (memory.reserved > 0).any():
            series["reserved"] = np.maximum(memory.reserved, 0)
        counters.append(Counter("memory", memory.device, time_us, series, process))
    return counters
