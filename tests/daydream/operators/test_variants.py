"""Kernels that a job asks for: versions of attention, products by way of TF32."""

from __future__ import annotations

import pytest

from daydream.operators.calls import operator_prices
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.operators.variants import VERSIONS, attention_kernels
from hal.catalog import load_device
from hal.support.errors import InputError

A100, H100, V100, B200 = (load_device(name) for name in ("a100", "h100-sxm", "v100-pcie-16gb", "b200"))


def tensor(*dims: int, dtype: str = "c10::BFloat16") -> RecordedTensor:
    return RecordedTensor(dims, dtype)


def attention(
    name: str = "flash", *, backward: bool = False, width: int = 128
) -> tuple[str, Inputs, tuple[RecordedTensor, ...]]:
    sides = [tensor(2, 16, 4096, width)] * 3
    ending, first, at = ("_backward", [tensor(2, 16, 4096, width)], 11) if backward else ("", [], 4)
    given = [*first, *sides]
    values = [""] * at + ["True"]
    tensors = (*given, *[None] * (at + 1 - len(given)))
    return f"aten::_scaled_dot_product_{name}_attention{ending}", Inputs(tensors, tuple(values)), (sides[0],)


def seconds(call: tuple[str, Inputs, tuple[RecordedTensor, ...]], board: object, **options: object) -> float:
    (price,) = operator_prices([call], board, **options)  # type: ignore[arg-type]
    return price.seconds


def test_families_follow_the_version_and_the_board() -> None:
    assert [attention_kernels("cudnn", board) for board in (A100, H100, B200)] == [
        "FlashAttention 2", "cuDNN", "cuDNN, unit pairs",
    ]  # fmt: skip
    # PyTorch's own attention on Hopper is FlashAttention 2.
    assert attention_kernels("auto", H100) == attention_kernels("flash2", H100) == ""
    assert {attention_kernels(each, H100) for each in VERSIONS} == {"", "FlashAttention 3", "Triton", "cuDNN"}


@pytest.mark.parametrize(("version", "board"), [("flash3", A100), ("flash3", B200), ("triton", V100), ("cudnn", V100)])
def test_a_board_without_the_version_is_refused_in_one_line(version: str, board: object) -> None:
    with pytest.raises(InputError, match=f"runs no .*{version[:-1]}|FlashAttention 3") as refused:
        seconds(attention(), board, attention=version)
    assert "\n" not in str(refused.value)


def test_versions_of_attention_differ_as_their_papers_say() -> None:
    # FlashAttention 2's paper: 1.3 to 1.5 and about 2 times those in Triton, on an A100; 3's on Hopper: 1.5 to 2 times.
    forward, backward = attention(), attention(backward=True)
    assert 1.3 < seconds(forward, A100, attention="triton") / seconds(forward, A100) < 1.6
    assert 1.5 < seconds(backward, A100, attention="triton") / seconds(backward, A100) < 2.2
    assert 1.4 < seconds(forward, H100) / seconds(forward, H100, attention="flash3") < 2.2
    # Triton's tiles have 128 elements where the others have 96.
    narrow = attention(width=80)
    assert seconds(narrow, A100, attention="triton") / seconds(narrow, A100) > 1.7


def test_memory_efficient_attention_is_no_flash_attention() -> None:
    (price,) = operator_prices([attention("efficient")], A100)
    assert price.kernels[0].name == "fmha_cutlassF"
    assert price.seconds > 1.1 * seconds(attention(), A100)


def product(dtype: str) -> tuple[str, Inputs, tuple[RecordedTensor, ...]]:
    sides = (tensor(4096, 4096, dtype=dtype), tensor(4096, 4096, dtype=dtype))
    return "aten::mm", Inputs(sides, ("", "")), (tensor(4096, 4096, dtype=dtype),)


def test_products_by_way_of_tf32_are_between_float32_and_16_bits() -> None:
    single, half = product("float"), product("c10::BFloat16")
    for board in (A100, H100):
        rounded = seconds(single, board, tf32_products=True)
        assert 1.5 * seconds(half, board) < rounded < seconds(single, board) / 3
    # A board without TF32 multiplies float32, and 16 bits stay what they are.
    assert seconds(single, V100, tf32_products=True) == seconds(single, V100)
    assert seconds(half, A100, tf32_products=True) == seconds(half, A100)


def test_documents_of_a_sample_see_themselves_alone() -> None:
    (whole,), (packed,) = (operator_prices([attention()], H100, packed=tokens) for tokens in (0, 512))
    assert whole.work is not None and packed.work is not None
    # Eight documents of 512 tokens: an eighth of the pairs, and one more than half of each document's.
    assert packed.work.flops / whole.work.flops == pytest.approx(513 / 4097)
    assert packed.work.parts[0].data["b"] == 16 and packed.seconds < whole.seconds / 3
    (long,) = operator_prices([attention()], H100, packed=8192)
    assert long.seconds == whole.seconds


def test_narrow_products_of_experts_by_cublas_are_scaled_products_of_all_rows() -> None:
    sides = (tensor(4096, 1024), tensor(8, 1024, 2048), RecordedTensor((8,), "int"))
    call = ("aten::_grouped_mm", Inputs(sides), (tensor(4096, 2048),))
    (price,) = operator_prices([call], B200, precision="mxfp8", experts="cublas")
    assert price.work is not None and price.work.parts[0].data == {
        "op": "scaled_matmul", "m": 4096, "n": 2048, "k": 1024, "precision": "mxfp8", "kernels": "training",
    }  # fmt: skip
    (pytorch,) = operator_prices([call], B200, precision="mxfp8")
    assert pytorch.work is not None and pytorch.work.parts[0].data["op"] == "grouped_matmul"
