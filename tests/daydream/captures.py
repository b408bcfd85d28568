"""Small captures and prices written by hand, for predictions worked out on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from daydream.capture.captured import Capture, CapturedModule, CapturedOperator, CapturedParameter, CapturedStorage
from daydream.graph.graph import Phase
from daydream.operators.calls import KernelPrice, OperatorPrice
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.prediction.step import PredictedStep
from daydream.trace.trace import NONE
from hal.catalog import load_device

MATRIX = RecordedTensor((64, 64), "float", (64, 1))


def operator(name: str, phase: Phase = Phase.FORWARD, module: int = NONE, **fields: Any) -> CapturedOperator:
    """An operator of two matrices that returns one."""
    values = {"overload": "default", "inputs": Inputs((MATRIX, MATRIX), ("", "")), "outputs": (MATRIX,), **fields}
    return CapturedOperator(name=name, module=module, phase=phase, **values)


def captured(operators: Sequence[CapturedOperator], **fields: Any) -> Capture:
    """A capture of these operators in a model of two layers."""
    modules = (CapturedModule("", "Net"), CapturedModule("0", "Linear"), CapturedModule("1", "Linear"))
    weight = CapturedParameter(name="0.weight", tensor=MATRIX, storage=0, trained=True, order=0)
    values = {"title": "net", "training": any(each.phase != Phase.FORWARD for each in operators), "batch": 4, **fields}
    return Capture(
        operators=tuple(operators),
        modules=modules,
        parameters=(weight,),
        storages=(CapturedStorage(16384, "parameter"),),
        **values,
    )


def step_of(
    operators: Sequence[CapturedOperator],
    host_us: Sequence[float],
    kernels_us: Sequence[Sequence[float]],
    device: str = "v100",
    **fields: Any,
) -> PredictedStep:
    """A step in which every operator takes so much time of the host and launches kernels of these lengths."""
    prices = [
        OperatorPrice(kernels=tuple(KernelPrice(f"k_{o.name}", us * 1e-6, "dram", "streams") for us in lengths))
        for o, lengths in zip(operators, kernels_us, strict=True)
    ]
    return PredictedStep(
        capture=captured(operators, **fields),
        device=load_device(device),
        prices=tuple(prices),
        host=np.array(host_us) * 1e-6,
    )
