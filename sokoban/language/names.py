"""Names that nothing has yet."""

from __future__ import annotations

import itertools
from collections.abc import Collection


def unused_name(stem: str, taken: set[str]) -> str:
    """``stem``, or the first of ``stem_2``, ``stem_3``, ... that is not taken."""
    name, number = stem, 2
    while name in taken:
        name, number = f"{stem}_{number}", number + 1
    return name


def fresh_name(name: str, taken: Collection[str]) -> str:
    """``name``, or ``name_1``, ``name_2``, ... if that is ``taken``."""
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    return next(option for option in itertools.chain((name,), numbered) if option not in taken)
