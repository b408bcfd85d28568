"""Scaled products and layers of experts against kernels measured on servers (AIConfigurator's database).

Constants were chosen on one half of the shapes (:func:`chosen`); the column *others* is the error on the other half.
Rows of 128x128 blocks were measured without a CUDA graph, so that the host's time between calls is in them: they are
compared with ``call_seconds``, all others with ``seconds``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.accuracy.library.left_out import fitted_without
from bench.accuracy.library.tensor_core_rows import BOARDS as SIXTEEN_BIT_BOARDS
from bench.accuracy.library.tensor_core_rows import FLOORS, REACHED
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.library import library_times
from sokoban.schedule.table import Floats

#: Board as the data calls it -> its device.
BOARDS: Mapping[str, str] = {
    **SIXTEEN_BIT_BOARDS, "h200_sxm": "h200", "b300_sxm": "b300", "gb200_sxm": "gb200", "gb300_sxm": "gb300",
    "gb200": "gb200", "gb300": "gb300", "rtx_pro_6000": "rtx-pro-6000", "rtx_pro_6000_server": "rtx-pro-6000",
}  # fmt: skip

#: Precision by the data's word.
PRODUCTS = {"fp8": "fp8-rowwise", "fp8_block": "fp8-block", "nvfp4": "nvfp4"}
EXPERTS = {
    "bfloat16": "bfloat16", "fp8": "fp8-tensorwise", "fp8_block": "fp8-block", "nvfp4": "nvfp4",
    "int4_wo": "int4-weights", "w4a16_mxfp4": "mxfp4-weights", "w4a8_mxfp4_mxfp8": "mxfp4-mxfp8",
}  # fmt: skip

#: Bytes of an element of the weights, and FLOP of the matrix units over those of 16 bits.
WEIGHT_BYTES = {
    "bfloat16": (2.0, 1.0), "fp8": (1.0, 2.0), "fp8_block": (1.0, 2.0), "nvfp4": (0.5625, 4.0), "int4_wo": (0.516, 1.0),
    "w4a16_mxfp4": (0.53, 1.0), "w4a8_mxfp4_mxfp8": (0.53, 2.0),
}  # fmt: skip

Columns = Mapping[str, np.ndarray[Any, Any]]
Operator = dict[str, Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """The calls of one kind on one board, in seconds, an entry per call.

    Attributes:
        predicted: None where the board has no such kernels by the model.
        roofline: by two numbers, a rate and a constant that suits these very calls best.
        on: whether constants were chosen on the call's shape.
        left_out: by constants chosen without the board; None where there are none.
    """

    board: str
    kind: str
    measured: Floats
    predicted: Floats | None
    roofline: Floats
    on: np.ndarray[Any, np.dtype[np.bool_]]
    left_out: Floats | None = None

    def errors(self, seconds: Floats) -> Floats:
        """Relative errors without their signs."""
        return np.asarray(np.abs(seconds / self.measured - 1))


@dataclass(frozen=True, eq=False, kw_only=True)
class Kind:
    """One file of rows.

    Attributes:
        file: of the data.
        title: in words.
        bar: largest mean error asked for.
        precisions: by the data's word, which the column ``column`` has.
        operators: of rows in one precision.
        work: FLOP and bytes of rows.
        chosen: of rows, whether constants were chosen on their shapes.
        left_out: name of the constants that were chosen with a board left out.
    """

    file: str
    title: str
    bar: float
    column: str
    precisions: Mapping[str, str]
    operators: Callable[[Columns, str], list[Operator]]
    work: Callable[[Columns, str], tuple[Floats, Floats]]
    chosen: Callable[[Columns], np.ndarray[Any, np.dtype[np.bool_]]]
    left_out: str = ""


def table(data: Path, out: Path) -> Iterable[Table]:
    """A table per kind, a row per board and precision."""
    for kind in KINDS:
        comparisons = list(compare(data, kind))
        if comparisons:
            yield kind_table(kind, comparisons)


def compare(data: Path, kind: Kind) -> Iterator[Comparison]:
    """Comparisons by board and precision; none where the file is absent."""
    import pyarrow.parquet as parquet

    path = data / "today" / f"{kind.file}.parquet"
    if not path.is_file():
        return
    read = parquet.read_table(path)
    columns = {name: read[name].to_numpy(zero_copy_only=False) for name in read.column_names}
    for board in sorted(set(columns["board"].tolist()) & set(BOARDS)):
        for word in kind.precisions:
            mine = (columns["board"] == board) & (columns[kind.column] == word)
            if mine.any():
                rows = {name: part[mine] for name, part in columns.items()}
                yield _comparison(kind, board, word, rows)


def _comparison(kind: Kind, board: str, word: str, rows: Columns) -> Comparison:
    device = load_device(BOARDS[board])
    measured = np.asarray(rows["latency"], np.float64) / 1e3
    flops, moved = kind.work(rows, word)
    rates = device.best_matrix_instruction("bfloat16")
    assert rates is not None, device.name
    faster = WEIGHT_BYTES[word][1]
    longest = np.maximum(flops / (REACHED * faster * rates.peak_flops), moved / device.dram.bandwidth_bytes_per_second)
    roofline = min((longest + floor for floor in FLOORS), key=lambda seconds: np.abs(seconds / measured - 1).mean())
    operators = kind.operators(rows, kind.precisions[word])
    left_out = None
    without = fitted_without(board, kind.left_out)
    if without is not None:
        with without:
            left_out = _predicted(operators, device)
    return Comparison(
        board=board, kind=word, measured=measured, roofline=roofline, on=kind.chosen(rows),
        predicted=_predicted(operators, device), left_out=left_out,
    )  # fmt: skip


def _predicted(operators: Sequence[Operator], device: DeviceSpec) -> Floats | None:
    try:
        times = library_times(operators, device)
    except InputError:
        return None
    eager = operators[0]["op"] == "scaled_matmul" and operators[0]["precision"] == "fp8-block"
    return np.array([each.call_seconds if eager else each.seconds for each in times])


def kind_table(kind: Kind, comparisons: Sequence[Comparison]) -> Table:
    """Mean errors, on shapes that constants were chosen on and on others, the roofline's next to them."""
    view = Table(box=None, pad_edge=False, title=kind.title, title_justify="left")
    view.add_column("board")
    view.add_column("numbers")
    for column in ("rows", "mean error", "asked", "others", "without it", "median error", "two numbers"):
        view.add_column(column, justify="right")
    for each in comparisons:
        errors = None if each.predicted is None else each.errors(each.predicted)
        shown = ["-"] * 3
        if errors is not None:
            shown = [f"{value:.1%}" for value in (errors.mean(), errors[~each.on].mean(), np.median(errors))]
        without = "-" if each.left_out is None else f"{each.errors(each.left_out).mean():.1%}"
        view.add_row(
            each.board, each.kind, str(len(each.measured)), shown[0], f"{kind.bar:.0%}", shown[1], without, shown[2],
            f"{each.errors(each.roofline).mean():.1%}",
        )  # fmt: skip
    return view


