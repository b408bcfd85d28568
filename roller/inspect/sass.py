"""SASS as nvdisasm prints it -> instructions, basic blocks and loops.

Only what the text says is used: addresses, labels, opcodes, predicates. Trip counts are not in it. Loops are natural
loops: a back edge goes to a block that dominates it, and a loop is all that reaches the edge without its header (Aho,
Lam, Sethi, Ullman, Compilers, 9.6). Nothing here runs a program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

#: Bytes of an instruction from sm_70 on.
INSTRUCTION_BYTES = 16

_SECTION = re.compile(r"^//-+ (\S+)\s+-+$")
_LABEL = re.compile(r"^([.$\w]+):$")
_INSTRUCTION = re.compile(r"^/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\(([.$\w]+)\)")
#: Registers per thread: up to sm_80 in the section of the code, always among the attributes.
_REGISTERS = re.compile(r"SHI_REGISTERS=(\d+)")
_REGISTER_ATTRIBUTE = re.compile(r"EIATTR_REGCOUNT\n(?:.*\n){1,6}?.*index@\((\S+)\)\n.*0x([0-9a-f]+)")
_ARCHITECTURE = re.compile(r"\bEF_CUDA_SM(\d+)")
_ZEROES = re.compile(r"^\.zero\s+(\d+)")

#: After these nothing follows, unless they are predicated.
_ENDS = frozenset({"EXIT", "RET", "KILL", "BPT"})
_JUMPS = frozenset({"BRA", "JMP"})
#: These jump where a register says.
_INDIRECT = frozenset({"BRX", "BRXU", "JMX", "JMXU"})
#: A call comes back to the next instruction; ptxas also leaves a loop by one that does not.
_CALLS = frozenset({"CALL"})


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: bytes from the start of the function.
        opcode: with its modifiers, ``LDS.U.128``.
        operands: the text behind it.
        predicate: ``P0``, ``!UP1``; empty where it always executes.
        targets: labels that it names.
    """

    address: int
    opcode: str
    operands: str = ""
    predicate: str = ""
    targets: tuple[str, ...] = ()

    @property
    def base(self) -> str:
        """The opcode without modifiers: ``LDS``."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """``("U", "128")``."""
        return tuple(self.opcode.split(".")[1:])

    @property
    def text(self) -> str:
        """As a listing shows it."""
        guard = f"@{self.predicate} " if self.predicate else ""
        return f"{guard}{self.opcode} {self.operands}".rstrip()


@dataclass(frozen=True)
class Block:
    """Instructions ``first`` to ``last`` (exclusive) that are executed together, and the blocks that may follow."""

    first: int
    last: int
    successors: tuple[int, ...]


@dataclass(frozen=True)
class Loop:
    """A natural loop.

    Attributes:
        header: the block that every turn begins with.
        blocks: all of its blocks, those of inner loops too, ascending.
        depth: 1 is a loop in no other.
        parent: position of the loop around it in ``SassFunction.loops``; None at depth 1.
        inner: positions of the loops right inside.
    """

    header: int
    blocks: tuple[int, ...]
    depth: int
    parent: int | None
    inner: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class SassFunction:
    """One kernel as machine code.

    Attributes:
        name: the function's.
        registers: per thread, as the cubin says; 0 where it does not.
        shared_bytes: static shared memory of a block, from sm_90 on with the KiB that CUDA keeps for itself.
        instructions: in the order of their addresses.
        labels: position of the instruction behind each label.
    """

    name: str
    registers: int
    shared_bytes: int
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The control-flow graph; block 0 is where a kernel starts."""
        return _blocks(self.instructions, self.labels)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """All loops that a kernel can reach, outer ones first."""
        return _loops(self.blocks)

    @cached_property
    def reachable(self) -> tuple[Instruction, ...]:
        """Instructions that can be executed: without the padding behind the end."""
        reached = _reverse_postorder([block.successors for block in self.blocks])
        return tuple(self._of(sorted(reached)))

    def body(self, loop: Loop) -> tuple[Instruction, ...]:
        """The instructions of a loop, those of inner loops too, each once."""
        return tuple(self._of(loop.blocks))

    def own(self, loop: Loop) -> tuple[Instruction, ...]:
        """The instructions of a loop without those of inner ones."""
        inside = {block for position in loop.inner for block in self.loops[position].blocks}
        return tuple(self._of(block for block in loop.blocks if block not in inside))

    def _of(self, blocks: Iterator[int] | Sequence[int]) -> Iterator[Instruction]:
        for number in blocks:
            block = self.blocks[number]
            yield from self.instructions[block.first : block.last]


def architecture_of(text: str) -> int | None:
    """The architecture a disassembled image is for, as ``10 * major + minor``; None where the text has no flags."""
    flags = _ARCHITECTURE.search(text)
    return int(flags.group(1)) if flags else None


def parse_sass(text: str) -> list[SassFunction]:
    """Functions in nvdisasm's output, in its order.

    Text without section headers, an excerpt, is one function without a name.
    """
    shared: dict[str, int] = {}
    parts: dict[str, list[str]] = {}
    section = ".text."
    for raw in text.splitlines():
        line = raw.strip()
        header = _SECTION.match(line)
        if header is not None:
            section = header.group(1)
        elif section.startswith(".text."):
            parts.setdefault(section.removeprefix(".text."), []).append(line)
        elif section.startswith(".nv.shared."):
            zeroes = _ZEROES.match(line)
            if zeroes is not None:
                name = section.removeprefix(".nv.shared.")
                shared[name] = shared.get(name, 0) + int(zeroes.group(1))
    registers = {name: int(count, 16) for name, count in _REGISTER_ATTRIBUTE.findall(text)}
    functions = [_function(name, lines, registers.get(name, 0), shared.get(name, 0)) for name, lines in parts.items()]
    return [function for function in functions if function.instructions]


