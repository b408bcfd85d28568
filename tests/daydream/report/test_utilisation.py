"""TBD's figures on graphs worked out in comments, and on recorded traces against their raw events."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from daydream.answers import replay
from daydream.graph.graph import Dependency, Mark, TaskGraph, TaskKind, ThreadKind, TrainingStep
from daydream.graph.simulate import simulate
from daydream.operators.work import Work
from daydream.report.arithmetic import Rate, arithmetic_of, kernels_of, peak_of
from daydream.report.utilisation import Utilisation, utilisation
from hal.catalog import load_device
from hal.support.errors import InputError
from tests.daydream.graphs import AUTOGRAD, MAIN, STREAM, STREAM2, Thread, graph, launched, pairs, task
from tests.daydream.recorded import V100, enclosing, operator, recorded, recorded_trace, trace

#: float32 and float16 Tensor Cores of the V100 of the tests, FLOP/s.
FLOAT32, FLOAT16 = 15.667e12, 125e12

#: 2 x 1000^3 = 2e9 FLOPs, and one per element of a matrix.
PRODUCT = operator("aten::mm", [[1000, 1000], [1000, 1000]], kernels=[("volta_sgemm_128x64_nn", 200.0)])
ACTIVATION = operator("aten::relu", [[1000, 1000]], kernels=[("elementwise_kernel", 100.0)])


def stepped(*steps: Sequence[tuple[int, float]], operators: Sequence[dict[str, Any]], **fields: Any) -> TaskGraph:
    """Steps of launches, 1 µs each, of kernels (operator, µs) on one stream, with a wait of 1 µs at their ends."""
    tasks: list[dict[str, Any]] = []
    edges: list[tuple[int, int, Dependency]] = []
    for number, kernels in enumerate(steps):
        tasks.append(task("step begins", MAIN, 0, mark=Mark.STEP_BEGIN, step=number))
        for row, duration in kernels:
            edges.append((len(tasks), len(tasks) + 1, Dependency.LAUNCH))
            name = operators[row]["kernels"][0][0]
            tasks += launched(name, duration, operator=row, step=number, layer=f"layer {row}")
        edges.append((len(tasks) - 1, len(tasks), Dependency.SYNC))
        tasks.append(task("cudaDeviceSynchronize", MAIN, 1, step=number))
        tasks.append(task("step ends", MAIN, 0, mark=Mark.STEP_END, step=number))
    names = tuple(TrainingStep(f"ProfilerStep#{number}", 1.0) for number in range(len(steps)))
    given = {"trace": trace(operators), "enclosing": enclosing(operators), "steps": names, **fields}
    return graph(tasks, edges, **given)


def figures_of(some: TaskGraph, **options: Any) -> Utilisation:
    return utilisation(simulate(some), range(len(some.steps)), **options)


# By hand


def test_every_figure_of_one_step() -> None:
    # Launches 0-1 and 1-2, the product's kernel 1-201, the activation's 201-301, the wait 301-302.
    figures = figures_of(stepped([(0, 200), (1, 100)], operators=[PRODUCT, ACTIVATION]), batch=8)
    (step,) = figures.steps
    assert step.length_us == pytest.approx(302)
    assert figures.samples_per_second(step.length_us) == pytest.approx(8 / 302e-6)
    # (3.1): a kernel runs for 300 of 302. The one CPU thread works for three.
    assert step.gpu == pytest.approx(300 / 302)
    assert (step.cpu, figures.cores, figures.cores_recorded) == (pytest.approx(3 / 302), 1, False)
    # (3.2) counts all FLOPs while the GPU is active, the model's FLOPs are those of the product over the whole step.
    assert (step.flops, step.model_flops) == (pytest.approx(2.001e9), pytest.approx(2e9))
    assert step.of_peak == pytest.approx(2.001e9 / (FLOAT32 * 300e-6))
    assert step.model_of_peak == pytest.approx(2e9 / (FLOAT32 * 302e-6))
    assert [(each.rate, each.share) for each in figures.peaks] == [(Rate("float32", FLOAT32), 1.0)]
    assert figures.known == 1
    # The product reaches 2e9 / (peak x 200 us) = 63.8 %, the activation 0.06 %, the average is 42.6 %.
    assert [kernel.name for kernel in figures.kernels] == ["volta_sgemm_128x64_nn", "elementwise_kernel"]
    assert figures.kernels[0].of_peak == pytest.approx(2e9 / (FLOAT32 * 200e-6))
    (slow,) = figures.slow_kernels
    assert (slow.name, slow.count, slow.total_us) == ("elementwise_kernel", 1, 100)
    assert slow.share == pytest.approx(1 / 3)
    assert slow.of_peak == pytest.approx(1e6 / (FLOAT32 * 100e-6))
    assert [(layer.name, layer.of_peak) for layer in figures.layers] == [
        ("layer 0", figures.kernels[0].of_peak), ("layer 1", slow.of_peak),
    ]  # fmt: skip


def test_kernels_achieve_flops_and_bytes_a_second_by_name_and_by_kind() -> None:
    # The product reads and writes 12 MB, the activation 8 MB; the third kernel is of no known kind.
    strange = operator("mine::op", [[4, 4]], kernels=[("my_kernel", 100.0)])
    figures = figures_of(stepped([(0, 200), (1, 100), (2, 100)], operators=[PRODUCT, ACTIVATION, strange]))
    assert [kind.name for kind in figures.kinds] == ["matrix product", "unknown", "element-wise"]
    product, unknown, activation = figures.kinds
    assert product.flops_per_second == pytest.approx(2e9 / 200e-6)
    assert product.bytes_per_second == pytest.approx(12e6 / 200e-6)
    assert activation.bytes_per_second == pytest.approx(8e6 / 100e-6)
    assert math.isnan(unknown.flops_per_second) and math.isnan(unknown.bytes_per_second)
    assert (figures.unknown, unknown.share) == (pytest.approx(0.25), pytest.approx(0.25))
    assert figures.bandwidth == load_device("v100").dram.bandwidth_bytes_per_second
    assert {kernel.name: kernel.kind for kernel in figures.kernels} == {
        "volta_sgemm_128x64_nn": "matrix product", "elementwise_kernel": "element-wise", "my_kernel": "unknown",
    }  # fmt: skip
    record = figures.record()
    assert record["kinds"][0]["bytes_per_second"] == pytest.approx(6e10)
    assert record["unknown_share_of_gpu_time"] == pytest.approx(0.25)


def test_the_mean_is_of_the_time_of_all_steps() -> None:
    # Steps of 202 and 402 µs, each with the same product in 200 and 400: variation sqrt(2) x 100 / 302.
    figures = figures_of(stepped([(0, 200)], [(1, 400)], operators=[PRODUCT, PRODUCT]), batch=4)
    assert [step.length_us for step in figures.steps] == pytest.approx([202, 402])
    assert figures.variation == pytest.approx(math.sqrt(2) * 100 / 302)
    assert figures.spread == pytest.approx(402 / 202)
    assert figures.mean.gpu == pytest.approx(600 / 604)
    assert figures.mean.model_of_peak == pytest.approx(4e9 / (FLOAT32 * 604e-6))
    assert figures.mean.of_peak == pytest.approx(4e9 / (FLOAT32 * 600e-6))
    assert figures.samples_per_second(figures.mean.length_us) == pytest.approx(8 / 604e-6)
    assert not figures.ran_ahead


def test_work_counts_for_the_time_in_which_it_runs() -> None:
    # Step 0 launches at 0-1 and ends at 4; its kernel runs 1-201, 3 of 200 within it. Step 1 waits until 205.
    tasks = [
        task("step begins", MAIN, 0, mark=Mark.STEP_BEGIN),
        *launched("volta_sgemm_128x64_nn", 200, operator=0),
        task("aten::x", MAIN, 3),
        task("step ends", MAIN, 0, mark=Mark.STEP_END),
        task("step begins", MAIN, 0, mark=Mark.STEP_BEGIN, step=1),
        task("cudaDeviceSynchronize", MAIN, 4, step=1),
        task("step ends", MAIN, 0, mark=Mark.STEP_END, step=1),
    ]
    edges = [(1, 2, Dependency.LAUNCH), (2, 6, Dependency.SYNC)]
    some = graph(tasks, edges, trace=trace([PRODUCT]), enclosing=enclosing([PRODUCT]))
    first, second = figures_of(some).steps
    assert (first.gpu, second.gpu) == (pytest.approx(3 / 4), pytest.approx(197 / 201))
    assert first.model_of_peak == pytest.approx(2e9 * 3 / 200 / (FLOAT32 * 4e-6))
    assert second.model_of_peak == pytest.approx(2e9 * 197 / 200 / (FLOAT32 * 201e-6))
    assert first.of_peak == second.of_peak == pytest.approx(2e9 / (FLOAT32 * 200e-6))
    # FLOPs belong to the step that launched them.
    assert (first.flops, second.flops) == (pytest.approx(2e9), 0)


def test_copies_do_not_keep_the_gpu_busy_and_kernels_side_by_side_count_once() -> None:
    # Launches by 1, 2 and 3: kernel a 1-11, b 2-7 beside it, copy 11-31; waited for until 32.
    tasks = [*launched("a", 10), *launched("b", 5, stream=STREAM2), *launched("copy", 20, kind=TaskKind.MEMCPY)]
    tasks.append(task("cudaDeviceSynchronize", MAIN, 1))
    figures = figures_of(graph(tasks, [*pairs(3), (5, 6, Dependency.SYNC)]))
    assert figures.mean.length_us == 32
    assert figures.mean.gpu == 10 / 32


def test_several_gpus_share_their_utilisation() -> None:
    # Kernels of 10 and 4 on two GPUs from 1 and 2 on, the step ends at 12: (10 + 4) / 2 of 12.
    other = Thread(kind=ThreadKind.STREAM, label="stream 7 of GPU 1", number=7, device=1)
    tasks = [*launched("a", 10), *launched("b", 4, stream=other), task("cudaDeviceSynchronize", MAIN, 1)]
    figures = figures_of(graph(tasks, [*pairs(2), (1, 4, Dependency.SYNC)]))
    assert figures.mean.gpu == pytest.approx(7 / 12)


def test_cores_are_those_that_the_trace_tells() -> None:
    # Two threads work for 6 and 2 of 6 µs: half and a sixth.
    tasks = [task("aten::x", MAIN, 2, gap_us=3), task("aten::y", MAIN, 1), task("aten::z", AUTOGRAD, 2)]
    seen = figures_of(graph(tasks))
    assert (seen.mean.cpu, seen.cores, seen.cores_recorded) == (pytest.approx(8 / 12), 2, False)
    recorded = figures_of(graph(tasks, trace=replace(trace([]), metadata={"cores": 16})))
    assert (recorded.mean.cpu, recorded.cores, recorded.cores_recorded) == (pytest.approx(8 / (16 * 6)), 16, True)
    assert math.isnan(seen.mean.gpu) and math.isnan(seen.mean.of_peak)


@pytest.mark.parametrize(
    ("recorded_batch", "expected"), [(32, 32), ("32", None), (True, None), (-1, None), (None, None)]
)
def test_the_batch_is_the_recorded_one_if_it_is_a_count(recorded_batch: object, expected: int | None) -> None:
    some = graph([task("op", MAIN, 1)], trace=replace(trace([]), metadata={"batch": recorded_batch}))
    assert figures_of(some).batch == expected
    assert figures_of(some, batch=8).batch == 8


def test_a_cpu_that_runs_ahead_is_reported() -> None:
    # Launches take 1 each and steps end unwaited for; kernels of 10 complete every 10.
    tasks: list[dict[str, Any]] = []
    for number in range(3):
        tasks.append(task("step begins", MAIN, 0, mark=Mark.STEP_BEGIN, step=number))
        tasks += launched("a", 10, step=number)
        tasks.append(task("step ends", MAIN, 0, mark=Mark.STEP_END, step=number))
    edges = [(4 * number + 1, 4 * number + 2, Dependency.LAUNCH) for number in range(3)]
    figures = figures_of(graph(tasks, edges), batch=2)
    assert (figures.mean.length_us, figures.sustained_us) == (1, 10)
    assert figures.ran_ahead
    assert "steps complete every 0.01 ms, 200000.0 samples/s" in figures.sentences()[-1]
    assert figures.record()["sustained_samples_per_second"] == pytest.approx(2e5)


# FLOPs and peaks


def test_kernels_that_serve_another_one_execute_nothing() -> None:
    # 2 x 8 x 64 x 28 x 28 x 64 x 3 x 3 FLOPs, all of them in the sgemm.
    inputs = [[8, 64, 28, 28], [64, 64, 3, 3], [], [], [], [], [], [], []]
    values = ["", "", "[1, 1]", "[1, 1]", "[1, 1]", "1", "False", "False", "True"]
    kernels = [("generateWinogradTilesKernel<0, float>", 10.0), ("volta_sgemm_64x64_nt", 30.0)]
    call = operator("aten::cudnn_convolution", inputs, kernels=kernels, **{"Concrete Inputs": values})
    some = recorded([call])
    work = arithmetic_of(some, kernels_of(some))
    assert work.flops.tolist() == [0, 0, 0, pytest.approx(2 * 8 * 64 * 28 * 28 * 64 * 9)]
    assert work.known.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("board", "kind", "dtype", "kernel", "expected"),
    [
        ("v100", "matrix product", "float32", "volta_sgemm_128x64_nn", Rate("float32", FLOAT32)),
        ("v100", "matrix product", "float16", "volta_h884gemm_128x64_nn", Rate("float16 on Tensor Cores", FLOAT16)),
        ("v100", "element-wise", "float16", "vectorized_elementwise_kernel", Rate("float32", FLOAT32)),
        # Without Tensor Cores libraries multiply halves in float32.
        ("p100", "convolution", "float16", "maxwell_fp16_scudnn_128x64", Rate("float32", 9.519e12)),
        ("a100-pcie-40gb", "matrix product", "float32", "ampere_sgemm_128x64_nn", Rate("float32", 19.492e12)),
        ("a100-pcie-40gb", "matrix product", "float32", "cutlass_80_tensorop_s1688gemm_64x64_nn",
         Rate("tfloat32 on Tensor Cores", 156e12)),
        ("a100-pcie-40gb", "attention", "bfloat16", "flash_fwd_kernel", Rate("bfloat16 on Tensor Cores", 312e12)),
        ("a100-pcie-40gb", "element-wise", "float64", "vectorized_elementwise_kernel", Rate("float64", 9.746e12)),
        ("ipu-mk1", "element-wise", "float64", "add", None),
    ],
)  # fmt: skip
def test_the_peak_is_that_of_the_type_and_unit(
    board: str, kind: str, dtype: str, kernel: str, expected: Rate | None
) -> None:
    work = Work(kind=kind, parts=(), flops=1.0, bytes=1.0, dtype=dtype)
    rate = peak_of(load_device(board), work, [kernel])
    assert (rate is None) == (expected is None)
    if rate is not None and expected is not None:
        assert rate.name == expected.name
        assert rate.flops_per_second == pytest.approx(expected.flops_per_second, rel=0.01)


def test_unknown_work_is_said_and_counts_as_none() -> None:
    # 300 of 400 µs are known.
    strange = operator("fbgemm::lookup", [[4, 4]], kernels=[("lookup", 100.0)])
    operators = [PRODUCT, ACTIVATION, strange]
    figures = figures_of(stepped([(0, 200), (1, 100), (2, 100)], operators=operators))
    assert figures.known == pytest.approx(0.75)
    assert "FLOPs are known for 75.0 % of the kernels' time" in " ".join(figures.sentences())
    assert figures.mean.of_peak == pytest.approx(2.001e9 / (FLOAT32 * 400e-6))
    assert [kernel.name for kernel in figures.slow_kernels] == ["elementwise_kernel"]
    lookup = next(kernel for kernel in figures.record()["kernels"] if kernel["name"] == "lookup")
    assert (lookup["flops"], lookup["flops_utilisation"]) == (None, None)


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        ((), "the trace does not say which board it was recorded on"),
        (({"name": "GeForce 256"},), "there is no device file for GeForce 256, which the trace names"),
    ],
)
def test_without_a_known_board_there_are_no_flops(devices: Any, reason: str) -> None:
    some = stepped([(0, 200)], operators=[PRODUCT], trace=trace([PRODUCT], devices))
    figures = figures_of(some, batch=1)
    assert figures.sentences()[0] == f"No FLOPs: {reason}; name a board with --device."
    record = figures.record()
    assert (record["device"], record["flops"], record["model_flops_utilisation"]) == (None, None, None)
    assert record["gpu_utilisation"] == pytest.approx(200 / 202, abs=1e-6)
    assert figures_of(some, device="v100").mean.model_of_peak == pytest.approx(2e9 / (FLOAT32 * 202e-6))
    with pytest.raises(InputError, match="GeForce 3"):
        figures_of(some, device="GeForce 3")


def test_without_sizes_there_are_no_flops() -> None:
    figures = figures_of(stepped([(0, 9)], operators=[operator("aten::mm", kernels=[("sgemm", 9.0)])]))
    assert figures.sentences()[0] == "No FLOPs: input sizes not recorded; record with record_shapes=True."
    assert figures.slow_kernels == ()


def test_pytorch_counts_the_same_flops(pytorch: Any, tmp_path: Any) -> None:
    """A training step of convolutions, attention and an MLP on the CPU, each of its products given a kernel.

    PyTorch counts no FLOPs of the CPU's attention, and counts the gradients of grouped convolutions as if they had one
    group: the first is passed to it, the second left out. It does not see causal masks, of which we count half.
    """
    from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

    layers = pytorch.nn

    class Net(layers.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.stem = layers.Conv2d(3, 16, 5, stride=2, padding=1)
            self.narrow = layers.Conv2d(16, 32, 3, padding=2, dilation=2, bias=False)
            self.mix = layers.Linear(32, 96)
            self.head = layers.Sequential(layers.Linear(32, 64), layers.GELU(), layers.Linear(64, 10))

        def forward(self, images: Any) -> Any:
            hidden = self.narrow(self.stem(images).relu()).flatten(2).transpose(1, 2)
            heads = self.mix(hidden).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            seen = layers.functional.scaled_dot_product_attention(*heads)
            return self.head(seen.transpose(1, 2).flatten(2).mean(1))

    net = Net()

    def train() -> None:
        net(pytorch.ones(4, 3, 20, 20)).square().sum().backward()

    attention = pytorch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    gradient = pytorch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    counts = {attention: partial(_shaped, sdpa_flop), gradient: partial(_shaped, sdpa_backward_flop)}
    with FlopCounterMode(display=False, custom_mapping=counts) as counter:
        train()
    with pytorch.profiler.profile(record_shapes=True) as profiler:
        train()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    on_gpu = _launched(replay(tmp_path / "trace.json").graph)
    (step,) = utilisation(simulate(on_gpu), [0], device="v100").steps
    assert step.model_flops == counter.get_total_flops()
    assert step.flops == step.model_flops


def _shaped(count: Any, *tensors: Any, out_val: Any = None, **options: Any) -> int:
    """PyTorch's count of attention, from tensors."""
    return int(count(*tensors, out_val=out_val))


