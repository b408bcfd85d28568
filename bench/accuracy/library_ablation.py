"""What each effect of the library models contributes: errors of measured PyTorch calls with it against without.

As in :mod:`bench.accuracy.ablation`, an effect is taken out by replacing what holds it for the time of an evaluation.
Every :data:`SAMPLE`-th call is predicted, on every board that the data has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from msgspec.structs import replace as replace_struct
from rich.table import Table

from bench.accuracy.effects import NO_SUM, TINY, Effect, bars, without
from bench.accuracy.library import CLASSES, MAKERS, Columns, boards, launch_of, read_calls
from hal.spec.device import DeviceSpec
from hal.spec.parts import Framework
from roller.library import convolution, convolution_algorithms, elementwise, gemm_cost, rowwise, streams
from roller.library.calls import price
from roller.library.convolution_algorithms import Algorithm, ConvolutionProblem
from roller.library.gemm import gemm_seconds
from roller.library.gemm_types import Floats

#: One call in so many.
SAMPLE = 5

#: How the tables call products whose kernel is known.
TILE_KNOWN = ", tile known"

GEMMS = ("bmm", "linear", "bmm" + TILE_KNOWN, "linear" + TILE_KNOWN)
STREAMS = ("element-wise", "softmax", "layer norm")
GENERATIONS = ("maxwell", "volta", "ampere")


@dataclass(frozen=True)
class LibraryEffect:
    """An effect of the library models.

    Attributes:
        classes: those of whose models it is part.
        constants: fields of :data:`gemm_cost.CONSTANTS` without it.
    """

    effect: Effect
    classes: Sequence[str]
    constants: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """Mean errors of one class, as shares; the mean over boards of each board's mean."""

    effect: str
    operation: str
    full: float
    without: float


@contextmanager
def _gemm_constants(constants: Mapping[str, Any]) -> Iterator[None]:
    """The models' constants are one frozen value that functions hold as a default; its fields change for a while.

    Raises:
        AttributeError: there is no such field.
    """
    for name in constants:
        getattr(gemm_cost.CONSTANTS, name)
    with patch.dict(gemm_cost.CONSTANTS.__dict__, constants):
        yield


# The models without ...


def _no_seconds(launch: gemm_cost.TiledGemms, *_: Any) -> Floats:
    return np.full(launch.m.shape, TINY)


def _fluid_compute(launch: gemm_cost.TiledGemms, device: DeviceSpec, *rest: Any) -> Floats:
    """Blocks spread evenly over the units."""
    columns, rows, results = gemm_cost.blocks_of(launch)
    share = columns * rows * results / device.unit_count
    return np.asarray(_COMPUTE(launch, device, *rest) * share / np.ceil(share))


def _rank_by_time(launch: gemm_cost.TiledGemms, device: DeviceSpec, kernel: Floats, *_: Any) -> Floats:
    return kernel


def _fluid_tiles(device: DeviceSpec, blocks: Floats, work: Floats, threads: float, rate: float) -> Floats:
    """Blocks spread evenly over the units, which are always full."""
    return work * blocks / rate


def _never(device: DeviceSpec, problem: ConvolutionProblem, *_: Any, **__: Any) -> Algorithm:
    return Algorithm({"multiply": np.full(problem.n.shape, 1e9)}, 1)


def _nothing(device: DeviceSpec, like: Any, *_: Any) -> Floats:
    return np.zeros(np.shape(like))


def _no_host(device: DeviceSpec) -> DeviceSpec:
    return replace_struct(device, framework=Framework(**dict.fromkeys(Framework.__struct_fields__, TINY)))


def _instant_blocks(device: DeviceSpec) -> DeviceSpec:
    return replace_struct(device, block_launch_seconds=TINY)


_COMPUTE = gemm_cost._compute_seconds


def _constant(name: str, **constants: Any) -> LibraryEffect:
    return LibraryEffect(Effect(name), GEMMS, constants)


