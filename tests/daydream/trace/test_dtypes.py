"""Sizes of elements in every spelling that recordings have."""

from __future__ import annotations

import pytest

from daydream.trace.dtypes import element_bytes, is_tensor_type

#: Type -> its spellings: PyTorch's in Python, the profiler's beside operators, NCCL's recorder's.
SPELLINGS = {
    1: ["torch.uint8", "unsigned char", "Byte", "torch.int8", "signed char", "Char", "torch.bool", "bool", "Bool"],
    2: [
        "torch.int16",
        "short int",
        "short",
        "Short",
        "torch.float16",
        "c10::Half",
        "Half",
        "c10::BFloat16",
        "BFloat16",
    ],
    4: ["torch.int32", "int", "Int", "torch.float32", "float", "Float", "ComplexHalf", "unsigned int"],
    8: ["torch.int64", "long int", "long", "Long", "torch.float64", "double", "Double", "c10::complex<float>"],
    16: ["torch.complex128", "c10::complex<double>", "ComplexDouble"],
}
FLOAT8 = ["Float8_e4m3fn", "c10::Float8_e4m3fn", "torch.float8_e5m2", "Float8_e5m2", "c10::Float8_e4m3fnuz"]


@pytest.mark.parametrize(
    ("spelling", "size"),
    [(name, size) for size, names in SPELLINGS.items() for name in names] + [(name, 1) for name in FLOAT8],
)
def test_every_spelling_has_the_size(spelling: str, size: int) -> None:
    assert element_bytes(spelling, otherwise=0) == size


def test_unknown_types_have_four_bytes() -> None:
    assert element_bytes("strange") == element_bytes(None) == 4


@pytest.mark.parametrize("name", ["float", "c10::Half", "long int", "c10::complex<float>", "unsigned char", "bool"])
def test_tensors_have_the_types_of_elements(name: str) -> None:
    assert is_tensor_type(name)


@pytest.mark.parametrize("name", ["Int", "Scalar", "Double", "Bool", "TensorList", "GenericList", "", "Device", None])
def test_numbers_and_lists_do_not(name: object) -> None:
    assert not is_tensor_type(name)
