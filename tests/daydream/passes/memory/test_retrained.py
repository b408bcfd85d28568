"""Recomputation and accumulation predicted from a plain recording, then done."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from daydream.passes import registered  # noqa: E402
from daydream.passes.basis.bytes import memory_of  # noqa: E402
from tests.daydream.passes.memory.retrained import CHANGES, encoder, mixer, recording, resnet, step_of  # noqa: E402

#: Networks as narrow as a test takes, with as many maps for a weight as wide ones.
NARROW = {
    "resnet": partial(resnet, (12, 16, 24), 24),
    "encoder": partial(encoder, 48, 48, 3),
    "mixer": partial(mixer, 64, 256),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for work of this size spend more of the processor than those that have it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NARROW)
def test_changed_steps_train_to_the_same_weights(name: str):
    trained = []
    for change in ("plain", *CHANGES):
        model, step = step_of(NARROW[name], change)
        step()
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    # Batch norms see smaller batches when gradients are accumulated.
    for weights in trained[1:2] if name == "resnet" else trained[1:]:
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(trained[0], weights, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROW)
def test_peaks_are_predicted_from_the_plain_recording(name: str, tmp_path: Path):
    plain = recording(NARROW[name], "plain", tmp_path / "plain.json", 2)
    for change, parameters in CHANGES.items():
        done = memory_of(recording(NARROW[name], change, tmp_path / f"{change}.json", 2))
        predicted = registered()[change](plain, **parameters).graph.memory
        assert done is not None
        assert predicted is not None
        assert predicted.peak_bytes == pytest.approx(done.peak_bytes, rel=0.05)
