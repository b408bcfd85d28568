"""Captured operators: what they compute, what they move, what they take, and the arithmetic that PyTorch counts."""

from __future__ import annotations

import numpy as np
import pytest

from daydream.graph.graph import TaskKind
from daydream.operators.calls import operator_prices, work_of_call
from daydream.operators.inputs import Inputs, RecordedTensor, inputs_of
from daydream.operators.rules import RULES, describe
from daydream.operators.updates import launches_of
from daydream.tasks.build import read_graph
from daydream.trace.trace import NONE
from hal.catalog import load_device
from hal.support.errors import InputError
from roller.library import library_time
from tests.daydream.recorded import recorded_trace

V100, A100, H100 = (load_device(name) for name in ("v100", "a100", "h100"))


def tensor(*dims, dtype="float", strides=None):
    steps, step = [], 1
    for size in reversed(dims):
        steps.insert(0, step)
        step *= size
    return RecordedTensor(dims, dtype, tuple(steps) if strides is None else strides)


def call(name, *tensors, outputs=(), values=(), lists=()):
    return f"aten::{name}", Inputs(tuple(tensors), tuple(values), tuple(lists)), tuple(outputs)


def seconds(operator, device=V100):
    return operator_prices([operator], device)[0].seconds


# What moves


def test_views_allocations_and_nothing_take_no_time():
    calls = [
        call("view", tensor(4, 6), outputs=[tensor(24)]),
        call("empty", outputs=[tensor(4, 6)]),
        call("cat", lists=[(tensor(0, 6),)], outputs=[tensor(0, 6)]),
        call("transpose_", tensor(4, 6), outputs=[tensor(6, 4)]),
    ]
    assert [price.kernels for price in operator_prices(calls, V100)] == [()] * 4


def test_casts_count_the_bytes_of_both_types():
    work = work_of_call(*call("_to_copy", tensor(1000), outputs=[tensor(1000, dtype="c10::Half")]))
    assert work.bytes == 4 * 1000 + 2 * 1000
    (part,) = work.parts
    assert part.data["function"] == "neg" and part.moved.bytes == work.bytes


def test_what_is_written_over_is_not_read():
    target, source = tensor(1000), tensor(1000, dtype="c10::Half")
    assert work_of_call(*call("copy_", target, source, outputs=[target])).bytes == 4000 + 2000
    assert work_of_call(*call("fill_", target, outputs=[target])).bytes == 4000
    assert work_of_call(*call("add_", target, target, outputs=[target])).bytes == 3 * 4000


def test_masks_are_a_byte_per_element():
    x, mask = tensor(8, 1000), tensor(8, 1000, dtype="bool")
    forward = work_of_call(*call("native_dropout", x, outputs=[x, mask]))
    assert forward.bytes == (4 + 4 + 1) * 8000
    assert work_of_call(*call("native_dropout_backward", x, mask, outputs=[x])).bytes == (4 + 1 + 4) * 8000


def test_expanded_tensors_count_what_lies_in_memory():
    repeated = tensor(64, 1000, strides=(0, 1))
    work = work_of_call(*call("clone", repeated, outputs=[tensor(64, 1000)]))
    assert work.bytes == 4 * 1000 + 4 * 64_000


def test_plain_functions_cost_what_rollers_operators_cost():
    x = tensor(4096, 1024)
    expected = library_time({"op": "elementwise", "function": "add", "shape": [4096 * 1024], "dtype": "float32"}, V100)
    assert seconds(call("add", x, x, outputs=[x])) == pytest.approx(expected.seconds)
    cubed = call("pow", x, None, outputs=[x], values=["", "3.0"])
    assert work_of_call(*cubed).parts[0].data["function"] == "mul"


