"""Other ways to predict the steps of :mod:`bench.accuracy.steps.models`: a roofline, and PyTorch's own estimator.

Both count what PyTorch counts: FLOPs by its registry of operators, bytes of every argument and result, views and
constructors free. They differ in the rates and in what is made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.accuracy.library.library import boards
from bench.accuracy.steps.models import Run, Score, evaluate, mean_errors, read_runs, subject_of
from bench.accuracy.steps.ported import data_sheets
from hal.spec.device import DeviceSpec
from hal.support.tables import new_table

#: ``torch.utils._runtime_estimation.flops_to_ns`` halves the FLOPs, and takes the peak for a quarter less.
_OF_PEAK = 2 * 0.75


@dataclass(frozen=True)
class Counted:
    """FLOPs and bytes of every operator of a step, one array each."""

    flops: Any
    bytes: Any

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The sum over the operators of the longer of computing and moving."""
        return float(np.maximum(self.flops / flops_per_second, self.bytes / bytes_per_second).sum())


def counted_step(run: Run, configurations: Path) -> Counted:
    """Arithmetic and bytes of the operators of a run's step, counted by PyTorch on tensors without data."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils._runtime_estimation import _IGNORE_OPS, get_num_bytes
    from torch.utils.flop_counter import flop_registry

    from daydream.capture.models.hugging_face import positions_without_data
    from daydream.capture.pytorch.meta_kernels import board_kernels
    from daydream.capture.pytorch.step import scalar_of

    rows: list[tuple[float, float]] = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            kind = func._overloadpacket
            if kind not in _IGNORE_OPS:
                flops = flop_registry[kind](*args, **kwargs, out_val=result) if kind in flop_registry else 0
                tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
                rows.append((flops, sum(get_num_bytes(tensor) for tensor in tensors)))
            return result

    subject = subject_of(run, configurations)
    subject.model.train(run.training)
    with board_kernels("eager"), positions_without_data(), torch.set_grad_enabled(run.training), Counter():  # type: ignore[no-untyped-call]
        result = subject.model(*subject.args, **subject.kwargs)
        if run.training:
            scalar_of(result).backward()
    return Counted(*np.array(rows, float).T)


def rival_scores(runs: Sequence[Run], data: Path) -> dict[str, list[Score]]:
    """The scores of each way, on boards that have a spec."""
    configurations = data / "models" / "neusight_configs"
    specs = boards({run.board.replace("_", " "): run.board for run in runs})
    sheets = data_sheets(data, specs)
    steps: dict[tuple[Any, ...], Counted] = {}
    scores: dict[str, list[Score]] = {"roofline, sustained rates": [], "PyTorch's RuntimeEstimator": []}
    for run in runs:
        name = run.board.replace("_", " ")
        if name not in specs:
            continue
        key = (run.model, run.training, run.batch, run.sequence)
        if key not in steps:
            steps[key] = counted_step(run, configurations)
        spec, sheet = specs[name], sheets[name]
        seconds = (
            steps[key].seconds(spec.sustained_flops("float32"), spec.dram.bandwidth_bytes_per_second),
            steps[key].seconds(_OF_PEAK * sheet.peak_flops("float32"), sheet.dram.bandwidth_bytes_per_second),
        )
        for way, predicted in zip(scores, seconds, strict=True):
            scores[way].append(_score(run, spec, predicted))
    return scores


def _score(run: Run, device: DeviceSpec, predicted: float) -> Score:
    return Score(device=device.name, mode=run.mode, label=run.label, measured=run.measured, predicted=predicted)


# Tables


def table(data: Path, out: Path) -> Iterable[Table]:
    """The mean errors of every way; none where the measured models are missing."""
    configurations = data / "models" / "neusight_configs"
    if not configurations.is_dir():
        return []
    runs = [run for run in read_runs(data) if not run.option]
    return [rival_table({"Roller": evaluate(runs, configurations), **rival_scores(runs, data)})]


def rival_table(scores: dict[str, list[Score]]) -> Table:
    """A row per way: mean errors of inference and training, each board counting once, and how steps compare."""
    title = "The same steps by other ways: one board each, not compiled"
    view = new_table(
        ("way",),
        ("runs", "mean error, inference", "mean error, training", "worst run", "predicted/measured"),
        title=title,
    )
    for way, rows in scores.items():
        means = [np.mean(list(mean_errors(rows, mode).values())) for mode in ("inference", "training")]
        worst = max((row.error for row in rows), key=abs)
        ratio = float(np.exp(np.mean([np.log(row.predicted / row.measured) for row in rows])))
        view.add_row(way, str(len(rows)), *(f"{mean:.1%}" for mean in means), f"{worst:+.0%}", f"{ratio:.2f}")
    return view
