"""Processes that measure kernels on a GPU each: ``python -m roller.profile.gpu_worker`` answers :class:`GpuRunner`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from codegen.bundle.reader import read_bundle
from hal.support.errors import InputError
from roller.profile.child import ANSWER_SECONDS, Broken, ChildRunner, Ended, Reply, replies_on_stdout, serve
from roller.profile.gpu import MeasureOptions, OperatorBench, board_of
from roller.profile.measurement import Board, Measurement


class LocalRunner:
    """Measures in this very process; a :class:`roller.profile.child.Runner`."""

    def __init__(self, device: int, options: MeasureOptions) -> None:
        self.device, self.options = device, options

    def board(self) -> Board:
        return board_of(self.device)

    def measure(self, directory: Path, ranks: Sequence[int]) -> Iterator[tuple[int, Measurement]]:
        bundle = read_bundle(directory)
        bench = OperatorBench(bundle, self.device, self.options)
        kernels = {kernel.rank: kernel for kernel in bundle.kernels}
        for rank in ranks:
            yield rank, bench.measure(kernels[rank])

    def close(self) -> None:
        return None


class GpuRunner(ChildRunner):
    """Measures on a GPU in child processes; a :class:`roller.profile.child.Runner`."""

    module: ClassVar[str] = "roller.profile.gpu_worker"

    def __init__(self, device: int, options: MeasureOptions, answer_seconds: float = ANSWER_SECONDS) -> None:
        super().__init__(answer_seconds)
        self.device, self.options = device, options

    def board(self) -> Board:
        self.running().ask({"ask": "board", "device": self.device})
        return Board(**self._needed("the board")["board"])

    def measure(self, directory: Path, ranks: Sequence[int]) -> Iterator[tuple[int, Measurement]]:
        missing = list(ranks)
        while missing:
            self.running().ask(
                {
                    "ask": "measure",
                    "device": self.device,
                    "directory": str(directory.resolve()),
                    "ranks": missing,
                    "options": asdict(self.options),
                }
            )
            self._needed(str(directory))  # the reference is ready
            is_lost = False
            while missing and not is_lost:
                try:
                    measurement = Measurement(**self.answer()["measurement"])
                except Broken as broken:
                    measurement = Measurement.refused(str(broken), tolerance=0.0, loaded="", lost=True)
                is_lost = measurement.lost
                yield missing.pop(0), measurement
            if is_lost:
                self.drop()

    def _needed(self, field: str) -> dict[str, Any]:
        """An answer without which nothing can go on."""
        try:
            return self.answer()
        except Broken as broken:
            raise InputError(field, f"cannot be measured: {broken}", "run roller profile with fewer kernels") from None


def answer(request: dict[str, Any], reply: Reply) -> None:
    """Describe the board, or measure kernels of a bundle and tell of one after another.

    Raises:
        InputError: there is no such GPU, or the bundle cannot be measured.
        Ended: the GPU takes no more work from this process.
    """
    if request["ask"] == "board":
        reply({"board": asdict(board_of(request["device"]))})
        return
    bundle = read_bundle(request["directory"])
    bench = OperatorBench(bundle, request["device"], MeasureOptions(**request["options"]))
    reply({"ready": True})
    kernels = {kernel.rank: kernel for kernel in bundle.kernels}
    for rank in request["ranks"]:
        measurement = bench.measure(kernels[rank])
        reply({"measurement": asdict(measurement)})
        if measurement.lost:
            raise Ended


def main() -> None:
    """Serve on stdin and stdout."""
    serve(sys.stdin, replies_on_stdout(), answer)


if __name__ == "__main__":
    main()
