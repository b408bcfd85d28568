"""Quantities as people read them."""

from __future__ import annotations


def sizes_text(pairs: tuple[tuple[str, int], ...]) -> str:
    """``m=64 n=128``."""
    return " ".join(f"{axis}={size}" for axis, size in pairs)


def count_text(number: int, noun: str) -> str:
    """``1 wave``, ``4 waves``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def time_text(seconds: float) -> str:
    """Seconds with a unit that fits: ``752 µs``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{three_digits(seconds / scale)} {unit}"
    return f"{three_digits(seconds * 1e9)} ns"


def si_text(value: float, unit: str) -> str:
    """A value with an SI prefix: ``13.1 TFLOP/s``."""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{three_digits(value / scale)} {prefix}{unit}"
    return f"{three_digits(value)} {unit}"


def three_digits(value: float) -> str:
    """Three digits and no exponent: 1234.5 as ``1234``, 12.345 as ``12.3``."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
