"""The measured 16-bit library kernels: products, attention, collectives, as operators with what each has to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from sokoban.schedule.table import Floats

#: Board as the data calls it -> its device.
BOARDS: Mapping[str, str] = {
    "a100_sxm": "a100-sxm-80gb",
    "h100_sxm": "h100-sxm-80gb",
    "l40s": "l40s",
    "b200_sxm": "b200",
}

#: Bytes per second that a board sends to the others of its node, each way, as the white papers of A100, H100 and
#: B200 have it: 12, 18 and 18 links of 25, 25 and 50 GB/s.
LINK_BYTES_PER_SECOND: Mapping[str, float] = {"a100_sxm": 300e9, "h100_sxm": 450e9, "b200_sxm": 900e9}

#: Tokens of a page of keys and values in the data.
PAGE = 64

#: Bytes of an element: nccl-tests names them otherwise than we do.
ELEMENT_BYTES: Mapping[str, int] = {"half": 2, "int8": 1}

#: What each rank sends of a collective's bytes, among n.
SENT: Mapping[str, Callable[[Floats], Floats]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
}

#: Share of the matrix units' and the links' peaks that the two-number roofline takes as reached.
REACHED = 0.8

#: Seconds that the roofline may add to every call: from one to 64 microseconds by steps of a fifth.
FLOORS = 1e-6 * 2.0 ** np.arange(0, 6.25, 0.25)

Columns = Mapping[str, np.ndarray[Any, Any]]
Operator = dict[str, Any]


@dataclass(frozen=True, eq=False, kw_only=True)
class Work:
    """Least work of calls, an entry per call: operations, and bytes through memory or over links."""

    flops: Floats
    bytes: Floats


@dataclass(frozen=True, eq=False, kw_only=True)
class Kind:
    """One kind of call.

    Attributes:
        name: of its picture.
        title: in words.
        file: of the data.
        bar: largest mean error asked for, a share.
        operators: the operators of the rows, as ``roller estimate`` reads them.
        work: what they have to do.
        over_links: whether their bytes go over the links of a node, not through memory.
    """

    name: str
    title: str
    file: str
    bar: float
    operators: Callable[[Columns], list[Operator]]
    work: Callable[[Columns], Work]
    over_links: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Calls:
    """The measured calls of one kind on one board.

    Attributes:
        board: as the data calls it.
    """

    kind: Kind
    board: str
    rows: Columns

    @property
    def device(self) -> DeviceSpec:
        """The board's spec."""
        return load_device(BOARDS[self.board])

    @property
    def seconds(self) -> Floats:
        """Measured."""
        return np.asarray(self.rows["latency_ms"], np.float64) / 1e3

    @property
    def operators(self) -> list[Operator]:
        """The calls as operators."""
        return self.kind.operators(self.rows)

    def roofline(self) -> Floats:
        """Seconds by two numbers of a board: a rate and a constant.

        The rate is 80 % of the matrix units' peak, or what DRAM sustains, or 80 % of the links' datasheet, whichever
        takes longer; the constant is the one of :data:`FLOORS` that suits these very calls best.
        """
        work, device = self.kind.work(self.rows), self.device
        rates = device.best_matrix_instruction("bfloat16")
        assert rates is not None, device.name
        if self.kind.over_links:
            moved = REACHED * LINK_BYTES_PER_SECOND[self.board]
        else:
            moved = device.dram.bandwidth_bytes_per_second
        longest, measured = np.maximum(work.flops / (REACHED * rates.peak_flops), work.bytes / moved), self.seconds
        errors = [np.abs((longest + floor) / measured - 1).mean() for floor in FLOORS]
        return np.asarray(longest + FLOORS[int(np.argmin(errors))])


def read_calls(data: Path, kind: Kind) -> list[Calls]:
    """The rows of one kind, board by board in the order of :data:`BOARDS`; none where the file is absent."""
    import pyarrow.parquet as parquet

    path = data / "tensor_core" / f"{kind.file}.parquet"
    if not path.is_file():
        return []
    table = parquet.read_table(path)
    columns = {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}
    out = []
    for board in BOARDS:
        mine = columns["board"] == board
        if mine.any():
            out.append(Calls(kind=kind, board=board, rows={name: part[mine] for name, part in columns.items()}))
    return out


# Matrix products


def _products(rows: Columns) -> list[Operator]:
    """PyTorch's ``linear``: the weights lie as (n, k)."""
    return _objects(rows, {"m": "m", "n": "n", "k": "k"}, op="matmul", dtype="bfloat16", transpose_b=True)


def _product_work(rows: Columns) -> Work:
    m, n, k = (rows[name].astype(np.float64) for name in ("m", "n", "k"))
    return Work(flops=2 * m * n * k, bytes=2 * (m * k + n * k + m * n))


