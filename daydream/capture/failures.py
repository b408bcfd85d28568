"""Failures inside a model, as one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from daydream.whatif import failure_in_file
from hal.support.errors import InputError

#: What PyTorch says of an operator whose result has as many elements as the data demand.
_DATA_DEPENDENT = (
    re.compile(r"(aten::\S+?): attempted to run this operator with Meta tensors"),
    re.compile(r"(?:Tensor\.)?(item\(\)) cannot be called on meta tensors"),
    re.compile(r"(Cannot copy out of meta tensor)"),
    re.compile(r"register_meta function for (torch\.\w+)\(\) raises unimplemented"),
)


class DataDependentError(InputError):
    """A model asks for values of tensors, and none were assumed."""


@contextmanager
def failures_as_errors(title: str, source: Path | None = None) -> Iterator[None]:
    """Within, exceptions become an :class:`InputError` with the place in the user's file; prints go to stderr.

    Args:
        title: the model as the user named it.
        source: the user's file, None for a library's model.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise failure(error, title, source) from None


def failure(error: BaseException, title: str, source: Path | None = None) -> InputError:
    """An exception of a model as one line."""
    message = str(error)
    by_data = next((each for pattern in _DATA_DEPENDENT for each in pattern.findall(message)), None)
    in_file = failure_in_file(error, source) if source is not None else None
    field = in_file.field if in_file is not None else title
    if by_data is not None:
        read = "item" in by_data or "copy" in by_data
        problem = (
            "reads values of a tensor on the host" if read else f"{by_data} makes a result as large as data demand"
        )
        remedy = "there are no data in a capture: give that part fixed sizes, leave it out, or suppose them (--assume)"
        return DataDependentError(field, problem, remedy)
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in message:
        return InputError(
            field, "needs more memory than there is", "tensors that the model itself puts there have data"
        )
    if "not compiled with CUDA" in message:
        return InputError(field, "asks for a board", "leave the device out: the capture has tensors without data")
    if in_file is not None:
        return InputError(field, in_file.problem)
    return InputError(field, f"{type(error).__name__}: {_first(message)}" if message else type(error).__name__)


def _first(message: str) -> str:
    """The first paragraph of a long message, without PyTorch's own stack."""
    return message.strip().split("\n\n")[0].partition("Exception raised from")[0][:240]
