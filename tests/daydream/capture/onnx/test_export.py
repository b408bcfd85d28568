"""PyTorch's export of a network beside the network itself: both launch the same operators."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnx")

from daydream.capture.captured import Capture  # noqa: E402
from daydream.capture.onnx.model import subject_of  # noqa: E402
from daydream.capture.options import CaptureOptions  # noqa: E402
from daydream.capture.pytorch.step import Subject  # noqa: E402
from daydream.capture.sources import captured  # noqa: E402
from daydream.graph.graph import Phase  # noqa: E402


class ConvolutionalNet(torch.nn.Module):
    """Convolutions, a grouped and a transposed one, batch norm, activations, pooling, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.pool = torch.nn.MaxPool2d(2)
        self.group = torch.nn.Conv2d(8, 8, 3, padding=1, stride=2, groups=8)
        self.up = torch.nn.ConvTranspose2d(8, 12, 2, stride=2)
        self.head = torch.nn.Linear(12, 10)

    def forward(self, image: Any) -> Any:
        hidden = self.pool(torch.relu(self.norm(self.conv(image))))
        hidden = torch.nn.functional.silu(self.up(torch.nn.functional.hardswish(self.group(hidden))))
        return self.head(torch.nn.functional.adaptive_avg_pool2d(hidden, 1).flatten(1))


class Block(torch.nn.Module):
    """A block of a transformer whose attention is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(32), torch.nn.LayerNorm(32)
        self.into, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.wide, self.narrow = torch.nn.Linear(32, 64, bias=False), torch.nn.Linear(64, 32)

    def forward(self, hidden: Any) -> Any:
        batch, tokens, width = hidden.shape
        q, k, v = self.into(self.norm1(hidden)).view(batch, tokens, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(q @ k.transpose(-1, -2) * 8**-0.5, -1)
        hidden = hidden + self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, width))
        return hidden + self.narrow(torch.nn.functional.gelu(self.wide(self.norm2(hidden))))


class Tied(torch.nn.Module):
    """Tokens, and a product that shares their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(50, 16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Any) -> Any:
        return torch.log_softmax(self.head(torch.tanh(self.tokens(tokens))), -1)


def exported(model: Any, inputs: Any, path: Path, dynamo: bool, **options: Any) -> Path:
    if dynamo:
        pytest.importorskip("onnxscript")
    else:
        options["training"] = torch.onnx.TrainingMode.PRESERVE
        options["do_constant_folding"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (inputs,), str(path), dynamo=dynamo, **options)
    return path


def step(subject: Subject, *, training: bool = False, dtype: str = "float32") -> Capture:
    return captured(subject, CaptureOptions(mode="training" if training else "inference", dtype=dtype))


def launched(capture: Capture) -> list[tuple[Any, ...]]:
    """Name, phase, sizes and types of the inputs, and sizes of the results of operators that launch kernels."""
    return [
        (
            each.name,
            each.phase,
            [(tensor.dims, tensor.dtype) for tensor in each.inputs.tensors if tensor is not None],
            [tensor.dims for tensor in each.outputs],
        )
        for each in capture.operators
        if each.launches
    ]


def on_meta(make: Callable[[], Any], inputs: Any) -> Subject:
    with torch.device("meta"):
        model = make()
    return Subject(title="net", model=model, args=(inputs.to("meta"),), loss=torch.sum, batch=2)


NETS = {
    "convolutional": (ConvolutionalNet, torch.zeros(2, 3, 16, 16)),
    "block": (Block, torch.zeros(2, 16, 32)),
    "tied": (Tied, torch.zeros(2, 5, dtype=torch.int64)),
}


#: Operators that the file has (less) more than the network, where the exporter has written another graph.
#:
#: Parts of a tensor are split and squeezed instead of unbound: their gradients are put together by another name.
#: The transposed weights of a tied product are folded into weights of their own: no gradients are added up.
_LESS = {"block": ["aten::stack"], "tied": ["aten::add"]}
_MORE = {"block": ["aten::cat"]}


@pytest.mark.parametrize("dtype", ["float32", "amp", "bfloat16"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_an_export_launches_what_the_network_launches(tmp_path: Path, net: str, training: bool, dtype: str) -> None:
    make, inputs = NETS[net]
    path = exported(make().train(training), inputs, tmp_path / "net.onnx", dynamo=False)
    of_file = launched(step(subject_of(path), training=training, dtype=dtype))
    of_network = launched(step(on_meta(make, inputs), training=training, dtype=dtype))
    if not training:
        assert of_file == of_network
        return
    less, more = (_spare(of_network, of_file), _spare(of_file, of_network))
    assert (less, more) == (_LESS.get(net, []), _MORE.get(net, []))


def _spare(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> list[str]:
    """Names of operators that the first list has more often than the second."""
    spare = Counter(str(each) for each in one) - Counter(str(each) for each in other)
    return [text.split("'")[1] for text in spare.elements()]


@pytest.mark.slow
@pytest.mark.parametrize("net", ["block", "tied"])
def test_the_newer_exporter_writes_the_same_network(tmp_path: Path, net: str) -> None:
    make, inputs = NETS[net]
    of_file = step(subject_of(exported(make().eval(), inputs, tmp_path / "net.onnx", dynamo=True)))
    of_network = step(on_meta(make, inputs))
    assert launched(of_file) == launched(of_network)
    paths = {of_file.modules[each.module].path for each in of_file.operators if each.launches}
    assert paths == {of_network.modules[each.module].path for each in of_network.operators if each.launches}


def test_modules_bear_the_names_of_the_network(tmp_path: Path) -> None:
    make, inputs = NETS["convolutional"]
    capture = step(subject_of(exported(make(), inputs, tmp_path / "net.onnx", dynamo=False)), training=True)
    names = {
        capture.modules[each.module].path: each.name
        for each in capture.operators
        if each.phase == Phase.BACKWARD and each.launches
    }
    assert names["conv"] == "aten::convolution_backward"
    assert {each.name for each in capture.parameters} == {name for name, _ in make().named_parameters()}
    assert all(each.trained for each in capture.parameters)


def test_linear_weights_lie_as_in_the_network(tmp_path: Path) -> None:
    """The exporter transposes them; products of the file read them in PyTorch's order again."""
    make, inputs = NETS["block"]
    path = exported(make(), inputs, tmp_path / "net.onnx", dynamo=False)
    orders = [
        [each.inputs.tensors[2].strides for each in capture.operators if each.name == "aten::addmm"]  # type: ignore[union-attr]
        for capture in (step(subject_of(path)), step(on_meta(make, inputs)))
    ]
    assert orders[0] == orders[1] == [(1, 32), (1, 32), (1, 64)]
