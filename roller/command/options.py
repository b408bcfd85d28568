"""Common parts of ``roller``'s commands: options, checks of what they name, the pool of compilers, the progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from codegen.generators import check_tools
from hal.support.errors import InputError
from hal.support.threads import cores

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec


def device_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--device NAME|FILE``, given to the command as ``device_name``."""
    return click.option(
        "--device", "device_name", required=True, metavar="NAME|FILE", help="A board (roller devices) or a spec file."
    )(command)


def search_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--search roller|sokoban|both``, given to the command as ``method``."""
    return click.option(
        "--search",
        "method",
        type=click.Choice(["roller", "sokoban", "both"]),
        default="both",
        show_default=True,
        help="Who finds programs: Roller's construction, Sokoban's exhaustive search, or both together.",
    )(command)


def algorithms_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--algorithms LIST``, to be read by :func:`roller.algorithms.parse_algorithms`."""
    return click.option(
        "--algorithms",
        default=None,
        metavar="LIST",
        help="Kinds of programs that compete, of direct (one kernel), split-k, split-rows, winograd, flat-image, "
        "split-line.  [default: all]",
    )(command)


def check_readable(file: Path) -> None:
    """Refuse what is no file, before any process starts.

    Raises:
        InputError: there is no such file, or it is a directory.
    """
    if not file.is_file():
        problem = "is a directory" if file.is_dir() else "no such file"
        raise InputError(str(file), problem, "give a JSON file with one operator or a list of them")


def check_compilable(device: DeviceSpec) -> None:
    """Refuse a device that kernels cannot be built for, or not on this machine, before any process starts.

    Raises:
        InputError: the device has no code generator, or a tool is missing.
    """
    if device.code_generator is None:
        raise InputError(
            "--device",
            f"{device.name} has no code generator: {device.code_generator_reason}",
            "roller explain and roller devices answer for it",
        )
    check_tools(device.code_generator)


def check_out(out: Path) -> None:
    """Refuse a place that cannot become a directory.

    Raises:
        InputError: the path, or one above it, exists and is no directory.
    """
    existing = next((path for path in (out, *out.parents) if os.path.lexists(path)), None)
    if existing is not None and not existing.is_dir():
        raise InputError("--out", f"{existing} exists and is no directory", "name another one")


@contextmanager
def kernel_pool(jobs: int | None) -> Iterator[Executor]:
    """The pool, and one line where the system ends one of its processes."""
    from roller.compile.workers import worker_pool

    try:
        with worker_pool(jobs or cores()) as pool:
            yield pool
    except BrokenProcessPool as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def progress(count: int, *, show: bool, what: str = "compiling") -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal's stderr for lists; nothing otherwise."""
    if not show or count < 2 or not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=count)
        yield lambda name: bar.update(task, advance=1, description=name)
