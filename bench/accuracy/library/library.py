"""The library models against measured PyTorch calls: the kernel's tile known, and the shape alone.

Every board in the files that :func:`hal.load_device` knows is evaluated, whether or not its rows have been there when
the models were made. Figures are the mean of ``|predicted - measured| / measured`` over all calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.accuracy.library.left_out import fitted_without
from bench.pictures import draw_comparison
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from hal.support.tables import new_table
from roller.library.calls import LibraryCall, price
from roller.library.parts import convolution, elementwise, product
from roller.library.products.gemm import GemmLaunch, gemm_seconds
from sokoban.schedule.table import Floats

#: Class -> (its file, the error that its issue asks for in per cent).
CLASSES: Mapping[str, tuple[str, float]] = {
    "bmm": ("bmm", 12),
    "linear": ("linear", 12),
    "element-wise": ("elem", 10),
    "softmax": ("softmax", 13),
    "layer norm": ("ln", 15),
    "convolution": ("conv", 20),
}
TILE_BAR = 8.0

#: Classes whose constants were also chosen without each board in turn -> what ``without.toml`` calls them.
WITHOUT: Mapping[str, str] = {
    "bmm": "float32 products", "linear": "float32 products", "softmax": "softmax", "layer norm": "layer norm",
}  # fmt: skip

#: Largest mean error asked of a board that no constant was chosen on, in per cent.
WITHOUT_BAR = 12.0

#: Inference boards of little power, whose clocks fall under load: half as much again is asked of them.
LENIENT = ("p4", "t4")

Columns = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, eq=False)
class Score:
    """The calls of one class on one board, in seconds.

    Attributes:
        bar: largest mean error asked for, a share.
        left_out: by the model with constants chosen without the board; None where there are none.
    """

    operation: str
    device: str
    predicted: Floats
    measured: Floats
    bar: float
    left_out: Floats | None = None

    @property
    def errors(self) -> Floats:
        """``|predicted - measured| / measured`` by call."""
        return np.abs(self.predicted - self.measured) / self.measured

    @property
    def left_out_error(self) -> str:
        """The mean error with constants chosen without the board, in per cent; empty where there are none."""
        if self.left_out is None:
            return ""
        return f"{np.mean(np.abs(self.left_out - self.measured) / self.measured):.1%}"


def read_calls(data: Path, file: str) -> dict[str, Columns]:
    """The columns of one file, by device name as the profiler gives it; empty where there is no such file."""
    import pyarrow.parquet as parquet

    path = data / "library_kernels" / f"{file}.parquet"
    if not path.is_file():
        return {}
    table = parquet.read_table(path)
    columns = {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}
    return {
        str(device): {name: values[columns["device"] == device] for name, values in columns.items()}
        for device in dict.fromkeys(columns["device"].tolist())
    }


def boards(names: Iterable[str]) -> dict[str, DeviceSpec]:
    """Those devices that have a spec, by the name in the data."""
    out = {}
    for name in names:
        try:
            out[name] = load_device(name)
        except InputError:
            continue
    return out


def with_tile(data: Path) -> list[Score]:
    """Matrix products whose kernel is known: its tile from the name, slices of k and threads from the launch."""
    out = []
    for operation in ("bmm", "linear"):
        calls = read_calls(data, operation)
        for name, device in boards(calls).items():
            columns = calls[name]
            has_tile = ~np.isnan(columns["tile_m"].astype(np.float64))
            rows = {key: values[has_tile] for key, values in columns.items()}
            bias = operation == "linear"
            b, m, n, k = (rows[key].astype(np.float64) for key in ("b", "m", "n", "k"))
            times = gemm_seconds(b, m, n, k, device, launch_of(rows, splits=bias), bias=bias)
            out.append(_score(operation, device, times.call_seconds, rows, TILE_BAR))
    return out


def launch_of(rows: Columns, *, splits: bool) -> GemmLaunch:
    """The launches of recorded kernels; the depth of a step stands in the name of a kernel (``_sliced1x4``) only."""
    names = rows["kernel"].astype(np.str_)
    deep = (np.char.find(names, "sliced") >= 0) | (np.char.find(names, "32x32x32") >= 0)
    slices = rows["grid_z"].astype(np.float64) if splits else np.ones(len(names))
    return GemmLaunch(
        tile_m=rows["tile_m"].astype(np.float64),
        tile_n=rows["tile_n"].astype(np.float64),
        tile_k=np.where(deep, 32.0, 8.0),
        threads=rows["block_x"].astype(np.float64) * rows["block_y"].astype(np.float64),
        splits=slices,
        reduce=np.char.find(rows["all_kernels"].astype(np.str_), "splitkreduce") >= 0,
    )


def with_shape(data: Path) -> list[Score]:
    """All classes, nothing known but operator and shape: what ``roller estimate --implementation library`` prices."""
    out = []
    for operation, (file, bar) in CLASSES.items():
        calls = read_calls(data, file)
        for name, device in boards(calls).items():
            made = MAKERS[operation](calls[name])
            score = _score(operation, device, _call_seconds(made, device), calls[name], bar)
            chosen = fitted_without(device.name, WITHOUT[operation]) if operation in WITHOUT else None
            if chosen is not None:
                with chosen:
                    score = replace(score, left_out=_call_seconds(made, device))
            out.append(score)
    return out


def _call_seconds(calls: Sequence[LibraryCall], device: DeviceSpec) -> Floats:
    return np.array([call.call_seconds for call in price(calls, device)])


def _score(operation: str, device: DeviceSpec, predicted: Floats, rows: Columns, percent: float) -> Score:
    bar = percent / 100 * (1.5 if device.name in LENIENT else 1.0)
    return Score(operation, device.name, predicted, rows["latency_ms"].astype(np.float64) / 1e3, bar)


def _products(rows: Columns) -> list[LibraryCall]:
    batched = str(rows["op"][0]) == "bmm"
    sizes = zip(*(rows[key].tolist() for key in ("b", "m", "n", "k")), strict=True)
    return [product(b, m, n, k, "float32", batched=batched, bias=not batched) for b, m, n, k in sizes]


def _convolutions(rows: Columns) -> list[LibraryCall]:
    """The files have no groups and no dilation."""
    names = {"b": "n", "c": "c", "f": "f", "h": "h", "w": "w", "kh": "kh", "kw": "kw", "stride": "stride"}
    names |= {"out_h": "out_h", "out_w": "out_w"}
    columns = zip(*(rows[key].tolist() for key in names), strict=True)
    fixed = {"groups": 1, "dilation": 1}
    return [convolution(dict(zip(names.values(), row, strict=True)) | fixed, "float32") for row in columns]


def _elementwise(rows: Columns) -> list[LibraryCall]:
    """``addu`` is an addition of a number."""
    out = []
    for op, b, h in zip(rows["op"].tolist(), rows["b"].tolist(), rows["h"].tolist(), strict=True):
        number = op in ("addu", "mulu", "powu", "divu")
        inputs = 2 if op in ("add", "mul", "pow", "div") else 1
        out.append(elementwise(op.removesuffix("u") if number else op, b * h, "float32", inputs, number=number))
    return out


def _rows(kind: str) -> Callable[[Columns], list[LibraryCall]]:
    return lambda rows: [
        LibraryCall(kind=kind, label=kind, sizes=(b, h))
        for b, h in zip(rows["b"].tolist(), rows["h"].tolist(), strict=True)
    ]


#: Class -> what makes library calls of the columns of its file.
MAKERS: Mapping[str, Callable[[Columns], list[LibraryCall]]] = {
    "bmm": _products,
    "linear": _products,
    "element-wise": _elementwise,
    "softmax": _rows("softmax"),
    "layer norm": _rows("layer_norm"),
    "convolution": _convolutions,
}


# Tables


def table(data: Path, out: Path) -> Iterable[Table]:
    """Both tables, and their pictures in ``out``."""
    tile, shape = with_tile(data), with_shape(data)
    scatter(tile, out / "library_tile.png", "PyTorch calls, tile of the kernel known", by="device")
    scatter(shape, out / "library_shape.png", "PyTorch calls, shape alone known", by="operation")
    return [
        score_table(tile, "Library calls, the kernel's tile known"),
        score_table(shape, "Library calls, the shape alone known"),
    ]


def score_table(scores: Sequence[Score], title: str) -> Table:
    """A row per class and board."""
    numbers = ("calls", "mean error", "asked", "median error", "predicted/measured", "without it", "asked")
    view = new_table(("class", "board"), numbers, ("",), title=title)
    for position, each in enumerate(scores):
        mean = float(each.errors.mean())
        last = position + 1 == len(scores) or scores[position + 1].operation != each.operation
        view.add_row(
            each.operation,
            each.device,
            str(len(each.measured)),
            f"{mean:.1%}",
            f"{100 * each.bar:g}%",
            f"{np.median(each.errors):.1%}",
            f"{np.exp(np.log(each.predicted / each.measured).mean()):.3f}",
            each.left_out_error,
            f"{WITHOUT_BAR:g}%" if each.left_out_error else "",
            "" if mean <= each.bar else "above",
            end_section=last,
        )
    return view


def scatter(scores: Sequence[Score], path: Path, title: str, *, by: str) -> None:
    """Predicted over measured times as a PNG: a panel per board or per class, a colour per the other."""
    other = "operation" if by == "device" else "device"
    panels = {}
    for name in dict.fromkeys(getattr(score, by) for score in scores):
        mine = [score for score in scores if getattr(score, by) == name]
        panels[f"{name}: {sum(len(score.measured) for score in mine)} calls"] = {
            f"{getattr(score, other)}: {score.errors.mean():.1%}": (score.measured, score.predicted) for score in mine
        }
    draw_comparison(path, title, panels)
