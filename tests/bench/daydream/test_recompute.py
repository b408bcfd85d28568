"""The bench of recomputation and accumulation: its parts, without looking at the clock."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bench.daydream.recompute import CHANGES, MODELS, Row, recording, step_of  # noqa: E402
from daydream.passes import registered  # noqa: E402
from daydream.passes.basis.bytes import memory_of  # noqa: E402


def test_errors_are_those_of_the_prediction():
    row = Row("net", "recompute", 2.0, 2.1, 100.0, 95.0)
    assert (row.time_error, row.peak_error) == (pytest.approx(0.05), pytest.approx(-0.05))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_changed_steps_train_to_the_same_weights(name: str):
    trained = []
    for change in ("plain", *CHANGES):
        model, step = step_of(MODELS[name], change)
        step()
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    # Batch norms see smaller batches when gradients are accumulated.
    for weights in trained[1:2] if name == "resnet" else trained[1:]:
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(trained[0], weights, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_peaks_are_predicted_from_the_plain_recording(name: str, tmp_path: Path):
    plain = recording(MODELS[name], "plain", tmp_path / "plain.json", 2)
    for change, parameters in CHANGES.items():
        done = memory_of(recording(MODELS[name], change, tmp_path / f"{change}.json", 2))
        predicted = registered()[change](plain, **parameters).graph.memory
        assert done is not None
        assert predicted is not None
        assert predicted.peak_bytes == pytest.approx(done.peak_bytes, rel=0.05)
