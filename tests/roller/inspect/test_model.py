"""What RATIONAL assumed about instructions and banks, for schedules whose figures can be had by hand."""

from __future__ import annotations

import pytest

from hal.catalog import load_device
from roller.inspect.disassembly import HotLoop, hottest_loop
from roller.inspect.model import BankUse, Density, density_record, model_view
from roller.inspect.sass import parse_sass
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule

DEVICE = load_device("v100")


def product(dtype: str = "float32") -> KernelForm:
    return kernel_form(operator_from_data({"op": "matmul", "m": 1024, "n": 1024, "k": 1024, "dtype": dtype}))


def tiled(padding: int = 0) -> TileSchedule:
    """8x8 elements a thread, 16x16 threads, steps of 8."""
    return TileSchedule(
        block=(("m", 128), ("n", 128)),
        thread=(("m", 8), ("n", 8)),
        step=(("k", 8),),
        cached=("A", "B"),
        padding=(("A", padding),) if padding else (),
    )


def loop_of(*opcodes: str) -> HotLoop:
    """A loop of these instructions, its branch besides."""
    code = [f"        /*{16 * i:04x}*/  {opcode} ;" for i, opcode in enumerate((*opcodes, "@P0 BRA `(.L_x_0)", "EXIT"))]
    return hottest_loop(parse_sass("\n".join([".L_x_0:", *code]))[0])


FFMA, LDS = "FFMA R4, R5, R6, R4", "LDS.128 R8, [R9]"


def test_the_density_found_scales_the_loop_to_a_step() -> None:
    """64 multiply-adds and 4 reads a point: a step of 8 points turns the loop eight times."""
    view = model_view(product(), DEVICE, tiled(), loop_of(*[FFMA] * 64, *[LDS] * 4, "IADD3 R1, R1, 0x1, RZ"))
    assert view.found == Density(pytest.approx(4 / 64), pytest.approx(2 / 64))
    assert view.found.total == pytest.approx(70 / 64)


def test_a_loop_that_holds_the_step_counts_once() -> None:
    view = model_view(product(), DEVICE, tiled(), loop_of(*[FFMA] * 512, *[LDS] * 32, "BAR.SYNC 0x0", "BAR.SYNC 0x0"))
    assert view.found is not None
    assert view.found.total == pytest.approx((512 + 32 + 3) / 512)


def test_the_density_assumed_is_that_of_the_issue_stage() -> None:
    from sokoban.model.gpu.anatomy import anatomy
    from sokoban.schedule.table import one

    view = model_view(product(), DEVICE, tiled(), loop_of(FFMA))
    taken = anatomy(PlacedForm(product(), DEVICE), tiled())
    reads = sum(one(part.instructions) for part in taken.step.reads.values())
    assert view.assumed is not None
    assert view.assumed.shared_loads == pytest.approx(reads / 512)
    assert view.assumed.others > 0
    assert view.reason == ""


def test_a_loop_without_arithmetic_has_no_density() -> None:
    view = model_view(product(), DEVICE, tiled(), loop_of(LDS))
    assert (view.assumed, view.found, view.reason) == (None, None, "there is no arithmetic in the hottest loop")


def test_matrix_fragments_conflict_where_the_pitch_is_a_multiple_of_the_banks() -> None:
    """Eight rows of 16 bytes: 128 bytes apart they lie in the same four banks, 144 bytes apart in all of them."""
    schedule = TileSchedule(
        block=(("m", 128), ("n", 128)),
        thread=(("m", 64), ("n", 32)),
        step=(("k", 64),),
        cached=("A", "B"),
        padding=(("B", 8),),
        instruction=Instruction.WMMA,
    )
    view = model_view(product("float16"), DEVICE, schedule, loop_of("HMMA.1688.F32 R4, R8, R12, R4"))
    assert view.banks == (BankUse("A", 16, 8.0, 1), BankUse("B", 16, 1.0, 1))
    assert [use.conflicts for use in view.banks] == [7.0, 0.0]
    assert view.reason == "RATIONAL tells no density of kernels with wmma_16x16x16"


def test_swizzled_fragments_meet_in_no_bank() -> None:
    schedule = TileSchedule(
        block=(("m", 128), ("n", 128)),
        thread=(("m", 64), ("n", 32)),
        step=(("k", 64),),
        cached=("A", "B"),
        instruction=Instruction.MMA_16X8X16,
    )
    view = model_view(product("float16"), load_device("a100"), schedule, loop_of("HMMA.16816.F32 R4, R8, R12, R4"))
    assert view.banks == (BankUse("A", 16, 1.0, 1), BankUse("B", 16, 1.0, 1))


@pytest.mark.parametrize(
    ("changes", "instruction", "reads", "bytes_"),
    [
        ({"dtype": "float16"}, "mma_16x8x16", 4 + 2, (16, 16)),
        ({"dtype": "int8"}, "mma_16x8x32", 4 + 2, (16, 16)),
        # What lies across is read word by word.
        ({"dtype": "float32", "allow_tf32": True}, "mma_16x8x8", 4 + 4 * 2, (16, 4)),
    ],
)
def test_the_density_of_matrix_instructions_counts_products(
    changes: dict[str, object], instruction: str, reads: int, bytes_: tuple[int, int]
) -> None:
    """A warp of 64x32: 4x4 products a depth, four fragments of A and two of B."""
    form = kernel_form(operator_from_data({"op": "matmul", "m": 1024, "n": 1024, "k": 1024, **changes}))
    schedule = TileSchedule(
        block=(("m", 128), ("n", 128)),
        thread=(("m", 64), ("n", 32)),
        step=(("k", 64),),
        cached=("A", "B"),
        instruction=Instruction(instruction),
        stages=3,
    )
    loop = loop_of(*["HMMA.16816.F32 R4, R8, R12, R4"] * 16, *["LDSM.16.M88.4 R8, [R9]"] * 6, "BAR.SYNC 0x0")
    view = model_view(form, load_device("a100"), schedule, loop)
    assert view.assumed is not None
    assert view.found is not None
    assert view.assumed.shared_loads == pytest.approx(reads / 16)
    assert view.assumed.others > 0
    assert view.found == Density(pytest.approx(6 / 16), pytest.approx(2 / 16))
    assert view.banks == (BankUse("A", bytes_[0], 1.0, 1), BankUse("B", bytes_[1], 1.0, 1))


def test_an_operator_without_a_reduction_has_no_density() -> None:
    form = kernel_form(operator_from_data({"op": "elementwise", "function": "relu", "shape": [4096]}))
    axis = form.spatial[0]
    view = model_view(form, DEVICE, TileSchedule(block=((axis, 256),), thread=((axis, 4),)), loop_of(FFMA))
    assert (view.assumed, view.banks) == (None, ())
    assert "reductions of tiles" in view.reason


def test_a_density_as_json() -> None:
    assert density_record(None) is None
    assert density_record(Density(0.0625, 0.03125)) == {"shared_loads": 0.0625, "others": 0.0312, "total": 1.0938}
