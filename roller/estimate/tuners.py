"""Configurations of other tuners as schedules: CLBlast's, Triton's and CUTLASS's products, caches of Kernel Tuner.

A tuner says in words of its own what a block computes, by which threads and in which steps; here stands what each word
means. What a schedule cannot say (Triton's order of blocks along the other axis) is left out, and what would change the
result of a prediction altogether (split-K, two kinds of kernels) is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import msgspec
import numpy as np

from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.matrix import MATRIX_TYPES
from sokoban.kernel.regions import data_dimension
from sokoban.language.expression import TensorExpr
from sokoban.model.gpu.fetch import ROLLED_LOADS
from sokoban.schedule.accesses import VECTOR_BYTES
from sokoban.schedule.columns import MAX_COUNT
from sokoban.schedule.table import Floats
from sokoban.schedule.texts import ScheduleTexts

#: Integer instructions that check a read in place, and those of its address where an intrinsic reads (``__ldg``) in
#: place of a plain load, whose address has room for a constant: 1.2 and 2.1 in ten window sums compiled for sm_80.
CHECKED, ADDRESSED = 1, 2

#: Multiply-adds of a body beyond which the device compiler leaves the outer of two loops alone that the text asks it to
#: unroll: 4,725 came out flat, 5,400 did not (window sums compiled for sm_86).
MOST_UNROLLED = 5000

#: Banks that the authors of padded tiles count on.
BANKS = 32

#: What Kernel Tuner's caches and its files of results have in common with no schedule of ours.
_CACHE_KEYS = (b'"tune_params_keys"', b'"configuration"')


@dataclass(frozen=True, eq=False)
class TunerFile:
    """The configurations of a file.

    Attributes:
        tuner: whose words they are in.
        schedules: a JSON text per configuration, as ``roller score`` reads them.
        measured: seconds by configuration, NaN where the file has no time.
    """

    tuner: str
    schedules: Sequence[bytes]
    measured: Floats


def read_tuner_file(text: bytes, expr: TensorExpr, source: str) -> TunerFile | None:
    """The configurations of a file for one operator; None where it has schedules of ours.

    Raises:
        InputError: no word of a configuration says what a block is, or a number is none; ``field`` has the place.
    """
    if any(key in text for key in _CACHE_KEYS):
        configurations, measured = _cache(text, source)
        place: Callable[[int], str] = partial(_position, source)
    else:
        texts = ScheduleTexts.of(text, source)
        if _tuner(_object(texts.items[0])) is None:
            return None
        configurations, place = [_object(item) for item in texts.items], texts.place
        measured = np.full(len(configurations), np.nan)
    tuner = _tuner(configurations[0]) if configurations else None
    if tuner is None:
        raise InputError(source, "says of no block what it computes", f"give one of {', '.join(_WORDS)}")
    form = kernel_form(expr, fuse=False)
    schedules = []
    for position, configuration in enumerate(configurations):
        try:
            schedules.append(msgspec.json.encode(_TUNERS[tuner](_Words(configuration), form)))
        except InputError as error:
            raise error.within(place(position)) from None
    return TunerFile(tuner, schedules, measured)


# Files


def _object(text: bytes) -> Mapping[str, Any]:
    """A JSON object; nothing where the text is none, which the reader of schedules then says."""
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}
    if not isinstance(decoded, dict):
        return {}
    # A configuration of Triton may keep its own words apart from those of every kernel.
    inner = decoded.get("kwargs")
    return {**inner, **decoded} if isinstance(inner, dict) else decoded


def _cache(text: bytes, source: str) -> tuple[list[Mapping[str, Any]], Floats]:
    """Configurations and seconds of a cache of Kernel Tuner, also of one that is being written, or of its results."""
    for ending in (b"", b"}}"):
        try:
            decoded = msgspec.json.decode(text.rstrip().removesuffix(b",") + ending if ending else text)
            break
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            continue
    else:
        raise InputError(source, "is no JSON of Kernel Tuner", "give the cache file as the tuner wrote it")
    decoded = decoded if isinstance(decoded, dict) else {}
    entries = decoded.get("cache")
    rows = list(entries.values()) if isinstance(entries, dict) else decoded.get("results")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(source, "has neither a cache nor results", "give the cache file as the tuner wrote it")
    configurations = [row["configuration"] if isinstance(row.get("configuration"), dict) else row for row in rows]
    return configurations, np.array([_milliseconds(row) for row in rows], dtype=np.float64) * 1e-3


def _milliseconds(row: Mapping[str, Any]) -> float:
    time = row.get("time")
    for measurement in row.get("measurements") or ():
        if isinstance(measurement, dict) and measurement.get("name") == "time":
            time = measurement.get("value")
    return float(time) if isinstance(time, int | float) and 0 < time < 1e9 else float("nan")


def _position(source: str, position: int) -> str:
    return f"{source}[{position}]"


# Words


class _Words:
    """The numbers of a configuration by their names."""

    def __init__(self, configuration: Mapping[str, Any]) -> None:
        self.configuration = configuration

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The number under the first of ``names`` that is there."""
        for name in names:
            value = self.configuration.get(name)
            if value is None:
                continue
            whole = int(value) if isinstance(value, int | float) and value == value // 1 else None
            if whole is None or not least <= whole <= MAX_COUNT:
                raise InputError(name, f"{value!r} is no count", f"write a number from {least} to {MAX_COUNT}")
            return whole
        if default is None:
            raise InputError(names[0], "is missing", "every configuration needs it")
        return default

    def refuse(self, name: str, remedy: str) -> None:
        """Refuse a configuration whose ``name`` is more than one."""
        if self.count(name, default=1) > 1:
            raise InputError(name, f"{self.configuration[name]} is more than a schedule says", remedy)


