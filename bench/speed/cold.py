"""``python -m bench.speed.cold``: a first ``roller compile``, against the least that a compiler of its kind needs.

The floor is a process that imports TVM, without the PyTorch that TVM imports where it is installed, and then has NVRTC
compile the very texts that ``roller compile`` writes, on all cores. Both sides run in turns, each in processes of its
own, the first without kept kernels; a third run finds its kernels kept. The very first run also compiles for the
machine itself, C of construction and the emulator of kernels, and has a column of its own. Modules that Python has
compiled are kept in all others, as an installed package has them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

from hal.support.tables import new_table, print_line, print_table

#: By name: an operator, the board, how many kernels, and how many times the floor is allowed.
CASES: Mapping[str, tuple[dict[str, object], str, int, float]] = {
    "float32, ten": ({"op": "matmul", "m": 1024, "n": 1024, "k": 1024}, "v100", 10, 1.2),
    "float32, one": ({"op": "matmul", "m": 1024, "n": 1024, "k": 1024}, "v100", 1, 1.2),
    "float16, ten": ({"op": "matmul", "m": 1024, "n": 1024, "k": 1024, "dtype": "float16"}, "a100", 10, 1.2),
    "float16, one": ({"op": "matmul", "m": 1024, "n": 1024, "k": 1024, "dtype": "float16"}, "a100", 1, 1.2),
}

#: Seconds in which a second compilation is to end.
CACHED_SECONDS = 0.5

#: The floor: TVM imported, then a process a core that compiles its share of the texts.
_FLOOR = """
import os, sys
sys.modules["torch"] = None
import tvm
from codegen.gpu.source.nvrtc import compile_cuda
files, architecture = sys.argv[2:], sys.argv[1]
cores, children = len(os.sched_getaffinity(0)), []
for core in range(min(cores, len(files))):
    child = os.fork()
    if not child:
        for file in files[core::cores]:
            compile_cuda(open(file).read(), architecture, name=file)
        os._exit(0)
    children.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


def _seconds(command: Sequence[str], environment: Mapping[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - start


def _case(name: str, folder: Path, turns: int, step: Callable[[], None]) -> tuple[list[float], ...]:
    """Seconds of the first run of all, and by turn of compiling anew, of the floor, and of compiling what is kept."""
    operator, board, top_k, _ = CASES[name]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPYCACHEPREFIX": str(folder / "python")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    file = folder / "operator.json"
    file.write_text(json.dumps({**operator, "name": "op"}))
    compiling = [sys.executable, "-m", "roller.cli", "compile", str(file), "--device", board, "--top-k", str(top_k)]
    compiling += ["--out", str(folder / "out")]
    first = _seconds(compiling, environment)
    # Not by roller cache --clear, which also removes what was compiled for the machine.
    clearing = [sys.executable, "-c", "from codegen.compile.toolchain import kernel_store; kernel_store().clear()"]
    manifest = json.loads((folder / "out" / "op" / "manifest.json").read_text())
    texts = [str(path) for path in sorted((folder / "out" / "op").glob("kernel_*.cu"))]
    floor = [sys.executable, "-c", _FLOOR, manifest["architecture"], *texts]
    anew, floors, cached = [], [], []
    for _ in range(turns):
        subprocess.run(clearing, check=True, capture_output=True, env=environment)
        anew.append(_seconds(compiling, environment))
        floors.append(_seconds(floor, environment))
        cached.append(_seconds(compiling, environment))
        step()
    return [first], anew, floors, cached


@click.command()
@click.option("--turns", type=click.IntRange(1), default=5, show_default=True)
@click.option("--case", "names", type=click.Choice(list(CASES)), multiple=True, help="Some cases only.")
def main(turns: int, names: tuple[str, ...]) -> None:
    """Time first compilations against their floor, in turns."""
    table = new_table(
        ("case",),
        ("first", "anew", "floor", "times", "asked", "kept", "asked "),
        title=f"roller compile, medians of {turns} turns",
    )
    with click.progressbar(length=turns * len(names or CASES), label="turns", file=sys.stderr) as bar:
        for name in names or CASES:
            with tempfile.TemporaryDirectory() as folder:
                first, anew, floors, cached = _case(name, Path(folder), turns, lambda: bar.update(1))
            ratio = statistics.median(one / other for one, other in zip(anew, floors, strict=True))
            seconds = [first[0], *map(statistics.median, (anew, floors, cached))]
            cells = [f"{each:.2f} s" for each in seconds]
            table.add_row(
                name, *cells[:3], f"{ratio:.2f}", f"{CASES[name][3]:.1f}", cells[3], f"{CACHED_SECONDS:.1f} s"
            )
    print_table(table)
    print_line("first: nothing compiled on this machine before, nor for it; anew: no kernel kept")
    print_line("floor: TVM imported without PyTorch, the same texts by NVRTC on all cores")


if __name__ == "__main__":
    main()
