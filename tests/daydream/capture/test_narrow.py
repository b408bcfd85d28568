"""Which operators run on narrow numbers, and that a step with them says so and is shorter."""

from __future__ import annotations

from dataclasses import replace

from daydream.capture.captured import Capture, CapturedModule, CapturedOperator
from daydream.capture.narrow import narrow_places
from daydream.graph.graph import Phase
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.prediction.step import predicted
from hal.catalog import load_device

SIDE = 8192
MATRIX = RecordedTensor((SIDE, SIDE), "c10::BFloat16", (SIDE, 1))


def product(module: int) -> CapturedOperator:
    inputs = Inputs((MATRIX, MATRIX))
    return CapturedOperator(
        name="aten::mm", overload="default", inputs=inputs, outputs=(MATRIX,), module=module, phase=Phase.FORWARD
    )


STEP = Capture(
    title="two layers and a head",
    operators=(product(1), product(2), product(3)),
    modules=tuple(CapturedModule(path, "Linear") for path in ("", "blocks.0.up", "blocks.1", "head")),
    parameters=(),
    storages=(),
    dtype="bfloat16",
    blocks=("blocks.0", "blocks.1"),
)


def test_layers_of_blocks_alone_are_narrow() -> None:
    assert narrow_places(STEP) == frozenset()
    assert narrow_places(replace(STEP, precision="16-bit")) == frozenset()
    assert narrow_places(replace(STEP, precision="fp8-tensorwise")) == {0, 1}


def test_two_of_three_products_get_shorter() -> None:
    board = load_device("h100")
    (wide,), (narrow,) = (
        predicted(step, [board]) for step in (STEP, replace(STEP, precision="fp8-tensorwise"))
    )  # fmt: skip
    before, after = ([price.seconds for price in step.prices] for step in (wide, narrow))
    assert after[2] == before[2]
    assert after[0] == after[1] < 0.8 * before[0]
