"""Matrix multiplications as PyTorch runs them: the cuBLAS kernel of a call, its time, and the time of the whole call.

``out[b,m,n] = a[b,m,k] w[b,k,n]`` for ``torch.bmm``; with ``bias``, ``torch.nn.functional.linear``: b = 1 and w stored
as [n, k]. Two times are given: that of the kernel on the device, and that of a call on an idle device, from the event
before it to the event after it (``latency_ms`` of the NeuSight data set). All arrays have one entry per GEMM.

The model is that of ``gemm_cost``; its constants belong to the library, all that depends on the board is in its
:class:`hal.DeviceSpec`. Lee et al., *Forecasting GPU Performance for Deep Learning Training and Inference*, ASPLOS
2025, describe the data and the idea of costing a library call by the tile of its kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES
from hal.support.errors import InputError
from roller.library.arrays import Bools, Floats, Ints
from roller.library.products.gemm_cost import CONSTANTS, GemmConstants, TiledGemms, kernel_stages
from roller.library.products.gemm_tiles import TILES, generation, menu, tile_arrays, tile_index

#: Numbers of slices of k to choose from; the library uses others too, their times lie in between.
SPLITS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64)

#: Elements of k of the shortest slice that the library makes.
_SHORTEST_SLICE = 32

#: The library picks by a heuristic of its own, not by our times: candidates count by their time to minus this.
_CHOICE_POWER = 12.0

#: How sharply the floor of a call gives way to its kernel.
_FLOOR_POWER = 16.0

#: Stages of a call, in the order in which ties go to the first.
STAGES = ("compute", "dram", "power", "reduce", "launch")


@dataclass(frozen=True, kw_only=True)
class GemmLaunch:
    """The kernel of each call.

    Attributes:
        tile_m: rows of the result per block.
        tile_n: columns of the result per block.
        tile_k: elements of k per step: 8, or 32 for a ``sliced1x4`` kernel.
        threads: per block.
        splits: slices of k that blocks share between them; 1 for batched calls.
        reduce: whether a second kernel (``splitkreduce``) adds the slices.
    """

    tile_m: Floats
    tile_n: Floats
    tile_k: Floats
    threads: Floats
    splits: Floats
    reduce: Bools

    @property
    def tile_names(self) -> list[str]:
        """Names of the tiles as in the kernels' names, columns first."""
        return [TILES[index].name for index in tile_index(self.tile_m, self.tile_n, self.tile_k)]


@dataclass(frozen=True)
class GemmTimes:
    """Predicted times.

    Attributes:
        call_seconds: of the framework call, events around it, repeated for as long as a benchmark does.
        kernel_seconds: of the kernels on the device, within a step of a model.
        stage_seconds: per stage of ``STAGES``, each as if it were alone.
        bound: name of the longest stage of each call.
        launch: the kernels.
    """

    call_seconds: Floats
    kernel_seconds: Floats
    stage_seconds: dict[str, Floats]
    bound: npt.NDArray[np.str_]
    launch: GemmLaunch


def gemm_seconds(
    b: npt.ArrayLike,
    m: npt.ArrayLike,
    n: npt.ArrayLike,
    k: npt.ArrayLike,
    device: DeviceSpec,
    launch: GemmLaunch,
    *,
    bias: bool = False,
    dtype: str = "float32",
    constants: GemmConstants = CONSTANTS,
) -> GemmTimes:
    """Times of calls whose kernels are known, for example from a profile.

    Args:
        b: products of a call.
        m: rows of the result.
        n: columns of the result.
        k: elements that each result sums.
        device: the board.
        launch: the kernel of every call.
        bias: whether the calls are linear layers.
        dtype: element type.
        constants: the library's numbers.

    Raises:
        InputError: a size is below 1, or the board has no arithmetic rate for the type.
    """
    calls = _Calls.of(b, m, n, k, device=device, bias=bias, dtype=dtype, constants=constants)
    index = tile_index(launch.tile_m, launch.tile_n, launch.tile_k)
    stages = calls.stages(index, launch.splits, launch.reduce, launch.threads)
    return calls.times(stages, stages["kernel"], stages["step"], launch)


def choose_gemm(
    b: npt.ArrayLike,
    m: npt.ArrayLike,
    n: npt.ArrayLike,
    k: npt.ArrayLike,
    device: DeviceSpec,
    *,
    bias: bool = False,
    dtype: str = "float32",
    constants: GemmConstants = CONSTANTS,
) -> GemmTimes:
    """Times of calls of which only the shapes are known, and the kernel the library most likely takes.

    The launch is the fastest candidate by this model. The times are a mean over the candidates that weighs the fast
    ones most: the library's choice is near the fastest, seldom it. Arguments and errors are those of
    :func:`gemm_seconds`.
    """
    calls = _Calls.of(b, m, n, k, device=device, bias=bias, dtype=dtype, constants=constants)
    candidates = [
        (index, splits)
        for index in menu(generation(device), batched=not bias)
        for splits in (SPLITS if bias else SPLITS[:1])
    ]
    runs = [calls.candidate(index, splits) for index, splits in candidates]
    rank = np.stack([run["rank"] for run in runs])
    for row, (_, splits) in enumerate(candidates):
        if splits > 1:
            rank[row] = np.where(calls.k / splits < _SHORTEST_SLICE, np.inf, rank[row])
    best = np.argmin(rank, axis=0)
    weight = (rank.min(axis=0) / rank) ** _CHOICE_POWER
    expected = {}
    for name in ("kernel", "step"):
        seconds = np.stack([run[name] for run in runs])
        mean = (weight * seconds).sum(axis=0) / weight.sum(axis=0)
        expected[name] = np.where(np.minimum(calls.m, calls.n) == 1, calls.vector_seconds(), mean)
    rows = np.arange(len(best))
    stages = {name: np.stack([run[name] for run in runs])[best, rows] for name in runs[0] if name != "rank"}
    index = np.array([candidate[0] for candidate in candidates], dtype=np.int64)[best]
    splits = np.array([candidate[1] for candidate in candidates], dtype=np.float64)[best]
    columns = tile_arrays(index)
    launch = GemmLaunch(
        tile_m=columns["m"],
        tile_n=columns["n"],
        tile_k=columns["depth"],
        threads=columns["threads"],
        splits=splits,
        reduce=calls.reduces(splits),
    )
    return calls.times(stages, expected["kernel"], expected["step"], launch)


