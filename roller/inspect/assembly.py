"""Assembly as LLVM writes it for CPU kernels: without what is for debuggers; of x86-64 the hottest loop and what its
instructions are for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Bits of a register by the letter of its name.
_REGISTER_BITS = {"x": 128, "y": 256, "z": 512}
_REGISTER = re.compile(r"%([xyz])mm\d+")
_LABEL = re.compile(r"^(\.?\w+):")
_JUMP = re.compile(r"^\tj\w+\t(\.\w+)")
_MULTIPLY_ADD = re.compile(r"^vfn?m(?:add|sub)\d*[sp][sd]")
_ARITHMETIC = re.compile(r"^v(?:fn?m(?:add|sub)|add|sub|mul|div|min|max|sqrt)\d*[sp][sd]")
_MEMORY = re.compile(r"\(%r\w+")
_STACK = re.compile(r"\(%r[sb]p\)")


@dataclass(frozen=True, kw_only=True)
class LoopMix:
    """Instructions of a loop.

    Attributes:
        instructions: all of them.
        multiply_adds: fused ones, of vectors or single numbers.
        arithmetic: multiply-adds and other arithmetic on floating-point numbers.
        memory: those that read or write memory, the stack included.
        spills: those that read or write the stack: what found no register.
        vector_bits: width of the widest register in its arithmetic; 0 without any.
    """

    instructions: int
    multiply_adds: int
    arithmetic: int
    memory: int
    spills: int
    vector_bits: int

    @property
    def multiply_add_share(self) -> float:
        """Multiply-adds among all instructions."""
        return self.multiply_adds / self.instructions if self.instructions else 0.0


def hottest_loop(assembly: str, function: str) -> LoopMix | None:
    """The innermost loop of a function with most arithmetic; None where it has no loop, or is not there."""
    lines = _body(assembly, function)
    loops = [_mix(lines[first:last]) for first, last in _innermost(lines)]
    return max(loops, key=lambda loop: (loop.arithmetic, loop.instructions), default=None)


def _body(assembly: str, function: str) -> list[str]:
    """The lines between the function's label and its end."""
    lines = assembly.splitlines()
    try:
        first = next(number for number, line in enumerate(lines) if line.startswith(f"{function}:"))
    except StopIteration:
        return []
    last = next((n for n in range(first, len(lines)) if lines[n].startswith(".Lfunc_end")), len(lines))
    return lines[first:last]


def _innermost(lines: Sequence[str]) -> list[tuple[int, int]]:
    """First and last line of every loop, a jump back to a label, that no other loop lies in."""
    labels = {match[1]: number for number, line in enumerate(lines) if (match := _LABEL.match(line))}
    jumps = [(labels.get(match[1], len(lines)), n) for n, line in enumerate(lines) if (match := _JUMP.match(line))]
    loops = [(first, last + 1) for first, last in jumps if first < last]
    return [loop for loop in loops if not any(_holds(loop, other) for other in loops)]


def _holds(loop: tuple[int, int], other: tuple[int, int]) -> bool:
    """True if a loop has another one in it."""
    return loop != other and loop[0] <= other[0] and other[1] <= loop[1]


def _mix(lines: Sequence[str]) -> LoopMix:
    parts = [
        line.strip().split("\t") for line in lines if line.startswith("\t") and not line.startswith(("\t.", "\t#"))
    ]
    texts = [(part[0], part[1] if len(part) > 1 else "") for part in parts]
    arithmetic = [(name, operands) for name, operands in texts if _ARITHMETIC.match(name)]
    bits = [_REGISTER_BITS[letter] for _, operands in arithmetic for letter in _REGISTER.findall(operands)]
    accesses = [operands for name, operands in texts if not name.startswith("lea") and _MEMORY.search(operands)]
    return LoopMix(
        instructions=len(texts),
        multiply_adds=sum(bool(_MULTIPLY_ADD.match(name)) for name, _ in texts),
        arithmetic=len(arithmetic),
        memory=len(accesses),
        spills=sum(bool(_STACK.search(operands)) for operands in accesses),
        vector_bits=max(bits, default=0),
    )
