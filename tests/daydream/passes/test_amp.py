"""Mixed precision: what bounds a kernel, what stays, and the options."""

from __future__ import annotations

import pytest

from daydream.graph.graph import Dependency, Phase, TaskKind
from daydream.passes import registered
from daydream.passes.amp import amp
from hal.catalog import load_device
from hal.support.errors import InputError
from roller.library import library_time
from tests.daydream.graphs import STREAM, graph, launched, pairs, task
from tests.daydream.recorded import operator, recorded, recorded_trace

V100 = load_device("v100")
SQUARE = {"op": "matmul", "m": 2048, "n": 2048, "k": 2048}


def durations(outcome):
    return outcome.graph.duration_us[outcome.graph.select(gpu=True)].tolist()


def by_name(*names, **columns):
    tasks = [each for name in names for each in launched(name, 60, **columns)]
    return graph(tasks, pairs(len(names)))


def products():
    """A large product, one with a single row (memory-bound whatever its name), and relu."""
    return recorded(
        [
            operator("aten::mm", [[2048, 2048], [2048, 2048]], kernels=[("volta_sgemm", 60), ("splitKreduce", 6)]),
            operator("aten::mm", [[1, 2048], [2048, 2048]], kernels=[("volta_sgemm", 60)]),
            operator("aten::relu", [[2048, 2048]], kernels=[("elementwise", 60)]),
        ]
    )


def test_names_decide_where_no_sizes_are_known():
    outcome = amp(by_name("volta_sgemm_128x64", "vectorized_elementwise_kernel", "cudnn::bn_fw", "scudnn_winograd"))
    assert durations(outcome) == [20, 30, 30, 20]
    assert outcome.notes[:2] == (
        "2 compute-bound kernels of 0.1 ms take 0.0 ms, 3.00x (0 by their operators' sizes, 2 by name)",
        "2 memory-bound kernels of 0.1 ms take 0.1 ms, 2.00x (0 by their operators' sizes, 2 by name)",
    )


def test_sizes_decide_where_they_are_known():
    # 2 n^3 FLOP over 12 n^2 bytes: 341 FLOP a byte; with one row 0.5.
    assert durations(amp(products())) == [20, 3, 30, 30]


def test_what_cannot_gain_stays():
    names = ["hgemm_128x64", "volta_h884gemm_64x64", "elementwise<4, AddFunctor<c10::Half>>", "computeOffsetsKernel"]
    names += ["kernel<long>", "ncclDevKernel_AllReduce_Sum_f32"]
    assert durations(amp(by_name(*names))) == [60] * 6
    copies = graph([task("Memcpy HtoD", STREAM, 60, kind=TaskKind.MEMCPY), task("Memset", STREAM, 60, kind=3)])
    assert durations(amp(copies)) == [60, 60]
    whole_numbers = operator("aten::add_", [[1024]], ["long int"], kernels=[("vectorized_elementwise_kernel", 60)])
    halves = operator("aten::mm", [[64, 64], [64, 64]], ["c10::Half"] * 2, kernels=[("gemm", 60)])
    assert durations(amp(recorded([whole_numbers, halves]))) == [60, 60]


def test_what_autocast_keeps_in_float32_stays():
    sizes, kernel = [[1024, 1024]], [("elementwise", 60)]
    names = ["aten::_softmax", "aten::native_layer_norm_backward", "aten::nll_loss_forward", "aten::batch_norm"]
    some = recorded([operator(name, sizes, kernels=kernel) for name in [*names, "aten::gelu"]])
    # Batch norms have no rule in autocast's lists, and run in the type of their input.
    assert durations(amp(some)) == [60, 60, 60, 30, 30]
    assert durations(amp(some, single=False)) == [30] * 5
    note = "3 kernels of 0.2 ms stay in float32 as autocast has it: softmax, losses, norms"
    assert note in amp(some).notes
    assert durations(amp(by_name("softmax_warp_forward", "relu"))) == [60, 30]


