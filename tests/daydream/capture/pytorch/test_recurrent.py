"""What cuDNN's recurrent layers keep for their backward pass."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from daydream.capture.captured import Capture  # noqa: E402
from daydream.capture.pytorch.meta_kernels import board_kernels  # noqa: E402
from daydream.capture.pytorch.step import Subject, capture  # noqa: E402
from daydream.graph.graph import Phase  # noqa: E402


class Last(nn.Module):
    """Recurrent layers, of which the result alone goes on."""

    def __init__(self, kind: str, *sizes: int, **settings: Any) -> None:
        super().__init__()
        self.layers = getattr(nn, kind)(*sizes, **settings)

    def forward(self, sequence: Any) -> Any:
        return self.layers(sequence)[0]


def captured(kind: str, *sizes: int, training: bool = True, **settings: Any) -> Capture:
    with torch.device("meta"):
        subject = Subject(title=kind, model=Last(kind, *sizes, **settings), args=[torch.empty(250, 100, sizes[0])])
    with board_kernels("eager"):
        return capture(subject, training=training)


def reserve(step: Capture) -> int:
    """Bytes of the reserve, which the backward pass frees."""
    (call,) = (each for each in step.operators if each.name == "aten::_cudnn_rnn")
    number = call.made[-1]
    freeing = [each for each in step.operators if number in each.freed]
    assert all(each.phase == Phase.BACKWARD for each in freeing) or not step.training
    return step.storages[number].bytes


#: Sequences times steps, of 320 units.
NUMBERS = 250 * 100 * 320 * 4


@pytest.mark.parametrize(
    ("kind", "kept"),
    # What PyTorch issue 2895 has for four layers: 736,000,000 and 864,000,000 bytes.
    [("LSTM", 4 * 5 + 3), ("GRU", 4 * 6 + 3), ("RNN", 4 * 1 + 3)],
)
def test_gates_cells_and_states_of_all_layers_but_the_last_state(kind: str, kept: int) -> None:
    assert reserve(captured(kind, 123, 320, 4)) == kept * NUMBERS
    assert reserve(captured(kind, 123, 320, 4, bidirectional=True)) == 2 * kept * NUMBERS


def test_one_layer_keeps_no_state_and_projections_keep_both() -> None:
    assert reserve(captured("LSTM", 123, 320, 1)) == 5 * NUMBERS
    # Two layers: gates, cells and states of 320, and the projection of 80 that the second reads.
    assert reserve(captured("LSTM", 123, 320, 2, proj_size=80)) == (2 * 6) * NUMBERS + NUMBERS // 4


def test_nothing_is_kept_without_a_backward_pass() -> None:
    step = captured("LSTM", 123, 320, 4, training=False)
    (call,) = (each for each in step.operators if each.name == "aten::_cudnn_rnn")
    assert call.outputs[3].elements == 0
