"""The text of an emitted kernel as tokens with their brackets: what our own generator writes, which is regular."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_TOKEN = re.compile(
    r"(?P<skip>//[^\n]*|/\*.*?\*/|^[ \t]*\#[^\n]*)"
    r"|(?P<token>0x[\da-fA-F]+(?:\.[\da-fA-F]*)?(?:p[+-]?\d+)?\w*|\d[\w.]*|[A-Za-z_]\w*"
    r"|->|::|<=|>=|==|!=|&&|\|\||<<|>>|\+\+|--|\S)",
    re.DOTALL | re.MULTILINE,
)
_OPENING = {"(": ")", "[": "]", "{": "}"}

#: Bytes of the element types of tensors and of shared memory.
ELEMENT_BYTES = {
    "half": 2, "nv_bfloat16": 2, "unsigned short": 2, "ushort": 2, "float": 4, "double": 8, "int": 4, "uint": 4,
    "signed char": 1, "uchar": 1, "unsigned char": 1, "int8_t": 1, "__nv_fp8_e4m3": 1, "__nv_fp8_e5m2": 1,
}  # fmt: skip


class Token(NamedTuple):
    """A token and where in the text it stands."""

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class KernelText:
    """A CUDA text with one kernel.

    Attributes:
        source: the text.
        entry: name of the kernel.
    """

    source: str
    entry: str

    @cached_property
    def definition(self) -> int:
        """Where the kernel's definition begins, its forward declaration and all functions before it."""
        return self.source.rindex('extern "C" __global__')

    @cached_property
    def prelude(self) -> str:
        """The text before the kernel and its forward declaration."""
        return self.source[: self.source.index('extern "C" __global__')]

    @cached_property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        """Type and name of every parameter, pointers and tensor maps, in order."""
        signature = re.search(rf"\b{re.escape(self.entry)}\s*\(([^)]*)\)", self.source[self.definition :])
        assert signature is not None, f"{self.entry} has a definition"
        return tuple(
            (kind.strip(), name) for kind, name in re.findall(r"([^,]*?)(\w+)\s*(?:,|$)", signature[1].strip())
        )

    @cached_property
    def pointers(self) -> Mapping[str, str]:
        """Element type of what every parameter points to, by name; tensor maps are none of them."""
        elements = ((kind.replace("__restrict__", "").rpartition("*"), name) for kind, name in self.parameters)
        return {name: element.strip() for (element, star, _), name in elements if star}

    @cached_property
    def tokens(self) -> tuple[Token, ...]:
        """The tokens of the kernel's body, comments and directives left out."""
        begin = self.source.index("{", self.definition)
        matches = _TOKEN.finditer(self.source, begin)
        return tuple(Token(each["token"], each.start(), each.end()) for each in matches if each["token"])

    @cached_property
    def partner(self) -> Mapping[int, int]:
        """The closing bracket of every opening one and the other way round, by their numbers among the tokens."""
        partner, opened = {}, []
        for number, token in enumerate(self.tokens):
            if token.text in _OPENING:
                opened.append(number)
            elif token.text in _OPENING.values():
                partner[opened[-1]] = number
                partner[number] = opened.pop()
        return partner

    @cached_property
    def enclosing(self) -> Sequence[int]:
        """By token: the bracket that is open around it, -1 outside; of a bracket the one around both."""
        around, opened = [], [-1]
        for token in self.tokens:
            if token.text in _OPENING.values():
                opened.pop()
            around.append(opened[-1])
            if token.text in _OPENING:
                opened.append(len(around) - 1)
        return around

    @cached_property
    def shared(self) -> Mapping[str, str]:
        """Element type of every array in shared memory, by name."""
        declared = re.findall(
            r"__shared__\s+(?:(?:alignas|__align__)\(\d+\)\s+)?([\w ]+?)\s+(\w+)\[", self.source[self.definition :]
        )
        return {name: kind for kind, name in declared}

    @cached_property
    def dead(self) -> frozenset[int]:
        """Tokens of declarations that nothing reads: TVM writes common subexpressions that it does not use."""
        uses: dict[str, int] = {}
        for token in self.tokens:
            uses[token.text] = uses.get(token.text, 0) + 1
        dead: set[int] = set()
        for number, token in enumerate(self.tokens):
            if token.text.startswith("cse_v") and uses[token.text] == 1:
                end = number
                while self.tokens[end].text != ";":
                    end += 1
                dead.update(range(number - 1, end))
        return frozenset(dead)

    @cached_property
    def shape(self) -> tuple[str, ...]:
        """The tokens without the values of numbers: kernels of one schedule on problems of other sizes share it."""
        return tuple("0" if token.text[0].isdigit() else token.text for token in self.tokens)

    def between(self, first: int, last: int) -> str:
        """The text from one token to another, both included."""
        return self.source[self.tokens[first].start : self.tokens[last].end]

    def line_of(self, position: int) -> int:
        """The number of the line, counted from 1, in which a character stands."""
        return self.source.count("\n", 0, position) + 1

    def arguments(self, opening: int) -> list[tuple[int, int]]:
        """First and last token of every argument of a call, by its opening bracket."""
        closing = self.partner[opening]
        commas = [n for n in range(opening, closing) if self.tokens[n].text == "," and self.enclosing[n] == opening]
        starts = [opening + 1, *(comma + 1 for comma in commas)]
        return list(zip(starts, [*(comma - 1 for comma in commas), closing - 1], strict=True))

    def call_around(self, number: int) -> tuple[str, int]:
        """The function whose argument a token is part of, and its opening bracket; ``("", -1)`` outside of calls."""
        opening = self.enclosing[number]
        while opening >= 0:
            before = self.tokens[opening - 1].text if opening else ""
            if self.tokens[opening].text == "(" and re.match(r"[A-Za-z_]", before) and before not in ("if", "for"):
                return before, opening
            opening = self.enclosing[opening]
        return "", -1
