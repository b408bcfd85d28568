"""``roller microbench``: the numbers of a board, or of this machine's cores, measured.

It runs on the machine of the GPU, so it imports neither the compiler nor anything that the compiler needs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hal.support.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from hal.microbench.cpu import CpuDescription
    from hal.microbench.launcher import Launcher
    from hal.microbench.measurement import Measurement
    from hal.microbench.quantities import QuantityResults
    from hal.spec.device import DeviceSpec

_SUFFIXES = (".toml", ".json")


@click.command("microbench")
@click.option("--device", default="cuda:0", show_default=True, metavar="cuda:N|cpu", help="What to measure.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Write a device file, .toml or .json; with cpu a description of the cores.",
)
@click.option("--compare", "other", default=None, metavar="NAME|FILE", help="Print a board's numbers next to these.")
@click.option("--only", multiple=True, metavar="NAME", help="Measure this quantity alone; may be repeated.")
@click.option("--json/--no-json", "as_json", default=False, help="All readings as one JSON object on stdout.")
def microbench_command(device: str, out: Path | None, other: str | None, only: tuple[str, ...], as_json: bool) -> None:
    """Measure the numbers of a device file on the device itself.

    Exit code 1 when a quantity could not be measured.
    """
    _check_out(out, only)
    compared = _other(other)
    processor = _PROCESSORS.get(device)
    measured = _Gpu(device, only) if processor is None else processor(only)
    spec = measured.described() if out is not None else measured.described_if_complete()
    if out is not None and spec is not None:
        from hal.support.atomic import write_atomic

        write_atomic(out, _file_text(spec, out.suffix))
    if as_json:
        click.echo(json.dumps(_record(measured, spec, compared)))
    else:
        _print(measured, spec, compared, out)
    if measured.run.failures:
        sys.exit(1)


class _Gpu:
    """A run on a GPU."""

    def __init__(self, device: str, only: tuple[str, ...]) -> None:
        from hal.catalog import shipped_board
        from hal.microbench import measure_gpu
        from hal.microbench.quantities import chosen

        chosen(only)  # an unknown name is said before a GPU is looked for
        self.launcher = open_launcher(device)
        self.known = shipped_board(self.launcher.board)
        self.title = self.launcher.board.title
        self.run: QuantityResults = measure_gpu(self.launcher, only, datasheet=self.known, progress=_progress())
        self.compared: list[tuple[Measurement, Measurement, float]] = []
        self._only = only

    def described(self) -> DeviceSpec:
        """The device file; raises InputError where a number of it could not be measured."""
        from hal.microbench import spec_from

        return spec_from(self.launcher.board, self.run.measurements, self.known)

    def described_if_complete(self) -> DeviceSpec | None:
        """The same, or None where something is missing."""
        try:
            return self.described()
        except InputError as error:
            if not self._only:
                self.run.failures.setdefault("device file", str(error))
            return None


class _Cpu:
    """A run on this machine's cores."""

    def __init__(self, only: tuple[str, ...]) -> None:
        from hal.microbench.cpu import against_numpy, measure_cpu, read_topology

        self.run: QuantityResults = measure_cpu(only, progress=_progress())
        self.topology = read_topology()
        cores = len(self.topology.cpus)
        self.title = f"{cores} cores, {self.topology.simd_bits}-bit vectors"
        self.compared = list(against_numpy(self.run.measurements))

    def described(self) -> CpuDescription:
        """The description; raises InputError where a number of it was not measured."""
        from hal.microbench.cpu import describe

        return describe(self.topology, self.run.measurements)

    def described_if_complete(self) -> CpuDescription | None:
        """The same, or None where something is missing."""
        try:
            return self.described()
        except InputError:
            return None


#: Who measures what is not a GPU, by the word for it.
_PROCESSORS = {"cpu": _Cpu}


def open_launcher(device: str) -> Launcher:
    """The GPU of that name; tests put another one here."""
    from hal.microbench.cupy_launcher import CupyLauncher

    return CupyLauncher(device)


def _check_out(out: Path | None, only: tuple[str, ...]) -> None:
    """Before minutes are spent measuring."""
    if out is None:
        return
    if only:
        raise InputError("--out", "a file needs all quantities", "leave --only away")
    if out.suffix.lower() not in _SUFFIXES:
        raise InputError("--out", f"got a file ending in {out.suffix!r}", "end it in .toml or .json")
    if not out.parent.is_dir():
        raise InputError("--out", f"there is no directory {out.parent}", "make it first")


def _other(name: str | None) -> DeviceSpec | None:
    if name is None:
        return None
    from hal.catalog import load_device

    return load_device(name)


def _file_text(spec: DeviceSpec | CpuDescription, suffix: str) -> str:
    from hal.microbench import json_text, toml_text

    return json_text(spec) if suffix.lower() == ".json" else toml_text(spec)


