"""A launcher that computes times from a model of a board, and keeps no data but what the models need."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.microbench.launcher import Board, KernelText, Launch, MicrobenchError, Work
from hal.microbench.memory.scattered import SECTOR_BYTES
from hal.microbench.units.arithmetic import BLOCK, CHAINS, INSTRUCTIONS, UNROLL
from hal.microbench.units.matrix import FRAGMENTS

V100 = Board(
    title="Tesla V100-SXM2-16GB",
    compute_capability=(7, 0),
    units=80,
    lanes=32,
    threads_per_block=1024,
    threads_per_unit=2048,
    blocks_per_unit=32,
    registers_per_unit=65536,
    shared_per_block=49152,
    shared_opt_in=98304,
    shared_per_unit=98304,
    shared_reserved=0,
    grid=(2147483647, 65535, 65535),
    l2_bytes=6 << 20,
    memory_bytes=16 << 30,
    free_bytes=15 << 30,
    clock_hz=1.53e9,
    memory_clock_hz=877e6,
    memory_bus_bits=4096,
    software="a model",
)
NEW_BOARD = replace(V100, title="NVIDIA XYZ 9000", compute_capability=(8, 0))


@dataclass
class Truth:
    """The numbers of the modelled board, which the micro-benchmarks should find."""

    dram: float = 800e9
    scattered: float = 250e9
    transaction: int = 32
    l1_latency: float = 28e-9
    l2_latency: float = 140e-9
    dram_latency: float = 300e-9
    reach_pages: int | None = None
    miss: float = 12e-9
    l2: float = 2.1e12
    shared: float = 13e12
    banks: int = 32
    width: int = 4
    pass_seconds: float = 1.3e-9
    shared_latency: float = 14e-9
    lanes: dict[str, float] = field(
        default_factory=lambda: {
            "float32": 64,
            "float64": 32,
            "float16": 64,
            "bfloat16": 64,
            "int8": 64,
            "int32": 64,
        }
    )
    efficiency: float = 0.97
    clock: float = 1.5e9
    hot_clock: float = 1.3e9
    hot_after: float = 10.0
    wmma_cycle: float = 1024
    launch: float = 2.5e-6
    block: float = 1.56e-9
    barrier: float = 15e-9
    portion: int = 256
    spills_from: int = 200
    gemm: float | None = None


class Buffer:
    """Bytes on the modelled board; a round trip through ``cells`` of them may be linked."""

    def __init__(self, size: int) -> None:
        self.size, self.cells = size, 0
        self.values: NDArray[Any] | None = None


class FakeKernel:
    """A kernel with what the model of a compiler says of it."""

    def __init__(self, text: KernelText, launcher: FakeLauncher) -> None:
        self.text, self._launcher = text, launcher

    @property
    def registers(self) -> int:
        return self.text.registers or 32

    @property
    def local_bytes(self) -> int:
        m, n = map(int, re.findall(r"\d+", self.text.entry)[:2])
        return 16 if m * n + m + n >= self._launcher.truth.spills_from else 0

    def resident_blocks(self, threads: int) -> int:
        portion, board = self._launcher.truth.portion, self._launcher.board
        per_warp = -(-self.registers * 32 // portion) * portion
        return min(board.blocks_per_unit, board.registers_per_unit // 4 // per_warp * 4 // (threads // 32))


class FakeLauncher:
    """The model as a `hal.microbench.Launcher`."""

    def __init__(self, truth: Truth | None = None, board: Board = V100, broken: Sequence[str] = ()) -> None:
        self.truth, self.board, self.broken = truth or Truth(), board, broken
        self.busy_seconds = 0.0
        self.replaced = False
        self.ahead: list[str] = []
        self.released = 0

    def kernel(self, kernel: KernelText) -> FakeKernel:
        if kernel.entry in self.broken:
            raise MicrobenchError(f"{kernel.entry} does not compile: broken")
        return FakeKernel(kernel, self)

    def array(self, values: NDArray[Any]) -> Buffer:
        buffer = Buffer(values.nbytes)
        buffer.values = values
        return buffer

    def empty(self, size_bytes: int) -> Buffer:
        return Buffer(size_bytes)

    def host(self, buffer: Buffer, dtype: str) -> NDArray[Any]:
        assert buffer.values is not None
        return buffer.values.astype(dtype)

    def release(self) -> None:
        self.released += 1

    def seconds(self, work: Sequence[Work], *, ahead: bool = False) -> float:
        if ahead:
            self.ahead += [each.kernel.text.entry for each in work if isinstance(each, Launch)]
        total = 0.0
        for each in work:
            if not isinstance(each, Launch):
                taken = each()
                assert isinstance(taken, float)
                total += taken
                continue
            model = next(m for name, m in _MODELS.items() if each.kernel.text.entry.startswith(name))
            total += model(self, each)
        self.busy_seconds += total
        return total

    @property
    def clock(self) -> float:
        return self.truth.hot_clock if self.busy_seconds > self.truth.hot_after else self.truth.clock

    def matmul(self, size: int, dtype: str) -> Callable[[], object] | None:
        rate = self.truth.gemm
        if rate is None:
            return None
        share = 6.0 if dtype == "float16" else 1.0
        return lambda: 2.0 * size**3 / (rate * share * self.clock / self.truth.clock)

    def torch(self) -> Any:
        return None


def _dram(launcher: FakeLauncher, launch: Launch) -> float:
    arrays = {"dram_fill": 1, "dram_read": 1, "dram_copy": 2, "dram_add": 3}[launch.kernel.text.entry]
    launcher.replaced = launch.kernel.text.entry == "dram_read"
    return float(launch.arguments[-1]) * 16 * arrays / launcher.truth.dram


def _scattered(launcher: FakeLauncher, launch: Launch) -> float:
    sectors = 1 << int(launch.arguments[-1])
    assert launch.grid * launch.block * 8 == sectors
    return sectors * SECTOR_BYTES / launcher.truth.scattered


def _strided(launcher: FakeLauncher, launch: Launch) -> float:
    count, words = (int(value) for value in launch.arguments[2:])
    return count * max(4, min(4 * words, launcher.truth.transaction)) / launcher.truth.dram


def _link(launcher: FakeLauncher, launch: Launch) -> float:
    cells, numbers, following, count = launch.arguments
    assert numbers.values is not None and following.values is not None
    assert int(numbers.values.max()) * 8 < cells.size
    at, seen = 0, set()
    while at not in seen:  # one round trip through every cell
        seen.add(at)
        at = int(following.values[at])
    assert len(seen) == int(count)
    cells.cells = int(count)
    return 1e-6


def _chase(launcher: FakeLauncher, launch: Launch) -> float:
    truth, cells, steps = launcher.truth, launch.arguments[0], int(launch.arguments[2])
    if launch.kernel.text.entry.endswith("l1"):
        return steps * truth.l1_latency
    waits = truth.dram_latency if launcher.replaced else truth.l2_latency
    launcher.replaced = False
    if cells.size > launcher.board.l2_bytes and truth.reach_pages and cells.cells > truth.reach_pages:
        waits += 150e-9
    return steps * waits


def _pages(launcher: FakeLauncher, launch: Launch) -> float:
    pages, rounds = (int(value) for value in launch.arguments[2:])
    reach = launcher.truth.reach_pages or pages
    misses = max(0.0, 1 - reach / pages)
    return rounds * launch.block * (1e-9 + misses * launcher.truth.miss)


def _l2_read(launcher: FakeLauncher, launch: Launch) -> float:
    count, step, rounds = (int(value) for value in launch.arguments[2:])
    assert count * 16 <= launcher.board.l2_bytes // 2
    assert 0 < step < count and count % (launch.grid * launch.block) == 0
    return 64.0 * rounds * launch.grid * launch.block / launcher.truth.l2


def _shared_read(launcher: FakeLauncher, launch: Launch) -> float:
    return 256.0 * int(launch.arguments[1]) * launch.grid * launch.block / launcher.truth.shared


def _shared_chase(launcher: FakeLauncher, launch: Launch) -> float:
    truth = launcher.truth
    steps, distance, shift = (int(value) for value in launch.arguments[1:])
    offsets = [lane * distance + (shift if lane & 1 else 0) for lane in range(32)]
    assert max(offsets) + 4 <= launch.shared
    rows: dict[int, set[int]] = {}
    for offset in offsets:
        rows.setdefault(offset // truth.width % truth.banks, set()).add(offset // (truth.width * truth.banks))
    passes = max(len(each) for each in rows.values())
    return steps * (truth.shared_latency + (passes - 1) * truth.pass_seconds)


def _fma(launcher: FakeLauncher, launch: Launch) -> float:
    instruction = next(i for i in INSTRUCTIONS if launch.kernel.text.entry == f"fma_{i.dtype}")
    assert launch.block == BLOCK and launch.grid == launcher.board.units
    lanes = launcher.truth.lanes[instruction.dtype] * launcher.truth.efficiency
    cycles = CHAINS * UNROLL * int(launch.arguments[3]) * BLOCK / lanes
    seconds = cycles / launcher.clock
    launch.arguments[2].values = np.array([cycles, seconds * 1e9])
    return seconds


def _wmma(launcher: FakeLauncher, launch: Launch) -> float:
    fragment = next(f for f in FRAGMENTS if launch.kernel.text.entry == f"wmma_{f.input_dtype}_{f.accumulate_dtype}")
    m, n, k = fragment.shape
    operations = 2.0 * m * n * k * 4 * int(launch.arguments[2]) * launch.grid * launch.block / 32
    return operations / (0.9 * launcher.truth.wmma_cycle * launcher.board.units * launcher.truth.clock)


def _empty(launcher: FakeLauncher, launch: Launch) -> float:
    return launcher.truth.launch + (launch.grid - 1) * launcher.truth.block


def _barrier(launcher: FakeLauncher, launch: Launch) -> float:
    return int(launch.arguments[1]) * launcher.truth.barrier


_MODELS: dict[str, Callable[[FakeLauncher, Launch], float]] = {
    "dram_": _dram,
    "scattered_": _scattered,
    "transaction_": _strided,
    "latency_link": _link,
    "latency_chase": _chase,
    "translation_pages": _pages,
    "l2_read": _l2_read,
    "shared_read": _shared_read,
    "shared_chase": _shared_chase,
    "fma_": _fma,
    "wmma_": _wmma,
    "launch_empty": _empty,
    "barrier_loop": _barrier,
}
