"""``python bench/gpu/prepare.py``: compile the kernels that a harvest carries to a GPU machine.

Needs TVM, so it runs here, once per board. The bundles go into a folder that Git ignores and stay below 64 MiB
together: where they would not, the worst predicted kernels of all operators are left out first.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import click  # noqa: E402

from hal.support.errors import InputError  # noqa: E402

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: Below what is carried to GPU machines, with room for the checkout.
MOST_MIB = 48
#: What hal needs besides NumPy, for the Pythons that GPU machines have.
CARRIED = ("msgspec",)
PYTHONS = ("311", "312", "313")

#: What of this checkout a harvest runs; the files are code, boards and operators.
PACKAGES = ("hal", "sokoban", "codegen", "roller", "daydream", "bench")
SOURCE_SUFFIXES = (".py", ".toml", ".json", ".c", ".cpp", ".h")
RESULTS = ROOT / "bench" / "results"

#: Code that runs when the one file does: the archive unpacked, and harvest.py with its bundles.
ONE_FILE_MAIN = """\
import subprocess, sys, tempfile, zipfile

with tempfile.TemporaryDirectory(prefix="harvest-") as folder:
    zipfile.ZipFile(sys.argv[0]).extractall(folder)
    command = [sys.executable, folder + "/bench/gpu/harvest.py", "--bundles", folder + "/bundles", *sys.argv[1:]]
    try:
        code = subprocess.call(command)
    except KeyboardInterrupt:
        code = 130
