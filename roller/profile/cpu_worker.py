"""Processes that measure kernels on this machine's cores: ``python -m roller.profile.cpu_worker`` answers
:class:`CpuRunner`.

Its threads are kept on cores of their own, which the process that asks should not be.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from codegen.bundle.reader import read_bundle
from hal.support.errors import InputError
from hal.support.threads import ONE_THREAD
from roller.profile.child import ANSWER_SECONDS, Broken, ChildRunner, Reply, replies_on_stdout, serve
from roller.profile.cpu import LOADED, CpuBench, CpuMeasureOptions, this_board
from roller.profile.measurement import Board, Measurement


class CpuRunner(ChildRunner):
    """Measures on this machine's cores in child processes; a :class:`roller.profile.child.Runner`.

    NumPy computes the reference there, on one thread: more would spin on cores that kernels are being timed on.
    """

    module: ClassVar[str] = "roller.profile.cpu_worker"
    variables: ClassVar[Mapping[str, str]] = ONE_THREAD

    def __init__(self, options: CpuMeasureOptions, answer_seconds: float = ANSWER_SECONDS) -> None:
        super().__init__(answer_seconds)
        self.options = options

    def board(self) -> Board:
        """This machine's processor; the child is ready then, so that what it imports is part of no measurement."""
        self.running().ask({"ask": "board"})
        try:
            return Board(**self.answer()["board"])
        except Broken as broken:
            raise InputError("this processor", f"cannot be described: {broken}", "report this machine") from None

    def measure(self, directory: Path, ranks: Sequence[int]) -> Iterator[tuple[int, Measurement]]:
        """A measurement for every rank of the bundle in ``directory``; all kernels take turns, so all come at the end.

        Raises:
            InputError: the operator cannot be read back, or measured.
        """
        measurements: dict[int, Measurement] = {}
        while missing := [rank for rank in ranks if rank not in measurements]:
            measurements |= self._ask(directory, missing)
        yield from ((rank, measurements[rank]) for rank in ranks)

    def _ask(self, directory: Path, ranks: list[int]) -> dict[int, Measurement]:
        """Measurements by a child of all these kernels; where it breaks, the end of the one that it was running."""
        running_rank = None
        folder = str(directory.resolve())
        self.running().ask({"ask": "measure", "directory": folder, "ranks": ranks, "options": asdict(self.options)})
        try:
            while "running" in (reply := self.answer()):
                running_rank = int(reply["running"])
        except Broken as broken:
            if running_rank is None:
                problem = f"cannot be measured: {broken}"
                raise InputError(str(directory), problem, "compile the operator again") from None
            return {running_rank: Measurement.refused(str(broken), tolerance=0.0, loaded=LOADED)}
        return {int(rank): Measurement(**fields) for rank, fields in reply["measurements"].items()}


def answer(request: dict[str, Any], reply: Reply, *, pinned: bool = False) -> None:
    """Describe this processor, or measure kernels of a bundle; ``running`` tells of each before it runs.

    Raises:
        InputError: the bundle cannot be measured.
    """
    if request["ask"] == "board":
        reply({"board": asdict(this_board())})
        return
    bundle = read_bundle(request["directory"])
    bench = CpuBench(bundle, CpuMeasureOptions(**request["options"]), pinned=pinned)
    kernels = {kernel.rank: kernel for kernel in bundle.kernels}
    measurements = bench.measure([kernels[rank] for rank in request["ranks"]], lambda rank: reply({"running": rank}))
    reply({"measurements": {rank: asdict(measurement) for rank, measurement in measurements.items()}})


def main() -> None:
    """Serve on stdin and stdout."""
    serve(sys.stdin, replies_on_stdout(), partial(answer, pinned=True))


if __name__ == "__main__":
    main()
