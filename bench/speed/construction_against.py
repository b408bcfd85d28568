"""Construction in this tree against another one: ``python -m bench.speed.construction_against OTHER_TREE``.

Both construct the same suite in turns, each turn in a process of its own, so that what else the machine does befalls
both alike. Of every operator the fastest time of all turns counts; what is printed are medians over the operators.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import click

#: What a turn runs in either tree, which may have no module but these; the first round warms up.
TURN = """
import json, sys
from bench.speed.construction import construct_once, suite_forms
from hal.catalog import load_device
forms, device = suite_forms(sys.argv[1]), load_device(sys.argv[2])
construct_once(forms, device)
rounds = [construct_once(forms, device) for _ in range(int(sys.argv[3]))]
print(json.dumps({name: min(seconds[name] for seconds in rounds) for name in forms}))
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--suite", default="roller119", show_default=True, help="Operators.")
@click.option("--device", default="v100", show_default=True, help="A board of the catalogue.")
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1), help="Processes of each tree.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="Constructions in each process.")
def main(other: Path, suite: str, device: str, turns: int, rounds: int) -> None:
    """Time construction here and in the tree OTHER."""
    trees = {"other": other.resolve(), "here": Path(__file__).resolve().parents[2]}
    times: dict[str, list[Mapping[str, float]]] = {name: [] for name in trees}
    for _ in range(turns):
        for name, tree in trees.items():
            times[name].append(turn(tree, suite, device, rounds))
    this_tree, other_tree = (_fastest(times[name]) for name in ("here", "other"))
    for name, seconds in (("other", other_tree), ("here", this_tree)):
        click.echo(f"{name:6s} median {1e3 * statistics.median(seconds.values()):.2f} ms per operator")
    ratio = statistics.median(this_tree.values()) / statistics.median(other_tree.values())
    each = statistics.geometric_mean(this_tree[name] / other_tree[name] for name in this_tree)
    click.echo(f"ratio of the medians {ratio:.3f}, of the single operators {each:.3f} (geometric mean)")


def turn(tree: Path, suite: str, device: str, rounds: int) -> dict[str, float]:
    """Seconds by operator in a fresh process of ``tree``."""
    command = [sys.executable, "-c", TURN, suite, device, str(rounds)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def _fastest(turns: list[Mapping[str, float]]) -> dict[str, float]:
    """The least time of every operator."""
    return {name: min(turn[name] for turn in turns) for name in turns[0]}


if __name__ == "__main__":
    main()
