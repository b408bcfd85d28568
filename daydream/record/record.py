"""Recording a trace that answers the most questions: the profiler with the right options, and what it leaves out.

The profiler does not say which parameter a gradient belongs to, nor when in the backward pass it is complete. Both
are learned with hooks during the steps before recording, so that the hooks do not show in the trace.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import importlib
import inspect
import json
import os
import runpy
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daydream.record.model import ModelWatch
from daydream.record.timing import TimedSteps
from hal.support.errors import InputError

#: Version of what this module adds to a trace under the key "daydream".
VERSION = 1


@dataclass(frozen=True)
class Recorded:
    """Outcome of recording a script."""

    path: Path | None
    """The trace, or None if none was written."""
    steps: int
    """Complete steps in the trace."""
    exit_code: int
    """The script's own; 0 if it was ended after the last recorded step."""
    note: str = ""
    """What the user should know, one sentence; may be empty."""


class Recorder:
    """A profiler that records some steps, then writes them. Made by :func:`record`.

    Attributes:
        written: the trace's path once it is on disk, else None.
        recorded: complete steps in it.
    """

    def __init__(
        self,
        path: Path,
        schedule: Callable[[int], Any],
        watch: ModelWatch,
        *,
        batch: int | None,
        with_stack: bool,
        memory: bool = False,
        timed: int = 0,
        has_prelude: bool = False,
    ) -> None:
        """`timed` steps behind the recorded ones are timed without the profiler before the trace is written;
        `has_prelude` says that what step 0 records is for the case only that no further step comes."""
        self._torch = _torch()
        self._path = path
        self.written: Path | None = None
        self.recorded = 0
        self._watch = watch
        self._schedule = schedule
        self._batch = batch
        self._has_prelude = has_prelude
        self._timed = TimedSteps(timed)
        self._step = 0
        self._discard = False
        self._exported = path.with_name(f".{path.name}.{os.getpid()}.export.json")
        self._profiler = self._torch.profiler.profile(
            activities=_activities(self._torch),
            schedule=schedule,
            on_trace_ready=self._export,
            record_shapes=True,
            with_modules=True,
            with_stack=with_stack,
            profile_memory=memory,
            **_newer_options(self._torch),
        )

    def step(self) -> None:
        """Say that a training step is complete. Does nothing once the trace is written.

        Raises:
            InputError: the trace cannot be written.
        """
        if self.written is not None:
            return
        if self._timed.begun:
            if self._timed.step():
                self._write_trace()
            return
        self.recorded += self._watch.recording
        if self._has_prelude and self._step == 0:
            self._discard, self.recorded = True, 0
        self._watch.step()
        self._step += 1
        self._follow()
        self._profiler.step()
        self._discard = False
        if self._exported.exists():
            self._finish()

    def start(self) -> None:
        """Begin: the first step starts here."""
        self._watch.install()
        self._follow()
        self._profiler.start()

    def stop(self, failed: bool = False) -> None:
        """End, and write what was recorded, unless that is done or the steps `failed` on the way.

        Raises:
            InputError: the trace cannot be written.
        """
        self._watch.recording = False
        self._watch.remove()
        self._discard = failed or self.written is not None
        try:
            self._profiler.stop()
            if self._exported.exists():
                self._write_trace()
        finally:
            self._exported.unlink(missing_ok=True)

    def _follow(self) -> None:
        action = self._torch.profiler.ProfilerAction
        self._watch.recording = self._schedule(self._step) in (action.RECORD, action.RECORD_AND_SAVE)

    def _export(self, profiler: Any) -> None:
        if not self._discard:
            with _writing(self._path):
                profiler.export_chrome_trace(str(self._exported))

    def _finish(self) -> None:
        """The recorded steps are complete: what follows runs without hooks, and is timed if that was asked for."""
        self._watch.recording = False
        self._watch.remove()
        if self._timed.wanted:
            self._timed.begin(self._torch)
        else:
            self._write_trace()

    def _write_trace(self) -> None:
        with _writing(self._path):
            _write(self._path, self._exported, self._metadata())
        self._exported.unlink()
        self.written = self._path

    def _metadata(self) -> dict[str, Any]:
        metadata = {
            "version": VERSION,
            "torch": self._torch.__version__,
            "device": self._torch.cuda.get_device_name() if self._torch.cuda.is_available() else "cpu",
            "cores": os.cpu_count(),
            "gradients": self._watch.gradients(),
            "buckets": self._watch.buckets(),
            **self._timed.metadata(),
        }
        batch = self._batch if self._batch is not None else self._watch.batch
        return metadata if batch is None else {**metadata, "batch": batch}


