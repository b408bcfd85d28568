"""The result of a lowering, and the error of a schedule that does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from codegen.launch_shape import LaunchShape
from codegen.tensor_map import TensorMap

#: TVM writes this suffix behind the name of every device function it splits off; texts of ours have it too.
KERNEL_SUFFIX = "_kernel"


class LoweringError(RuntimeError):
    """TVM could not lower a schedule; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A kernel on its way to source, and what a caller needs to launch it.

    Attributes:
        module: one PrimFunc named ``entry``; its parameters are the inputs in order, then the output. None where a
            lowering writes the text itself.
        entry: the kernel's name.
        grid, block: launch extents (x, y, z).
        shared_bytes: shared memory of a block, static and dynamic together.
        dynamic_shared_bytes: the part to be given at launch.
        has_barriers: the module says itself where threads wait for each other; TVM adds no barriers of its own.
        text: the kernel's source from ``extern "C" __global__`` on, where no TVM module stands behind it.
        maps: of the tensors that it takes as tensor maps rather than pointers, in the order of its parameters.
        launch: its grid by a size that is known at launch, which then is its last parameter; None where it is ``grid``.
    """

    module: Any
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    dynamic_shared_bytes: int
    has_barriers: bool = False
    text: str = ""
    maps: tuple[TensorMap, ...] = ()
    launch: LaunchShape | None = None

    @classmethod
    def of_text(
        cls, text: str, entry: str, *, blocks: int, threads: int, shared_bytes: int = 0,
        dynamic_shared_bytes: int | None = None, maps: tuple[TensorMap, ...] = (), launch: LaunchShape | None = None,
    ) -> Lowered:  # fmt: skip
        """A kernel that a lowering wrote itself, on a line of blocks of a line of threads. Shared memory is given at
        launch, all of it where ``dynamic_shared_bytes`` says no other number."""
        dynamic = shared_bytes if dynamic_shared_bytes is None else dynamic_shared_bytes
        return cls(
            module=None, entry=entry, grid=(blocks, 1, 1), block=(threads, 1, 1), shared_bytes=shared_bytes,
            dynamic_shared_bytes=dynamic, text=text, maps=maps, launch=launch,
        )  # fmt: skip


def reason_of(error: Exception) -> str:
    """The line of a TVM error that says what is wrong, of at most 300 characters: the last one that names an error.

    >>> reason_of(RuntimeError("Traceback\\n  ValueError: no such axis\\n"))
    'ValueError: no such axis'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "")[:300]


def identifier(name: str) -> str:
    """A name with every character that C does not allow in an identifier replaced.

    >>> identifier("3x3.weight")
    'op_3x3_weight'
    """
    safe = "".join(character if character.isascii() and character.isalnum() else "_" for character in name)
    return safe if safe and not safe[0].isdigit() else f"op_{safe}"
