"""Autocast on tensors without data, held against PyTorch's lists and its rules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from daydream.capture.pytorch.autocast import LOWER, PROMOTED, SINGLE, SINGLE_RESULT, Autocast  # noqa: E402

#: What boards alone register, in cuDNN's own file.
OF_CUDNN = {"_cudnn_rnn"}


def listed(macro: str) -> set[str]:
    """Names that a macro of PyTorch's header lists, with their overloads."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text().replace("\\\n", "\n")
    body = text.partition(f"#define {macro}(_)")[2].partition("\n\n")[0].partition("#define")[0]
    return {
        f"{name}.{overload}" if overload else name for name, overload in re.findall(r"_\((\w+)(?:, (\w+))?\)", body)
    }


@pytest.mark.parametrize(
    ("macro", "names"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", set(LOWER) - OF_CUDNN),
        ("AT_FORALL_FP32", set(SINGLE)),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", set(SINGLE_RESULT)),
        ("AT_FORALL_PROMOTE", set(PROMOTED)),
    ],
)
def test_lists_are_those_of_pytorch(macro: str, names: set[str]) -> None:
    assert names == listed(macro)


def cast(function: Any, *arguments: Any, dtype: Any = torch.float16) -> Any:
    with Autocast().effective(), torch.autocast("cuda", dtype):
        return function(*arguments)


def of(dtype: Any, *sizes: int) -> Any:
    return torch.empty(sizes, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("function", "types", "result"),
    [
        (torch.mm, (torch.float32, torch.float32), torch.float16),
        (torch.mm, (torch.float16, torch.float32), torch.float16),
        (torch.exp, (torch.float16,), torch.float32),
        (lambda x: torch.nn.functional.layer_norm(x, (4,)), (torch.float16,), torch.float32),
        (lambda x: torch.softmax(x, -1), (torch.float16,), torch.float32),
        (lambda x: torch.softmax(x, -1, dtype=torch.float16), (torch.float16,), torch.float16),
        (torch.sum, (torch.float16,), torch.float32),
        (lambda x: torch.ops.aten.norm.Scalar(x), (torch.float16,), torch.float32),
        (lambda x: torch.norm(x, 2, 1), (torch.float16,), torch.float32),
        (torch.atan2, (torch.float16, torch.float32), torch.float32),
        (torch.add, (torch.float16, torch.float16), torch.float16),
        (torch.relu, (torch.float32,), torch.float32),
        (torch.mm, (torch.float64, torch.float64), torch.float64),
    ],
)
def test_types_of_results(function: Any, types: tuple[Any, ...], result: Any) -> None:
    assert cast(function, *(of(dtype, 4, 4) for dtype in types)).dtype == result


def test_the_type_is_the_one_asked_for() -> None:
    assert (
        cast(torch.mm, of(torch.float32, 4, 4), of(torch.float32, 4, 4), dtype=torch.bfloat16).dtype == torch.bfloat16
    )


def test_gradients_come_back_in_the_type_of_the_parameter() -> None:
    layer = torch.nn.Linear(4, 4, device="meta")
    cast(layer, of(torch.float32, 2, 4)).sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_a_model_can_turn_it_off() -> None:
    def inside(tensor: Any) -> Any:
        with torch.autocast("cuda", enabled=False):
            return torch.mm(tensor, tensor)

    assert cast(inside, of(torch.float32, 4, 4)).dtype == torch.float32


def test_a_model_can_turn_it_on() -> None:
    with Autocast().effective():
        assert torch.mm(of(torch.float32, 4, 4), of(torch.float32, 4, 4)).dtype == torch.float32
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.mm(of(torch.float32, 4, 4), of(torch.float32, 4, 4)).dtype == torch.bfloat16


def test_nothing_stays_behind() -> None:
    cast(torch.mm, of(torch.float32, 4, 4), of(torch.float32, 4, 4))
    assert torch.mm(of(torch.float32, 4, 4), of(torch.float32, 4, 4)).dtype == torch.float32
    assert not torch.is_autocast_enabled("cuda")
