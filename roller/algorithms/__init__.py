"""Algorithms: other ways to compute an operator than by one kernel that walks its definition.

:func:`algorithms_of` proposes what each of them makes of an operator, priced like any program; an algorithm that does
not apply, or that the operator's best program of one kernel leaves nothing to gain for, says so at the cost of a few
comparisons.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from hal.support.errors import InputError
from roller.algorithms import flat_gradient, flat_image, split_k, split_rows, winograd
from roller.algorithms.chain import SPLIT_LINE, ChainProgram, Considered
from roller.construct.program import DIRECT, RProgram
from sokoban.kernel.placed import PlacedForm


def _flat_image(placed: PlacedForm, direct: RProgram) -> Considered:
    module = flat_image if flat_gradient.gradient_of(placed.form) is None else flat_gradient
    return module.consider(placed, direct)


#: Algorithm -> what it makes of an operator, given its best program of one kernel.
_CONSIDER: Mapping[str, Callable[[PlacedForm, RProgram], Considered]] = {
    split_k.NAME: split_k.consider,
    split_rows.NAME: split_rows.consider,
    winograd.NAME: winograd.consider,
    flat_image.NAME: _flat_image,
}

#: Those whose kernels processors run as well.
_VECTORS = (split_k.NAME, split_rows.NAME)

#: All that programs may be made by; ``direct`` is one kernel.
ALGORITHMS = (DIRECT, *_CONSIDER, SPLIT_LINE)


def algorithms_of(
    placed: PlacedForm, direct: RProgram, algorithms: Collection[str] = ALGORITHMS
) -> tuple[Considered, ...]:
    """Programs of an operator by the ``algorithms``; its best program of one kernel is ``direct``."""
    asked = {name: consider for name, consider in _CONSIDER.items() if name in algorithms}
    device = placed.device
    if device.code_generator is None:
        reason = f"kernels of {device.name} are not launched one after the other"
        return tuple(Considered(name, declined=reason) for name in asked)
    threads = device.teu.lane == "thread"
    vectors = f"it is for lanes that are threads; those of {device.name} are elements of vectors"
    return tuple(
        consider(placed, direct) if threads or name in _VECTORS else Considered(name, declined=vectors)
        for name, consider in asked.items()
    )


def composed_programs(placed: PlacedForm, top_k: int, algorithms: Collection[str] = ALGORITHMS) -> Considered:
    """The ``top_k`` best programs of attention, of a gradient of it, or of a scan or place, which have no others.

    Lines are in parts where ``algorithms`` have those.

    Raises:
        InputError: the device or the kernels have nothing for the operator.
    """
    # Nothing else has a use for them, and starting a command takes no longer for what it does not need.
    if placed.form.is_line:
        from roller.algorithms.split_line import consider_lines

        return consider_lines(placed, top_k, in_parts=SPLIT_LINE in algorithms)
    from roller.algorithms import flash, flash_gradient

    consider = {"attention": flash.consider, "attention_gradient": flash_gradient.consider}
    return consider[placed.form.kind](placed, top_k)


def parse_algorithms(text: str | None) -> tuple[str, ...]:
    """The algorithms of ``direct,split-k``; all of them for None.

    Raises:
        InputError: one of them is unknown, or there is none.
    """
    if text is None:
        return ALGORITHMS
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in ALGORITHMS]
    if unknown or not names:
        problem = f"there is no {unknown[0]!r}" if unknown else "names no algorithm"
        raise InputError("--algorithms", problem, f"list some of {', '.join(ALGORITHMS)}")
    return tuple(name for name in ALGORITHMS if name in names)


__all__ = [
    "ALGORITHMS",
    "DIRECT",
    "SPLIT_LINE",
    "ChainProgram",
    "Considered",
    "algorithms_of",
    "composed_programs",
    "parse_algorithms",
]
