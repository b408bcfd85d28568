"""The comparison as tables for the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from daydream.diff.compare import SAME, Amount, Change, Difference, OperatorChange
from daydream.report.breakdown import Resource
from daydream.report.tables import ms, short, table
from hal.support.tables import print_line, print_table

#: Kernels of an operator that get a line.
KERNELS = 4


def arrow(before: Amount, after: Amount, *, count: bool = False) -> str:
    """Both amounts, a step: milliseconds or how many; a dash for what is not there."""
    if count:
        texts = [f"{each.count:.1f}".removesuffix(".0") for each in (before, after)]
        return texts[0] if texts[0] == texts[1] else " -> ".join(texts)
    return " -> ".join(f"{each.us / 1000:.3f}" if each.count or each.us else "-" for each in (before, after))


def signed(microseconds: float) -> str:
    """A change in milliseconds with its sign.

    >>> signed(1234.0), signed(-12.0)
    ('+1.234', '-0.012')
    """
    return f"{microseconds / 1000:+.3f}"


def print_difference(difference: Difference, rows: int) -> None:
    """Both steps, the operators that changed with their kernels, and the kinds of GPU tasks."""
    before, after = difference.before, difference.after
    sides = table("Steps, ms, mean", "", "steps", "measured", "GPU tasks", "path: most on", "of it")
    for side in (before, after):
        largest = max(Resource, key=lambda kind: side.critical_us[kind])
        sides.add_row(
            Text(short(Path(side.path).name)), str(len(side.steps)), ms(side.measured_us), ms(side.gpu_us),
            largest.label, ms(side.critical_us[largest]),
        )  # fmt: skip
    print_table(sides)
    for sentence in conclusions(difference):
        print_line(sentence)
    print_line()
    if difference.operators:
        print_table(_operators(difference, rows))
        if len(difference.operators) > rows:
            print_line(f"{len(difference.operators) - rows} operators more changed by less (--rows, --json, --html)")
        print_line()
    kinds = table("Kinds of GPU tasks, per step", "kind", "became", "count", "GPU, ms", "change")
    for kind in difference.kinds:
        kinds.add_row(*_cells(kind))
    print_table(kinds)


def _operators(difference: Difference, rows: int) -> Table:
    made = table(
        "Operators that changed, per step",
        "operator and its kernels",
        "became",
        "count",
        "GPU, ms",
        "change",
        "CPU, ms",
    )
    for operator in difference.operators[:rows]:
        cpu = "-" if operator.cpu_status == "same" else arrow(operator.cpu_before, operator.cpu_after)
        made.add_row(*_cells(operator), cpu, style="bold")
        shown = [each for each in operator.kernels if each.status != "same"][:KERNELS]
        for kernel in shown:
            made.add_row(*_cells(kernel, "  "), "")
    return made


def _cells(change: Change, indent: str = "") -> list[Text]:
    count = arrow(change.before, change.after, count=True)
    texts = [indent + short(change.name), change.status, count, arrow(change.before, change.after)]
    if isinstance(change, OperatorChange) and not (change.before.count or change.after.count):
        texts[2:] = [arrow(change.cpu_before, change.cpu_after, count=True), "-"]
        return [Text(text) for text in (*texts, "-")]
    return [Text(text) for text in (*texts, signed(change.change_us))]


def conclusions(difference: Difference) -> list[str]:
    """The comparison in sentences."""
    before, after = difference.before, difference.after
    sentences = []
    if before.measured_us == before.measured_us and after.measured_us == after.measured_us and after.measured_us:
        pace = before.measured_us / after.measured_us
        word = "as fast" if abs(pace - 1) < 0.005 else f"{pace:.2f} times as fast"
        sentences.append(
            f"A step takes {ms(before.measured_us)} ms before and {ms(after.measured_us)} ms after: {word}."
        )
    on_path = [new - old for old, new in zip(before.critical_us, after.critical_us, strict=True)]
    largest = max(Resource, key=lambda kind: abs(on_path[kind]))
    if abs(on_path[largest]) > SAME * max(sum(before.critical_us), sum(after.critical_us)):
        sentences.append(f"On the critical path {largest.label} changed most: {signed(on_path[largest])} ms a step.")
    counts = [(difference.count(word), word) for word in ("slower", "faster", "new", "gone")]
    counted = ", ".join(f"{count} {word}" for count, word in counts if count)
    sentences.append(f"Operators: {counted or 'none changed'}; {difference.same} as before.")
    if before.board and after.board and before.board != after.board:
        sentences.append(f"The boards differ: {before.board} before, {after.board} after.")
    return sentences
