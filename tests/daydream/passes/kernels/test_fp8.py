"""Linear layers in eight bits: which products change, what quantises for them, what stays and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from daydream.graph.graph import Phase
from daydream.passes import registered
from daydream.passes.kernels.fp8 import fp8
from hal.catalog import load_device
from hal.support.errors import InputError
from roller.library import library_time
from tests.daydream.recorded import operator, recorded

BOARD = load_device("h100")
H100 = ({"id": 0, "name": "NVIDIA H100 80GB HBM3"},)
HALVES = ["c10::BFloat16"] * 2


def product(m: int, n: int, k: int, us: float = 100, phase: Phase = Phase.FORWARD, name: str = "aten::mm") -> Any:
    return operator(name, [[m, k], [k, n]], HALVES, kernels=[("nvjet_tst_128x256", us)], phase=phase)


def step(*operators: Any) -> Any:
    return recorded(list(operators), H100)


def of_kernels(outcome: Any) -> dict[str, list[float]]:
    graph = outcome.graph
    times: dict[str, list[float]] = {}
    for row in graph.select(gpu=True).tolist():
        times.setdefault(graph.names[graph.name[row]], []).append(float(graph.duration_us[row]))
    return times


def test_products_take_their_time_by_the_ratio_of_prices() -> None:
    times = of_kernels(fp8(step(product(8192, 8192, 8192)), keep="none", precision="fp8-tensorwise"))
    sizes = {"m": 8192, "n": 8192, "k": 8192}
    wide = library_time({"op": "matmul", **sizes, "dtype": "bfloat16"}, BOARD).seconds
    layer = {"op": "scaled_matmul", **sizes, "precision": "fp8-tensorwise", "kernels": "training"}
    narrow = library_time(layer, BOARD).seconds - times["quantise activations"][0] * 1e-6
    assert times["nvjet_tst_128x256"] == [pytest.approx(100 * narrow / wide, rel=0.02)]
    assert times["quantise weights"] == times["quantise activations"]


def test_gradients_are_quantised_and_weights_once() -> None:
    outcome = fp8(step(product(4096, 4096, 1024), product(4096, 1024, 4096, phase=Phase.BACKWARD)), keep="none")
    times = of_kernels(outcome)
    assert [len(times[f"quantise {name}"]) for name in ("activations", "weights", "gradients")] == [1, 1, 1]
    assert "2 products of 0.20 ms run in fp8-rowwise on NVIDIA H100" in outcome.notes[0]


@pytest.mark.parametrize(("keep", "narrow"), [("none", 9), ("last", 6), ("ends", 3)])
def test_layers_at_the_ends_stay_with_their_gradients(keep: str, narrow: int) -> None:
    forward = [product(4096, columns, 1024) for columns in (2048, 2048, 32_000)]
    backward = [
        product(*sizes, phase=Phase.BACKWARD)
        for columns in (32_000, 2048, 2048)
        for sizes in ((4096, 1024, columns), (1024, columns, 4096))
    ]
    outcome = fp8(step(*forward, *backward), keep=keep)
    assert outcome.notes[0].startswith(f"{narrow} products ")
    assert outcome.notes[2].startswith(f"{9 - narrow} products ")


def test_other_sides_and_types_stay() -> None:
    odd = product(4096, 1000, 1024)
    single = operator("aten::mm", [[4096, 1024], [1024, 1024]], ["float"] * 2, kernels=[("sgemm", 100)])
    outcome = fp8(step(product(4096, 1024, 1024), odd, single), keep="none")
    assert of_kernels(outcome)["sgemm"] == [100]
    assert outcome.notes[0].startswith("1 products ")
    assert outcome.notes[2].endswith("2 of 0.20 ms by their types and sides")


def test_wrong_options_and_steps_are_refused() -> None:
    some = step(product(4096, 1024, 1024))
    with pytest.raises(InputError, match="precision: there is no 'fp9'; use one of fp8-tensorwise"):
        fp8(some, precision="fp9")
    with pytest.raises(InputError, match="keep: there is no 'first'; use one of none, last and ends"):
        fp8(some, keep="first")
    with pytest.raises(InputError, match=r"fp8: no product of two 16-bit matrices .* use --pass amp first"):
        fp8(step(operator("aten::relu", [[2048]], kernels=[("elementwise", 60)])))
    with pytest.raises(InputError, match="has no matrix units for fp8-rowwise"):
        fp8(some, device="a100", keep="none")
    assert [parameter.name for parameter in registered()["fp8"].parameters] == ["precision", "keep", "device"]
