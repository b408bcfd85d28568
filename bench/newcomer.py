"""The README tried from the top as a new user would: ``python -m bench.newcomer --python python3.12``.

A copy of the tracked files, an empty home, one Python and the programs of the system: every command of the README
runs there in order, in one shell, and what it prints is compared with what the README shows, times and measured errors
aside. Packages come from pip's usual index. Exit code 1 where an output differs, a command fails, or the first result
comes later than promised.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from hal.support.tables import new_table, print_line, print_table

ROOT = Path(__file__).parents[1]

#: Seconds from an empty environment to the first output that the README shows, download included.
FIRST_RESULT_S = 180

#: What a session keeps of the environment: how pip reaches its index.
_NEEDED_VARIABLES = re.compile(r"PIP_\w+|SSL_\w+|\w*_proxy|\w*_PROXY|REQUESTS_CA_BUNDLE")


@dataclass(frozen=True)
class Command:
    """A command of a page and the output shown below it; ``...`` as the last line stands for the rest."""

    text: str
    shown: str


@dataclass(frozen=True)
class Tried:
    """Outcome of a command: seconds, exit code, output, and whether that is the one shown."""

    command: Command
    seconds: float
    code: int
    output: str
    agrees: bool


def commands_of(page: str) -> list[Command]:
    r"""The commands of a page's console blocks, in order.

    >>> commands_of("```console\n$ roller doctor \\\n    --json\n{}\n```\n")
    [Command(text='roller doctor \\\n    --json', shown='{}\n')]
    """
    commands = []
    for block in re.findall(r"^```console\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        for text, shown in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
            commands.append(Command(text, shown))
    return commands


def agrees(shown: str, output: str, steady: Callable[[str], str]) -> bool:
    """True if an output is the one shown, without what differs between two good runs; nothing shown agrees with all."""
    if not shown:
        return True
    printed = "".join(line.rstrip() + "\n" for line in output.splitlines())
    if shown.endswith("...\n"):
        return steady(printed).startswith(steady(shown.removesuffix("...\n")))
    return steady(printed).rstrip() == steady(shown).rstrip()


@contextmanager
def session(python: Path) -> Iterator[Callable[[str], tuple[int, str]]]:
    """A shell in a copy of the tracked files, with nothing installed but the system's programs and one Python.

    Yields:
        what runs a command there, for its exit code and standard output.
    """
    with tempfile.TemporaryDirectory(prefix="newcomer-") as name:
        place = Path(name)
        clone, programs, home = place / "clone", place / "programs", place / "home"
        for folder in (clone, programs, home):
            folder.mkdir()
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for file in tracked.decode().split("\0")[:-1]:
            (clone / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, clone / file)
        (programs / "python3").symlink_to(python)
        variables = {key: value for key, value in os.environ.items() if _NEEDED_VARIABLES.fullmatch(key)}
        environment = {
            **variables, "HOME": str(home), "PATH": f"{programs}:/usr/bin:/bin", "COLUMNS": "100", "TERM": "dumb",
            "LANG": "C.UTF-8", "TMPDIR": str(place),
        }  # fmt: skip
        state = place / "state"

        def run(text: str) -> tuple[int, str]:
            # Variables and functions of one command are there for the next, as in one shell.
            script = f"[ -f {state} ] && . {state}\n{text}\ncode=$?\ndeclare -px >{state}; exit $code"
            done = subprocess.run(
                ["bash", "-c", script], cwd=clone, env=environment, stdout=subprocess.PIPE, text=True, check=False
            )
            return done.returncode, done.stdout

        yield run


def tried(python: Path, commands: list[Command], steady: Callable[[str], str]) -> list[Tried]:
    """Every command of a page run in an empty environment."""
    results = []
    with session(python) as run:
        for command in commands:
            start = time.perf_counter()
            code, output = run(command.text)
            seconds = time.perf_counter() - start
            results.append(Tried(command, seconds, code, output, agrees(command.shown, output, steady)))
    return results


def first_result_seconds(results: list[Tried]) -> float:
    """Seconds until the first command with an output that is shown has printed it."""
    first = next(index for index, each in enumerate(results) if each.command.shown)
    return sum(each.seconds for each in results[: first + 1])


def _steady() -> Callable[[str], str]:
    sys.path.insert(0, str(ROOT / "docs"))
    function: Callable[[str], str] = importlib.import_module("update").steady
    return function


def _table(title: str, results: list[Tried]) -> Table:
    view = new_table(("command",), ("s", "exit code"), ("output",), title=title)
    for each in results:
        verdict = "as shown" if each.agrees else "DIFFERS"
        view.add_row(
            escape(each.command.text.split("\n")[0][:60]), f"{each.seconds:.1f}", str(each.code),
            verdict if each.command.shown else "-",
        )  # fmt: skip
    return view


@click.command()
@click.option("--python", multiple=True, default=("python3",), help="Interpreters to try it with.")
def main(python: tuple[str, ...]) -> None:
    """Try the README's commands, in order, in an empty environment of each interpreter."""
    commands = commands_of((ROOT / "README.md").read_text("utf-8"))
    good = True
    for name in python:
        path = shutil.which(name)
        if path is None:
            raise click.BadParameter(f"{name}: no such program", param_hint="--python")
        results = tried(Path(path), commands, _steady())
        first = first_result_seconds(results)
        print_table(_table(f"{name}, first result after {first:.0f} s", results))
        for each in results:
            if not each.agrees:
                print_line(f"\n$ {each.command.text}\n{each.output}")
        good &= first <= FIRST_RESULT_S and all(each.agrees and each.code == 0 for each in results)
    sys.exit(not good)


if __name__ == "__main__":
    main()
