"""JSON texts of schedules -> the columns of a :class:`ScheduleTable`: checked, and what was left out inferred."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import numpy as np

from hal.support.errors import InputError, listed
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.bulk_copies import CLUSTERS
from sokoban.schedule.pipelines import asynchronous_problem
from sokoban.schedule.table import INSTRUCTION_NUMBER, Bools, Ints, ScheduleTable, instruction_numbers, product
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import WARP_ROWS

#: Elements of one block or one step, all axes together. More fits no memory, and products of them no int64.
MAX_TILE_ELEMENTS = 2**28

#: Threads and elements per thread along one axis; three of them multiply to a block.
MAX_COUNT = 2**20

#: Most buffers of a staged tile: deeper pipelines hide nothing more.
MAX_STAGES = 8

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
Elements = Annotated[int, msgspec.Meta(ge=1, le=MAX_TILE_ELEMENTS)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0, le=MAX_TILE_ELEMENTS)]
Band = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Cluster = Annotated[int, msgspec.Meta(ge=0, le=max(CLUSTERS))]
Stages = Annotated[int, msgspec.Meta(ge=1, le=MAX_STAGES)]

#: The keys of a schedule by what their names stand for.
CUTS = ("block", "thread", "threads", "vthreads")
SPATIAL, REDUCED = (*CUTS, "inner_thread"), ("step", "reduce_threads", "inner_step")
KEYS = (
    *SPATIAL, *REDUCED, "cached", "vector", "padding", "unroll", "instruction", "stages", "turned", "asynchronous",
    "raster", "cluster", "launched", "kept_columns", "reads", "pieces", "waits", "address",
)  # fmt: skip


@lru_cache(maxsize=64)
def _candidate_type(spatial: tuple[str, ...], reduced: tuple[str, ...], tensors: tuple[str, ...]) -> type[Any]:
    """The type of one schedule over some axes and tensors; 0 stands for a size that was not given."""

    def sizes_type(name: str, keys: Sequence[str], value: Any) -> type[Any]:
        # Fused axes and their dots are no identifiers.
        fields = [(f"f{i}", value, 0) for i in range(len(keys))]
        names = {f"f{i}": key for i, key in enumerate(keys)}
        return msgspec.defstruct(name, fields, rename=names, frozen=True, gc=False, forbid_unknown_fields=True)

    kinds = {
        "block": sizes_type("Block", spatial, Elements),
        **dict.fromkeys((*CUTS[1:], "inner_thread"), sizes_type("Spatial", spatial, Count)),
        "step": sizes_type("Step", reduced, Elements),
        **dict.fromkeys(("reduce_threads", "inner_step"), sizes_type("Reduced", reduced, Count)),
    }
    by_tensor, padding = sizes_type("Vector", tensors, Count), sizes_type("Padding", tensors, CountOrZero)
    fields: list[Any] = [(key, kind, kind()) for key, kind in kinds.items()]
    fields += [
        ("cached", tuple[str, ...] | None, None),
        ("vector", by_tensor | None, None),
        ("padding", padding, padding()),
        ("unroll", CountOrZero, TileSchedule.unroll),
        ("instruction", Instruction, TileSchedule.instruction),
        ("stages", Stages, TileSchedule.stages),
        ("turned", tuple[str, ...], ()),
        ("asynchronous", bool, TileSchedule.asynchronous),
        ("raster", Band, TileSchedule.raster),
        ("cluster", Cluster, TileSchedule.cluster),
        ("launched", Band, TileSchedule.launched),
        ("kept_columns", Band, TileSchedule.kept_columns),
        ("reads", by_tensor | None, None),
        ("pieces", by_tensor | None, None),
        ("waits", by_tensor | None, None),
        ("address", by_tensor | None, None),
    ]
    return msgspec.defstruct("Schedule", fields, frozen=True, gc=False, forbid_unknown_fields=True, kw_only=True)


class ScheduleReader:
    """JSON texts of schedules as the columns of a table, with what was left out inferred.

    * ``block`` is ``threads * vthreads * thread``; ``threads`` is what is left of the block; ``thread`` and
      ``vthreads`` are 1 unless block and threads leave more; an axis without any of the four has one element per block.
    * An axis without a ``step`` is walked at once.
    * ``inner_thread`` and ``inner_step``, the parts of ``thread`` and ``step`` in the innermost loops, are all of them.
    * ``cached``: all inputs where a step is given and neighbouring outputs read the same elements, otherwise none.
    * ``vector``: left to the code generator, tensor by tensor: it takes the widest legal access.
    """

    def __init__(self, form: KernelForm, items: Sequence[bytes], place: Callable[[int], str]) -> None:
        """Decode the texts ``items``; ``place`` tells where in the file each is, for errors.

        Raises:
            InputError: one of them is no JSON, or has unknown keys, axes or tensors, or values of a wrong type.
        """
        self.form, self.place = form, place
        self.tensors = tuple(tensor.name for tensor in form.expr.tensors)
        self.candidates: list[Any] = []
        decode = msgspec.json.Decoder(_candidate_type(form.spatial, form.reduced, self.tensors)).decode
        try:
            self.candidates.extend(map(decode, items))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            failure = self._failure(error)
        else:
            self.count = len(self.candidates)
            #: First offending schedule of every kind of contradiction, and what to say of it.
            self.complaints: list[tuple[int, InputError]] = []
            return
        # What the schedules before it contradict comes first in the file.
        if self.candidates:
            ScheduleReader(form, items[: len(self.candidates)], place).table()
        raise failure

    def table(self) -> ScheduleTable:
        """The schedules as a table.

        Raises:
            InputError: numbers contradict each other; the first of the file that do.
        """
        form = self.form
        block, thread, vthreads = self._cuts()
        given_step, reducers = self._sizes("step", form.reduced), self._sizes("reduce_threads", form.reduced)
        step = {axis: np.where(sizes > 0, sizes, form.sizes[axis]) for axis, sizes in given_step.items()}
        for key, columns in (("block", block), ("step", given_step), ("reduce_threads", reducers)):
            self._refuse_large(key, columns)
        instruction = instruction_numbers(map(attrgetter("instruction"), self.candidates))
        self._check_fragments(instruction, thread, step)
        inner_thread = self._inner("inner_thread", "thread", thread)
        inner_step = self._inner("inner_step", "step", step)
        cached = self._cached(given_step)
        turned = self._turned(tuple(cached))
        stages, raster = self._numbers("stages"), self._numbers("raster")
        in_place = ~np.logical_and.reduce([np.ones(self.count, dtype=np.bool_), *cached.values()])
        self._check_stages(stages, in_place)
        asynchronous = self._asynchronous(stages, instruction)
        self._check_raster(raster, in_place)
        cluster, launched = self._numbers("cluster"), self._numbers("launched")
        self._check_bulk_copies(cluster, launched, instruction)
        kept_columns = self._numbers("kept_columns")
        self._check_row_columns(kept_columns)
        padding = self._sizes("padding", self.tensors)
        if self.complaints:
            raise min(self.complaints, key=lambda complaint: complaint[0])[1]
        return ScheduleTable(
            form=form,
            block=block,
            thread=thread,
            vthreads=vthreads,
            step=step,
            reduce_threads=product([np.maximum(threads, 1) for threads in reducers.values()], self.count),
            cached=cached,
            padding={tensor: padding[tensor] for tensor in cached},
            vector=self._by_tensor("vector", (*cached, form.expr.output.name)),
            unroll=self._numbers("unroll"),
            inner_thread=inner_thread,
            inner_step=inner_step,
            stages=stages,
            turned=turned,
            instruction=instruction,
            asynchronous=asynchronous,
            raster=raster,
            cluster=cluster,
            launched=launched,
            kept_columns=kept_columns,
            reads=self._by_tensor("reads", tuple(cached), optional=True),
            pieces=self._by_tensor("pieces", tuple(cached), optional=True),
            waits=self._by_tensor("waits", tuple(cached), optional=True),
            address=self._by_tensor("address", tuple(cached), optional=True),
        )

    # Columns as they are given

    def _numbers(self, key: str) -> Ints:
        """The number under ``key`` of every schedule."""
        return np.fromiter(map(attrgetter(key), self.candidates), np.int64, self.count)

    def _sizes(self, key: str, names: Sequence[str]) -> dict[str, Ints]:
        """The sizes under ``key`` by axis or tensor, 0 where not given."""
        parts = list(map(attrgetter(key), self.candidates))
        return {
            name: np.fromiter(map(attrgetter(f"f{i}"), parts), np.int64, self.count) for i, name in enumerate(names)
        }

    def _by_tensor(self, key: str, tensors: Sequence[str], *, optional: bool = False) -> dict[str, Ints]:
        """Elements under ``key``, by tensor; 0 where not given, and nothing at all where no schedule gives any and they
        are ``optional``."""
        parts = list(map(attrgetter(key), self.candidates))
        if optional and not any(part is not None for part in parts):
            return {}
        columns: dict[str, Ints] = {}
        for tensor in tensors:
            field = f"f{self.tensors.index(tensor)}" if tensor in self.tensors else ""
            given = [0 if part is None else getattr(part, field, 0) for part in parts]
            columns[tensor] = np.array(given, dtype=np.int64)
        return columns

    # Columns inferred

    def _cuts(self) -> tuple[dict[str, Ints], dict[str, Ints], dict[str, Ints]]:
        """Block, thread and vthreads, by spatial axis."""
        given = {key: self._sizes(key, self.form.spatial) for key in CUTS}
        block: dict[str, Ints] = {}
        thread: dict[str, Ints] = {}
        vthreads: dict[str, Ints] = {}
        for axis in self.form.spatial:
            block[axis], thread[axis], vthreads[axis] = self._cut(axis, *(given[key][axis] for key in CUTS))
        return block, thread, vthreads

    def _cut(self, axis: str, block: Ints, thread: Ints, threads: Ints, vthreads: Ints) -> tuple[Ints, Ints, Ints]:
        """Block, thread and vthreads of one axis: what is not given (0) follows from what is."""
        given = [np.maximum(column, 1) for column in (thread, threads, vthreads)]
        remainder = np.maximum(block // (given[0] * given[1] * given[2]), 1)
        # What a block and its threads leave is adjacent, or strided where the adjacent part is given.
        adjacent = np.where((thread == 0) & (threads > 0), remainder, given[0])
        copies = np.where((vthreads == 0) & (threads > 0) & (thread > 0), remainder, given[2])
        along = np.where(threads > 0, threads, remainder)
        size = np.where(block > 0, block, adjacent * along * copies)
        self._complain(
            size != adjacent * along * copies,
            lambda i: _uneven(axis, block[i], {"vthreads": vthreads[i], "threads": threads[i], "thread": thread[i]}),
        )
        return size, adjacent, copies

    def _inner(self, key: str, outer: str, full_sizes: Mapping[str, Ints]) -> dict[str, Ints]:
        """The innermost part of a thread's elements or of a step, by axis; all of it where not given."""
        parts = {}
        for axis, sizes in self._sizes(key, tuple(full_sizes)).items():
            part, size = np.where(sizes > 0, sizes, full_sizes[axis]), full_sizes[axis]
            parts[axis] = part
            self._complain(size % part != 0, _uneven_inner(f"{key}.{axis}", outer, size, part))
        return parts

    def _cached(self, given_step: Mapping[str, Ints]) -> dict[str, Bools]:
        """Truth of a tensor being staged, by tensor of the body."""
        inputs = {tensor.name for tensor in self.form.expr.inputs}
        listings = list(map(attrgetter("cached"), self.candidates))
        scattered = _scattered_tensors(self.form)
        usable = tuple(dict.fromkeys(load.tensor for load in self.form.body_loads if load.tensor in inputs - scattered))
        for names in set(listings) - {None}:
            self._check_inputs("cached", names, usable, listings.index(names))
        with_step = sum(given_step.values(), np.zeros(self.count, dtype=np.int64)) > 0
        is_absent = np.fromiter((names is None for names in listings), np.bool_, self.count)
        by_default = with_step & is_absent & _reuses_data(self.form)
        cached = {}
        for load in self.form.body_loads:
            column = _named(load.tensor, listings)
            is_staged = load.indices and load.tensor in inputs - scattered
            cached[load.tensor] = column | by_default if is_staged else column
        return cached

    def _turned(self, tensors: Sequence[str]) -> dict[str, Bools]:
        """Truth of a staged tile being stored turned, by tensor of the body."""
        listings = list(map(attrgetter("turned"), self.candidates))
        for names in set(listings):
            self._check_inputs("turned", names, tensors, listings.index(names))
        return {tensor: _named(tensor, listings) for tensor in tensors}

    def _asynchronous(self, stages: Ints, instruction: Ints) -> Bools:
        """Which pipelines of multiply-adds copy past the registers."""
        given = np.fromiter(map(attrgetter("asynchronous"), self.candidates), np.bool_, self.count)
        remedy = "leave it out, or give 2 stages or more of multiply-adds"
        self._complain(
            given & ((stages < 2) | (instruction != INSTRUCTION_NUMBER[Instruction.FMA])),
            lambda i: InputError("asynchronous", "copies run ahead in a pipeline of multiply-adds alone", remedy),
        )
        problem = asynchronous_problem(self.form)
        self._complain(given & (problem is not None), lambda i: InputError("asynchronous", problem or "", remedy))
        return given

    # Contradictions

    def _refuse_large(self, key: str, columns: Mapping[str, Ints]) -> None:
        total = np.ones(self.count)
        for sizes in columns.values():
            total = total * np.maximum(sizes, 1)
        self._complain(
            total > MAX_TILE_ELEMENTS,
            lambda i: InputError(key, f"{total[i]:.3g} elements", f"no {key} has more than {MAX_TILE_ELEMENTS}"),
        )

    def _check_fragments(self, instruction: Ints, thread: Mapping[str, Ints], step: Mapping[str, Ints]) -> None:
        """Matrix instructions take a product of matrices, in whole fragments."""
        by_matrix: Bools = instruction != INSTRUCTION_NUMBER[Instruction.FMA]
        if not by_matrix.any():
            return
        roles = self.form.roles
        if roles is None:
            problem = f"{self.form.expr.name} is no product of matrices that an instruction multiplies"
            self._complain(by_matrix, lambda i: InputError("instruction", problem, 'write "fma"'))
            return
        tiles = (
            ("thread", roles.m, thread[roles.m]),
            ("thread", roles.n, thread[roles.n]),
            ("step", roles.k, step[roles.k]),
        )
        for key, axis, sizes in tiles:
            fragment = roles.fragment(axis)
            self._complain(by_matrix & (sizes % fragment != 0), _no_fragments(key, axis, sizes, fragment))
        by_groups = instruction == INSTRUCTION_NUMBER[Instruction.WGMMA]
        height = thread[roles.m]
        self._complain(by_groups & (height != WARP_ROWS), _no_group_tile(roles.m, height))

    def _check_stages(self, stages: Ints, in_place: Bools) -> None:
        self._complain(
            (stages > 1) & in_place,
            lambda i: InputError(
                "stages", f"{stages[i]} buffers of every tile, but not all is staged", "stage all, or 1"
            ),
        )

    def _check_raster(self, raster: Ints, in_place: Bools) -> None:
        self._complain(
            (raster > 0) & (in_place | (self.form.reduction is None)),
            lambda i: InputError("raster", "bands of blocks need every operand of a reduction staged", "leave it out"),
        )

    def _check_bulk_copies(self, cluster: Ints, launched: Ints, instruction: Ints) -> None:
        """Warp groups alone multiply what is copied in bulk, and only such blocks compute several tiles."""
        by_groups: Bools = instruction == INSTRUCTION_NUMBER[Instruction.WGMMA]
        remedy = f'write "instruction": "{Instruction.WGMMA}", or leave it out'
        self._complain(
            (cluster > 0) & ~by_groups,
            lambda i: InputError("cluster", "warp groups alone multiply tiles that are copied in bulk", remedy),
        )
        self._complain(
            (cluster == 0) & by_groups,
            lambda i: InputError("cluster", "warp groups multiply tiles that are copied in bulk", _CLUSTERS),
        )
        self._complain(
            ~np.isin(cluster, (0, *CLUSTERS)),
            lambda i: InputError("cluster", f"{cluster[i]} blocks", f"{_CLUSTERS} or leave it out"),
        )
        self._complain(
            (launched % np.maximum(1, cluster) != 0) | ((launched > 0) & (cluster == 0)),
            lambda i: InputError("launched", f"{launched[i]} blocks in clusters of {cluster[i]}", "leave it out"),
        )

    def _check_row_columns(self, kept_columns: Ints) -> None:
        """Rows that several statements read have something to keep."""
        self._complain(
            (kept_columns > 0) & (not self.form.is_rows),
            lambda i: InputError("kept_columns", "one statement reads every row, so that none is kept", "leave it out"),
        )

    def _check_inputs(self, key: str, names: Sequence[str], usable: Sequence[str], position: int) -> None:
        """Complain of the first name under ``key`` that is no input of the body, or none that lies in tiles."""
        scattered = _scattered_tensors(self.form)
        inputs = {tensor.name for tensor in self.form.expr.inputs}
        wrong = next((k for k, name in enumerate(names) if name not in inputs - scattered), None)
        if wrong is not None:
            remedy = _close(names[wrong], usable) + f"can be staged: {listed(usable)}"
            problem = f"there is no input {names[wrong]!r}"
            if names[wrong] in inputs:
                is_place = all(not load.places for load in self.form.body_loads if load.tensor == names[wrong])
                role = "says where others are read" if is_place else "is read at places that are read"
                problem = f"{names[wrong]} {role}, and lies in no tile"
            error = InputError(f"{key}[{wrong}]", problem, remedy)
            self.complaints.append((position, _within(error, self.place(position))))

    def _complain(self, wrong: Bools, error: Callable[[int], InputError]) -> None:
        """Remember what ``error`` says of the first schedule that is ``wrong``."""
        if wrong.any():
            position = int(np.argmax(wrong))
            self.complaints.append((position, _within(error(position), self.place(position))))

    def _failure(self, error: Exception) -> InputError:
        """Refusal of the decoder, in our words."""
        where = self.place(len(self.candidates))
        if isinstance(error, UnicodeDecodeError):
            return InputError(where, f"not UTF-8 text: {error.reason}", "save the file as UTF-8")
        if not isinstance(error, msgspec.ValidationError):
            return InputError(
                where, f"broken JSON: {decoder_message(error)}", "write one schedule a line, or a list of them"
            )
        message, _, path = str(error).partition(" - at `$")
        path, message = path.rstrip("`").lstrip("."), _worded(message.replace("`", ""))
        place = _within(InputError(path, ""), where).field if path else where
        unknown = re.fullmatch(r"Object contains unknown field (.*)", message)
        if unknown is None:
            remedy = "" if path else 'a schedule is {"block": {...}, ...}'
            if message.startswith("unknown instruction"):
                remedy = 'use "fma", "wmma_16x16x16" or "mma_16x8x16"'
            return InputError(place, message, remedy)
        name = unknown[1]
        if not path:
            return InputError(where, f"unknown key {name!r}", _close(name, KEYS) + f"known: {', '.join(KEYS)}")
        return self._unknown_name(path, name, place)

    def _unknown_name(self, key: str, name: str, place: str) -> InputError:
        spatial, reduced = self.form.spatial, self.form.reduced
        if key in (*SPATIAL, *REDUCED):
            kind, axes, other = ("spatial", spatial, reduced) if key in SPATIAL else ("reduction", reduced, spatial)
            problem = f"no {kind} axis {name!r}"
            if name in other:
                problem = f"{name!r} is no {kind} axis of {self.form.expr.name}"
            return InputError(f"{place}.{name}", problem, _close(name, axes) + f"{kind} axes: {listed(axes)}")
        remedy = _close(name, self.tensors) + f"tensors: {listed(self.tensors)}"
        return InputError(f"{place}.{name}", f"no tensor {name!r}", remedy)


