"""The report: one HTML file without scripts or anything to load, to open with a double click."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from daydream.report.analysis import Analysis, Comparison, compared, mean_busy, ratio
from daydream.report.breakdown import Busy, LayerTimes, Resource, Share, layer_times, path_tasks, top_kernels
from daydream.report.idle import BETWEEN_TASKS, COMMUNICATION, COPY, LAUNCH, LOADING, STREAM, SYNCHRONISED, LaneIdle
from daydream.report.picture import CLASSES, TEXTS, kinds_used, picture
from daydream.report.style import RESOURCE_CLASSES, bar, document, esc, legend, ms, percent, table, tile
from daydream.report.tables import ACHIEVED, PACED, achieved
from daydream.report.tables import number as rate
from daydream.whatif import AppliedPass

#: Lines of a table, at most.
ROWS = 15

ALL = 1_000_000

#: Characters of a name; the tooltip has all of it.
LONGEST_NAME = 120

_BUSY = (("both", "CPU and GPU"), ("compute", "GPU only"), ("cpu", "CPU only"), ("idle", "neither"))
_REASONS = {
    LAUNCH: "cpu",
    SYNCHRONISED: "forward",
    LOADING: "loading",
    COPY: "copy",
    COMMUNICATION: "comm",
    STREAM: "compute",
    BETWEEN_TASKS: "other",
}

Named = list[tuple[str, Analysis]]


def write_report(
    path: Path, before: Analysis, after: Analysis | None, applied: Sequence[AppliedPass] = (), more: str = ""
) -> None:
    """Writes the report of one timeline, or of a baseline and a prediction; it appears whole or not at all.

    Args:
        path: the file.
        before, after, applied, more: as for :func:`report`.

    Raises:
        OSError: the file cannot be written.
    """
    from hal.support.atomic import write_atomic

    write_atomic(path, report(before, after, applied, more))


def report(before: Analysis, after: Analysis | None = None, applied: Sequence[AppliedPass] = (), more: str = "") -> str:
    """The report as HTML. All text from the trace and from passes is escaped; `more` is HTML for its end."""
    graph = before.timeline.graph
    named: Named = [("baseline", before), ("predicted", after)] if after else [("simulated", before)]
    source = Path(graph.trace.path).name if graph.trace is not None else "a task graph"
    sections = [
        _headline(before, after),
        _passes(applied) if after else "",
        _warnings([*graph.warnings, *(after.timeline.graph.warnings if after else ())]),
        _steps(before, after),
        _timelines(named),
        _who_works(before, named),
        _critical(named),
        _phases(named),
        _kernels(named),
        _layers(named),
        _idle(named),
        _utilisation(before),
        more,
    ]
    head = f'<h1>{esc(source)}</h1><p class="faint">{esc(_subtitle(before))}</p>'
    return document(f"Daydream: {esc(source)}", head + "".join(sections))


def _subtitle(before: Analysis) -> str:
    graph = before.timeline.graph
    devices = graph.trace.devices if graph.trace is not None else ()
    boards = list(dict.fromkeys(str(device.get("name", "")) for device in devices if device.get("name")))
    parts = [*boards[:2], f"{len(graph):,} tasks", _steps_text(before)]
    return " · ".join(parts)


def _steps_text(analysis: Analysis) -> str:
    steps = analysis.timeline.graph.steps
    names = [steps[index].name for index in analysis.steps]
    omitted = len(steps) - len(names)
    text = names[0] if len(names) == 1 else f"mean of {len(names)} steps ({names[0]} to {names[-1]})"
    return text + (f", {omitted} of {len(steps)} left out" if omitted else "")


# Sections


def _headline(before: Analysis, after: Analysis | None) -> str:
    comparison = compared(before, after) if after else None
    simulated, predicted = comparison.means_us if comparison else (before.mean_us, before.mean_us)
    measured = before.measured_us
    if math.isfinite(measured):
        error = f"{100 * (simulated / measured - 1):+.1f} % of measured" if measured else ""
        what = "simulated baseline" if after else "simulated step"
        tiles = [tile("measured step", f"{ms(measured)} ms"), tile(what, f"{ms(simulated)} ms", error)]
    else:
        tiles = [tile("predicted baseline" if after else "predicted step", f"{ms(simulated)} ms", "never measured")]
    if after:
        faster = ratio(simulated, predicted)
        kind = "good" if faster > 1.005 else "bad" if faster < 0.995 else ""
        saved = simulated - predicted
        word = "saved" if saved >= 0 else "lost"
        tiles.append(tile("predicted step", f"{ms(predicted)} ms", f"{ms(abs(saved))} ms {word}"))
        tiles.append(tile("speed-up", f"{faster:.2f} ×", "baseline ÷ predicted", kind))
    tiles.append(tile("bottleneck" + (" before" if after else ""), before.bottleneck.label, _of_path(before), "word"))
    if after:
        tiles.append(tile("bottleneck after", after.bottleneck.label, _of_path(after), "word"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _of_path(analysis: Analysis) -> str:
    total_us = sum(analysis.critical_us)
    return f"{100 * max(analysis.critical_us) / total_us:.0f} % of the critical path" if total_us else ""


def _passes(applied: Sequence[AppliedPass]) -> str:
    parts = []
    for number, done in enumerate(applied, start=1):
        notes = "".join(f"<li>{esc(note)}</li>" for note in done.notes)
        parts.append(f"<h3>{number}. {esc(done.name)} <code>{esc(done.settings.strip())}</code></h3><ul>{notes}</ul>")
    return f"<h2>What was changed</h2>{''.join(parts)}"


def _warnings(warnings: Sequence[str]) -> str:
    items = "".join(f"<li>{esc(warning)}</li>" for warning in dict.fromkeys(warnings))
    return f'<h2>Warnings</h2><ul class="warnings">{items}</ul>' if items else ""


def _steps(before: Analysis, after: Analysis | None) -> str:
    steps = before.timeline.graph.steps
    predicted = after.step_times if after else before.step_times
    recorded_us = np.array([step.length_us for step in before.step_times])
    comparison = compared(before, after) if after else Comparison(recorded_us, recorded_us, paced=False)
    lengths = list(zip(comparison.before_us.tolist(), comparison.after_us.tolist(), strict=True))
    longest = max((max(each) for each in lengths), default=0)
    rows = []
    for old, new, (old_us, new_us) in zip(before.step_times, predicted, lengths, strict=True):
        kind = RESOURCE_CLASSES[new.bottleneck]
        cells = [esc(old.name), ms(steps[old.index].measured_us), ms(old_us)]
        cells += [ms(new_us), f"{ratio(old_us, new_us):.3f}"] if after else []
        bars = bar([(kind, new_us, f"{ms(new_us)} ms")], longest, thin=True)
        if after:
            bars = bar([("idle", old_us, f"baseline {ms(old_us)} ms")], longest, thin=True) + bars
        rows.append([*cells, esc(new.bottleneck.label), bars])
    if len(rows) > 1:
        means = comparison.means_us
        cells = ["mean", ms(before.measured_us), ms(means[0])]
        cells += [ms(means[1]), f"{ratio(*means):.3f}"] if after else []
        rows.append([*cells, esc((after or before).bottleneck.label), ""])
    simulated = ["baseline, ms", "predicted, ms", "speed-up"] if after else ["simulated, ms"]
    columns = ["step", "measured, ms", *simulated, "bottleneck", ""]
    classes = [*[""] * (len(columns) - 2), "left", "wide left"]
    note = f"<p>{esc(PACED)}</p>" if comparison.paced else ""
    return "<h2>Steps</h2>" + table(columns, rows, classes, "mean" if len(rows) > 1 else "") + note


def _timelines(named: Named) -> str:
    shown = min(named[0][1].step_times, key=lambda step: abs(step.length_us - named[0][1].mean_us))
    place = named[0][1].step_times.index(shown)
    longest = max(analysis.step_times[place].length_us for _, analysis in named)
    used = _colours_used(named)
    parts = [
        f"<h2>Timeline of {esc(shown.name)}</h2>",
        '<p class="faint small">Colour: what most of the time goes to; height: how much of it the row is busy. '
        "A red line below a row: the critical path runs there. Same scale in both pictures.</p>"
        if len(named) > 1
        else '<p class="faint small">Colour: what most of the time goes to; height: how much of it the row is busy. '
        "A red line below a row: the critical path runs there.</p>",
        legend([(kind, text) for kind, text in zip(CLASSES, TEXTS, strict=True) if kind in used]),
        legend([(RESOURCE_CLASSES[kind], f"path: {kind.label}") for kind in Resource if _on_path(named, kind)]),
    ]
    for name, analysis in named:
        if len(named) > 1:
            parts.append(f"<h3>{esc(name)}, {ms(analysis.step_times[place].length_us)} ms</h3>")
        parts.append(f'<div class="scroll">{picture(analysis.timeline, shown.index, longest)}</div>')
    return "".join(parts)


def _colours_used(named: Named) -> set[str]:
    return set().union(*(kinds_used(analysis.timeline.graph) for _, analysis in named))


def _on_path(named: Named, kind: Resource) -> bool:
    return any(analysis.critical_us[kind] > 0 for _, analysis in named)


def _bars(rows: Sequence[tuple[str, Sequence[tuple[str, float, str]], float]]) -> str:
    """Stacked bars with a name before and a time behind each: (name, parts, time)."""
    longest = max((total for _, _, total in rows), default=0.0)
    cells = [
        f"<div>{esc(name)}</div>{bar([(k, v, f'{text}: {ms(v)} ms') for k, v, text in parts], longest)}"
        f'<div class="num">{ms(total)} ms</div>'
        for name, parts, total in rows
    ]
    return f'<div class="rows">{"".join(cells)}</div>'


def _busy_parts(busy: Busy) -> list[tuple[str, float, str]]:
    """As in figure 4.6, with time in which only the network works apart from time in which nothing does."""
    amounts = (busy.both_us, busy.gpu_only_us, busy.cpu_only_us)
    parts = [(kind, amount, text) for (kind, text), amount in zip(_BUSY[:3], amounts, strict=True)]
    parts.append(("comm", busy.communication_us, "only the network"))
    parts.append(("idle", busy.neither_us - busy.communication_us, "neither"))
    return parts


def _who_works(before: Analysis, named: Named) -> str:
    busy = [(name, analysis.busy) for name, analysis in named]
    if before.recorded:
        busy.insert(0, ("recorded", mean_busy(before.recorded)))
    bars = _bars([(name, _busy_parts(busy_times), busy_times.total_us) for name, busy_times in busy])
    columns = ["ms per step", "CPU and GPU", "GPU only", "CPU only", "neither", "of it network"]
    rows = [
        [esc(name), *(ms(x) for x in (b.both_us, b.gpu_only_us, b.cpu_only_us, b.neither_us, b.communication_us))]
        for name, b in busy
    ]
    used = [*_BUSY, ("comm", "only the network")] if any(b.communication_us for _, b in busy) else _BUSY
    about = (
        '<p class="faint small">The CPU works in its tasks and in the untraced time between them, not while it waits; '
        "the GPU works when any stream runs a kernel or a copy.</p>"
    )
    return "<h2>Who works</h2>" + about + bars + legend(used) + table(columns, rows)


def _critical(named: Named) -> str:
    bars = []
    for name, analysis in named:
        parts = [(RESOURCE_CLASSES[kind], analysis.critical_us[kind], kind.label) for kind in Resource]
        bars.append((name, parts, sum(analysis.critical_us)))
    used = [(RESOURCE_CLASSES[kind], kind.label) for kind in Resource if _on_path(named, kind)]
    lists = []
    for name, analysis in named:
        rows = [
            [
                _name(share.name),
                f'<span class="small faint">{esc(kind.label)}</span>',
                f"{share.count:.1f}",
                ms(share.total_us),
                f"{100 * share.share:.1f} %",
            ]
            for kind, share in path_tasks(analysis.timeline, analysis.steps, ROWS)
        ]
        title = f"Longest on the path, {name}, per step" if len(named) > 1 else "Longest on the path, per step"
        columns = ["task", "on", "count", "ms", "share"]
        lists.append(f"<div><h3>{esc(title)}</h3>{table(columns, rows, ['name', 'left'])}</div>")
    about = (
        '<p class="faint small">The chain of tasks that each waited for the one before: only what shortens it '
        "shortens the step.</p>"
    )
    columns_of = f'<div class="columns">{"".join(lists)}</div>'
    return "<h2>Critical path</h2>" + about + _bars(bars) + legend(used) + columns_of


def _phases(named: Named) -> str:
    rows = []
    names = list(dict.fromkeys(phase.name for _, analysis in named for phase in analysis.phases))
    tables = [{phase.name: phase for phase in analysis.phases} for _, analysis in named]
    for name in names:
        phases = [side.get(name) for side in tables]
        cells = [
            [ms(f.cpu_us) if f else "–", ms(f.gpu_us) if f else "–", f"{f.gpu_tasks:.0f}" if f else "–"] for f in phases
        ]
        rows.append([esc(name), *(" → ".join(dict.fromkeys(column)) for column in zip(*cells, strict=True))])
    return "<h2>Phases</h2>" + table(["phase", "CPU, ms per step", "GPU, ms per step", "GPU tasks"], rows)


def _merged(named: Named) -> list[tuple[str, list[Share | None]]]:
    """The largest kernels of any variant, with what each variant has of them."""
    tables = [{s.name: s for s in top_kernels(a.timeline.graph, a.steps, ALL)} for _, a in named]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [table.get(name) for table in tables]) for name in names]
    rows.sort(key=lambda row: -max(share.total_us for share in row[1] if share))
    return rows[:ROWS]


def _kernels(named: Named) -> str:
    merged = _merged(named)
    figures = named[0][1].utilisation if len(named) == 1 else None
    by_name = {task.name: task for task in figures.tasks} if figures is not None else {}
    longest = max((share.total_us for _, shares in merged for share in shares if share), default=0.0)
    rows = []
    for name, shares in merged:
        counts = dict.fromkeys(f"{share.count:.0f}" if share else "0" for share in shares)
        times = [share.total_us if share else 0.0 for share in shares]
        kinds = ("idle", "compute") if len(times) > 1 else ("compute",)
        bars = "".join(bar([(k, t, f"{ms(t)} ms")], longest, thin=True) for k, t in zip(kinds, times, strict=True))
        first = shares[0]
        part = f"{100 * first.share:.1f} %" if first else "–"
        kernel = by_name.get(name)
        rates = (kernel.flops_per_second / 1e12, kernel.bytes_per_second / 1e9) if kernel else (math.nan, math.nan)
        more = [esc(kernel.kind) if kernel else "–", *map(rate, rates)] if by_name else []
        rows.append([_name(name), " → ".join(counts), *(ms(time) for time in times), part, *more, bars])
    heads = [f"{name}, ms" for name, _ in named] if len(named) > 1 else ["ms"]
    share = "share before" if len(named) > 1 else "share"
    columns = ["kernel or copy", "count", *heads, share, *(["kind", "TFLOP/s", "GB/s"] if by_name else []), ""]
    return "<h2>GPU tasks per step</h2>" + table(columns, rows, ["name", *[""] * (len(columns) - 2), "wide left"])


def _layers(named: Named) -> str:
    tables = [{x.name: x for x in layer_times(a.timeline.graph, a.steps, ALL)} for _, a in named]
    names = {name: max(side[name].total_us for side in tables if name in side) for side in tables for name in side}
    rows = []
    largest = sorted(names, key=lambda name: -names[name])[:ROWS]
    longest = max((names[name] for name in largest), default=0.0)
    for name in largest:
        layers = [side.get(name) for side in tables]
        totals = [layer.total_us if layer else 0.0 for layer in layers]
        cpu = " → ".join(dict.fromkeys(ms(layer.cpu_us) if layer else "–" for layer in layers))
        bars = "".join(_layer_bar(layer, longest) for layer in layers)
        rows.append([_name(name), *(ms(total) for total in totals), cpu, bars])
    if not rows:
        return ""
    heads = [f"GPU, {name}, ms" for name, _ in named] if len(named) > 1 else ["GPU, ms"]
    columns = ["layer", *heads, "CPU, ms", "GPU time by phase" + (", before above after" if len(named) > 1 else "")]
    shown = legend(list(zip(CLASSES[:4], TEXTS[:4], strict=True)))
    classes = ["name", *[""] * (len(columns) - 2), "wide left"]
    return "<h2>Layers per step</h2>" + shown + table(columns, rows, classes)


def _layer_bar(layer: LayerTimes | None, longest: float) -> str:
    amounts = layer.gpu_us if layer else (0.0, 0.0, 0.0, 0.0)
    parts = zip(CLASSES[:4], amounts, TEXTS[:4], strict=True)
    return bar([(kind, amount, f"{text}: {ms(amount)} ms") for kind, amount, text in parts], longest, thin=True)


def _idle(named: Named) -> str:
    lanes: list[tuple[str, LaneIdle]] = [
        (f"{lane.name}, {name}" if len(named) > 1 else lane.name, lane)
        for place in range(max((len(a.idle.lanes) for _, a in named), default=0))
        for name, a in named
        for lane in a.idle.lanes[place : place + 1]
    ]
    if not lanes:
        return ""
    bars = _bars(
        [
            (name, [(_REASONS[why], amount, why) for why, amount in lane.by_reason.items()], lane.idle_us)
            for name, lane in lanes
        ]
    )
    used = {why for _, lane in lanes for why in lane.by_reason}
    lists = []
    for name, analysis in named:
        rows = [
            [_name(share.name), f"{share.count:.1f}", ms(share.total_us), f"{100 * share.share:.1f} %"]
            for share in analysis.idle.operators[:ROWS]
        ]
        if rows:
            title = "What the GPU waited for on the CPU" + (f", {name}" if len(named) > 1 else "")
            heads = ["operator", "count", "ms", "share"]
            lists.append(f"<div><h3>{esc(title)}, per step</h3>{table(heads, rows, ['name'])}</div>")
    about = (
        '<p class="faint small">Pauses of a whole device, and of a stream between its first and last task of a step, '
        "by what ended them.</p>"
    )
    shown = legend([(kind, why) for why, kind in _REASONS.items() if why in used])
    return f'<h2>GPU idle time per step</h2>{about}{bars}{shown}<div class="columns">{"".join(lists)}</div>'


def _utilisation(analysis: Analysis) -> str:
    """TBD's figures (thesis 3.3), and the longest kernels below the average (tables 3.5 and 3.6)."""
    figures = analysis.utilisation
    if figures is None:
        return ""
    mean, pace = figures.mean, figures.samples_per_second(figures.mean.length_us)
    tiles = [
        tile("throughput", "–" if pace != pace else f"{pace:.1f} /s", "samples"),
        tile("GPU", percent(mean.gpu), "of the time it runs a kernel"),
        tile("of peak", percent(mean.of_peak), "FLOPs while it runs one"),
        tile("model of peak", percent(mean.model_of_peak), "products' FLOPs in the whole step"),
        tile("CPU", percent(mean.cpu), f"of {figures.cores_text}"),
    ]
    notes = "".join(f"<li>{esc(sentence)}</li>" for sentence in figures.sentences())
    cells = [
        [esc(each.name), f"{each.count:.0f}", ms(each.total_us), percent(each.share), *achieved(figures, each)]
        for each in figures.kinds
    ]
    kinds = table(["kind of GPU task", "count", "ms per step", "share", *ACHIEVED], cells)
    lists = []
    for title, kind, rows in (
        (f"Longest kernels below the average of {percent(mean.of_peak)}", "kernel", figures.slow_kernels),
        ("Longest layers", "layer", figures.layers if mean.peak_us == mean.peak_us else ()),
    ):
        cells = [
            [_name(each.name), f"{each.count:.0f}", ms(each.total_us), percent(each.share), *achieved(figures, each)]
            for each in rows[:ROWS]
        ]
        if cells:
            columns = [kind, "count", "ms", "of kernel time", *ACHIEVED]
            lists.append(f"<h3>{esc(title)}, per step</h3>{table(columns, cells, ['name'])}")
    return (
        f'<h2>Utilisation</h2><div class="tiles">{"".join(tiles)}</div><ul class="faint small">{notes}</ul>{kinds}'
        f"{''.join(lists)}"
    )


def _name(name: str) -> str:
    """A name as code, cut if very long, whole in its tooltip. What a kernel returns says nothing."""
    shown = name.removeprefix("void ")
    if len(shown) <= LONGEST_NAME:
        return f"<code>{esc(shown)}</code>"
    return f'<code title="{esc(name)}">{esc(shown[: LONGEST_NAME - 1])}…</code>'
