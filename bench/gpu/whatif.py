"""What-ifs against ground truth: Daydream's prediction from the baseline's trace beside the step that was measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.results import Results, TrainingResult, extract_trace

#: Variant -> the passes of ``daydream whatif`` that stand for it. channels-last has none.
PASSES: Mapping[str, tuple[str, ...]] = {
    "amp": ("amp",),
    "fused-adam": ("fused-optimizer",),
    "amp+fused-adam": ("amp", "fused-optimizer"),
    "cuda-graph": ("cuda-graphs",),
    "compile": ("pointwise-fusion",),
}

#: Trace and passes to the JSON of ``daydream whatif``; or an error in words.
Ask = Callable[[Path, Sequence[str]], dict[str, object] | str]


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A variant of a training step: what Daydream said it would bring, and what it brought.

    Attributes:
        baseline, measured: clean step times in seconds.
        predicted_speedup: of the simulated steps; None where Daydream gave none, for the `reason`.
    """

    model: str
    batch: int
    variant: str
    baseline: float
    measured: float
    predicted_speedup: float | None
    reason: str = ""

    @property
    def measured_speedup(self) -> float:
        return self.baseline / self.measured

    @property
    def predicted(self) -> float | None:
        """The clean baseline's step, as many times faster as predicted, in seconds."""
        return self.baseline / self.predicted_speedup if self.predicted_speedup else None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured step time."""
        return None if self.predicted is None else self.predicted / self.measured - 1


def ask_daydream(trace: Path, passes: Sequence[str]) -> dict[str, object] | str:
    """``daydream whatif TRACE --pass ... --json`` in a process of its own."""
    options = [word for name in passes for word in ("--pass", name)]
    command = [sys.executable, "-m", "daydream.cli", "whatif", str(trace), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"exit code {done.returncode}"
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def what_ifs(results: Results, directory: Path, ask: Ask = ask_daydream) -> list[WhatIf]:
    """Every variant whose baseline was traced and that a pass stands for, in the order of the harvest."""
    baselines = {(one.model, one.batch): one for one in results.training if one.variant == "baseline" and one.trace}
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for one in results.training:
            before = baselines.get((one.model, one.batch))
            if before is not None and one.variant in PASSES:
                found.append(_what_if(before, one, directory, Path(scratch), ask))
    return found


def _what_if(before: TrainingResult, after: TrainingResult, directory: Path, scratch: Path, ask: Ask) -> WhatIf:
    assert before.trace is not None
    answer = ask(extract_trace(directory, before.trace, scratch), PASSES[after.variant])
    speedup, reason = None, ""
    if isinstance(answer, str):
        reason = answer
    else:
        value = answer.get("speedup")
        speedup = float(value) if isinstance(value, int | float) and value > 0 else None
        reason = "" if speedup else "it predicted no time"
    return WhatIf(
        model=after.model,
        batch=after.batch,
        variant=after.variant,
        baseline=before.steps.median,
        measured=after.steps.median,
        predicted_speedup=speedup,
        reason=reason,
    )