def _within(error: InputError, place: str) -> InputError:
    return error.within(place) if place else error


def decoder_message(error: BaseException) -> str:
    """Message of a JSON decoder, without its preamble."""
    return "nested too deep" if isinstance(error, RecursionError) else str(error).removeprefix("JSON is malformed: ")


#: What a decoder calls the types of JSON, and what we do.
#: What to do about a number of blocks that share tiles.
_CLUSTERS = f"give {', '.join(map(str, CLUSTERS))}"

_TYPES = {
    "int": "an integer", "float": "a number with a fraction", "str": "a string", "bool": "a boolean", "null": "null",
    "object": "an object", "object | null": "an object", "array": "a list", "array | null": "a list of tensors",
}  # fmt: skip


def _worded(message: str) -> str:
    """``Expected `array | null`, got `str``` -> ``expected a list of tensors, got a string``."""
    parts = re.fullmatch(r"Expected (.*?)( [<>]=? \d+)?(?:, got (.*))?", message)
    if parts is None:
        return message.replace("Invalid enum value", "unknown instruction")
    text = f"expected {_TYPES.get(parts[1], parts[1])}{parts[2] or ''}"
    return text + (f", got {_TYPES.get(parts[3], parts[3])}" if parts[3] else "")


def _close(name: str, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, choices, 1)
    return f"did you mean {close[0]!r}? " if close else ""