def framework_seconds(
    kernel: Floats, device: DeviceSpec, *, bias: bool, constants: GemmConstants = CONSTANTS
) -> Floats:
    """Seconds of calls between two GPU events on an idle device, around kernels of ``kernel`` seconds."""
    floor = device.framework_calls.linear_call_seconds if bias else device.framework_calls.matmul_call_seconds
    # The host records the second event soon after the launch: a short kernel hides behind that, a long one follows the
    # host's work before the launch.
    share = constants.floor_share_bias if bias else constants.floor_share
    return np.asarray(floor * (1 + (share + kernel / floor) ** _FLOOR_POWER) ** (1 / _FLOOR_POWER))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Calls:
    """Calls of one kind on one board: ``b`` products of ``m`` x ``k`` by ``k`` x ``n`` each, an entry per call."""

    b: Floats
    m: Floats
    n: Floats
    k: Floats
    device: DeviceSpec
    bias: bool
    dtype: str
    constants: GemmConstants

    @staticmethod
    def of(
        b: npt.ArrayLike,
        m: npt.ArrayLike,
        n: npt.ArrayLike,
        k: npt.ArrayLike,
        *,
        device: DeviceSpec,
        bias: bool,
        dtype: str,
        constants: GemmConstants,
    ) -> _Calls:
        arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(size, dtype=np.float64)) for size in (b, m, n, k)))
        sizes = dict(zip("bmnk", arrays, strict=True))
        for name, array in sizes.items():
            if not (np.isfinite(array) & (array >= 1)).all():
                raise InputError(f"gemm.{name}", "has sizes below 1", "every size is a whole number from 1 on")
        return _Calls(**sizes, device=device, bias=bias, dtype=dtype, constants=constants)

    def vector_seconds(self) -> Floats:
        """Matrix times vector has kernels of its own, which read everything once; none is in the data."""
        moved = self.b * (self.m * self.k + self.k * self.n + self.m * self.n) * DTYPE_BYTES[self.dtype]
        dram = self.device.dram
        latency = dram.latency_seconds or 500e-9
        return np.asarray(moved / dram.bandwidth_bytes_per_second + 4 * latency)

    def candidate(self, index: int, splits: int) -> dict[str, Floats]:
        """The stages of all calls if each took the tile ``index`` and cut k into ``splits`` slices."""
        slices = np.full_like(self.b, splits)
        return self.stages(np.full(len(self.b), index, dtype=np.int64), slices, self.reduces(slices))

    def reduces(self, splits: Floats) -> Bools:
        """Small results are added by a second kernel, large ones in place, slice after slice."""
        return np.asarray((splits > 1) & (self.m * self.n < 65536))

    def stages(self, index: Ints, splits: Floats, reduce: Bools, threads: Floats | None = None) -> dict[str, Floats]:
        """Seconds of every stage of calls by the tiles ``index``; ``threads`` per block are the tiles' own by
        default."""
        columns = tile_arrays(index)
        launch = TiledGemms(
            b=self.b,
            m=self.m,
            n=self.n,
            k=self.k,
            tile_m=columns["m"],
            tile_n=columns["n"],
            depth=columns["depth"],
            threads=columns["threads"] if threads is None else threads,
            registers=columns["registers"],
            shared_bytes=columns["shared_bytes"],
            splits=splits,
            reduce=reduce,
            transposed=np.full(len(self.b), self.bias),
        )
        flops = self.device.best_flops(self.dtype)
        return kernel_stages(launch, self.device, flops, DTYPE_BYTES[self.dtype], self.constants)

    def times(self, stages: dict[str, Floats], kernel: Floats, step: Floats, launch: GemmLaunch) -> GemmTimes:
        """The calls around kernels of ``kernel`` seconds, which take ``step`` seconds within a step of a model."""
        constants = self.constants
        call = framework_seconds(kernel, self.device, bias=self.bias, constants=constants)
        floors = self.device.framework_calls
        floor = floors.linear_call_seconds if self.bias else floors.matmul_call_seconds
        share = constants.floor_share_bias if self.bias else constants.floor_share
        named = {name: stages[name] for name in STAGES if name in stages}
        named["launch"] = np.full_like(kernel, share * floor)
        bound = np.array(STAGES)[np.argmax(np.stack([named[name] for name in STAGES]), axis=0)]
        return GemmTimes(call, step, named, bound, launch)
