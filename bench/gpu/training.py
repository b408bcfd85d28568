"""Training steps by the clock and under the profiler: what optimisations really bring.

One variant differs from the baseline in one thing (or two, where its name says so), so that it answers one what-if
question. The baseline is eager, float32 without TF32, with an Adam that updates one tensor after the other.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.gpu.journal import MOST_ARCHIVE_BYTES, archive
from bench.gpu.machine import CudaMachine, tf32
from bench.timed.statistics import spread

#: Samples per step, the one that is also traced first.
BATCHES: Mapping[str, tuple[int, int]] = {"resnet50": (64, 16), "bert-large": (8, 2), "gpt2-medium": (4, 1)}

WARM_UP_STEPS, MOST_STEPS, FEWEST_STEPS = 4, 20, 5
#: Timed steps of one configuration take about this long.
STEPS_SECONDS = 2.5
TRACED_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a step is run. `half` is the type of autocast; `traced` variants get a Kineto trace at the first batch."""

    name: str
    half: str | None = None
    adam: str = "loop"
    channels_last: bool = False
    graph: bool = False
    compiled: bool = False
    traced: bool = False


VARIANTS = (
    Variant(name="baseline", traced=True),
    Variant(name="amp", half="float16", traced=True),
    Variant(name="fused-adam", adam="fused", traced=True),
    Variant(name="cuda-graph", graph=True, traced=True),
    Variant(name="channels-last", channels_last=True),
    Variant(name="amp-bfloat16", half="bfloat16"),
    Variant(name="amp+channels-last", half="float16", channels_last=True),
    Variant(name="amp+fused-adam", half="float16", adam="fused"),
    Variant(name="compile", compiled=True, traced=True),
)


@dataclass(frozen=True)
class Configuration:
    """One row of the section ``training``."""

    model: str
    batch: int
    variant: Variant
    traced: bool

    @property
    def key(self) -> str:
        return f"{self.model} batch {self.batch} {self.variant.name}"


def configurations(supports: Callable[[str], bool], *, small: bool = False) -> list[Configuration]:
    """Everything to be measured, the most telling first: the larger batch, and torch.compile, which is slow, last.

    `small` keeps what takes another way through the code, with batches of two and one.
    """
    found = []
    for compiled in (False, True):
        for first in (0, 1):
            for variant in VARIANTS:
                if variant.compiled != compiled or (variant.half == "bfloat16" and not supports("bfloat16")):
                    continue
                for model, batches in BATCHES.items():
                    if variant.channels_last and model != "resnet50":
                        continue
                    if small and model != "resnet50" and (first or compiled or not variant.traced):
                        continue
                    if small and first and variant.name != "baseline":
                        continue
                    batch = (2, 1)[first] if small else batches[first]
                    found.append(Configuration(model, batch, variant, variant.traced and first == 0))
    return found


class Stepper:
    """A model with its optimizer; :meth:`step` trains one step."""

    def __init__(self, machine: CudaMachine, configuration: Configuration, *, small: bool, own: bool) -> None:
        from bench.gpu.models import training

        self._torch = torch = importlib.import_module("torch")
        variant = configuration.variant
        what = training(configuration.model, configuration.batch, machine.device, small=small, own=own)
        self.definition, self._loss = what.definition, what.loss
        model: Any = what.model
        if variant.channels_last:
            model = model.to(memory_format=torch.channels_last)
            for image in what.images:
                image.data = image.data.contiguous(memory_format=torch.channels_last)
        self.model: Any = model
        self._called: Any = machine.compile(model) if variant.compiled else model
        self._device_type = machine.device.partition(":")[0]
        on_gpu = self._device_type == "cuda"
        self._optimizer = torch.optim.Adam(
            self.model.parameters(), lr=1e-5, foreach=False, fused=variant.adam == "fused",
            capturable=variant.graph and on_gpu,
        )  # fmt: skip
        self._half = getattr(torch, variant.half) if variant.half else None
        scaled = variant.half == "float16" and on_gpu
        self._scaler = torch.amp.GradScaler(self._device_type, enabled=scaled)
        self._keeps_gradients = variant.graph
        self.loss: Any = None
        self.step: Callable[[], Any] = self._eager
        if variant.graph:
            self.step = machine.graph(self._eager, 1)

    def _eager(self) -> None:
        torch = self._torch
        self._optimizer.zero_grad(set_to_none=not self._keeps_gradients)
        with torch.autocast(self._device_type, dtype=self._half or torch.bfloat16, enabled=self._half is not None):
            loss = self._loss(self._called)
        self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self.loss = loss.detach()


