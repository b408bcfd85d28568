"""The comparison as one HTML file without scripts: operators to open, with their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from daydream.diff.compare import Amount, Change, Difference, OperatorChange, Side, Status
from daydream.diff.tables import conclusions
from daydream.report.breakdown import Resource
from daydream.report.style import RESOURCE_CLASSES, bar, document, esc, legend, ms, table, tile

#: Operators and kernels of one that are shown, at most.
MOST_OPERATORS, MOST_KERNELS = 200, 40

_STYLE = """
details { border-bottom: 1px solid var(--line); } summary { cursor: pointer; list-style: none; padding: 5px 0; }
summary::-webkit-details-marker { display: none; } summary::before { content: "▸"; color: var(--faint); }
details[open] > summary::before { content: "▾"; } details > .scroll { margin: 0 0 10px 18px; }
.line { display: inline-grid; width: calc(100% - 20px); gap: 0 12px; align-items: center;
  grid-template-columns: minmax(160px, 1fr) 64px 172px 84px 172px minmax(120px, 22%); }
.line > .num { text-align: right; font-variant-numeric: tabular-nums; } .line code { overflow-wrap: anywhere; }
.head { color: var(--faint); font-size: 12.5px; padding-left: 14px; border-bottom: 1px solid var(--line); }
@media (max-width: 900px) { .line { grid-template-columns: minmax(120px, 1fr) 56px 150px 76px; }
  .line > .wide { display: none; } }
"""
_CLASS: dict[Status, str] = {"slower": "bad", "new": "bad", "faster": "good", "gone": "good", "same": "faint"}


def write_page(path: Path, difference: Difference) -> None:
    """Writes the page; it appears whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    from hal.support.atomic import write_atomic

    write_atomic(path, page(difference))


def page(difference: Difference) -> str:
    """The page. All text from traces is escaped."""
    before, after = difference.before, difference.after
    title = f"Daydream: {esc(Path(before.path).name)} and {esc(Path(after.path).name)}"
    sentences = "".join(f"<li>{esc(sentence)}</li>" for sentence in conclusions(difference))
    body = [
        f"<h1>{esc(Path(before.path).name)} <span class='faint'>before,</span> {esc(Path(after.path).name)} "
        "<span class='faint'>after</span></h1>",
        f'<p class="faint">{esc(_subtitle(before))} · {esc(_subtitle(after))}</p>',
        _tiles(difference),
        f"<ul>{sentences}</ul>",
        _path(before, after),
        _kinds(difference),
        _operators(difference),
    ]
    return document(title, "".join(body), _STYLE)


def _subtitle(side: Side) -> str:
    steps = side.steps[0] if len(side.steps) == 1 else f"mean of {len(side.steps)} steps"
    return f"{side.board or 'board not recorded'}, {steps}"


def _tiles(difference: Difference) -> str:
    before, after = difference.before, difference.after
    tiles = [
        tile("step, ms", f"{ms(before.measured_us)} → {ms(after.measured_us)}", "as measured", "word"),
        tile("GPU tasks, ms", f"{ms(before.gpu_us)} → {ms(after.gpu_us)}", "sum of a step", "word"),
    ]
    notes = {
        "slower": "operators by more than noise", "faster": "operators by more than noise",
        "new": "operators only after", "gone": "operators only before",
    }  # fmt: skip
    words: tuple[Status, ...] = ("slower", "faster", "new", "gone")
    tiles += [tile(word, str(difference.count(word)), notes[word], _CLASS[word]) for word in words]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _path(before: Side, after: Side) -> str:
    longest = max(sum(side.critical_us) for side in (before, after))
    rows = []
    for name, side in (("before", before), ("after", after)):
        parts = [(RESOURCE_CLASSES[kind], side.critical_us[kind], f"{kind.label}: {ms(side.critical_us[kind])} ms")
                 for kind in Resource]  # fmt: skip
        rows.append(f'<div>{name}</div>{bar(parts, longest)}<div class="num">{ms(sum(side.critical_us))} ms</div>')
    used = [
        (RESOURCE_CLASSES[kind], kind.label) for kind in Resource if before.critical_us[kind] + after.critical_us[kind]
    ]
    return f'<h2>Critical path of a step</h2><div class="rows">{"".join(rows)}</div>{legend(used)}'


