"""Synthetic traces of kinds that were once answered wrongly: jobs with collectives, backlogs, damaged kernels."""

from __future__ import annotations

from pathlib import Path

from daydream.answers import Prediction, Replay, predict, replay
from daydream.whatif import parse_pass
from tests.daydream.traces import Builder

H100 = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}


def answered(builder: Builder, folder: Path, *passes: str) -> Prediction:
    """The trace as a file, replayed and changed."""
    return predict(replayed(builder, folder), [parse_pass(text) for text in passes])


def replayed(builder: Builder, folder: Path, steps_by: str = "auto") -> Replay:
    """The trace as a file, replayed."""
    return replay(builder.write(folder / "trace.json"), steps_by=steps_by)


def means_ms(prediction: Prediction) -> tuple[float, float]:
    """Mean step before and after a change, milliseconds."""
    return prediction.before.analysis().mean_us / 1e3, prediction.after.analysis().mean_us / 1e3


class Job:
    """Steps of a data-parallel job on one thread: products, a collective on a stream of its own, the update.

    Each step lasts until the board is done (a device-wide wait), so that what the collective takes is in every step.
    """

    def __init__(
        self,
        *,
        steps: int = 3,
        products: int = 8,
        records: bool = True,
        collective: str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        arguments: dict[str, object] | None = None,
        prefix: str = "cuda",
        streams: tuple[int, int] = (7, 20),
        product_us: float = 500.0,
        exchange_us: float = 4000.0,
        lag_us: float = 1.0,
    ) -> None:
        self.trace = Builder(head=dict(H100))
        self.correlation, self.prefix, self.streams, self.lag_us = 100, prefix, streams, lag_us
        self.records, self.collective, self.arguments = records, collective, arguments or {}
        time = 0.0
        for number in range(steps):
            time = self._step(number + 5, time, products, product_us, exchange_us) + 20.0

    def _step(self, number: int, begin: float, products: int, product_us: float, exchange_us: float) -> float:
        trace, place, busy = self.trace, begin + 5.0, begin
        for _ in range(products):
            busy = self._launch("aten::mm", "sgemm", place, max(busy + 1.0, place + 15.0), product_us, 0)
            place += 15.0
        place = self._wait(place)
        exchanged = busy + self.lag_us
        exchanged = self._launch("c10d::allreduce_", self.collective, place, exchanged, exchange_us, 1)
        place = self._wait(place + 15.0)
        busy = exchanged + self.lag_us
        for _ in range(2):
            busy = self._launch("aten::_foreach_add_", "multi_tensor_apply_kernel", place, busy, 100.0, 0) + 1.0
            place += 15.0
        self.correlation += 1
        trace.launch(place, busy + 5.0 - place, correlation=self.correlation, name=f"{self.prefix}DeviceSynchronize")
        trace.step(number, begin, busy + 10.0 - begin)
        return busy + 10.0

    def _launch(self, operator: str, kernel: str, place: float, start: float, duration: float, stream: int) -> float:
        """A call at `place` with its kernel at `start`; when the kernel ends."""
        self.correlation += 1
        self.trace.operator(operator, place, 10.0)
        name = f"{self.prefix}LaunchKernel"
        self.trace.launch(place + 2.0, 6.0, correlation=self.correlation, name=name)
        given = self.arguments if stream else {}
        self.trace.kernel(kernel, start, duration, correlation=self.correlation, stream=self.streams[stream], **given)
        return start + duration

    def _wait(self, place: float) -> float:
        """A wait of one stream for the other, with the record of its event where the trace has them."""
        for name in ("EventRecord",) * self.records + ("StreamWaitEvent",):
            self.correlation += 1
            self.trace.launch(place, 2.0, correlation=self.correlation, name=f"{self.prefix}{name}")
            place += 3.0
        return place


