"""Changes of a kernel's text, to see whether the proof notices: one mutation makes one mutant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bench.mutants.text import ELEMENT_BYTES, KernelText

#: What orders threads, copies and products; a mutant lacks one, or waits for one group less.
SYNC_KINDS = ("barrier", "warp barrier", "wait", "late wait", "commit", "fence")

#: Everything else.
OTHER_KINDS = ("shared index", "global index", "operand", "buffer", "stage", "guard", "trip count", "shuffle")

KINDS = SYNC_KINDS + OTHER_KINDS

#: Kind of synchronization by the function called.
_SYNC_FUNCTIONS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("barrier", re.compile(r"__syncthreads|cluster_sync|barrier_arrive\w*|barrier_expect")),
    ("warp barrier", re.compile(r"__syncwarp")),
    ("wait", re.compile(r"(?:copy_async_wait|products_done_but)_\w+|warp_group_(?:wait|finish)_\w+|barrier_wait")),
    ("commit", re.compile(r"copy_async_commit|warp_group_commit")),
    ("fence", re.compile(r"async_proxy_fence|warp_group_arrive|__threadfence\w*|barrier_fence")),
)

#: Waits, and those that leave so many groups under way; of products as the emulator has them, whatever the number.
_LATER = (
    (re.compile(r"copy_async_wait_(?P<pending>\d+)"), "copy_async_wait_{}()"),
    (
        re.compile(r"warp_group_(?:wait_(?P<pending>\d+)|finish_\w+)|products_done_but_(?P<later>\d+)_\d+"),
        "emulator::wait_for_products(EMULATOR_SITE, {})",
    ),
)

#: Bytes by which an operand of a function is moved: what it reads or writes at a time; None for a tensor's element.
_OPERAND_BYTES = (
    (re.compile(r"copy_async_(\d+)\w*"), None),
    (re.compile(r"load_matrix_x4\w*|load_bytes_\w+"), 16),
    (re.compile(r"load_words_\w+|store_shared"), 4),
    (re.compile(r"\w*matrix_descriptor"), 32),
    (re.compile(r"copy_tile\w*"), 128),
)


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A piece of a text and what stands there in the mutant.

    Attributes:
        kind: one of :data:`KINDS`.
        change: what is done, in a word or two.
        start, end: the characters that are replaced.
        text: what by.
        site: number of the mutation among its kernel's.
    """

    kind: str
    change: str
    start: int
    end: int
    text: str
    site: int = -1

    def applied(self, source: str) -> str:
        """The mutant's text."""
        return source[: self.start] + self.text + source[self.end :]


def mutations_of(kernel: KernelText) -> list[Mutation]:
    """All mutations of a kernel, in the order of the text."""
    mutations = [mutation for rule in _RULES for mutation in rule(kernel)]
    ordered = sorted(mutations, key=lambda each: (each.start, each.end, KINDS.index(each.kind), each.change))
    return [replace(mutation, site=site) for site, mutation in enumerate(ordered)]


def _moved(kernel: KernelText, kind: str, first: int, last: int, unit: int, what: str) -> Iterator[Mutation]:
    """An index moved by ``unit`` both ways."""
    text, start, end = kernel.between(first, last), kernel.tokens[first].start, kernel.tokens[last].end
    for sign in "+-":
        change = f"{what} {sign} {unit}"
        yield Mutation(kind=kind, change=change, start=start, end=end, text=f"(({text}) {sign} {unit})")


def _replaced(kernel: KernelText, kind: str, first: int, last: int, text: str, change: str) -> Mutation:
    start, end = kernel.tokens[first].start, kernel.tokens[last].end
    return Mutation(kind=kind, change=change, start=start, end=end, text=text)


def _syncs(kernel: KernelText) -> Iterator[Mutation]:
    """Synchronizations taken out, and waits that leave one group more under way."""
    for number, token in enumerate(kernel.tokens):
        kind = next((kind for kind, pattern in _SYNC_FUNCTIONS if pattern.fullmatch(token.text)), None)
        if kind is None or kernel.tokens[number + 1].text != "(":
            continue
        last = kernel.partner[number + 1]
        yield _replaced(kernel, kind, number, last, "((void)0)", "taken out")
        for pattern, later in _LATER:
            match = pattern.fullmatch(token.text)
            if match is not None:
                pending = int(match["pending"] or match.groupdict().get("later") or 0) + 1
                change = f"{pending} group{'s' * (pending > 1)} under way"
                yield _replaced(kernel, "late wait", number, last, later.format(pending), change)