def _progress() -> Callable[[str], None]:
    """The name of what is being measured, on a terminal's stderr."""
    if not sys.stderr.isatty():
        return lambda name: None
    return lambda name: click.echo(f"measuring {name}", err=True)


def _record(measured: _Gpu | _Cpu, spec: DeviceSpec | CpuDescription | None, other: DeviceSpec | None) -> Any:
    from msgspec import to_builtins

    record: dict[str, Any] = {
        "device": measured.title,
        "measurements": [measurement.record() for measurement in measured.run.measurements.values()],
        "failures": measured.run.failures,
        "spec": None if spec is None else to_builtins(spec),
    }
    if measured.compared:
        record["beside_numpy"] = {ours.key: [numpy.key, ratio] for ours, numpy, ratio in measured.compared}
    if other is not None:
        rows = _compared(measured, spec, other)
        record["compared"] = {"name": other.name, "ratios": {path: mine / its for path, mine, its, _ in rows}}
    return record


def _print(
    measured: _Gpu | _Cpu, spec: DeviceSpec | CpuDescription | None, other: DeviceSpec | None, out: Path | None
) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(width=200, highlight=False)
    console.print(measured.title, markup=False)
    console.print(_table(measured.run.measurements.values()))
    if measured.compared:
        console.print()
        console.print(_comparison_table(measured))
    if other is not None:
        console.print()
        console.print(_compare_table(list(_compared(measured, spec, other)), other.name))
    for name, reason in measured.run.failures.items():
        console.print(f"{name}: not measured, {reason}", markup=False, soft_wrap=True)
    if out is not None:
        console.print(f"written to {out}", markup=False, soft_wrap=True)


def _table(measurements: Iterable[Measurement]) -> Table:
    """Every number with its spread, its sanity range and how it was measured."""
    from hal.support.tables import new_table

    table = new_table(("quantity",), ("value", "spread", "plausible"), ("measured as",))
    for each in measurements:
        bounds = [_shown(bound, each.unit) for bound in (each.low, each.high) if bound is not None]
        plausible = " to ".join(bounds) if len(bounds) == 2 else "".join(bounds)
        table.add_row(
            each.key,
            _shown(each.value, each.unit),
            f"{100 * each.spread:.1f} %" if len(each.samples) > 1 else "",
            plausible if each.plausible else f"OUTSIDE {plausible}",
            each.method,
        )
    return table


def _comparison_table(measured: _Gpu | _Cpu) -> Table:
    from hal.support.tables import new_table

    table = new_table(("ours",), ("value",), ("NumPy, same run",), ("value", "ours / NumPy"))
    for ours, numpy, ratio in measured.compared:
        table.add_row(
            ours.key, _shown(ours.value, ours.unit), numpy.key, _shown(numpy.value, numpy.unit), f"{ratio:.2f}"
        )
    return table


#: Key path, the number here, the other board's, unit.
Row = tuple[str, float, float, str]


def _compared(measured: _Gpu | _Cpu, spec: DeviceSpec | CpuDescription | None, other: DeviceSpec) -> Iterator[Row]:
    """Numbers that both have: all of a complete device, else those that were measured."""
    from hal.spec.device import DeviceSpec
    from hal.spec.numbers import leaves

    theirs = dict(leaves(other))
    if isinstance(spec, DeviceSpec):
        mine: dict[str, float] = dict(leaves(spec))
    else:
        mine = {each.path: each.value for each in measured.run.measurements.values() if each.path}
    for path, value in mine.items():
        if theirs.get(path) and path != "compute_capability" and not path.endswith(".shape"):
            yield path, value, theirs[path], _unit(path)


def _compare_table(rows: list[Row], name: str) -> Table:
    from hal.support.tables import new_table

    table = new_table(("number",), ("measured", name, "ratio"))
    for path, mine, its, unit in rows:
        table.add_row(path, _shown(mine, unit), _shown(its, unit), f"{mine / its:.2f}")
    return table


def _unit(path: str) -> str:
    """The unit that the name of a number ends in."""
    for ending, unit in (
        ("bytes_per_second", "B/s"),
        ("seconds", "s"),
        ("flops", "FLOP/s"),
        ("_hz", "Hz"),
        ("bytes", "B"),
    ):
        if path.endswith(ending):
            return unit
    return ""


def _shown(value: float, unit: str) -> str:
    from roller.text.quantities import si_text, three_digits, time_text

    if unit == "s":
        return time_text(value)
    if unit == "B" and value >= 1 << 20:
        return f"{three_digits(value / (1 << 20))} MiB"
    if unit == "B" or not unit:
        return f"{value:g} {unit}".strip() if value < 1e6 else f"{value:.0f} {unit}".strip()
    return si_text(value, unit)