def test_a_mask_for_all_heads_is_read_again_where_the_cache_is_small():
    scores, mask = tensor(2, 32, 1024, 1024), tensor(2, 1, 1024, 1024)
    own = call("add", scores, scores, outputs=[scores])
    masked = call("add", scores, mask, outputs=[scores])
    assert seconds(masked) == pytest.approx(seconds(own), rel=0.01)
    # 12 MiB pass between two heads, a quarter of H100's cache.
    assert seconds(masked, H100) == pytest.approx(seconds(own, H100) * 2 / 3, rel=0.05)
    short = call("add", scores, tensor(2, 1, 1, 1024), outputs=[scores])
    assert seconds(short) == pytest.approx(seconds(own) * 2 / 3, rel=0.01)


def test_copies_into_another_order_are_transpositions():
    turned = tensor(8, 16, 512, 64, strides=(512 * 16 * 64, 64, 16 * 64, 1))
    work = work_of_call(*call("clone", turned, outputs=[tensor(8, 16, 512, 64)]))
    assert work.parts[0].data == {
        "op": "transpose",
        "shape": [8, 512, 16, 64],
        "perm": [0, 2, 1, 3],
        "dtype": "float32",
    }
    part_of_a_row = tensor(8, 512, 64, strides=(512 * 192, 192, 1))
    work = work_of_call(*call("clone", part_of_a_row, outputs=[tensor(8, 512, 64)]))
    assert work.parts[0].data["op"] == "elementwise"
    assert work.parts[0].moved.kernel == "elementwise_kernel"


def test_gathers_read_what_they_write():
    table, places, rows = tensor(50_000, 64), tensor(8, 16, dtype="long int"), tensor(8, 16, 64)
    work = work_of_call(*call("embedding", table, places, outputs=[rows]))
    assert work.bytes == 2 * 4 * 8 * 16 * 64 + 8 * 128
    back = work_of_call(*call("embedding_dense_backward", rows, places, outputs=[table]))
    zeros, sums = (part.moved for part in back.parts)
    assert zeros.bytes == 4 * 50_000 * 64
    assert sums.bytes == 4 * 128 * 64 * (1 + 2) + 8 * 128


def test_norms_softmax_and_reductions():
    x, half = tensor(4, 16, 512, 512), tensor(4, 16, 512, 512, dtype="c10::Half")
    plain = work_of_call(*call("_softmax", x, None, None, outputs=[x], values=["", "-1", "False"]))
    assert plain.parts[0].data == {"op": "softmax", "shape": [4 * 16 * 512, 512], "dtype": "float32"}
    cast = work_of_call(*call("_softmax", half, None, None, outputs=[x], values=["", "-1", "True"]))
    assert cast.bytes == 6 * 4 * 16 * 512 * 512
    logits = tensor(1024, 50257)
    back = work_of_call(
        *call("_log_softmax_backward_data", logits, logits, None, outputs=[logits], values=["", "", "1"])
    )
    # Long rows are read once more for their sum.
    assert (back.bytes, back.parts[0].moved.again) == (3 * logits.bytes, logits.bytes)
    channels = tensor(8, 64, 28, 28)
    small = [tensor(64), tensor(64)]
    values = ["", "", "", "8", "64", "784", "32", "1e-5"]
    group = work_of_call(*call("native_group_norm", channels, *small, outputs=[channels], values=values))
    assert group.bytes == 3 * channels.bytes
    total = work_of_call(*call("sum", channels, None, outputs=[tensor(64)], values=["", "[0, 2, 3]"]))
    assert total.parts[0].data["axes"] == [0, 2, 3]
    largest = work_of_call(*call("amax", channels, None, outputs=[tensor(64)], values=["", "[0, 2, 3]"]))
    assert largest.parts[0].moved.bytes == channels.bytes + 4 * 64


def test_pooling_writes_the_places_of_maxima():
    x, y = tensor(8, 64, 112, 112), tensor(8, 64, 56, 56)
    places = tensor(8, 64, 56, 56, dtype="long int")
    values = ["", "[3, 3]", "[2, 2]", "[1, 1]", "[1, 1]", "False"]
    work = work_of_call(*call("max_pool2d_with_indices", x, outputs=[y, places], values=values))
    assert work.parts[0].data["op"] == "max_pool2d"
    assert work.bytes == x.bytes + y.bytes + places.bytes


