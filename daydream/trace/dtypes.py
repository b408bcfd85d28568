"""Element types as recordings spell them, and their sizes: one table for everybody.

The profiler writes C++ names of a tensor's type with operators (``c10::Half``, ``long int``), names of PyTorch's
enumeration with collectives (``Half``, ``Byte``, ``Float8_e4m3fn``), and Python writes ``torch.int64``.
"""

from __future__ import annotations

#: Bytes of an element by the type's name in lower case, without ``torch.`` and ``c10::``.
_BYTES = {
    "double": 8, "float": 4, "half": 2,
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex<double>": 16, "complex<float>": 8, "complex<half>": 4, "complex<c10::half>": 4,
    "complexdouble": 16, "complexfloat": 8, "complexhalf": 4,
    "complex128": 16, "complex64": 8, "complex32": 4, "cdouble": 16, "cfloat": 8, "chalf": 4,
    "long int": 8, "long": 8, "int": 4, "short int": 2, "short": 2, "signed char": 1, "char": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "unsigned long": 8, "unsigned long int": 8, "unsigned int": 4, "unsigned short": 2, "unsigned short int": 2,
    "unsigned char": 1, "byte": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "qint32": 4, "qint8": 1, "quint8": 1,
    "bool": 1,
}  # fmt: skip

#: Bytes of an element of a type that the table does not know.
UNKNOWN_BYTES = 4


def element_bytes(type_name: object, otherwise: int = UNKNOWN_BYTES) -> int:
    """Bytes of an element of a type in any spelling.

    >>> element_bytes("c10::Half"), element_bytes("torch.int64"), element_bytes("Byte"), element_bytes("strange")
    (2, 8, 1, 4)
    """
    return _BYTES.get(_without_prefix(str(type_name)), otherwise)


def is_tensor_type(type_name: object) -> bool:
    """True if the profiler's "Input type" is that of a tensor's elements: of plain numbers it writes ``Int``.

    >>> is_tensor_type("c10::Half"), is_tensor_type("int"), is_tensor_type("Int"), is_tensor_type("ScalarList")
    (True, True, False, False)
    """
    text = str(type_name)
    return _without_prefix(text) in _BYTES and (text.islower() or text.startswith("c10::"))


def _without_prefix(text: str) -> str:
    return text.lower().removeprefix("torch.").removeprefix("c10::")
