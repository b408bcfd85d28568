"""``daydream place``: jobs on boards for the shortest makespan."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click
import msgspec

from daydream.command.outputs import print_json
from daydream.command.predict import chosen_devices, predicted_steps
from hal.support.errors import InputError, listed

if TYPE_CHECKING:
    from daydream.prediction.placing import Placement
    from hal.spec.device import DeviceSpec

#: Largest numbers of jobs and boards: above these the solver's program has too many unknowns.
MOST_JOBS, MOST_BOARDS = 1000, 100

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job of the file: a model and how many steps of it, as `daydream predict` takes it, or measured figures.

    Attributes:
        name: what tables call it; the model's text if empty.
        model: what `daydream predict` predicts; empty where all figures are given.
        steps: how many.
        seconds: of the whole job by board, in place of predicted ones; without a model it runs on these boards alone.
        memory_gb: what nvidia-smi shows of it, 10^9 bytes, in place of the prediction.
    """

    name: str = ""
    model: str = ""
    steps: _Count | None = None
    seconds: dict[str, _Positive] = {}
    memory_gb: _Positive | None = None
    batch: _Count | None = None
    sequence: _Count | None = None
    image: _Count | None = None
    class_name: str | None = msgspec.field(name="class", default=None)
    mode: Literal["training", "inference"] = "training"
    dtype: Literal["float32", "bfloat16", "float16", "tf32", "amp", "amp-bfloat16"] = "float32"
    optimizer: Literal["sgd", "adam", "adamw", "none"] | None = None
    optimizer_kernels: Literal["for-loop", "foreach", "fused"] = "foreach"
    clip: bool = False
    attention: Literal["auto", "flash", "flash2", "flash3", "cudnn", "triton", "efficient", "math", "eager"] = "auto"
    tf32: bool = True
    channels_last: bool = False
    checkpoint: str = "none"
    compiles: bool = msgspec.field(name="compile", default=False)
    implementation: Literal["library", "best"] = "library"

    @property
    def title(self) -> str:
        """Title in tables."""
        return self.name or self.model

    @property
    def options(self) -> dict[str, Any]:
        """Options of `daydream predict`."""
        placement_keys = ("name", "model", "steps", "seconds", "memory_gb", "batch")
        return {key: getattr(self, key) for key in self.__struct_fields__ if key not in placement_keys}


@dataclass(frozen=True, kw_only=True)
class BoardFigures:
    """Figures of a job on a kind of board: seconds, None where it cannot run; bytes; whether the board has them."""

    seconds: float | None
    bytes: int
    fits: bool

    @property
    def usable(self) -> float:
        """Seconds, infinite where the job cannot run."""
        return self.seconds if self.seconds is not None and self.fits else float("inf")


@click.command("place")
@click.option("--boards", required=True, metavar="NAME[=COUNT],...", help="The boards there are.")
@click.option(
    "--limit", type=click.FloatRange(0.1, 3600), default=30.0, show_default=True, help="Seconds for the solver."
)
@click.option("--json/--no-json", "as_json", default=False, help="One JSON object on stdout.")
@click.argument("jobs", type=click.Path(path_type=Path))
def place_command(*, jobs: Path, boards: str, limit: float, as_json: bool) -> None:
    """Assign the jobs of the file JOBS to boards that have the memory for them, for the shortest makespan.

    JOBS is a JSON list of objects such as {"model": "timm:resnet50", "batch": 64, "steps": 5000}; options of daydream
    predict are keys, too. "seconds": {"h100": 120} and "memory_gb" give what is known.
    """
    import numpy as np

    from daydream.prediction.placing import placed

    counts = board_counts(boards)
    devices = list(counts)
    entries = read_jobs(jobs)
    figures = _figures(jobs, entries, devices)
    # Boards of one kind stand side by side.
    kinds = [number for number, spec in enumerate(devices) for _ in range(counts[spec])]
    times = np.array([[figures[job][kind].usable for kind in kinds] for job in range(len(entries))])
    for place, (job, row) in enumerate(zip(entries, times, strict=True)):
        if not np.isfinite(row).any():
            raise InputError(f"{jobs}: [{place}]", f"{job.title} {_why_nowhere(figures[place], devices)}", "")
    schedule = placed(times, limit)
    names = _board_names(counts)
    if as_json:
        print_json(_record(schedule, names, entries, figures, kinds))
    else:
        _print_jobs(entries, figures, devices)
        _print_schedule(schedule, names, entries)


