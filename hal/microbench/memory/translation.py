"""Address translation: how much memory a unit reads without waiting for it, and what a miss costs.

Reach: one thread follows pointers through one line of each of more and more pages of 2 MiB; the lines stay in L2, so
what grows is translation alone. Miss: every unit reads lines of far more pages than that with 1024 threads; the time
per read and unit, over that of the same reads within reach, is the time between two of its misses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.microbench.launcher import KernelText, Launch, Launcher, scalar, text
from hal.microbench.measurement import Found, Measurement
from hal.microbench.memory import latency
from hal.microbench.memory.latency import CHASE, chase, linked
from hal.microbench.sampling import Settings, timed

PAGE_BYTES = 2 << 20
_MOST_PAGES = 4096
#: Latency over that of a few pages from which reads wait for translations.
_WAITS = 1.25

PAGES = text(
    "translation_pages",
    """
extern "C" __global__ void $ENTRY(const unsigned* data, unsigned* out, int pages, int rounds) {
  unsigned sum = 0, page = (threadIdx.x * 97u + blockIdx.x * 31u) % pages;
  for (int i = 0; i < rounds; ++i) {
    // One of 64 lines of the page: all threads at the same few lines would wait for one slice of L2.
    unsigned line = (threadIdx.x * 37u + blockIdx.x * 11u + i + page) & 63u;
    unsigned long long offset = (unsigned long long)page * $PAGE_WORDS + line * 32u;
    unsigned value;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(data + offset));
    sum ^= value;
    page += 193u; if (page >= pages) page %= pages;
  }
  if (sum == 0x12345678u) out[0] = sum;
}
""",
    PAGE_WORDS=PAGE_BYTES // 4,
)

_ROUNDS = 2048
_THREADS = 1024


def kernels(capability: int) -> tuple[KernelText, ...]:
    """All kernels of this file; the same for every compute capability."""
    return (*latency.kernels(capability), PAGES)


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``dram.reach`` in bytes and ``dram.miss`` in seconds; neither where reads never wait."""
    pages = min(_MOST_PAGES, launcher.board.free_bytes // 2 // PAGE_BYTES)
    if pages < 16:
        return
    buffer, out = launcher.empty(pages * PAGE_BYTES), launcher.empty(8)
    counts = list(_counts(pages))
    latencies = {count: _latency(launcher, buffer, count, out, settings) for count in counts}
    reach = reach_pages(latencies)
    if reach is None or 4 * reach > pages:
        return
    method = f"latency_chase: one line per 2 MiB page, {counts[0]} to {counts[-1]} pages, knee at {_WAITS} x"
    path = "layers.dram.translation_reach_bytes"
    yield Measurement(
        key="dram.reach",
        unit="B",
        samples=(float(reach * PAGE_BYTES),),
        method=method,
        path=path,
        low=8 << 20,
        high=64 << 30,
    )
    samples = _miss_seconds(launcher, buffer, reach, out, settings)
    if min(samples) > 0:
        method = f"translation_pages: all units read {4 * reach} pages, less the same within {max(1, reach // 2)}"
        path = "layers.dram.translation_miss_seconds"
        yield Measurement(key="dram.miss", unit="s", samples=samples, method=method, path=path, low=0.1e-9, high=1e-6)


def reach_pages(latencies: Mapping[int, float]) -> int | None:
    """The most pages before reads take 1.25 times as long as within few; None where they never do."""
    counts = sorted(latencies)
    base = float(np.median([latencies[count] for count in counts[:3]]))
    for previous, count in pairwise(counts):
        if latencies[count] > _WAITS * base:
            return previous
    return None


def _counts(pages: int) -> Iterator[int]:
    """4, 6, 8, 12, 16, ... pages."""
    power = 4
    while power <= pages:
        yield power
        if power * 3 // 2 <= pages:
            yield power * 3 // 2
        power *= 2


def _cells(count: int) -> NDArray[np.int64]:
    """One 8-byte cell per page, each in another line of its page, so that the lines spread over the sets of L2."""
    page = np.arange(count)
    return (page * PAGE_BYTES + page * 128 % PAGE_BYTES) // 8


def _latency(launcher: Launcher, buffer: Any, count: int, out: Any, settings: Settings) -> float:
    linked(launcher, _cells(count), buffer)
    steps = max(8192, 2 * count)
    walk = chase(launcher, CHASE, buffer, 0, steps, out)
    return float(np.median(timed(launcher, [walk], min(5, settings.repeats)))) / steps


def _miss_seconds(launcher: Launcher, buffer: Any, reach: int, out: Any, settings: Settings) -> tuple[float, ...]:
    def per_read(pages: int) -> tuple[float, ...]:
        arguments = (buffer, out, scalar(pages), scalar(_ROUNDS))
        launch = Launch(launcher.kernel(PAGES), launcher.board.units, _THREADS, arguments)
        return tuple(s / (_ROUNDS * _THREADS) for s in timed(launcher, [launch], settings.repeats))

    inside, outside = per_read(max(1, reach // 2)), per_read(4 * reach)
    base = float(np.median(inside))
    # A quarter of the pages are within reach at any time.
    return tuple((second - base) / 0.75 for second in outside)
