"""Layers of experts and grouped products as library calls."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hal.spec.device import DeviceSpec
from roller.library.arrays import Floats
from roller.library.experts.layer import Routed, experts_times, grouped_seconds
from roller.library.experts.loads import TILE_ROWS
from roller.library.streaming.elementwise import LibraryTime, host_seconds

#: Kernels of a layer: two that sort, two products, one between them and one after; of grouped products alone.
LAYER_KERNELS, PRODUCT_KERNELS = 6, 1

#: Names of the sizes of a call.
SIZES = (
    "tokens", "hidden", "intermediate", "all_pairs", "experts", "pairs", "active",
    *(f"tiles_{rows}" for rows in TILE_ROWS), *(f"empty_{rows}" for rows in TILE_ROWS),
)  # fmt: skip


def experts_call_time(variant: str, sizes: Mapping[str, Floats], device: DeviceSpec) -> LibraryTime:
    """Time of calls; ``variant`` is the precision, and after an ``@`` ``divided`` among boards, or ``product`` alone.

    A product alone has k elements for each of its rows in ``hidden`` and n columns in ``intermediate``.

    Raises:
        InputError: the board has no matrix units for the precision.
    """
    precision, _, how = variant.partition("@")
    tiles, empty = (np.stack([sizes[f"{name}_{rows}"] for rows in TILE_ROWS]) for name in ("tiles", "empty"))
    plain_sizes = {name: sizes[name] for name in SIZES if "_" not in name or name == "all_pairs"}
    calls = Routed(**plain_sizes, tiles=tiles, empty_tiles=empty)
    if how == "product":
        seconds, family = grouped_seconds(precision, calls, calls.intermediate, calls.hidden, device)
        stages, kernels = {"products": seconds}, PRODUCT_KERNELS
    else:
        times = experts_times(precision, calls, device, is_divided=how == "divided")
        seconds, family, kernels = times.seconds, times.family, LAYER_KERNELS
        stages = {
            "align": times.align, "products": times.up + times.down, "activation": times.activation,
            "combine": times.combine,
        }  # fmt: skip
    slowest = np.argmax(np.stack(list(stages.values())), axis=0)
    host = host_seconds(device, np.ones_like(seconds), kernels)
    return LibraryTime(
        call_seconds=np.maximum(host, seconds),
        kernel_seconds=seconds,
        stages=stages,
        bound=np.array(list(stages))[slowest],
        algorithm=np.full(seconds.shape, f"experts, {family}"),
        kernels=np.full(seconds.shape, kernels),
    )
