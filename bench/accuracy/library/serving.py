"""Layers of serving engines, kernel by kernel, on boards that others profiled: Sarathi's and vLLM's kernels by name.

Constants of ``roller.library.streaming.row_kernels`` were chosen on models on one and on four boards; those on two and
on eight judge them. Times of Sarathi are whole microseconds, so that what takes two of them is known to a quarter. What
Hugging Face's layers call ``silu`` is its gate: SiLU and a product, two kernels of PyTorch.

vidur profiles a model's layers one after the other for minutes without a pause, with a model's operands: its products
run on a board whose clock has settled (:func:`hal.spec.power.settled`), as jobs do. Constants of row kernels and starts
of blocks come from the same profiles at the boost clock, whatever the clock was. Keys and values of a layer have left
L2 when vLLM decodes the next token, after all other layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product as product_of
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from hal.catalog import load_device
from hal.spec.power import settled
from roller.library.cache import flushed_cache
from roller.library.calls import LibraryCall, price
from roller.library.parts import elementwise, product

#: Largest mean error asked for, a kind and board, in per cent.
BAR = 12.0

#: Boards by their names in the data.
BOARDS = {"a100": "a100-sxm-80gb", "h100": "h100-sxm-80gb", "rtx4090": "rtx-4090", "rtx3090": "rtx-3090"}

#: Tokens at most of which PyTorch's index_select takes the kernel for few.
_FEW_TOKENS = 16

_Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A measured layer.

    Attributes:
        board: its name in the data.
        source: who measured, with the software.
        kind: of layer.
        chosen_on: whether constants may have been chosen on it.
        measured: seconds.
        settled: whether the board's clock had settled.
        cold: whether nothing of the call was in L2.
        calls: its kernels.
    """

    board: str
    source: str
    kind: str
    chosen_on: bool
    measured: float
    settled: bool
    cold: bool
    calls: tuple[LibraryCall, ...]


def _rows(kernel: str, rows: int, columns: float, dtype: str, further: float = 0) -> LibraryCall:
    return LibraryCall(
        kind="rows", label=kernel, sizes=(rows, columns, further), dtype=dtype, variant=kernel
    )  # fmt: skip


def _linear(row: _Row) -> list[LibraryCall]:
    return [product(1, row["m"], row["n"], row["k"], row["dtype"], bias=row["bias"])]


def _rotary(row: _Row) -> list[LibraryCall]:
    # Phi-2 turns 32 of the 80 elements of a head.
    pairs = 16 if row["head_dim"] == 80 else row["head_dim"] / 2
    sizes = (row["heads"] * pairs, row["kv_heads"] * pairs)
    return [_rows("vllm rotary_embedding", row["m"], sizes[0], row["dtype"], sizes[1])]


def _embedding(row: _Row) -> list[LibraryCall]:
    # A block takes 128 elements: of every token in turn where there are up to 16, else of all elements in a row.
    if row["m"] <= _FEW_TOKENS:
        return [_rows("torch indexSelectSmallIndex", row["n"] // 128, 128 * row["m"], row["dtype"])]
    return [_rows("torch indexSelectLargeIndex", row["m"] * row["n"] // 128, 128, row["dtype"])]


def _attention(row: _Row) -> list[LibraryCall]:
    sizes = (
        row["batch"], row["heads"], row["kv_heads"], row["queries"], row["keys"], row["head_dim"], row["head_dim"],
        1, 0, 16,
    )  # fmt: skip
    return [LibraryCall(kind="attention", label="attention", sizes=sizes, dtype=row["dtype"])]


_CALLS: Mapping[str, Callable[[_Row], list[LibraryCall]]] = {
    "linear": _linear,
    "rms_norm": lambda row: [_rows("vllm rms_norm", row["m"], row["n"], row["dtype"])],
    "silu_mul": lambda row: [
        _rows("vllm act_and_mul" + " by vectors" * row["software"].startswith("vllm"), row["m"], row["n"], row["dtype"])
    ],
    "silu": lambda row: [
        elementwise("silu", row["m"] * row["n"], row["dtype"], 1),
        elementwise("mul", row["m"] * row["n"], row["dtype"], 2),
    ],
    "add": lambda row: [elementwise("add", row["m"] * row["n"], row["dtype"], 2)],
    "add3": lambda row: [elementwise("add", row["m"] * row["n"], row["dtype"], 2)] * 2,
    "rope": _rotary,
    "embedding": _embedding,
    "prefill": _attention,
    "decode": _attention,
}


def read_layers(path: Path) -> list[Layer]:
    """The layers of a file whose kernels are known."""
    import pyarrow.parquet as parquet

    return [
        Layer(
            board=row["board"],
            source=f"{row['source']}, {row['software']}",
            kind=row["kind"],
            chosen_on=row["tp"] in (1, 4),
            measured=row["time_us"] / 1e6,
            settled=row["source"] == "vidur" and row["kind"] == "linear",
            cold=row["kind"] == "decode",
            calls=tuple(_CALLS[row["kind"]](row)),
        )
        for row in parquet.read_table(path).to_pylist()
        if row["kind"] in _CALLS
    ]


def predicted_seconds(layers: Sequence[Layer]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Device time of every layer."""
    seconds = np.zeros(len(layers))
    for board, is_settled, is_cold in product_of(BOARDS, (False, True), (False, True)):
        state = (board, is_settled, is_cold)
        places = [place for place, layer in enumerate(layers) if (layer.board, layer.settled, layer.cold) == state]
        device = settled(load_device(BOARDS[board])) if is_settled else load_device(BOARDS[board])
        with flushed_cache() if is_cold else nullcontext():
            prices = iter(price([call for place in places for call in layers[place].calls], device))
        for place in places:
            seconds[place] = sum(next(prices).seconds for _ in layers[place].calls)
    return seconds


def table(data: Path, out: Path) -> Iterable[Table]:
    """Errors by source, board and kind of layer; none where the file is missing."""
    del out
    path = data / "serving" / "layers.parquet"
    return [layer_table(read_layers(path))] if path.is_file() else []


def layer_table(layers: Sequence[Layer]) -> Table:
    """A row per source, board and kind of layer."""
    view = Table(box=None, pad_edge=False, title="Layers of serving engines", title_justify="left")
    for column in ("board", "source", "layer"):
        view.add_column(column)
    for column in ("rows", "mean error", "others", "mean predicted/measured", "asked"):
        view.add_column(column, justify="right")
    measured = np.array([layer.measured for layer in layers])
    ratios = predicted_seconds(layers) / measured
    groups: dict[tuple[str, str, str], list[int]] = {}
    for place, layer in enumerate(layers):
        groups.setdefault((layer.board, layer.source, layer.kind), []).append(place)
    for (board, source, kind), places in sorted(groups.items()):
        errors = np.abs(ratios[places] - 1)
        others = errors[[not layers[place].chosen_on for place in places]]
        judged = f"{others.mean():.1%}" if others.size else ""
        figures = (str(len(places)), f"{errors.mean():.1%}", judged, f"{ratios[places].mean():.2f}", f"{BAR:g}%")
        view.add_row(load_device(BOARDS[board]).title, source, kind, *figures)
    return view
