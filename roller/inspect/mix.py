"""Kinds of instructions in a piece of SASS.

Every instruction belongs to exactly one class, and in it to a kind: ``shared loads``, ``LDS.128``. A predicated
instruction counts, since it takes an issue slot whether it executes or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from roller.inspect.sass import Instruction

#: The classes in the order in which they are shown.
CLASSES = (
    "multiply-adds", "arithmetic", "shared loads", "global loads", "async copies", "stores", "local memory", "barriers",
    "shuffles", "integer", "moves", "predicates", "branches", "constants", "other",
)  # fmt: skip

#: Matrix instructions: one stands for many multiply-adds of every lane.
MATRIX = frozenset(
    {"HMMA", "IMMA", "DMMA", "BMMA", "QMMA", "OMMA", "HGMMA", "IGMMA", "QGMMA", "BGMMA"}
    | {"UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA"}
)  # fmt: skip
_SCALAR = frozenset({"FFMA", "FFMA2", "DFMA", "HFMA2", "IDP", "FFMA32I"})

#: The opcodes of each class, apart by spaces.
_OPCODES: Mapping[str, str] = {
    "shared loads": "LDS LDSM ATOMS",
    "global loads": "LDG LD TEX TLD SULD",
    "async copies": "LDGSTS UTMALDG UTMAPF UBLKCP UBLKPF",
    "stores": "STS STSM STG ST RED REDG ATOM ATOMG UTMASTG UTMAREDG SUST",
    "local memory": "LDL STL",
    "barriers": "BAR DEPBAR LDGDEPBAR SYNCS MEMBAR ERRBAR FENCE ARRIVES UCGABAR WARPGROUP NANOSLEEP UTMACMDFLUSH "
    "UTMACCTL CCTL WARPSYNC ACQBULK UTCBAR",
    "shuffles": "SHFL REDUX MATCH MOVM",
    "integer": "IMAD IADD IADD3 IABS IMNMX VIADD VIADDMNMX VIMNMX LEA SHF SHL SHR LOP LOP3 PRMT SGXT BMSK FLO POPC "
    "BREV ISCADD XMAD IMUL SEL VABSDIFF LEPC",
    "moves": "MOV MOV32I CS2R S2R S2UR R2UR UMOV CS2UR B2R R2B USEL",
    "predicates": "ISETP FSETP HSETP2 DSETP PLOP3 PSETP P2R R2P VOTE VOTEU UISETP UPLOP3 UP2UR UR2UP FCHK",
    "branches": "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT BSSY BSYNC BREAK BMOV KILL BPT YIELD",
    "constants": "LDC ULDC LDCU",
    "other": "NOP USETMAXREG",
}

_BY_BASE: Mapping[str, str] = {
    **dict.fromkeys(MATRIX | _SCALAR, "multiply-adds"),
    **{opcode: name for name, opcodes in _OPCODES.items() for opcode in opcodes.split()},
}

#: Predicates that are always false: ptxas puts ``@!PT LDS RZ, [RZ]`` behind waits for asynchronous copies.
NEVER = frozenset({"!PT", "!UPT"})

#: Opcodes that begin so where no entry names them: floating point and conversions; the uniform datapath.
_ARITHMETIC = ("F", "H", "D", "MUFU", "I2F", "F2I")
_WIDTHS = frozenset({"8", "16", "64", "128", "256"})


@dataclass(frozen=True)
class Mix:
    """Instructions of a piece of code by class and kind; both with those that occur alone."""

    counts: Mapping[str, int]
    kinds: Mapping[str, Mapping[str, int]]

    @property
    def total(self) -> int:
        """All instructions."""
        return sum(self.counts.values())

    def count(self, *names: str) -> int:
        """Instructions of these classes together."""
        return sum(self.counts.get(name, 0) for name in names)

    def kind(self, *names: str) -> int:
        """Instructions of these kinds, of whatever class: ``mix.kind("LDS.128")``."""
        return sum(kinds.get(name, 0) for kinds in self.kinds.values() for name in names)

    def share(self, name: str) -> float:
        """A class's part of all instructions; 0 of none."""
        return self.count(name) / self.total if self.total else 0.0

    @property
    def matrix(self) -> int:
        """Matrix instructions."""
        return self.kind(*MATRIX)

    @property
    def density(self) -> float | None:
        """Instructions per multiply-add (thesis 5.5.2 the other way round); None without any."""
        multiply_adds = self.count("multiply-adds")
        return self.total / multiply_adds if multiply_adds else None


def mix_of(instructions: Iterable[Instruction]) -> Mix:
    """Count instructions."""
    counted = Counter((class_of(instruction), kind_of(instruction)) for instruction in instructions)
    kinds: dict[str, dict[str, int]] = {}
    for (name, kind), count in sorted(counted.items(), key=lambda item: (-item[1], item[0])):
        kinds.setdefault(name, {})[kind] = count
    ordered = {name: kinds[name] for name in CLASSES if name in kinds}
    return Mix({name: sum(counts.values()) for name, counts in ordered.items()}, ordered)


def class_of(instruction: Instruction) -> str:
    """One of :data:`CLASSES`."""
    base = instruction.base
    if instruction.predicate in NEVER:
        return "other"
    if _is_constant(instruction):
        return "moves"
    class_name = _BY_BASE.get(base)
    if class_name is not None:
        return class_name
    if base.startswith("U"):
        return "integer"
    return "arithmetic" if base.startswith(_ARITHMETIC) else "other"


def _is_constant(instruction: Instruction) -> bool:
    """Copies and constants in the clothes of a multiply-add, by which ptxas balances its pipelines:
    ``IMAD.MOV.U32 R1, RZ, RZ, R2`` and ``HFMA2.MMA R1, -RZ, RZ, 0, 0``."""
    if instruction.base == "IMAD":
        return "MOV" in instruction.modifiers
    if instruction.base not in ("HFMA2", "FFMA"):
        return False
    factors = [part.strip().lstrip("-") for part in instruction.operands.split(",")[1:3]]
    return factors == ["RZ", "RZ"]


def kind_of(instruction: Instruction) -> str:
    """The opcode as far as it matters: memory accesses with the bits of a lane, ``LDS.128``; ldmatrix with the number
    of matrices, ``LDSM.x4``; all others without modifiers."""
    base = instruction.base
    if instruction.predicate in NEVER:
        return f"{base} never executed"
    if base in ("LDSM", "STSM"):
        last = instruction.modifiers[-1] if instruction.modifiers else ""
        return f"{base}.x{last if last in ('2', '4') else '1'}"
    if base in _ACCESSES:
        return f"{base}.{access_bits(instruction)}"
    return base


_ACCESSES = frozenset({"LDS", "STS", "LDG", "STG", "LD", "ST", "LDL", "STL", "LDGSTS"})


def access_bits(instruction: Instruction) -> int:
    """Bits that one lane reads or writes."""
    for modifier in instruction.modifiers:
        bits = modifier.removeprefix("U").removeprefix("S")
        if bits in _WIDTHS:
            return int(bits)
    return 32
