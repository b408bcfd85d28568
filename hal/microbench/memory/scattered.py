"""Reads of one sector each, far apart, so that every one activates another DRAM row.

Sector numbers run through a bijective hash of the thread's own number: every sector is read once, in an order that no
row buffer and no cache can use. Each thread has eight independent reads in flight and all resident threads of the
board take part, so the rate is the DRAM's and not the latency's.
"""

from __future__ import annotations

from collections.abc import Iterator

from hal.microbench.launcher import KernelText, Launch, Launcher, scalar, text
from hal.microbench.measurement import Found, Measurement, rates
from hal.microbench.memory.dram import array_bytes, filled
from hal.microbench.sampling import Settings, timed

SECTOR_BYTES = 32
_READS = 8
_BLOCK = 256

SCATTERED = text(
    "scattered_read",
    """
extern "C" __global__ void $ENTRY(const unsigned* data, unsigned* out, int bits) {
  unsigned mask = (1u << bits) - 1, thread = blockIdx.x * blockDim.x + threadIdx.x, sum = 0;
  unsigned threads = gridDim.x * blockDim.x;
  #pragma unroll
  for (int j = 0; j < $READS; ++j) {
    unsigned sector = (thread + j * threads) & mask;
    // Odd factors and shifts within the mask: each maps the sectors onto themselves.
    sector = (sector * 0x9E3779B1u) & mask; sector ^= sector >> (bits / 2);
    sector = (sector * 0x85EBCA6Bu) & mask; sector ^= sector >> (bits / 3);
    unsigned value;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(data + (unsigned long long)sector * $WORDS));
    sum ^= value;
  }
  if (sum == 0x12345678u) out[0] = sum;
}
""",
    READS=_READS,
    WORDS=SECTOR_BYTES // 4,
)


def kernels(capability: int) -> tuple[KernelText, ...]:
    """All kernels of this file; the same for every compute capability."""
    return (SCATTERED,)


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``dram.scattered`` in bytes of sectors per second."""
    bits = (array_bytes(launcher.board) // SECTOR_BYTES).bit_length() - 1
    data, out = filled(launcher, SECTOR_BYTES << bits), launcher.empty(4)
    grid = (1 << bits) // _READS // _BLOCK
    launch = Launch(launcher.kernel(SCATTERED), grid, _BLOCK, (data, out, scalar(bits)))
    samples = rates(float(SECTOR_BYTES << bits), timed(launcher, [launch], settings.repeats))
    method = (
        f"scattered_read: every {SECTOR_BYTES}-byte sector of {(SECTOR_BYTES << bits) >> 20} MiB once, hashed order"
    )
    streaming = found["dram.add"].value if "dram.add" in found else None
    path = "layers.dram.scattered_bytes_per_second"
    yield Measurement(
        key="dram.scattered",
        unit="B/s",
        samples=samples,
        method=method,
        path=path,
        low=streaming and streaming / 50,
        high=streaming,
    )