#: The effects, and the classes to whose models they belong.
EFFECTS: Sequence[LibraryEffect] = (
    LibraryEffect(Effect("host", device=_no_host), tuple(CLASSES)),
    LibraryEffect(Effect("waves", ((gemm_cost, {"_compute_seconds": _fluid_compute}),)), GEMMS),
    _constant("operand traffic in the loop", staging_gaps=0.0, staging_full=0.0),
    _constant("requests of short rows", short_rows=0.0),
    _constant("latency of a step", exposed=dict.fromkeys(GENERATIONS, 0.0)),
    _constant("prologue of a tile", prologue=dict.fromkeys(GENERATIONS, 0.0)),
    _constant("overlap of arithmetic and memory", overlap=NO_SUM),
    LibraryEffect(Effect("DRAM", ((gemm_cost, {"_dram_seconds": _no_seconds}),)), GEMMS),
    _constant("L2 reuse: all from DRAM", hold_m=TINY, hold_n=TINY),
    _constant("L2 reuse: losses of what blocks share", hold_m=1e12, hold_n=1e12),
    _constant("DRAM rows", row_k=1e12),
    _constant("slices of k take turns", turn_seconds=0.0),
    LibraryEffect(Effect("address translation", ((gemm_cost, {"_translation_seconds": _no_seconds}),)), GEMMS),
    LibraryEffect(Effect("power limit", ((gemm_cost, {"_power_seconds": _no_seconds}),)), GEMMS),
    LibraryEffect(Effect("ranking of Maxwell's heuristic", ((gemm_cost, {"_ranking": _rank_by_time}),)), GEMMS[:2]),
    LibraryEffect(Effect("block launch", device=_instant_blocks), STREAMS),
    LibraryEffect(
        Effect(
            "L2 keeps the last call's tensors",
            ((elementwise, {"reuse": _nothing}), (rowwise, {"reuse": _nothing})),
        ),
        STREAMS,
    ),
    LibraryEffect(
        Effect(
            "instructions",
            tuple((module, {"instruction_seconds": _nothing}) for module in (elementwise, rowwise, streams)),
        ),
        STREAMS,
    ),
    LibraryEffect(Effect("integer beside float", ((elementwise, {"INTEGER_TOO": 1.0}),)), STREAMS),
    LibraryEffect(
        Effect("resident rows stay in caches", ((rowwise, {"_ramp": lambda filled, *_: np.zeros_like(filled)}),)),
        STREAMS[1:],
    ),
    LibraryEffect(Effect("overlap of arithmetic and memory", ((rowwise, {"OVERLAP": NO_SUM}),)), STREAMS[1:]),
    LibraryEffect(Effect("unaligned rows", ((rowwise, {"UNALIGNED": 0.0}),)), STREAMS[1:2]),
    LibraryEffect(Effect("waves", ((convolution_algorithms, {"tiled_seconds": _fluid_tiles}),)), ("convolution",)),
    LibraryEffect(
        Effect("idle lanes of few threads", ((convolution_algorithms, {"SATURATION": TINY}),)), ("convolution",)
    ),
    LibraryEffect(
        Effect("overlap of arithmetic and memory", ((convolution_algorithms, {"OVERLAP": NO_SUM}),)), ("convolution",)
    ),
    LibraryEffect(Effect("memory", ((convolution_algorithms, {"_transfer": _nothing}),)), ("convolution",)),
    LibraryEffect(Effect("gaps between kernels", ((convolution_algorithms, {"gaps": _nothing}),)), ("convolution",)),
    LibraryEffect(
        Effect("age of kernels since Ampere", ((convolution_algorithms, {"SINCE_AMPERE": 1.0}),)), ("convolution",)
    ),
    LibraryEffect(
        Effect("Winograd", ((convolution, {"fused_winograd": _never, "nonfused_winograd": _never}),)), ("convolution",)
    ),
    LibraryEffect(Effect("power limit", ((convolution_algorithms, {"LONG_LOAD": 0.0}),)), ("convolution",)),
)


