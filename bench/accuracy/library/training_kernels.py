"""Kernels of training: cuDNN's attention, norms of three libraries, and Liger's kernels against what they replace.

cuDNN's own benchmark flushes L2 between calls, and so does Triton's, which Liger's uses. Backward passes of Liger that
end before the host has launched them are left out, and so are layers whose kernels are not described.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from hal.catalog import load_device
from roller.library.cache import flushed_cache
from roller.library.calls import RMS, LibraryCall, price
from roller.library.parts import elementwise, product, stream
from roller.library.streaming.streams import POINT_INSTRUCTIONS
from sokoban.language.expression import DTYPE_BYTES

#: Largest mean error asked for, a kind and board, in per cent; of attention by cuDNN.
BAR, ATTENTION_BAR = 12.0, 10.0

#: Boards by their names in the data.
BOARDS = {
    "NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100-sxm-80gb", "NVIDIA A100-SXM4-80GB": "a100-sxm-80gb",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
}  # fmt: skip

#: Calls of which the host is known to take longer than the kernels, in seconds: autograd's part of a backward pass.
HOST_SECONDS = 1.5e-4

#: Part of a launch's overhead that an empty kernel runs, which every kernel's own time has in it.
EMPTY_SECONDS = 1e-6

_Row = Mapping[str, Any]
_Calls = list[LibraryCall]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured call.

    Attributes:
        board: its name in the data.
        group: library, kind and direction.
        seconds: measured.
        calls: its kernels.
        bar: largest mean error asked for, in per cent.
        events: whether the time is one between two events, not one of kernels.
    """

    board: str
    group: str
    seconds: float
    calls: tuple[LibraryCall, ...]
    bar: float = BAR
    events: bool = False


def _rows(kernel: str, rows: int, columns: float, dtype: str) -> _Calls:
    return [LibraryCall(kind="rows", label=kernel, sizes=(rows, columns, 0), dtype=dtype, variant=kernel)]


def _streams(elements: int, *passes: tuple[float, float, float]) -> _Calls:
    """Element-wise kernels of mixed types: bytes that each reads and writes per element, and its instructions."""
    return [
        LibraryCall(
            kind="stream",
            label="element-wise",
            sizes=((read + written) * elements, elements, work / POINT_INSTRUCTIONS * elements, 0, 0, 0),
            variant="elementwise_kernel",
        )
        for read, written, work in passes
    ]


#: Instructions of an element-wise kernel whose tensors lie alike, of one that repeats an operand, and of one that also
#: casts as it loads, by a switch over types (``fetch_and_cast``); the last chosen on the two smaller of three rows.
_ALIKE, _REPEATED, _CAST = 4.0, 40.0, 80.0


# cuDNN's benchmark


def _attention(row: _Row) -> _Calls:
    sizes = (
        row["b"], row["heads"], row["kv_heads"], row["queries"], row["keys"], row["head_dim"], row["value_dim"],
        int(row["mask"] != "no_mask"), row["window"], 0,
    )  # fmt: skip
    dtype = "float8_e4m3fn" if row["dtype"] == "fp8" else row["dtype"]
    call = LibraryCall(kind="attention", label="attention", sizes=sizes, dtype=dtype, variant="cuDNN")
    return [call if row["direction"] == "forward" else _backward(call)]


def _backward(call: LibraryCall) -> LibraryCall:
    return LibraryCall(
        kind=call.kind, label=call.label, sizes=call.sizes, dtype=call.dtype, variant=call.variant, direction="backward"
    )


def read_attention(path: Path) -> list[Measured]:
    """cuDNN's attention; eight bits have no backward pass here."""
    return [
        Measured(
            board=row["board"],
            group=f"cuDNN, attention, {row['dtype']}, {row['direction']}",
            seconds=row["time_ms"] / 1e3,
            calls=tuple(_attention(row)),
            bar=ATTENTION_BAR,
        )
        for row in _table(path)
        if (row["dtype"], row["direction"]) != ("fp8", "backward")
    ]


def _norm(row: _Row) -> _Calls:
    sizes, backward = (row["rows"], row["columns"]), row["direction"] == "backward"
    if row["backend"] == "pytorch":
        variant = RMS if row["norm_type"] == "rms_norm" else ""
        call = LibraryCall(kind="layer_norm", label="norm", sizes=sizes, dtype=row["dtype"], variant=variant)
        return [_backward(call) if backward else call]
    library = "cudnn" if row["backend"] == "cudnn" else "inductor"
    calls = _rows(f"{library} norm{' backward' * backward}", *sizes, row["dtype"])
    if not backward:
        return calls
    units = load_device(BOARDS[row["board"]]).unit_count
    if library == "cudnn":
        return [*calls, *_rows("cudnn norm partial sums", math.ceil(sizes[1] / 32), 32 * units, "float32")]
    # Another kernel reads both tensors again and sums down the columns, in slices of rows that a third one adds.
    slices, width = inductor_columns(*sizes, units)
    tiles = math.ceil(sizes[1] / width) * slices
    return [
        *calls,
        *_rows("inductor norm columns", tiles, math.ceil(sizes[0] / slices) * width, row["dtype"]),
        stream("sum", "reduce_kernel", slices * sizes[1], sizes[1], slices * sizes[1], "float32"),
    ]