def _function(name: str, lines: Sequence[str], registers: int, shared_bytes: int) -> SassFunction:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in lines:
        label = _LABEL.match(line)
        if label is not None:
            labels[label.group(1)] = len(instructions)
            continue
        instruction = _INSTRUCTION.match(line)
        if instruction is not None:
            address, predicate, opcode, operands = instruction.groups()
            targets = tuple(_TARGET.findall(operands))
            instructions.append(Instruction(int(address, 16), opcode, operands, predicate or "", targets))
        elif "SHI_REGISTERS" in line:
            registers = int(_REGISTERS.search(line).group(1))  # type: ignore[union-attr]
    return SassFunction(name, registers, shared_bytes, tuple(instructions), labels)


# Basic blocks


def _blocks(instructions: Sequence[Instruction], labels: Mapping[str, int]) -> tuple[Block, ...]:
    starts = {0, *(position for position in labels.values() if position < len(instructions))}
    starts |= {i + 1 for i, instruction in enumerate(instructions[:-1]) if _leaves(instruction)}
    firsts = sorted(starts)
    number = {first: i for i, first in enumerate(firsts)}
    blocks = []
    for first, last in zip(firsts, [*firsts[1:], len(instructions)], strict=True):
        following = [number[p] for p in _following(instructions, last - 1, labels) if p in number]
        blocks.append(Block(first, last, tuple(dict.fromkeys(following))))
    return tuple(blocks)


def _leaves(instruction: Instruction) -> bool:
    return instruction.base in _ENDS | _JUMPS | _INDIRECT | _CALLS


def _following(instructions: Sequence[Instruction], position: int, labels: Mapping[str, int]) -> Iterator[int]:
    """Positions that may come after ``position``, the last instruction of its block."""
    instruction = instructions[position]
    base = instruction.base
    if base in _JUMPS | _INDIRECT | _CALLS:
        yield from (labels[target] for target in instruction.targets if target in labels)
    if not _leaves(instruction) or _conditional(instruction) or base in _CALLS:
        yield position + 1


def _conditional(instruction: Instruction) -> bool:
    """True if execution may go on behind a jump or an end: by its predicate, or by an operand (``BRA.DIV``, ``BRA P1,
    label``)."""
    if instruction.predicate:
        return True
    return instruction.base in _JUMPS and not instruction.operands.startswith("`(")


# Loops


def _reverse_postorder(successors: Sequence[Sequence[int]]) -> list[int]:
    """Blocks that block 0 reaches, each before those behind it, back edges aside."""
    order: list[int] = []
    seen = {0} if successors else set()
    stack = [(0, iter(successors[0]))] if successors else []
    while stack:
        block, unvisited = stack[-1]
        following = next((after for after in unvisited if after not in seen), None)
        if following is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(successors[following])))
    return order[::-1]


def _dominators(order: Sequence[int], before: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """The immediate dominator of every block (Cooper, Harvey, Kennedy, A Simple, Fast Dominance Algorithm)."""
    place = {block: i for i, block in enumerate(order)}
    above = {order[0]: order[0]}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            placed = [b for b in before[block] if b in above]
            best = placed[0]
            for other in placed[1:]:
                while best != other:
                    if place[best] > place[other]:
                        best = above[best]
                    else:
                        other = above[other]
            if above.get(block) != best:
                above[block], changed = best, True
    return above


def _loops(blocks: Sequence[Block]) -> tuple[Loop, ...]:
    order = _reverse_postorder([block.successors for block in blocks])
    if not order:
        return ()
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for after in blocks[block].successors:
            before[after].append(block)
    above = _dominators(order, before)
    bodies: dict[int, set[int]] = {}
    for block in order:
        for header in blocks[block].successors:
            if _dominates(header, block, above):
                # Back edges to one header are one loop.
                bodies.setdefault(header, {header}).update(_reaching(block, header, before))
    return _nested(bodies)


def _dominates(header: int, block: int, above: Mapping[int, int]) -> bool:
    while block != header and above[block] != block:
        block = above[block]
    return block == header


def _reaching(block: int, header: int, before: Mapping[int, Sequence[int]]) -> set[int]:
    """Blocks from which ``block`` is reached without passing ``header``."""
    reaching = {block}
    waiting = [block] if block != header else []
    while waiting:
        for previous in before[waiting.pop()]:
            if previous not in reaching and previous != header:
                reaching.add(previous)
                waiting.append(previous)
    return reaching


def _nested(bodies: Mapping[int, set[int]]) -> tuple[Loop, ...]:
    """Loops with the one around each: the smallest other that holds its header."""
    headers = sorted(bodies, key=lambda header: (-len(bodies[header]), header))
    parents: list[int | None] = []
    for position, header in enumerate(headers):
        around = [i for i in range(position) if header in bodies[headers[i]]]
        parents.append(around[-1] if around else None)
    loops: list[Loop] = []
    for position, header in enumerate(headers):
        parent = parents[position]
        depth = 1 if parent is None else loops[parent].depth + 1
        inner = tuple(i for i, other in enumerate(parents) if other == position)
        loops.append(Loop(header, tuple(sorted(bodies[header])), depth, parent, inner))
    return tuple(loops)
