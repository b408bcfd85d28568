"""The stages of schedules by multiply-adds in compiled code (``native/stages.c``): the same bits, sooner.

A table of construction has some ten to fifty rows, so that most of the time of the NumPy functions is that of calling
NumPy. What they compute before the stages are put together, and the padding against bank conflicts, is written in C as
well, row by row. The NumPy functions stay what explains a program, prices what the C does not know (matrix
instructions, rows, loops cut twice) and serves where no compiler is.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hal.support.native import native_library
from hal.support.records import quick
from sokoban.kernel.form import KernelForm
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.regions import data_dimension, read_bytes, storage_order
from sokoban.language.expression import Load
from sokoban.model.gpu.banks import cycles_of_request
from sokoban.model.gpu.loops import COMPILER_UNROLL
from sokoban.model.gpu.occupancy import uncounted_registers
from sokoban.model.gpu.reuse import is_read_again
from sokoban.model.gpu.row_work import row_work
from sokoban.model.gpu.stages import (
    cache_latencies,
    final_seconds,
    issue_operations,
    latency_seconds,
    opened_pages_factor,
    passes_per_second,
    walks_innermost,
)
from sokoban.model.gpu.step import Occupancy
from sokoban.model.gpu.transactions import keeps_in_l2, l2_room, touched_parts
from sokoban.model.gpu.work import body_instructions
from sokoban.schedule.table import Floats, Ints, ScheduleTable

#: The C file.
SOURCE = Path(__file__).parent / "native" / "stages.c"

#: What the C file has room for.
_MOST = {"axes": 24, "loads": 16, "dimensions": 12, "terms": 12, "lanes": 64, "banks": 128}

#: Lines of the results, in the order in which the C file has them.
_SECONDS = (
    "compute", "issue", "shared", "l2", "stored", "final", "waiting", "dram", "power", "hoisting", "rounds",
    "cubes",
)  # fmt: skip
_PARTS = ("together", "alone", "unfilled", "stores", "finishing", "units", "filling", "waiting")
_KERNEL_STAGES = 7
_SECONDS_LINES = len(_SECONDS) + len(_PARTS) + _KERNEL_STAGES
#: Those of integers; behind them stand the rounds, the blocks and the steps of a kernel.
_COUNTS = ("registers", "spilled", "shared", "resident", "running", "warps")
_COUNT_LINES = len(_COUNTS) + 3


@dataclass(frozen=True, eq=False, kw_only=True)
class CompiledStages:
    """Stages of every row of a table.

    Attributes:
        seconds: seconds of one step of all blocks that a unit runs, by stage that they share; of ``stored``, ``final``
            and ``waiting`` of one block; of ``dram`` and ``power`` of the whole kernel; and the factor of ``hoisting``.
        occupancy: how the blocks occupy the device.
        parts: how these make the time on the units, by the names of :class:`sokoban.model.gpu.breakdown.Breakdown`.
        whole: seconds of the whole kernel by stage, in the order of :data:`sokoban.model.gpu.breakdown.STAGES`.
        waves: rounds of blocks, the last one counted in full.
    """

    seconds: Mapping[str, Floats]
    occupancy: Occupancy
    parts: Mapping[str, Floats]
    whole: Sequence[Floats]
    waves: Ints


def compiled_stages(table: ScheduleTable, placed: PlacedForm, exponent: float) -> CompiledStages | None:
    """The stages of a table; None where compiled code has none for it. ``exponent``: of the sum of the stages' cubes,
    the inverse of :data:`sokoban.model.gpu.breakdown.STAGE_OVERLAP`."""
    native = ready(table, placed)
    if native is None or table.unroll.max() > COMPILER_UNROLL:
        return None  # bodies so large may hold values that find no register (operands.py)
    library, problem = native
    count, sharing = table.count, problem.sharing(table)
    columns, *arrays = _columns(table)
    seconds, counts = np.empty((_SECONDS_LINES, count)), np.empty((_COUNT_LINES, count), dtype=np.int64)
    given, results = (*problem.addresses, _address(columns)), (_address(seconds), _address(counts))
    shared = None if sharing is None else _address(sharing)
    library.price(*given, *map(_address, arrays), shared, count, *results)
    # Powers are NumPy's, so that they have its bits.
    root = seconds[_SECONDS.index("cubes")] ** exponent
    library.finish(*given, count, _address(root), *results)
    lines, numbers = iter(seconds), iter(counts)
    by_name = dict(zip(_SECONDS, lines, strict=False))
    return quick(
        CompiledStages,
        seconds=by_name,
        parts=dict(zip(_PARTS, lines, strict=False)),
        whole=list(lines),
        occupancy=quick(Occupancy, rounds=by_name["rounds"], **dict(zip(_COUNTS, numbers, strict=False))),
        waves=next(numbers),
    )


def compiled_padding(table: ScheduleTable, placed: PlacedForm) -> dict[str, Ints] | None:
    """:func:`sokoban.search.padding.bank_padding`; None where compiled code cannot tell."""
    native = ready(table, placed)
    if native is None:
        return None
    library, problem = native
    columns, before, raster = _columns(table)
    padding = before.copy()
    arrays = map(_address, (columns, before, raster))
    library.pad(*problem.addresses, *arrays, table.count, _address(padding))
    return dict(zip(table.padding, padding, strict=True))


def compiled_added_bytes(table: ScheduleTable, placed: PlacedForm) -> tuple[Floats, Floats] | None:
    """Bytes that one more tile down and across a band adds (:mod:`sokoban.search.bands`); None where compiled code
    cannot tell."""
    native = ready(table, placed)
    if native is None:
        return None
    library, problem = native
    down, across, arrays = np.empty(table.count), np.empty(table.count), _columns(table)
    library.added_bytes(*problem.addresses, *map(_address, arrays), table.count, _address(down), _address(across))
    return down, across


def compiled_traffic(table: ScheduleTable, placed: PlacedForm, resident: Ints, raster: Ints) -> Floats | None:
    """Bytes of the operands from DRAM where ``resident`` blocks of the device run at once, in bands of width
    ``raster``; None where compiled code cannot tell."""
    native = ready(table, placed)
    if native is None:
        return None
    library, problem = native
    moved, (columns, padding, _) = np.empty(table.count), _columns(table)
    arrays = (columns, padding, np.array(raster, dtype=np.int64), np.array(resident, dtype=np.int64))
    library.traffic(*problem.addresses, *map(_address, arrays), table.count, _address(moved))
    return moved


def _address(array: Any) -> int:
    """Where the entries of an array of our own begin; its ``ctypes.data`` takes three times as long to say so."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))


