"""Kernels replaced by prices: whole calls, files, bundles, and what stays."""

from __future__ import annotations

import json

import pytest

from daydream.graph.simulate import simulate
from daydream.passes import registered
from daydream.passes.kernels.replace_kernel import replace_kernel
from hal.catalog import load_device
from hal.support.errors import InputError
from roller.library import library_time
from tests.daydream.graphs import STREAM, graph, task
from tests.daydream.recorded import operator, recorded, recorded_trace

V100 = load_device("v100")
CONVOLUTION = {"op": "conv2d", "n": 8, "c": 64, "h": 28, "w": 28, "f": 128, "kh": 3, "kw": 3, "padding": 1}
CONVOLVED = library_time(CONVOLUTION, V100).seconds * 1e6


def step():
    """A convolution of two kernels, a relu, a product that nobody knows: launches 1 µs each."""
    kernels = [("computeOffsetsKernel", 2.0), ("volta_scudnn", 900.0)]
    return recorded(
        [
            operator("aten::cudnn_convolution", [[8, 64, 28, 28], [128, 64, 3, 3]], kernels=kernels),
            operator("aten::relu", [[8, 128, 28, 28]], kernels=[("vectorized_elementwise_kernel", 10.0)]),
            operator("aten::mm", kernels=[("sgemm", 50.0)]),
        ]
    )


def test_every_product_with_sizes_takes_its_price():
    outcome = replace_kernel(step(), implementation="library")
    kernels = outcome.graph.select(gpu=True)
    assert [outcome.graph.text(row) for row in kernels] == ["volta_scudnn", "vectorized_elementwise_kernel", "sgemm"]
    assert outcome.graph.duration_us[kernels].tolist() == pytest.approx([CONVOLVED, 10, 50])
    assert len(outcome.graph) == 6  # the table of offsets went with its launch
    # One launch, then the kernels one behind the other.
    assert simulate(outcome.graph).makespan_us == pytest.approx(1 + CONVOLVED + 10 + 50)
    assert outcome.notes == (
        f"1 operator calls (2 GPU tasks) of 0.9 ms take {CONVOLVED / 1e3:.1f} ms;"
        " 1 auxiliary tasks removed with their launches",
        f"priced for {V100.title}: cuBLAS and cuDNN as modelled",
        "1 calls: stride and padding from the size of its consumer",
        "1 calls kept, unpriced: input sizes not recorded; record with record_shapes=True",
    )


def test_calls_recorded_with_tf32_are_counted():
    kernel = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>(x)"
    outcome = replace_kernel(recorded([operator("aten::mm", [[64, 64], [64, 64]], kernels=[(kernel, 9)])]))
    assert "1 calls were recorded with TF32, which no price supposes: theirs are those of float32" in outcome.notes


def test_match_restricts_to_calls_with_such_a_kernel():
    outcome = replace_kernel(step(), match="offsets", implementation="library")
    assert len(outcome.graph) == 6
    assert len(replace_kernel(step(), match="^sgemm").graph) == 8
    with pytest.raises(InputError, match="match: no kernel of a convolution or matrix product fits 'elementwise'"):
        replace_kernel(step(), match="elementwise")


def test_an_operator_of_the_users(tmp_path):
    file = tmp_path / "op.json"
    file.write_text(json.dumps(CONVOLUTION))
    outcome = replace_kernel(step(), match="sgemm|relu|elementwise", op=str(file), implementation="library")
    durations = outcome.graph.duration_us[outcome.graph.select(gpu=True)]
    assert durations.tolist() == pytest.approx([2, 900, CONVOLVED, CONVOLVED])
    # Kernels of one call that fit become one, the longest.
    outcome = replace_kernel(step(), match="offsets|scudnn", op=str(file), implementation="library")
    assert outcome.graph.duration_us[outcome.graph.select(gpu=True)].tolist() == pytest.approx([CONVOLVED, 10, 50])


def bundle(folder, name, *kernels):
    (folder / name).mkdir(parents=True)
    (folder / name / "manifest.json").write_text(json.dumps({"name": name, "kernels": kernels}))


def test_profiled_times_of_a_bundle_count_before_predicted_ones(tmp_path):
    bundle(tmp_path, "a", {"seconds": 3e-6, "profiled_seconds": 8e-6}, {"seconds": 4e-6, "profiled_seconds": 7e-6})
    bundle(tmp_path, "b", {"seconds": 3e-6})
    measured = replace_kernel(step(), match="sgemm", bundle=str(tmp_path / "a"))
    assert measured.graph.duration_us[7] == pytest.approx(7)
    assert measured.notes[1] == "each takes 7.0 µs, profiled in its bundle for a"
    predicted = replace_kernel(step(), match="sgemm", bundle=str(tmp_path / "b"))
    assert predicted.graph.duration_us[7] == pytest.approx(3)
    assert predicted.notes[1] == "each takes 3.0 µs, predicted in its bundle, which has no profiled times for b"
    with pytest.raises(InputError, match="holds 2 operators; name the folder of one of them"):
        replace_kernel(step(), match="sgemm", bundle=str(tmp_path))


def test_bundles_are_found_by_name_next_to_auto(tmp_path):
    bundle(tmp_path, "conv2d_8x64x28x28_128x3x3_p1", {"seconds": 5e-6})
    bundle(tmp_path, "other", {"seconds": 6e-6})
    outcome = replace_kernel(step(), bundle=str(tmp_path), implementation="library")
    assert outcome.graph.duration_us[outcome.graph.select(name="scudnn")].tolist() == pytest.approx([5])
    assert "times from predicted in its bundle, which has no profiled times: 1 calls" in outcome.notes


@pytest.mark.parametrize("text", ["{", "[]", '{"name": "x"}', '{"name": "x", "kernels": [{"seconds": -1}]}', "null"])
def test_broken_manifests_are_one_line(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(InputError, match=r"manifest\.json: "):
        replace_kernel(step(), match="sgemm", bundle=str(tmp_path))


def test_bad_parameters_are_one_line(tmp_path):
    with pytest.raises(InputError, match="match: is missing; give a regular expression"):
        replace_kernel(step(), op="x.json")
    with pytest.raises(InputError, match="match: is no regular expression"):
        replace_kernel(step(), match="(")
    with pytest.raises(InputError, match="implementation: there is no 'x'"):
        replace_kernel(step(), implementation="x")
    with pytest.raises(InputError, match=r"bundle: .* holds no manifest\.json"):
        replace_kernel(step(), bundle=str(tmp_path))
    with pytest.raises(InputError, match="op: the trace has no input sizes"):
        replace_kernel(graph([task("k", STREAM, 3)]), device="v100")
    with pytest.raises(InputError, match="bundle: was given together with op"):
        replace_kernel(step(), match="x", op="x.json", bundle="y")


def test_the_pass_is_registered():
    names = [parameter.name for parameter in registered()["replace-kernel"].parameters]
    assert names == ["match", "op", "device", "implementation", "bundle", "search"]


@pytest.mark.slow
def test_a_real_trace_keeps_no_convolution_unpriced():
    from daydream.tasks.build import read_graph

    baseline = read_graph(recorded_trace("resnet50_v100_nw0"))
    outcome = replace_kernel(baseline, device="v100", implementation="library")
    assert outcome.notes[0].startswith("966 operator calls (2448 GPU tasks)")
    assert not any("unpriced" in note for note in outcome.notes)
    assert len(baseline) - len(outcome.graph) == 2 * (2448 - 966)
    assert simulate(outcome.graph).makespan_us < simulate(baseline).makespan_us
