"""Start-up time of the programs: ``python -m bench.speed.startup``.

Every figure is the best of some runs of a fresh interpreter, from its start to its end: what a user waits. Exit code 1
where a promise is not kept.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

import click

from daydream.cli import main as daydream
from hal.support.tables import print_line
from roller.cli import main as roller

#: Promised seconds: of an import beyond the interpreter's own start, and of a command's help with it.
IMPORT_S, HELP_S = 0.15, 0.3


def helps() -> list[tuple[str, ...]]:
    """Module and arguments of every help there is."""
    return [
        (f"{program.name}.cli", *command, "--help")
        for program in (roller, daydream)
        for command in ((), *((name,) for name in program.commands))
    ]


def seconds(arguments: Sequence[str], rounds: int) -> float:
    """The shortest of some runs of ``python ARGUMENTS``."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - start)
    return min(times)


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Runs, of which the best counts.")
def main(rounds: int) -> None:
    """Time the imports of the packages and the help of every command."""
    bare = seconds(["-c", "pass"], rounds)
    imports = {f"import {name}": seconds(["-c", f"import {name}"], rounds) - bare for name in ("roller", "daydream")}
    by_help = {" ".join(each).replace(".cli", ""): seconds(["-m", *each], rounds) for each in helps()}
    for name, length in [*imports.items(), *by_help.items()]:
        print_line(f"{name:28}{length * 1000:7.0f} ms")
    is_fast = max(imports.values()) < IMPORT_S and max(by_help.values()) < HELP_S
    verdict = "kept" if is_fast else "NOT KEPT"
    print_line(f"promised: {IMPORT_S * 1000:.0f} ms an import, {HELP_S * 1000:.0f} ms a help: {verdict}")
    sys.exit(not is_fast)


if __name__ == "__main__":
    main()
