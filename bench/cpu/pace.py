"""RATIONAL's predictions for the kernels that ran, from a spec that is measured between operators.

The pace of a shared machine changes by up to twice within minutes: then a device file of half an hour ago describes
another machine, and an error of a prediction says how far that has gone. What the model is worth is seen by a spec as
old as the measurement. It is measured on either side of an operator's rounds, with fewer readings than the file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench.cpu.ours import competitor
from bench.cpu.rivals import Unable
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError

Spec = Mapping[str, Any]
_READINGS, _READING_SECONDS = 5, 2e-3
#: OpenMP's threads spin for a fifth of a second after their last work.
_SLEEP_SECONDS = 0.3


def spec_now() -> DeviceSpec:
    """This machine's cores as they are now, disturbed or not: medians, as the times of kernels are. About four seconds.

    Raises:
        InputError: the system does not say which caches there are.
    """
    from hal.microbench.sampling import Settings
    from hal.this_cpu import cpu_now

    return cpu_now(Settings(repeats=_READINGS, target_seconds=_READING_SECONDS))


class Pace:
    """Predictions for a folder of bundles; :meth:`turn` between two operators, before the first and after the last."""

    def __init__(self, bundles: Path, measure: Callable[[], DeviceSpec] = spec_now) -> None:
        self.bundles, self.measure = bundles, measure
        self.before: DeviceSpec | None = None
        self.after: DeviceSpec | None = None

    def turn(self) -> None:
        """Measure the machine, once everybody's threads sleep."""
        time.sleep(_SLEEP_SECONDS)
        self.before, self.after = self.after, self.measure()

    def seconds(self, spec: Spec) -> float | None:
        """Prediction for the kernel that competes for an operator, between the last two measurements: the
        geometric mean of both. None where there is no such kernel."""
        from codegen.bundle.manifest import read_manifest
        from codegen.bundle.reader import read_bundle
        from sokoban.kernel.form import kernel_form
        from sokoban.language.operators import operator_from_data
        from sokoban.model.rational import estimate_schedules
        from sokoban.schedule.files import schedule_from_json

        folder = self.bundles / str(spec["name"])
        if self.before is None or self.after is None or not folder.is_dir():
            return None
        try:
            rank = competitor(read_bundle(folder)).rank
            record = next(kernel for kernel in read_manifest(folder).kernels if kernel.rank == rank)
            form = kernel_form(operator_from_data(dict(spec)))
            schedule = schedule_from_json(msgspec.json.decode((folder / str(record.schedule)).read_bytes()), form)
        except (InputError, Unable, OSError, msgspec.DecodeError):
            return None
        times = [float(estimate_schedules(form, one, [schedule]).seconds[0]) for one in (self.before, self.after)]
        return math.sqrt(math.prod(times))
