"""``python bench/gpu/report.py DIR``: tables and plots of a harvest, as ``report.md`` and PNGs in its folder."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import click  # noqa: E402

from bench.gpu.comparison import RIVALS, WITHIN, candidate, standings  # noqa: E402
from bench.gpu.results import OperatorResult, Results, TrainingResult, read_results  # noqa: E402
from bench.gpu.whatif import Ask, WhatIf, ask_daydream, what_ifs  # noqa: E402
from hal.support.errors import InputError  # noqa: E402
from roller.profile.comparison import (  # noqa: E402
    FAR_OFF,
    ComparedKernel,
    GroupErrors,
    far_off,
    group_errors,
    read_harvest,
)
from roller.profile.harvested import HARVEST  # noqa: E402


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Where to write.  [default: DIRECTORY]",
)
def main(directory: Path, out: Path | None) -> None:
    """Tables and plots of the harvest in DIRECTORY."""
    try:
        target = write_report(directory, out or directory)
    except InputError as error:
        click.echo(f"report: {error}", err=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        click.echo(f"report: {error}; install what it needs with pip install -e '.[dev]'", err=True)
        sys.exit(1)
    click.echo(str(target))


def write_report(directory: Path, out: Path, ask: Ask = ask_daydream) -> Path:
    """Write ``report.md`` and the pictures of a harvest to `out`; returns the page.

    Raises:
        InputError: there are no results, or they are damaged.
    """
    from bench.gpu.plots import draw_all
    from hal.support.atomic import write_atomic

    results = read_results(directory)
    answers = what_ifs(results, directory, ask)
    out.mkdir(parents=True, exist_ok=True)
    pictures = draw_all(results, answers, out)
    path = out / "report.md"
    write_atomic(path, page(results, read_harvest(directory / HARVEST).kernels, answers, pictures))
    return path


def page(
    results: Results, kernels: Sequence[ComparedKernel], answers: Sequence[WhatIf], pictures: Sequence[Path]
) -> str:
    """The report as Markdown; sections without results are left out."""
    note = " Dry run on the CPU: no time here means anything." if results.dry_run else ""
    date = results.environment.get("date", "")
    parts = [f"# {results.board}, {date}", f"Harvested by `bench/gpu/harvest.py`.{note}", _coverage(results)]
    for title, table in (
        ("Our kernels against the others", _standings(results)),
        ("Operator by operator", _operators(results.operators)),
        ("Predictions against measurements", _errors("kind", group_errors(kernels, lambda kernel: kernel.op))),
        ("Predictions by kind of kernel", _errors("kind", group_errors(kernels, lambda kernel: kernel.kind))),
        (f"First kernels predicted more than {_percent(FAR_OFF)} off", _far_off(kernels)),
        ("Training steps", _training(results.training)),
        ("What-ifs against ground truth", _what_ifs(answers)),
        ("Wrong or failed", _failures(results)),
    ):
        parts += [f"## {title}", table] if table else []
    parts += [f"![{path.stem}]({path.name})" for path in pictures]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; empty without rows."""
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines]) if lines else ""


def duration(seconds: float | None) -> str:
    """Three digits with a unit, as ``12.3 µs``; ``-`` for None."""
    from roller.text.quantities import time_text

    return "-" if seconds is None else time_text(seconds)


def _percent(share: float | None, signed: bool = False) -> str:
    if share is None:
        return "-"
    return f"{100 * share:+.1f}%" if signed else f"{100 * share:.0f}%"


def _coverage(results: Results) -> str:
    rows = [
        (name, str(section.done), str(section.failed), str(section.left_out), f"{section.seconds:.0f} s")
        for name, section in results.sections.items()
    ]
    return table(("section", "done", "failed", "left out for want of time", "took"), rows)


def _standings(results: Results) -> str:
    rows = [
        (
            standing.rival,
            standing.precision,
            str(standing.count),
            _percent(standing.better),
            *map(_percent, standing.within),
            f"{standing.mean_ratio:.2f}",
        )
        for standing in standings(results)
    ]
    within = [f"within {_percent(slack)}" for slack in WITHIN]
    return table(("against", "precision", "operators", "ours is better", *within, "mean speed of ours"), rows)


def _operators(operators: Sequence[OperatorResult]) -> str:
    rows = []
    for operator in operators:
        competitors = [candidate(operator, who, operator.dtype) for who in ("roller", *RIVALS)]
        times = [
            None if competitor is None or competitor.cold is None else competitor.cold.median
            for competitor in competitors
        ]
        ratio = f"{times[1] / times[0]:.2f}" if times[0] and times[1] else "-"
        rows.append((operator.key, operator.dtype, *map(duration, times), ratio))
    return table(
        ("operator", "type", "ours", "library", "flash", "cuDNN", "torch.compile", "Triton", "library / ours"), rows
    )


def _errors(head: str, groups: Iterable[GroupErrors]) -> str:
    rows = [
        (
            group.name,
            str(group.operators),
            str(group.kernels),
            _percent(group.mean_error),
            f"{group.median_ratio:.2f}",
            _percent(group.first_is_best),
        )
        for group in groups
    ]
    return table(
        (head, "bundles", "kernels", "mean error", "median of predicted / measured", "rank 1 within 5% of best"), rows
    )


def _far_off(kernels: Sequence[ComparedKernel]) -> str:
    rows = [
        (kernel.operator, kernel.kind, duration(kernel.predicted), duration(kernel.measured), f"{kernel.ratio:.2f}")
        for kernel in far_off(kernels)
    ]
    return table(("operator", "kind", "predicted", "measured", "predicted / measured"), rows)


def _training(training: Sequence[TrainingResult]) -> str:
    baselines = {(run.model, run.batch): run.steps.median for run in training if run.variant == "baseline"}
    rows = []
    for run in training:
        baseline_seconds = baselines.get((run.model, run.batch))
        profiled_seconds = run.profiled.median if run.profiled else None
        speedup = f"{baseline_seconds / run.steps.median:.2f}" if baseline_seconds else "-"
        rows.append(
            (run.model, str(run.batch), run.variant, duration(run.steps.median), speedup, duration(profiled_seconds))
        )
    return table(("model", "batch", "variant", "step", "speedup", "step under the profiler"), rows)


def _what_ifs(answers: Sequence[WhatIf]) -> str:
    rows = [
        (
            answer.model, str(answer.batch), answer.variant, duration(answer.measured), duration(answer.predicted),
            f"{answer.measured_speedup:.2f}", f"{answer.predicted_speedup:.2f}" if answer.predicted_speedup else "-",
            _percent(answer.error, signed=True) if answer.error is not None else answer.reason,
        )
        for answer in answers
    ]  # fmt: skip
    head = ("model", "batch", "what if", "measured step", "predicted step", "speedup", "predicted speedup", "error")
    return table(head, rows)


def _failures(results: Results) -> str:
    wrong = [(record.where, record.what, record.reason) for record in results.correctness if not record.passed]
    failed = [(record.section, record.key, record.error) for record in results.errors]
    return table(("where", "what", "why"), [*wrong, *failed])


if __name__ == "__main__":
    main()