# Products


def _products(rows: Columns, precision: str) -> list[Operator]:
    sizes = zip(*(rows[name].tolist() for name in ("m", "n", "k")), strict=True)
    return [{"op": "scaled_matmul", "m": m, "n": n, "k": k, "precision": precision} for m, n, k in sizes]


def _product_work(rows: Columns, word: str) -> tuple[Floats, Floats]:
    m, n, k = (rows[name].astype(np.float64) for name in ("m", "n", "k"))
    size = WEIGHT_BYTES[word][0]
    return 2 * m * n * k, size * (m * k + n * k) + 2 * m * n


def _product_half(rows: Columns) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Shapes by a hash of their weights."""
    return np.asarray((rows["n"] * 7919 + rows["k"] * 104729) % 97 % 2 == 0)


# Experts


def _experts(rows: Columns, precision: str) -> list[Operator]:
    names = {
        "num_tokens": "tokens", "hidden_size": "hidden", "inter_size": "intermediate", "topk": "top_k",
        "num_experts": "experts", "moe_tp_size": "tensor_parallel", "moe_ep_size": "expert_parallel",
    }  # fmt: skip
    sizes = zip(*(rows[name].tolist() for name in names), strict=True)
    spreads = ["uniform" if name == "balanced" else name for name in rows["distribution"].tolist()]
    return [
        {
            "op": "experts",
            **dict(zip(names.values(), each, strict=True)),
            "distribution": spread,
            "precision": precision,
        }
        for each, spread in zip(sizes, spreads, strict=True)
    ]


def _experts_work(rows: Columns, word: str) -> tuple[Floats, Floats]:
    """Three products of every pair of a token and an expert, divided evenly; weights of experts that may have one."""
    hidden, pairs = rows["hidden_size"].astype(np.float64), (rows["num_tokens"] * rows["topk"]).astype(np.float64)
    inter = rows["inter_size"] / rows["moe_tp_size"]
    boards = rows["moe_ep_size"].astype(np.float64)
    active = np.minimum(rows["num_experts"], pairs) / boards
    moved = 3 * active * hidden * inter * WEIGHT_BYTES[word][0] + 4 * hidden * pairs / boards
    return 6 * pairs / boards * hidden * inter, moved


def _experts_half(rows: Columns) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Shapes by a hash of experts and how they are divided."""
    parts = {"hidden_size": 7919, "inter_size": 104729, "moe_tp_size": 31, "moe_ep_size": 17, "num_experts": 13}
    return np.asarray(sum(rows[name] * factor for name, factor in parts.items()) % 97 % 2 == 0)


#: Every kind of the data.
KINDS: tuple[Kind, ...] = (
    Kind(
        file="products", title="Products with scales", bar=0.10, column="gemm_dtype", precisions=PRODUCTS,
        operators=_products, work=_product_work, chosen=_product_half, left_out="scaled",
    ),
    Kind(
        file="experts", title="Layers of experts", bar=0.15, column="moe_dtype", precisions=EXPERTS,
        operators=_experts, work=_experts_work, chosen=_experts_half,
    ),
)  # fmt: skip