def board_counts(text: str) -> dict[DeviceSpec, int]:
    """Number of boards of each kind that ``--boards`` asks for.

    Raises:
        InputError: a part is no board, or no count.

    >>> {spec.name: count for spec, count in board_counts("h100=2,v100").items()}
    {'h100-sxm-80gb': 2, 'v100-sxm2-16gb': 1}
    """
    specs: dict[str, DeviceSpec] = {}
    counts: dict[str, int] = {}
    for part in text.split(","):
        parsed = re.fullmatch(r"\s*([^=]*[^=\s])\s*(?:=\s*([1-9]\d{0,8})\s*)?", part)
        if parsed is None or parsed[1] == "all":
            raise InputError("--boards", f"{part.strip()!r} is no board with a count", "write h100=2,a100=4")
        (spec,) = chosen_devices(parsed[1])
        specs.setdefault(spec.name, spec)
        counts[spec.name] = counts.get(spec.name, 0) + int(parsed[2] or 1)
    if sum(counts.values()) > MOST_BOARDS:
        raise InputError("--boards", f"{sum(counts.values())} boards", f"name {MOST_BOARDS} at most")
    return {specs[name]: count for name, count in counts.items()}


def read_jobs(path: Path) -> list[Job]:
    """The jobs of a file.

    Raises:
        InputError: the file cannot be read, or a job lacks what its times come from.
    """
    from hal.spec.file import table_from_text

    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(str(path), error.strerror or "cannot be read", "give a JSON file of jobs") from None
    raw = table_from_text(data, str(path) if path.suffix == ".json" else f"{path}.json")
    try:
        jobs = msgspec.convert(raw, list[Job])
    except msgspec.ValidationError as error:
        problem, _, key = str(error).replace("`", "").partition(" - at $")
        where = f"{path}: {key.lstrip('.')}" if key else str(path)
        raise InputError(where, problem[:1].lower() + problem[1:], "docs/place.md has all keys") from None
    if not 1 <= len(jobs) <= MOST_JOBS:
        raise InputError(str(path), f"holds {len(jobs)} jobs", f"list 1 to {MOST_JOBS}")
    for place, job in enumerate(jobs):
        where = f"{path}: [{place}]"
        if not job.model and not job.seconds:
            raise InputError(where, "has neither a model nor seconds", 'add "model" and "steps", or "seconds"')
        if not job.title:
            raise InputError(where, "has no name", 'add "name"')
        if job.model and job.steps is None:
            raise InputError(f"{where}.steps", "is missing", 'add "steps", how many the job runs')
    return jobs


# What jobs take


def _figures(path: Path, jobs: Sequence[Job], devices: Sequence[DeviceSpec]) -> list[list[BoardFigures]]:
    """Of every job on every kind of board. Jobs that differ in name and steps alone are predicted once."""
    steps_by_job: dict[bytes, list[tuple[float, int]]] = {}
    answer = []
    for place, job in enumerate(jobs):
        given = _given_seconds(f"{path}: [{place}].seconds", job.seconds, devices)
        predicted: list[tuple[float | None, int]] = [(None, 0)] * len(devices)
        if job.model:
            key = msgspec.json.encode([job.model, job.batch, job.options])
            if key not in steps_by_job:
                click.echo(f"daydream: predicting {job.title} ({place + 1} of {len(jobs)})", err=True)
                try:
                    steps = predicted_steps(job.model, devices, [job.batch], job.options)
                except InputError as error:
                    raise InputError(f"{path}: [{place}]: {error.field}", error.problem, error.remedy) from None
                steps_by_job[key] = [(step.step_seconds, step.memory.on_device) for step in steps]
            predicted = [(seconds * (job.steps or 1), size) for seconds, size in steps_by_job[key]]
        of_job = []
        for spec, (seconds, size) in zip(devices, predicted, strict=True):
            needed = size if job.memory_gb is None else round(1e9 * job.memory_gb)
            capacity = spec.dram.capacity_bytes
            fits = capacity is None or needed <= capacity
            of_job.append(BoardFigures(seconds=given.get(spec.name, seconds), bytes=needed, fits=fits))
        answer.append(of_job)
    return answer


def _given_seconds(where: str, seconds: Mapping[str, float], devices: Sequence[DeviceSpec]) -> dict[str, float]:
    """Seconds by the full names of boards, asked for or not."""
    from hal.catalog import load_device

    asked = {spec.name for spec in devices}
    answer = {}
    for name, amount in seconds.items():
        try:
            answer[name if name in asked else load_device(name).name] = amount
        except InputError as error:
            raise InputError(where, error.problem, error.remedy) from None
    return answer


