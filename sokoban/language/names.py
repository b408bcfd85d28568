"""Names that are not taken yet."""

from __future__ import annotations

import itertools
from collections.abc import Collection


def unused_name(stem: str, taken: set[str]) -> str:
    """``stem``, or the first of ``stem_2``, ``stem_3``, ... that is not taken.

    >>> unused_name("bias", {"bias", "bias_2"})
    'bias_3'
    """
    name, number = stem, 2
    while name in taken:
        name, number = f"{stem}_{number}", number + 1
    return name


def fresh_name(name: str, taken: Collection[str]) -> str:
    """``name``, or the first of ``name_1``, ``name_2``, ... that is not taken.

    >>> fresh_name("k", {"k", "k_1"})
    'k_2'
    """
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    return next(option for option in itertools.chain((name,), numbered) if option not in taken)
