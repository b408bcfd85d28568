"""Measured steps of vision networks, and what is predicted for them."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class NetworkRow:
    """A measured step: ``chosen_on`` says whether constants were chosen on its network."""

    model: str
    training: bool
    channels_last: bool
    batch: int
    image: int
    parameters: float
    measured: float
    chosen_on: bool

    @property
    def kind(self) -> str:
        """Mode and layout."""
        return f"{'training' if self.training else 'inference'} {'NHWC' if self.channels_last else 'NCHW'}"


@dataclass(frozen=True, kw_only=True)
class NetworkScore:
    """A row with its predicted step.

    Attributes:
        row: what was measured.
        predicted: seconds; 0 where the network could not be captured.
        shares: seconds by kind of model.
        failure: why there is no prediction.
    """

    row: NetworkRow
    predicted: float = 0.0
    shares: Mapping[str, float]
    failure: str = ""

    @property
    def error(self) -> float:
        """Signed, a share."""
        return self.predicted / self.row.measured - 1.0


def read_rows(path: Path) -> list[NetworkRow]:
    """The measured steps."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    places = {name: place for place, name in enumerate(sorted({row["model"] for row in rows}))}
    return [
        NetworkRow(
            model=row["model"],
            training=row["mode"] == "training",
            channels_last=row["layout"] == "NHWC",
            batch=int(row["batch"]),
            image=int(row["image"]),
            parameters=float(row["parameters_millions"]) * 1e6,
            measured=float(row["step_ms"]) / 1e3,
            chosen_on=places[row["model"]] % 2 == 0,
        )
        for row in rows
    ]
