"""Recorded operators as operators of Roller: sizes, directions, what is inferred and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from daydream.operators.convolutions import Convolutions, infer_side, is_convolution
from daydream.operators.inputs import Inputs, RecordedTensor, inputs_of
from daydream.operators.rules import describe
from daydream.operators.work import Work
from tests.daydream.recorded import enclosing, operator, trace


def work(name, dims, types=None, **arguments):
    recorded = trace([operator(name, dims, types, **arguments)])
    inputs = inputs_of(recorded, 0)
    assert isinstance(inputs, Inputs)
    return describe(name, inputs)


def convolution(operators, row=0):
    return Convolutions(trace(operators), enclosing(operators)).describe(row)


@pytest.mark.parametrize(
    "dims",
    [
        [[-1, 2]], ["text"], [[1.5]], [None], [[2**60, 2**60]], [[True]], [[float("nan")]],
    ],
)  # fmt: skip
def test_sizes_that_are_none_make_no_tensor(dims):
    recorded = trace([operator("aten::relu", dims, ["float"])])
    assert describe("aten::relu", inputs_of(recorded, 0)) == "no tensor among the recorded inputs"


def test_addmm_is_a_product_with_bias():
    found = work("aten::addmm", [[11], [7, 5], [5, 11], [], []], ["float", "float", "float", "Int", "Int"])
    assert found.parts[0].data == {
        "op": "matmul", "m": 7, "n": 11, "k": 5, "dtype": "float32",
        "epilogue": [{"function": "bias_add", "axis": "n"}],
    }  # fmt: skip
    assert found.flops == 2 * 7 * 11 * 5
    assert found.bytes == 4 * (7 * 5 + 5 * 11 + 7 * 11)


def test_strides_tell_transposed_operands():
    strides = {"Input Strides": [[5, 1], [1, 5]]}
    found = work("aten::mm", [[7, 5], [5, 11]], ["c10::Half", "c10::Half"], **strides)
    assert found.parts[0].data == {
        "op": "matmul", "m": 7, "n": 11, "k": 5, "dtype": "float16", "transpose_b": True,
    }  # fmt: skip


def test_batched_and_linear_products():
    batched = work("aten::baddbmm", [[3, 7, 11], [3, 7, 5], [3, 5, 11]])
    assert batched.parts[0].data == {"op": "batch_matmul", "b": 3, "m": 7, "n": 11, "k": 5, "dtype": "float32"}
    linear = work("aten::linear", [[2, 3, 5], [11, 5], []], ["float", "float", ""])
    data = {"op": "matmul", "m": 6, "n": 11, "k": 5, "dtype": "float32", "transpose_b": True}
    assert linear.parts[0].data == data


def test_what_makes_no_product_says_why():
    assert work("aten::mm", [[7, 5], [6, 11]]) == "operands of [7, 5] and [6, 11] do not make a product"
    assert work("aten::mm", [[7, 0], [0, 11]]) == "an empty tensor"
    assert work("aten::mm", [[7, 5], [5, 11]], ["long", "long"]) == "elements of type long"
    assert work("aten::cumsum", [[7, 5]]) == "tensor or dimension not recorded"


def test_elementwise_operators_stream_their_tensors():
    two = work("aten::add_", [[8, 6], [8, 6], []], ["float", "float", "Int"])
    assert two.parts[0].data == {"op": "elementwise", "shape": [48], "dtype": "float32", "function": "add"}
    assert two.bytes == 3 * 48 * 4
    scaled = work("aten::mul_", [[8, 6], []], ["float", "double"])
    assert scaled.parts[0].data["scalar"] is True
    assert scaled.bytes == 2 * 48 * 4
    back = work("aten::threshold_backward", [[8, 6], [8, 6], []], ["float", "float", "Int"])
    assert (back.direction, back.parts[0].data["function"]) == ("backward", "relu")


def test_rows_norms_and_pools():
    softmax = work("aten::_softmax", [[4, 6, 8], [], []], ["float", "Int", "Bool"])
    assert softmax.parts[0].data == {"op": "softmax", "shape": [24, 8], "dtype": "float32"}
    norm = work("aten::native_layer_norm", [[4, 6, 8], [], [6, 8], [6, 8], []])
    assert norm.parts[0].data["shape"] == [4, 48]
    batch = work("aten::cudnn_batch_norm_backward", [[4, 6, 8, 8], [4, 6, 8, 8], [6]])
    assert (batch.kind, len(batch.parts), batch.bytes) == ("gradient of batch norm", 3, 5 * 4 * 4 * 6 * 64)
    assert work("aten::max_pool2d", [[4, 6, 8, 8]]) == "its window was not recorded"
    values = {"Concrete Inputs": ["", "[3, 3]", "[2, 2]", "[1, 1]", "[1, 1]", "False"]}
    pool = work("aten::max_pool2d_with_indices", [[4, 6, 8, 8], [], [], [], [], []], None, **values)
    assert pool.parts[0].data["stride"] == [2, 2]
    assert pool.parts[0].data["padding"] == [1, 1, 1, 1]


# Convolutions


def test_a_transposed_convolution_is_the_gradient_of_a_convolutions_data():
    turned = {"Concrete Inputs": ["", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "True", "[1, 1]", "2"]}
    dims = [[2, 4, 9, 9], [4, 3, 3, 3], [], [], [], [], [], [], []]
    found = convolution([operator("aten::convolution", dims, **turned)])
    # (9 - 1) * 2 - 2 * 1 + (3 - 1) + 1 + 1 = 18 pixels a side, and 2 groups of 3 channels
    data = found.parts[0].data
    assert [data[key] for key in ("c", "h", "w", "f", "groups")] == [6, 18, 18, 4, 2]
    assert found.direction == "backward data"
    assert found.flops == 2 * (2 * 4 * 81) * 3 * 9


@pytest.mark.parametrize(
    ("size", "taps", "output", "expected"),
    [
        (224, 7, 112, (2, 3)),  # (224 + 6 - 7) // 2 + 1 = 112
        (56, 1, 28, (2, 0)),  # (56 - 1) // 2 + 1 = 28
        (56, 3, 56, (1, 1)),
        (28, 3, 14, (2, 1)),  # (28 + 2 - 3) // 2 + 1 = 14
        (13, 3, 11, (1, 0)),  # 13 - 3 + 1
        (224, 11, 55, (4, 3)),  # (224 + 6 - 11) // 4 + 1 = 55; PyTorch's AlexNet has 2, which makes 55 as well
        (9, 5, None, (1, 2)),
        (8, 3, 60, None),
    ],
)
def test_stride_and_padding_from_sizes(size, taps, output, expected):
    assert infer_side(size, taps, output) == expected


@pytest.mark.parametrize("taps", [1, 2, 3, 5, 7, 11])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_inferred_stride_and_padding_make_the_output(taps, stride):
    for size in range(taps, 60):
        for padding in range(taps // 2 + 1):
            output = (size + 2 * padding - taps) // stride + 1
            found = infer_side(size, taps, output)
            assert found is not None
            assert (size + 2 * found[1] - taps) // found[0] + 1 == output


BACKWARD = operator("aten::cudnn_convolution_backward", [[2, 4, 9, 9], [2, 8, 5, 5], [8, 4, 3, 3]])


def test_the_gradient_tells_a_convolutions_output():
    found = convolution([operator("aten::cudnn_convolution", [[2, 4, 9, 9], [8, 4, 3, 3]]), BACKWARD])
    assert isinstance(found, Work)
    # (9 + 2 - 3) // 2 + 1 = 5
    assert found.parts[0].data == {
        "op": "conv2d", "n": 2, "c": 4, "h": 9, "w": 9, "f": 8, "groups": 1, "kh": 3, "kw": 3, "stride": 2,
        "dilation": 1, "padding": 1, "dtype": "float32",
    }  # fmt: skip
    assert found.flops == 2 * (2 * 8 * 25) * (4 * 9)
    assert found.assumed == "stride and padding from the size of its gradient"


def test_equal_convolutions_of_different_stride_are_distinguished_by_sequence_number():
    sizes = [[2, 4, 9, 9], [8, 4, 3, 3]]
    found = [
        operator("aten::cudnn_convolution", sizes, sequence=31),
        operator("aten::cudnn_convolution", sizes, sequence=32),
        operator("ConvolutionBackward0", sequence=32),
        operator("aten::convolution_backward", [[2, 8, 9, 9], *sizes], inside=2),
        operator("ConvolutionBackward0", sequence=31),
        operator("aten::convolution_backward", [[2, 8, 5, 5], *sizes], inside=4),
    ]
    strides = [convolution(found, row).parts[0].data["stride"] for row in (0, 1)]
    assert strides == [2, 1]


def test_without_backward_pass_the_next_operator_tells_the_output():
    found = convolution(
        [
            operator("aten::cudnn_convolution", [[2, 4, 9, 9], [8, 4, 3, 3]]),
            operator("aten::empty", [[]]),
            operator("aten::add_", [[2, 8, 7, 7], [1, 8, 1, 1]]),
        ]
    )
    assert found.parts[0].data["padding"] == 0  # 9 - 3 + 1 = 7
    assert found.assumed == "stride and padding from the size of its consumer"
    alone = convolution([operator("aten::cudnn_convolution", [[2, 4, 9, 9], [8, 4, 3, 3]])])
    assert alone.assumed == "stride 1 and padding that keeps the size"


def test_recorded_values_are_believed():
    values = {"Concrete Inputs": ["", "", "", "[2, 1]", "[0, 1]", "[1, 1]", "False", "[0, 0]", "2"]}
    dims = [[2, 4, 9, 9], [8, 2, 3, 3], [8], [], [], [], [], [], []]
    data = convolution([operator("aten::convolution", dims, **values)]).parts[0].data
    assert (data["stride"], data["padding"], data["groups"]) == ([2, 1], [0, 1, 0, 1], 2)


def test_depthwise_convolutions_and_those_of_one_dimension():
    depthwise = convolution([operator("aten::_conv_depthwise2d", [[2, 8, 9, 9], [8, 1, 3, 3]])])
    assert depthwise.parts[0].data["op"] == "depthwise_conv2d"
    line = convolution([operator("aten::conv1d", [[2, 4, 9], [8, 4, 3]])])
    assert [line.parts[0].data[key] for key in ("h", "w", "kh", "kw")] == [1, 9, 1, 3]


def test_gradients_of_children_and_of_the_whole():
    operators = [
        BACKWARD,
        operator("aten::cudnn_convolution_backward_input", [[], [2, 8, 5, 5], [8, 4, 3, 3]], inside=0),
        operator("aten::cudnn_convolution_backward_weight", [[], [2, 8, 5, 5], [2, 4, 9, 9]], inside=0),
    ]
    whole, data, weights = (convolution(operators, row) for row in range(3))
    assert [part.direction for part in whole.parts] == ["backward data", "backward weights"]
    assert (data.direction, weights.direction) == ("backward data", "backward weights")
    assert whole.flops == data.flops + weights.flops
    assert data.parts[0].data == weights.parts[0].data


def test_the_first_layer_wants_no_gradient_of_its_data():
    mask = {"Concrete Inputs": ["", "", "", "", "[2, 2]", "[1, 1]", "[1, 1]", "False", "", "1", "[False, True, False]"]}
    dims = [[2, 8, 5, 5], [2, 4, 9, 9], [8, 4, 3, 3], [], [], [], [], [], [], [], []]
    found = convolution([operator("aten::convolution_backward", dims, **mask)])
    assert found.direction == "backward weights"


def test_convolutions_that_have_no_work_say_why():
    assert convolution([operator("aten::cudnn_convolution")]) == (
        "input sizes not recorded; record with record_shapes=True"
    )
    cube = [[2, 4, 9, 9, 9], [8, 4, 3, 3, 3]]
    assert convolution([operator("aten::cudnn_convolution", cube)]) == "a convolution over 3 dimensions"
    orphan = [operator("aten::cudnn_convolution_backward_weight", [[], [2, 8, 5, 5]])]
    assert convolution(orphan) == "no operator around it says the sizes"
    empty = [operator("aten::cudnn_convolution", [[0, 4, 9, 9], [8, 4, 3, 3]])]
    assert convolution(empty) == "operands of [0, 4, 9, 9] and [8, 4, 3, 3] do not make a convolution"


def test_names_of_convolutions():
    names = ["aten::cudnn_convolution", "aten::convolution_backward", "aten::conv_tbc", "aten::mm", "conv2d"]
    assert [is_convolution(name) for name in names] == [True, True, False, False, False]
    assert np.array([is_convolution("aten::cudnn_convolution_backward_weight")]).all()


def test_a_window_larger_than_its_image_has_one_place() -> None:
    image, result = RecordedTensor((2, 5, 7, 7), "float", (245, 49, 7, 1)), RecordedTensor((2, 5, 1, 1), "float")
    work = describe("aten::avg_pool2d", Inputs((image,), ("", "[90, 90]", "[]", "[0, 0]", "True")), (result,))
    assert isinstance(work, Work)
    assert (work.parts[0].data["kh"], work.parts[0].data["kw"]) == (7, 7)


@pytest.mark.parametrize(
    ("dims", "axis", "kernel", "walk"),
    [
        ([7, 5, 3], -1, "tensor_kernel_scan_innermost_dim", (35.0, 3.0, 1.0)),
        ([7, 5, 3], 1, "tensor_kernel_scan_outer_dim", (7.0, 5.0, 3.0)),
        ([1, 5, 1], 1, "DeviceScanKernel", ()),
    ],
)  # fmt: skip
def test_scans_have_a_kernel_by_the_dimension(dims, axis, kernel, walk):
    values = {"Concrete Inputs": ["", str(axis), ""]}
    found = work("aten::cumsum", [dims, [], []], ["float", "Scalar", ""], **values)
    (moved,) = [part.moved for part in found.parts]
    assert (moved.kernel, moved.walk) == (kernel, walk)
    assert moved.bytes == 2 * 4 * np.prod(dims)


@pytest.mark.parametrize(
    ("dims", "k", "axis", "walk"),
    [([64, 4096], 8, -1, (64.0, 4096.0, 8.0)), ([5, 9, 3], 4, 1, (15.0, 9.0, 4.0)), ([7], 3, None, (1.0, 7.0, 3.0))],
)  # fmt: skip
def test_values_by_rank_are_the_kernels_of_their_rows(dims, k, axis, walk):
    values = {"Concrete Inputs": ["", str(k), "" if axis is None else str(axis)]}
    (part,) = work("aten::topk", [dims, [], []], ["float", "Scalar", "Scalar"], **values).parts
    assert (part.moved.kernel, part.moved.walk, part.moved.model) == ("topk", walk, "row-wise")


def test_places_by_rank_of_integers_have_no_rule_without_their_results():
    values = {"Concrete Inputs": ["", "8", "-1"]}
    assert (
        work("aten::topk", [[64, 4096], [], []], ["long int", "Scalar", "Scalar"], **values) == "no rule for aten::topk"
    )


def test_scans_that_keep_places_are_not_those_of_cub():
    values = {"Concrete Inputs": ["", "0", ""]}
    (part,) = work("aten::cummax", [[128], [], []], ["float", "Scalar", ""], **values).parts
    assert (part.moved.kernel, part.moved.walk) == ("tensor_kernel_scan_innermost_dim", (1.0, 128.0, 1.0))
