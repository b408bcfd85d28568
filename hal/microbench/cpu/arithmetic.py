"""Clock and float32 rates of the cores: multiply-adds in registers, and a matrix product against NumPy's.

The clock by additions that each need the one before: one a cycle. The peak by as many chains of multiply-adds as the
vector registers hold, and how many instructions cores start by the same chains among others that only have to be
started: a core that shares its front end with a neighbour's work still reaches its peak, but with nothing else.
The matrix product by the inner loops of one, from panels that lie packed in the caches; NumPy's
runs in turn with it, so that both see the same clock and the same neighbours.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from hal.microbench.cpu.machine import Machine
from hal.microbench.cpu.numpy_products import NumpyProducts
from hal.microbench.cpu.vector_ir import IDLE, chains, tile_rows
from hal.microbench.measurement import Measurement, Turns, rates

_SIZE = 2048
_PATH = "throughput.float32"
_ADDITIONS = 1 << 24
_TYPICAL_CACHES = (32 << 10, 512 << 10)


def clock(machine: Machine) -> Turns:
    """``clock`` in hertz of one core."""
    out = np.zeros(8, np.int64)
    samples = []
    for _ in range(machine.settings.repeats):
        call = partial(machine.loops["count"], 1, out.ctypes.data, _ADDITIONS)
        idle = [partial(machine.loops["count"], 1, np.zeros(8, np.int64).ctypes.data, 1)] * (machine.cores.count - 1)
        samples.append(_ADDITIONS / machine.cores.seconds([call, *idle]))
        if (yield None):
            break
    method = f"{_ADDITIONS} dependent additions, one a cycle"
    yield Measurement(
        key="clock", unit="Hz", samples=tuple(samples), method=method, path="clock_hz", low=0.5e9, high=8e9, best=True
    )


def measure(machine: Machine) -> Turns:
    """``fma``, ``gemm`` and ``numpy.gemm`` in FLOP/s and ``issue`` in instructions per second, all cores together."""
    topology = machine.topology
    count, lanes = chains(topology.vector_registers), topology.lanes
    operands = np.full(2 * lanes, 0.5, np.float32)
    outs = [np.zeros(count * lanes, np.float32) for _ in topology.cpus]

    def seconds(loop: str, rounds: int) -> float:
        calls = [partial(machine.loops[loop], operands.ctypes.data, out.ctypes.data, rounds, 1) for out in outs]
        return machine.cores.seconds(calls)

    rounds = machine.passes(partial(seconds, "fma"), 1024)
    samples, starting = [], []
    for _ in range(machine.settings.repeats):
        samples.append(seconds("fma", rounds))
        starting.append(seconds("issue", rounds))
        if (yield None):
            break
    operations = 2.0 * rounds * count * lanes * machine.cores.count
    method = f"{count} chains of {topology.simd_bits}-bit multiply-adds per core"
    path = f"{_PATH}.peak_flops"
    peak = Measurement(
        key="fma",
        unit="FLOP/s",
        samples=rates(operations, tuple(samples)),
        method=method,
        path=path,
        low=1e9,
        high=1e14,
        best=True,
    )
    yield peak
    instructions = rounds * count * (1.0 + IDLE) * machine.cores.count
    method = f"the same with {IDLE} instructions that do nothing for every multiply-add"
    yield Measurement(
        key="issue",
        unit="instr/s",
        samples=rates(instructions, tuple(starting)),
        method=method,
        path="",
        low=1e8,
        high=1e15,
        best=True,
    )
    yield from _products(machine, peak.value)


def _products(machine: Machine, peak: float) -> Turns:
    product = Product(machine)
    ours, numpy = [], []
    with NumpyProducts(machine.topology.cpus, _SIZE) as products:
        for _ in range(machine.settings.repeats):
            product.seconds()  # brings its panels back, of which others' turns left nothing in any cache
            numpy.append(products.seconds())
            ours.append(product.seconds())
            if (yield None):
                break
        numpy_rates = rates(products.operations, tuple(numpy))
    method = f"inner loops of a matrix product, {product.m} x {product.n} x {product.k} per core, in turn with NumPy's"
    our_rates = rates(product.operations, tuple(ours))
    yield Measurement(
        key="gemm",
        unit="FLOP/s",
        samples=our_rates,
        method=method,
        path=f"{_PATH}.sustained_flops",
        low=0.3 * peak,
        high=1.05 * peak,
        best=True,
    )
    method = f"NumPy {np.__version__}: float32 matrix product of {_SIZE} on every core, one thread each"
    yield Measurement(
        key="numpy.gemm",
        unit="FLOP/s",
        samples=numpy_rates,
        method=method,
        path="",
        low=0.3 * peak,
        high=1.05 * peak,
        best=True,
    )


class Product:
    """Packed panels of a float32 matrix product on every core, sized for its caches."""

    def __init__(self, machine: Machine) -> None:
        topology = machine.topology
        first, second = (
            (cache.size_bytes for cache in topology.caches[:2]) if len(topology.caches) > 1 else _TYPICAL_CACHES
        )
        rows, columns = tile_rows(topology.vector_registers), 2 * topology.lanes
        # A sliver of B as large as the first cache: longer sums cost fewer additions to C, and the second cache helps.
        self.k = first // (4 * columns)
        m_tiles, n_tiles = max(1, second // 2 // (4 * self.k * rows)), 16
        self.m, self.n = m_tiles * rows, n_tiles * columns
        self._machine, self._calls, self._panels = machine, [], []
        for _ in topology.cpus:
            # Arrays are cut to whole turns of the other loops; these panels must be whole.
            a, b, c = (machine.array(4 * size + 4096) for size in (self.m * self.k, self.n * self.k, self.m * self.n))
            self._panels += [a, b, c]
            pointers = (a.ctypes.data, b.ctypes.data, c.ctypes.data)
            self._calls.append(partial(machine.loops["product"], *pointers, m_tiles, n_tiles, self.k))

    @property
    def operations(self) -> float:
        """Floating-point operations of all cores together; a multiply-add counts as two."""
        return 2.0 * self.m * self.n * self.k * len(self._calls)

    def seconds(self) -> float:
        """Processor time of the slowest core."""
        return self._machine.cores.seconds(self._calls)
