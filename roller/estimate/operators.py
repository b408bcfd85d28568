"""Times of operators: by the best kernel that we know how to build, or by the library's.

``best`` constructs a schedule for every operator (or searches for one) and ranks by RATIONAL; its backward pass is the
sum of the operators of :mod:`roller.estimate.gradients`. ``library`` models what cuBLAS, cuDNN and PyTorch launch.

A file holds one operator a line, a list, or a single one; besides the operator's own keys each may say
``"direction": "backward"``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import msgspec
from rich.table import Table

from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from hal.support.tables import new_table
from roller.algorithms import ALGORITHMS, DIRECT
from roller.construct.program import ProgramPart
from roller.estimate.attention_gradients import Gradient
from roller.estimate.gradients import backward_ways
from roller.library import LibraryEstimate, PricedCall, library_calls, priced
from roller.library.collectives import check_ranks, node_for
from roller.library.named_calls import named_stem
from roller.library.operators import DIRECTIONS
from roller.library.streaming.elementwise import Direction
from roller.programs import Program, find_programs, finder_of, form_on
from roller.text.quantities import count_text, sizes_text, time_text
from roller.text.schedules import packed_text
from sokoban.kernel.instructions import Instruction
from sokoban.language.collectives import collective_from_data, is_collective
from sokoban.language.expression import TensorExpr
from sokoban.language.layers import is_layer, layer_from_data
from sokoban.language.operators import MAX_FILE_BYTES, MAX_NAME_LENGTH, operator_from_data, operators_from_json

Implementation = Literal["best", "library"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("best", "library")


@dataclass(frozen=True)
class Item:
    """One operator of a file.

    Attributes:
        where: its place, for messages: ``ops.jsonl[17]``.
        data: its JSON value without the direction.
        direction: forward or backward.
    """

    where: str
    data: Any
    direction: Direction


class SchedulePart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One kernel of our own.

    Attributes:
        label: what it computes.
        seconds: predicted by RATIONAL, the launch included.
        bound: the stage that sets its pace.
        found_by: ``construction`` or ``search``.
        schedule: tiles, threads and staging, as ``roller score`` reads them.
        algorithm: what it is one of several kernels of, such as ``split-k, 16 slices of k``; ``direct`` where it does
            all alone.
    """

    label: str
    seconds: float
    bound: str
    found_by: str
    schedule: dict[str, Any]
    algorithm: str = DIRECT


