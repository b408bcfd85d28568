"""Hypothesis strategies for attention and its gradients as users may write them, with the operators that these are.

Tensors and axes have other names, statements and operands another order, and what can be put in several ways (the
scale, the mask, the quotient of the softmax, statements written into others) is put in any of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import strategies as st

Data = dict[str, Any]
_Choice = TypeVar("_Choice")

AXES = ("a", "b", "d", "e", "g", "h", "i", "j", "k", "m", "n", "q", "t", "w")
TENSORS = (
    "A",
    "B",
    "C",
    "D",
    "E",
    "K",
    "L",
    "M",
    "O",
    "P",
    "Q",
    "R",
    "S",
    "T",
    "U",
    "V",
    "W",
    "X",
    "Y",
    "Z",
    "Scores",
    "dY",
)


@dataclass(frozen=True)
class Spelling:
    """An operator, and an expression that computes the same.

    Attributes:
        named: the operator by name.
        written: the expression, without names of the operator's.
        names: the expression's inputs and output by those of the operator's program.
    """

    named: Data
    written: Data
    names: Mapping[str, str]


class _Writer:
    """Statements of one expression, by choices that ``draw`` makes."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], named: Data) -> None:
        self.draw, self.named = draw, named
        self.axes = dict(zip("bghijdew", draw(st.permutations(AXES)), strict=False))
        self.tensors = list(draw(st.permutations(TENSORS)))
        self.names: dict[str, str] = {}
        self.statements: list[tuple[str, str]] = []
        self.is_grouped = named["kv_heads"] != named["heads"]
        self.row = "bghi" if self.is_grouped else "bhi"
        self.key = "bgj" if self.is_grouped else "bhj"
        self.factor: float = named.get("scale", 1 / math.sqrt(named["head_dim"]))

    def any_of(self, *choices: _Choice) -> _Choice:
        return self.draw(st.sampled_from(choices))  # type: ignore[no-any-return]

    def element(self, tensor: str, axes: str, last: str = "") -> str:
        """An element of a tensor over axes; ``last`` is what follows the last one."""
        if tensor not in self.names:
            self.names[tensor] = self.tensors.pop()
        return f"{self.names[tensor]}[{','.join(self.axes[axis] for axis in axes)}{last}]"

    def define(self, tensor: str, axes: str, value: str, *, may_be_inline: bool = True) -> str:
        """A value, as a statement of its own or as it is; no reduction inside one over the same axis."""
        if may_be_inline and self.any_of(True, False):
            return f"({value})"
        target = self.element(tensor, axes)
        self.statements.append((target, value))
        return target

    def product(self, *factors: str) -> str:
        return " * ".join(self.draw(st.permutations(factors)))

    def reduce(self, function: str, axes: str, value: str) -> str:
        return f"{function}([{','.join(self.axes[axis] for axis in self.draw(st.permutations(list(axes))))}], {value})"

    def text(self) -> str:
        """The statements in an order in which none reads what is not yet there, the last one last."""
        waiting, ordered = self.statements[:-1], []
        while waiting:
            names = {target.partition("[")[0] for target, _ in waiting}
            ready = [each for each in waiting if names.isdisjoint(re.findall(r"\w+(?=\[)", each[1]))]
            ordered.append(self.any_of(*ready))
            waiting.remove(ordered[-1])
        return "; ".join(f"{target} = {value}" for target, value in [*ordered, self.statements[-1]])

    def scaled(self, value: str) -> str:
        """A value times the scale."""
        if self.factor == 1 and self.any_of(True, False):
            return value
        spellings = [self.product(f"{value}", repr(self.factor))]
        if "scale" not in self.named:
            spellings.append(f"{value} / sqrt({self.named['head_dim']})")
        return self.any_of(*spellings)

    def logits(self) -> str:
        """The scaled and masked products of queries and keys."""
        place = self.any_of("queries", "terms", "sums", "mask")
        query, key = self.element("Q", self.row + "d"), self.element("K", self.key + "d")
        if place == "queries":
            query = self.define("scaled queries", self.row + "d", self.scaled(query))
        terms = self.product(query, key)
        sums = self.reduce("sum", "d", self.scaled(f"({terms})") if place == "terms" else terms)
        value = self.define("scores", self.row + "j", sums, may_be_inline=False)
        if place == "sums" or (place == "mask" and not self.named["causal"]):
            value = self.define("scaled scores", self.row + "j", self.scaled(value))
        if not self.named["causal"]:
            return value
        masked = self.define("masked scores", self.row + "j", self.masked(value))
        return self.define("scaled scores", self.row + "j", self.scaled(masked)) if place == "mask" else masked

    def masked(self, value: str) -> str:
        """A value where a query sees a key, else minus infinity."""
        i, j, last = self.axes["i"], self.axes["j"], self.named["keys"] - self.named["queries"]
        end = self.any_of(
            f"{j} <= {i} + {last}", f"{i} + {last} >= {j}", f"{j} < {i} + {last + 1}", f"{j} - {i} <= {last}"
        )
        beyond = f"{j} > {i} + {last}"
        window = self.named.get("window", 0)
        if not window:
            return self.any_of(
                f"select({end}, {value}, -inf)",
                f"select({beyond}, -inf, {value})",
                f"{value} + select({end}, 0, -inf)",
                f"select(not ({beyond}), {value}, -inf)",
            )
        begin = self.any_of(f"{j} > {i} + {last - window}", f"{j} - {i} >= {last - window + 1}")
        before = f"{j} <= {i} + {last - window}"
        first, second = self.draw(st.permutations([end, begin]))
        return self.any_of(
            f"select({first} and {second}, {value}, -inf)",
            f"select({first}, select({second}, {value}, -inf), -inf)",
            f"select({beyond} or {before}, -inf, {value})",
            f"{value} + select({first} and {second}, 0, -inf)",
        )

    def spelling(self, result: str) -> Spelling:
        """What was written; the last statement is the ``result``."""
        program = ("Q", "K", "V", "dY", "L", "D")
        names = {name: self.names[name] for name in (*program, result) if name in self.names}
        text, named = self.text(), self.named
        sizes = {
            "b": named["b"], "g": named["kv_heads"], "h": named["heads"] // named["kv_heads"], "i": named["queries"],
            "j": named["keys"], "d": named["head_dim"], "e": named["value_dim"],
            "w": named["head_dim"] + named["value_dim"],
        }  # fmt: skip
        if not self.is_grouped:
            sizes["h"] = sizes.pop("g")
        if result != "dKV":
            sizes.pop("w")
        dtypes = {name: "float32" if own in "LD" else named["dtype"] for own, name in names.items()}
        written = {"expr": text, "sizes": {self.axes[axis]: size for axis, size in sizes.items()}, "dtypes": dtypes}
        return Spelling(named=named, written=written | {"name": "spelled"}, names=names)