def looped(
    steps: int = 3, kernels: int = 10, kernel_us: float = 400.0, *, marks: bool = True, **optional: str
) -> Builder:
    """Steps of equal products, each waited for; `update` ends each with a range of that name, `batch` begins it."""
    trace, correlation, begin = Builder(head=dict(H100)), 100, 0.0
    for step in range(steps):
        place, busy = begin + 5.0, begin
        if "batch" in optional:
            trace.annotation(optional["batch"], place, 4.0)
            place += 5.0
        for number in range(kernels):
            correlation += 1
            start = max(busy + 1.0, place + 15.0)
            last = "update" in optional and number == kernels - 1
            if last:
                trace.annotation(optional["update"], place - 1.0, 14.0)
            trace.operator("aten::_foreach_add_" if last else "aten::mm", place, 10.0, external=correlation)
            trace.launch(place + 2.0, 6.0, correlation=correlation, external=correlation)
            kernel = "multi_tensor_apply_kernel" if last else "sgemm"
            trace.kernel(kernel, start, kernel_us, correlation=correlation, external=correlation)
            busy, place = start + kernel_us, place + 15.0
        correlation += 1
        trace.launch(place, busy + 5.0 - place, correlation=correlation, name="cudaDeviceSynchronize")
        if marks:
            trace.step(step, begin, busy + 10.0 - begin)
        begin = busy + 20.0
    return trace


def backlog(steps: int = 3, kernels: int = 30, cpu_us: float = 400.0, kernel_us: float = 300.0) -> Builder:
    """A CPU that takes longer than its board for each step, while the board works off 30 ms of earlier work."""
    trace = Builder(head=dict(H100))
    trace.launch(2.0, 6.0, correlation=99).kernel("old_kernel", 20.0, 30_000.0, correlation=99)
    place, busy, correlation = 10.0, 30_020.0, 100
    for step in range(steps):
        begin = place
        for _ in range(kernels):
            correlation += 1
            trace.operator("aten::mm", place, cpu_us - 2.0)
            trace.launch(place + 2.0, cpu_us - 10.0, correlation=correlation)
            trace.kernel("sgemm", busy + 1.0, kernel_us, correlation=correlation)
            busy, place = busy + 1.0 + kernel_us, place + cpu_us
        trace.step(step, begin - 1.0, place - begin)
    return trace


def overlapped(
    *,
    records: bool,
    steps: int = 2,
    buckets: int = 4,
    kernels: int = 5,
    exchange_us: float = 900.0,
    prefetch: bool = False,
) -> Builder:
    """Steps whose buckets are exchanged beside the backward pass, which a thread of its own launches.

    Every collective waits for the kernels before it; the update waits for all collectives, one call each. With
    `prefetch` each collective is waited for one bucket later by the kernels that use it (as of sharded parameters).
    """
    trace, correlation, begin = Builder(head=dict(H100)), 0, 0.0

    def call(name: str, place: float, thread: int) -> float:
        nonlocal correlation
        correlation += 1
        trace.launch(place, 2.0, correlation=correlation, name=name, thread=thread)
        return place + 3.0

    def wait(place: float, thread: int) -> float:
        place = call("cudaEventRecord", place, thread) if records else place
        return call("cudaStreamWaitEvent", place, thread)

    def launch(operator: str, kernel: str, place: float, start: float, us: float, stream: int, thread: int) -> float:
        nonlocal correlation
        correlation += 1
        trace.operator(operator, place, 9.0, thread=thread)
        trace.launch(place + 1.0, 6.0, correlation=correlation, thread=thread)
        trace.kernel(kernel, start, us, correlation=correlation, stream=stream)
        return start + us

    for step in range(steps):
        place, compute, network, done = begin + 5.0, begin, begin, []
        for _ in range(buckets):
            for _ in range(kernels):
                compute = launch("MmBackward0", "sgemm", place, max(compute + 1, place + 10), 150.0, 7, 101)
                place += 10.0
            place = wait(place, 101)
            network = max(network + 1, compute + 2, place + 10)
            network = launch(
                "c10d::allreduce_", "ncclDevKernel_AllReduce_Sum_f32", place, network, exchange_us, 20, 101
            )
            place += 10.0
            place = call("cudaEventRecord", place, 101) if records else place
            done.append(network)
            if prefetch and len(done) > 1:
                place = call("cudaStreamWaitEvent", place, 101)
                compute = max(compute, done[-2] + 1)
        for _ in done:
            place = call("cudaStreamWaitEvent", place, 100)
        compute = max(compute + 1, network + 2)
        compute = launch("aten::_foreach_add_", "multi_tensor_apply_kernel", place, compute, 100.0, 7, 100)
        correlation += 1
        place += 12.0
        trace.launch(place, compute + 5.0 - place, correlation=correlation, name="cudaDeviceSynchronize", thread=100)
        trace.step(step, begin, compute + 10.0 - begin, thread=100)
        begin = compute + 20.0
    return trace
