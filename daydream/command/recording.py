"""The recording that a command is about: its options as one value, and its replay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from daydream.command.outputs import check_outputs

if TYPE_CHECKING:
    from daydream.answers import Replay

#: As :data:`daydream.tasks.steps.STEPS_BY`, which takes NumPy to import.
STEPS_BY = ("auto", "optimizer", "loader", "kernels", "none")

_PATH = click.Path(dir_okay=False, path_type=Path)


def json_option(text: str = "One JSON object on stdout.") -> Callable[[Any], Any]:
    """``--json``, given to the command as ``as_json``."""
    return click.option("--json/--no-json", "as_json", default=False, help=text)


def html_option(text: str = "Also write a report to open in a browser.") -> Callable[[Any], Any]:
    """``--html FILE``."""
    return click.option("--html", type=_PATH, default=None, help=text)


def out_option(text: str) -> Callable[[Any], Any]:
    """``--out FILE``."""
    return click.option("--out", type=_PATH, default=None, help=text)


def step_option(text: str = "Only ProfilerStep#N, else the N-th from 0.") -> Callable[[Any], Any]:
    """``--step N``, given to the command as ``number``."""
    return click.option("--step", "number", type=int, default=None, metavar="N", help=text)


def rows_option(default: int = 10, most: int = 1000, text: str = "Lines of each table.") -> Callable[[Any], Any]:
    """``--rows N``."""
    return click.option("--rows", type=click.IntRange(1, most), default=default, show_default=True, help=text)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recording, and what is asked of it.

    Attributes:
        trace: its file; None where a folder is asked for in its place.
        number: of the only step that counts, None for all full ones.
        steps_by: what tells the steps apart, one of :data:`STEPS_BY`.
        out: file of the timeline, None for none.
        html: file of the report, None for none.
        execution: PyTorch's execution trace of the same run, None without.
    """

    trace: Path | None
    number: int | None
    steps_by: str
    out: Path | None
    html: Path | None
    execution: Path | None

    def replay(self) -> Replay:
        """The recording replayed; whether the outputs can be written is checked first."""
        assert self.trace is not None
        check_outputs(self.out, self.html)
        from daydream.answers import replay

        return replay(self.trace, self.number, self.steps_by, execution=self.execution)


def recording_options(command: Callable[..., Any], *, required: bool = True) -> Callable[..., Any]:
    """The options of a :class:`Recording`, which the command gets as its first argument."""

    @wraps(command)
    def called(
        *,
        trace: Path | None,
        number: int | None,
        steps_by: str,
        out: Path | None,
        html: Path | None,
        execution: Path | None,
        **others: Any,
    ) -> Any:
        recording = Recording(
            trace=trace, number=number, steps_by=steps_by, out=out, html=html, execution=execution
        )  # fmt: skip
        return command(recording, **others)

    for option in (
        json_option(),
        html_option(),
        out_option("Also write the timeline (.json or .json.gz) to open in Perfetto next to the trace."),
        step_option(),
        click.option(
            "--steps-by",
            type=click.Choice(STEPS_BY),
            default="auto",
            show_default=True,
            help="What tells the steps of a trace without ProfilerStep; auto: the first of these that repeats.",
        ),
        click.option(
            "--execution-trace",
            "execution",
            type=_PATH,
            default=None,
            help="PyTorch's execution trace (Chakra) of the same run: sizes of operators that TRACE lacks.",
        ),
        click.argument("trace", type=click.Path(path_type=Path), required=required),
    ):
        called = option(called)
    return called
