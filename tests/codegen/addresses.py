"""The addresses a CUDA kernel touches, computed from its source for many threads at once.

A GPU refuses a vector access whose address is no multiple of its width; the CPU that runs our kernels does not mind.
So the index expressions of the source are evaluated here for random threads, blocks and loop iterations.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLES = 512
WARP_SAMPLES = 4

_ELEMENT_BYTES = {
    "half": 2, "nv_bfloat16": 2, "__nv_bfloat16": 2, "ushort": 2, "unsigned short": 2,
    "float": 4, "int": 4, "uint": 4, "double": 8, "uchar": 1,
}  # fmt: skip
_DECLARATION = re.compile(
    r"\b(half|nv_bfloat16|__nv_bfloat16|ushort|unsigned short|float|uint|double|uchar)"
    r"\s*\*?\s*(?:__restrict__\s+)?(\w+_ptr\w*)\s*[\[,)]"
)
_VECTOR = re.compile(r"\*\((?:const )?(half|nv_bfloat16|ushort|float|uint|int|double)(2|4|8)\s?\*\)\(")
_LOOP = re.compile(r"for \(int (\w+) = 0; \1 < (\d+); \+\+\1\)")
_INDEX_STORE = re.compile(r"^\s*(\w+_ptr)\[(\w+)\] = (.*);$", re.MULTILINE)
_CHOICE = re.compile(r"^\s*int (\w+);\n\s*if .*\{\n\s*\1 = (.*);$", re.MULTILINE)
_SUBEXPRESSION = re.compile(r"^\s*int(?:64_t)? (\w+) = (.*);$", re.MULTILINE)
_STORED = re.compile(r"(\w+_ptr)\[(\w+)\]")
#: Turns by which an address that advances may have advanced.
_TURNS = 5


@dataclass(frozen=True)
class VectorAccess:
    """``*(float4*)(base + index)``: its text, its width, and its byte offsets from ``base`` for the samples."""

    text: str
    base: str
    width_bytes: int
    offsets_bytes: NDArray[np.int64]


def vector_accesses(source: str, grid: Sequence[int], block: Sequence[int]) -> Iterator[VectorAccess]:
    """All vector accesses to named arrays in the first kernel of ``source``."""
    declared = {name: _ELEMENT_BYTES[dtype] for dtype, name in _DECLARATION.findall(source)}
    variables = _Variables(source, grid, block)
    for match in _VECTOR.finditer(source):
        inner = _bracketed(source, match.end() - 1)
        if inner.startswith("&"):
            continue  # registers: the address of a vector variable
        base, index = _split_sum(inner)
        cast = re.fullmatch(r"\(\((\w+)\*\)(\w+)\)", base)
        element = _ELEMENT_BYTES[cast.group(1)] if cast else declared[base]
        width = _ELEMENT_BYTES[match.group(1)] * int(match.group(2))
        offsets = np.broadcast_to(variables.value(index), (SAMPLES,)) * element
        yield VectorAccess(f"{match.group()}{inner})", base, width, offsets)


def largest_dynamic_byte(source: str, grid: Sequence[int], block: Sequence[int]) -> int:
    """One more than the last byte of dynamic shared memory that any sampled thread touches."""
    variables = _Variables(source, grid, block)
    largest = 0
    for match in re.finditer(r"\(\((\w+)\*\)buf_dyn_shmem_ptr\)(\[| \+ )", source):
        start = match.end() if match.group(2) == " + " else match.end() - 1
        index = _bracketed(source, start)
        # The four elements of a vector follow its address.
        width = 4 if match.group(2) == " + " else 1
        last = int(np.max(variables.value(index))) + width
        largest = max(largest, last * _ELEMENT_BYTES[match.group(1)])
    return largest


def warp_offsets(source: str, function: str, argument: int, grid: Sequence[int], block: Sequence[int]) -> NDArray[Any]:
    """What every call of ``function`` is given as an argument, by the 32 threads of a warp; shape (calls, 32).

    Warps (threads along y), blocks and loop iterations are random, several of each for a call.
    """
    body = source[source.rindex('extern "C" __global__') :]
    found = []
    for match in re.finditer(rf"\b{function}\(", body):
        arguments = _arguments(_bracketed(body, match.end() - 1))
        for seed in range(WARP_SAMPLES):
            variables = _Variables(body, grid, block, seed)
            alike = {name: np.full(32, values[2]) for name, values in variables.known.items()}
            variables.known = {**alike, "threadIdx_x": np.arange(32)}
            found.append(np.broadcast_to(variables.value(arguments[argument]), (32,)))
    return np.array(found)


def _arguments(text: str) -> list[str]:
    """The arguments of a call: commas between brackets separate none."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