@contextlib.contextmanager
def record(
    path: str | Path,
    *,
    steps: int = 3,
    warmup: int = 3,
    timed: int = 0,
    model: Any = None,
    batch: int | None = None,
    with_stack: bool = False,
    with_modules: bool = True,
    memory: bool = False,
) -> Iterator[Recorder]:
    """Record `steps` training steps after `warmup` others, and write them to `path`.

    Call `step()` on the result after every training step; steps after the last recorded one are not slowed down.
    With fewer steps than that, what there is gets written at the end.

    Args:
        path: the trace to write, ``.json`` or ``.json.gz``. In a group of several processes, each writes its own,
            with its rank before the suffix.
        steps: steps to record, at least 1.
        warmup: steps before them. Without any, gradients are observed while recording.
        timed: steps to time behind them without profiler and hooks, one more being left out; the trace then holds
            their seconds ("timed_seconds") and what calling a custom operator costs ("custom_call_us"), and is
            written after them.
        model: the model that is trained, for the names and sizes of its gradients; by default, every module that is
            called on its own.
        batch: samples per step; by default, the length of the model's first input.
        with_stack: record Python call stacks, which slows the CPU side down.
        with_modules: mark each module's forward pass with a range ``nn.Module: layer1.0.conv1``.
        memory: record allocations and frees, which slows the CPU side down.

    Raises:
        InputError: PyTorch is missing, `path` cannot be written, or a number is out of range.
    """
    torch = _torch()
    _check(steps, warmup, timed)
    schedule = _Schedule(torch.profiler.ProfilerAction, warmup, steps)
    watch = ModelWatch(torch, annotate=with_modules, model=model)
    target = _target(torch, path)
    recorder = Recorder(target, schedule, watch, batch=batch, with_stack=with_stack, memory=memory, timed=timed)
    recorder.start()
    try:
        yield recorder
    except BaseException:
        recorder.stop(failed=True)
        raise
    recorder.stop()


def record_script(
    out: str | Path,
    script: str | Path,
    args: Sequence[str] = (),
    *,
    steps: int = 3,
    warmup: int = 3,
    timed: int = 0,
    batch: int | None = None,
    with_stack: bool = False,
    with_modules: bool = True,
    memory: bool = False,
    stop: bool = True,
) -> Recorded:
    """Run a Python script as ``python SCRIPT ARGS`` does, and record `steps` of its training steps.

    A step ends with an optimizer's step; of several optimizers, the one that steps first counts. What comes up to
    its first step and `warmup` further ones are left out. Then the script is ended, or runs on unobserved if `stop`
    is false. A script in which no optimizer steps is recorded from beginning to end, as one step.

    Args:
        out: the trace to write, as in :func:`record`, which also explains the other options.
        script: the script; its folder becomes the first of `sys.path`.
        args: its command line.
        stop: end the script after the last recorded step.

    Raises:
        InputError: PyTorch or the script is missing, `out` cannot be written, or a number is out of range.
    """
    torch = _torch()
    _check(steps, warmup, timed)
    script = Path(script)
    if not script.is_file():
        raise InputError(str(script), "is a directory" if script.is_dir() else "no such file", "give a Python script")
    schedule = _Schedule(torch.profiler.ProfilerAction, max(warmup, 1), steps, has_prelude=True)
    watch = ModelWatch(torch, annotate=with_modules)
    path = _target(torch, out)
    recorder = Recorder(
        path, schedule, watch, batch=batch, with_stack=with_stack, memory=memory, timed=timed, has_prelude=True
    )
    counter = _OptimizerSteps(recorder, stop)
    # Not an attribute of torch.optim, which deletes the name.
    hooks = importlib.import_module("torch.optim.optimizer")
    hook = hooks.register_optimizer_step_post_hook(counter.first)
    recorder.start()
    exit_code = 1
    try:
        exit_code = _run(script, args)
    finally:
        hook.remove()
        recorder.stop(failed=exit_code != 0)
    return _ended(recorder, counter.count, steps, exit_code)


class _Enough(SystemExit):
    """Ends a script whose steps are recorded; it may handle this as any other exit."""


@dataclass(frozen=True)
class _Schedule:
    """Action of the profiler in each step: `steps` are recorded after `warmup` others.

    With a prelude, step 0 comes before these, and is recorded since it may be all there is.
    """

    action: Any
    warmup: int
    steps: int
    has_prelude: bool = False

    def __call__(self, step: int) -> Any:
        if self.has_prelude and step == 0:
            return self.action.RECORD_AND_SAVE
        since = step - self.warmup - self.has_prelude
        if 0 <= since < self.steps:
            return self.action.RECORD if since < self.steps - 1 else self.action.RECORD_AND_SAVE
        return self.action.WARMUP if since == -1 else self.action.NONE