# Attention


def _prefill(rows: Columns) -> list[Operator]:
    names = {"batch_size": "b", "num_heads": "heads", "num_key_value_heads": "kv_heads", "query_length": "queries"}
    names |= {"head_dim": "head_dim", "window_size": "window"}
    return _objects(rows, names, op="attention", dtype="bfloat16", causal=True, page=PAGE)


def _decode(rows: Columns) -> list[Operator]:
    """One new token after those in the cache; it sees itself, too."""
    names = {"batch_size": "b", "num_heads": "heads", "num_key_value_heads": "kv_heads", "keys": "keys"}
    names |= {"head_dim": "head_dim", "window_size": "window"}
    keys = {**rows, "keys": rows["cache_length"] + 1}
    return _objects(keys, names, op="attention", dtype="bfloat16", queries=1, causal=True, page=PAGE)


def _encoder(rows: Columns) -> list[Operator]:
    names = {"batch_size": "b", "num_heads": "heads", "query_length": "queries", "head_dim": "head_dim"}
    return _objects(rows, names, op="attention", dtype="bfloat16")


def _attention_work(rows: Columns) -> Work:
    """Two products of all pairs of a query and a key that it sees; queries, keys, values and results once."""
    b, heads, size = (rows[name].astype(np.float64) for name in ("batch_size", "num_heads", "head_dim"))
    kv_heads = rows.get("num_key_value_heads", rows["num_heads"]).astype(np.float64)
    window = rows["window_size"].astype(np.float64) if "window_size" in rows else np.zeros_like(b)
    if "cache_length" in rows:
        queries, keys = np.ones_like(b), rows["cache_length"].astype(np.float64) + 1
    else:
        queries = keys = rows["query_length"].astype(np.float64)
    seen = np.where(window > 0, np.minimum(window, keys), keys)
    # The first of the queries that mask anything see keys - queries + 1, each one more, until the window is full.
    growing = np.clip(seen - (keys - queries), 0, queries)
    is_causal = "num_key_value_heads" in rows
    pairs = queries * seen - growing * (growing - 1) / 2 if is_causal else queries * keys
    read = np.where(queries == 1, seen, keys)
    return Work(flops=4 * b * heads * pairs * size, bytes=2 * b * size * (2 * heads * queries + 2 * kv_heads * read))


# Collectives


def _collectives(rows: Columns) -> list[Operator]:
    columns = {**rows, "bytes": _rank_bytes(rows).astype(np.int64)}
    dtypes = {"half": "float16", "int8": "int8"}
    objects = _objects(columns, {"bytes": "bytes", "num_gpus": "ranks"})
    return [
        {"op": str(op), **each, "dtype": dtypes[str(dtype)]}
        for op, dtype, each in zip(rows["collective"].tolist(), rows["dtype"].tolist(), objects, strict=True)
    ]


def _rank_bytes(rows: Columns) -> Floats:
    sizes = np.array([ELEMENT_BYTES[str(dtype)] for dtype in rows["dtype"].tolist()], np.float64)
    return np.asarray(rows["elements_total"] * sizes)


def _collective_work(rows: Columns) -> Work:
    ranks, names = rows["num_gpus"].astype(np.float64), rows["collective"].astype(np.str_)
    shares = np.select([names == name for name in SENT], [share(ranks) for share in SENT.values()])
    return Work(flops=np.zeros_like(ranks), bytes=_rank_bytes(rows) * shares)


def _objects(rows: Columns, names: Mapping[str, str], **fixed: Any) -> list[Operator]:
    columns: Sequence[list[Any]] = [rows[name].tolist() for name in names]
    return [{**fixed, **dict(zip(names.values(), values, strict=True))} for values in zip(*columns, strict=True)]


#: Every kind of the data.
KINDS: tuple[Kind, ...] = (
    Kind(name="gemm", title="16-bit products", file="gemm", bar=0.08, operators=_products, work=_product_work),
    Kind(
        name="prefill", title="16-bit attention, prefill", file="attention_prefill", bar=0.12,
        operators=_prefill, work=_attention_work,
    ),
    Kind(
        name="decode", title="16-bit attention, decode", file="attention_decode", bar=0.12,
        operators=_decode, work=_attention_work,
    ),
    Kind(
        name="encoder", title="16-bit attention, encoder", file="attention_encoder", bar=0.12,
        operators=_encoder, work=_attention_work,
    ),
    Kind(
        name="collectives", title="Collectives", file="collectives", bar=0.12,
        operators=_collectives, work=_collective_work, over_links=True,
    ),
)  # fmt: skip