@dataclass(frozen=True)
class _Product:
    """Axes and operands of a product: ``rows`` and ``columns`` of the output, the last one fastest in memory.

    Attributes:
        first, second: operands that the rows and the columns index.
    """

    rows: str
    columns: str
    depth: str
    first: str
    second: str

    @staticmethod
    def of(form: KernelForm) -> _Product:
        """Those of an operator.

        Raises:
            InputError: it is no product.
        """
        axes = [axis for axis in form.spatial if form.sizes[axis] > 1][-2:]
        by_axis = [
            {load.tensor for load in form.body_loads if any(index.coefficient(axis) for index in load.indices)}
            for axis in axes
        ]
        apart = [names - other for names, other in zip(by_axis, reversed(by_axis), strict=True)]
        if len(axes) < 2 or not form.reduced or not all(len(names) == 1 for names in apart):
            problem = "is no product, which the configurations are of"
            raise InputError(form.expr.name, problem, "give a matmul, or a sum of products over one axis")
        depth = max(form.reduced, key=lambda axis: form.sizes[axis])
        return _Product(axes[0], axes[1], depth, *(min(names) for names in apart))


def _clblast(words: _Words, form: KernelForm) -> dict[str, Any]:
    """CLBlast's ``Xgemm`` (kernel 0): M runs along the adjacent elements of the output, A is the operand with it.

    Its vectors are types of the language: reads of shared memory are as wide as they say. The compiler lays out B's
    tile behind A's, whose alignment B's reads have with it.
    """
    product = _Product.of(form)
    if words.count("GEMMK", default=0, least=0):
        raise InputError("GEMMK", "the kernel with two-dimensional registers", "give configurations of kernel 0")
    widest = max(1, VECTOR_BYTES // form.expr.tensor_by_name[product.first].element_bytes)
    sides = (("M", "A", product.columns, product.second), ("N", "B", product.rows, product.first))
    schedule: dict[str, Any] = {
        key: {} for key in ("block", "threads", "thread", "vthreads", "vector", "reads", "pieces")
    }
    schedule |= {"step": {product.depth: words.count("KWG")}, "cached": []}
    elements, widths = 1, []
    for letter, operand, axis, tensor in sides:
        block, threads = words.count(f"{letter}WG"), words.count(f"{letter}DIMC")
        width = words.count(f"VW{letter}", default=1)
        strided = words.count(f"STR{letter}", default=0, least=0)
        thread = width if strided else block // threads
        schedule["block"][axis], schedule["threads"][axis], schedule["thread"][axis] = block, threads, max(1, thread)
        elements *= max(1, block // threads)
        widths.append(min(width, widest))
        schedule["vector"][tensor] = schedule["reads"][tensor] = widths[-1]
        if words.count(f"S{operand}", default=0, least=0):
            schedule["cached"].append(tensor)
            along = words.count(f"{letter}DIM{operand}", default=threads)
            schedule["pieces"][tensor] = width if strided else max(1, block // along)
    if product.second in schedule["cached"]:
        schedule["reads"][product.first] = max(widths)
    schedule["vector"][form.expr.output.name] = widths[0]
    unrolled = words.count("KWI", default=1)
    return schedule | {"inner_step": {product.depth: unrolled}, "unroll": elements * unrolled}


def _triton(words: _Words, form: KernelForm) -> dict[str, Any]:
    """A product of Triton: its warps and registers laid out as its compiler does, bands of ``GROUP_M`` tiles.

    Triton's bands go along the columns, those of schedules down the rows: blocks that run at once cover as much.
    """
    words.refuse("SPLIT_K", "give configurations with SPLIT_K 1")
    words.refuse("num_ctas", "give configurations with num_ctas 1")
    product = _Product.of(form)
    rows, columns = (words.count(f"BLOCK_{side}", f"BLOCK_SIZE_{side}") for side in "MN")
    warps = words.count("num_warps", default=4)
    schedule = _staged(product, rows, columns, words.count("BLOCK_K", "BLOCK_SIZE_K"))
    group = words.count("GROUP_M", "GROUP_SIZE_M", default=1)
    stages = words.count("num_stages", default=3)
    schedule |= {"stages": stages, "raster": group if group > 1 else 0}
    if (instruction := _instruction(form)) is not None:
        down, across = _warps_of_matrix(rows, columns, warps)
        return schedule | _warp_tiles(product, (rows // down, columns // across), instruction)
    # The layout of multiply-adds: a square of registers, lanes and then warps along the columns first.
    each = 32 * warps
    side = 4 if rows * columns >= 16 * each else 2 if rows * columns >= 4 * each else 1
    along = min(each, max(1, columns // side))
    down = min(max(1, each // along), max(1, rows // side))
    schedule["thread"] = {product.rows: side, product.columns: side}
    schedule["threads"] = {product.rows: down, product.columns: along}
    return schedule | ({"asynchronous": True} if stages > 1 else {})


def _warps_of_matrix(rows: int, columns: int, warps: int) -> tuple[int, int]:
    """Warps down and across a block, which Triton doubles along the side that has more fragments left; those without a
    fragment of 16x16 repeat what others do."""
    down = across = 1
    while down * across < warps:
        if rows // 16 // down >= columns // 16 // across and down < rows // 16:
            down *= 2
        elif across < columns // 16:
            across *= 2
        else:
            break
    return down, across


def _cutlass(words: _Words, form: KernelForm) -> dict[str, Any]:
    """A kernel by the columns of CUTLASS's profiler: ``cta_m``, ``warps_m``, ``inst_m``, ``stages``."""
    product = _Product.of(form)
    words.refuse("warps_k", "give kernels whose warps do not share a depth")
    words.refuse("split_k_slices", "give kernels without split-K")
    rows, columns = words.count("cta_m"), words.count("cta_n")
    down, across = words.count("warps_m"), words.count("warps_n")
    schedule = _staged(product, rows, columns, words.count("cta_k")) | {"stages": words.count("stages", default=2)}
    instruction = _instruction(form)
    if words.count("inst_m", default=1) > 1 and instruction is not None:
        return schedule | _warp_tiles(product, (rows // down, columns // across), instruction)
    # Lanes of a warp are 8 by 4 or 4 by 8, each with pieces of 16 bytes.
    lanes = (8, 4) if rows // down > columns // across else (4, 8)
    schedule["threads"] = {product.rows: lanes[0] * down, product.columns: lanes[1] * across}
    widest = max(1, VECTOR_BYTES // form.expr.tensor_by_name[product.first].element_bytes)
    for axis, block in ((product.rows, rows), (product.columns, columns)):
        schedule["thread"][axis] = max(1, min(widest, block // schedule["threads"][axis]))
    return schedule


def _kernel_tuner(words: _Words, form: KernelForm) -> dict[str, Any]:
    """Blocks by Kernel Tuner's own names, x along the last axis; ``tile_size`` counts elements of a thread that lie a
    block's threads apart, ``use_shmem`` says whether inputs are staged.

    Sums are unrolled as the text of its filter asks. ``use_padding`` lengthens the rows of a tile until the ends of
    warps that go around a row meet in no bank. ``read_only`` stands for reads by the intrinsic ``__ldg``, none of which
    has a constant in its address.
    """
    schedule: dict[str, Any] = {"threads": {}, "vthreads": {}, "thread": {}}
    axes = [axis for axis in form.spatial if form.sizes[axis] > 1]
    for letter, axis in zip("xyz", reversed(axes), strict=False):
        schedule["threads"][axis] = words.count(f"block_size_{letter}", default=1)
        schedule["vthreads"][axis] = words.count(f"tile_size_{letter}", default=1)
        schedule["thread"][axis] = 1
    inputs = sorted({load.tensor for load in form.body_loads if load.indices})
    staged = bool(words.count("use_shmem", default=1, least=0))
    schedule["cached"] = inputs if staged else []
    if not form.reduced:
        return schedule
    block = {axis: schedule["threads"][axis] * schedule["vthreads"][axis] for axis in schedule["threads"]}
    if not staged:
        overhangs = any(form.sizes[axis] % size for axis, size in block.items())
        if overhangs:
            # Every element checks its own reads, which have no other in common then: as threads of their own.
            schedule["vthreads"] = dict.fromkeys(schedule["vthreads"], 1)
        by_intrinsic = bool(words.count("read_only", default=0, least=0))
        if instructions := CHECKED * overhangs + ADDRESSED * by_intrinsic:
            schedule["address"] = dict.fromkeys(inputs, instructions)
    else:
        schedule["waits"] = _row_waits(form, block, schedule["threads"])
    if staged and words.count("use_padding", default=0, least=0):
        schedule["padding"] = _row_padding(form, block, schedule["threads"][axes[-1]])
    elements = prod(schedule["vthreads"].values())
    taps = [form.sizes[axis] for axis in form.reduced]
    unrolled = elements * prod(taps)
    return schedule | {"unroll": unrolled if unrolled <= MOST_UNROLLED else elements * taps[-1]}


def _row_waits(form: KernelForm, block: Mapping[str, int], threads: Mapping[str, int]) -> dict[str, int]:
    """Waits by staged tensor where a loop over rows holds one over columns, both from a thread's own place on: the
    device compiler unrolls the inner one by :data:`ROLLED_LOADS`, and what is left of a row is loaded one by one."""
    sizes, batch = {**form.sizes, **block}, int(ROLLED_LOADS)
    waits = {}
    for load in form.body_loads:
        if not load.indices:
            continue
        *rows, columns = [
            -(-data_dimension(index).extent(sizes) // max([threads.get(axis, 1) for axis, _ in index.terms], default=1))
            for index in load.indices
        ]
        waits[load.tensor] = prod(rows) * (columns // batch + columns % batch)
    return waits


def _row_padding(form: KernelForm, block: Mapping[str, int], threads: int) -> dict[str, int]:
    """Padding by staged tensor where ``threads`` along the last axis are no whole warps: rows so long that those of a
    warp which have gone around one find other banks than those that have not."""
    if threads % BANKS == 0:
        return {}
    sizes = {**form.sizes, **block}
    rows = {load.tensor: data_dimension(load.indices[-1]).extent(sizes) for load in form.body_loads if load.indices}
    return {tensor: (threads - int(row)) % BANKS for tensor, row in rows.items()}


def _staged(product: _Product, rows: int, columns: int, depth: int) -> dict[str, Any]:
    return {
        "block": {product.rows: rows, product.columns: columns},
        "thread": {},
        "step": {product.depth: depth},
        "cached": [product.first, product.second],
    }


def _instruction(form: KernelForm) -> str | None:
    """The matrix instruction of a product's type; None where multiply-adds compute it."""
    roles = form.roles
    return None if roles is None else str(MATRIX_TYPES[roles.dtype].mma)


def _warp_tiles(product: _Product, tile: tuple[int, int], instruction: str) -> dict[str, Any]:
    return {"thread": dict(zip((product.rows, product.columns), tile, strict=True)), "instruction": instruction}


#: The words by which a tuner's configurations are known.
_WORDS: Mapping[str, str] = {
    "MWG": "CLBlast", "BLOCK_M": "Triton", "BLOCK_SIZE_M": "Triton", "cta_m": "CUTLASS", "block_size_x": "Kernel Tuner",
}  # fmt: skip

_TUNERS: Mapping[str, Callable[[_Words, KernelForm], dict[str, Any]]] = {
    "CLBlast": _clblast, "Triton": _triton, "CUTLASS": _cutlass, "Kernel Tuner": _kernel_tuner,
}  # fmt: skip


def _tuner(configuration: Mapping[str, Any]) -> str | None:
    """Whose words a configuration is in; None where it is a schedule of ours."""
    return next((tuner for word, tuner in _WORDS.items() if word in configuration), None)