def test_the_update_stays_in_float32_unless_asked():
    update = by_name("vectorized_elementwise_kernel", phase=Phase.UPDATE)
    assert durations(amp(update)) == [60]
    assert durations(amp(update, update=True)) == [30]


def test_factors_are_parameters():
    changed = amp(
        by_name("sgemm", "relu", "sm80_xmma_gemm_tf32f32"), compute_factor=6, memory_factor=1.5, tf32_factor=4
    )
    assert durations(changed) == [10, 40, 15]
    names = by_name("sgemm", "ncclKernel_AllReduce")
    assert durations(amp(names, communication_factor=2)) == [20, 30]


def test_without_tensor_cores_arithmetic_is_no_faster():
    outcome = amp(by_name("sgemm", "relu"), device="p100")
    assert durations(outcome) == [60, 30]
    assert any("has no Tensor Cores" in note for note in outcome.notes)
    assert durations(amp(by_name("sgemm", "relu"), device="v100")) == [20, 30]
    assert durations(amp(by_name("sgemm", "relu"), tensor_cores="no")) == [60, 30]
    assert durations(amp(by_name("sgemm", "relu"), device="p100", tensor_cores="yes")) == [20, 30]


def test_price_takes_rollers_ratio():
    single, half = (library_time(SQUARE | {"dtype": dtype}, V100).seconds for dtype in ("float32", "float16"))
    outcome = amp(products(), price=True)
    assert durations(outcome)[:2] == pytest.approx([60 * half / single, 6 * half / single])
    assert any("4 of 4 kernels take Roller's ratio" in note for note in outcome.notes)
    assert durations(amp(products(), price=True, tensor_cores="no"))[0] == 60


def test_casts_stand_before_forward_products():
    plain, cast = amp(products()).graph, amp(products(), casts=True).graph
    names = [cast.text(row) for row in cast.select(gpu=True)]
    assert names == ["cast weights to half", "volta_sgemm", "splitKreduce", *names[3:]]
    assert names.count("cast weights to half") == 2
    assert (cast.edge_kind == Dependency.LAUNCH).sum() == (plain.edge_kind == Dependency.LAUNCH).sum() + 2
    # 6 bytes for each of 2048^2 weights, and the start of the kernel.
    seconds = 6 * 2048**2 / V100.dram.bandwidth_bytes_per_second + V100.launch_overhead_seconds
    assert cast.duration_us[cast.select(name="cast weights")].tolist() == pytest.approx([seconds * 1e6] * 2)


def test_bad_parameters_are_one_line():
    with pytest.raises(InputError, match=r"compute-factor: 0\.0 is no speedup; give a positive number"):
        amp(by_name("sgemm"), compute_factor=0.0)
    with pytest.raises(InputError, match="memory-factor: nan is no speedup"):
        amp(by_name("sgemm"), memory_factor=float("nan"))
    with pytest.raises(InputError, match="tensor-cores: there is no 'maybe'; use auto, yes or no"):
        amp(by_name("sgemm"), tensor_cores="maybe")
    with pytest.raises(InputError, match="device: no device is called"):
        amp(by_name("sgemm"), device="v1000")
    with pytest.raises(InputError, match="device: the trace does not say"):
        amp(by_name("sgemm"), price=True)


def test_an_empty_graph_stays_empty():
    assert len(amp(graph([])).graph) == 0


def test_the_pass_is_registered():
    assert registered()["amp"].parameters[0].default == 3.0


def test_a_real_trace_gains_by_its_operators_sizes():
    from daydream.tasks.build import read_graph

    baseline = read_graph(recorded_trace("resnet50_v100_nw0"))
    outcome = amp(baseline)
    before, after = (each.duration_us[each.on_gpu].sum() for each in (baseline, outcome.graph))
    assert 1.8 < before / after < 3
    # Every convolution but the 64 to 64 one of 1x1 in the first block is bound by arithmetic.
    assert "936 compute-bound kernels" in outcome.notes[0]
    assert "936 by their operators' sizes" in outcome.notes[0]
