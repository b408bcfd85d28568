"""``daydream diff``: two recordings of one program compared."""

from __future__ import annotations

from pathlib import Path

import click

from daydream.command.outputs import check_outputs, with_options
from daydream.command.recording import html_option, json_option, rows_option, step_option


@click.command("diff")
@with_options(
    json_option("One JSON object on stdout (daydream schema diff)."),
    html_option("Also write a page to open in a browser."),
    step_option("Only ProfilerStep#N of both, else the N-th from 0."),
    rows_option(15, text="Operators in the table."),
    click.argument("before", type=click.Path(path_type=Path)),
    click.argument("after", type=click.Path(path_type=Path)),
)
def diff_command(*, before: Path, after: Path, as_json: bool, html: Path | None, number: int | None, rows: int) -> None:
    """Tell what differs between the traces BEFORE and AFTER: operators and their kernels, slower, faster, new and gone.

    BEFORE and AFTER are recordings of one program: before and after a change, or two ranks of a job. A difference
    within what the steps of the same recording differ by is none.
    """
    check_outputs(None, html)
    from daydream.answers import replay
    from daydream.diff.compare import compare

    first, second = replay(before, number), replay(after, number)
    difference = compare(first.timeline, second.timeline, (first.steps, second.steps), (str(before), str(after)))
    warnings = first.graph.warnings, second.graph.warnings
    if as_json:
        import msgspec

        from daydream.diff.record import diff_record

        click.echo(msgspec.json.encode(diff_record(difference, warnings)).decode())
    else:
        from daydream.diff.tables import print_difference

        print_difference(difference, rows)
        for path, of_trace in zip((before, after), warnings, strict=True):
            for warning in of_trace:
                click.echo(f"daydream: warning: {path}: {warning}", err=True)
    if html is not None:
        from daydream.diff.page import write_page

        write_page(html, difference)


@click.command("schema")
@click.argument("kind", type=click.Choice(["diff"]))
def schema_command(kind: str) -> None:
    """Print the JSON Schema of an answer: that of daydream diff --json."""
    del kind  # there is one
    from daydream.diff.record import schema_text

    click.echo(schema_text(), nl=False)
