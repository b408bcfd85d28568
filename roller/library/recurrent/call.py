"""Layers with a state as library calls: device, host, and what sets the pace."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from hal.spec.device import DeviceSpec
from roller.library.arrays import Floats
from roller.library.recurrent.kernels import (
    RecurrentTimes,
    Sequences,
    convolution_step_times,
    convolution_times,
    family_of,
    rule_step_times,
    rule_times,
)
from roller.library.streaming.elementwise import LibraryTime, host_seconds

#: Names of the sizes of a call.
SIZES = ("batch", "tokens", "key_heads", "value_heads", "key_dim", "value_dim")


def _rule(calls: Sequences, device: DeviceSpec) -> RecurrentTimes:
    return rule_times(calls, device, family_of(device))


def _scan(calls: Sequences, device: DeviceSpec) -> RecurrentTimes:
    """Mamba-2's, by Triton on every board; no row of it was measured."""
    return rule_times(calls, device, "triton", has_triangle=False)


#: Model of a part of a layer, by its name and phase.
MODELS: Mapping[str, Callable[[Sequences, DeviceSpec], RecurrentTimes]] = {
    "convolution": convolution_times,
    "convolution@decode": convolution_step_times,
    "rule": _rule,
    "rule@decode": rule_step_times,
    "scan": _scan,
    "scan@decode": rule_step_times,
}


def recurrent_call_time(variant: str, sizes: Mapping[str, Floats], device: DeviceSpec) -> LibraryTime:
    """Time of calls; ``variant`` is one of :data:`MODELS`."""
    times = MODELS[variant](Sequences(**{name: sizes[name] for name in SIZES}), device)
    stages = {"compute": times.compute, "memory": times.memory}
    slowest = np.argmax(np.stack(list(stages.values())), axis=0)
    host = host_seconds(device, np.ones_like(times.seconds), times.kernels)
    return LibraryTime(
        call_seconds=np.maximum(host, times.seconds),
        kernel_seconds=times.seconds,
        stages=stages,
        bound=np.array(list(stages))[slowest],
        algorithm=np.full(times.seconds.shape, variant.partition("@")[0]),
        kernels=np.full(times.seconds.shape, times.kernels),
    )