def test_updates_move_all_lists_in_launches_of_many_tensors():
    parameters = tuple(tensor(1000) for _ in range(150))
    (work,) = [work_of_call(*call("_foreach_add_", lists=[parameters, parameters]))]
    assert work.bytes == 3 * 150 * 4000
    # 64 tensors of two lists a launch
    assert work.parts[0].moved.launches == 3
    assert len(operator_prices([call("_foreach_add_", lists=[parameters, parameters])], V100)[0].kernels) == 3
    steps = tuple(tensor() for _ in parameters)
    fused = work_of_call(*call("_fused_adamw_", lists=[parameters] * 4 + [(), steps]))
    # parameters, gradients and both moments are read, all but the gradients written
    assert fused.bytes == 7 * 150 * 4000 + 150 * 4
    assert launches_of([2**24] * 3, lists=1) == 3


def test_recurrent_layers_are_products_step_after_step():
    x = tensor(20, 8, 32)
    values = [""] * 6 + ["2", "64", "0", "1", "False", "0.0", "True", "False"]
    work = work_of_call("aten::_cudnn_rnn", Inputs((x, *[None] * 13), tuple(values)), (tensor(20, 8, 64),))
    # four gates of 64: of the inputs of all steps at once, and of the state at each step
    assert work.flops == 2 * 20 * 8 * 256 * 32 + 2 * 20 * 8 * 256 * 64
    assert [part.times for part in work.parts] == [1, 20, 1]


def test_experts_share_the_tokens():
    left, right = tensor(512, 64, dtype="c10::BFloat16"), tensor(8, 64, 128, dtype="c10::BFloat16")
    work = work_of_call(*call("_grouped_mm", left, right, tensor(8, dtype="int"), outputs=[tensor(512, 128)]))
    assert work.parts[0].data == {"op": "batch_matmul", "b": 8, "m": 64, "n": 128, "k": 64, "dtype": "bfloat16"}
    assert work.flops == 2 * 512 * 64 * 128 and work.assumed


def test_experts_are_one_kernel_where_pytorch_has_it():
    left, right = tensor(4096, 2048, dtype="c10::BFloat16"), tensor(64, 2048, 1024, dtype="c10::BFloat16")
    operator = call("_grouped_mm", left, right, tensor(64, dtype="int"), outputs=[tensor(4096, 1024)])
    (hopper,), (older,) = (operator_prices([operator], load_device(name)) for name in ("h100", "a100"))
    assert len(hopper.kernels) == 1
    assert hopper.seconds > 64 * 2048 * 1024 * 2 / 3.35e12, "the weights of all experts are read"
    assert len(older.kernels) == 64


def test_what_no_rule_knows_costs_its_bytes_and_says_so():
    x = tensor(1024, 1024)
    operator = call("_some_new_operator", x, outputs=[x])
    assert describe(*operator) == "no rule for aten::_some_new_operator"
    (price,) = operator_prices([operator], V100)
    assert [kernel.model for kernel in price.kernels] == ["bytes"]
    copy = seconds(call("clone", x, outputs=[x]))
    assert price.seconds == pytest.approx(copy, rel=0.02)
    assert "no rule" in price.work.assumed


def test_fused_kernels_move_what_goes_in_and_out():
    x = tensor(512, 512)
    (price,) = operator_prices([("inductor::fused_gelu_add", Inputs((x, x)), (x,))], V100)
    assert price.work.bytes == 3 * x.bytes and price.kernels[0].name == "fused_gelu_add"


# Attention


def attention(name, dtype, causal="False"):
    sides = [tensor(2, 8, 512, 64, dtype=dtype)] * 3
    at = {"flash": 4, "efficient": 6}[name]
    values = [""] * at + [causal]
    return call(f"_scaled_dot_product_{name}_attention", *sides, *[None] * (at - 2), outputs=sides[:1], values=values)