class OperatorEstimate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Time of one operator.

    Attributes:
        name: given or derived.
        device: the board.
        direction: ``forward`` or ``backward``.
        implementation: ``best`` or ``library``.
        seconds: device time of all kernels.
        call_seconds: of the framework calls between GPU events on an idle device; library only.
        bound: what limits the longest part.
        kernel: the library kernel or algorithm of the longest part; library only.
        parts: the kernels or library calls one after the other.
    """

    name: str
    device: str
    direction: str
    implementation: str
    seconds: float
    call_seconds: float | None = None
    bound: str
    kernel: str | None = None
    parts: tuple[SchedulePart | PricedCall, ...]


# Files


def load_items(path: str | Path, direction: Direction = "forward") -> list[Item]:
    """The operators of a file; ``direction`` is that of those that name none.

    Raises:
        InputError: the file cannot be read, is not JSON, or a direction is unknown. Operators are not read yet.
    """
    source = str(path)
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise InputError(source, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(text) > MAX_FILE_BYTES:
        raise InputError(source, f"larger than {MAX_FILE_BYTES // 2**20} MiB", "split it into several files")
    return [_item(where, data, direction) for where, data in _values(text, source)]


def _values(text: bytes, source: str) -> Iterator[tuple[str, Any]]:
    """The JSON values of a text with their places: lines count from 1, entries of a list from 0."""
    try:
        document = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        yield from _lines(text, source)
        return
    if not isinstance(document, list):
        yield source, document
        return
    if not document:
        raise InputError(source, "an empty list", "write at least one operator")
    yield from ((f"{source}[{position}]", item) for position, item in enumerate(document))


def _lines(text: bytes, source: str) -> Iterator[tuple[str, Any]]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise InputError(source, "is empty", "write one operator a line, or a JSON list of them")
    for position, (number, line) in enumerate(lines):
        try:
            yield f"{source}[{number}]", msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            if position == 0:
                # Not lines at all, then: the message about the whole text tells line and column.
                operators_from_json(text, source)
            problem = str(error).removeprefix("JSON is malformed: ")
            raise InputError(f"{source}[{number}]", f"broken JSON: {problem}", "write one operator a line") from None


def _item(where: str, data: Any, direction: Direction) -> Item:
    if not isinstance(data, dict):
        return Item(where, data, direction)
    name = data.get("name")
    if name is not None and not isinstance(name, str):
        shown = msgspec.json.encode(name).decode()
        raise InputError(f"{where}.name", f"expected a string, got {shown}", "name the operator in quotes")
    if "direction" not in data:
        return Item(where, data, direction)
    given = data["direction"]
    if given not in DIRECTIONS:
        shown = repr(given) if isinstance(given, str) else msgspec.json.encode(given).decode()
        raise InputError(f"{where}.direction", f"unknown direction {shown}", f"use one of {', '.join(DIRECTIONS)}")
    return Item(where, {key: value for key, value in data.items() if key != "direction"}, cast(Direction, given))


# Estimates


def estimate_items(
    items: Sequence[Item],
    device: DeviceSpec,
    implementation: Implementation = "best",
    method: str = "roller",
    algorithms: Collection[str] = ALGORITHMS,
    node: str | None = None,
) -> list[OperatorEstimate]:
    """Time of every operator.

    Args:
        items: operators, as :func:`load_items` gives them.
        device: the board.
        implementation: our own kernels or the library's.
        method: who finds our kernels, one of :data:`roller.programs.METHODS`.
        algorithms: which kinds of our programs compete, some of :data:`roller.algorithms.ALGORITHMS`.
        node: name or file of the node for collectives that name none; None takes the board's usual one.

    Raises:
        InputError: an operator cannot be read, or is none that the implementation has; or the board runs no library.
    """
    if node is not None:
        node_for(device, node)
        items = [
            replace(item, data={"node": node, **item.data}) if is_collective(item.data) else item for item in items
        ]
    return _library(items, device) if implementation == "library" else _best(items, device, method, algorithms)


def _library(items: Sequence[Item], device: DeviceSpec) -> list[OperatorEstimate]:
    called, names = [], []
    for item in items:
        try:
            called.append(library_calls(item.data, item.direction))
            if is_collective(item.data):
                check_ranks(item.data.get("ranks", 2), node_for(device, item.data.get("node")))
            names.append(_name(item.data))
        except InputError as error:
            raise error.within(item.where) from error.__cause__
    return [
        _of_library(item, name, device, result)
        for item, name, result in zip(items, names, priced(called, device), strict=True)
    ]


def _of_library(item: Item, name: str, device: DeviceSpec, estimate: LibraryEstimate) -> OperatorEstimate:
    return OperatorEstimate(
        name=name,
        device=device.name,
        direction=item.direction,
        implementation="library",
        seconds=estimate.seconds,
        call_seconds=estimate.call_seconds,
        bound=estimate.bound,
        kernel=estimate.kernel,
        parts=estimate.parts,
    )


def _name(data: Mapping[str, Any]) -> str:
    """The operator's name, derived without writing its expression where that is possible."""
    if data.get("name") is not None:
        return str(data["name"])
    if is_collective(data):
        return collective_from_data(data).stem
    if is_layer(data):
        return layer_from_data(data).stem
    stem = named_stem(data)
    return operator_from_data(data).name if stem is None or len(stem) > MAX_NAME_LENGTH - 4 else stem


def _best(
    items: Sequence[Item], device: DeviceSpec, method: str, algorithms: Collection[str]
) -> list[OperatorEstimate]:
    parts_by_key: dict[bytes, tuple[str, tuple[SchedulePart, ...]]] = {}
    estimates = []
    for item in items:
        try:
            # Equal operators are found once, whatever they are called.
            unnamed = {**item.data, "name": None} if isinstance(item.data, dict) else item.data
            key = msgspec.json.encode((unnamed, item.direction))
            if key not in parts_by_key:
                parts_by_key[key] = _best_parts(unnamed, item.direction, device, method, algorithms)
            derived, parts = parts_by_key[key]
        except InputError as error:
            raise error.within(item.where) from error.__cause__
        estimates.append(
            OperatorEstimate(
                name=item.data.get("name") or derived,
                device=device.name,
                direction=item.direction,
                implementation="best",
                seconds=sum(part.seconds for part in parts),
                bound=max(parts, key=lambda part: part.seconds).bound if parts else "none",
                parts=parts,
            )
        )
    return estimates


def _best_parts(
    data: Any, direction: Direction, device: DeviceSpec, method: str, algorithms: Collection[str]
) -> tuple[str, tuple[SchedulePart, ...]]:
    """The derived name of an operator, and its kernels."""
    expr = operator_from_data(data)
    ways = [[Gradient(expr.name, expr)]] if direction == "forward" else backward_ways(expr)
    found: dict[TensorExpr, Program] = {}

    def parts_of(kernel: Gradient) -> list[SchedulePart]:
        if kernel.expr not in found:
            programs = find_programs(form_on(kernel.expr, device), device, 1, method, algorithms)
            found[kernel.expr] = programs.ranked(1, algorithms)[0]
        program = found[kernel.expr]
        return [_part(kernel.label, part, program.composition) for part in program.parts]

    parts = [[part for kernel in kernels for part in parts_of(kernel)] for kernels in ways]
    return expr.name, tuple(min(parts, key=lambda each: sum(part.seconds for part in each)))


def _part(operator: str, part: ProgramPart, algorithm: str) -> SchedulePart:
    """A kernel of a program of ``operator`` as it is printed."""
    return SchedulePart(
        label=f"{operator}: {part.label}" if part.label else operator,
        seconds=part.estimate.seconds,
        bound=part.estimate.bound,
        found_by=finder_of(part.policy),
        schedule=part.schedule_json,
        algorithm=algorithm,
    )


