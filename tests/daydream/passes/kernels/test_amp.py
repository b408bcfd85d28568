"""Mixed precision: what bounds a kernel, what stays, and the options."""

from __future__ import annotations

import pytest

from daydream.graph.graph import Dependency, Phase, TaskKind
from daydream.passes import registered
from hal.catalog import load_device
from hal.support.errors import InputError
from roller.library import library_time
from tests.daydream.graphs import STREAM, graph, launched, pairs, task
from tests.daydream.recorded import operator, recorded, recorded_trace

amp = registered()["amp"]

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
    assert durations(amp(products(), price=False, casts=False)) == [20, 3, 30, 30]


def test_a_reduction_of_few_blocks_saves_its_bytes_alone():
    # 8 MB take 10 µs: of 60 µs the most is no traffic.
    some = recorded([operator("aten::sum", [[2048, 1024], [0], [], []], ["float", "", "", ""], kernels=[("r", 60)])])
    saved = 0.5 * 4 * (2048 + 1) * 1024 / V100.dram.bandwidth_bytes_per_second * 1e6
    assert durations(amp(some, single=False)) == pytest.approx([60 - saved], rel=0.02)


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


def test_products_take_rollers_ratio_unless_a_factor_is_given():
    single, half = (library_time(SQUARE | {"dtype": dtype}, V100).seconds for dtype in ("float32", "float16"))
    changed = durations(amp(products(), casts=False))
    # The product with one row is bound by memory, and so is relu.
    assert changed == pytest.approx([60 * half / single, 3, 30, 30])
    assert durations(amp(products(), casts=False, compute_factor=6)) == [10, 3, 30, 30]


def test_a_board_at_its_power_limit_is_compared_with_itself():
    t4 = load_device("t4")
    single, half = (library_time(SQUARE | {"dtype": dtype}, t4).seconds * 1e6 for dtype in ("float32", "float16"))
    dims = [[2048, 2048], [2048, 2048]]

    def after(recorded_us: float) -> float:
        some = recorded([operator("aten::mm", dims, kernels=[("volta_sgemm", recorded_us)])])
        return durations(amp(some, device="t4", casts=False))[0]

    # As fast as at full clock, a little slower than that, and slower than the limit leaves.
    assert after(0.9 * single) == pytest.approx(0.9 * half)
    assert after(1.05 * single) == pytest.approx(half)
    assert half < after(3 * single) < 3 * half


def test_price_takes_rollers_ratio():
    single, half = (library_time(SQUARE | {"dtype": dtype}, V100).seconds for dtype in ("float32", "float16"))
    outcome = amp(products(), price="yes", casts=False)
    assert durations(outcome)[:2] == pytest.approx([60 * half / single, 6 * half / single])
    assert any("4 of 4 kernels take Roller's ratio" in note for note in outcome.notes)
    assert durations(amp(products(), price="yes", tensor_cores="no", casts=False))[0] == 60


def test_casts_stand_before_forward_products():
    plain, cast = amp(products(), casts=False).graph, amp(products()).graph
    names = [cast.text(row) for row in cast.select(gpu=True)]
    # The batch comes in float32; what products make is in half precision.
    assert names[:4] == ["cast weights to half", "cast input to half", "volta_sgemm", "splitKreduce"]
    assert names.count("cast weights to half") == 2 and names.count("cast input to half") == 1
    assert (cast.edge_kind == Dependency.LAUNCH).sum() == (plain.edge_kind == Dependency.LAUNCH).sum() + 3
    # 6 bytes for each of 2048^2 weights, and the start of the kernel.
    seconds = 6 * 2048**2 / V100.dram.bandwidth_bytes_per_second + V100.launch_overhead_seconds
    assert cast.duration_us[cast.select(name="cast weights")].tolist() == pytest.approx([seconds * 1e6] * 2)


@pytest.mark.parametrize(
    "name",
    [
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_MT256x192x64",
        "Cijk_Ailk_Bljk_HHS_BH_MT128x128x64",
        "Cijk_Ailk_Bljk_B_BS_BH_Bias_HA_S_SAV",
        "Cijk_Ailk_Bjlk_HB_MT64x64x16",
        "nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT",
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN",
        "nvjet_sm100_qqtst_128x256_128x6",
        "_ZN2ck27kernel_gemm_xdl_cshuffle_v1INS_13GridwiseGemmIDF16_DF16_",
        "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex0",
        "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_tn",
    ],
)
def test_kernels_in_16_bits_stay(name):
    assert durations(amp(by_name(name))) == [60]


@pytest.mark.parametrize("name", ["Cijk_Ailk_Bljk_SB_MT128x64x8", "Cijk_Alik_Bljk_S_B_Bias_HA", "nvjet_sss_128x64"])
def test_kernels_in_32_bits_gain(name):
    assert durations(amp(by_name(name))) == [20]


@pytest.mark.parametrize("device", ["auto", "v100"])
def test_types_of_operators_tell_what_names_do_not(device):
    half, single = ["c10::BFloat16"] * 3, ["float"] * 3
    dims = [[8, 16, 512, 64]] * 3
    calls = [
        operator("aten::_flash_attention_forward", dims, half, kernels=[("attn_fwd", 60)]),
        operator("triton_poi_fused_add_0", [[1024, 1024]] * 2, half[:2], kernels=[("triton_poi_fused_add_0", 60)]),
        operator("aten::mm", [[2048, 2048]] * 2, single[:2], kernels=[("sgemm", 600)]),
    ]
    changed = durations(amp(recorded(calls), device=device, casts=False))
    assert changed[:2] == [60, 60] and changed[2] < 300


def test_a_step_in_mixed_precision_stays_as_it_is():
    some = by_name("Cijk_Alik_Bljk_BBS_BH_MT256x192x64", "triton_red_fused_mul_0", "vectorized_elementwise_kernel")
    outcome = amp(some)
    assert outcome.graph is some
    assert outcome.notes[0].startswith("the products of the step compute in 16 bits already")


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
        amp(by_name("sgemm"), price="yes")
    with pytest.raises(InputError, match="price: there is no 'maybe'; use auto, yes or no"):
        amp(by_name("sgemm"), price="maybe")


def test_an_empty_graph_stays_empty():
    assert len(amp(graph([])).graph) == 0


def test_the_pass_is_registered():
    assert registered()["amp"].parameters[0].default == 3.0


@pytest.mark.slow
def test_a_real_trace_gains_by_its_operators_sizes():
    from daydream.tasks.build import read_graph

    baseline = read_graph(recorded_trace("resnet50_v100_nw0"))
    outcome = amp(baseline)
    before, after = (each.duration_us[each.on_gpu].sum() for each in (baseline, outcome.graph))
    assert 1.8 < before / after < 3
    # Every convolution but the 64 to 64 one of 1x1 in the first block is bound by arithmetic.
    assert "936 compute-bound kernels" in outcome.notes[0]
    assert "936 by their operators' sizes" in outcome.notes[0]
