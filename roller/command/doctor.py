"""``roller doctor``: which of the tools that Roller can use are at hand, and what brings those that are not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import NamedTuple

import click

#: Seconds that a tool has to say its version.
_PATIENCE_S = 20


@dataclass(frozen=True)
class Finding:
    """A tool, and whether it is there.

    Attributes:
        tool: its name.
        found: its version or what it says of itself; None where it is missing.
        use: what it is for.
        remedy: the command that brings it; empty where there is none.
        needed: whether nothing works without it.
    """

    tool: str
    found: str | None
    use: str
    remedy: str
    needed: bool = False


class _Package(NamedTuple):
    """A distribution by its name on PyPI, and the extra of Roller that asks for it; no extra: Roller needs it."""

    distributions: tuple[str, ...]
    tool: str
    extra: str
    use: str


_PACKAGES = (
    _Package(("apache-tvm",), "TVM", "", "writes kernels"),
    _Package(("nvidia-cuda-nvrtc-cu12",), "NVRTC", "", "compiles CUDA kernels, without a GPU"),
    _Package(("cupy-cuda12x", "cupy-cuda13x"), "CuPy", "gpu", "launches and times kernels: roller profile"),
    _Package(("torch",), "PyTorch", "models", "builds models: daydream predict, plan, record"),
    _Package(("timm",), "timm", "models", "models by name: timm:resnet50"),
    _Package(("transformers",), "transformers", "models", "models by configuration: hf:config.json"),
    _Package(("onnx",), "onnx", "models", "models from files: onnx:model.onnx"),
    _Package(("matplotlib",), "matplotlib", "plot", "pictures: roller explain --plot, reports"),
    _Package(("scipy",), "SciPy", "plan", "schedules of jobs, clocks of ranks: daydream place, merge"),
    _Package(("nvidia-cuda-nvdisasm",), "nvdisasm", "inspect", "machine code: roller inspect"),
    _Package(("distributed",), "Dask", "cluster", "many machines: --jobs tcp://..."),
)


def findings() -> Iterable[Finding]:
    """Tools at hand, the indispensable first; each is looked for when it is asked for."""
    yield _python()
    for package in _PACKAGES:
        if not package.extra:
            yield _package(package)
    yield _open_cl()
    yield _emulator()
    yield _gpu()
    yield _sanitizer()
    for package in _PACKAGES:
        if package.extra:
            yield _package(package)


def _python() -> Finding:
    fits = (3, 11) <= sys.version_info < (3, 13)
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", version if fits else None, "3.11 or 3.12", "" if fits else "apt-get install python3", True)


def _package(package: _Package) -> Finding:
    remedy = f"pip install 'roller[{package.extra}]'" if package.extra else "pip install --force-reinstall roller"
    for name in package.distributions:
        try:
            return Finding(package.tool, metadata.version(name), package.use, "", not package.extra)
        except metadata.PackageNotFoundError:
            continue
    return Finding(package.tool, None, package.use, remedy, not package.extra)


def _open_cl() -> Finding:
    use = "runs kernels on this processor as a proof"

    def device() -> str:
        from codegen.verify.opencl import OpenClError, device_name, opencl_available

        if (reason := opencl_available()) is not None:
            raise OpenClError(reason)
        # The platform; processors have long names.
        return device_name().rpartition(" (")[2].rstrip(")")

    version = _said(device)
    return Finding("OpenCL", version, use, "" if version else "apt-get install pocl-opencl-icd")


def _emulator() -> Finding:
    from codegen.verify.emulator import EmulatorError, emulator_available, prepare_emulator

    use = "runs CUDA text thread by thread as a proof: roller verify"
    if emulator_available() is not None:
        return Finding("g++", None, use, "apt-get install g++")
    # So that the first kernel does not wait for it; what g++ refuses is reported when a kernel is verified.
    with suppress(EmulatorError):
        prepare_emulator()
    return Finding("g++", _first_line(["g++", "-dumpfullversion"]), use, "")


def _gpu() -> Finding:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    description = _first_line(query) if shutil.which("nvidia-smi") else None
    return Finding("GPU", description, "measures: roller profile, roller microbench", "")


def _sanitizer() -> Finding:
    name, use = "compute-sanitizer", "checks kernels on a GPU: roller profile --sanitize"
    version = _first_line([name, "--version"]) if shutil.which(name) else None
    return Finding(name, version, use, "" if version else "apt-get install nvidia-cuda-toolkit")


def _first_line(command: list[str]) -> str | None:
    def said() -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
        return done.stdout.strip().splitlines()[0]

    return _said(said)


def _said(question: Callable[[], str]) -> str | None:
    """The answer; None where there is none, whatever the reason: a tool that is broken is not at hand."""
    try:
        return question() or None
    except Exception:
        return None


@click.command("doctor")
@click.option("--json/--no-json", "as_json", default=False, help="One JSON object per tool on stdout.")
def doctor_command(as_json: bool) -> None:
    """Tell which tools are at hand, what they are for, and how to get those that are not.

    Exit code 1 when something is missing without which nothing works.
    """
    tools = list(findings())
    if as_json:
        for each in tools:
            click.echo(json.dumps(asdict(each)))
    else:
        _print(tools)
    if any(each.needed and each.found is None for each in tools):
        sys.exit(1)


def _print(tools: list[Finding]) -> None:
    from rich.text import Text

    from hal.support.tables import new_table, print_line, print_table

    table = new_table(("tool", "found", "for", "to get it"))
    for each in tools:
        absent = "MISSING" if each.needed else "-"
        table.add_row(each.tool, Text(each.found or absent), each.use, Text(each.remedy))
    print_table(table, drop=("for",))
    has = {each.tool for each in tools if each.found is not None}
    print_line()
    print_line(_abilities(has))


def _abilities(has: set[str]) -> str:
    """Uses of the tools at hand, in a sentence or two."""
    if not {"Python", "TVM", "NVRTC"} <= has:
        return "Kernels cannot be compiled here."
    proofs = [name for name, tool in (("OpenCL", "OpenCL"), ("the emulator", "g++")) if tool in has]
    proved = f"proved by {' and '.join(proofs)}" if proofs else "but not proved: there is neither OpenCL nor g++"
    timed = " and timed on this GPU" if has.issuperset(("GPU", "CuPy")) else ""
    return f"Kernels are compiled here, {proved}{timed}."
