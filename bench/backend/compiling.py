"""``python -m bench.backend.compiling``: seconds that `torch.compile` and a first call take, by the clock and of all
processors, with nothing in any cache and with everything there, a process each. Dynamo alone, whose graph runs eagerly,
is part of all others but of what was compiled ahead of time (``aot_compile``) and is loaded from a file."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.backend.networks import NETWORKS
from hal.support.atomic import write_atomic
from hal.support.store import cache_folder

COMPILERS = ("dynamo", "inductor", "inductor, frozen", "roller", "roller, ahead of time")


def processor_seconds() -> tuple[float, float]:
    """Processor time of this process, and of those that it waited for."""
    own, others = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, others.ru_utime + others.ru_stime


def first_call(name: str, compiler: str) -> dict[str, Any]:
    """Seconds of a network's first call by the clock, those of processors of this process and of others, those of a
    later call by the clock, and whether TVM was imported."""
    import torch
    import torch._inductor.config

    import roller.dynamo.backend  # noqa: F401, Inductor with it: libraries are imported by then

    torch.manual_seed(0)
    network, inputs = NETWORKS[name](1)
    with torch.no_grad(), torch._inductor.config.patch(freezing="frozen" in compiler):
        network(*inputs)
        before, start = processor_seconds(), time.perf_counter()
        backend = {"dynamo": "eager", "roller": "roller"}.get(compiler.partition(",")[0], "inductor")
        is_from_file = "ahead" in compiler
        call: Any = (
            partial(from_file(network, inputs), network) if is_from_file else torch.compile(network, backend=backend)
        )
        call(*inputs)
        clock = time.perf_counter() - start
        own, others = (now - then for now, then in zip(processor_seconds(), before, strict=True))
        start = time.perf_counter()
        call(*inputs)
        later = time.perf_counter() - start
    return {
        "clock": clock, "seconds": own, "other_processes": others, "later": later, "imports_tvm": "tvm" in sys.modules
    }  # fmt: skip


def _own_caches(folder: Path) -> dict[str, str]:
    """The environment of a compiler with caches of its own: headers that another has compiled would be found there.
    Python keeps the modules that it compiles, as those of an installed package are kept."""
    with suppress(FileNotFoundError):  # what was measured of this processor is no cache of compilers
        shutil.copytree(cache_folder("devices"), folder / "roller" / "devices")
    others = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**others, "XDG_CACHE_HOME": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def from_file(network: Any, inputs: tuple[Any, ...]) -> Any:
    """A network as a function of itself and its inputs, from a file, which the first process writes."""
    import torch

    path = cache_folder("ahead_of_time.pt2")
    if not path.exists():
        compiled: Any = torch.compile(network, backend="roller", fullgraph=True)
        compiled.forward.aot_compile((inputs, {})).save_compiled_function(str(path))
    with path.open("rb") as file:
        return torch.compiler.load_compiled_function(file)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--network", "networks", multiple=True, type=click.Choice(list(NETWORKS)), help="Which; all by default.")
@click.option("--compiler", "compilers", multiple=True, type=click.Choice(COMPILERS), default=COMPILERS)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Turns with warm caches.")
@click.option(
    "--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the results into this file."
)
def main(*, networks: tuple[str, ...], compilers: tuple[str, ...], rounds: int, out: Path | None) -> None:
    """Compile networks in turns; the first of a compiler's is cold, of others the median by the clock counts."""
    rows: list[dict[str, Any]] = []
    for name in networks or NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            environments = {
                compiler: _own_caches(Path(folder, str(number))) for number, compiler in enumerate(compilers)
            }
            calls: dict[str, list[dict[str, Any]]] = {compiler: [] for compiler in compilers}
            for _ in range(1 + rounds):
                for compiler, environment in environments.items():
                    command = [sys.executable, "-m", __spec__.name, "--one", name, compiler]
                    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                    calls[compiler].append(json.loads(done.stdout.splitlines()[-1]))
        rows += [
            {
                "network": name,
                "compiler": compiler,
                "cold": cold,
                "warm": sorted(warm, key=lambda call: float(call["clock"]))[len(warm) // 2],
                "warm_clocks": [call["clock"] for call in warm],
            }
            for compiler, (cold, *warm) in calls.items()
        ]
        if out is not None:
            write_atomic(out, json.dumps({"load": os.getloadavg(), "rows": rows}, indent=1) + "\n")
    table = Table("network", "compiler", "cold", "warm", "a later call", "of all processors", "", box=None)
    for row in rows:
        calls_of_row = [row[kind] for kind in ("cold", "warm")]
        clocks = [f"{call['clock']:.2f} s" for call in calls_of_row]
        processors = [f"{call['seconds'] + call['other_processes']:.1f} s" for call in calls_of_row]
        table.add_row(row["network"], row["compiler"], *clocks, f"{row['warm']['later']:.2f} s", *processors)
    Console(width=150).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(first_call(*sys.argv[2:])))
    else:
        main()
