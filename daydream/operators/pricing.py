"""Roller's predictions for the kernels of a recorded graph.

The kernels that one operator call launched are priced together, as what the operator computes: how many kernels the
library made of it, and which, is its own affair (index tables, changes of layout, Winograd's transforms, sums of
split-K). ``best`` is the best kernel that Roller knows how to build, ``library`` its models of cuBLAS, cuDNN and
PyTorch. Prices are device time with all launches of kernels counted, never the host's share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from daydream.graph.graph import Mark, TaskGraph, TaskKind
from daydream.operators.attention import is_attention
from daydream.operators.convolutions import Convolutions, is_convolution, only
from daydream.operators.inputs import inputs_of, outputs_of
from daydream.operators.part_prices import Implementation, part_key, part_prices
from daydream.operators.products import PRODUCTS
from daydream.operators.rules import describe
from daydream.operators.wave_scaling import sustained_rate
from daydream.operators.work import PRODUCT_KINDS, Work
from daydream.trace.trace import NONE, Floats, Ints
from hal.support.errors import InputError

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

_AUXILIARY = re.compile(
    r"offsets?kernel|nchwtonhwc|nhwctonchw|tensortransform|scalepackedtensor|splitkreduce|reduce_wgrad|convertTensor"
    r"|generatewinogradtiles|winograd\w*(data|filter|output|delta)\d|copy_device_to_device|elementwise|memset",
    re.IGNORECASE,
)

_WEIGHTS = re.compile(r"wgrad|backward_filter|bprop_weights", re.IGNORECASE)


@lru_cache(maxsize=65536)
def is_auxiliary(kernel: str) -> bool:
    """True if a kernel of this name serves another one of its call: index tables, layouts, transforms, sums."""
    return _AUXILIARY.search(kernel) is not None


@lru_cache(maxsize=65536)
def _of_weights(kernel: str) -> bool:
    """True if a kernel of this name belongs to a convolution's gradient of the weights."""
    return _WEIGHTS.search(kernel) is not None


@dataclass(frozen=True, eq=False, kw_only=True)
class CallPrice:
    """The kernels of one operator call, or of one of the gradients that it makes, and what they would take.

    Attributes:
        operator: the operator's row in the trace, -1 without.
        rows: GPU tasks in row order.
        main: the one that does the work; the others serve it.
        work: what is computed; None where that is unknown.
        recorded_us: their durations in the graph.
        price_us: predicted, NaN where unknown.
        text: the operator as Roller names it.
        bound: ``compute`` or ``memory`` by the roofline of the device, empty where unknown.
        kernel: what was assumed to run: the library's kernel or algorithm, or how Roller found its schedule.
        reason: why it has no price.
    """

    operator: int
    rows: Ints
    main: int
    work: Work | None
    recorded_us: float
    price_us: float
    text: str = ""
    bound: str = ""
    kernel: str = ""
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices of GPU tasks: one entry per task in every column, in the order in which they were asked for.

    `microseconds` is the call's price, spread over its tasks in proportion to their durations (NaN unpriced);
    `call` indexes `calls`.
    """

    rows: Ints
    calls: tuple[CallPrice, ...]
    call: Ints
    microseconds: Floats

    @cached_property
    def operator(self) -> tuple[str, ...]:
        """Name of each row's operator."""
        return tuple(self.calls[each].text for each in self.call.tolist())

    @cached_property
    def bound(self) -> tuple[str, ...]:
        """Bound of each row's call."""
        return tuple(self.calls[each].bound for each in self.call.tolist())

    @cached_property
    def reason(self) -> tuple[str, ...]:
        """Why each row has no price; empty where it has one."""
        return tuple(self.calls[each].reason for each in self.call.tolist())


# Devices