@st.composite
def _operators(draw: Any, largest: int, widths: Sequence[int]) -> Data:
    heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 1, 2, 4]))
    causal = draw(st.booleans())
    queries, keys = sorted(draw(st.lists(st.integers(2, largest), min_size=2, max_size=2)))
    if not causal and draw(st.booleans()):
        queries, keys = keys, queries
    named = {
        "b": draw(st.integers(1, 3)), "heads": heads * group, "kv_heads": heads, "queries": queries, "keys": keys,
        "head_dim": draw(st.sampled_from(widths)), "value_dim": draw(st.sampled_from(widths)), "causal": causal,
        "dtype": draw(st.sampled_from(["float16", "bfloat16", "float32"])),
    }  # fmt: skip
    if causal and draw(st.booleans()):
        named["window"] = draw(st.integers(1, keys - 1))
    scale = draw(st.sampled_from([None, None, 1.0, 0.125, 0.3]))
    return named | ({} if scale is None else {"scale": scale})


@st.composite
def attention_spellings(draw: Any, largest: int = 9, widths: Sequence[int] = (1, 3, 4)) -> Spelling:
    """Attention of up to ``largest`` queries and keys."""
    named = draw(_operators(largest, widths))
    writer = _Writer(draw, {"op": "attention", **named})
    row = writer.row
    logits = writer.define("logits", row + "j", writer.logits(), may_be_inline=False)
    peak = writer.define("peak", row, writer.reduce("max", "j", logits), may_be_inline=False)
    exponentials = writer.define("exponentials", row + "j", f"exp({logits} - {peak})")
    total = writer.define("total", row, writer.reduce("sum", "j", exponentials), may_be_inline=False)
    values = writer.element("V", writer.key + "e")
    if writer.any_of(True, False):
        quotient = writer.any_of(f"{exponentials} / {total}", writer.product(exponentials, f"(1 / {total})"))
        weights = writer.define("weights", row + "j", quotient)
        result = writer.reduce("sum", "j", writer.product(weights, values))
    else:
        result = f"{writer.reduce('sum', 'j', writer.product(exponentials, values))} / {total}"
    writer.define("Y", row + "e", result, may_be_inline=False)
    return writer.spelling("Y")


@st.composite
def gradient_spellings(draw: Any, largest: int = 9, widths: Sequence[int] = (1, 3, 4)) -> Spelling:
    """A gradient of attention of up to ``largest`` queries and keys."""
    named, of = draw(_operators(largest, widths)), draw(st.sampled_from(["queries", "keys"]))
    writer = _Writer(draw, {"op": "attention_gradient", "of": of, **named})
    row, key = writer.row, writer.key
    weights = writer.define("P", row + "j", f"exp({writer.logits()} - {writer.element('L', row)})")
    terms = writer.product(writer.element("dY", row + "e"), writer.element("V", key + "e"))
    moved = writer.define("dP", row + "j", writer.reduce("sum", "e", terms), may_be_inline=False)
    slopes = writer.product(weights, f"({moved} - {writer.element('D', row)})")
    is_scaled_late = writer.any_of(True, False)
    slopes = writer.define("dS", row + "j", slopes if is_scaled_late else writer.scaled(f"({slopes})"))
    if of == "queries":
        value = writer.reduce("sum", "j", writer.product(slopes, writer.element("K", key + "d")))
        writer.define("dQ", row + "d", writer.scaled(value) if is_scaled_late else value, may_be_inline=False)
        return writer.spelling("dQ")
    summed = "hi" if writer.is_grouped else "i"
    of_keys = writer.reduce("sum", summed, writer.product(slopes, writer.element("Q", row + "d")))
    writer.define("dK", key + "d", writer.scaled(of_keys) if is_scaled_late else of_keys, may_be_inline=False)
    of_values = writer.reduce("sum", summed, writer.product(weights, writer.element("dY", row + "e")))
    writer.define("dV", key + "e", of_values, may_be_inline=False)
    parts = [
        writer.element("dK", key + "w", " | pad=0"),
        writer.element("dV", key + "w", f" - {named['head_dim']} | pad=0"),
    ]
    writer.define("dKV", key + "w", " + ".join(draw(st.permutations(parts))), may_be_inline=False)
    return writer.spelling("dKV")