def ready(table: ScheduleTable, placed: PlacedForm) -> tuple[Any, _Problem] | None:
    """The library and the problem that it is given; None where it knows no such problem or schedules."""
    if table.has_warp_tiles or table.spells_out or not table.count:
        return None
    library_and_problem: tuple[Any, _Problem] | None = placed.remembered.get("compiled")
    if library_and_problem is None:
        library = native_library(SOURCE).library()
        if library is None:
            return None
        library_and_problem = placed.remembered["compiled"] = _typed(library), _problem(placed)
    return None if library_and_problem[1].form is None else library_and_problem


def _typed(library: ctypes.CDLL) -> Any:
    if library.price.argtypes is None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.price.argtypes = (*[pointer] * 6, number, pointer, pointer)
        library.pad.argtypes = (*[pointer] * 5, number, pointer)
        library.added_bytes.argtypes = (*[pointer] * 5, number, pointer, pointer)
        library.traffic.argtypes = (*[pointer] * 6, number, pointer)
        for function in (library.price, library.pad, library.added_bytes, library.traffic):
            function.restype = None
        library.finish.argtypes = (*[pointer] * 3, number, *[pointer] * 3)
        library.finish.restype = None
    return library


def _columns(table: ScheduleTable) -> tuple[Ints, Ints, Ints]:
    """The columns of a table, line by line; its padding by tensor; and its bands."""
    padding = np.array([table.padding[name] for name in table.cached], dtype=np.int64)
    return table.lines, padding, np.array(table.raster, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class _Problem:
    """An operator on a device as the C file reads it; ``form`` is None where it has no room for it."""

    form: KernelForm | None
    ints: array[int]
    doubles: array[float]

    @cached_property
    def addresses(self) -> tuple[int, int]:
        """Where both arrays begin."""
        return self.ints.buffer_info()[0], self.doubles.buffer_info()[0]

    def sharing(self, table: ScheduleTable) -> Floats | None:
        """Work of threads that share rows, line by line; None where none do."""
        form = self.form
        if form is None or not (table.reduce_threads > 1).any():
            return None
        rows = row_work(form, table.reduce_threads, table.kept_columns)
        lines: list[Any] = [rows.arithmetic, rows.instructions, rows.kept_registers, rows.batches]
        for load in form.body_loads:
            lines += [rows.loads.get(load, table.zeros), rows.width.get(load, table.ones)]
        return np.array(lines, dtype=np.float64)


def _problem(placed: PlacedForm) -> _Problem:
    form, device = placed.form, placed.device
    axes = (*form.spatial, *form.reduced)
    accesses = [load.indices for load in form.body_loads]
    fits = (
        form.is_tile
        and len(axes) <= _MOST["axes"]
        and 0 < len(accesses) <= _MOST["loads"]
        and max(map(len, accesses)) <= _MOST["dimensions"]
        and max([len(index.terms) for indices in accesses for index in indices], default=0) <= _MOST["terms"]
        and device.warp_lanes <= _MOST["lanes"]
        and (device.shared.bank_count or 32) <= _MOST["banks"]
    )
    if not fits:
        return _Problem(None, array("q"), array("d"))
    ints, doubles = _head(placed, axes)
    place = {axis: number for number, axis in enumerate(axes)}
    tensors = list(dict.fromkeys([load.tensor for load in form.body_loads]))
    for load in form.body_loads:
        fields, rates = _load(placed, load, place, tensors.index(load.tensor))
        ints += fields
        doubles += rates
    return _Problem(form, array("q", ints), array("d", doubles))


def _head(placed: PlacedForm, axes: tuple[str, ...]) -> tuple[list[int], list[float]]:
    """The numbers of an operator and a device before those of loads."""
    form, device = placed.form, placed.device
    limits, shared, l2, dram = device.limits, device.shared, device.l2 or device.dram, device.dram
    output = form.expr.output
    last = form.final.axes[-1] if form.final.axes else None
    body, final = body_instructions(form)
    limit = device.limited_flops(placed.arithmetic_dtype)
    others = {load.tensor for load in form.later_loads} - {load.tensor for load in form.body_loads}
    ints = [
        len(form.spatial), len(form.reduced), len({load.tensor for load in form.body_loads}), len(form.body_loads),
        form.reduction is not None, form.reduces_contiguously, form.spatial.index(last) if last in form.spatial else -1,
        2 if form.expr.accumulate == "float64" else 1,
        sum([len(load.indices) for load in (*form.body_loads, *form.final_loads)]), output.element_bytes,
        output.size_bytes, device.warp_lanes, shared.bank_count or 32, shared.bank_width_bytes or 4,
        device.teu.group_size, device.unit_count, l2.transaction_bytes, dram.scattered_bytes_per_second is not None,
        limits.registers_per_unit, limits.registers_per_thread, limits.register_allocation_granularity,
        uncounted_registers(device), limits.threads_per_unit, limits.shared_bytes_per_unit,
        limits.shared_bytes_reserved_per_block, limits.shared_bytes_per_block_opt_in, limits.threads_per_block,
        limits.blocks_per_unit, cycles_of_request(device), *[form.sizes[axis] for axis in axes],
    ]  # fmt: skip
    doubles = [
        max(1.0, body), final,
        2.0 * device.warp_lanes / (device.peak_flops(placed.arithmetic_dtype) / device.teu_count),
        device.clocks.boost_hz, passes_per_second(device), l2.bandwidth_bytes_per_second / device.unit_count,
        output.element_count, dram.bandwidth_bytes_per_second,
        sum([read_bytes(form.expr, form.expr.tensor_by_name[tensor]) for tensor in others]), latency_seconds(device),
        opened_pages_factor(device), limit or 0.0, max(1.0, issue_operations(form)), device.block_launch_seconds,
        final_seconds(placed), *[layer / latency_seconds(device) for layer in cache_latencies(device)], l2_room(device),
        shared.capacity_bytes,
    ]  # fmt: skip
    return ints, doubles


def _load(placed: PlacedForm, load: Load, place: Mapping[str, int], tensor: int) -> tuple[list[int], list[float]]:
    """The numbers of a load: ``place`` numbers the axes, ``tensor`` is the number of its tensor."""
    form, device = placed.form, placed.device
    read = form.expr.tensor_by_name[load.tensor]
    dimensions = [data_dimension(index) for index in load.indices]
    inner = dimensions[-1] if dimensions else None
    vectorises = inner is not None and inner.stride == 1 and all([c >= 0 for _, c in inner.terms])
    order = storage_order(load, form.walked, form.batch_axes)
    along_outputs, along_reduction = walks_innermost(form, load)
    ints = [
        tensor, read.element_bytes, load.pad is not None, vectorises,
        order[-1] if order else -1, keeps_in_l2(form, load, device), is_read_again(form, load), along_outputs,
        along_reduction, len(dimensions),
    ]  # fmt: skip
    for dimension, size in zip(dimensions, read.shape, strict=True):
        ints += [size, abs(dimension.stride), dimension.offset, len(dimension.terms)]
        for axis, coefficient in dimension.terms:
            ints += [place[axis], coefficient]
    touched, compulsory = touched_parts(form, load, device.dram.transaction_bytes)
    return ints, [compulsory, float(touched)]
