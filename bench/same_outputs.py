"""Two trees, one output: ``python -m bench.same_outputs record TREE FOLDER``, then ``... compare FOLDER FOLDER``.

Whoever moves or rewrites code without meaning to change a kernel or a number records the tree before and after and
compares the two: compiled suites, bundles for a processor, a thousand estimates, what-ifs of recorded steps. Nothing
recorded depends on the machine or the hour; verification runs kernels on the CPU, so one core less only takes longer.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

#: Passes asked of every recorded step: one that scales, one that fuses, one that inserts communication.
PASSES = ("amp", "fused-optimizer", "ddp:workers=8,bandwidth=12.5")

#: Devices the estimates are asked for, and how many operators each prices.
ESTIMATES = {"v100": 400, "a100": 300, "h200": 200, "t4": 100}

#: Seed of the drawn operators: any, as long as both trees see the same ones.
SEED = 20221


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Compare what two trees write."""


@main.command()
@click.argument("tree", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--traces", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Recorded steps.")
@click.option("--every", default=1, help="Only every N-th operator of the suites and every N-th estimate.")
def record(tree: Path, folder: Path, traces: Path | None, every: int) -> None:
    """Run the commands of TREE and keep what they write in FOLDER."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    tree = tree.resolve()
    suites = tree / "bench" / "suites"
    for name, operators, options in (
        ("roller119-v100", suites / "roller119.json", ("--device", "v100", "--top-k", "3")),
        ("modern-h200", suites / "modern.json", ("--device", "h200", "--top-k", "1")),
        ("cpu24-epyc-9654", tree / "bench" / "cpu" / "cpu24.json", ("--device", "epyc-9654", "--top-k", "3")),
    ):
        chosen = _written(folder / f"{name}.json", json.loads(operators.read_bytes())[::every])
        _run(tree, "roller.cli", "compile", str(chosen), *options, "--out", str(folder / name))
    for device, count in ESTIMATES.items():
        chosen = _written(folder / f"estimate-{device}.json", list(drawn_operators(count))[::every])
        for implementation in ("best", "library"):
            arguments = ("--device", device, "--implementation", implementation, "--search", "roller", "--json")
            page = _run(tree, "roller.cli", "estimate", str(chosen), *arguments)
            (folder / f"estimate-{device}-{implementation}.jsonl").write_bytes(page)
    for trace in sorted(traces.resolve().glob("*.json.gz")) if traces is not None else ():
        for change in PASSES:
            page = _run(tree, "daydream.cli", "whatif", str(trace), "--pass", change, "--json", check=False)
            (folder / f"{trace.name.partition('.')[0]}-{change.partition(':')[0]}.json").write_bytes(page)


@main.command()
@click.argument("before", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("after", type=click.Path(exists=True, file_okay=False, path_type=Path))
def compare(before: Path, after: Path) -> None:
    """Name every file that differs between two recordings; exit code 1 if there is one."""
    digests_before, digests_after = _digests(before), _digests(after)
    different = sorted(
        name
        for name in digests_before.keys() | digests_after.keys()
        if digests_before.get(name) != digests_after.get(name)
    )
    for name in different[:40]:
        click.echo(name)
    click.echo(f"{len(digests_before)} files before, {len(digests_after)} after, {len(different)} differ")
    sys.exit(1 if different else 0)


def drawn_operators(count: int) -> Iterator[dict[str, Any]]:
    """`count` operators of all named kinds, the same for every call.

    >>> [operator["op"] for operator in drawn_operators(3)]
    ['matmul', 'batch_matmul', 'conv2d']
    """
    draw = random.Random(SEED)

    def size(most: int) -> int:
        return max(1, round(2 ** draw.uniform(0, most)) + draw.choice((0, 0, 1)))

    for index in range(count):
        channels, image = 8 * size(6), 7 * size(4)
        operator = (
            {"op": "matmul", "m": size(12), "n": size(12), "k": size(12)},
            {"op": "batch_matmul", "b": size(6), "m": size(10), "n": size(10), "k": size(8)},
            {"op": "conv2d", "n": size(5), "c": channels, "h": image, "w": image, "f": 8 * size(6), "kh": 3, "kw": 3},
            {"op": "depthwise_conv2d", "n": size(5), "c": channels, "h": image, "w": image, "kh": 3, "kw": 3},
            {"op": "avg_pool2d", "n": size(5), "c": channels, "h": image, "w": image, "kh": 2, "kw": 2, "stride": 2},
            {"op": "reduce", "shape": [size(12), size(12)], "axes": [1], "function": "sum"},
            {"op": "elementwise", "shape": [size(12), size(12)], "function": "gelu"},
            {"op": "softmax", "shape": [size(12), size(12)]},
            {"op": "layer_norm", "shape": [size(12), size(12)]},
            {"op": "transpose", "shape": [size(12), size(12)], "perm": [1, 0]},
        )[index % 10]
        yield {**operator, "name": f"operator{index}"}


def _written(path: Path, operators: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps(operators))
    return path


def _run(tree: Path, module: str, *arguments: str, check: bool = True) -> bytes:
    """Standard output of a command of `tree`, and after a failure its exit code and message."""
    click.echo(f"{module.partition('.')[0]} {' '.join(arguments[:4])}", err=True)
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=tree, env=environment, capture_output=True, check=False
    )
    if done.returncode and check:
        raise click.ClickException(f"exit code {done.returncode}: {done.stderr.decode()[-2000:]}")
    return done.stdout if done.returncode == 0 else str(done.returncode).encode() + done.stderr


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


if __name__ == "__main__":
    main()
