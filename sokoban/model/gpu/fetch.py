"""The cooperative fetch: all threads of a block copy the data tiles of a step from global to shared memory (5.5.2).

Consecutive threads take consecutive elements of the tile (``vector`` of them each), so that coalescing depends on how
long the tile's rows are in memory. Three costs follow: instructions, wavefronts of the load/store unit, and the time
for which no warp can compute because the loads of one thread wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hal.spec.device import DeviceSpec
from sokoban.kernel.regions import DataDimension, data_dimension
from sokoban.language.expression import Load
from sokoban.model.gpu.banks import cycles_of_request
from sokoban.model.gpu.transactions import tile_transaction_bytes
from sokoban.schedule.accesses import VECTOR_BYTES, widest_fetch
from sokoban.schedule.table import Bools, Floats, Ints, ScheduleTable, product

#: Instructions per copied element: address, load, store; and those of a bounds check, where it guards every element of
#: a padded input. Read off the SASS of tiled programs (8 of a 1x1 convolution, 16 to 22 with a check).
FETCH_INSTRUCTIONS = 7.0
GUARD_INSTRUCTIONS = 14.0

#: Instructions per access of a pipelined copy, and per guard of one: addresses and guards are worked out before all
#: steps (read off the SASS of products and convolutions compiled for sm_75 and sm_80).
HOISTED_INSTRUCTIONS = 2.0
HOISTED_GUARD_INSTRUCTIONS = 2.0

#: Instructions per asynchronous copy, itself included, and per guard of one: a copy wants an address in two registers,
#: whose constants it takes no part of; at a border its place in the tile is one more (read off the SASS of products and
#: convolutions for sm_80 and sm_90).
ASYNCHRONOUS_INSTRUCTIONS = 3.0
ASYNCHRONOUS_GUARD_INSTRUCTIONS = 1.0

#: Loads that one thread has under way before the first of their stores makes it wait: in unrolled code the compiler
#: hoists about as many as it has registers for; a rolled loop it unrolls by four.
UNROLLED_LOADS = 16.0
ROLLED_LOADS = 4.0

#: The same of loads whose guards differ, where others overlap like those without: guards are predicates in a loop over
#: steps, computed before it as far as they do not change, and branches in a single step, or where all steps are
#: written out. Between two waits of 217 unrolled programs compiled for sm_75 there are 6 guarded loads where no guard
#: changes from step to step, 1.3 where some do and 1.1 in a single step; 3.5 for loops was chosen by the times of
#: programs.
GUARDED_UNROLLED_LOADS = 3.5
BRANCHING_LOADS = 1.1
GUARDED_LOADS = 1.0

#: Wavefronts of the load/store unit per line that a load touches: lines of a request that misses are handed on at
#: more than one per cycle of the shared-memory port.
LINE_WAVEFRONTS = 0.5

_LINE_BYTES = 128
_SECTOR_BYTES = 32


@dataclass(frozen=True, eq=False, kw_only=True)
class Fetch:
    """Copying the data tile of one load during one step; of a block where nothing else is said.

    Attributes:
        elements: of the tile.
        loads: load instructions per thread.
        instructions: all instructions per thread.
        wavefronts: passes of the load/store unit, global loads and shared stores together.
        bulk_passes: passes of shared memory in which bulk copies arrive, all banks at once.
        elements_per_thread: that a thread copies.
        batches: how often a thread waits for memory, the first time included; 0 where the tensor is not staged.
        bytes: in transactions of the next layer.
    """

    elements: Ints
    loads: Floats
    instructions: Floats
    wavefronts: Floats
    bulk_passes: Floats
    elements_per_thread: Floats
    batches: Floats
    bytes: Floats


def fetch(table: ScheduleTable, load: Load, device: DeviceSpec) -> Fetch:
    """The fetch of ``load``, staged or not: a caller picks the rows where it is."""
    element_bytes = table.form.expr.tensor_by_name[load.tensor].element_bytes
    elements = product(table.extents(load), table.count)
    pipelined = (table.stages > 1) & ~table.warp_tile if table.has_stages else None
    guarded = load.pad is not None
    vector, run = _vector(table, load), _contiguous_run(table, load)
    vectorised = _is_vector_access(table, load, vector, run)
    if guarded:
        # A guard that is worked out once for a vector leaves it whole.
        vectorised = vectorised & (False if pipelined is None else pipelined)
    accesses_per_thread = np.ceil(elements / (table.threads_per_block * vector))
    loads = np.where(vectorised, accesses_per_thread, accesses_per_thread * vector)
    width = np.where(vectorised, vector, 1)
    passes_per_store = np.where(vectorised, 1, _store_passes(vector, element_bytes, device, guarded))
    stores_per_request = np.maximum(1.0, width * element_bytes / 4) * passes_per_store
    apart = vector
    if (pieces := table.pieces.get(load.tensor)) is not None:
        apart = np.maximum(vector, pieces)
        stores_per_request = np.where(
            pieces > 0, _piece_passes(width, apart, element_bytes, device), stores_per_request
        )
    instructions = loads * (FETCH_INSTRUCTIONS + (GUARD_INSTRUCTIONS if guarded else 0.0))
    turned = table.is_turned(load)
    if turned is not None:
        turned_passes = turned_store_passes(table, load, device, table.padding[load.tensor])
        stores_per_request = np.where(turned, width * turned_passes, stores_per_request)
        instructions = instructions + np.where(turned, loads * (width - 1), 0.0)
    if pipelined is not None:
        hoisted = _pipelined_instructions(table, loads, width, turned, guarded)
        instructions = np.where(pipelined, hoisted, instructions)
    requests, cycles = elements / (device.warp_lanes * width), cycles_of_request(device)
    tags_per_request = _tags_per_request(run, width, apart, element_bytes, device)
    return Fetch(
        elements=elements,
        loads=loads,
        instructions=instructions,
        wavefronts=requests
        * (np.maximum(tags_per_request * LINE_WAVEFRONTS, cycles) + np.maximum(stores_per_request, cycles)),
        bulk_passes=elements * (element_bytes / _LINE_BYTES),
        elements_per_thread=loads * width,
        batches=np.maximum(1.0, _waits(table, load, loads, vector) / loads_in_flight(table, load, loads, vector)),
        bytes=tile_transaction_bytes(table, load, table.block_tile, (device.l2 or device.dram).transaction_bytes),
    )


def _tags_per_request(run: Ints, width: Ints, apart: Ints, element_bytes: int, device: DeviceSpec) -> Floats:
    """Lines that a load of a warp touches, or as many as its sectors would fill.

    Args:
        run: elements of the tile that follow each other in memory.
        width: elements of an access.
        apart: elements between the accesses of neighbouring lanes.
        element_bytes: bytes of an element.
        device: of the warp.
    """
    lanes = device.warp_lanes
    stride = np.where(width == apart, 1, apart)
    span = lanes * apart
    elements_of_row = np.minimum(run, span)
    rows_of_request = np.maximum(1.0, span / run)
    row_bytes = elements_of_row * element_bytes
    most = np.ceil(elements_of_row / stride)
    sectors_of_row = np.minimum(row_bytes / _SECTOR_BYTES + 1 - element_bytes / _SECTOR_BYTES, most)
    sectors_per_request = rows_of_request * sectors_of_row
    sectors_per_request = np.minimum(
        sectors_per_request, lanes * np.maximum(1.0, width * element_bytes / _SECTOR_BYTES)
    )
    lines_of_row = np.minimum(row_bytes / _LINE_BYTES + 1 - element_bytes / _LINE_BYTES, most)
    lines_per_request = np.minimum(rows_of_request * lines_of_row, lanes)
    return np.maximum(lines_per_request, sectors_per_request * _SECTOR_BYTES / _LINE_BYTES)


def _pipelined_instructions(
    table: ScheduleTable, loads: Floats, width: Ints, turned: Bools | None, guarded: bool
) -> Floats:
    """Instructions of a thread per step where copies run ahead: ``loads`` accesses of ``width`` elements."""
    stores = np.where(turned, width, 1) if turned is not None else 1
    instructions = loads * (HOISTED_INSTRUCTIONS + (HOISTED_GUARD_INSTRUCTIONS if guarded else 0.0) + stores)
    if table.has_asynchronous:
        past = loads * (ASYNCHRONOUS_INSTRUCTIONS + (ASYNCHRONOUS_GUARD_INSTRUCTIONS if guarded else 0.0))
        instructions = np.where(table.asynchronous, past, instructions)
    return instructions


def _vector(table: ScheduleTable, load: Load) -> Ints:
    """Elements that a thread copies by one access; the widest legal number where the schedule leaves it open."""
    given = table.vector.get(load.tensor)
    if given is not None and given.all():
        chosen = given
    else:
        widest = widest_fetch(table.form, load, {**table.block, **table.step}, table.padding[load.tensor])
        chosen = widest if given is None else np.where(given == 0, widest, given)
    turned = table.is_turned(load) if table.has_asynchronous else None
    # An asynchronous copy stores what it reads as one piece.
    return chosen if turned is None else np.where(turned & table.asynchronous, 1, chosen)


def _store_passes(vector: Ints, element_bytes: int, device: DeviceSpec, guarded: bool) -> Ints:
    """Passes per word that a warp stores to shared memory with its lanes ``vector`` elements apart.

    Lanes ``s`` words apart share ``banks / gcd(s, banks)`` banks (5.5.2). A guarded element is stored by itself; others
    the compiler stores up to 16 bytes at a time, in no more passes than the first word of them takes (read off the SASS
    of tiled programs).
    """
    bank_bytes = device.shared.bank_width_bytes or 4
    word = max(element_bytes, bank_bytes)
    words_between_lanes = np.maximum(1, vector * element_bytes // word)
    ways = np.gcd(words_between_lanes, (device.shared.bank_count or 32) * bank_bytes // word)
    return ways if guarded else ways // np.gcd(ways, max(1, VECTOR_BYTES // word))


def _piece_passes(width: Ints, apart: Ints, element_bytes: int, device: DeviceSpec) -> Ints:
    """Passes of a store of ``width`` elements per lane where lanes are ``apart`` elements from each other, as the text
    has it: ``words`` of them whole, times the lanes that meet in the banks (5.5.2)."""
    bank_bytes, banks = device.shared.bank_width_bytes or 4, device.shared.bank_count or 32
    words = np.maximum(1, width * element_bytes // bank_bytes)
    return words * np.gcd(np.maximum(1, apart // width), np.maximum(1, banks // words))


def turned_store_passes(table: ScheduleTable, load: Load, device: DeviceSpec, padding: Ints) -> Floats:
    """Passes per store of a warp into a tile of ``load`` that is stored turned, one word per lane.

    Lanes that copy one row of the tensor's tile store ``vector`` stored rows apart; each further row is adjacent. With
    ``G`` lanes along a row, ``D`` of which find different banks ``s`` apart, and ``F`` rows at a time, a warp reaches
    ``D min(F, s)`` banks, and ``F`` where ``D`` is one (5.5.2).
    """
    banks, lanes = device.shared.bank_count or 32, device.warp_lanes
    vector = _vector(table, load)
    row = table.stored_row(load)
    run = np.maximum(1, product(table.extents(load), table.count) // row)
    lanes_along = np.maximum(1, np.minimum(lanes, run // np.maximum(1, vector)))
    rows_at_a_time = np.maximum(1, lanes // lanes_along)
    bank_stride = np.gcd(vector * (row + padding), banks)
    different = np.minimum(lanes_along, banks // bank_stride)
    several = different * np.minimum(rows_at_a_time, bank_stride)
    reached = np.minimum(banks, np.where(different > 1, several, rows_at_a_time))
    return np.maximum(1.0, lanes / reached)


def _waits(table: ScheduleTable, load: Load, loads: Floats, vector: Ints) -> Floats:
    """Number of waits of a thread in one step if no two overlapped: once per load, but once per guarded vector
    that no row of the tile ends within. Its elements share an address and most of the guard, so that their loads are
    predicated rather than branched around."""
    if load.pad is None:
        return loads
    return np.where(table.extents(load)[-1] % vector == 0, loads / vector, loads)


def loads_in_flight(table: ScheduleTable, load: Load, loads: Floats, vector: Ints) -> Floats:
    """Loads of one thread that wait for memory together, at most ``loads``; ``vector`` elements follow each other."""
    unrolled = loads <= np.maximum(table.unroll, 1)
    together = np.where(unrolled, UNROLLED_LOADS, ROLLED_LOADS)
    if load.pad is not None:
        branches = table.branches.get(load.tensor, False) | (table.step_count == 1)
        guarded = np.where(unrolled, np.where(branches, BRANCHING_LOADS, GUARDED_UNROLLED_LOADS), GUARDED_LOADS)
        together = np.where(_is_guard_shared(table, load, vector), together, guarded)
    return np.minimum(loads, together)


def _is_guard_shared(table: ScheduleTable, load: Load, vector: Ints) -> Bools:
    """True if all elements that a thread copies lie at the same place of the dimensions that leave the tensor, or at
    places that are the same for all threads, so that one guard serves them. Elements next to each other have their own.
    """
    shape, extents = table.form.expr.tensor_by_name[load.tensor].shape, table.extents(load)
    checked = [
        leaves_tensor(data_dimension(index), size, table.form.sizes)
        for index, size in zip(load.indices, shape, strict=True)
    ]
    if not any(checked):
        return np.zeros(table.count, dtype=bool)
    box, threads = product(extents[checked.index(True) :], table.count), table.threads_per_block
    return (vector == 1) & (threads % extents[-1] == 0) & ((threads % box == 0) | (box % threads == 0))


def leaves_tensor(dimension: DataDimension, size: int, sizes: Mapping[str, int]) -> bool:
    """True if indices of a dimension of ``size`` elements may be outside it."""
    last = dimension.offset + dimension.stride * (dimension.extent(sizes) - 1)
    return dimension.offset < 0 or last >= size


def _contiguous_run(table: ScheduleTable, load: Load) -> Ints:
    """Elements of the data tile that follow each other in memory: a row, or many where rows are read whole."""
    shape = table.form.expr.tensor_by_name[load.tensor].shape
    run = table.ones
    spans_row: Bools = np.ones(table.count, dtype=bool)
    for extent, size in zip(reversed(table.extents(load)), reversed(shape), strict=True):
        if not spans_row.any():
            break
        run = np.where(spans_row, run * extent, run)
        spans_row = spans_row & (extent == size)
    return run


def _is_vector_access(table: ScheduleTable, load: Load, vector: Ints, run: Ints) -> Bools:
    """True if ``vector`` elements are one access: a power of two up to 16 bytes, aligned and inside a row."""
    tensor = table.form.expr.tensor_by_name[load.tensor]
    power = (vector & (vector - 1)) == 0
    fits = (vector > 1) & (vector * tensor.element_bytes <= VECTOR_BYTES)
    return power & fits & (run % vector == 0) & (tensor.shape[-1] % vector == 0 if tensor.shape else False)
