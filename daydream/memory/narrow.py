"""Bytes that a step keeps in narrow numbers under ``--precision``: operands for the backward pass, and weights.

Transformer Engine keeps what a linear layer reads as the quantised operand of the weights' gradient, and two copies of
every weight, one along either axis, next to the one in 16 bits. torchao's dynamic layers keep 16 bits and quantise
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from daydream.capture.captured import Capture, CapturedOperator
from daydream.capture.narrow import narrow_places
from daydream.graph.graph import Phase
from daydream.operators.calls import work_of_call
from daydream.operators.variants import narrowed
from daydream.trace.dtypes import element_bytes

#: Bytes of an element with its share of scales, by precision: a scale of four bytes for 128, of one for 32 and for 16.
ELEMENT_BYTES: Mapping[str, float] = {
    "fp8-tensorwise": 1.0, "fp8-block": 1 + 4 / 128, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16,
}  # fmt: skip

#: Copies of a weight, along its rows and along its columns.
_COPIES = 2


def kept_bytes(capture: Capture) -> Mapping[int, int]:
    """Bytes of the storages that the backward pass reads for narrow products alone, by number."""
    size = ELEMENT_BYTES.get(capture.precision)
    if size is None:
        return {}
    places = narrow_places(capture)
    wide: set[int] = set()
    narrow: dict[int, int] = {}
    for row, operator in enumerate(capture.operators):
        if operator.phase != Phase.BACKWARD or not operator.launches:
            continue
        if row in places and _is_narrow(operator, capture.precision):
            wide_bytes = next((element_bytes(each.dtype) for each in operator.inputs.tensors if each is not None), 2)
            narrow |= dict.fromkeys(operator.read, wide_bytes)
        else:
            wide |= set(operator.read)
    return {
        storage: ceil(capture.storages[storage].bytes * size / element)
        for storage, element in narrow.items()
        if storage not in wide and capture.storages[storage].kind == "step"
    }


def weight_copies(capture: Capture) -> Mapping[int, float]:
    """Bytes per element of the narrow copies of parameters, by the number of their storage."""
    size = ELEMENT_BYTES.get(capture.precision)
    if size is None:
        return {}
    places = narrow_places(capture)
    read = {
        storage
        for row, operator in enumerate(capture.operators)
        if row in places and operator.phase == Phase.FORWARD and _is_narrow(operator, capture.precision)
        for storage in operator.read
    }
    matrices = [each for each in capture.parameters if len(each.tensor.dims) > 1]
    return {each.storage: _COPIES * size for each in matrices if each.storage in read}


def _is_narrow(operator: CapturedOperator, precision: str) -> bool:
    work = work_of_call(operator.name, operator.inputs, operator.outputs)
    return work is not None and narrowed(work, precision) != work
