"""FLOPs of captured steps against PyTorch's own count of the same step."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from daydream.capture.pytorch.meta_kernels import board_kernels  # noqa: E402
from daydream.capture.pytorch.step import Subject, capture  # noqa: E402
from daydream.operators.calls import operator_prices  # noqa: E402
from hal.catalog import load_device  # noqa: E402


class Network(torch.nn.Module):
    """Convolutions over lines, planes and volumes, turned round too, products and causal attention."""

    def __init__(self, groups):
        super().__init__()
        nn = torch.nn
        self.planes = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1, groups=groups)
        )
        self.turned = nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1)
        self.lines = nn.Sequential(nn.Conv1d(16, 16, 5), nn.ConvTranspose1d(16, 8, 3, groups=groups))
        self.volumes = nn.Conv3d(1, 4, 3, padding=1)
        self.project = nn.Linear(16, 96)

    def forward(self, images):
        features = self.turned(self.planes(images))
        pixels = features.flatten(2)
        tokens = self.project(pixels.transpose(1, 2)[:, :64])
        query, key, value = tokens.view(-1, 64, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        scores = torch.bmm(tokens, tokens.transpose(1, 2))
        volume = self.volumes(features[:, :1, None])
        return sum(each.sum() for each in (attended, scores, volume, self.lines(pixels)))


def flops(groups, mode, dtype, attention):
    """Ours and PyTorch's."""
    with torch.device("meta"):
        subject = Subject(title="", model=Network(groups), args=(torch.empty(2, 3, 32, 32),), loss=lambda loss: loss)
    with FlopCounterMode(display=False) as counter, board_kernels(attention):
        step = capture(subject, training=mode == "training", dtype=dtype, optimizer="none")
    prices = operator_prices([(each.name, each.inputs, each.outputs) for each in step.operators], load_device("a100"))
    return sum(price.flops for price in prices), counter.get_total_flops()


@pytest.mark.parametrize("attention", ["flash", "efficient", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flops_of_training_are_those_that_pytorch_counts(dtype, attention):
    ours, theirs = flops(1, "training", dtype, attention)
    assert ours == theirs > 1e7


def test_flops_of_groups_agree_but_for_gradients_of_weights():
    ours, theirs = flops(4, "inference", "float32", "flash")
    assert ours == theirs
    # There PyTorch counts every group's gradient for all channels.
    ours, theirs = flops(4, "training", "float32", "flash")
    planes = 2 * 2 * (16 * 16) * 32 * 16 * 9
    lines = 2 * 2 * 1020 * 16 * 8 * 3
    assert theirs - ours == (planes + lines) * 3 / 4
