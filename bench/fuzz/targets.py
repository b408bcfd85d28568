"""Pairs of a lowering and a production that chance alone seldom brings together, and how a value gets a production.

Every other operator is drawn for one of them: a frame that the lowering takes, one of whose values has the production.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from bench.fuzz.productions import INSIDE, OPTIONS, OUTSIDE, PLACED, READS, REDUCTIONS, SCANNED
from bench.fuzz.tables import POSSIBLE
from bench.fuzz.values import COMPARISONS, UNARY, Term, Writer, positive, product, quotient, total, within

#: What stands for a frame where named operators of one kind reach a lowering, and how often each of those is drawn
#: where others are once: not every convolution is small enough to be run.
NAMED, NAMED_TURNS = "named", 8

#: Lowerings and algorithms that few operators of the frames reach, by the frames that do.
FRAMES: Mapping[str, tuple[str, ...]] = {
    "windows": ("windows",), "wmma": ("matrix_product",), "bulk": ("matrix_product",),
    "walks.pair_warps": ("pair",), "walks.pair_multiply_adds": ("pair",), "split-k": ("long_reduction",),
    "split-rows": ("long_rows",), "split-line": ("long_lines",), "sequence": ("steps",),
    "cpu.tiles": ("contraction", "reduction"),
    "cpu.rows": ("reduction", "rows"), "walks.attention_groups": ("attention",), "walks.slices": ("attention",),
    "gradients.warps": ("attention_gradient",), "gradients.groups": ("attention_gradient",),
    "gradients.multiply_adds": ("attention_gradient",), "gradients.slopes": ("attention_gradient",),
    "cpu.walks": ("lines",),
    "winograd": (NAMED,), "flat-image": (NAMED,), "ranks": (NAMED,), "scatters": (NAMED,), "cpu.scatters": (NAMED,),
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Target that an operator is drawn for.

    Attributes:
        lowering: a key of :data:`FRAMES`.
        place: ``inside`` of a reduction or ``outside``; empty for the reduction itself and for named operators.
        name: of the production, a function or a kind of index, pad or position; of a reduction its function; of
            attention an option; of other named operators the element type that is read.
    """

    lowering: str
    place: str
    name: str


@lru_cache(maxsize=1)
def targets() -> tuple[Target, ...]:
    """All of them, those of one lowering apart from each other."""
    by_lowering = []
    for lowering, frames in FRAMES.items():
        prefixes = (READS,) if frames == (NAMED,) else (INSIDE, OUTSIDE)
        wholes = (*REDUCTIONS, *OPTIONS, *SCANNED, *PLACED)
        rows = sorted(row for row in POSSIBLE[lowering] if row.startswith(prefixes) or row in wholes)
        turns = NAMED_TURNS if frames == (NAMED,) else 1
        by_lowering.append([_target(lowering, row) for row in rows] * turns)
    longest = max(map(len, by_lowering))
    return tuple(group[place] for place in range(longest) for group in by_lowering if place < len(group))


def line_target(number: int) -> Target | None:
    """The target that every other kernel of lines is drawn for, by its operator's number."""
    rows = sorted(row for row in POSSIBLE["lines"] if row.startswith((INSIDE, OUTSIDE)) or row in (*SCANNED, *PLACED))
    return _target("lines", rows[number // 24 % len(rows)]) if number % 24 == 11 else None


def _target(lowering: str, row: str) -> Target:
    if row in (*REDUCTIONS, *SCANNED, *PLACED):
        return Target(lowering, "", row.split()[0])
    if row in OPTIONS:
        return Target(lowering, "", row)
    if row.startswith(READS):
        return Target(lowering, "", row.removeprefix(f"{READS} "))
    place, _, name = row.partition(" ")
    return Target(lowering, place, name)


def with_production(writer: Writer, term: Term, axes: Sequence[str], name: str) -> Term:
    """A value of ``term`` that has a production."""
    if name in UNARY and (not writer.integers or name in ("abs", "neg", "relu")):
        return UNARY[name](term)
    if name in COMPARISONS or name in ("and", "or", "not", "select"):
        return _selected(writer, term, axes, name)
    if name in _BINARY:
        return _BINARY[name](term, writer.load(axes))
    if name in ("floor", "ceil"):
        inner = product(writer.load(axes), Term("3", 3, 3, 3, exact=True))
        return total(term, replace(inner, text=f"{name}({inner.text})", low=inner.low - 1, high=inner.high + 1))
    if name.endswith("as a number"):
        return product(term, writer.position(_axes_of(axes, name)))
    if name.endswith("compared"):
        axis = writer.chance.choice(_axes_of(axes, name))
        return _chosen(term, f"({axis} < {max(writer.sizes[axis] // 2, 1)})")
    return total(term, writer.special_load(axes, name))


def _axes_of(axes: Sequence[str], name: str) -> Sequence[str]:
    """The axes of the reduction, which are called k, n, r, s, c or j of a row, or the others."""
    reduced = [axis for axis in axes if axis in ("k", "r", "s")] or list(axes)[-1:]
    return reduced if name.startswith("reduced") else [axis for axis in axes if axis not in reduced] or list(axes)


def _selected(writer: Writer, term: Term, axes: Sequence[str], name: str) -> Term:
    axis = writer.chance.choice(list(axes))
    half = max(writer.sizes[axis] // 2, 1)
    first, second = f"({axis} < {half})", f"{writer.exact(axes).text} > {axis}"
    conditions = {
        "and": f"({first} and {second})",
        "or": f"({first} or {second})",
        "not": f"(not {first})",
        "select": first,
    }
    return _chosen(term, conditions.get(name) or f"({axis} {COMPARISONS[name]} {half})")


def _chosen(term: Term, condition: str) -> Term:
    text = f"select({condition}, {term.text}, 2)"
    return replace(term, text=text, low=min(term.low, 0), high=max(term.high, 2), error=term.error + 1)


def _power(term: Term, other: Term) -> Term:
    del other
    base = positive(within(term, 4.0))
    return Term(f"({base.text} ** 1.5)", 0.0, max(base.high, 1.0) ** 1.5, 1.0, base.error + 2, peaked=term.peaked)


def _extreme(function: str) -> Callable[[Term, Term], Term]:
    def apply(term: Term, other: Term) -> Term:
        low, high = min(term.low, other.low), max(term.high, other.high)
        return replace(term, text=f"{function}({term.text}, {other.text})", low=low, high=high, error=term.error + 1)

    return apply


_BINARY: Mapping[str, Callable[[Term, Term], Term]] = {
    "add": total, "sub": lambda term, other: total(term, other, "sub"), "mul": product,
    "div": lambda term, other: quotient(term, positive(other)), "pow": _power, "min": _extreme("min"),
    "max": _extreme("max"),
}  # fmt: skip
