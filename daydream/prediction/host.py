"""Time of the host for each operator of a step while the device is busy with earlier ones.

A framework call on an idle device (``framework.call_seconds`` of the board's file, measured between two GPU events)
consists of the host's work for the operator, the launch's way to the device, an empty kernel, and the events. Queued
behind other work only the first of these counts.

The shares come from recorded training steps (ResNet on V100, a recommendation model on A100; PyTorch 2.0), in which a
forward operator with a kernel takes the host 30 and 32 microseconds, a backward one 21 and 27, one more kernel 30 and
37, a view 7: times of a host that the profiler slows down to about half its pace. They are coarse: hosts differ by more
than boards do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daydream.capture.captured import CapturedOperator
from daydream.graph.graph import Phase
from daydream.prediction.processors import module_call_seconds
from daydream.trace.trace import Floats
from hal.spec.device import DeviceSpec

#: Host time of an operator that launches a kernel over ``framework.call_seconds``: called from Python in modules, and
#: by autograd's engine, which needs no Python.
FORWARD_SHARE, BACKWARD_SHARE = 0.50, 0.35

#: Of an operator that launches nothing (views, allocations).
VIEW_SHARE = 0.10

#: Of every kernel of an operator after its first.
KERNEL_SHARE = 0.25

#: Of a recurrent layer's kernels, which cuDNN launches one after the other without PyTorch; from an LSTM and a GRU of
#: KernelBench (37 and 40).
RECURRENT_SHARE = 0.17

#: Of every tensor in a list that an operator takes (multi-tensor optimizers).
LISTED_SHARE = 0.03


def call_seconds(host: str) -> float:
    """``framework.call_seconds`` of a processor by its name.

    Raises:
        InputError: nothing is known of it.
    """
    return module_call_seconds(host) / FORWARD_SHARE


def host_seconds(
    operators: Sequence[CapturedOperator], kernels: Sequence[int], device: DeviceSpec, host: str = ""
) -> Floats:
    """Seconds of the host for each operator, launches included.

    Args:
        operators: of a step, in order.
        kernels: how many each launches.
        device: the board, whose file tells what its host needs for a call.
        host: processor in place of that.
    """
    shares = [_share(operator, count) for operator, count in zip(operators, kernels, strict=True)]
    return np.array(shares, np.float64) * (call_seconds(host) if host else device.framework_calls.call_seconds)


def _share(operator: CapturedOperator, kernels: int) -> float:
    if not kernels:
        return VIEW_SHARE
    first = BACKWARD_SHARE if operator.phase == Phase.BACKWARD else FORWARD_SHARE
    listed = sum(len(members) for members in operator.inputs.lists)
    further = RECURRENT_SHARE if "cudnn_rnn" in operator.name else KERNEL_SHARE
    return first + further * (kernels - 1) + LISTED_SHARE * listed