class _Variables:
    """Random values for threads, blocks and loops; named sub-expressions follow from them."""

    def __init__(self, source: str, grid: Sequence[int], block: Sequence[int], seed: int = 3) -> None:
        generator = np.random.default_rng(seed)
        self.known: dict[str, NDArray[np.int64]] = {}
        for name, extents in (("threadIdx", block), ("blockIdx", grid)):
            for letter, extent in zip("xyz", extents, strict=True):
                self.known[f"{name}_{letter}"] = _corners(generator, extent)
        for name, extent in _LOOP.findall(source):
            self.known[name] = _corners(generator, int(extent))
        self.definitions: Mapping[str, str] = dict([*_SUBEXPRESSION.findall(source), *_CHOICE.findall(source)])
        self.known["turns"] = _corners(generator, _TURNS)
        # Arrays of indices that are worked out once, by element or in a loop, and advance by a constant from there on.
        self.stores: dict[tuple[str, str], tuple[str, str]] = {}
        self.advances: dict[tuple[str, str], str] = {}
        for name, index, value in _INDEX_STORE.findall(source):
            key = (name, index if index.isdigit() else "")
            advance = re.fullmatch(rf"\({name}\[{index}\] \+ (\d+)\)", value)
            if advance:
                self.advances[key] = advance.group(1)
            else:
                self.stores.setdefault(key, (index, value))

    def value(self, expression: str) -> NDArray[np.int64]:
        text = _uncast(expression)
        while re.search(_STORED, text):
            text = re.sub(_STORED, lambda read: self.stored(*read.groups()), text)
        text = re.sub(r"\b(threadIdx|blockIdx)\.([xyz])", r"\1_\2", text)
        text = text.replace("/", "//")
        for name in set(re.findall(r"[A-Za-z_]\w*", text)) - self.known.keys() - _FUNCTIONS.keys():
            self.known[name] = self.value(self.definitions[name])
        return np.asarray(_evaluate(ast.parse(text.strip(), mode="eval").body, self.known), dtype=np.int64)

    def stored(self, array: str, index: str) -> str:
        """The expression that was stored in an array of indices, for the reader's own index."""
        key = (array, index) if (array, index) in self.stores else (array, "")
        kept, value = self.stores[key]
        value = self.definitions.get(value, value)
        first = value if kept.isdigit() else re.sub(rf"\b{kept}\b", index, value)
        return f"({_uncast(first)} + turns * {self.advances.get(key, 0)})"


def _uncast(text: str) -> str:
    """Without casts to integers."""
    return re.sub(r"\((?:int|int64_t)\)", "", text)


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: np.add, ast.Sub: np.subtract, ast.Mult: np.multiply, ast.FloorDiv: np.floor_divide, ast.Mod: np.remainder,
    ast.BitAnd: np.bitwise_and, ast.BitOr: np.bitwise_or, ast.BitXor: np.bitwise_xor,
    ast.LShift: np.left_shift, ast.RShift: np.right_shift,
    ast.UAdd: np.positive, ast.USub: np.negative, ast.Invert: np.invert,
    ast.Eq: np.equal, ast.NotEq: np.not_equal,
    ast.Lt: np.less, ast.LtE: np.less_equal, ast.Gt: np.greater, ast.GtE: np.greater_equal,
}  # fmt: skip


#: Threads beyond the output work on its last elements again.
_FUNCTIONS: dict[str, Callable[..., Any]] = {"smaller": np.minimum, "larger": np.maximum}


def _evaluate(node: ast.expr, known: Mapping[str, NDArray[np.int64]]) -> Any:
    """The value of an integer expression over named arrays; anything else in it raises ``ValueError``."""
    match node:
        case ast.Constant(value=int(number)):
            return np.int64(number)
        case ast.Name(id=name):
            return known[name]
        case ast.Call(func=ast.Name(id=name), args=[left, right]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_evaluate(left, known), _evaluate(right, known))
        case ast.UnaryOp(op=operator, operand=operand) if type(operator) in _OPERATORS:
            return _OPERATORS[type(operator)](_evaluate(operand, known))
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            return _OPERATORS[type(operator)](_evaluate(left, known), _evaluate(right, known))
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _OPERATORS:
            return _OPERATORS[type(operator)](_evaluate(left, known), _evaluate(right, known))
    raise ValueError(f"not an index expression: {ast.unparse(node)}")


def _corners(generator: np.random.Generator, extent: int) -> NDArray[np.int64]:
    values = generator.integers(0, extent, SAMPLES)
    values[:2] = 0, extent - 1
    return values


def _bracketed(source: str, opening: int) -> str:
    """What stands between the bracket at ``opening`` and its partner."""
    depth = 0
    for position in range(opening, len(source)):
        depth += (source[position] in "([") - (source[position] in ")]")
        if depth == 0:
            return source[opening + 1 : position]
    raise ValueError("a bracket is not closed")


def _split_sum(text: str) -> tuple[str, str]:
    """``base + index`` at the outermost level; a base alone has index 0."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0 and text.startswith(" + ", position):
            return text[:position], text[position + 3 :]
    return text, "0"
