"""What an operator asks for, whatever its schedule: bytes that nobody can avoid, and the arithmetic to hope for."""

from __future__ import annotations

from hal.spec.device import DeviceSpec
from sokoban.kernel.form import KernelForm
from sokoban.kernel.matrix import matrix_rates, matrix_roles
from sokoban.schedule.warp_groups import warp_group_roles


def compulsory_bytes(form: KernelForm) -> int:
    """Bytes of all inputs and the output, each once."""
    return sum(tensor.size_bytes for tensor in (*form.expr.inputs, form.expr.output))


def input_dtype(form: KernelForm) -> str:
    """The element type of what the body reads first, of the output where it reads nothing; of a matrix product's
    operands as an instruction multiplies them (``tfloat32``)."""
    roles = matrix_roles(form)
    if roles is not None:
        return roles.dtype
    return form.expr.tensor_by_name[form.body_loads[0].tensor].dtype if form.body_loads else form.expr.output.dtype


def arithmetic_dtype(form: KernelForm, device: DeviceSpec) -> str:
    """The type in which the ordinary pipelines compute: the accumulator's, or float32 where the device has no rate."""
    return form.expr.accumulate if form.expr.accumulate in device.dtypes else "float32"


def arithmetic_rate(form: KernelForm, device: DeviceSpec, *, matrix: bool | None = None) -> tuple[float, str]:
    """The FLOP/s that an operator can hope for under a long load, and its name; ``matrix`` says whether it uses matrix
    instructions, None that it does where it can."""
    if form.body_loads and matrix is not False:
        groups = warp_group_roles(form, device)
        instruction = matrix_rates(form, device) if groups is None else device.warp_group_instruction(groups.dtype)
        if instruction is not None:
            return instruction.sustained_flops, f"{instruction.input_dtype} by matrix instructions"
    dtype = arithmetic_dtype(form, device)
    return device.limited_flops(dtype) or device.peak_flops(dtype), dtype