def test_attention_without_flash_kernels_is_memory_efficient():
    for device, dtype in ((V100, "c10::Half"), (A100, "float")):
        (price,) = operator_prices([attention("efficient", dtype)], device)
        assert [(kernel.name, kernel.model) for kernel in price.kernels] == [("fmha_cutlassF", "attention")]
    (asked,) = operator_prices([attention("flash", "c10::Half")], V100)
    assert asked.kernels[0].name == "fmha_cutlassF"
    (slow,) = operator_prices([attention("efficient", "float")], A100)
    (fast,) = operator_prices([attention("flash", "c10::Half")], A100)
    assert slow.flops == fast.flops and slow.seconds > 3 * fast.seconds


def test_masks_do_not_change_the_flops_that_are_counted():
    (full,) = operator_prices([attention("flash", "c10::Half")], A100)
    (causal,) = operator_prices([attention("flash", "c10::Half", "True")], A100)
    assert full.flops == causal.flops == 4 * 2 * 8 * 512 * 512 * 64
    assert causal.work.flops < 0.51 * full.work.flops


# Prices


def test_prices_come_in_order_and_equal_operators_share_theirs():
    small, large = (call("relu", tensor(size), outputs=[tensor(size)]) for size in (1000, 10**7))
    first, second, third = operator_prices([small, large, small], V100)
    assert first is third and first.seconds < second.seconds
    with pytest.raises(InputError):
        operator_prices([small], V100, "fastest")


def test_the_best_kernels_are_ours_where_there_are_some():
    product = call("mm", tensor(512, 256), tensor(256, 128), outputs=[tensor(512, 128)])
    sort = call("sort", tensor(512, 128), outputs=[tensor(512, 128), tensor(512, 128, dtype="long int")])
    ours = operator_prices([product, sort], V100, "best")
    library = operator_prices([product, sort], V100)
    assert ours[0].kernels != library[0].kernels and ours[0].kernels[0].model == "products"
    assert ours[1] == library[1]


def test_no_operator_has_two_rules():
    from daydream.operators import movement, pointwise, rowwise

    families = [pointwise.POINTWISE, pointwise.FILLS, rowwise.SOFTMAX, rowwise.LAYER_NORMS, rowwise.BATCH_NORMS]
    families += [rowwise.REDUCTIONS, movement.MOVES, movement.GATHERS, movement.SCATTERS]
    families += [movement.SCATTERED_GRADIENTS, movement.POOLS, movement.ADAPTIVE_POOLS, movement.SORTS]
    stems = [stem for family in families for stem in family]
    assert len(stems) == len(set(stems)) and set(stems) <= set(RULES)


# A recorded step


def test_streaming_kernels_of_a_recorded_step_take_what_is_predicted():
    graph = read_graph(recorded_trace("resnet50_v100_nw0"))
    kernels = np.flatnonzero((graph.kind == TaskKind.KERNEL) & graph.on_gpu & (graph.operator != NONE))
    for name in ("aten::threshold_backward", "aten::clamp_min", "aten::add", "aten::max_pool2d_with_indices"):
        rows = [row for row in kernels.tolist() if graph.trace.text(int(graph.operator[row])) == name]
        operators = []
        for row in rows:
            each = inputs_of(graph.trace, int(graph.operator[row]))
            assert each is not None and each.tensors[0] is not None
            dims = each.tensors[0].dims
            if "pool" in name:
                # A window of 3 by 3 in steps of 2.
                dims = (*dims[:2], dims[2] // 2, dims[3] // 2)
                each = Inputs(each.tensors, ("", "[3, 3]", "[2, 2]", "[1, 1]"))
            results = (tensor(*dims), tensor(*dims, dtype="long int")) if "pool" in name else (tensor(*dims),)
            operators.append((name, each, results))
        predicted = sum(price.seconds for price in operator_prices(operators, V100))
        assert predicted * 1e6 == pytest.approx(float(graph.duration_us[rows].sum()), rel=0.12), name
