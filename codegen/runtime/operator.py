"""Common part of every operator of a bundle, whatever runs its kernel, and its checks of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from codegen.bundle.reader import choose_kernel, read_bundle
from codegen.bundle.records import Argument, Bundle, KernelRecord
from hal.support.errors import InputError


class BundleOperator:
    """A kernel of a bundle that can be called."""

    #: What its tensors are called where one is refused.
    tensor_word = "tensors"

    def __init__(self, bundle: Bundle, kernel: KernelRecord) -> None:
        self.bundle, self.kernel = bundle, kernel
        self.__name__ = bundle.name

    @classmethod
    def load(cls, path: Path | str, rank: int | None = None) -> Self:
        """The operator in a bundle's folder; its kernel is the fastest measured one, or without a profile rank 1.

        Raises:
            InputError: the folder is no bundle, has no kernel of this rank, or is for another kind of hardware.
        """
        bundle = read_bundle(path)
        return cls(bundle, choose_kernel(bundle, rank))

    @property
    def inputs(self) -> tuple[Argument, ...]:
        """Names, dtypes and shapes of what it takes."""
        return self.bundle.inputs

    @property
    def output(self) -> Argument:
        """Name, dtype and shape of what it gives."""
        return self.bundle.output

    def __repr__(self) -> str:
        takes = ", ".join(f"{a.name}: {a.dtype}{list(a.shape)}" for a in self.inputs)
        gives = f"{self.output.name}: {self.output.dtype}{list(self.output.shape)}"
        return f"<{self.bundle.name}({takes}) -> {gives}, rank {self.kernel.rank} for {self.bundle.device}>"

    def size_of(self, shapes: Sequence[Sequence[int]]) -> int | None:
        """The size that is known at launch by the shapes of inputs; None where the operator has none, or a tensor that
        should have it has no dimensions."""
        if self.bundle.manifest.launch_size is None:
            return None
        pairs = zip(self.inputs, shapes, strict=True)
        return next((shape[0] for argument, shape in pairs if argument.ends_at_launch and shape), None)

    def kernel_at(self, size: int | None) -> KernelRecord:
        """The kernel that is launched for a size that is known at launch.

        Raises:
            InputError: no kernel of the bundle is for it.
        """
        record = self.bundle.manifest.launch_size
        if record is None or size is None:
            return self.kernel
        sizes = record.range_of(size)
        if sizes is None:
            most = record.ranges[-1].last
            multiple = f", a multiple of {record.multiple}" if record.multiple > 1 else ""
            raise self._error(record.axis, f"is {size}", f"it takes 1 to {most}{multiple}")
        return choose_kernel(self.bundle, sizes.rank)

    def _check_count(self, tensors: Sequence[Any]) -> None:
        """Raises InputError where it is given too few tensors or too many."""
        if len(tensors) != len(self.inputs):
            names = ", ".join(argument.name for argument in self.inputs)
            problem = f"given {len(tensors)} {self.tensor_word}"
            raise InputError(self.bundle.name, problem, f"it takes {len(self.inputs)}: {names}")

    def _overlap(self, argument: Argument) -> InputError:
        """The output lies in the memory of an input."""
        return self._error(self.output.name, f"overlaps {argument.name}", "give it memory of its own")

    def _error(self, argument: str, problem: str, remedy: str) -> InputError:
        return InputError(f"{self.bundle.name}.{argument}" if argument else self.bundle.name, problem, remedy)


def mismatch(
    owner: str,
    argument: Argument,
    shape: Sequence[int],
    dtype: str,
    *,
    fits_dtype: bool,
    remedy: str = "give a contiguous copy",
) -> InputError:
    """Why a tensor is not what a kernel takes as an argument.

    Args:
        owner: name of the operator.
        shape, dtype: the tensor's.
        fits_dtype: whether the kernel takes elements of that type.
        remedy: what to give where the tensor is not dense and row-major, which nothing else explains.
    """
    field = f"{owner}.{argument.name}"
    if tuple(shape) != argument.shape:
        return InputError(field, f"has shape {list(shape)}", f"it takes {list(argument.shape)}")
    if not fits_dtype:
        return InputError(field, f"is {dtype}", f"it takes {argument.dtype}")
    return InputError(field, "is not dense and row-major", remedy)