def _launched(cpu: TaskGraph) -> TaskGraph:
    """A kernel for every product, convolution and attention of a recording of a CPU, named as on a GPU."""
    from daydream.operators.pricing import is_heavy

    assert cpu.trace is not None
    recording = replace(cpu.trace, names=tuple(name.replace("_for_cpu", "") for name in cpu.trace.names))
    heavy = [row for row in range(len(recording)) if is_heavy(recording.text(row))]
    around = set(np.unique(cpu.enclosing[heavy]).tolist())
    for row in list(around):
        while row >= 0:
            around.add(row)
            row = int(cpu.enclosing[row])
    tasks = [each for row in heavy if row not in around for each in launched("kernel", 1, operator=row)]
    return graph(tasks, pairs(len(tasks) // 2), trace=recording, enclosing=cpu.enclosing)


# Recorded traces


def _raw(name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All events with a duration, and the steps."""
    with gzip.open(recorded_trace(name)) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    steps = [e for e in events if e["name"].startswith("ProfilerStep#") and e["cat"] in ("Operator", "user_annotation")]
    return events, sorted(steps, key=lambda step: float(step["ts"]))


def _of(name: str, **options: Any) -> Utilisation:
    answer = replay(recorded_trace(name))
    return utilisation(answer.timeline, answer.steps, **options)


def _busy(events: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> list[float]:
    """Time of each step in which a kernel runs, microseconds: intervals merged one after the other."""
    times = []
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e["cat"].lower() == "kernel")
    for step in steps:
        begin, end = float(step["ts"]), float(step["ts"]) + float(step["dur"])
        total, reached = 0.0, begin
        for start, until in spans:
            if until > reached and start < end:
                total += min(until, end) - max(start, reached)
                reached = min(until, end)
        times.append(total)
    return times


#: Multiply-adds of ResNet-50 for an image of 224 x 224: all, and those of its first convolution, whose input needs no
#: gradient (64 x 112 x 112 outputs of 3 x 7 x 7).
RESNET50, RESNET50_STEM = 4_089_184_256, 118_013_952


@pytest.mark.slow
def test_resnet50_on_a_v100_by_hand() -> None:
    events, steps = _raw("resnet50_v100_nw0")
    figures = _of("resnet50_v100_nw0", batch=32)
    lengths = [float(step["dur"]) for step in steps]
    mean = sum(lengths) / 6
    assert [step.name for step in figures.steps] == [step["name"] for step in steps]
    assert figures.samples_per_second(figures.mean.length_us) == pytest.approx(32 / mean * 1e6, rel=1e-3)
    assert figures.variation == pytest.approx(float(np.std(lengths, ddof=1)) / mean, rel=1e-2)
    assert figures.spread == pytest.approx(max(lengths) / min(lengths), rel=1e-3)
    # Forward, and both gradients: three times.
    model = 2 * 32 * (3 * RESNET50 - RESNET50_STEM)
    busy = _busy(events, steps)
    for step, length, active in zip(figures.steps, lengths, busy, strict=True):
        assert step.gpu == pytest.approx(active / length, abs=2e-3)
        assert step.model_flops == pytest.approx(model, rel=1e-9)
    kernels = [event for event in events if event["cat"] == "Kernel"]
    whole_us = sum(event["dur"] for event in kernels)
    # The GPU ends later than the last step: 2 % of the convolutions' time lies behind it.
    products = [event for event in kernels if re.search("scudnn|gemm|convolve|dgrad|wgrad|winograd", event["name"])]
    inside = sum(_busy(products, steps)) / sum(event["dur"] for event in products)
    assert 0.97 < inside < 1
    assert figures.mean.model_of_peak == pytest.approx(inside * model / (FLOAT32 * mean * 1e-6), rel=1e-2)
    assert figures.mean.gpu == pytest.approx(sum(busy) / sum(lengths), abs=1e-3)
    # Batch norm and what is element-wise add less than 2 %.
    whole = figures.mean.flops
    assert 1 < whole / model < 1.02
    assert figures.mean.of_peak == pytest.approx(6 * inside * whole / (FLOAT32 * sum(busy) * 1e-6), rel=1e-2)
    # Either the main thread works or that of the backward pass, but for waits of 0.1 % of the time.
    assert figures.mean.cpu == pytest.approx(0.5, abs=2e-3)
    # TBD's culprits (tables 3.5 and 3.6).
    norms = [event for event in kernels if "bn_bw_1C11_kernel_new" in event["name"]]
    slowest = figures.slow_kernels[0]
    assert "bn_bw_1C11_kernel_new" in slowest.name
    assert slowest.total_us == pytest.approx(sum(event["dur"] for event in norms) / 6)
    assert slowest.share == pytest.approx(sum(event["dur"] for event in norms) / whole_us)
    assert all(kernel.of_peak < figures.mean.of_peak for kernel in figures.slow_kernels)


@pytest.mark.slow
def test_a_recommendation_model_on_an_a100_by_hand() -> None:
    events, steps = _raw("trace_diff_control_a100")
    figures = _of("trace_diff_control_a100")
    flops = 0.0
    for event in events:
        if event["name"] in ("aten::mm", "aten::addmm", "aten::bmm"):
            left, right = event["args"]["Input Dims"][event["name"] == "aten::addmm" :][:2]
            flops += 2.0 * math.prod(left) * right[-1]
    assert figures.mean.model_flops == pytest.approx(flops / len(steps), rel=1e-9)
    assert figures.peaks[0].rate.name == "tfloat32 on Tensor Cores"
    assert figures.mean.gpu == pytest.approx(
        sum(_busy(events, steps)) / sum(float(step["dur"]) for step in steps), abs=5e-3
    )


@pytest.mark.slow
def test_a_recording_without_sizes_has_the_other_figures() -> None:
    events, steps = _raw("ns_resolution_v100")
    figures = _of("ns_resolution_v100")
    for step, event, active in zip(figures.steps, steps, _busy(events, steps), strict=True):
        assert step.gpu == pytest.approx(active / float(event["dur"]), abs=5e-3)
    # Five steps of 35 to 96 ms, of which the last three wait for the GPU.
    assert figures.ran_ahead
    assert figures.sustained_us == pytest.approx(float(steps[-1]["dur"]), rel=5e-3)
    assert math.isnan(figures.mean.flops)


def test_v100_is_what_the_traces_say() -> None:
    board = load_device(str(V100[0]["name"]))
    instruction = board.best_matrix_instruction("float16")
    assert instruction is not None
    assert (board.peak_flops("float32"), instruction.peak_flops) == (FLOAT32, FLOAT16)
    assert STREAM.device == 0