sys.exit(code)
"""

Run = Callable[[Sequence[str]], None]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--device", "devices", multiple=True, default=("h200",), show_default=True, help="A board; repeat it.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=ROOT / "out" / "harvest-bundles",
    help="Where bundles go.  [default: out/harvest-bundles]",
)  # fmt: skip
@click.option("--top-k", type=click.IntRange(1, 100), default=5, show_default=True, help="Kernels per operator.")
@click.option("--jobs", type=click.IntRange(1, 256), default=None, help="Processes that compile.  [default: all cores]")
@click.option(
    "--suite",
    "suites",
    multiple=True,
    help="Only these suites.  [default: gradients, groups, along, roller119, modern, attention]",
)
@click.option("--mib", type=click.IntRange(1), default=MOST_MIB, show_default=True, help="Most that all may take.")
@click.option("--packages/--no-packages", default=True, show_default=True, help="Also carry msgspec.")
@click.option(
    "--one-file", type=click.Path(dir_okay=False, path_type=Path), default=None, metavar="harvest.pyz",
    help="Also write the harvest and all it needs as one file, which a machine with a GPU runs without this checkout.",
)  # fmt: skip
def main(
    devices: tuple[str, ...], out: Path, top_k: int, jobs: int | None, suites: tuple[str, ...], mib: int,
    packages: bool, one_file: Path | None,
) -> None:  # fmt: skip
    """Compile the bundles that bench/gpu/harvest.py takes with --bundles."""
    try:
        for device in devices:
            compile_suites(device, out, top_k, jobs, suites)
        if packages:
            carry_packages(out)
        dropped = shrink(out, mib << 20)
        if one_file is not None:
            write_one_file(one_file, out)
    except InputError as error:
        click.echo(f"prepare: {error}", err=True)
        sys.exit(2)
    bundle_count = len(list(out.glob("*/*/*/manifest.json")))
    size = directory_bytes(out) / (1 << 20)
    click.echo(f"{bundle_count} bundles, {size:.1f} MiB, {dropped} kernels left out, in {out}")
    if one_file is not None:
        size = one_file.stat().st_size / (1 << 20)
        click.echo(f"{one_file}, {size:.1f} MiB: run it with python3 {one_file.name} --out harvest")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode:
        raise InputError(" ".join(command[:4]), f"ended with exit code {done.returncode}", "see its message above")


def compile_suites(
    device: str, out: Path, top_k: int, jobs: int | None, suites: Sequence[str], run: Run = _run
) -> None:
    """``roller compile`` of every suite for one board, into ``OUT/DEVICE/SUITE``, without products of groups and
    scales and gradients of attention of a type that the board has no matrix instruction for.

    Raises:
        InputError: an unknown board or suite, or the compiler failed.
    """
    from bench.gpu.sections import SUITES
    from bench.suites import suite_path
    from hal.catalog import load_device

    board = load_device(device)
    for suite in suites or SUITES:
        path, specs = suite_path(suite), json.loads(suite_path(suite).read_bytes())
        able = [spec for spec in specs if _multiplies(board, suite, spec)]
        if not able:
            continue
        with tempfile.TemporaryDirectory() as folder:
            if len(able) < len(specs):
                path = Path(folder) / path.name
                path.write_text(json.dumps(able))
            command = [sys.executable, "-m", "roller.cli", "compile", str(path), "--device", device]
            command += ["--out", str(out / board.name / suite), "--top-k", str(top_k), "--verify", "0"]
            run([*command, *(["--jobs", str(jobs)] if jobs else [])])


def _multiplies(board: DeviceSpec, suite: str, spec: dict[str, Any]) -> bool:
    from bench.calls.operators import problem

    if spec.get("op") not in ("grouped_matmul", "scaled_matmul", "attention_gradient"):
        return True
    return board.best_matrix_instruction(problem(suite, spec).dtype) is not None


def carry_packages(out: Path, run: Run = _run) -> None:
    """Unpack the packages of :data:`CARRIED` into ``OUT/site/cp312`` and so on, one folder per Python."""
    for python in PYTHONS:
        target = out / "site" / f"cp{python}"
        shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-compile", "--target", str(target)]
        platforms = ["--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_17_x86_64"]
        run([*command, "--only-binary=:all:", "--python-version", python, *platforms, *CARRIED])


def directory_bytes(directory: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def shrink(out: Path, most_bytes: int) -> int:
    """Leave out the last kernels of all bundles, rank by rank, until `most_bytes` suffice; returns how many.

    Raises:
        InputError: not even rank 1 of every operator fits.
    """
    dropped = 0
    while directory_bytes(out) > most_bytes:
        manifests = {path: json.loads(path.read_bytes()) for path in sorted(out.glob("*/*/*/manifest.json"))}
        longest = max((len(manifest["kernels"]) for manifest in manifests.values()), default=0)
        if longest <= 1:
            raise InputError("--mib", f"{most_bytes >> 20} MiB do not hold one kernel of each operator", "allow more")
        for path, manifest in manifests.items():
            if len(manifest["kernels"]) == longest:
                _drop_last(path, manifest)
                dropped += 1
    return dropped


def write_one_file(target: Path, bundles: Path) -> None:
    """Write a Python archive (PEP 441) that runs the harvest: the packages of this checkout and the bundles.

    It unpacks itself to a temporary folder, as device files, suites and cubins are read as files.
    """
    import zipfile

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    with partial.open("wb") as file:
        file.write(b"#!/usr/bin/env python3\n")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("__main__.py", ONE_FILE_MAIN)
            for package in PACKAGES:
                for path in sorted((ROOT / package).rglob("*")):
                    if path.suffix in SOURCE_SUFFIXES and RESULTS not in path.parents:
                        archive.write(path, path.relative_to(ROOT))
            for path in sorted(bundles.rglob("*")):
                if path.is_file():
                    archive.write(path, Path("bundles") / path.relative_to(bundles))
    partial.replace(target)


def _drop_last(path: Path, manifest: dict[str, Any]) -> None:
    """Take the last kernel out of a manifest, then its files away."""
    from hal.support.atomic import write_atomic

    last = manifest["kernels"].pop()
    write_atomic(path, json.dumps(manifest, indent=2) + "\n")
    used = {name for kernel in manifest["kernels"] for name in _files(kernel)}
    for name in _files(last) - used - {None}:
        (path.parent / name).unlink(missing_ok=True)


def _files(kernel: dict[str, Any]) -> set[str]:
    """Names of a kernel's files, those of all its launches."""
    return {one[key] for one in (kernel, *kernel.get("launches", ())) for key in ("source", "binary", "schedule")}


if __name__ == "__main__":
    main()
