"""What a prediction says: JSON, shares by model, modules, and prices of an hour."""

from __future__ import annotations

import pytest

from daydream.graph.graph import Phase
from daydream.operators.calls import KernelPrice
from daydream.prediction.answer import module_seconds, samples_per_unit, step_record, utilisation
from daydream.prediction.errors import MODEL_ERRORS
from tests.daydream.captures import operator, step_of

OPERATORS = [
    operator("aten::mm", module=1),
    operator("aten::mm", Phase.BACKWARD, 1, forward=0),
    operator("aten::relu", module=2),
]


def test_the_record_has_the_keys_that_are_promised() -> None:
    record = step_record(step_of(OPERATORS, (1, 1, 1), ((100,), (200,), (50,))))
    assert {
        "device", "batch", "step_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds",
        "gpu_busy_seconds", "bound", "priced_by",
    } <= set(record)  # fmt: skip
    assert record["device"] == "v100-sxm2-16gb" and record["batch"] == 4
    assert record["gpu_busy_seconds"] == pytest.approx(350e-6)
    assert record["priced_by"] == {"streams": 1.0}
    assert "samples_per_currency_unit" not in record


def test_money_is_counted_by_the_hour() -> None:
    step = step_of(OPERATORS, (1, 1, 1), ((100,), (200,), (50,)))
    hourly = {"v100-sxm2-16gb": 2.0}
    cost = samples_per_unit(step, hourly)
    assert cost == pytest.approx(1800 * 4 / step.step_seconds)
    assert step_record(step, hourly)["samples_per_currency_unit"] == pytest.approx(cost, rel=1e-5)
    assert samples_per_unit(step, {"t4": 1.0}) is None


def test_modules_of_a_list_are_one_line() -> None:
    seconds = module_seconds(step_of(OPERATORS, (1, 1, 1), ((100,), (200,), (50,))))
    assert seconds == {"*": pytest.approx((150e-6, 200e-6, 0.0))}


def test_without_products_there_is_no_utilisation() -> None:
    assert utilisation(step_of(OPERATORS, (1, 1, 1), ((100,), (200,), (50,)))) is None


def test_every_kind_of_model_has_an_error_to_show() -> None:
    kinds = ("products", "attention", "convolutions", "element-wise", "row-wise", "streams", "bytes", "collectives")
    assert set(MODEL_ERRORS) == set(kinds)
    assert KernelPrice("k", 1.0, "dram", "bytes").model in MODEL_ERRORS