def _accesses(kernel: KernelText) -> Iterator[Mutation]:
    """Indices of shared and global memory moved by one access."""
    types = {**kernel.pointers, **kernel.shared}
    tokens = kernel.tokens
    for number, token in enumerate(tokens):
        if token.text not in types or number in kernel.dead or _is_declaration(kernel, number):
            continue
        kind = "shared index" if token.text in kernel.shared else "global index"
        size = ELEMENT_BYTES.get(types[token.text], 4)
        after = tokens[number + 1].text
        if after == "[" or (after == ")" and tokens[number + 2].text == "["):
            opening = number + 1 if after == "[" else number + 2
            unit = _unit_in_call(kernel, number, size)
            yield from _moved(kernel, kind, opening + 1, kernel.partner[opening] - 1, unit, token.text)
        elif after == "+" and tokens[number - 1].text == "(":
            unit = max(1, _cast_bytes(kernel, number - 1) // size)
            # Of a call, the first argument alone.
            yield from _moved(kernel, kind, number + 2, kernel.arguments(number - 1)[0][1], unit, token.text)
        elif after == ",":
            yield from _operands(kernel, number, size)


def _is_declaration(kernel: KernelText, number: int) -> bool:
    """True if a name stands where it is declared."""
    back = number - 1
    while back >= 0 and kernel.tokens[back].text not in ";{}":
        if kernel.tokens[back].text == "__shared__":
            return True
        back -= 1
    return False


def _unit_in_call(kernel: KernelText, number: int, size: int) -> int:
    """Elements that an access by index takes: one, or as many as the function around it."""
    function, _ = kernel.call_around(number)
    if function in ("load_matrix_sync", "store_matrix_sync"):
        return 16
    copied = re.match(r"copy_async_(\d+)", function)
    return max(1, int(copied[1]) // size) if copied else 1


def _cast_bytes(kernel: KernelText, opening: int) -> int:
    """Bytes of the vector type that stands before ``(array + index)``: ``*(float4*)(`` -> 16; 0 without one."""
    closing = opening - 1
    if kernel.tokens[closing].text != ")" or kernel.tokens[closing - 1].text != "*":
        return 0
    name = " ".join(token.text for token in kernel.tokens[kernel.partner[closing] + 1 : closing - 1])
    lanes = re.fullmatch(r"([\w ]*?[a-z_])(\d?)", name.removeprefix("volatile "))
    if lanes is None:
        return 0
    element = {"char": 1, "short": 2, "longlong": 8, "ulonglong": 8}.get(lanes[1]) or ELEMENT_BYTES.get(lanes[1], 4)
    return element * int(lanes[2] or 1)


def _operands(kernel: KernelText, number: int, size: int) -> Iterator[Mutation]:
    """Offsets into shared memory that a function takes behind the array."""
    function, opening = kernel.call_around(number)
    unit = next((bytes_ for pattern, bytes_ in _OPERAND_BYTES if pattern.fullmatch(function)), 0)
    if unit == 0:
        return
    copied = re.match(r"copy_async_(\d+)", function)
    unit = int(copied[1]) if copied else unit or size
    arguments = kernel.arguments(opening)
    position = next(at for at, (first, last) in enumerate(arguments) if first == last == number)
    places = 2 if function.startswith("load_words") else 1
    for first, last in arguments[position + 1 : position + 1 + places]:
        yield from _moved(kernel, "operand", first, last, unit, f"{function}'s offset")
    if function.endswith("matrix_descriptor"):
        # Of an operand whose depth lies in adjacent places the leading offset is not used.
        names = ("leading", "stride") if kernel.between(*arguments[position + 2]) != "16" else ("stride",)
        for name in names:
            first, last = arguments[position + (2 if name == "leading" else 3)]
            yield from _moved(kernel, "operand", first, last, 128, name)


def _buffers(kernel: KernelText) -> Iterator[Mutation]:
    """One shared array in the place of another one of the same type."""
    arrays_by_type: dict[str, list[str]] = {}
    for number, token in enumerate(kernel.tokens):
        if token.text not in kernel.shared:
            continue
        arrays = arrays_by_type.setdefault(kernel.shared[token.text], [])
        if _is_declaration(kernel, number):
            arrays.append(token.text)
        elif len(arrays) > 1:
            other = arrays[(arrays.index(token.text) + 1) % len(arrays)]
            yield _replaced(kernel, "buffer", number, number, other, f"{token.text} -> {other}")


def _stages(kernel: KernelText) -> Iterator[Mutation]:
    """The buffer of another step: ``step % 3`` becomes that of ``step + 1``, ``step & 1`` likewise."""
    steps = _step_variables(kernel)
    tokens = kernel.tokens
    seen: set[int] = set()
    for number, token in enumerate(tokens):
        if token.text not in steps or number in kernel.dead or tokens[number - 1].text in ("int", "int64_t"):
            continue
        last, climbed = number, 0
        first = number
        while climbed < 4:
            around = kernel.enclosing[first]
            if around < 0 or tokens[around].text != "(":
                break
            after = tokens[last + 1].text
            closing = kernel.partner[around]
            if after in ("%", "&") and first == around + 1 and _is_number(kernel, last + 2, closing - 1):
                if first not in seen:
                    seen.add(first)
                    text = f"(({kernel.between(first, last)}) + 1)"
                    yield _replaced(kernel, "stage", first, last, text, "of the next step")
                break
            first, last, climbed = around, closing, climbed + 1


def _step_variables(kernel: KernelText) -> set[str]:
    """Variables of loops that walk the steps of a reduction."""
    names = set()
    for number, token in enumerate(kernel.tokens):
        if token.text == "for":
            name = kernel.tokens[number + 3].text
            if "step" in name:
                names.add(name)
    return names


def _is_number(kernel: KernelText, first: int, last: int) -> bool:
    """True if tokens are a number, which may be cast: ``3``, ``(int64_t)1``."""
    texts = [token.text for token in kernel.tokens[first : last + 1]]
    return bool(texts) and texts[-1].isdigit() and texts[:-1] in ([], ["(", "int64_t", ")"])


def _guards(kernel: KernelText) -> Iterator[Mutation]:
    """Conditions turned round, left out or moved by one, and clamped indices let go."""
    tokens = kernel.tokens
    for number, token in enumerate(tokens):
        if number in kernel.dead:
            continue
        if token.text == "if":
            yield from _conditions(kernel, number + 2, kernel.partner[number + 1] - 1)
        elif re.fullmatch(r"copy_async_\d+_guarded", token.text):
            yield from _conditions(kernel, *kernel.arguments(number + 1)[-1])
        elif token.text == "min" and tokens[number + 1].text == "(":
            (first, last), (bound, end) = kernel.arguments(number + 1)
            if bound == end and tokens[bound].text.isdigit():
                closing = kernel.partner[number + 1]
                inner = f"({kernel.between(first, last)})"
                yield _replaced(kernel, "guard", number, closing, inner, "without its bound")
                yield _replaced(kernel, "guard", bound, bound, str(int(tokens[bound].text) + 1), "one more")


def _conditions(kernel: KernelText, first: int, last: int) -> Iterator[Mutation]:
    text = kernel.between(first, last)
    yield _replaced(kernel, "guard", first, last, f"!({text})", "turned round")
    yield _replaced(kernel, "guard", first, last, "true", "left out")
    for number in range(first, last):
        bound = kernel.tokens[number + 1].text
        if kernel.tokens[number].text in ("<", "<=", ">", ">=") and bound.isdigit():
            for more, change in ((1, "one more"), (-1, "one less")):
                yield _replaced(kernel, "guard", number + 1, number + 1, str(int(bound) + more), change)


def _trip_counts(kernel: KernelText) -> Iterator[Mutation]:
    """Loops of one turn more and one less."""
    for number, token in enumerate(kernel.tokens):
        if token.text != "for":
            continue
        for at in range(number, kernel.partner[number + 1]):
            bound = kernel.tokens[at + 1].text
            if kernel.tokens[at].text == "<" and bound.isdigit():
                for more, change in ((1, "one more"), (-1, "one less")):
                    yield _replaced(kernel, "trip count", at + 1, at + 1, str(int(bound) + more), change)


def _shuffles(kernel: KernelText) -> Iterator[Mutation]:
    """Shuffles from another lane, and with a lane missing."""
    for number, token in enumerate(kernel.tokens):
        if re.fullmatch(r"__shfl(?:_\w+)?_sync", token.text):
            _, _, (first, last), *_ = kernel.arguments(number + 1)
            text = kernel.between(first, last)
            if text.isdigit():
                for changed in {int(text) // 2, int(text) * 2 or 1}:
                    yield _replaced(kernel, "shuffle", first, last, str(changed), f"{text} -> {changed}")
        elif token.text == "0xffffffffu":
            yield _replaced(kernel, "shuffle", number, number, "0x7fffffffu", "without lane 31")


_RULES: tuple[Callable[[KernelText], Iterator[Mutation]], ...] = (
    _syncs, _accesses, _buffers, _stages, _guards, _trip_counts, _shuffles,
)  # fmt: skip