# Evaluation

_Predict = Callable[[DeviceSpec], Floats]


def library_rows(data: Path) -> list[Row]:
    """A row per effect and class; classes whose file is missing are left out."""
    calls = {operation: list(_calls(data, operation)) for operation in (*GEMMS[2:], *CLASSES)}
    full = {operation: _error(mine, Effect("")) for operation, mine in calls.items() if mine}
    rows = []
    for each in EFFECTS:
        with without([each.effect]), _gemm_constants(each.constants), np.errstate(all="ignore"):
            rows += [
                Row(each.effect.name, name, full[name], _error(calls[name], each.effect))
                for name in each.classes
                if calls[name]
            ]
    return rows


def _calls(data: Path, operation: str) -> Iterator[tuple[DeviceSpec, _Predict, Floats]]:
    """By board: the board, what predicts the sampled calls, and their measured seconds."""
    plain = operation.removesuffix(TILE_KNOWN)
    found = read_calls(data, CLASSES[plain][0])
    for name, device in boards(found).items():
        rows: Columns = {key: values[::SAMPLE] for key, values in found[name].items()}
        if plain != operation:
            known = ~np.isnan(rows["tile_m"].astype(np.float64))
            rows = {key: values[known] for key, values in rows.items()}
            predict = _tile_known(rows, bias=plain == "linear")
        else:
            calls = MAKERS[operation](rows)
            predict = _shape_known(calls)
        yield device, predict, rows["latency_ms"].astype(np.float64) / 1e3


def _tile_known(rows: Columns, *, bias: bool) -> _Predict:
    b, m, n, k = (rows[key].astype(np.float64) for key in ("b", "m", "n", "k"))
    launch = launch_of(rows, splits=bias)
    return lambda device: gemm_seconds(b, m, n, k, device, launch, bias=bias).call_seconds


def _shape_known(calls: Sequence[Any]) -> _Predict:
    return lambda device: np.array([call.call_seconds for call in price(calls, device)])


def _error(calls: Iterable[tuple[DeviceSpec, _Predict, Floats]], effect: Effect) -> float:
    boards_errors = []
    for device, predict, measured in calls:
        predicted = predict(effect.device(device))
        boards_errors.append(float(np.mean(np.abs(predicted - measured) / measured)))
    return float(np.mean(boards_errors))


# Tables


def library_table(rows: Sequence[Row]) -> Table:
    """A row per effect and class."""
    view = Table(box=None, pad_edge=False, title="PyTorch calls, the library model without ...", title_justify="left")
    for column in ("without", "class"):
        view.add_column(column)
    for column in ("mean error", "full model", "difference"):
        view.add_column(column, justify="right")
    for position, row in enumerate(rows):
        first = position == 0 or rows[position - 1].effect != row.effect
        more = f"{row.without - row.full:+.1%}"
        view.add_row(row.effect if first else "", row.operation, f"{row.without:.1%}", f"{row.full:.1%}", more)
    return view


def library_chart(rows: Sequence[Row], path: Path) -> None:
    """Bars as a PNG, a panel per class: by how many points the mean error grows without an effect."""
    from matplotlib.figure import Figure

    classes = list(dict.fromkeys(row.operation for row in rows))
    columns = 2
    lines = -(-len(classes) // columns)
    figure = Figure(figsize=(14, 3.4 * lines))
    figure.set_layout_engine("constrained")
    panels: list[Any] = figure.subplots(lines, columns, squeeze=False).ravel().tolist()
    for panel, operation in zip(panels, classes, strict=False):
        mine = [row for row in rows if row.operation == operation]
        values = [100 * (row.without - row.full) for row in mine]
        bars(panel, values, [row.effect for row in mine])
        panel.set_title(f"{operation}: {mine[0].full:.1%} with everything")
    for panel in panels[len(classes) :]:
        panel.set_visible(False)
    figure.suptitle("PyTorch calls: points that the mean error gains (red) or loses (blue) without an effect")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
