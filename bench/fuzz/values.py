"""Values of the expression language drawn by chance, well typed and in ranges where float64 can judge them.

Every value comes with bounds, its usual magnitude and the error that rounding has brought into it, by interval
arithmetic and first-order propagation: nothing overflows, nothing is divided by a number near zero, no logarithm or
root is taken of a negative number, and no value is drawn that cancellation makes meaningless. What jumps (floor, ceil,
comparisons) is taken of exact values alone: inputs, positions, and what is made of them without rounding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

#: Bounds of inputs that :func:`sokoban.language.random_data.random_inputs` may draw: a peak on top of a number, with an
#: exponential of the largest number's distance; and of integers.
FLOAT_BOUNDS = (-1.0, 1.5)
PEAK = 101.5
INTEGER_BOUNDS = (-127.0, 127.0)

#: Largest magnitude of a value between operations, and largest error of one in units of its last place.
MOST = 1e6
MOST_ERROR = 64.0
#: Largest magnitude of a whole number: sums of them stay in 32 bits.
MOST_INTEGER = 2.0**15

COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


@dataclass(frozen=True)
class Term:
    """A value: its text and what is known of its size.

    Attributes:
        text: in the expression language, bracketed where it is compound.
        low, high: bounds of its values.
        usual: a usual magnitude.
        error: absolute error by rounding, in units of the accumulator's relative precision.
        exact: whether it is computed without rounding.
        peaked: whether it may contain the peaks of inputs whose largest element is taken.
    """

    text: str
    low: float
    high: float
    usual: float
    error: float = 0.0
    exact: bool = False
    peaked: bool = False

    @property
    def most(self) -> float:
        """Largest magnitude."""
        return max(abs(self.low), abs(self.high))

    @property
    def is_sound(self) -> bool:
        """True if it is neither too large nor lost in its own error."""
        return self.most <= MOST and self.error <= MOST_ERROR * max(self.usual, 1e-3)


@dataclass
class Inputs:
    """The tensors that a program reads.

    Attributes:
        shapes: of every input.
        dtypes: of inputs whose dtype is not the operator's.
    """

    shapes: dict[str, list[int]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)


class Writer:
    """Draws values over axes and collects the inputs that they read.

    Attributes:
        chance: what everything is drawn by.
        sizes: elements of every axis.
        inputs: what has been read so far.
        dtypes: those of new inputs.
        integers: whether values are integers, computed by functions of integers alone.
        peaked: whether the largest element of some input is taken, so that floats may have peaks.
    """

    def __init__(self, chance: random.Random, sizes: Mapping[str, int], dtypes: Sequence[str], integers: bool) -> None:
        self.chance, self.sizes, self.dtypes, self.integers = chance, sizes, dtypes, integers
        self.inputs = Inputs()
        self.peaked = False

    # Loads

    def index(self, axes: Sequence[str]) -> tuple[str, int, int]:
        """An affine index over one or two axes, or a number, with its bounds."""
        kind = self.chance.choices(
            ("axis", "strided", "reversed", "shifted", "window", "constant"), (6, 1, 1, 1, 2, 1)
        )[0]
        if kind == "constant" or not axes:
            at = self.chance.randrange(3)
            return str(at), at, at
        axis = self.chance.choice(axes)
        last = self.sizes[axis] - 1
        if kind == "axis":
            return axis, 0, last
        if kind == "strided":
            stride = self.chance.choice((2, 3))
            return f"{stride}*{axis}", 0, stride * last
        if kind == "reversed":
            return f"{last} - {axis}", 0, last
        offset = self.chance.choice((-2, -1, 1, 2, 3))
        if kind == "shifted":
            return f"{axis} {'-' if offset < 0 else '+'} {abs(offset)}", offset, last + offset
        other, stride = self.chance.choice(axes), self.chance.choice((1, 1, 2))
        if other == axis:
            return f"2*{axis} + 1", 1, 2 * last + 1
        reach = stride * (self.sizes[other] - 1)
        if self.chance.random() < 0.2:
            return (
                f"{axis} - {other} + {reach}" if stride == 1 else f"{axis} - {stride}*{other} + {reach}",
                0,
                last + reach,
            )
        shift = self.chance.choice((0, 0, -1))
        text = f"{axis} + {other}" if stride == 1 else f"{axis} + {stride}*{other}"
        return (f"{text} - 1" if shift else text), shift, last + reach + shift

    def load(self, axes: Sequence[str], every: Sequence[str] = (), unindexed: bool = False) -> Term:
        """A load of a new input, or of one known; it walks ``every`` as they are, and some of ``axes`` in any way."""
        if self.inputs.shapes and not every and self.chance.random() < 0.25:
            again = self._again(axes)
            if again is not None:
                return again
        tensor = f"T{len(self.inputs.shapes)}"
        indices = [(axis, 0, self.sizes[axis] - 1) for axis in every]
        others = [axis for axis in axes if axis not in every]
        if unindexed:
            chosen = [axis for axis in others if self.chance.random() < 0.7]
            indices += [(axis, 0, self.sizes[axis] - 1) for axis in chosen]
            self.chance.shuffle(indices)
        else:
            wanted = self.chance.randint(0 if every else 1, 2 if len(every) < 2 else 1)
            indices += [self.index(axes) for _ in range(wanted)]
            if self.chance.random() < 0.3:
                self.chance.shuffle(indices)
        if not indices:
            indices = [(axes[0], 0, self.sizes[axes[0]] - 1)] if axes else [("0", 0, 0)]
        shape = [max(high + 1, 1) for _, _, high in indices]
        padded = any(low < 0 for _, low, _ in indices) or (not unindexed and self.chance.random() < 0.15)
        if padded:
            shape = [max(extent - self.chance.randint(0, 2), 1) for extent in shape]
        elif self.chance.random() < 0.05:
            shape[-1] += self.chance.randint(1, 5)
        if math.prod(shape) > 2**24:
            return self.constant()
        self.inputs.shapes[tensor] = shape
        dtype = self.chance.choice(self.dtypes)
        self.inputs.dtypes[tensor] = dtype
        return self._term(tensor, dtype, [text for text, _, _ in indices], self._pad(dtype) if padded else None)

    def _pad(self, dtype: str) -> float:
        return self.chance.choice((0.0, 0.0, 1.0, -2.0) if dtype in ("int8", "int32") else (0.0, 0.0, 1.0, -0.5, 0.3))

    def _again(self, axes: Sequence[str]) -> Term | None:
        """A second load of an input, at any place inside it or with a pad."""
        tensor = self.chance.choice(sorted(self.inputs.shapes))
        dtype = self.inputs.dtypes[tensor]
        if dtype.startswith("float8"):
            return None  # Operands of products alone.
        indices = [self.index(axes) for _ in self.inputs.shapes[tensor]]
        outside = any(
            low < 0 or high >= extent
            for (_, low, high), extent in zip(indices, self.inputs.shapes[tensor], strict=True)
        )
        return self._term(tensor, dtype, [text for text, _, _ in indices], self._pad(dtype) if outside else None)

    def _term(self, tensor: str, dtype: str, indices: Sequence[str], pad: float | None) -> Term:
        low, high = INTEGER_BOUNDS if dtype in ("int8", "int32") else FLOAT_BOUNDS
        usual = 60.0 if dtype in ("int8", "int32") else 0.6
        peaked = self.peaked and dtype not in ("int8", "int32")
        if peaked:
            high = PEAK
        if pad is not None:
            low, high = min(low, pad), max(high, pad)
        inside = f" | pad={pad:g}" if pad is not None else ""
        return Term(f"{tensor}[{', '.join(indices)}{inside}]", low, high, usual, exact=True, peaked=peaked)

    def special_load(self, axes: Sequence[str], kind: str) -> Term:
        """A load of a new input whose indices are of a kind (:data:`bench.fuzz.productions.INDICES`), or padded."""
        axis, other = axes[0], axes[-1]
        last, reach = self.sizes[axis] - 1, self.sizes[axis] + self.sizes[other] - 2
        indices: Mapping[str, list[tuple[str, int]]] = {
            "strided": [(f"2*{axis}", 2 * last)], "offset": [(f"{axis} + 1", last + 1)],
            "reversed": [(f"{last} - {axis}", last)], "window": [(f"{axis} + {other}", reach)],
            "constant": [("1", 1), (axis, last)], "diagonal": [(axis, last), (axis, last)],
            "transposed": [(other, self.sizes[other] - 1), (axis, last)],
        }  # fmt: skip
        chosen = indices.get(kind, [(axis, last)])
        tensor, dtype = f"T{len(self.inputs.shapes)}", self.chance.choice(self.dtypes)
        pad = {"pad zero": 0.0, "pad number": 1.0}.get(kind)
        cut = 0 if pad is None else 1
        self.inputs.shapes[tensor] = [max(high + 1 - cut, 1) for _, high in chosen]
        self.inputs.dtypes[tensor] = dtype
        texts = [text if pad is None else f"{text} - 1" for text, _ in chosen]
        return self._term(tensor, dtype, texts, pad)

    # Numbers

    def constant(self) -> Term:
        """A number."""
        value = self.chance.choice((1, 2, 3, -1, -2) if self.integers else (2.0, 0.5, -1.5, 0.3, 1.0, 3.0, -0.25))
        error = 0.0 if float(value * 4).is_integer() else abs(value)
        text = f"{value:g}" if value >= 0 else f"({value:g})"
        return Term(text, value, value, abs(value), error, exact=not error)

    def position(self, axes: Sequence[str]) -> Term:
        """The value of an axis, or of an affine index, as a number."""
        axis = self.chance.choice(axes)
        last = self.sizes[axis] - 1
        kind = self.chance.choice(("plain", "shifted", "strided", "reversed", "two"))
        if kind == "shifted":
            return Term(f"({axis} + 1)", 1, last + 1, last / 2 + 1, exact=True)
        if kind == "strided":
            return Term(f"(2*{axis} - 3)", -3, 2 * last - 3, last + 1, exact=True)
        if kind == "reversed":
            return Term(f"({last} - {axis})", 0, last, last / 2 + 1, exact=True)
        other = self.chance.choice(axes)
        if kind == "two" and other != axis:
            reach = self.sizes[other] - 1
            return Term(f"({axis} - {other})", -reach, last, (last + reach) / 3 + 1, exact=True)
        return Term(axis, 0, last, last / 2 + 1, exact=True)

    def exact(self, axes: Sequence[str]) -> Term:
        """A value that is computed without rounding."""
        kind = self.chance.randrange(7)
        if kind <= 1:
            return self.position(axes)
        if kind <= 4 or self.integers:
            return self.load(axes)
        load = self.load(axes)
        function = self.chance.choice(("abs", "neg", "relu", "floor", "ceil"))
        text = f"(-{load.text})" if function == "neg" else f"{function}({load.text})"
        return replace(load, text=text, low=-load.most - 1, high=load.most + 1)

    def truth(self, axes: Sequence[str], depth: int) -> str:
        """A truth value."""
        kind = self.chance.randrange(6) if depth else self.chance.randrange(3)
        sign = self.chance.choice(sorted(COMPARISONS.values()))
        if kind == 3:
            return f"({self.truth(axes, depth - 1)} and {self.truth(axes, depth - 1)})"
        if kind == 4:
            return f"({self.truth(axes, depth - 1)} or {self.truth(axes, depth - 1)})"
        if kind == 5:
            return f"(not {self.truth(axes, depth - 1)})"
        if kind == 2:
            return f"({self.exact(axes).text} {sign} {self.exact(axes).text})"
        axis = self.chance.choice(axes)
        other = self.chance.choice(axes)
        if kind == 0 and other != axis:
            return f"({axis} {sign} {other})"
        return f"({axis} {sign} {self.chance.randrange(self.sizes[axis] + 1)})"

    def value(self, axes: Sequence[str], depth: int, first: Term | None = None) -> Term:
        """A number over ``axes``; one that contains ``first`` where that is given."""
        for _ in range(8):
            term = self._value(axes, depth, first)
            if term.is_sound and (not self.integers or term.most <= MOST_INTEGER):
                return term
        return first or self.load(axes)

    def _value(self, axes: Sequence[str], depth: int, first: Term | None) -> Term:
        if depth <= 0:
            if first is not None:
                return first
            draws: tuple[Callable[[], Term], ...] = (
                lambda: self.load(axes), lambda: self.position(axes), self.constant,
            )  # fmt: skip
            return self.chance.choices(draws, (5, 2, 1))[0]()
        inner = self.value(axes, depth - 1, first)
        kinds = ("binary", "select", "unary", "unary", "binary", "scaled")
        kind = self.chance.choice(kinds)
        if kind == "binary":
            return self._binary(axes, depth, inner)
        if kind == "select":
            other = self.value(axes, depth - 1)
            first_branch, second_branch = (inner, other) if self.chance.random() < 0.5 else (other, inner)
            return _either(
                f"select({self.truth(axes, 1)}, {first_branch.text}, {second_branch.text})", first_branch, second_branch
            )
        if kind == "scaled":
            return product(inner, self.position(axes) if self.chance.random() < 0.5 else self.constant())
        return self._unary(inner)

    def _binary(self, axes: Sequence[str], depth: int, a: Term) -> Term:
        functions = (
            ("add", "sub", "mul", "min", "max") if self.integers else ("add", "sub", "mul", "min", "max", "div", "pow")
        )
        function = self.chance.choice(functions)
        if function == "pow":
            return self._power(a)
        b = self.value(axes, depth - 1)
        if self.chance.random() < 0.5:
            a, b = b, a
        if function == "mul":
            return product(a, b)
        if function in ("add", "sub"):
            return total(a, b, function)
        if function in ("min", "max"):
            return _either(f"{function}({a.text}, {b.text})", a, b)
        return quotient(a, positive(b))

    def _power(self, base: Term) -> Term:
        exponent = self.chance.choice((2, 3, 0.5, -1, 1.5))
        base = positive(within(base, 4.0) if exponent in (2, 3) else base)
        ends = [base.low**exponent, base.high**exponent]
        high = max(ends)
        shown = f"{exponent:g}" if exponent >= 0 else f"({exponent:g})"
        usual = max(min(base.usual**exponent, high), 1e-3)
        slope = abs(exponent) * usual / max(base.usual, 0.5)
        return Term(
            f"({base.text} ** {shown})", min(ends), high, usual, slope * base.error + 2 * usual, peaked=base.peaked
        )

    def _unary(self, inner: Term) -> Term:
        if self.integers:
            function = self.chance.choice(("abs", "neg", "relu"))
            text = f"(-{inner.text})" if function == "neg" else f"{function}({inner.text})"
            return replace(inner, text=text, low=-inner.most, high=inner.most)
        functions = list(UNARY)
        if inner.exact:
            functions += ["floor", "ceil"]
        function = self.chance.choice(functions)
        if function in ("floor", "ceil"):
            inner = inner if inner.most > 2 else product(inner, Term("3", 3, 3, 3, exact=True))
            return replace(
                inner, text=f"{function}({inner.text})", low=math.floor(inner.low), high=math.ceil(inner.high)
            )
        return UNARY[function](inner)


# What functions do to bounds and errors


def within(term: Term, most: float) -> Term:
    """The term, times a number where it may exceed ``most``; through tanh where its peaks may."""
    if term.peaked:
        term = _tanh(term)
    if term.most <= most:
        return term
    # Usual values are far below bounds of long sums: those decide.
    usual = min(term.most, 4 * term.usual)
    scale = 2.0 ** math.floor(math.log2(most / usual))
    return Term(
        f"({scale:g}*{term.text})", max(term.low * scale, -4 * most), min(term.high * scale, 4 * most),
        term.usual * scale, term.error * scale, term.exact, term.peaked,
    )  # fmt: skip


def positive(term: Term) -> Term:
    """A number of at least a half."""
    if term.low >= 0.5:
        return term
    return Term(
        f"(abs({term.text}) + 0.5)", 0.5, term.most + 0.5, term.usual + 0.5, term.error + term.usual + 0.5,
        peaked=term.peaked,
    )  # fmt: skip


def product(first: Term, second: Term) -> Term:
    """The product of two terms."""
    ends = [a * b for a in (first.low, first.high) for b in (second.low, second.high)]
    usual = first.usual * second.usual
    exact = first.exact and second.exact and max(map(abs, ends)) < 2**20 and _is_integer(first) and _is_integer(second)
    error = first.usual * second.error + second.usual * first.error + usual
    peaked = first.peaked or second.peaked
    return Term(f"({first.text} * {second.text})", min(ends), max(ends), usual, 0.0 if exact else error, exact, peaked)


def total(a: Term, b: Term, function: str = "add") -> Term:
    """The sum or the difference of two terms."""
    sign = 1 if function == "add" else -1
    low, high = (a.low + b.low, a.high + b.high)
    if sign < 0:
        low, high = a.low - b.high, a.high - b.low
    usual = math.hypot(a.usual, b.usual)
    exact = a.exact and b.exact and _is_integer(a) and _is_integer(b) and max(abs(low), abs(high)) < 2**20
    # What is left where both are nearly the same: numbers of equal spread do not cancel.
    spread = max(min(usual, (high - low) / 4), 1e-6)
    error = 0.0 if exact else a.error + b.error + usual
    text = f"({a.text} {'+' if sign > 0 else '-'} {b.text})"
    return Term(text, low, high, spread, error, exact, a.peaked or b.peaked)


def quotient(a: Term, b: Term) -> Term:
    """A term divided by one of at least a half."""
    bound = a.most / max(b.low, 0.5)
    usual = a.usual / max(b.usual, 0.5)
    error = a.error / max(b.usual, 0.5) + usual * b.error / max(b.usual, 0.5) + usual
    low = -bound if a.low < 0 else 0.0
    return Term(f"({a.text} / {b.text})", low, bound, max(usual, 1e-6), error, peaked=a.peaked or b.peaked)


def _is_integer(term: Term) -> bool:
    return "T" not in term.text and "." not in term.text


def _either(text: str, a: Term, b: Term) -> Term:
    return Term(
        text, min(a.low, b.low), max(a.high, b.high), max(a.usual, b.usual),
        max(a.error, b.error), a.exact and b.exact, a.peaked or b.peaked,
    )  # fmt: skip


def _bounded(function: str, low: float, high: float) -> Callable[[Term], Term]:
    """A function of slope one at most and bounded values."""

    def apply(term: Term) -> Term:
        term = within(term, 6.0)
        return Term(f"{function}({term.text})", low, high, min(max(term.usual, 1e-3), 0.6), term.error + 0.6)

    return apply


def _tanh(term: Term) -> Term:
    """A bounded number whatever its argument."""
    return Term(f"tanh({term.text})", -1.0, 1.0, min(max(term.usual, 1e-3), 0.6), min(term.error, 8.0) + 0.6)


def _wave(function: str) -> Callable[[Term], Term]:
    def apply(term: Term) -> Term:
        term = within(term, 8.0)
        return Term(
            f"{function}({term.text})", -1.0, 1.0, min(term.usual, 0.6) if function == "sin" else 0.6, term.error + 1
        )

    return apply


def _exponential(term: Term) -> Term:
    term = within(term, 4.0)
    top = math.exp(min(term.high, 16.0))
    usual = math.exp(min(term.usual, 4.0))
    return Term(f"exp({term.text})", math.exp(max(term.low, -16.0)), top, max(usual, 0.1), usual * (term.error + 1))


def _root(function: str) -> Callable[[Term], Term]:
    def apply(term: Term) -> Term:
        term = positive(term)
        ends = [term.low**0.5, term.high**0.5] if function == "sqrt" else [term.high**-0.5, term.low**-0.5]
        usual = term.usual**0.5 if function == "sqrt" else term.usual**-0.5
        return Term(
            f"{function}({term.text})",
            ends[0],
            ends[1],
            usual,
            usual * term.error / term.usual + usual,
            peaked=term.peaked,
        )

    return apply


def _logarithm(term: Term) -> Term:
    term = positive(term)
    usual = max(abs(math.log(term.usual)), 0.4)
    return Term(
        f"log({term.text})", math.log(term.low), math.log(term.high + 1), usual, term.error / term.usual + 1,
        peaked=term.peaked,
    )  # fmt: skip


def _gate(function: str) -> Callable[[Term], Term]:
    """Relu and what is like it."""

    def apply(term: Term) -> Term:
        return Term(
            f"{function}({term.text})", min(term.low, 0.0) if function != "relu" else 0.0, max(term.high, 0.0),
            term.usual, 2 * term.error + term.usual, exact=term.exact and function == "relu", peaked=term.peaked,
        )  # fmt: skip

    return apply


def _sign(function: str) -> Callable[[Term], Term]:
    def apply(term: Term) -> Term:
        text = f"(-{term.text})" if function == "neg" else f"abs({term.text})"
        low, high = (-term.high, -term.low) if function == "neg" else (0.0, term.most)
        return replace(term, text=text, low=low, high=high)

    return apply


#: What functions of one number make of a term.
UNARY: Mapping[str, Callable[[Term], Term]] = {
    "abs": _sign("abs"), "neg": _sign("neg"), "exp": _exponential, "log": _logarithm, "sqrt": _root("sqrt"),
    "rsqrt": _root("rsqrt"), "tanh": _bounded("tanh", -1.0, 1.0), "sigmoid": _bounded("sigmoid", 0.0, 1.0),
    "erf": _bounded("erf", -1.0, 1.0), "sin": _wave("sin"), "cos": _wave("cos"), "relu": _gate("relu"),
    "gelu": _gate("gelu"), "silu": _gate("silu"),
}  # fmt: skip
