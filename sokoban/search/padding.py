"""Storage padding of staged tiles, so that the lanes of a warp find their words in different banks (thesis 6.3.1)."""

from __future__ import annotations

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.regions import Size, data_dimension
from sokoban.model.gpu.banks import busiest_bank, lane_words
from sokoban.model.gpu.compiled import compiled_padding
from sokoban.model.gpu.fetch import turned_store_passes
from sokoban.schedule.accesses import VECTOR_BYTES
from sokoban.schedule.table import Ints, ScheduleTable


def formula_padding(stored: Size, read: Size, *, banks: int, width: int) -> Size:
    """Elements to add to a leading dimension of a staged tile by the printed formula of 6.3.1.

    Padding = (B L - N % (B L) + L ceil(n / L)) % (B L).

    >>> formula_padding(64, 4, banks=32, width=1), formula_padding(20, 4, banks=32, width=1)
    (4, 16)

    Args:
        stored: elements of the dimension (N), an integer or an array of integers.
        read: elements of it that are read at a time (n), likewise.
        banks: of shared memory (B).
        width: elements of a bank (L).
    """
    all_banks = banks * width
    padding: Size = (all_banks - stored % all_banks + width * -(-read // width)) % all_banks
    return padding


def bank_padding(table: ScheduleTable, placed: PlacedForm) -> dict[str, Ints]:
    """Storage padding in elements for every staged tile, by tensor: none where no read conflicts, else one vector,
    else an odd row, else the printed formula.

    The formula always pads to a fixed residue, up to doubling narrow rows; where the addresses of a warp show no
    conflict without it, or with the smallest padding that keeps vector accesses aligned, that is better. Turned tiles
    are padded by one vector where that takes conflicts from the stores into them. Tiles of matrix instructions keep the
    padding they have, as does everything where the layer is a cache.
    """
    device = placed.device
    if device.shared.is_cache or not any([staged.any() for staged in table.cached.values()]):
        return dict(table.padding)
    compiled = compiled_padding(table, placed)
    return padding_by_columns(table, device) if compiled is None else compiled


def padding_by_columns(table: ScheduleTable, device: DeviceSpec) -> dict[str, Ints]:
    """:func:`bank_padding` by NumPy, of a device whose programs lay out what they stage."""
    banks, width_bytes = device.shared.bank_count or 32, device.shared.bank_width_bytes or 4
    padding = dict(table.padding)
    zeros = table.zeros
    one_point: dict[str, Ints] = {**table.register_tile, **dict.fromkeys(table.step, table.ones)}
    for load in table.form.body_loads:
        staged = table.cached[load.tensor] & ~table.warp_tile
        if not load.indices or not staged.any():
            continue
        element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
        rows = table.stored_row(load)
        vector = max(1, VECTOR_BYTES // element_bytes)
        pads = np.array([zeros, zeros + vector, 1 - rows % 2])
        passes = busiest_bank(lane_words(table, load, device, pads), banks)
        turned = table.is_turned(load)
        if turned is not None:
            # Read as vectors, which an odd row would push out of line; and stores decide where reads do not.
            stores = turned_store_passes(table, load, device, pads[:2]).astype(np.int64)
            passes = np.where(turned, passes * 64, passes)
            passes[:2] += np.where(turned, stores, 0)
            passes[2] = np.where(turned, passes[0] + 1, passes[2])
        fewest = passes.min(axis=0)
        chosen = np.choose(passes.argmin(axis=0), pads)
        conflicting = staged & (fewest > 1)
        if conflicting.any():
            reads = data_dimension(load.indices[-1]).extent(one_point) + zeros
            formula = formula_padding(rows, reads, banks=banks, width=max(1, width_bytes // element_bytes))
            better = busiest_bank(lane_words(table, load, device, formula), banks) < fewest
            if turned is not None:
                conflicting = conflicting & ~turned
            chosen = np.where(conflicting & better, formula, chosen)
        padding[load.tensor] = np.where(staged, chosen, padding[load.tensor])
    return padding
