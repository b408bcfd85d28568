"""Convolutions as Inductor lowers them: biases as loops, images with channels last."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from daydream.capture.captured import Capture  # noqa: E402
from daydream.capture.fusion.inductor import fused  # noqa: E402
from daydream.capture.options import CaptureOptions  # noqa: E402
from daydream.capture.pytorch.step import Subject  # noqa: E402
from daydream.capture.sources import captured  # noqa: E402
from daydream.operators.traffic import is_channels_last  # noqa: E402


def step_of(*layers: torch.nn.Module, channels: int = 64, training: bool = False) -> Capture:
    """A step of layers in a row on two images of 32 by 32."""
    with torch.device("meta"):
        model, images = torch.nn.Sequential(*layers), torch.empty(2, channels, 32, 32)
    options = CaptureOptions(mode="training" if training else "inference", optimizer="none")
    return captured(Subject(model=model, args=[images], title="layers"), options)


def on_meta(*args: int, **kwargs: int) -> torch.nn.Module:
    """A convolution without memory."""
    return torch.nn.Conv2d(*args, **kwargs, device="meta")


def test_a_bias_joins_the_loop_behind_its_convolution() -> None:
    step = fused(step_of(on_meta(64, 128, 3), torch.nn.ReLU()))
    names = [operator.name for operator in step.operators]
    assert names == ["aten::convolution", "inductor::triton_poi_fused_add_relu"]
    convolution, loop = step.operators
    assert convolution.inputs.tensor(2) is None
    assert [tensor.elements for tensor in loop.outputs] == [2 * 128 * 30 * 30]


def test_convolutions_in_a_row_have_their_channels_last_but_not_the_image() -> None:
    step = fused(step_of(on_meta(64, 128, 3, bias=False), torch.nn.ReLU(), on_meta(128, 128, 3, bias=False)))
    first, _, second, copy = step.operators
    data = [operator.inputs.tensor(0) for operator in (first, second)]
    assert all(tensor is not None for tensor in data)
    assert [is_channels_last(tensor) for tensor in data if tensor is not None] == [False, True]
    assert copy.name.endswith("clone")
    assert is_channels_last(first.outputs[0])


def test_groups_of_several_channels_keep_their_layout() -> None:
    step = fused(step_of(on_meta(64, 128, 3, groups=4, bias=False), torch.nn.ReLU()))
    assert not is_channels_last(step.operators[0].outputs[0])


def test_gradients_belong_to_the_convolutions_that_they_are_of() -> None:
    step = fused(step_of(on_meta(64, 128, 3), torch.nn.ReLU(), on_meta(128, 256, 3), training=True))
    gradients = [operator for operator in step.operators if operator.name == "aten::convolution_backward"]
    assert [step.operators[each.forward].name for each in gradients] == ["aten::convolution"] * 2
