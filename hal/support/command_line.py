"""Common parts of the command lines: every foreseeable failure is one line on stderr and an exit code."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NoReturn

import click

from hal.support.errors import InputError
from hal.support.version import version_text

#: Exit code for input that cannot be used.
BAD_INPUT = 2

#: Settings of a program's group.
CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

#: Whether ``--wide`` was given: tables with every column, however wide the terminal (:mod:`hal.support.tables`).
WIDE: ContextVar[bool] = ContextVar("wide", default=False)

#: Wait before a signal whose exception was lost is sent once more: the destructor or callback is over by then.
SECONDS_UNTIL_SENT_AGAIN = 0.05

#: New objects between collections, and collections of each generation before one of the next. Python's own 700, 10 and
#: 10 look through modules again and again while libraries are imported: 0.8 of 5.4 s of a plan of Llama-70B.
COLLECTION_THRESHOLDS = (50_000, 20, 50)

#: Exit code of the program that this process is, once it is known; None where a test or another program called it.
_ended: int | None = None


def _end() -> None:
    """End the process, where it is a program of ours, without taking modules apart: 0.1 of 2.6 s of a plan.

    Registered first, so that it runs after everything else that waits for the end. What does not come through to the
    reader of the output is left to Python, which says so.
    """
    gc.freeze()
    if _ended is None:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(_ended)


atexit.register(_end)


@contextmanager
def _errors(program: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        click.echo(f"{program}: {error}", err=True)
        sys.exit(BAD_INPUT)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"{program}: {where}{error.strerror or error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        _interrupted(program)


def _interrupted(program: str) -> NoReturn:
    # An interrupt that passed through the running of a text, as when a dataclass is made, has CPython end by the signal
    # although it was handled (pythonrun.c, run_eval_code_obj). Running another text takes that back.
    exec("")
    click.echo(f"{program}: interrupted", err=True)
    sys.exit(130)


def _terminate(signum: int, frame: object) -> None:
    """SIGTERM unwinds like Ctrl-C, so that nothing half-written and no process stays behind."""
    sys.exit(128 + signum)


def _send_again(swallowed: sys.UnraisableHookArgs) -> None:
    """Hook of exceptions that Python ignores: a signal's is one that must not be, so the signal is sent once more.

    The handler's exception is lost where Python was in a destructor, a callback of a weak reference or of a compiled
    library (TVM's); the program would run to its end as if there had been no signal.
    """
    if isinstance(swallowed.exc_value, KeyboardInterrupt):
        number = signal.SIGINT
    elif isinstance(swallowed.exc_value, SystemExit) and swallowed.exc_value.code == 128 + signal.SIGTERM:
        number = signal.SIGTERM
    else:
        sys.__unraisablehook__(swallowed)
        return
    again = threading.Timer(SECONDS_UNTIL_SENT_AGAIN, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


def _wide_option() -> click.Option:
    def note(context: click.Context, option: click.Parameter, is_wide: bool) -> None:
        WIDE.set(is_wide)

    return click.Option(
        ["--wide"],
        is_flag=True,
        expose_value=False,
        callback=note,
        help="Show tables with all of their columns, however narrow the terminal.",
    )


def _version_option(program: str) -> click.Option:
    def show(context: click.Context, option: click.Parameter, is_wanted: bool) -> None:
        if is_wanted and not context.resilient_parsing:
            click.echo(version_text(program))
            context.exit()

    return click.Option(
        ["--version"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show the version, the commit and the compilers, and exit.",
    )


class Program(click.Group):
    """A group of commands, named as the user calls it, that prints usage errors in one line like every other error.

    It takes ``--version``, and every command ``--wide``.
    """

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(name, **kwargs)
        self.params.append(_version_option(name))

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        if not isinstance(cmd, click.Group):
            cmd.params.append(_wide_option())
        super().add_command(cmd, name)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return self._run(*args, **kwargs)
        global _ended
        try:
            result = self._run()
        except SystemExit as error:
            _ended = error.code if isinstance(error.code, int) else int(error.code is not None)
            raise
        _ended = 0 if result is None else None
        return result

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        program = self.name or "error"
        gc.set_threshold(*COLLECTION_THRESHOLDS)
        kwargs["standalone_mode"] = False
        kwargs.setdefault("prog_name", program)
        with suppress(ValueError):  # not in the main thread, where signals cannot be set
            signal.signal(signal.SIGTERM, _terminate)
            sys.unraisablehook = _send_again
        try:
            with _errors(program):
                return super().main(*args, **kwargs)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            sys.exit(BAD_INPUT)
        except click.UsageError as error:
            hint = f"; see {error.ctx.command_path} --help" if error.ctx else ""
            click.echo(f"{program}: {' '.join(error.format_message().split()).rstrip('.')}{hint}", err=True)
            sys.exit(BAD_INPUT)
        except click.ClickException as error:
            click.echo(f"{program}: {error.format_message()}", err=True)
            sys.exit(1)
        except click.exceptions.Exit as error:
            sys.exit(error.exit_code)
        except click.Abort:
            _interrupted(program)
