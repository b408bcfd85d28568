"""The questions that schedules of all kinds answer for themselves, and the answers of most of them."""

from __future__ import annotations

from typing import Any, TypeVar

from hal.spec.device import DeviceSpec

_S = TypeVar("_S", bound="KernelSchedule")


class KernelSchedule:
    """How a kernel of any kind runs."""

    def misfit(self, problem: Any) -> str | None:
        """Why no lowering makes a kernel of it for a problem of its kind; None where one may."""
        return None

    def scalar_twin(self: _S, problem: Any) -> _S:
        """The schedule with multiply-adds in place of matrix instructions; itself where it has none."""
        return self

    def tiles(self, device: DeviceSpec) -> dict[str, dict[str, int]]:
        """Tiles at each memory layer of a device, by axis; none at any where threads share nothing."""
        return {}
