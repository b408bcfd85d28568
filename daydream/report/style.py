"""The look of the HTML report: its style sheet, and the few elements that it is made of."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

#: Colour-blind safe (Okabe and Ito), each with a brighter one for dark backgrounds.
CSS = """
:root { color-scheme: light dark; --ground: #ffffff; --panel: #f6f7f9; --text: #1c2330; --faint: #667085;
  --line: #dfe3ea; --forward: #3b7dc4; --backward: #d98324; --update: #2f9e77; --other: #98a2b3; --copy: #6a5fb8;
  --comm: #c2477f; --loading: #b79a16; --idle: #e4e7ec; --cpu: #8d7157; --compute: #7a9a2b; --critical: #d92d20;
  --good: #177a52; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171c; --panel: #1c2027; --text: #e4e7ec; --faint: #98a2b3;
  --line: #303640; --forward: #6aa9e9; --backward: #f0a95a; --update: #54c59b; --other: #7d8798; --copy: #a095ec;
  --comm: #ec82b2; --loading: #dcc04a; --idle: #2a2f38; --cpu: #c9a98a; --compute: #b3d35e; --critical: #ff6a5e;
  --good: #62d3a2; --bad: #ff8f85; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 28px 60px; }
h1 { font-size: 22px; margin: 0; font-weight: 650; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 38px 0 8px; padding-top: 14px; border-top: 1px solid var(--line); font-weight: 650; }
h3 { font-size: 13px; margin: 16px 0 4px; font-weight: 600; }
p { margin: 4px 0 10px; max-width: 90ch; } .faint { color: var(--faint); } .small { font-size: 12.5px; }
code, .mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(168px, 1fr)); gap: 12px; margin: 18px 0 4px; }
.tile { background: var(--panel); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px 12px; }
.tile .label { color: var(--faint); font-size: 12.5px; }
.tile .value { font-size: 23px; font-weight: 650; font-variant-numeric: tabular-nums; line-height: 1.35; }
.tile .value.word { font-size: 18px; line-height: 1.73; overflow-wrap: anywhere; }
.tile .note { color: var(--faint); font-size: 12.5px; } .good { color: var(--good); } .bad { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 500; color: var(--faint); font-size: 12.5px; padding: 3px 10px;
  vertical-align: bottom; border-bottom: 1px solid var(--line); white-space: nowrap; }
td { text-align: right; padding: 3px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.name { white-space: normal; overflow-wrap: anywhere; max-width: 560px; min-width: 200px; line-height: 1.35; }
td.wide { width: 30%; min-width: 160px; } th.left, td.left { text-align: left; }
tr.mean td { font-weight: 600; border-top: 1px solid var(--faint); }
.bar { display: flex; height: 16px; border-radius: 3px; overflow: hidden; background: transparent; }
.bar > span { height: 100%; min-width: 0; } .bar.thin { height: 9px; border-radius: 2px; }
.bar.thin + .bar.thin { margin-top: 2px; }
.rows { display: grid; grid-template-columns: max-content 1fr max-content; gap: 6px 14px; align-items: center; }
.rows .num { font-variant-numeric: tabular-nums; text-align: right; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 2px; font-size: 12.5px; color: var(--faint); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px;
  vertical-align: -1px; }
ul { margin: 4px 0 10px; padding-left: 20px; } li { margin: 2px 0; max-width: 110ch; }
.warnings { border-left: 3px solid var(--loading); padding-left: 14px; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 0 40px; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--text); font-size: 11px; }
svg text.faint { fill: var(--faint); } svg .lane { fill: var(--panel); } svg .grid { stroke: var(--line); }
.forward { fill: var(--forward); background: var(--forward); }
.backward { fill: var(--backward); background: var(--backward); }
.update { fill: var(--update); background: var(--update); } .other { fill: var(--other); background: var(--other); }
.copy { fill: var(--copy); background: var(--copy); } .comm { fill: var(--comm); background: var(--comm); }
.loading { fill: var(--loading); background: var(--loading); } .idle { fill: var(--idle); background: var(--idle); }
.cpu { fill: var(--cpu); background: var(--cpu); } .compute { fill: var(--compute); background: var(--compute); }
.both { background: var(--forward); } .critical { fill: var(--critical); background: var(--critical); }
@media (max-width: 700px) { main { padding: 20px 16px 40px; } .scroll > svg { min-width: 760px; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); } td.name { min-width: 130px; } }
@media print { main { max-width: none; padding: 0; } h2 { break-after: avoid; } }
"""

#: CSS class of each resource, in the order of :class:`daydream.report.breakdown.Resource`.
RESOURCE_CLASSES = ("cpu", "compute", "copy", "comm", "loading")


def document(title: str, body: str, style: str = "") -> str:
    """A page of its own: ``title`` and ``body`` as HTML, ``style`` besides :data:`CSS`."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{CSS}{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def esc(text: object) -> str:
    """Text as HTML, whatever it holds; characters that no document may hold are replaced."""
    return html.escape("".join(c if c.isprintable() else " " for c in str(text)))


def ms(microseconds: float) -> str:
    """Milliseconds as text, with digits enough for short ones; a dash for what is not known.

    >>> ms(176_080.0), ms(1_234.0), ms(12.0)
    ('176.1', '1.23', '0.012')
    """
    value = microseconds / 1000
    if value != value:
        return "–"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def percent(share: float) -> str:
    """A share as text; a dash for what is not known.

    >>> percent(0.125), percent(float("nan"))
    ('12.5 %', '–')
    """
    return f"{100 * share:.1f} %" if share == share else "–"


def tile(label: str, value: str, note: str = "", kind: str = "") -> str:
    """A number with what it is."""
    shown = f'<div class="note">{esc(note)}</div>' if note else ""
    head = f'<div class="label">{esc(label)}</div><div class="value {kind}">{esc(value)}</div>'
    return f'<div class="tile">{head}{shown}</div>'


def bar(parts: Iterable[tuple[str, float, str]], total: float, *, thin: bool = False) -> str:
    """A stacked bar of (CSS class, amount, tooltip), as wide as its share of `total`."""
    pieces = "".join(
        f'<span class="{kind}" style="width:{100 * amount / total:.3f}%" title="{esc(tip)}"></span>'
        for kind, amount, tip in parts
        if total > 0 and amount > 0
    )
    return f'<div class="bar{" thin" if thin else ""}">{pieces}</div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Colours and what they mean: (CSS class, text)."""
    items = "".join(f'<span><i class="{kind}"></i>{esc(text)}</span>' for kind, text in entries)
    return f'<div class="legend">{items}</div>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str] = (), last: str = "") -> str:
    """A table of cells that are HTML already. `classes` are the columns', `last` the last row's class."""
    kinds = [*classes, *[""] * (len(columns) - len(classes))]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="{kind}">{cell}</{tag}>' if kind else f"<{tag}>{cell}</{tag}>"
            for kind, cell in zip(kinds, row, strict=True)
        )

    body = [f"<tr>{cells('td', row)}</tr>" for row in rows]
    if last and body:
        body[-1] = body[-1].replace("<tr>", f'<tr class="{last}">', 1)
    head = cells("th", [esc(column) for column in columns])
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'
