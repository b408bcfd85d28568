"""Times of libraries' attention kernels: FlashAttention and its successors.

Which kernel runs follows from the board and the call (``attention_tiles``), its time from its tiles
(``attention_cost``). A call of pages is one of a serving engine: it writes its new keys and values into their pages
first. Times are those of a call in a CUDA graph, the start of the graph included.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from hal.spec.device import DeviceSpec
from hal.spec.parts import MatrixInstruction
from hal.support.errors import InputError
from roller.library.attention.constants import CONSTANTS, AttentionConstants
from roller.library.attention.cost import AttentionStages, Setting, kernel_stages
from roller.library.attention.tiles import AttentionSizes, Calls, Family, attention_launch, family
from roller.library.streaming.elementwise import Direction, LibraryTime, host_seconds, library_time

__all__ = ["AttentionSizes", "attention_seconds"]

#: The first boards that have matrix instructions which these kernels are written for.
CAPABILITY = (8, 0)


def attention_seconds(
    sizes: AttentionSizes,
    device: DeviceSpec,
    *,
    dtype: str = "bfloat16",
    direction: Direction = "forward",
    kernels: Family | None = None,
    constants: AttentionConstants = CONSTANTS,
) -> LibraryTime:
    """Time of attention calls, all of one type and direction; arrays have the shape of the broadcast sizes.

    Args:
        sizes: of the calls.
        device: the board.
        dtype: of queries, keys and values.
        direction: ``forward`` or ``backward``.
        kernels: the family that runs; None for the fastest that a library has for the board.
        constants: of the model.

    Raises:
        InputError: the board has no Tensor Cores for the type, or is older than the kernels.
    """
    backward = direction == "backward"
    instruction = _instruction(device, dtype, warps=kernels in ("FlashAttention 2", "Triton"))
    setting = Setting(device=device, instruction=instruction, backward=backward, constants=constants)
    calls = Calls.of(sizes)
    kinds = family(calls, device, backward=backward) if kernels is None else np.full(calls.b.shape, kernels)
    stage_seconds = {each.name: np.zeros(calls.b.shape) for each in fields(AttentionStages)}
    for kind in constants.kernels:
        chosen = kinds == kind
        if chosen.any():
            some = calls.take(chosen)
            stages = kernel_stages(some, attention_launch(some, kind, device, backward=backward), setting)
            for name, seconds in stage_seconds.items():
                seconds[chosen] = getattr(stages, name)
    shape = np.broadcast_shapes(*(np.shape(getattr(sizes, each.name)) for each in fields(sizes)))
    shaped = {name: seconds.reshape(shape) for name, seconds in stage_seconds.items()}
    kernel, launches = shaped.pop("kernel"), shaped.pop("kernels")
    host = {"host": host_seconds(device, np.ones(shape), launches)}
    return library_time(device, {**host, **shaped}, kernel, launches, kinds.reshape(shape))


def _instruction(device: DeviceSpec, dtype: str, *, warps: bool) -> MatrixInstruction:
    """The matrix instruction that the kernels multiply with; ``warps`` for those that one warp runs alone."""
    instruction = device.matrix_instruction(dtype) if warps else device.best_matrix_instruction(dtype)
    if instruction is None or (device.compute_capability or (0, 0)) < CAPABILITY:
        major, minor = CAPABILITY
        raise InputError(
            "device",
            f"{device.name} has no FlashAttention for {dtype}, which takes Tensor Cores of sm_{major}{minor} or newer",
            'use "algorithm": "eager"',
        )
    return instruction
