"""Quantities as people read them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from hal.spec.device import DeviceSpec

#: Sentences are wrapped to this width.
WIDTH = 120

#: Lines of a table may be longer, and are cut here.
LONGEST_LINE = 150


def sizes_text(pairs: tuple[tuple[str, int], ...]) -> str:
    """Sizes by axis in the order given.

    >>> sizes_text((("m", 64), ("n", 1)))
    'm=64 n=1'
    """
    return " ".join(f"{axis}={size}" for axis, size in pairs)


def short_sizes(pairs: tuple[tuple[str, int], ...]) -> str:
    """Sizes by axis, axes of one left out.

    >>> short_sizes((("m", 64), ("n", 1))), short_sizes((("m", 1),))
    ('m=64', 'of one')
    """
    return " ".join(f"{axis}={size}" for axis, size in pairs if size > 1) or "of one"


def scratchpad(device: DeviceSpec) -> str:
    """The memory of a unit that programs manage themselves: ``shared memory``."""
    return f"{device.shared.name} memory"


def layer_below(device: DeviceSpec) -> str:
    """The bottom layer in words: ``DRAM``, or what an IPU has in its place."""
    return "DRAM" if device.dram.name == "dram" else f"the {device.dram.name}"


def layer_name(name: str) -> str:
    """A memory layer as it is written in sentences.

    >>> layer_name("l2"), layer_name("dram"), layer_name("registers")
    ('L2', 'DRAM', 'registers')
    """
    return name.upper() if name == "dram" or name[1:].isdigit() else name


def count_text(number: int, noun: str) -> str:
    """A number and its noun, in the plural where it is not one.

    >>> count_text(1, "wave"), count_text(4, "wave")
    ('1 wave', '4 waves')
    """
    return f"{number} {noun}" + ("" if number == 1 else "s")


def time_text(seconds: float) -> str:
    """Seconds with a unit that fits, from s to ns.

    >>> time_text(0.000752), time_text(2.5), time_text(3e-9)
    ('752 µs', '2.5 s', '3 ns')
    """
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{three_digits(seconds / scale)} {unit}"
    # No hardware does anything in a thousandth of a nanosecond: less is rounding.
    return f"{three_digits(round(seconds * 1e9, 3))} ns"


def si_text(value: float, unit: str) -> str:
    """A value with an SI prefix, from k to T.

    >>> si_text(13.1e12, "FLOP/s"), si_text(12.0, "B")
    ('13.1 TFLOP/s', '12 B')
    """
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{three_digits(value / scale)} {prefix}{unit}"
    return f"{three_digits(value)} {unit}"


def three_digits(value: float) -> str:
    """A number by three digits at least and no exponent.

    >>> three_digits(1234.5), three_digits(12.345)
    ('1234', '12.3')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def wrapped(text: str, indent: str = "  ") -> Iterator[str]:
    """A sentence as lines of :data:`WIDTH`, the second and further ones set in."""
    yield from textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )


def clipped(line: str) -> str:
    """A line of a table cut at :data:`LONGEST_LINE`."""
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 2] + " …"
