"""Views of tensors by bulk copies (TMA): the record that launchers make a driver's tensor map of.

It needs Python alone: manifests hold it, and it is read on the GPU's machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Bytes of an element, by the types that are copied in bulk. ``tfloat32`` are numbers of float32, which are rounded to
#: TensorFloat-32 on the way.
MAP_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "tfloat32": 4}


@dataclass(frozen=True, kw_only=True)
class TensorMap:
    """A tensor that a kernel takes as a tensor map in place of a pointer.

    Boxes land in 128-byte swizzle; what lies outside of the tensor is zero.

    Attributes:
        tensor: its name.
        dtype: of its elements as they arrive.
        shape: the tensor's, row-major and contiguous; rows are multiples of 16 bytes.
        box: elements of a copy, by dimension; the innermost are 128 bytes, none has more than 256.
        launch_elements: of the first dimension for each of a size that is known at launch, where ``shape`` has the
            largest; 0 where it is what it is.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    box: tuple[int, ...]
    launch_elements: int = 0

    def at(self, size: int | None) -> TensorMap:
        """The view where the size that is known at launch is ``size``."""
        if size is None or not self.launch_elements:
            return self
        return replace(self, shape=(size * self.launch_elements, *self.shape[1:]))