def device_of(graph: TaskGraph, name: str = "auto") -> tuple[DeviceSpec, str]:
    """The board of that name, or the one the trace was recorded on, and a sentence where it stands in for another.

    A recorded board without a file of its own is taken for the shipped one whose name or alias says the most of
    its words: "Tesla V100-DGXS-32GB" for "v100".

    Raises:
        InputError: there is no such board, or the trace names none that is known.
    """
    from hal.catalog import device_aliases, device_names, load_device

    if name and name != "auto":
        return load_device(name), ""
    devices = graph.trace.devices if graph.trace is not None else ()
    recorded = next((str(entry["name"]) for entry in devices if entry.get("name")), "")
    if not recorded:
        raise InputError("device", "the trace does not say which board it was recorded on", "name one: device=v100")
    try:
        return load_device(recorded), ""
    except InputError:
        pass
    words = set(_words(recorded))
    names = {**device_aliases(), **{each: each for each in device_names()}}
    aliases = [alias for alias in names if words.issuperset(_words(alias))]
    if not aliases:
        raise InputError("device", f"there is no device file for {recorded}, which the trace names", "name a device")
    spec = load_device(max(aliases, key=lambda alias: (len(_words(alias)), alias)))
    return spec, f"recorded on {recorded}, taken for {spec.title}"


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[\s_-]+", text.casefold()) if word]


def bound_of(work: Work, device: DeviceSpec) -> str:
    """``compute`` where arithmetic at the sustained rate takes longer than moving each tensor once, else ``memory``."""
    rate = sustained_rate(device, work.dtype, products=work.kind in PRODUCT_KINDS)
    return "compute" if work.flops / rate > work.bytes / device.dram.bandwidth_bytes_per_second else "memory"


# Calls


class _Group(NamedTuple):
    operator: int
    rows: Ints
    work: Work | str


def is_heavy(name: str) -> bool:
    """True if an operator of this name is a convolution, a matrix product or fused attention."""
    return name in PRODUCTS or is_convolution(name) or is_attention(name)


def heavy_rows(graph: TaskGraph) -> Ints:
    """Kernels and memory sets that convolutions, matrix products and attention launched, auxiliary ones included."""
    if graph.trace is None:
        return np.empty(0, np.int64)
    heavy = np.array([is_heavy(name) for name in graph.trace.names], np.bool_)
    rows = _device_work(graph)
    rows = rows[graph.operator[rows] != NONE]
    return rows[heavy[graph.trace.name[graph.operator[rows]]]]


def _device_work(graph: TaskGraph) -> Ints:
    kinds = (graph.kind == TaskKind.KERNEL) | (graph.kind == TaskKind.MEMSET)
    return np.flatnonzero(kinds & graph.on_gpu & (graph.mark == Mark.NONE))


def work_of(graph: TaskGraph, convolutions: Convolutions, operator: int) -> Work | str:
    """Work of an operator (a row of the trace), or why it is unknown."""
    assert graph.trace is not None
    name = graph.trace.text(operator)
    if is_convolution(name):
        return convolutions.describe(operator)
    inputs = inputs_of(graph.trace, operator)
    if inputs is None:
        return "input sizes not recorded; record with record_shapes=True"
    return describe(name, inputs, outputs_of(graph.trace, operator))


def device_operators(graph: TaskGraph) -> list[dict[str, Any]]:
    """The distinct operators that GPU tasks of a graph compute and that Roller can build, as for op.json, in order of
    appearance: matrix products, convolutions, element-wise operators and whatever else has a kernel of ours."""
    rows = _device_work(graph)
    operators = dict.fromkeys(graph.operator[rows[graph.operator[rows] != NONE]].tolist())
    if graph.trace is None:
        return []
    convolutions = Convolutions(graph.trace, graph.enclosing)
    distinct: dict[str, dict[str, Any]] = {}
    for operator in operators:
        work = work_of(graph, convolutions, operator)
        for part in work.parts if isinstance(work, Work) else ():
            if part.data and part.direction == "forward" and part.data["op"] != "attention":
                distinct.setdefault(json.dumps(part.data), part.data)
    return list(distinct.values())


def _groups(graph: TaskGraph, rows: Ints) -> list[_Group]:
    """The tasks by operator call; a convolution's whole backward operator falls apart into its two gradients."""
    if graph.trace is None:
        return [_Group(NONE, rows[i : i + 1], "the graph was not made from a trace") for i in range(len(rows))]
    convolutions = Convolutions(graph.trace, graph.enclosing)
    operators = graph.operator[rows]
    order = np.lexsort((rows, operators))
    starts = np.flatnonzero(np.diff(operators[order], prepend=NONE - 1))
    groups = []
    for members in np.split(rows[order], starts[1:]) if len(rows) else []:
        operator = int(graph.operator[members[0]])
        if operator == NONE:
            groups += [_Group(NONE, members[i : i + 1], "no operator launched it") for i in range(len(members))]
            continue
        groups += _split(graph, _Group(operator, members, work_of(graph, convolutions, operator)))
    return groups


