"""Many mutants of a kernel as one text: compiled once, each run by its number."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bench.mutants.text import KernelText

#: The parameter that says which variant runs.
CHOSEN = "variant_ptr"


#: A shared array as a kernel declares it.
_SHARED = re.compile(r"^[ ]*(__shared__[^;\n]*;)", re.MULTILINE)

#: What reads the number, unseen by the checker: variants that do the same are to look the same.
_NUMBER = """\
__attribute__((no_sanitize("thread"), noinline)) static int variant_number(const int* number) { return *number; }"""


def one_text(kernel: KernelText, sources: Sequence[str]) -> str:
    """A text whose kernel runs one of several: the one by the number in its last parameter.

    Variants that do the same look the same to the checker: they have their shared arrays in common, so that equal
    accesses are to equal addresses, and every line is one of the kernel's own text.

    Args:
        kernel: the kernel that all of them are variants of.
        sources: their texts, which differ inside the kernel's definition alone.
    """
    name = re.compile(rf"\b{re.escape(kernel.entry)}\b")
    first = kernel.line_of(kernel.definition)
    arrays = " ".join(_SHARED.findall(kernel.source[kernel.definition :]))
    parts = [kernel.prelude]
    for number, source in enumerate(sources):
        definition = name.sub(f"{kernel.entry}_{number}", source[kernel.definition :])
        parts.append(f'{arrays if number == 0 else ""}\n#line {first} "kernel.cu"\n{_SHARED.sub("", definition)}')
    declared = ", ".join(f"{kind} {parameter}" for kind, parameter in kernel.parameters)
    passed = ", ".join(parameter for _, parameter in kernel.parameters)
    calls = [f"    case {number}: {kernel.entry}_{number}({passed}); break;" for number in range(len(sources))]
    return "\n".join(
        [
            *parts,
            _NUMBER,
            f'extern "C" __global__ void {kernel.entry}({declared}, int* __restrict__ {CHOSEN}) {{',
            f"  switch (variant_number({CHOSEN})) {{",
            *calls,
            "  }",
            "}",
            "",
        ]
    )
