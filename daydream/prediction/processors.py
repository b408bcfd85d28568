"""Processors that launch kernels, by name: how long a call of a framework takes one thread of each.

One was measured. Others are scaled from it: a framework's call is one thread's work within its caches, which takes as
long as the clock of a single busy core and the instructions that a generation of cores does in a cycle let it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hal.support.errors import InputError, listed


@dataclass(frozen=True, kw_only=True)
class Processor:
    """A processor's single thread.

    Attributes:
        turbo_hz: clock of one busy core, of the data sheet.
        per_cycle: instructions in a cycle over those of Broadwell's cores, as makers state every generation's gain.
    """

    turbo_hz: float
    per_cycle: float

    @property
    def pace(self) -> float:
        """Instructions per second over those of a Broadwell at 1 Hz."""
        return self.turbo_hz * self.per_cycle


#: Gains by generation: Skylake 10 % over Broadwell, Sunny Cove 18 % over Skylake, Golden Cove 19 % over that and Raptor
#: Cove as it (Intel, Architecture Days 2018 to 2021 and its introduction of Skylake); Zen 2 as Skylake, Zen 3 19 % and
#: Zen 4 14 % more (AMD, EPYC's introductions of 2019, 2021, 2022); Neoverse V2 taken for Golden Cove.
_SKYLAKE = 1.10
_SUNNY_COVE = _SKYLAKE * 1.18
_GOLDEN_COVE = _SUNNY_COVE * 1.19
_ZEN3 = _SKYLAKE * 1.19

#: By name, clocks of the makers' data sheets.
PROCESSORS: Mapping[str, Processor] = {
    "xeon-e5-2698v4": Processor(turbo_hz=3.6e9, per_cycle=1.0),
    "xeon-8168": Processor(turbo_hz=3.7e9, per_cycle=_SKYLAKE),
    "xeon-8275cl": Processor(turbo_hz=3.9e9, per_cycle=_SKYLAKE),
    "xeon-8375c": Processor(turbo_hz=3.5e9, per_cycle=_SUNNY_COVE),
    "xeon-8480c": Processor(turbo_hz=3.8e9, per_cycle=_GOLDEN_COVE),
    "xeon-8570": Processor(turbo_hz=4.0e9, per_cycle=_GOLDEN_COVE),
    "epyc-7742": Processor(turbo_hz=3.4e9, per_cycle=_SKYLAKE),
    "epyc-7763": Processor(turbo_hz=3.5e9, per_cycle=_ZEN3),
    "epyc-9654": Processor(turbo_hz=3.7e9, per_cycle=_ZEN3 * 1.14),
    "grace": Processor(turbo_hz=3.4e9, per_cycle=_GOLDEN_COVE),
}

#: The one that was measured, and seconds of a module's operator that launches a kernel there, called from Python behind
#: others: a DGX-1's, by DeepLearningExamples' ResNet-50 and EfficientNet-b0 in float32, a sample on a V100 (PyTorch
#: 1.9).
MEASURED, MEASURED_SECONDS = "xeon-e5-2698v4", 45e-6


def module_call_seconds(host: str) -> float:
    """Seconds of a module's operator that launches a kernel, by the processor's name.

    Raises:
        InputError: there is none of that name.

    >>> round(1e6 * module_call_seconds("xeon-e5-2698v4")), round(1e6 * module_call_seconds("xeon-8480c"))
    (45, 28)
    """
    if host not in PROCESSORS:
        raise InputError("--host", f"nothing is known of {host!r}", f"use one of {listed(sorted(PROCESSORS))}")
    return MEASURED_SECONDS * PROCESSORS[MEASURED].pace / PROCESSORS[host].pace
