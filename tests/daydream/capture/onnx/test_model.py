"""ONNX files as models: networks of onnx's own tests, sizes worked out beforehand, damaged files."""

from __future__ import annotations

from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from daydream.capture.captured import Capture  # noqa: E402
from daydream.capture.onnx.model import subject_of  # noqa: E402
from daydream.capture.onnx.registry import OPERATORS  # noqa: E402
from daydream.capture.options import CaptureOptions  # noqa: E402
from daydream.capture.pytorch.step import Subject  # noqa: E402
from daydream.capture.sources import captured, load_subject  # noqa: E402
from daydream.graph.graph import Phase  # noqa: E402
from hal.support.errors import InputError  # noqa: E402

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def capture(subject: Subject, *, training: bool = False) -> Capture:
    return captured(subject, CaptureOptions(mode="training" if training else "inference"))


def launched(step: Capture) -> Counter[str]:
    return Counter(each.name.removeprefix("aten::") for each in step.operators if each.launches)


def flops(subject: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        subject.model.eval()(*subject.args)
    return int(counter.get_total_flops())


# Networks. Multiply-adds of one image as their papers and torchvision's models have them, parameters likewise
# (densenet121 and the caffe2 networks without the classifier's bias or with scales beside batch norm).


@pytest.mark.parametrize(
    ("name", "gmacs", "parameters", "kinds"),
    [
        ("resnet50", 4.09, 25.57e6, {"convolution": 53, "native_batch_norm": 53, "relu": 49, "add": 16, "addmm": 1}),
        ("densenet121", 2.83, 8.07e6, {"convolution": 121, "native_batch_norm": 121, "relu": 121, "cat": 58}),
        ("vgg19", 19.63, 143.67e6, {"convolution": 16, "relu": 18, "max_pool2d_with_indices": 5, "addmm": 3}),
        ("squeezenet", 0.349, 1.235e6, {"convolution": 26, "relu": 26, "cat": 8, "max_pool2d_with_indices": 3}),
        ("shufflenet", 0.125, 1.39e6, {"convolution": 49, "native_batch_norm": 49, "clone": 16, "add": 13}),
        ("bvlc_alexnet", 0.655, 61.0e6, {"convolution": 5, "addmm": 3, "relu": 7}),
        ("inception_v1", 1.43, 7.0e6, {"convolution": 57, "relu": 57, "cat": 9, "addmm": 1}),
        ("inception_v2", 2.02, 11.2e6, {"convolution": 69, "native_batch_norm": 69, "cat": 10}),
        ("zfnet512", 1.48, 87.3e6, {"convolution": 5, "addmm": 3, "relu": 7}),
    ],
)
def test_networks_of_onnx(name: str, gmacs: float, parameters: float, kinds: dict[str, int]) -> None:
    subject = subject_of(FOLDER / f"light_{name}.onnx")
    assert flops(subject) / 2e9 == pytest.approx(gmacs, rel=0.01)
    step = capture(subject)
    counts = launched(step)
    assert {kind: counts[kind] for kind in kinds} == kinds
    assert sum(each.tensor.elements for each in step.parameters) == pytest.approx(parameters, rel=0.01)


@pytest.mark.parametrize("name", ["resnet50", "vgg19", "squeezenet", "shufflenet"])
def test_networks_train_in_another_batch(name: str) -> None:
    """Files that fix a batch of one, and write it into their Reshapes, run in one of eight."""
    path = FOLDER / f"light_{name}.onnx"
    one, eight = subject_of(path), subject_of(path, 8)
    assert (one.batch, eight.batch) == (1, 8)
    assert flops(eight) == 8 * flops(one)
    step = capture(eight, training=True)
    counts = launched(step)
    assert counts["convolution_backward"] == counts["convolution"]
    assert counts["native_batch_norm_backward"] == counts["native_batch_norm"]
    assert {each.phase for each in step.operators} == {Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE}
    modules = {step.modules[each.module].kind for each in step.operators if each.name == "aten::convolution_backward"}
    assert modules == {"Conv"}


# Small graphs


def model(
    nodes: list[Any], inputs: dict[str, Any], results: list[str], weights: list[Any] = (), version: int = 20
) -> Any:  # type: ignore[assignment]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, *of) for name, of in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in results],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=9)


def written(tmp_path: Path, *args: Any, **options: Any) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(model(*args, **options), str(path))
    return path


def weight(name: str, *dims: int) -> Any:
    return helper.make_tensor(name, TensorProto.FLOAT, dims, b"\0" * 4 * int(torch.Size(dims).numel()), raw=True)


def whole(name: str, *values: int) -> Any:
    return helper.make_tensor(name, TensorProto.INT64, [len(values)], array("q", values).tobytes(), raw=True)


FLOAT = TensorProto.FLOAT


def test_shapes_and_masks_are_worked_out_beforehand(tmp_path: Path) -> None:
    """Of heads, sizes and a causal mask only what depends on data is left; open sizes are supposed and said."""
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "one"], ["tokens"]),
        helper.make_node("Concat", ["minus", "tokens", "heads"], ["shape"], axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["parts"]),
        helper.make_node("Transpose", ["parts"], ["q"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["parts"], ["k"], perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["q", "k"], ["scores"]),
        helper.make_node("Squeeze", ["tokens"], ["count"]),
        helper.make_node("Range", ["zero", "count", "step"], ["range"]),
        helper.make_node("Unsqueeze", ["range", "one"], ["rows"]),
        helper.make_node("LessOrEqual", ["range", "rows"], ["mask"]),
        helper.make_node("Where", ["mask", "scores", "never"], ["masked"]),
        helper.make_node("Div", ["masked", "eight"], ["scaled"]),
        helper.make_node("Softmax", ["scaled"], ["y"]),
    ]
    weights = [
        whole("one", 1), whole("minus", -1), whole("heads", 4, 8),
        helper.make_tensor("zero", TensorProto.INT64, [], [0]), helper.make_tensor("step", TensorProto.INT64, [], [1]),
        helper.make_tensor("never", FLOAT, [], [-1e9]), helper.make_tensor("eight", FLOAT, [], [8.0]),
    ]  # fmt: skip
    path = written(tmp_path, nodes, {"x": (FLOAT, ["batch", "sequence", 32])}, ["y"], weights)
    subject = subject_of(path, 3, sequence=16)
    assert (subject.batch, subject.args[0].shape) == (3, (3, 16, 32))
    # Queries and keys are copied for their product.
    assert launched(capture(subject)) == Counter({"clone": 2, "bmm": 1, "where": 1, "div": 1, "_softmax": 1})
    assert any("16 tokens" in sentence for sentence in subject.assumed)
    assert subject_of(path).args[0].shape == (1, 128, 32)
    by_name = load_subject(f"onnx:{path}", batch=2, sequence=8, image=None, class_name=None, training=False)
    assert by_name.args[0].shape == (2, 8, 32)


