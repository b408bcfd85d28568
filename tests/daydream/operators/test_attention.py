"""Recorded attention as Roller's operator: layouts, masks, packed sequences, and its price."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from daydream.operators.attention import describe_attention, is_attention
from daydream.operators.inputs import Inputs, inputs_of
from daydream.operators.pricing import bound_of, heavy_rows, price
from hal.catalog import load_device
from roller.library import library_calls
from roller.library.calls import PYTORCH_FLASH
from roller.library.calls import price as price_calls
from tests.daydream.recorded import operator, recorded, trace

BF16 = "c10::BFloat16"
H100 = load_device("h100")
#: Queries, keys and values of 2 sequences: 8 heads that share 4 of keys, 512 queries, 1024 keys.
HEADS_FIRST = [[2, 8, 512, 64], [2, 4, 1024, 64], [2, 4, 1024, 64]]
LENGTH_FIRST = [[2, 512, 8, 64], [2, 1024, 4, 64], [2, 1024, 4, 64]]
DATA = {
    "op": "attention", "page": 0, "b": 2, "heads": 8, "kv_heads": 4, "queries": 512, "keys": 1024, "head_dim": 64,
    "value_dim": 64, "dtype": "bfloat16",
}  # fmt: skip


def arguments(name, dims, values=None, dtype=BF16):
    types = [dtype if each else "" for each in dims]
    concrete = {} if values is None else {"Concrete Inputs": values}
    return {"name": f"aten::{name}", "dims": dims, "types": types, **concrete}


def work(name, dims, values=None, dtype=BF16):
    given = arguments(name, dims, values, dtype)
    inputs = inputs_of(trace([operator(given.pop("name"), given.pop("dims"), given.pop("types"), **given)]), 0)
    assert isinstance(inputs, Inputs)
    return describe_attention(f"aten::{name}", inputs)


@pytest.mark.parametrize(
    ("name", "dims", "at", "value"),
    [
        ("_scaled_dot_product_flash_attention", HEADS_FIRST, 4, "True"),
        ("_flash_attention_forward", LENGTH_FIRST, 8, "True"),
        ("_scaled_dot_product_efficient_attention", HEADS_FIRST, 6, "True"),
        ("_efficient_attention_forward", LENGTH_FIRST, 9, "2"),
        ("_scaled_dot_product_cudnn_attention", HEADS_FIRST, 6, "True"),
        ("_cudnn_attention_forward", HEADS_FIRST, 10, "True"),
    ],
)
def test_every_library_computes_the_same(name, dims, at, value):
    values = [""] * at + [value]
    found = work(name, dims + [[]] * (at - 2), values)
    assert found.parts[0].data == DATA | {"causal": True}
    assert (found.direction, found.assumed) == ("forward", "")
    # Query i sees 513 + i keys; products of queries and keys, and of weights and values, two operations each.
    assert found.flops == 2 * 8 * sum(513 + i for i in range(512)) * 2 * (64 + 64)
    assert found.bytes == 2 * 2 * (8 * 512 + 4 * 1024) * (64 + 64)
    open_ = work(name, dims + [[]] * (at - 2), [""] * at + ["0" if value == "2" else "False"])
    assert open_.parts[0].data == DATA | {"causal": False}
    assert open_.flops == 2 * 8 * 512 * 1024 * 2 * (64 + 64)


@pytest.mark.parametrize(
    ("name", "dims", "at"),
    [
        ("_scaled_dot_product_flash_attention_backward", HEADS_FIRST, 11),
        ("_flash_attention_backward", LENGTH_FIRST, 11),
        ("_scaled_dot_product_efficient_attention_backward", HEADS_FIRST, 11),
        ("_efficient_attention_backward", LENGTH_FIRST, 15),
        ("_scaled_dot_product_cudnn_attention_backward", HEADS_FIRST, 14),
        ("_cudnn_attention_backward", HEADS_FIRST, 14),
    ],
)
def test_the_way_back_has_the_incoming_gradient_first(name, dims, at):
    found = work(name, [dims[0], *dims, *[[]] * (at - 3)], [""] * at + ["True"])
    assert (found.parts[0].data, found.direction) == (DATA | {"causal": True}, "backward")
    forward = work("_scaled_dot_product_flash_attention", HEADS_FIRST, [""] * 4 + ["True"])
    assert found.flops == 2.5 * forward.flops


def test_windows_and_packed_sequences():
    values = [""] * 8 + ["True", "False", "", "127", "0"]
    packed = [[4096, 8, 64], [4096, 8, 64], [4096, 8, 64], [5], [5], *[[]] * 8]
    found = work("_flash_attention_forward", packed, values)
    assert found.parts[0].data == DATA | {
        "b": 4, "queries": 1024, "keys": 1024, "kv_heads": 8, "causal": True, "window": 128,
    }  # fmt: skip
    assert found.assumed == "sequences of attention taken to be equally long"
    # The first 127 queries see fewer keys than the window has.
    assert found.flops == 4 * 8 * (1024 * 128 - 127 * 128 // 2) * 2 * 128


def test_a_mask_that_is_not_recorded_is_guessed_aloud():
    found = work("_scaled_dot_product_flash_attention", HEADS_FIRST)
    assert found.parts[0].data["causal"] is False
    assert found.assumed == "whether attention has a mask is not recorded, taken for none"


def test_what_makes_no_attention_says_why():
    name = "_scaled_dot_product_flash_attention"
    assert work(name, [[2, 8, 512, 64], [], []]) == "sizes of its operands not recorded"
    assert work(name, [[2, 0, 512, 64]] * 3) == "an empty tensor"
    assert work(name, HEADS_FIRST, dtype="long") == "elements of type long"
    assert work(name, [[2, 8, 512, 64], *[[2, 3, 512, 64]] * 2]) == (
        "queries of [2, 8, 512, 64] and keys of [2, 3, 512, 64] do not make attention"
    )
    fewer = work(name, [[2, 8, 512, 64], *[[2, 8, 256, 64]] * 2], [""] * 4 + ["True"])
    assert fewer == "fewer keys than queries under a causal mask"
    assert is_attention(f"aten::{name}") and not is_attention("aten::_softmax")


def launched(dtype=BF16, heads_first=HEADS_FIRST):
    given = arguments("_scaled_dot_product_flash_attention", heads_first, [""] * 4 + ["True"], dtype)
    names = {"kernels": [("flash_fwd_kernel", 9.0)], "Concrete Inputs": given["Concrete Inputs"]}
    product = operator("aten::mm", [[64, 64], [64, 64]], [dtype, dtype], kernels=[("sgemm", 3.0)])
    return recorded([operator(given["name"], given["dims"], given["types"], **names), product])


def test_the_price_is_that_of_the_library_or_of_ours():
    graph = launched()
    rows = heavy_rows(graph)
    (attention, product) = price(graph, rows, H100, "library").calls
    # PyTorch has FlashAttention 2 on Hopper, too, where newer kernels are faster.
    (call,) = library_calls(DATA | {"causal": True})
    (newer, expected) = price_calls([call, replace(call, variant=PYTORCH_FLASH)], H100)
    assert newer.seconds < expected.seconds
    assert attention.price_us == pytest.approx(expected.seconds * 1e6)
    assert attention.kernel == expected.kernel
    assert attention.text == "attention_2x8x512x1024x64_kv4_causal_page0_bfloat16"
    assert np.isfinite(product.price_us)
    assert attention.work is not None and bound_of(attention.work, H100) == attention.bound
    (ours, _) = price(graph, rows, H100).calls
    assert 0.4 < ours.price_us / attention.price_us < 2 and ours.kernel == "construction, bound by latency"


def test_boards_and_types_without_it_say_so_and_price_the_rest():
    for graph, device, reason in (
        (launched(), load_device("v100"), "v100-sxm2-16gb has no FlashAttention"),
        (launched("float"), H100, "FlashAttention has no kernel for float32"),
    ):
        (attention, product) = price(graph, heavy_rows(graph), device, "library").calls
        assert np.isnan(attention.price_us) and reason in attention.reason
        assert np.isfinite(product.price_us)