@dataclass
class _OptimizerSteps:
    """Counts the steps of the optimizer that steps first, and tells the recorder."""

    recorder: Recorder
    stop: bool
    count: int = 0

    def first(self, optimizer: Any, *_: Any) -> None:
        """To be called after each optimizer's step, within the range that PyTorch puts around it."""
        if self.count:
            return
        self._advance()
        original = optimizer.step

        # Steps to be recorded must not end within that range, hence around the method itself.
        @functools.wraps(original)
        def step(_: Any, *args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            self._advance()
            return result

        # A method, since learning-rate schedulers unwrap it.
        optimizer.step = types.MethodType(step, optimizer)

    def _advance(self) -> None:
        before = self.recorder.written
        self.count += 1
        self.recorder.step()
        if self.stop and before is None and self.recorder.written is not None:
            raise _Enough(0)


def _run(script: Path, args: Sequence[str]) -> int:
    """The script's exit code, its messages and traceback on stderr as Python prints them."""
    saved_arguments, saved_path = sys.argv, sys.path[:]
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except InputError:
        raise
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        sys.argv, sys.path[:] = saved_arguments, saved_path
    return 0


def _ended(recorder: Recorder, seen: int, steps: int, exit_code: int) -> Recorded:
    note = ""
    if recorder.written is None:
        counted = f"{seen} optimizer step{'s' * (seen != 1)}"
        reason = "the script failed" if exit_code else f"the script ended after {counted}; ask for fewer warm-up steps"
        note = f"no trace was written: {reason}"
    elif seen == 0:
        note = "no optimizer step was seen: the whole run is recorded, as one step"
        return Recorded(recorder.written, 1, exit_code, note)
    elif recorder.recorded < steps:
        note = f"the script ended before {steps} steps were recorded"
    return Recorded(recorder.written, recorder.recorded, exit_code, note)


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        missing = error.name == "torch"
        problem = "is not installed" if missing else f"cannot be imported: {error}"
        raise InputError("PyTorch", problem, "recording needs it: pip install 'roller[record]'") from None


def _check(steps: int, warmup: int, timed: int) -> None:
    if steps < 1:
        raise InputError("steps", f"is {steps}", "record at least 1 step")
    if warmup < 0:
        raise InputError("warmup", f"is {warmup}", "give 0 or more steps")
    if timed < 0:
        raise InputError("timed", f"is {timed}", "give 0 or more steps")


def _target(torch: Any, path: str | Path) -> Path:
    """Where this process writes its trace; found out before anything runs for a long time."""
    path = Path(path)
    if not path.name.endswith((".json", ".json.gz")):
        raise InputError(str(path), "has no suffix that says what to write", "end it in .json or .json.gz")
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        problem = "is a directory" if path.is_dir() else "is in a directory that is missing or cannot be written"
        raise InputError(str(path), problem)
    world = int(os.environ.get("WORLD_SIZE", "1")) if os.environ.get("WORLD_SIZE", "1").isdigit() else 1
    rank = os.environ.get("RANK", "")
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        world, rank = group.get_world_size(), str(group.get_rank())
    if world > 1 and rank:
        suffix = ".json.gz" if path.name.endswith(".gz") else ".json"
        path = path.with_name(f"{path.name.removesuffix(suffix)}.rank{rank}{suffix}")
    return path


def _activities(torch: Any) -> list[Any]:
    activity = torch.profiler.ProfilerActivity
    return [activity.CPU, *([activity.CUDA] if torch.cuda.is_available() else [])]


def _newer_options(torch: Any) -> dict[str, Any]:
    # Without it, newer versions warn that a second cycle would forget the first.
    parameters = inspect.signature(torch.profiler.profile.__init__).parameters
    return {"acc_events": True} if "acc_events" in parameters else {}


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(str(path), f"cannot be written: {error.strerror or error}") from None


def _write(path: Path, exported: Path, metadata: dict[str, Any]) -> None:
    """The exported trace with one more entry, at `path` only once it is complete."""
    # The profiler's JSON need not be parsed, which may take long: the entry goes before the last brace.
    text = exported.read_bytes().rstrip()
    if not text.endswith(b"}"):
        raise InputError(str(path), "cannot be written: the profiler exported a trace that is cut off")
    entry = json.dumps(metadata).encode()
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with gzip.open(partial, "wb", 6) if path.suffix == ".gz" else partial.open("wb") as file:
            file.write(text[:-1].rstrip() + b',\n  "daydream": ' + entry + b"\n}\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
