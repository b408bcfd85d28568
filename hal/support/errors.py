"""The one exception that bad input raises anywhere in the project, and names in a row for its message."""

from __future__ import annotations

from collections.abc import Sequence


class InputError(ValueError):
    """Something the user gave cannot be used.

    Attributes:
        field: where the problem is, as a path the user can find (``op.json: [3].stride``, ``device.memory.dram``).
        problem: what is wrong with it, one clause.
        remedy: what to write instead, one clause; may be empty.

    ``str(error)`` is a single line; the command line prints it to stderr and exits with code 2.
    """

    def __init__(self, field: str, problem: str, remedy: str = "") -> None:
        self.field = _one_line(field)
        self.problem = _one_line(problem)
        self.remedy = _one_line(remedy)
        super().__init__(f"{self.field}: {self.problem}" + (f"; {self.remedy}" if remedy else ""))

    def within(self, prefix: str) -> InputError:
        """This error one level further out: the field ``stride`` within ``ops.json[3]`` is ``ops.json[3].stride``.

        >>> str(InputError("stride", "is 0", "write 1").within("ops.json[3]"))
        'ops.json[3].stride: is 0; write 1'
        """
        joint = "" if self.field.startswith(("[", ":")) or not self.field else "."
        return InputError(f"{prefix}{joint}{self.field}", self.problem, self.remedy)

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str]]:
        # Exceptions pickle by their args alone, which here are the finished line, not the three parts.
        return InputError, (self.field, self.problem, self.remedy)


def listed(words: Sequence[str]) -> str:
    """Words as a sentence names them.

    >>> listed(["a", "b", "c"]), listed([])
    ('a, b and c', 'nothing')
    """
    if not words:
        return "nothing"
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _one_line(text: str, limit: int = 300) -> str:
    """White space folded and very long text cut, so that hostile input cannot flood the terminal."""
    folded = " ".join(str(text).split())
    folded = "".join(c if c.isprintable() else "?" for c in folded)
    return folded if len(folded) <= limit else folded[: limit - 1] + "…"
