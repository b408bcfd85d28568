"""A kernel form on a device, and what follows from the two: which instructions compute it, and how fast they may.

Construction, search and the cost model hand this one value on, so that a compilation asks each of these questions once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from hal.spec.device import DeviceSpec
from hal.spec.parts import DTYPE_BYTES, MatrixInstruction
from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.matrix import (
    MMA_OTHER_REGISTERS,
    MMA_SUMS,
    WIDENED_REGISTERS,
    MatrixRoles,
    instruction_for,
)
from sokoban.language.expression import FLOAT8_DTYPES

#: Compute capability with instructions of warp groups (``wgmma``): they are in none before, and in none after.
WARP_GROUP_CAPABILITY = (9, 0)

#: Element types that warp groups multiply: those whose operands may be turned, and all. Rows of operands come in pieces
#: of so many bytes.
TURNED_DTYPES = ("float16", "bfloat16")
BULK_DTYPES = (*TURNED_DTYPES, *FLOAT8_DTYPES, "int8", "tfloat32")
WARP_GROUP_PIECE_BYTES = 16


class MatrixProduct(NamedTuple):
    """Product of matrices: the roles of its axes, and the instruction that a warp multiplies by."""

    roles: MatrixRoles
    instruction: Instruction


class Rate(NamedTuple):
    """Arithmetic to hope for under a long load: FLOP/s, and the name of what computes so fast."""

    flops: float
    name: str


@dataclass(frozen=True)
class PlacedForm:
    """A kernel form on a device."""

    form: KernelForm
    device: DeviceSpec

    @cached_property
    def remembered(self) -> dict[str, Any]:
        """Remembered by :mod:`sokoban.model.gpu.compiled`: addresses, which hold in this process alone."""
        return {}

    def __reduce__(self) -> tuple[type[PlacedForm], tuple[KernelForm, DeviceSpec]]:
        """Searches come back from other processes without what was remembered there."""
        return PlacedForm, (self.form, self.device)

    def check(self) -> None:
        """Raise InputError where the operator reads eight-bit floats that no matrix instruction of the device
        multiplies: ordinary arithmetic takes none."""
        form, device = self.form, self.device
        narrow = [tensor for tensor in form.expr.inputs if tensor.dtype in FLOAT8_DTYPES]
        if not narrow:
            return
        where = form.expr.name
        what = f"dtype {narrow[0].dtype} of {narrow[0].name} is multiplied by matrix instructions alone"
        if form.roles is None:
            raise InputError(where, f"{what}, and this is no product of two matrices of one dtype", "use float16")
        if self.product is None:
            problem = f"{what}, and {device.name} has none for it"
            raise InputError(where, problem, "use float16, or a board like l4 or h200")
        read_again = {load.tensor for load in form.final_loads}
        for tensor in narrow:
            if tensor.name not in (form.roles.a.tensor, form.roles.b.tensor) or tensor.name in read_again:
                problem = f"dtype {tensor.dtype} of {tensor.name} is for the operands of the product alone"
                raise InputError(where, problem, "use float16 or float32")

    # ---- matrix instructions

    @cached_property
    def product(self) -> MatrixProduct | None:
        """The product of matrices by single warps; None where the operator is none, or the device has no instruction
        for it that code is generated for."""
        roles = self.form.roles
        instruction = None if roles is None else instruction_for(self.device, roles.dtype)
        return None if roles is None or instruction is None else MatrixProduct(roles, instruction)

    @cached_property
    def matrix_rates(self) -> MatrixInstruction | None:
        """Rates of the device by the instruction of :attr:`product`."""
        return None if self.product is None else self.device.matrix_instruction(self.product.roles.dtype)

    @cached_property
    def bulk_roles(self) -> MatrixRoles | None:
        """The roles of the axes where warp groups of the device can multiply what is copied in bulk, as far as element
        types and rows go; None where they cannot. Elements of other than 16 bits have to lie along the depth in both
        operands: the instruction turns none of them."""
        capability, roles = self.device.compute_capability, self.form.roles
        if capability is None or tuple(capability) != WARP_GROUP_CAPABILITY:
            return None
        if roles is None or roles.dtype not in BULK_DTYPES or self.warp_group_rates is None:
            return None
        if roles.dtype not in TURNED_DTYPES and (roles.is_turned(roles.a) or roles.is_turned(roles.b)):
            return None
        tensors = [self.form.expr.tensor_by_name[load.tensor] for load in (roles.a, roles.b)]
        rows_bytes = [tensor.shape[-1] * tensor.element_bytes for tensor in tensors]
        return None if any(row_bytes % WARP_GROUP_PIECE_BYTES for row_bytes in rows_bytes) else roles

    @cached_property
    def warp_group_rates(self) -> MatrixInstruction | None:
        """Rates of the device's warp groups for elements of the operator's type."""
        return self.device.warp_group_instruction(self.form.input_dtype)

    @cached_property
    def is_widened(self) -> bool:
        """True if the eight-bit floats of a product become halves in registers before ``mma.sync`` multiplies them,
        since it is no faster for them: on sm_90, whose units for them no other instructions reach than those of warp
        groups."""
        rates, halves = self.matrix_rates, self.device.matrix_instruction("float16")
        if rates is None or halves is None or rates.input_dtype not in FLOAT8_DTYPES:
            return False
        return rates.peak_flops <= halves.peak_flops

    @cached_property
    def mma_other_registers(self) -> int:
        """Registers of a thread by ``mma.sync`` that hold neither sums nor fragments as they are stored."""
        return MMA_OTHER_REGISTERS + (WIDENED_REGISTERS if self.is_widened else 0)

    @cached_property
    def most_sums(self) -> int:
        """Largest tile of a warp by ``mma.sync``, in elements: half of it where halves of the operands need
        registers, and where there are two sets of sums."""
        return MMA_SUMS // (2 if self.is_widened else 1) // self.form.sum_sets

    # ---- ordinary arithmetic

    @cached_property
    def arithmetic_dtype(self) -> str:
        """The type in which the ordinary pipelines compute: the accumulator's, or float32 where the device has no
        rate."""
        accumulate = self.form.expr.accumulate
        return accumulate if accumulate in self.device.dtypes else "float32"

    @cached_property
    def vector_lanes(self) -> int:
        """Elements of the accumulator's type in one vector, where lanes are elements of vectors."""
        return max(1, self.device.teu.lanes * 4 // DTYPE_BYTES[self.form.expr.accumulate])

    # ---- bounds, whatever the schedule

    @cached_property
    def ordinary_rate(self) -> Rate:
        """FLOP/s without matrix instructions."""
        dtype = self.arithmetic_dtype
        return Rate(self.device.limited_flops(dtype) or self.device.peak_flops(dtype), dtype)

    @cached_property
    def rate(self) -> Rate:
        """FLOP/s by the fastest instructions that can compute the operator."""
        if self.form.stages:
            most = max(self.form.stages, key=lambda stage: stage.flops)
            return PlacedForm(most, self.device).rate
        if self.form.is_attention:
            matrix = self.device.best_matrix_instruction(self.form.expr.operands("K")[0].dtype)
            if matrix is not None:
                return Rate(matrix.sustained_flops, f"{matrix.input_dtype} by matrix instructions")
            return self.ordinary_rate
        if not self.form.body_loads:
            return self.ordinary_rate
        matrix = self.matrix_rates if self.bulk_roles is None else self.warp_group_rates
        if matrix is None:
            return self.ordinary_rate
        return Rate(matrix.sustained_flops, f"{matrix.input_dtype} by matrix instructions")

    @cached_property
    def compulsory_seconds(self) -> float:
        """Time in which DRAM moves all inputs and the output once."""
        return self.form.compulsory_bytes / self.device.dram.bandwidth_bytes_per_second

    @cached_property
    def least_seconds(self) -> float:
        """No program takes less, but for its launch: arithmetic at :attr:`rate`, or :attr:`compulsory_seconds`."""
        return max(self.form.flops / self.rate.flops, self.compulsory_seconds)
