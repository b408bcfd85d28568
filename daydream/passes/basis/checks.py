"""Checks of what a user sets on a what-if pass: every complaint is an InputError that names the parameter."""

from __future__ import annotations

import math
import re

from daydream.graph.graph import Phase, TaskGraph
from daydream.trace.trace import Ints
from hal.support.errors import InputError


def at_least(name: str, value: float, minimum: float) -> None:
    """Refuses a number below `minimum`, infinite or not a number.

    Raises:
        InputError: names the parameter.
    """
    if not (math.isfinite(value) and value >= minimum):
        raise InputError(name, f"{value:g} is out of range", f"give a number, {minimum:g} or more")


def above_zero(name: str, value: float) -> None:
    """Refuses a number that is zero, negative, infinite or not a number.

    Raises:
        InputError: names the parameter.
    """
    if not (math.isfinite(value) and value > 0):
        raise InputError(name, f"{value:g} is out of range", "give a number above 0")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuses a word that is not one of those allowed.

    Raises:
        InputError: names the parameter and the words.
    """
    if value not in allowed:
        raise InputError(name, f"{value!r} is unknown", f"give {', '.join(allowed[:-1])} or {allowed[-1]}")


def pattern(name: str, value: str) -> str | None:
    """A regular expression, or None for an empty text, which stands for "any".

    Raises:
        InputError: it is no regular expression.
    """
    try:
        re.compile(value)
    except (re.error, RecursionError) as error:
        raise InputError(name, f"{value!r} is no regular expression: {error}", "correct it") from None
    return value or None


def phase_named(name: str, value: str) -> Phase | None:
    """The phase of this name, or None for "all".

    Raises:
        InputError: no such phase.
    """
    one_of(name, value, ("all", "forward", "backward", "update"))
    return None if value == "all" else Phase[value.upper()]


def chosen(graph: TaskGraph, match: str, layer: str, phase: str, gpu: bool | None = None) -> Ints:
    """The tasks whose name, layer and phase fit the parameters `match`, `layer` and `phase` of a pass.

    Raises:
        InputError: a parameter is malformed.
    """
    return graph.select(
        name=pattern("match", match), layer=pattern("layer", layer), phase=phase_named("phase", phase), gpu=gpu
    )
