"""How long the attention kernels of libraries take: FlashAttention and its successors.

A stand-in: arithmetic at the matrix units' sustained rate against moving every tensor once, and the launch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from hal.spec.device import DeviceSpec
from roller.library.elementwise import Direction, LibraryTime, host_seconds, library_time
from sokoban.language.expression import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes of attention calls, one entry per call each, or one number for all.

    Attributes:
        b: sequences.
        heads: heads of queries.
        kv_heads: heads of keys and values.
        queries: queries of a sequence.
        keys: keys of a sequence.
        head_dim: elements of a query and of a key.
        value_dim: elements of a value.
        causal: 1 where query i sees the keys up to ``i + keys - queries`` alone, else 0.
        window: how many of these it sees, 0 for all.
        page: tokens of a page of keys and values, 0 where they are contiguous.
    """

    b: ArrayLike
    heads: ArrayLike
    kv_heads: ArrayLike
    queries: ArrayLike
    keys: ArrayLike
    head_dim: ArrayLike
    value_dim: ArrayLike
    causal: ArrayLike
    window: ArrayLike
    page: ArrayLike


def attention_seconds(
    sizes: AttentionSizes, device: DeviceSpec, *, dtype: str = "bfloat16", direction: Direction = "forward"
) -> LibraryTime:
    """Time of attention calls, all of one type and direction."""
    columns = np.broadcast_arrays(*(np.asarray(getattr(sizes, field.name), np.float64) for field in fields(sizes)))
    b, heads, kv_heads, queries, keys, head_dim, value_dim, causal, window, _ = columns
    length = np.where(window > 0, np.minimum(window, keys), keys)
    # The sum over the queries of min(keys up to its own, window), the first of which sees keys - queries + 1.
    growing = np.clip(length - (keys - queries), 0, queries)
    masked = queries * length - growing * (growing - 1) / 2
    pairs = b * heads * np.where(causal > 0, masked, queries * keys)
    backward = direction == "backward"
    operations = 2 * pairs * (head_dim + value_dim) * (2.5 if backward else 1.0)
    moved = (
        b * (heads * queries + kv_heads * keys) * (head_dim + value_dim) * DTYPE_BYTES[dtype] * (3 if backward else 1)
    )
    instruction = device.best_matrix_instruction(dtype)
    rate = instruction.sustained_flops if instruction is not None else device.sustained_flops("float32")
    kernels = np.full(pairs.shape, 3.0 if backward else 1.0)
    launch = kernels * device.launch_overhead_seconds
    stages = {
        "host": host_seconds(device, np.ones(pairs.shape), kernels),
        "compute": operations / rate,
        "dram": moved / device.dram.bandwidth_bytes_per_second,
    }
    capability = device.compute_capability or (0, 0)
    name = (
        "FlashAttention 3"
        if capability == (9, 0)
        else "FlashAttention 4"
        if capability[0] == 10
        else "FlashAttention 2"
    )
    kernel = np.maximum(stages["compute"], stages["dram"]) + launch
    return library_time(device, stages, kernel, kernels, name)