def test_a_known_branch_is_taken(tmp_path: Path) -> None:
    inner = [
        helper.make_graph(
            [helper.make_node(kind, ["x"], ["z"])], kind, [], [helper.make_tensor_value_info("z", FLOAT, [])]
        )
        for kind in ("Relu", "Tanh")
    ]
    nodes = [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Size", ["sizes"], ["rank"]),
        helper.make_node("Equal", ["rank", "two"], ["flat"]),
        helper.make_node("If", ["flat"], ["y"], then_branch=inner[0], else_branch=inner[1]),
    ]
    two = helper.make_tensor("two", TensorProto.INT64, [], [2])
    for sizes, name in (([4, 4], "relu"), ([4, 4, 4], "tanh")):
        path = written(tmp_path, nodes, {"x": (FLOAT, sizes)}, ["y"], [two])
        assert launched(capture(subject_of(path))) == Counter({name: 1})


def test_layers_with_states_and_windows(tmp_path: Path) -> None:
    """The LSTM of PyTorch's meta tensors unrolls; sizes are ONNX's: (tokens, directions, batch, hidden)."""
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r", "b"], ["h"], hidden_size=8, direction="bidirectional"),
        helper.make_node("Transpose", ["h"], ["t"], perm=[2, 1, 3, 0]),
        helper.make_node("Resize", ["t", "", "scales"], ["big"], mode="nearest"),
        helper.make_node("AveragePool", ["big"], ["y"], kernel_shape=[3, 3], strides=[2, 2], auto_pad="SAME_UPPER"),
    ]
    weights = [weight("w", 2, 32, 4), weight("r", 2, 32, 8), weight("b", 2, 64)]
    weights.append(helper.make_tensor("scales", FLOAT, [4], [1.0, 1.0, 2.0, 2.0]))
    subject = subject_of(written(tmp_path, nodes, {"x": (FLOAT, [5, 3, 4])}, ["y"], weights))
    assert subject.model(*subject.args)[0].shape == (3, 2, 8, 5)
    assert sum(each.numel() for each in subject.model.parameters()) == 2 * 32 * (4 + 8 + 2)


def test_every_operator_has_onnx_name() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    assert set(OPERATORS) - known == {"Linear", "Silu", "SimplifiedLayerNormalization"}


# Damaged files


def error_of(path: Path, batch: int | None = None) -> str:
    with pytest.raises(InputError) as caught:
        subject_of(path, batch)
    text = str(caught.value)
    assert "\n" not in text and str(path) in text
    return text


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.9, 0.999])
def test_a_file_cut_off_is_one_line(tmp_path: Path, share: float) -> None:
    data = (FOLDER / "light_resnet50.onnx").read_bytes()
    path = tmp_path / "cut.onnx"
    path.write_bytes(data[: int(len(data) * share)])
    assert error_of(path).startswith(str(path))