def _kinds(difference: Difference) -> str:
    longest = max((max(kind.before.us, kind.after.us) for kind in difference.kinds), default=0.0)
    rows = [
        [esc(kind.name), _word(kind.status), _counts(kind), *_times(kind), _bars(kind.before, kind.after, longest)]
        for kind in difference.kinds
    ]
    columns = ["kind", "became", "count", "before, ms", "after, ms", "change, ms", ""]
    return "<h2>Kinds of GPU tasks per step</h2>" + table(columns, rows, ["", "left", "", "", "", "", "wide left"])


def _operators(difference: Difference) -> str:
    shown = difference.operators[:MOST_OPERATORS]
    if not shown:
        return "<h2>Operators</h2><p>None changed by more than the steps of one recording differ by.</p>"
    longest = max(max(each.before.us, each.after.us) for each in shown)
    head = (
        '<div class="line head"><span>operator</span><span>became</span><span class="num">GPU, ms</span>'
        '<span class="num">change</span><span class="num wide">CPU, ms</span><span class="wide">'
        "before above after</span></div>"
    )
    hidden_count = len(difference.operators) - len(shown)
    note = f'<p class="faint">{hidden_count} operators more changed by less</p>' if hidden_count > 0 else ""
    about = (
        '<p class="faint small">The largest change first, on the GPU or on the CPU; open one for its kernels. '
        "Changes within what the steps of one recording differ by are none.</p>"
    )
    return f"<h2>Operators that changed, per step</h2>{about}{head}{''.join(_line(e, longest) for e in shown)}{note}"


def _line(operator: OperatorChange, longest: float) -> str:
    cpu = "" if operator.cpu_status == "same" else _arrow(operator.cpu_before, operator.cpu_after)
    runs = bool(operator.before.count or operator.after.count)
    change = f"{operator.change_us / 1000:+.3f}" if runs else ""
    summary = (
        f'<span class="line"><code>{esc(operator.name)}</code>{_word(operator.status)}'
        f'<span class="num">{_arrow(operator.before, operator.after) if runs else ""}</span>'
        f'<span class="num {_CLASS[operator.status]}">{change}</span><span class="num wide">{cpu}</span>'
        f'<span class="wide">{_bars(operator.before, operator.after, longest)}</span></span>'
    )
    rows = [
        [f"<code>{esc(kernel.name)}</code>", _word(kernel.status), _counts(kernel), *_times(kernel)]
        for kernel in operator.kernels[:MOST_KERNELS]
    ]
    if not rows:
        return f"<details><summary>{summary}</summary><p class='faint small'>Runs nothing on the GPU.</p></details>"
    columns = ["kernel", "became", "count", "before, ms", "after, ms", "change, ms"]
    return f"<details><summary>{summary}</summary>{table(columns, rows, ['name', 'left'])}</details>"


def _word(status: Status) -> str:
    return f'<span class="{_CLASS[status]}">{status}</span>'


def _arrow(before: Amount, after: Amount) -> str:
    return " → ".join(f"{each.us / 1000:.3f}" if each.count or each.us else "–" for each in (before, after))


def _counts(change: Change) -> str:
    texts = [f"{each.count:.1f}".removesuffix(".0") for each in (change.before, change.after)]
    return texts[0] if texts[0] == texts[1] else " → ".join(texts)


def _times(change: Change) -> Sequence[str]:
    amounts = [f"{each.us / 1000:.3f}" if each.count else "–" for each in (change.before, change.after)]
    return [*amounts, f'<span class="{_CLASS[change.status]}">{change.change_us / 1000:+.3f}</span>']


def _bars(before: Amount, after: Amount, longest: float) -> str:
    parts = (("idle", before), ("compute", after))
    return "".join(bar([(kind, each.us, f"{ms(each.us)} ms")], longest, thin=True) for kind, each in parts)