def measure(
    machine: CudaMachine, configuration: Configuration, directory: Path, *, small: bool, own: bool = False
) -> dict[str, Any]:
    """One item of the section ``training``: clean steps, then some under the profiler, kept in an archive."""
    started = time.perf_counter()
    with tf32(False):
        stepper = Stepper(machine, configuration, small=small, own=own)
        for _ in range(2 if small else WARM_UP_STEPS):
            stepper.step()
        machine.synchronize()
        setup = time.perf_counter() - started
        item: dict[str, Any] = {
            "model": configuration.model,
            "batch": configuration.batch,
            "variant": configuration.variant.name,
            "definition": stepper.definition,
            "parameters": sum(parameter.numel() for parameter in stepper.model.parameters()),
            "setup_seconds": round(setup, 3),
            **timed_steps(machine, stepper.step, 3 if small else None),
        }
        item["peak_bytes"] = machine.peak_bytes()
        item["profiled"] = item["trace"] = None
        if configuration.traced:
            try:
                item.update(traced_steps(machine, stepper, configuration, directory))
            except Exception as error:  # the clean times stand
                if machine.is_broken(error):
                    raise
                item["trace_error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    loss = float(stepper.loss)
    item["loss"] = loss if math.isfinite(loss) else None
    return item


def timed_steps(machine: CudaMachine, step: Callable[[], Any], count: int | None = None) -> dict[str, Any]:
    """``steps``: device time from one step's end to the next one's; ``wall``: host time of the run by its steps."""
    if count is None:
        machine.synchronize()
        before = time.perf_counter()
        step()
        machine.synchronize()
        count = max(FEWEST_STEPS, min(MOST_STEPS, int(STEPS_SECONDS / max(time.perf_counter() - before, 1e-4))))
    events = [machine.event() for _ in range(count + 1)]
    machine.synchronize()
    before = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    machine.synchronize()
    wall = (time.perf_counter() - before) / count
    return {"steps": asdict(spread(_intervals(events))), "wall_seconds": wall}


def _intervals(events: list[Any]) -> list[float]:
    return [before.seconds_until(after) for before, after in itertools.pairwise(events)]


def traced_steps(
    machine: CudaMachine, stepper: Stepper, configuration: Configuration, directory: Path
) -> dict[str, Any]:
    """Record two steps; ``profiled`` are their times, ``trace`` is where the trace lies, or why it was not kept."""
    name = f"{configuration.key.replace(' ', '-')}.json.gz"
    with tempfile.TemporaryDirectory(dir=directory, prefix=".trace-") as scratch:
        path = Path(scratch) / name
        # Hooks would have torch.compile compile again, and a graph does not call them.
        plain = configuration.variant.compiled or configuration.variant.graph
        with _recorder(path, stepper.model, configuration.batch, plain) as (recorded, total):
            events = [machine.event() for _ in range(TRACED_STEPS + 1)]
            first = total - TRACED_STEPS
            for number in range(total):
                if number == first:
                    events[0].record()
                stepper.step()
                if number >= first:
                    events[number - first + 1].record()
                recorded()
        machine.synchronize()
        data = path.read_bytes()
    profiled = asdict(spread(_intervals(events)))
    target = directory / f"traces_{configuration.model}.tar"
    if not archive(target, name, data):
        return {
            "profiled": profiled,
            "trace_error": f"{len(data)} bytes more than the {MOST_ARCHIVE_BYTES} of {target.name}",
        }
    return {"profiled": profiled, "trace": f"{target.name}/{name}"}


@contextlib.contextmanager
def _recorder(path: Path, model: Any, batch: int, plain: bool) -> Iterator[tuple[Callable[[], None], int]]:
    """What is called after each step, and how many steps there have to be.

    Daydream's recorder says which gradients belong to which layer; it needs msgspec, which prepare.py carries. Where
    it is missing, or with `plain`, the profiler alone does.
    """
    warm_up = 2
    record: Any = None
    if not plain:
        with contextlib.suppress(ImportError):
            from daydream.record.record import record
    if record is None:
        with _plain_profiler(path, warm_up) as recorded:
            yield recorded, warm_up + TRACED_STEPS
        return
    with record(path, steps=TRACED_STEPS, warmup=warm_up, model=model, batch=batch) as recorder:
        yield recorder.step, warm_up + TRACED_STEPS


@contextlib.contextmanager
def _plain_profiler(path: Path, warm_up: int) -> Iterator[Callable[[], None]]:
    torch = importlib.import_module("torch")
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, *([kinds.CUDA] if torch.cuda.is_available() else [])]
    raw = path.with_suffix("")
    schedule = torch.profiler.schedule(wait=warm_up - 1, warmup=1, active=TRACED_STEPS, repeat=1)
    with torch.profiler.profile(
        activities=activities,
        schedule=schedule,
        record_shapes=True,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(raw)),
    ) as profiler:
        yield profiler.step
    path.write_bytes(gzip.compress(raw.read_bytes(), 6))