def inductor_columns(rows: int, columns: int, units: int) -> tuple[int, int]:
    """Slices of rows that TorchInductor sums down columns in, and columns of a block.

    ``reduction_split_factor`` and ``outer_config_opt`` of PyTorch 2.9 aim at blocks for all units, 32 to 512 elements a
    thread of 256 and 4 rows a step.

    >>> inductor_columns(4096, 8192, 132)
    (16, 64)
    """
    threads = units * 2048
    if rows * columns < 32 * threads:
        each = 32
    else:
        blocks = math.ceil(threads // 256 / math.ceil(columns / 128))
        each = math.ceil(rows / (4 * blocks))
        nearest = min((part for part in range(1, rows + 1) if rows % part == 0), key=lambda part: abs(part - each))
        each = max(nearest, 32) if abs(nearest - each) < 20 else each
    slices = math.ceil(rows / (4 * each))
    return slices, 16 if columns * slices // 4096 <= 8 else 64


def read_norms(path: Path) -> list[Measured]:
    """Norms of cuDNN, of PyTorch, and of PyTorch compiled."""
    names = {"cudnn": "cuDNN", "pytorch": "PyTorch", "torch_compile": "torch.compile"}
    return [
        Measured(
            board=row["board"],
            group=f"{names[row['backend']]}, {row['norm_type']}, {row['direction']}",
            seconds=row["time_ms"] / 1e3,
            calls=tuple(_norm(row)),
        )
        for row in _table(path)
    ]


# Liger's benchmark


class _Case(NamedTuple):
    """A row of Liger's benchmark: its size, its configuration, and who runs which pass."""

    x: int
    config: _Row
    ours: bool
    backward: bool
    provider: str

    @property
    def dtype(self) -> str:
        """Of the tensors; floats where the configuration does not say."""
        return str(self.config.get("dtype", "torch.float32")).removeprefix("torch.")

    @property
    def ending(self) -> str:
        """Of a kernel's name."""
        return " backward" if self.backward else ""


def _rms_norm(case: _Case) -> _Calls | None:
    rows, width = case.config["M"], DTYPE_BYTES[case.dtype]
    if case.ours:
        return _rows(f"triton rms_norm{case.ending}", rows, case.x, case.dtype)
    # To floats, squared, the mean, scaled by the row, back, scaled by the column, whose weights are floats and make the
    # result floats; and two kernels of a number a row.
    first = ((width, 4, _ALIKE), (4, 4, _ALIKE), (4, 0, _ALIKE), (4, 4, _REPEATED), (4, width, _ALIKE))
    kernels = _streams(rows * case.x, *first, (width, 4, _CAST if width < 4 else _REPEATED))
    return None if case.backward else [*kernels, *_streams(rows, (4, 4, _ALIKE), (4, 4, _ALIKE))]


def _added_norm(case: _Case) -> _Calls | None:
    rows = case.config["M"]
    if case.provider == "liger_fused_add_rms_norm":
        return _rows(f"triton fused_add_rms_norm{case.ending}", rows, case.x, case.dtype)
    if case.ours or case.backward:
        return None
    passes = ((4, 4, _ALIKE), (4, 0, _ALIKE), (4, 4, _REPEATED), (4, 4, _REPEATED))
    return [elementwise("add", rows * case.x, case.dtype, 2), *_streams(rows * case.x, *passes)]


def _layer_norm(case: _Case) -> _Calls | None:
    if case.ours:
        return _rows(f"triton layer_norm{case.ending}", case.config["M"], case.x, case.dtype)
    call = LibraryCall(kind="layer_norm", label="norm", sizes=(case.config["M"], case.x), dtype=case.dtype)
    return [_backward(call) if case.backward else call]


def _softmax(case: _Case) -> _Calls | None:
    if case.ours:
        return _rows("triton softmax", case.config["M"], case.x, case.dtype)
    return [LibraryCall(kind="softmax", label="softmax", sizes=(case.config["M"], case.x), dtype=case.dtype)]


def _relu_squared(case: _Case) -> _Calls | None:
    count = case.config["M"] * case.x
    if case.ours:
        return _rows(f"triton activation{case.ending}", case.config["M"], case.x, case.dtype)
    return None if case.backward else [elementwise(each, count, case.dtype, 1) for each in ("relu", "mul")]


def _cross_entropy(case: _Case) -> _Calls | None:
    rows = case.config["B"] * case.config["T"]
    if case.ours:
        return _rows("triton cross_entropy", rows, case.x, "float32")
    return [LibraryCall(kind="softmax", label="cross entropy", sizes=(rows, case.x))]


def _embedding(case: _Case) -> _Calls | None:
    rows, width = case.config["B"] * case.config["T"], case.config["D"]
    if case.ours:
        return [stream("embedding", "embedding", min(rows, case.x) * width, rows * width, rows * width, case.dtype)]
    return _rows("torch indexSelectLargeIndex", rows * width // 128, 128, case.dtype)


def _variation(case: _Case) -> _Calls | None:
    return _rows("triton glu", case.config["B"] * case.config["T"], case.x, "float32") if case.ours else None


def _rotary(case: _Case) -> _Calls | None:
    if not case.ours or "hidden_size" not in case.config:
        return None
    heads, kv_heads = case.config["num_q_heads"], case.config["num_kv_heads"]
    pairs = case.config["hidden_size"] // heads // 2 * (heads + kv_heads)
    return _rows("triton rotary", case.x, pairs, case.dtype)


def _gated(case: _Case) -> _Calls | None:
    config = case.config
    m, hidden, inner = config.get("B", config.get("bsz")) * case.x, config["hidden_size"], config["intermediate_size"]
    function = config["hidden_act"].partition("_")[0]
    gate = _rows("triton glu", m, inner, case.dtype)
    eager = [elementwise(function, m * inner, case.dtype, 1), elementwise("mul", m * inner, case.dtype, 2)]
    up, down = product(1, m, inner, hidden, case.dtype), product(1, m, hidden, inner, case.dtype)
    return [up, up, *(gate if case.ours else eager), down]


#: Layers whose kernels are described, and those whose backward passes are, too.
_LAYERS: Mapping[str, Callable[[_Case], _Calls | None]] = {
    "rms_norm": _rms_norm, "fused_add_rms_norm": _added_norm, "layer_norm": _layer_norm, "softmax": _softmax,
    "relu_squared": _relu_squared, "cross_entropy": _cross_entropy, "embedding": _embedding, "tvd": _variation,
    "rope": _rotary, "swiglu": _gated, "geglu": _gated,
}  # fmt: skip
_WITH_BACKWARD = ("rms_norm", "fused_add_rms_norm", "layer_norm", "relu_squared", "rope")


def _liger(row: _Row) -> _Calls | None:
    layer, backward = _LAYERS.get(row["layer"]), row["mode"] == "backward"
    if layer is None or (backward and row["layer"] not in _WITH_BACKWARD):
        return None
    ours = row["provider"] not in ("huggingface", "torch")
    return layer(_Case(int(row["x_value"]), json.loads(row["config"]), ours, backward, row["provider"]))


def read_liger(path: Path) -> list[Measured]:
    """Liger's kernels and those of PyTorch that they replace, one pass each."""
    out = []
    for row in _table(path):
        if row["metric_name"] != "speed" or row["mode"] == "full":
            continue
        calls = _liger(row)
        if calls is None or (row["mode"] == "backward" and row["value"] / 1e3 < HOST_SECONDS):
            continue
        who = {"huggingface": "PyTorch", "torch": "PyTorch", "torch_compile": "torch.compile"}
        group = f"{who.get(row['provider'], 'Liger')}, {row['layer']}, {row['mode']}"
        out.append(
            Measured(board=row["board"], group=group, seconds=row["value"] / 1e3, calls=tuple(calls), events=True)
        )
    return out


def _table(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as parquet

    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist() if path.is_file() else []
    return rows


# Tables

_FILES: Mapping[str, Callable[[Path], list[Measured]]] = {
    "attention.parquet": read_attention,
    "norms.parquet": read_norms,
    "liger.parquet": read_liger,
}


def table(data: Path, out: Path) -> Iterable[Table]:
    """Errors by board, library, kind and direction; none where the files are missing."""
    del out
    calls = [call for name, read in _FILES.items() for call in read(data / "training_kernels" / name)]
    return [kernel_table(calls)] if calls else []


def kernel_table(measured: Sequence[Measured]) -> Table:
    """A row per board, library, kind and direction."""
    view = Table(box=None, pad_edge=False, title="Kernels of training", title_justify="left")
    view.add_column("board")
    view.add_column("kernel")
    for column in ("rows", "mean error", "predicted/measured", "asked"):
        view.add_column(column, justify="right")
    groups: dict[tuple[str, str], list[Measured]] = {}
    for each in measured:
        groups.setdefault((each.board, each.group), []).append(each)
    for (board, group), rows in groups.items():
        device = load_device(BOARDS[board])
        with flushed_cache():
            prices = iter(price([call for row in rows for call in row.calls], device))
        seconds = np.array([sum(next(prices).seconds for _ in row.calls) for row in rows])
        # Events are seen with a whole launch each, kernels that queue behind others without what an empty one runs.
        launch = device.launch_overhead_seconds
        gaps = [2 * launch + (len(row.calls) - 1) * (launch - EMPTY_SECONDS) for row in rows]
        seconds += np.array([row.events for row in rows]) * gaps
        ratios = seconds / np.array([row.seconds for row in rows])
        figures = (str(len(rows)), f"{np.abs(ratios - 1).mean():.1%}", f"{ratios.mean():.2f}", f"{rows[0].bar:g}%")
        view.add_row(device.title, group, *figures)
    return view
