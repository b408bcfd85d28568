"""``daydream merge``: traces of all ranks of a job as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from daydream.command.outputs import check_outputs, print_json, warn, write_timeline_file
from daydream.command.recording import html_option, json_option, out_option, rows_option, step_option
from hal.support.errors import InputError
from hal.support.threads import cores


@click.command("merge")
@json_option()
@html_option()
@out_option("Also write the timeline of all ranks (.json or .json.gz) to open in Perfetto.")
@step_option()
@click.option("--align/--no-align", default=True, show_default=True, help="Align the hosts' clocks first.")
@click.option(
    "--ranks-per-host",
    type=click.IntRange(1),
    default=None,
    help="Ranks that share a host and its clock; by default, what the files say.",
)
@click.option("--partial/--whole", default=False, show_default=True, help="Whether ranks may be missing.")
@click.option(
    "--jobs", type=click.IntRange(1, 256), default=None, help="Processes that read many files.  [default: all cores]"
)
@rows_option(most=10_000)
@click.argument("ranks", nargs=-1, required=True, type=click.Path(path_type=Path))
def merge_command(
    *,
    ranks: Sequence[Path],
    as_json: bool,
    html: Path | None,
    out: Path | None,
    number: int | None,
    align: bool,
    ranks_per_host: int | None,
    partial: bool,
    jobs: int | None,
    rows: int,
) -> None:
    """Merge the traces of all RANKS of a job: who waits for whom, and what an even load would save.

    RANKS are files of PyTorch's profiler, or a folder of them. Clocks of hosts are aligned by the collectives that
    their ranks took part in, and every collective is divided into waiting for the last rank and moving data.
    """
    check_outputs(out, html)
    from daydream.ranks.merge import merge, read_ranks
    from daydream.ranks.report import findings, findings_record, print_findings
    from daydream.trace.text import no_collection

    # There is a dict per event of every rank, and each collection would walk all of them.
    with no_collection():
        read = read_ranks(ranks, hosts=ranks_per_host or 0, partial=partial, jobs=jobs or cores(), progress=_progress)
        merged = merge(read, aligned=align)
        hosts = len(merged.clocks.hosts)
        as_recorded = merge(read, aligned=False) if align and hosts > 1 and len(read) <= MOST_COMPARED else None
        del read
        if not merged.meetings.count:
            raise InputError(str(ranks[0]), "no collective is on two ranks", "record ranks of one distributed job")
        report = findings(merged, number, as_recorded=as_recorded, rows=rows)
    if as_json:
        print_json({**findings_record(report), "warnings": list(merged.graph.warnings)})
    else:
        print_findings(report, rows)
        warn(merged.graph)
    write_timeline_file(out, report.timeline, "replayed")
    if html is not None:
        from daydream.ranks.page import write_page

        write_page(html, report, rows)


#: Ranks up to which the replay is also worked out with clocks as recorded, which takes as long once more.
MOST_COMPARED = 16


def _progress(count: int, total: int) -> None:
    """A line that counts, on a terminal."""
    import sys

    if sys.stderr.isatty():
        click.echo(f"\rdaydream: {count} of {total} ranks read" + ("\n" if count == total else ""), err=True, nl=False)