@pytest.mark.parametrize("content", [b"", b"\x00", b"{}", b"import torch\n", b"\x80\x04\x95", bytes(range(256)) * 8])
def test_what_is_no_onnx_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "no.onnx"
    path.write_bytes(content)
    assert "is no ONNX" in error_of(path)
    assert "cannot be read" in error_of(tmp_path / "missing.onnx")


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Det", ["x"], ["y"], name="/head/Det"),
        helper.make_node("StringNormalizer", ["y"], ["z"]),
    ]
    text = error_of(written(tmp_path, nodes, {"x": (FLOAT, [4, 4])}, ["z"]))
    assert "/head/Det: is a Det (and StringNormalizer), which is not supported; supported: " in text


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    proto = model(
        [helper.make_node("Add", ["x", "w"], ["y"], name="sum")], {"x": (FLOAT, [4])}, ["y"], [weight("w", 4)]
    )
    del proto.graph.initializer[:]
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    assert "w" in error_of(path)


def test_weights_next_to_the_file_are_not_read_but_shapes_are(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Reshape", ["m", "s"], ["y"])]
    path = tmp_path / "model.onnx"
    for threshold in (64, 0):
        proto = model(nodes, {"x": (FLOAT, [4, 8])}, ["y"], [weight("w", 8, 16), whole("s", 2, 32)])
        onnx.save(proto, str(path), save_as_external_data=True, location="weights.bin", size_threshold=threshold)
        (tmp_path / "weights.bin").unlink()
        if threshold:
            assert launched(capture(subject_of(path))) == Counter({"mm": 1})
        else:
            assert "has its values in a file that is missing" in error_of(path)


@pytest.mark.parametrize(
    ("node", "sizes", "problem"),
    [
        (helper.make_node("NonZero", ["x"], ["y"], name="n"), [4], "depend on data"),
        (helper.make_node("Reshape", ["x", "x"], ["y"], name="n"), [4], "depend on data"),
        (helper.make_node("MatMul", ["x", "x"], ["y"], name="n"), [4, 5], "cannot be worked out"),
        (helper.make_node("Relu", ["x"], ["y"], name="n"), [2**40, 2**40], "no tensor has"),
        (helper.make_node("Relu", ["x"], ["y"], name="n"), [4, "colours"], "leaves its size 1 (colours) open"),
        (helper.make_node("Attention", ["x", "x", "x"], ["y"], name="n", softcap=3.0), [1, 1, 4, 4], "softcap"),
    ],
)
def test_what_cannot_be_worked_out_is_one_line(tmp_path: Path, node: Any, sizes: list[Any], problem: str) -> None:
    version = 23 if node.op_type == "Attention" else 20
    assert problem in error_of(written(tmp_path, [node], {"x": (FLOAT, sizes)}, ["y"], version=version))


def test_a_batch_that_the_file_cannot_take_is_one_line(tmp_path: Path) -> None:
    nodes = [helper.make_node("Concat", ["token", "x"], ["y"], axis=1)]
    path = written(tmp_path, nodes, {"x": (FLOAT, [1, 4, 8])}, ["y"], [weight("token", 1, 1, 8)])
    assert subject_of(path).batch == 1
    assert "export it with a first size that is left open" in error_of(path, 4)


def test_constants_without_end_take_no_memory(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ConstantOfShape", ["s"], ["big"], name="big"),
        helper.make_node("Tile", ["one", "r"], ["tiled"], name="tile"),
        helper.make_node("ReduceSum", ["big"], ["a"], keepdims=0),
        helper.make_node("ReduceSum", ["tiled"], ["b"], keepdims=0),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    weights = [whole("s", 2**20, 2**14), whole("r", 2**40), helper.make_tensor("one", FLOAT, [1], [1.0])]
    subject = subject_of(written(tmp_path, nodes, {"x": (FLOAT, [4])}, ["y"], weights))
    assert subject.model(*subject.args)[0].shape == (4,)


def test_weights_of_equal_values_that_a_file_holds_once(tmp_path: Path) -> None:
    """Exporters write the zeros of biases and statistics once, under second names; statistics are no parameters."""
    nodes = [
        helper.make_node("Identity", ["zeros"], ["bias"]),
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["bias", "m"], ["a"]),
        helper.make_node("BatchNormalization", ["a", "ones", "zeros", "zeros", "ones"], ["b"]),
        helper.make_node("BatchNormalization", ["b", "ones", "zeros", "zeros", "ones"], ["y"]),
    ]
    weights = [weight("w", 8, 16), weight("zeros", 16), weight("ones", 16)]
    step = capture(subject_of(written(tmp_path, nodes, {"x": (FLOAT, [4, 8])}, ["y"], weights)), training=True)
    counts = launched(step)
    assert (counts["addmm"], counts["native_batch_norm"], counts["native_batch_norm_backward"]) == (1, 2, 2)
    assert sum(each.tensor.elements for each in step.parameters) == 8 * 16 + 16 + 16
