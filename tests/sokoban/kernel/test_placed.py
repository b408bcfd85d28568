"""A form on a device: what follows from the two is asked once, and survives the way to another process."""

from __future__ import annotations

import pickle

import pytest

from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.placed import PlacedForm
from tests.sokoban.schedules import form_of

V100, H200, L4 = load_device("v100"), load_device("h200"), load_device("l4")


def product_of(dtype: str = "float16", m: int = 64, n: int = 128, k: int = 256) -> KernelForm:
    return form_of(op="matmul", m=m, n=n, k=k, dtype=dtype)


def test_the_device_is_asked_for_its_instructions_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = DeviceSpec.matrix_instruction

    def counted(self: DeviceSpec, input_dtype: str, accumulate_dtype: str | None = None) -> object:
        asked.append(input_dtype)
        return original(self, input_dtype, accumulate_dtype)

    monkeypatch.setattr(DeviceSpec, "matrix_instruction", counted)
    placed = PlacedForm(product_of(), L4)
    for _ in range(3):
        assert placed.product is not None and placed.matrix_rates is not None
    # Once for the instruction, once for its rates.
    assert asked == ["float16", "float16"]


def test_the_rate_is_that_of_the_fastest_instructions() -> None:
    placed = PlacedForm(product_of(), H200)
    groups = H200.warp_group_instruction("float16")
    assert groups is not None and placed.warp_group_rates == groups
    assert placed.rate == (groups.sustained_flops, "float16 by matrix instructions")
    assert placed.ordinary_rate.name == "float32"
    assert PlacedForm(product_of("float32"), V100).rate == PlacedForm(product_of("float32"), V100).ordinary_rate


@pytest.mark.parametrize(("k", "n", "multiplied"), [(256, 128, True), (256, 129, False), (257, 128, False)])
def test_warp_groups_take_rows_of_whole_pieces(k: int, n: int, multiplied: bool) -> None:
    placed = PlacedForm(product_of(k=k, n=n), H200)
    assert (placed.bulk_roles is not None) == multiplied
    # Single warps multiply what groups do not.
    assert placed.product is not None and placed.product.instruction is Instruction.MMA_16X8X16


def test_bounds_are_arithmetic_or_traffic() -> None:
    form = product_of("float32", 4096, 4096, 4096)
    placed = PlacedForm(form, V100)
    assert placed.least_seconds == form.flops / placed.rate.flops > placed.compulsory_seconds
    thin = PlacedForm(form_of(op="matmul", m=4096, n=1, k=4096), V100)
    assert thin.least_seconds == thin.compulsory_seconds
    assert thin.form.compulsory_bytes == 4 * (4096 * 4096 + 4096 + 4096)


def test_it_is_equal_and_the_same_in_another_process() -> None:
    placed = PlacedForm(product_of(), H200)
    assert placed.rate is not None
    sent = pickle.loads(pickle.dumps(placed))
    assert sent == placed == PlacedForm(product_of(), H200)
    assert (sent.rate, sent.product) == (placed.rate, placed.product)


def test_eight_bit_floats_need_a_board_that_multiplies_them() -> None:
    PlacedForm(product_of("float8_e4m3fn"), L4).check()
    with pytest.raises(InputError, match="has none for it"):
        PlacedForm(product_of("float8_e4m3fn"), V100).check()


def test_eight_bit_floats_are_read_by_the_product_alone() -> None:
    text = "C[i,j] = sum(k, A[i,k] * B[k,j]); Y[i,j] = C[i,j] + B[j,j]"
    data = {"expr": text, "sizes": dict.fromkeys("ijk", 64), "dtypes": dict.fromkeys("AB", "float8_e5m2")}
    with pytest.raises(InputError, match="float8_e5m2 of B is for the operands of the product alone"):
        PlacedForm(form_of(**data), H200).check()


def scaled_of(k: int = 128) -> KernelForm:
    return form_of(
        expr="Y[i,c,n] = sum((b, k), A[i,b,k] * W[c,n,b,k] * S[i,b] * T[c,b])",
        sizes={"i": 64, "c": 3, "n": 128, "b": 5, "k": k}, dtype="float8_e4m3fn",
        dtypes={"S": "float32", "T": "float32", "Y": "bfloat16"},
    )  # fmt: skip


def test_scales_of_blocks_are_for_matrix_instructions_alone() -> None:
    placed = PlacedForm(scaled_of(), H200)
    placed.check()
    assert placed.bulk_roles is not None and placed.warp_group_rates is not None
    assert placed.rate.flops == placed.warp_group_rates.sustained_flops
    by_warps = PlacedForm(scaled_of(k=120), H200)  # rows that no bulk copy takes
    assert by_warps.bulk_roles is None and by_warps.product is not None
    PlacedForm(scaled_of(), L4).check()
    with pytest.raises(InputError, match="has none for it"):
        PlacedForm(scaled_of(), V100).check()


def test_warps_with_two_sets_of_sums_have_half_as_many() -> None:
    assert [PlacedForm(scaled_of(), device).most_sums for device in (L4, H200)] == [2048, 1024]
    assert PlacedForm(product_of("float8_e4m3fn"), L4).most_sums == 4096
