"""Recorded and made traces with right answers (../shared/cases/traces): every line of their README."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from bench.accuracy.data import default_directory
from daydream.answers import Prediction, Replay, predict, replay
from daydream.graph.graph import Mark, TaskGraph, TaskKind
from daydream.passes.kernels.amp import COMPUTE
from daydream.report.analysis import compared
from daydream.report.breakdown import Resource
from daydream.whatif import parse_pass

CASES = default_directory().parent / "cases" / "traces"

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="no shared cases here")

FASTER = "bandwidth:factor=1000"


@lru_cache(maxsize=1)
def replayed(name: str) -> Replay:
    return replay(CASES / f"{name}.json.gz")


def changed(name: str, text: str) -> Prediction:
    return predict(replayed(name), [parse_pass(text)])


def means_ms(prediction: Prediction) -> tuple[float, float]:
    return prediction.before.analysis().mean_us / 1e3, prediction.after.analysis().mean_us / 1e3


def sustained_ms(prediction: Prediction) -> tuple[float, float]:
    return prediction.before.timeline.sustained_us / 1e3, prediction.after.timeline.sustained_us / 1e3


@pytest.mark.parametrize("path", sorted(CASES.glob("*.json.gz")), ids=lambda path: path.name.partition(".")[0])
def test_every_case_replays(path: Path) -> None:
    answer = replay(path)
    measured = np.array([answer.graph.steps[index].measured_us for index in answer.steps])
    assert np.abs(answer.timeline.step_us[list(answer.steps)] / measured - 1).max() < 0.001


@pytest.mark.parametrize("name", ["ddp_event_records", "ddp_no_event_records", "symmetric_memory_all_reduce"])
def test_communication_is_on_the_path(name: str) -> None:
    prediction = changed(name, FASTER)
    assert means_ms(prediction) == pytest.approx((14.48, 10.49), abs=0.01)
    assert prediction.before.analysis().critical_us[Resource.COMMUNICATION] == pytest.approx(4000, rel=0.01)
    warned = any("6 wait for is inferred" in warning for warning in prediction.before.graph.warnings)
    assert warned == (name == "ddp_no_event_records")


def test_a_rank_that_waits_for_others() -> None:
    prediction = changed("ddp_no_event_records_dlrm_rank1_v100", FASTER)
    assert means_ms(prediction) == pytest.approx((19.90, 12.5), rel=0.01)
    assert prediction.before.analysis().critical_us[Resource.COMMUNICATION] == pytest.approx(8700, rel=0.02)


def test_streams_of_hip() -> None:
    prediction = changed("ddp_no_event_records_resnet_mi300", FASTER)
    assert prediction.before.analysis().critical_us[Resource.COMMUNICATION] > 3000
    before, after = sustained_ms(prediction)
    assert before == pytest.approx(18.77, abs=0.01) and 16.0 <= after < 17.0
    graphs = changed("ddp_no_event_records_resnet_mi300", "cuda-graphs")
    steps = compared(graphs.before.analysis(), graphs.after.analysis())
    assert 0.9 < (steps.before_us / steps.after_us).min() <= (steps.before_us / steps.after_us).max() < 1.1


def test_the_profiler_says_what_rccl_does() -> None:
    name = "rccl_generic_all_reduce"
    for text in ("dgc:workers=8,elementwise-gb-s=1000", "blueconnect:factors=4x2,bandwidths=100x10"):
        assert changed(name, text).applied[0].notes[0].startswith("3 all-reduces")
    ddp = changed(name, "ddp:gradient-mb=46.8,workers=8")
    assert ddp.applied[0].notes[0].startswith("the trace already holds 3 all-reduces")
    assert len(ddp.after.graph.select(kind=TaskKind.COMMUNICATION)) == 3


@pytest.mark.parametrize(
    "name", ["amp_tensile_half", "amp_nvjet_half", "amp_on_half_compiled_mi300", "truth_amp_after_t4"]
)
def test_what_is_16_bit_gains_nothing(name: str) -> None:
    before, after = means_ms(changed(name, "amp"))
    assert before / after == pytest.approx(1.0, abs=1e-6)


def test_a_backlog_sets_no_pace() -> None:
    assert sustained_ms(changed("backlog_drains", "gpu-scale:factor=10")) == pytest.approx((12.0, 12.0), abs=0.01)
    graphs = changed("backlog_drains", "cuda-graphs")
    assert sustained_ms(graphs) == pytest.approx((12.0, 9.0), abs=0.05)
    before, after = compared(graphs.before.analysis(), graphs.after.analysis()).means_us
    assert before / after == pytest.approx(1.33, abs=0.01)


def test_overflowing_kernels_are_cut() -> None:
    prediction = changed("kernel_overflows_next", "gpu-scale:factor=2")
    before, after = means_ms(prediction)
    assert before / after == pytest.approx(1.96, abs=0.02)
    graph = prediction.before.graph
    assert graph.duration_us[graph.on_gpu].sum() / 3 == pytest.approx(4000, rel=0.01)


def test_iterations_end_with_the_optimizer() -> None:
    prediction = changed("iterations_by_optimizer", "fused-optimizer")
    assert len(prediction.before.graph.steps) == 6
    assert means_ms(prediction)[0] == pytest.approx(4.07, abs=0.01)
    assert "12 kernels of the weight update in 6 steps became 6" in prediction.applied[0].notes[0]
    assert any("counted by Optimizer.step" in warning for warning in prediction.before.graph.warnings)


def test_kernels_without_time_are_said() -> None:
    warnings = replayed("kernels_at_zero").graph.warnings
    assert any(warning.startswith("15 events on the GPU without time") for warning in warnings)


def test_external_ids_tell_launches() -> None:
    before, after = means_ms(changed("external_ids_only", "scale:factor=0.01"))
    assert before / after > 15


def test_frames_of_python_do_not_count() -> None:
    (step,) = replayed("stack_outlasts_trace").graph.steps
    assert step.measured_us == pytest.approx(12_200, rel=0.005)


def test_persistent_kernels_are_no_further_apart_than_the_boards() -> None:
    prediction = changed("port_persistent_kernels_vgg13_h100", "port:device=a100")
    before, after = prediction.before.graph, prediction.after.graph
    long = before.on_gpu & (before.duration_us > 20)
    assert (after.duration_us[long] / before.duration_us[long]).max() <= 3.54


def _gpu_ms(graph: TaskGraph) -> tuple[float, float]:
    """Time of the GPU a step, and of it products, milliseconds."""
    on_gpu = graph.on_gpu & (graph.mark == Mark.NONE)
    products = np.array([COMPUTE.search(name) is not None and "splitK" not in name for name in graph.names])[graph.name]
    products &= on_gpu & (graph.kind == TaskKind.KERNEL)
    return tuple(float(graph.duration_us[rows].sum()) / len(graph.steps) / 1e3 for rows in (on_gpu, products))


def test_mixed_precision_of_a_t4_is_as_measured() -> None:
    measured = _gpu_ms(replayed("truth_amp_after_t4").graph)
    assert measured == pytest.approx((2.83, 0.76), abs=0.01)
    prediction = changed("truth_amp_before_t4", "amp")
    assert _gpu_ms(prediction.before.graph) == pytest.approx((5.88, 3.95), abs=0.01)
    whole, products = _gpu_ms(prediction.after.graph)
    assert whole == pytest.approx(measured[0], rel=0.05)
    assert products == pytest.approx(measured[1], rel=0.25)
    assert any("GradScaler adds" in note for note in prediction.applied[0].notes)