def _uneven(axis: str, block: int, parts: Mapping[str, int]) -> InputError:
    """``48 is not vthreads 2 x threads 8 x thread 4``, of what was given."""
    given = " x ".join(f"{key} {size}" for key, size in parts.items() if size)
    relation = "is not" if all(parts.values()) else "is not a multiple of"
    return InputError(f"block.{axis}", f"{block} {relation} {given}", "leave one of them out and it is inferred")


def _uneven_inner(field: str, outer: str, size: Ints, inner: Ints) -> Callable[[int], InputError]:
    remedy = "leave it out and the innermost loop is all of it"
    return lambda i: InputError(field, f"{outer} {size[i]} is not a multiple of {inner[i]}", remedy)


def _named(tensor: str, listings: Sequence[tuple[str, ...] | None]) -> Bools:
    """Truth, by schedule, of ``tensor`` being among the names that it lists."""
    is_named = {names: names is not None and tensor in names for names in set(listings)}
    return np.fromiter(map(is_named.__getitem__, listings), np.bool_, len(listings))


def _no_fragments(key: str, axis: str, values: Ints, fragment: int) -> Callable[[int], InputError]:
    remedy = f"a matrix instruction takes fragments of {fragment}"
    return lambda i: InputError(f"{key}.{axis}", f"{values[i]} is not a multiple of {fragment}", remedy)


def _no_group_tile(axis: str, height: Ints) -> Callable[[int], InputError]:
    remedy = f"a warp of a group has {WARP_ROWS} rows"
    return lambda i: InputError(f"thread.{axis}", f"{height[i]} with {Instruction.WGMMA}", remedy)


def _scattered_tensors(form: KernelForm) -> set[str]:
    """Tensors that lie in no tile; matrix instructions copy rows at places that are read."""
    operands = () if form.roles is None else (form.roles.a, form.roles.b)
    return {load.tensor for load in form.scattered_loads if load not in operands}


def _reuses_data(form: KernelForm) -> bool:
    """True if the threads of a block read the same elements: an operand lacks an axis of the output, or windows of
    neighbouring outputs overlap."""
    spatial = [axis for axis in form.spatial if form.sizes[axis] > 1]
    return form.reduction is not None and any(
        any(not any(index.coefficient(axis) for index in load.indices) for axis in spatial)
        or any(len(index.axes) > 1 for index in load.indices)
        for load in form.body_loads
        if load.indices
    )
