"""Serving engines' operators by name: their rows, their columns, and their prices."""

from __future__ import annotations

import pytest

from daydream.operators.calls import operator_prices
from daydream.operators.engines import engine
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.operators.rules import describe
from daydream.operators.traffic import Call
from daydream.operators.work import Work
from hal.catalog import load_device

H100 = load_device("h100")


def half(*dims: int) -> RecordedTensor:
    return RecordedTensor(dims, "c10::Half")


def walk(name: str, inputs: Inputs) -> tuple[str, tuple[float, ...]]:
    work = describe(name, inputs)
    assert isinstance(work, Work)
    (part,) = work.parts
    assert part.moved is not None
    return part.moved.kernel, part.moved.walk


def test_norms_go_over_the_rows_of_their_input() -> None:
    tensors = (half(7, 5, 96), half(7, 5, 96), half(96), None)
    assert walk("_C::rms_norm", Inputs(tensors)) == ("vllm rms_norm", (35, 96, 0))


def test_gates_write_half_of_the_columns_that_they_read() -> None:
    assert walk("_C::silu_and_mul", Inputs((half(9, 60), half(9, 120)))) == (
        "vllm act_and_mul by vectors",
        (9, 60, 0),
    )


def test_rotary_embeddings_turn_pairs_of_queries_then_of_keys() -> None:
    # 32 of the 80 elements of a head are turned: 16 pairs of each of 6 and of 2 heads.
    positions, table = RecordedTensor((11,), "long int"), half(4096, 32)
    inputs = Inputs((positions, half(11, 480), half(11, 160), None, table), ("", "", "", "80", ""))
    assert walk("_C::rotary_embedding", inputs) == ("vllm rotary_embedding", (11, 96, 32))


@pytest.mark.parametrize("name", ["_C::rms_norm", "sgl_kernel::silu_and_mul", "_C::rotary_embedding"])
def test_operators_without_recorded_sizes_say_so(name: str) -> None:
    assert engine(Call(name, Inputs((None,) * 5), ())) == f"sizes of {name}'s operands not recorded"


def test_their_price_is_that_of_a_kernel_of_rows() -> None:
    call = ("_C::rms_norm", Inputs((half(4096, 4096), half(4096, 4096), half(4096))), ())
    (price,) = operator_prices([call], H100)
    assert [(kernel.name, kernel.model) for kernel in price.kernels] == [("vllm rms_norm", "row-wise")]
    assert price.seconds == pytest.approx(63e-6, rel=0.15)


def test_rms_norm_of_pytorch_costs_less_than_layer_norm() -> None:
    data, gamma = half(4096, 8192), half(8192)
    shape = ("", "[8192]", "", "", "1e-06")
    inputs = Inputs((data, None, gamma, gamma, None), shape)
    whole, rms = operator_prices(
        [("aten::native_layer_norm", inputs, (data,)), ("aten::_fused_rms_norm", inputs, (data,))], H100
    )
    assert rms.seconds < 0.8 * whole.seconds