def _why_nowhere(figures: Sequence[BoardFigures], devices: Sequence[DeviceSpec]) -> str:
    """Why a job can run on none of the boards."""
    timed = [(each, spec) for each, spec in zip(figures, devices, strict=True) if each.seconds is not None]
    if not timed:
        return f"has no seconds for {listed([spec.name for spec in devices])}"
    needs = [
        f"needs {each.bytes / 1e9:.1f} of {(spec.dram.capacity_bytes or 0) / 1e9:.1f} GB on {spec.name}"
        for each, spec in timed
    ]
    return f"fits on no board: {listed(needs)}"


# What is printed


def _board_names(counts: Mapping[DeviceSpec, int]) -> list[str]:
    """A name for every board, numbered where there are several of its kind."""
    return [
        spec.name if count == 1 else f"{spec.name} #{number}"
        for spec, count in counts.items()
        for number in range(1, count + 1)
    ]


def _record(
    schedule: Placement,
    names: Sequence[str],
    jobs: Sequence[Job],
    figures: Sequence[Sequence[BoardFigures]],
    kinds: Sequence[int],
) -> dict[str, Any]:
    from daydream.prediction.placing import greedy, makespan, random_makespan

    boards = []
    for board, name in enumerate(names):
        start, entries = 0.0, []
        for job in schedule.order(board):
            seconds = float(schedule.times[job, board])
            entry = {"job": job, "name": jobs[job].title, "start_seconds": round(start, 6)}
            memory = figures[job][kinds[board]].bytes
            entries.append({**entry, "seconds": round(seconds, 6), "device_bytes": memory})
            start += seconds
        boards.append({"board": name, "finish_seconds": round(start, 6), "jobs": entries})
    return {
        "makespan_seconds": round(schedule.makespan, 6),
        "lower_bound_seconds": round(schedule.lower_bound, 6),
        "gap": round(schedule.gap, 6),
        "greedy_seconds": round(makespan(schedule.times, greedy(schedule.times)), 6),
        "random_seconds": round(random_makespan(schedule.times), 6),
        "boards": boards,
    }


def _print_jobs(jobs: Sequence[Job], figures: Sequence[Sequence[BoardFigures]], devices: Sequence[DeviceSpec]) -> None:
    """Seconds of every job on every kind of board, or the memory that it lacks."""
    from rich.text import Text

    from daydream.report.tables import table
    from hal.support.tables import print_line, print_table

    view = table("Jobs, s", "job", *(spec.name for spec in devices))
    for job, of_job in zip(jobs, figures, strict=True):
        cells = [
            "-" if each.seconds is None else _seconds(each.seconds) if each.fits else f"{each.bytes / 1e9:.1f} GB"
            for each in of_job
        ]
        view.add_row(Text(job.title), *cells)
    print_table(view)
    if not all(each.fits for of_job in figures for each in of_job):
        print_line("in GB: what does not fit")
    print_line()


def _print_schedule(schedule: Placement, names: Sequence[str], jobs: Sequence[Job]) -> None:
    from rich.text import Text

    from daydream.prediction.placing import RANDOM_TRIALS, greedy, makespan, random_makespan
    from daydream.report.tables import percent, table
    from hal.support.tables import print_line, print_table

    view = table("Schedule", "board", "done at s", "jobs in order, s")
    view.columns[2].justify, view.columns[2].no_wrap = "left", False
    for board, name in enumerate(names):
        order = schedule.order(board)
        text = ", ".join(f"{jobs[job].title} {_seconds(schedule.times[job, board])}" for job in order)
        view.add_row(name, _seconds(sum(schedule.times[job, board] for job in order)), Text(text or "-"))
    print_table(view)
    longest = schedule.makespan
    if schedule.gap:
        bound = f"no schedule takes less than {_seconds(schedule.lower_bound)} s (gap {percent(schedule.gap)})"
    else:
        bound = "no schedule takes less"
    print_line(f"makespan {_seconds(longest)} s: {bound}")
    first, chance = makespan(schedule.times, greedy(schedule.times)), random_makespan(schedule.times)
    print_line(f"longest job first: {_seconds(first)} s, {percent(first / longest - 1)} more")
    print_line(f"at random: {_seconds(chance)} s, {percent(chance / longest - 1)} more (mean of {RANDOM_TRIALS})")


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}"
