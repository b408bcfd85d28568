"""Calls of PyTorch in our language: each computes what PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from bench.kernelbench import groups
from bench.kernelbench.groups import Operators, operators_of
from bench.kernelbench.record import recorded
from sokoban.language.reference import evaluate

F = torch.nn.functional


def tensors(*shapes: tuple[int, ...]) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(shape, generator=generator, dtype=torch.float32) + 0.25 for shape in shapes]


def operators(function: Callable[..., Any], given: list[Any]) -> Operators:
    return operators_of(recorded("level1/1_drawn.py", function, given))


def computed(said: Operators, given: list[Any]) -> np.ndarray[Any, Any]:
    """The last operator's result, each run after the ones before."""
    values: dict[str, Any] = {}
    waiting = [tensor.numpy().astype(np.float64) for tensor in given]
    for expr, number in zip(said.expressions, said.results, strict=True):
        for tensor in sorted(expr.inputs, key=lambda each: int(each.name[1:].split("_")[0])):
            base = "_".join(tensor.name.split("_")[:1])
            if base not in values:
                values[base] = waiting.pop(0)
        reads = {tensor.name: values[tensor.name.split("_")[0]].reshape(tensor.shape) for tensor in expr.inputs}
        values[f"T{number}"] = evaluate(expr, reads)
    return values[f"T{said.results[-1]}"]


CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "mm": (lambda a, b: a @ b, [(3, 4), (4, 5)]),
    "bmm": (torch.bmm, [(2, 3, 4), (2, 4, 5)]),
    "turned": (lambda a, b: a.T @ b.T, [(4, 3), (5, 4)]),
    "a diagonal": (lambda a, b: a.unsqueeze(1) * b, [(3,), (3, 4)]),
    "expanded": (lambda a, b: torch.matmul(a.expand(2, 3, 4), b), [(3, 4), (2, 4, 5)]),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), [(5,), (3, 4), (4, 5)]),
    "swish": (lambda x: torch.sigmoid(x) * x, [(3, 4)]),
    "gelu by tanh": (lambda x: F.gelu(x - 0.7, approximate="tanh") + F.gelu(x), [(3, 4)]),
    "activations": (lambda x: F.mish(F.elu(F.hardswish(F.hardsigmoid(F.leaky_relu(F.softplus(x - 1) - 1))))), [(3, 4)]),
    "clamps": (lambda x: torch.clamp(F.hardtanh(x - 0.5), min=-0.2) / 3 + 2, [(3, 4)]),
    "broadcast": (lambda x, b: (x - b) ** 3 * 2 + x, [(2, 3, 4), (3, 1)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1), [(2, 4, 7, 8), (6, 4, 3, 3), (6,)]),
    "conv1d, dilated": (lambda x, w: F.conv1d(x, w, stride=3, dilation=2).relu(), [(2, 4, 30), (5, 4, 3)]),
    "conv3d, grouped": (lambda x, w: F.conv3d(x, w, groups=2, padding=(1, 0, 1)), [(1, 4, 5, 6, 7), (6, 2, 3, 2, 3)]),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, padding=1, dilation=2), [(2, 4, 7, 8), (4, 5, 3, 3)]),
    "transposed by two": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, output_padding=1), [(2, 4, 7, 6), (4, 5, 3, 3)],
    ),
    "transposed by two, cropped": (
        lambda x, w, b: torch.tanh(F.conv_transpose2d(x, w, b, stride=(2, 3), padding=(0, 1))),
        [(2, 4, 7, 6), (4, 5, 4, 2), (5,)],
    ),
    "transposed by strides that divide a dilation": (
        lambda x, w: F.conv_transpose2d(x, w, stride=(2, 3), padding=(1, 2), dilation=(2, 1), groups=2) + 1,
        [(1, 4, 5, 6), (4, 3, 3, 5)],
    ),
    "transposed by strides that do not divide a dilation": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=(5, 4), padding=(1, 3), dilation=(2, 6), output_padding=1),
        [(2, 4, 5, 6), (4, 3, 3, 4), (3,)],
    ),
    "transposed, grouped": (
        lambda x, w: F.conv_transpose1d(x, w, stride=2, padding=2, output_padding=1, groups=2), [(2, 4, 9), (4, 3, 5)],
    ),
    "max pool": (lambda x: F.max_pool2d(x, 3, 2, padding=1, dilation=2), [(2, 3, 12, 13)]),
    "average pool": (lambda x: F.avg_pool3d(x, 2, padding=1), [(2, 3, 6, 8, 5)]),
    "mean": (lambda x: x.mean(dim=(1, 2), keepdim=True) * 2, [(2, 3, 4)]),
    "sum of all": (lambda x: x.sum(), [(2, 3, 4)]),
    "largest": (lambda x: torch.max(x, dim=1)[0], [(2, 3, 4)]),
    "place": (lambda x: torch.argmax(x, dim=1), [(2, 9, 4)]),
    "cumulative": (lambda x: torch.cumprod(torch.cumsum(x, dim=1), dim=0), [(3, 4)]),
    "reversed": (lambda x: torch.cumsum(x.flip(1), dim=1).flip(1), [(3, 4)]),
    "norm": (lambda x: x / torch.norm(x, p=2, dim=1, keepdim=True), [(3, 4)]),
    "Frobenius norm": (lambda x: x / torch.norm(x, p="fro"), [(3, 4)]),
    "softmax": (lambda x: torch.softmax(x, dim=1), [(2, 3, 4)]),
    "log-softmax": (lambda x: torch.log_softmax(x, dim=0), [(5, 4)]),
    "log of sums": (lambda x: torch.logsumexp(x, dim=1, keepdim=True), [(2, 3, 4)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (3, 4), w, b), [(2, 3, 4), (3, 4), (3, 4)]),
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 6, 4, 5), (6,), (6,)]),
    "instance norm": (lambda x: F.instance_norm(x), [(2, 3, 4, 5)]),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), [(4, 3, 5), (3,), (3,)]),
    "smooth loss": (F.smooth_l1_loss, [(5, 4), (5, 4)]),
    "squares": (lambda x, y: torch.mean((x - y) ** 2), [(5, 4), (4,)]),
    "cosines": (lambda x, y: torch.mean(1 - F.cosine_similarity(x, y, dim=1)), [(5, 4), (5, 4)]),
    "numbers": (lambda x: torch.minimum(x * torch.full_like(x, 2.0), torch.full_like(x, 0.7)), [(3, 4)]),
    "triangles": (lambda a: torch.tril(torch.triu(a, -1)), [(5, 5)]),
    "exclusive": (
        lambda x: torch.cumsum(torch.cat((torch.zeros_like(x.select(1, 0).unsqueeze(1)), x), dim=1).narrow(1, 0, 4), 1),
        [(3, 4)],
    ),
    "parts": (lambda x: x[1:, 2] * x[:-1, 3] + x.T[1, 1:], [(4, 5)]),
    "masked": (lambda x, m: torch.cumsum(x * m, dim=1), [(3, 4), (3, 4)]),
    "diagonal": (lambda a, b: torch.diag(a) @ b, [(4,), (4, 5)]),
    "joined": (lambda a, b: torch.cat([a, b], dim=1), [(2, 3), (2, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operators_compute_what_pytorch_computes(name: str) -> None:
    function, shapes = CASES[name]
    given = tensors(*shapes)
    said = operators(function, given)
    assert not said.reason, said.reason
    expected = function(*given).numpy()
    np.testing.assert_allclose(computed(said, given).reshape(expected.shape), expected, rtol=2e-5, atol=2e-6)


NUMBERED: dict[str, tuple[Callable[..., Any], tuple[int, ...], int, tuple[int, ...]]] = {
    "cross-entropy": (F.cross_entropy, (6, 5), 5, (6,)),
    "loss of classes": (lambda x, t: F.nll_loss(x, t) * 2, (6, 5), 5, (6,)),
    "ignored": (lambda x, t: F.cross_entropy(x, t, ignore_index=2), (6, 5), 5, (6,)),
    "embedding": (lambda x, t: F.embedding(t, x), (7, 4), 7, (3, 2)),
    "gather": (lambda x, t: torch.gather(x, 1, t), (3, 5), 5, (3, 4)),
    "slices": (lambda x, t: torch.index_select(x, 1, t), (3, 5, 2), 5, (4,)),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_numbers_say_what_is_read(name: str) -> None:
    function, shape, count, places = NUMBERED[name]
    numbers = torch.randint(count, places, generator=torch.Generator().manual_seed(0))
    given = [*tensors(shape), numbers]
    said = operators(function, given)
    assert not said.reason, said.reason
    expected = function(*given).numpy()
    np.testing.assert_allclose(computed(said, given).reshape(expected.shape), expected, rtol=2e-5, atol=2e-6)


def test_a_cross_entropy_writes_no_probabilities() -> None:
    (expr,) = operators(F.cross_entropy, [*tensors((6, 5)), torch.zeros(6, dtype=torch.int64)]).expressions
    assert max(expr.tensor_by_name[s.tensor].element_count for s in expr.statements) == 6


@pytest.mark.parametrize(
    ("function", "shapes", "launches", "first"),
    [
        (lambda x: F.avg_pool2d(x, 2), [(6, 2, 6, 6)], 6, {"T0": 1}),
        (lambda x, w: (x @ w) * 2 + 1, [(12, 30), (30, 3)], 4, {"T0": 3, "T1": 30}),
        (lambda x: x.softmax(1), [(8, 30)], 4, {"T0": 2}),
        (lambda x: x.sum(0), [(8, 30)], 1, {"T0": 8}),
        (lambda x: x.flip(0), [(8, 30)], 1, {"T0": 8}),
        (lambda x: x * x.T, [(12, 12)], 1, {"T0": 12}),
    ],
)
def test_tensors_of_too_many_elements_are_launched_in_parts(
    function: Callable[..., Any], shapes: list[Any], launches: int, first: dict[str, int], monkeypatch: Any
) -> None:
    monkeypatch.setattr(groups, "MAX_ELEMENTS", 100)
    said = operators(function, tensors(*shapes))
    assert not said.reason and said.launches == (launches,)
    (expr,) = said.expressions
    assert {name: expr.tensor_by_name[name].shape[0] for name in first} == first


@pytest.mark.parametrize(
    ("function", "shapes", "reason"),
    [
        (lambda x: F.dropout(x, 0.5, training=True), [(3, 4)], "random numbers"),
        (lambda x: torch.sort(x)[0], [(3, 4)], "an order of values"),
        (lambda x: torch.fft.rfft(x), [(3, 4)], "has no rule"),
    ],
)
def test_what_is_not_said_has_a_reason(function: Callable[..., Any], shapes: list[Any], reason: str) -> None:
    said = operators(function, tensors(*shapes))
    assert reason in said.reason and not said.expressions


def test_functions_behind_a_sum_are_one_operator() -> None:
    said = operators(lambda x, w, b: F.conv2d(x, w).relu() * 2 + b, tensors((2, 4, 7, 8), (6, 4, 3, 3), (6, 1, 1)))
    assert len(said.expressions) == 1 and len(said.expressions[0].statements) == 4
    shared = operators(lambda x, w: F.conv2d(x, w).relu().softmax(1), tensors((2, 4, 7, 8), (6, 4, 3, 3)))
    assert len(shared.expressions) == 2


def test_what_a_reduction_reads_is_made_within_it_and_turned_scans_are_one() -> None:
    squares = operators(lambda x, y: torch.mean((x - y) ** 2), tensors((5, 4), (4,)))
    assert len(squares.expressions) == 1 and squares.expressions[0].statements[-2].reduction is not None
    (turned,) = operators(CASES["reversed"][0], tensors((3, 4))).expressions
    assert turned.statements[0].scan is not None and turned.statements[0].scan.is_reversed