def _split(graph: TaskGraph, group: _Group) -> list[_Group]:
    """Gradients of data and weights apart, where the names tell: PyTorch launches those of the data first."""
    work = group.work
    if isinstance(work, str) or {part.direction for part in work.parts} != {"backward data", "backward weights"}:
        return [group]
    marked = [_of_weights(graph.text(row)) for row in group.rows.tolist()]
    if True not in marked:
        return [group]
    begin = marked.index(True)
    data, weights = only(work, "backward data"), only(work, "backward weights")
    assert data is not None and weights is not None
    parts = [_Group(group.operator, group.rows[:begin], data), _Group(group.operator, group.rows[begin:], weights)]
    return [part for part in parts if len(part.rows)]


def _main_of(graph: TaskGraph, rows: Ints) -> int:
    """The longest kernel that is no auxiliary one; the longest of all where every one is."""
    likely = [row for row in rows.tolist() if not is_auxiliary(graph.text(row))]
    return max(likely or rows.tolist(), key=lambda row: float(graph.duration_us[row]))


# Prices


def price(
    graph: TaskGraph,
    rows: Ints,
    device: DeviceSpec,
    implementation: Implementation = "best",
    *,
    search: str = "roller",
    dtype: str = "",
) -> Prices:
    """Roller's predictions for these GPU tasks.

    A call counts as a whole even where only some of its tasks are asked for: name them all, as :func:`heavy_rows` does.

    Args:
        graph: with the trace it was built from; other graphs have no prices.
        rows: GPU tasks.
        device: the board to predict for.
        implementation: Roller's own best kernels, or the vendor's library.
        search: ``best`` alone: ``roller`` constructs in some hundredths of a second per distinct operator,
            ``both`` also searches, about a second each.
        dtype: the element type to price in, in place of the recorded one.

    Raises:
        InputError: the board has no such library, or there is no such search. Operators without a price raise nothing.
    """
    described = describe_calls(graph, rows, device)
    works = [call.work for call in described.calls if call.work is not None]
    price_of = part_prices(works, device, implementation, search=search, dtype=dtype)
    calls = []
    for call in described.calls:
        if call.work is None:
            calls.append(call)
            continue
        priced = [price_of[part_key(part, dtype)] for part in call.work.parts]
        reason = next((each.reason for each in priced if each.reason), "")
        total = np.nan if reason else sum(each.microseconds for each in priced)
        kernel = " + ".join(dict.fromkeys(each.kernel for each in priced if each.kernel))
        calls.append(replace(call, price_us=total, text=priced[0].text, kernel=kernel, reason=reason))
    return _spread(graph, described.rows, calls)


def describe_calls(graph: TaskGraph, rows: Ints, device: DeviceSpec) -> Prices:
    """These GPU tasks by operator call, with what bounds each, but without prices: that takes no model at all."""
    rows = np.asarray(rows, np.int64)
    bounds: dict[int, str] = {}
    calls = []
    for group in _groups(graph, rows):
        recorded = float(graph.duration_us[group.rows].sum())
        main = _main_of(graph, group.rows) if len(group.rows) > 1 else int(group.rows[0])
        if isinstance(group.work, str):
            calls.append(
                CallPrice(
                    operator=group.operator,
                    rows=group.rows,
                    main=main,
                    work=None,
                    recorded_us=recorded,
                    price_us=np.nan,
                    reason=group.work,
                )
            )
            continue
        if id(group.work) not in bounds:
            bounds[id(group.work)] = bound_of(group.work, device)
        bound = bounds[id(group.work)]
        calls.append(
            CallPrice(
                operator=group.operator,
                rows=group.rows,
                main=main,
                work=group.work,
                recorded_us=recorded,
                price_us=np.nan,
                bound=bound,
            )
        )
    return _spread(graph, rows, calls)


def _spread(graph: TaskGraph, rows: Ints, calls: Sequence[CallPrice]) -> Prices:
    of_row = np.full(len(graph), NONE)
    share = np.full(len(graph), np.nan)
    for position, call in enumerate(calls):
        of_row[call.rows] = position
        weight = graph.duration_us[call.rows] / call.recorded_us if call.recorded_us > 0 else 1 / len(call.rows)
        share[call.rows] = call.price_us * weight
    return Prices(rows, tuple(calls), of_row[rows], share[rows])
