"""Predicted times of schedules, and what they are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hal.support.records import quick
from sokoban.schedule.table import Floats, Ints


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted time of one schedule.

    Attributes:
        seconds: launch overhead included.
        bound: the stage that sets the pace.
        stage_seconds: time of every stage for the whole kernel, by name.
        registers: estimated 32-bit registers per thread.
        shared_bytes: shared memory per block.
        blocks_per_unit: resident blocks of a unit.
        wave_count: rounds of blocks, the last one counted in full.
    """

    seconds: float
    bound: str
    stage_seconds: Mapping[str, float]
    registers: int
    shared_bytes: int
    blocks_per_unit: int
    wave_count: int


@dataclass(frozen=True, eq=False, kw_only=True)
class EstimateTable:
    """Estimates of all schedules of a table; see :class:`Estimate`. Schedules that cannot run take infinite time."""

    seconds: Floats
    stage_seconds: Mapping[str, Floats]
    registers: Ints
    shared_bytes: Ints
    blocks_per_unit: Ints
    wave_count: Ints

    def rows_of(self, which: Ints) -> EstimateTable:
        """Some rows as a table of their own, in the order given."""
        return EstimateTable(
            seconds=self.seconds[which],
            stage_seconds={name: column[which] for name, column in self.stage_seconds.items()},
            registers=self.registers[which],
            shared_bytes=self.shared_bytes[which],
            blocks_per_unit=self.blocks_per_unit[which],
            wave_count=self.wave_count[which],
        )

    @staticmethod
    def join(parts: Sequence[EstimateTable]) -> EstimateTable:
        """The rows of several tables, one after the other."""
        return EstimateTable(
            seconds=np.concatenate([part.seconds for part in parts]),
            stage_seconds={
                name: np.concatenate([part.stage_seconds[name] for part in parts]) for name in parts[0].stage_seconds
            },
            registers=np.concatenate([part.registers for part in parts]),
            shared_bytes=np.concatenate([part.shared_bytes for part in parts]),
            blocks_per_unit=np.concatenate([part.blocks_per_unit for part in parts]),
            wave_count=np.concatenate([part.wave_count for part in parts]),
        )

    def row(self, position: int) -> Estimate:
        """The estimate of one schedule."""
        return self.rows([position])[0]

    def rows(self, positions: Sequence[int]) -> list[Estimate]:
        """The estimates of some schedules."""
        pick = np.asarray(positions, dtype=np.int64)
        names = list(self.stage_seconds)
        stages = np.array(list(self.stage_seconds.values()))[:, pick]
        columns = zip(
            self.seconds[pick].tolist(),
            stages.T.tolist(),
            self.registers[pick].tolist(),
            self.shared_bytes[pick].tolist(),
            self.blocks_per_unit[pick].tolist(),
            self.wave_count[pick].tolist(),
            strict=True,
        )
        return [
            quick(
                Estimate,
                seconds=seconds,
                bound=names[times.index(max(times))],
                stage_seconds=dict(zip(names, times, strict=True)),
                registers=registers,
                shared_bytes=shared,
                blocks_per_unit=resident,
                wave_count=waves,
            )
            for seconds, times, registers, shared, resident, waves in columns
        ]
