"""Layouts of captured tensors: convolutions, batch norms and copies between NCHW and NHWC."""

from __future__ import annotations

from daydream.operators.calls import operator_prices, work_of_call
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.operators.traffic import is_channels_last, is_contiguous, scattered
from hal.catalog import load_device

HALF = "c10::Half"


def images(n: int, c: int, side: int, *, channels_last: bool) -> RecordedTensor:
    strides = (c * side * side, 1, side * c, c) if channels_last else (c * side * side, side * side, side, 1)
    return RecordedTensor((n, c, side, side), HALF, strides)


def convolution(data: RecordedTensor, weights: RecordedTensor) -> Inputs:
    values = ("", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")
    return Inputs((data, weights, None, *[None] * 6), values)


def batch_norm(data: RecordedTensor, *, training: bool) -> Inputs:
    channels = RecordedTensor((data.dims[1],), "float", (1,))
    values = ("", "", "", "", "", str(training), "0.1", "1e-05")
    return Inputs((data, channels, channels, channels, channels, None, None, None), values)


def test_a_convolution_is_channels_last_where_either_operand_is() -> None:
    nchw, nhwc = images(8, 64, 14, channels_last=False), images(8, 64, 14, channels_last=True)
    lying, plain = images(64, 64, 3, channels_last=True), images(64, 64, 3, channels_last=False)
    one = work_of_call("aten::convolution", convolution(nhwc, lying), (nhwc,))
    copied = work_of_call("aten::convolution", convolution(nchw, lying), (nhwc,))
    none = work_of_call("aten::convolution", convolution(nchw, plain), (nchw,))
    assert one is not None
    assert copied is not None
    assert none is not None
    assert [part.channels_last for part in one.parts] == [True]
    assert [part.channels_last for part in copied.parts] == [False, True]
    assert copied.parts[0].moved is not None
    assert copied.parts[0].moved.bytes == 2 * nchw.bytes
    assert [part.channels_last for part in none.parts] == [False]
    device = load_device("rtx-3090")
    prices = operator_prices(
        [("aten::convolution", convolution(data, weights), (nhwc,)) for data, weights in
         ((nhwc, lying), (nchw, lying), (nchw, plain))], device,
    )  # fmt: skip
    assert prices[0].seconds < prices[2].seconds
    assert prices[0].seconds < prices[1].seconds


def test_batch_norms_of_few_channels_wait_for_their_blocks() -> None:
    device = load_device("rtx-3090")
    seconds = {}
    for channels in (16, 256):
        for channels_last in (False, True):
            data = images(4096 // channels * 16, channels, 28, channels_last=channels_last)
            price = operator_prices([("aten::native_batch_norm", batch_norm(data, training=True), (data,))], device)
            seconds[channels, channels_last] = price[0].seconds
    assert seconds[16, False] > 2 * seconds[16, True]
    assert seconds[256, False] < 1.1 * seconds[256, True]
    data = images(64, 64, 28, channels_last=True)
    once = work_of_call("aten::native_batch_norm", batch_norm(data, training=False), (data,))
    assert once is not None
    assert once.bytes == 2 * data.bytes


def test_copies_between_layouts_take_a_sector_for_an_element() -> None:
    nchw, nhwc = images(8, 64, 32, channels_last=False), images(8, 64, 32, channels_last=True)
    assert scattered(nhwc, nchw).sectors == nchw.elements
    # Blocks that write pixel by pixel read eight pixels of every channel, half a sector.
    assert scattered(nchw, nhwc).sectors == nchw.elements / 8
    assert is_channels_last(nhwc)
    assert not is_channels_last(nchw)
    assert is_contiguous(nhwc, channels_last=True)
    assert not is_contiguous(nhwc)
    device = load_device("rtx-3090")
    result = images(512, 64, 28, channels_last=False)
    sources = (images(512, 64, 28, channels_last=way) for way in (True, False))
    copies = [("aten::clone", Inputs((source, None)), (result,)) for source in sources]
    apart, alike = operator_prices(copies, device)
    assert apart.seconds > 2 * alike.seconds


def test_sectors_come_from_memory_again_where_l2_forgets_them() -> None:
    device = load_device("rtx-3090")
    seconds = []
    for side in (56, 576):
        sizes, pixels = (8, 8, side, side), side * side
        heads_last = RecordedTensor(sizes, HALF, (8 * pixels, 1, 8 * side, 8))
        heads_first = RecordedTensor(sizes, HALF, (8 * pixels, pixels, side, 1))
        assert scattered(heads_last, heads_first).between == pixels * (16 + 2)
        (price,) = operator_prices([("aten::clone", Inputs((heads_last, None)), (heads_first,))], device)
        seconds.append(price.seconds / pixels)
    # Eight heads of half a sector each, against one read and one write.
    assert seconds[1] > 3 * 4 * 64 / device.dram.bandwidth_bytes_per_second


def test_operators_copy_what_does_not_fill_its_memory() -> None:
    slice_of_channels = RecordedTensor((8, 32, 14, 14), HALF, (128 * 196, 196, 14, 1))
    weights = images(32, 32, 3, channels_last=False)
    whole = images(8, 32, 14, channels_last=False)
    sliced = work_of_call("aten::convolution", convolution(slice_of_channels, weights), (whole,))
    dense = work_of_call("aten::convolution", convolution(whole, weights), (whole,))
    assert sliced is not None
    assert dense is not None
    assert [part.moved is not None for part in sliced.parts] == [True, False]
    assert sliced.parts[1:] == dense.parts
    scores, inner = RecordedTensor((4, 8, 64), HALF, (512, 64, 1)), RecordedTensor((4, 8, 64), HALF, (512, 1, 8))
    for given, copies in ((scores, 0), (inner, 1)):
        softmax = work_of_call("aten::_softmax", Inputs((given, None, None), ("", "-1", "False")), (scores,))
        assert softmax is not None
        assert len(softmax.parts) == 1 + copies
