"""Patch transforms: a small square of a tensor multiplied from both sides by a constant matrix, all over the tensor.

``Y = M D Mᵀ`` for a patch ``D`` per point of some axes is what the fast convolutions of Winograd do with filters,
inputs and outputs (S. Winograd, "Arithmetic complexity of computations", 1980; A. Lavin, S. Gray, "Fast algorithms for
convolutional neural networks", 2016). Written as tensor expressions every output would read its patch again; here a
thread keeps the patch in registers, and the matrix is part of its instructions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sokoban.kernel.kernel import Kernel
from sokoban.language.expression import AffineIndex, Axis, Load, Tensor, Value, loads, value_text

#: Axes of a patch; no operator can name its axes so.
ROW, COLUMN = ":i", ":j"
#: Axes of a patch's transform.
OUT_ROW, OUT_COLUMN = ":a", ":b"
#: Tensor that stands for an element of the transform in values.
RESULT = ":result"


@dataclass(frozen=True, kw_only=True)
class PatchTransform(Kernel):
    """``output[target] = value(M D Mᵀ)`` for every point of ``axes``.

    Attributes:
        name: of the operator that it is part of.
        axes: a thread for each of their points; neighbouring threads along the last one.
        matrix: ``M``, rows of equally many numbers; a patch has as many rows and columns as ``M`` has columns, its
            transform as many as ``M`` has rows.
        source: the patch's elements: indices over ``axes``, :data:`ROW` and :data:`COLUMN`.
        target: where the transform's elements go: indices over ``axes``, :data:`OUT_ROW` and :data:`OUT_COLUMN`.
            Elements beyond the output are left out.
        value: what is stored, ``Load(RESULT, ())`` being the element; its other loads are indexed as ``target`` is.
        inputs: tensors read, the source's first.
        output: the tensor written.
        accumulate: dtype in which everything is computed.
    """

    name: str
    axes: tuple[Axis, ...]
    matrix: tuple[tuple[float, ...], ...]
    source: Load
    target: tuple[AffineIndex, ...]
    value: Value
    inputs: tuple[Tensor, ...]
    output: Tensor
    accumulate: str

    @property
    def patch(self) -> int:
        """Rows, and columns, of a patch."""
        return len(self.matrix[0])

    @property
    def transformed(self) -> int:
        """Rows, and columns, of a patch's transform."""
        return len(self.matrix)

    @property
    def points(self) -> int:
        """Patches, a thread each."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of all axes that indices use."""
        inner = {ROW: self.patch, COLUMN: self.patch, OUT_ROW: self.transformed, OUT_COLUMN: self.transformed}
        return {**{axis.name: axis.size for axis in self.axes}, **inner}

    @property
    def tensor_by_name(self) -> Mapping[str, Tensor]:
        """All tensors read and written, by name."""
        return {tensor.name: tensor for tensor in (*self.inputs, self.output)}

    @property
    def is_padded(self) -> bool:
        """Whether patches reach beyond the source."""
        return any(self._reaches_out(self.source, position) for position in range(len(self.source.indices)))

    @property
    def value_loads(self) -> tuple[Load, ...]:
        """Loads of :attr:`value` besides the result."""
        return tuple(load for load in loads(self.value) if load.tensor != RESULT)

    @property
    def multiply_adds(self) -> int:
        """Arithmetic instructions of a thread for both products, multiplications by one and zero left out."""
        return sum(_terms(row) for row in self.matrix) * (self.patch + self.transformed)

    @property
    def store_width(self) -> int:
        """Adjacent elements of the output that a thread stores by one access, within a row of its transform.

        Every row has to start at a multiple of as many elements.
        """
        last = self.target[-1]
        if last.coefficient(OUT_COLUMN) != 1:
            return 1
        others = [coefficient for axis, coefficient in last.terms if axis != OUT_COLUMN]
        widest = 16 // self.output.element_bytes
        return math.gcd(self.transformed, widest, self.output.shape[-1], last.offset, *others)

    def statement_text(self) -> str:
        """What the transform computes, as text."""
        made = value_text(self.value).replace(f"{RESULT}[]", f"(M {self.source.tensor} Mᵀ)")
        indices = ", ".join(map(str, self.target))
        return f"{self.output.name}[{indices}] = {made}, {self.patch}x{self.patch} patches {value_text(self.source)}"

    def _reaches_out(self, load: Load, position: int) -> bool:
        low, high = load.indices[position].bounds(self.sizes)
        return low < 0 or high >= self.tensor_by_name[load.tensor].shape[position]


def _terms(row: tuple[float, ...]) -> int:
    """Instructions that a row of the matrix costs: a multiply-add per number, one less where one of them is 1 or -1.

    >>> _terms((1.0, 0.0, -1.0, 0.0)), _terms((0.5, 0.5, 0.5)), _terms((0.0, 1.0, 0.0))
    (1, 3, 1)
    """
    numbers = [number for number in row if number]
    return max(1, len(numbers) - any(abs(number) == 1.0 for number in numbers))
