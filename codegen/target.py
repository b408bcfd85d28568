"""Target of a compilation: the part of a device that code generators and compilers have to know."""

from __future__ import annotations

import re
from dataclasses import dataclass

from codegen.generators import GENERATORS, Generator
from hal.spec.device import DeviceSpec
from hal.spec.parts import CodeGenerator
from sokoban.kernel.instructions import BFLOAT16_CAPABILITY

#: Bytes of the float32 elements that a processor's lanes are counted in.
_LANE_BYTES = 4


@dataclass(frozen=True)
class Target:
    """Target of a compilation.

    Attributes:
        generator: the code generator, a key of :data:`codegen.generators.GENERATORS`.
        architecture: the device's by its compiler's name: ``"sm_70"``, ``"gfx906"``, ``"icelake-server"``; may be empty
            where the generator writes the same for all.
        lanes: of a TEU: threads of a warp or wavefront; of a processor float32 elements of a vector.

    >>> from hal import load_device
    >>> Target.of(load_device("v100"))
    Target(generator='cuda', architecture='sm_70', lanes=32)
    """

    generator: CodeGenerator
    architecture: str
    lanes: int

    @staticmethod
    def of(device: DeviceSpec) -> Target:
        """The target of a device; one without a code generator is given CUDA's, so that its schedules are still built
        and verified."""
        return Target(device.code_generator or "cuda", device.architecture, device.teu.lanes)

    @property
    def row(self) -> Generator:
        """Abilities of the target's code generator."""
        return GENERATORS[self.generator]

    @property
    def has_bfloat16(self) -> bool:
        """True if it has arithmetic of bfloat16, as NVIDIA's boards have from sm_80 on.

        >>> Target("cuda", "sm_75", 32).has_bfloat16, Target("cuda", "sm_90a", 32).has_bfloat16
        (False, True)
        """
        match = re.fullmatch(r"sm_(\d+)(\d)a?", self.architecture)
        return match is None or (int(match[1]), int(match[2])) >= BFLOAT16_CAPABILITY

    @property
    def vector_bytes(self) -> int:
        """Width of a processor's vector registers.

        >>> Target("llvm", "icelake-server", lanes=16).vector_bytes
        64
        """
        return _LANE_BYTES * self.lanes