# What is printed


def json_lines(results: Sequence[OperatorEstimate]) -> bytes:
    """One JSON object per operator and line."""
    return msgspec.json.Encoder().encode_lines(results)


def estimate_table(results: Sequence[OperatorEstimate], lane: str = "thread") -> Table:
    """A line per operator; where it is several kernels or calls, a line for each below it. ``lane``: what the lanes of
    the device are."""
    library = any(result.implementation == "library" for result in results)
    times = ("predicted", "call") if library else ("predicted",)
    texts = ("bound", "library kernel") if library else ("bound", "schedule", "found by")
    view = new_table(("operator", "direction"), times, texts)
    for result in results:
        several = len(result.parts) > 1
        call = [time_text(result.call_seconds)] if result.call_seconds is not None else []
        what = [f"{len(result.parts)} {'calls' if library else 'kernels'}:"] + ([] if library else [""])
        if not several:
            what = _assumed(result.parts[0], lane) if result.parts else ["nothing to compute", ""]
        view.add_row(result.name, result.direction, time_text(result.seconds), *call, _bound(result.bound), *what)
        for part in result.parts if several else ():
            call = [time_text(part.call_seconds)] if isinstance(part, PricedCall) else []
            view.add_row(
                f"  {part.label}", "", time_text(part.seconds), *call, _bound(part.bound), *_assumed(part, lane)
            )
    return view


def _bound(stage: str) -> str:
    return stage.replace("_", " ")


def _assumed(part: SchedulePart | PricedCall, lane: str) -> list[str]:
    """Assumptions of an estimate, as cells."""
    if isinstance(part, PricedCall):
        slices = f", {count_text(part.splits, 'split')} of k" if part.splits is not None and part.splits > 1 else ""
        return [part.kernel + slices]
    schedule = part.schedule
    if "rows" in schedule:
        walked = f"{schedule['keys']} keys" if "keys" in schedule else str(schedule["step"])
        tiles = f"{schedule['rows']} rows by {walked}, {count_text(schedule['warps'], 'warp')}"
        return [f"{tiles}, {schedule['instruction']}", part.found_by]
    if "lines" in schedule:
        shared = f"{schedule['threads']} threads a line, " if schedule["threads"] > 1 else ""
        return [f"{shared}{count_text(schedule['lines'], 'line')} a block", part.found_by]
    if "block" not in schedule and schedule.get("sums"):
        return [f"{schedule['threads']} threads a block, a warp a row", part.found_by]
    if "block" not in schedule:
        return [f"{schedule['threads']} threads a block, a patch each", part.found_by]
    return [", ".join(_TEXTS[lane](schedule)), part.found_by]


def _gpu_texts(schedule: Mapping[str, Any]) -> list[str]:
    texts = [f"block {sizes_text(tuple(schedule['block'].items()))}"]
    thread = {axis: count * schedule["vthreads"].get(axis, 1) for axis, count in schedule["thread"].items()}
    texts.append(f"thread {sizes_text(tuple(thread.items()))}")
    if schedule["step"]:
        texts.append(f"step {sizes_text(tuple(schedule['step'].items()))}")
    if schedule["instruction"] != Instruction.FMA:
        texts.append(schedule["instruction"])
    return texts


def _cpu_texts(schedule: Mapping[str, Any]) -> list[str]:
    texts = [f"block {sizes_text(tuple(schedule['block'].items()))}"]
    if any(count > 1 for count in schedule["reduce_threads"].values()):
        return texts
    texts.append(f"registers {sizes_text(tuple(schedule['thread'].items()))}")
    if schedule["step"]:
        texts.append(f"step {sizes_text(tuple(schedule['step'].items()))}")
    if schedule["cached"]:
        texts.append(packed_text(schedule["cached"]))
    return texts


#: A schedule's JSON in words, by what the lanes of a device are.
_TEXTS: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {"thread": _gpu_texts, "element": _cpu_texts}


def summary(results: Sequence[OperatorEstimate], device: DeviceSpec, implementation: str) -> str:
    """``8 operators on NVIDIA A100 PCIe 40 GB take 903 µs one after the other, ...``"""
    total = sum(result.seconds for result in results)
    text = f"{count_text(len(results), 'operator')} on {device.title}: {time_text(total)} of device time"
    if implementation == "library":
        calls = sum(result.call_seconds or 0.0 for result in results)
        guessed = sum(result.kernel == "roofline" for result in results)
        text += f", {time_text(calls)} as framework calls one by one (cuBLAS, cuDNN and PyTorch, modelled)"
        return text + (f"; {guessed} by roofline alone, no library kernel is known" if guessed else "")
    finders = sorted({part.found_by for result in results for part in result.parts if isinstance(part, SchedulePart)})
    return f"{text}, by the best schedules of {' and '.join(finders) or 'construction'}, ranked by RATIONAL"
