"""Porting to another board: prices of both, wave scaling, what stays, notes, and boards that are of no use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from daydream.graph.graph import TaskKind
from daydream.operators.pricing import device_of
from daydream.operators.wave_scaling import Launch, habitat_ratio, memory_share, sustained_rate, wave_ratio
from daydream.passes import registered
from daydream.passes.port import port
from daydream.whatif import apply_passes, parse_pass
from hal.catalog import load_device
from hal.node_catalog import load_node
from hal.support.errors import InputError
from roller.library import library_time
from roller.library.collectives import collective_seconds
from roller.library.streaming.elementwise import kernel_seconds_floor
from tests.daydream.graphs import MAIN, STREAM, graph, launched, pairs, task
from tests.daydream.recorded import operator, recorded, recorded_trace

V100, A100, P100 = (load_device(name) for name in ("v100", "a100", "p100"))
SQUARE = {"op": "matmul", "m": 2048, "n": 2048, "k": 2048}
MM = ("aten::mm", [[2048, 2048], [2048, 2048]])
INDEX = ("aten::index", [[1024, 1024], []])


def on_gpu(outcome):
    return outcome.graph.duration_us[outcome.graph.select(gpu=True)].tolist()


def scaled(duration_us, ratio, source=V100, target=A100):
    """What wave scaling makes of a kernel: what an empty one takes is the board's."""
    here, there = (kernel_seconds_floor(board) * 1e6 for board in (source, target))
    return there + (duration_us - here) * ratio


def with_launches(before, arguments):
    """The graph with an event of its own for every kernel, which has these arguments."""
    rows = before.select(gpu=True)
    first = len(before.trace)
    events = before.event.copy()
    events[rows] = first + np.arange(len(rows))
    trace = replace(before.trace, arguments=(*before.trace.arguments, *arguments))
    return replace(before, trace=trace, event=events)


def of_library(board):
    return library_time(SQUARE, board).seconds


def by_name(*names):
    """Kernels of 100 µs without a trace."""
    return graph([each for name in names for each in launched(name, 100)], pairs(len(names)))


def test_calls_that_both_boards_price_take_the_ratio_of_prices():
    outcome = port(recorded([operator(*MM, kernels=[("volta_sgemm", 1500), ("splitKreduce", 60)])]), device="p100")
    ratio = of_library(P100) / of_library(V100)
    assert on_gpu(outcome) == pytest.approx([1500 * ratio, 60 * ratio])
    assert outcome.notes[0] == "from NVIDIA Tesla V100 SXM2 16 GB to NVIDIA Tesla P100 PCIe 16 GB"
    assert outcome.notes[1] == (
        f"2 tasks of 1.6 ms, 100.0% of the GPU's time, take {1.56 * ratio:.1f} ms: recorded time x price there / price "
        "here by the library models"
    )


def test_kernels_without_a_model_take_the_ratio_of_bandwidths():
    outcome = port(recorded([operator(*INDEX, kernels=[("index_elementwise_kernel", 100)])]), device="a100")
    memory = V100.dram.bandwidth_bytes_per_second / A100.dram.bandwidth_bytes_per_second
    assert on_gpu(outcome) == pytest.approx([scaled(100, memory)])
    assert any("wave scaling, bound by memory, launch not recorded" in note for note in outcome.notes)
    assert "1 calls have no prices: no rule for aten::index" in outcome.notes


def test_both_rules_in_one_graph_and_host_times_stay():
    before = recorded([operator(*MM, kernels=[("sgemm", 1500)]), operator(*INDEX, kernels=[("index_kernel", 100)])])
    outcome = port(before, device="a100")
    assert on_gpu(outcome) == pytest.approx(
        [1500 * of_library(A100) / of_library(V100), scaled(100, wave_ratio(V100, A100))]
    )
    assert outcome.graph.duration_us[before.on_cpu].tolist() == before.duration_us[before.on_cpu].tolist()
    assert [outcome.graph.text(row) for row in range(len(before))] == [before.text(row) for row in range(len(before))]
    tasks = [int(note.split()[0]) for note in outcome.notes if " tasks of " in note]
    assert tasks == [1, 1]
    assert outcome.notes[-1].startswith("host times, copies to and from the host")


def test_recorded_launches_count_where_arithmetic_decides():
    # Sizes unknown: the name says that it is a product. 81 blocks, two on one of 80 units, two on most of 56.
    before = recorded([operator("aten::mm", kernels=[("volta_sgemm_128x64", 1000)])])
    arguments = {"grid": [81, 1, 1], "block": [128, 1, 1], "registers per thread": 128, "shared memory": 0}
    rates = V100.sustained_flops("float32") / P100.sustained_flops("float32")
    assert on_gpu(port(before, device="p100")) == pytest.approx([scaled(1000, rates, V100, P100)])
    outcome = port(with_launches(before, [arguments]), device="p100")
    assert on_gpu(outcome) == pytest.approx([scaled(1000, rates * 112 / 160, V100, P100)])
    assert any(note.endswith("wave scaling, bound by arithmetic by name") for note in outcome.notes)
    whole = port(with_launches(before, [arguments]), device="p100", whole_waves=True)
    launch = Launch(81, 128, 128, 0)
    assert on_gpu(whole) == pytest.approx([scaled(1000, habitat_ratio(V100, P100, launch, share=0.0), V100, P100)])


def test_tf32_has_no_price_but_a_rate():
    a100 = ({"id": 0, "name": "a100"},)
    before = recorded([operator(*MM, kernels=[("ampere_sgemm_tf32", 400)])], a100)
    ridge = sustained_rate(A100, "tfloat32", products=True) / A100.dram.bandwidth_bytes_per_second
    share = memory_share(2 * 2048**3 / (3 * 4 * 2048**2), ridge)
    ratio = wave_ratio(A100, V100, share=share, dtype="tfloat32", products=True)
    outcome = port(before, device="v100")
    assert on_gpu(outcome) == pytest.approx([scaled(400, ratio, A100, V100)])
    assert ratio > 4, "a V100 has no TF32: its lanes compute in float32"
    assert "1 calls have no prices: recorded with TF32, which no price supposes" in outcome.notes


def test_a_board_without_library_models_takes_wave_scaling_alone():
    outcome = port(recorded([operator(*MM, kernels=[("volta_sgemm", 1500)])]), device="mi50")
    assert any("by their operators' FLOP a byte" in note for note in outcome.notes)
    assert any(note.startswith("1 calls have no prices: mi50 runs no cuBLAS") for note in outcome.notes)


def test_copies_within_the_device_and_sets_scale_others_stay():
    names = ["Memcpy DtoD (Device -> Device)", "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pageable)"]
    tasks = [task(name, STREAM, 100, kind=TaskKind.MEMCPY) for name in names]
    before = graph([*tasks, task("Memset (Device)", STREAM, 100, kind=TaskKind.MEMSET)])
    moved = scaled(100, wave_ratio(V100, A100))
    assert on_gpu(port(before, device="a100", from_="v100")) == pytest.approx([moved, 100, 100, moved])


def test_what_an_empty_kernel_takes_is_the_boards():
    here, there = (kernel_seconds_floor(board) * 1e6 for board in (V100, P100))
    before = graph(
        [task("a", STREAM, here), task("b", STREAM, 0.0), task("c", STREAM, here / 2), task("d", STREAM, here + 1)]
    )
    expected = [there, 0.0, there / 2, there + wave_ratio(V100, P100)]
    assert on_gpu(port(before, device="p100", from_="v100")) == pytest.approx(expected)


def collective(name="ncclDevKernel_AllReduce_Sum_f32_RING_LL", **arguments):
    """A collective of an A100 with the arguments of its kernel."""
    before = recorded([operator("c10d::allreduce_", kernels=[(name, 1000)])], ({"id": 0, "name": "a100-sxm"},))
    kinds = np.where(before.on_gpu, TaskKind.COMMUNICATION, before.kind)
    return with_launches(replace(before, kind=kinds), [arguments])


MESSAGE = {"In msg nelems": 25_000_000, "dtype": "Float", "Group size": 8}


def test_collectives_take_the_ratio_of_modelled_times():
    outcome = port(collective(**MESSAGE), device="h100-sxm")
    here, there = (
        float(collective_seconds("all_reduce", 1e8, 8, load_node(name)).kernel_seconds)
        for name in ("dgx-a100", "hgx-h100")
    )
    assert on_gpu(outcome) == pytest.approx([1000 * there / here])
    assert any("boards' usual nodes" in note for note in outcome.notes)


def test_collectives_without_node_or_size_stay():
    outcome = port(collective(**MESSAGE), device="p4")
    assert on_gpu(outcome) == [1000]
    assert any(note.startswith("1 collectives stay: p4 has no usual node") for note in outcome.notes)
    outcome = port(collective(), device="h100-sxm")
    assert on_gpu(outcome) == [1000]
    assert "1 collectives stay: kind, size or ranks not recorded" in outcome.notes


def test_to_its_own_board_nothing_changes():
    before = recorded([operator(*MM, kernels=[("sgemm", 1500.3)]), operator(*INDEX, kernels=[("index", 7.7)])])
    outcome = port(before, device="v100")
    assert np.array_equal(outcome.graph.duration_us, before.duration_us)


def test_later_passes_take_the_graph_for_one_of_the_new_board(tmp_path):
    before = recorded([operator(*MM, kernels=[("sgemm", 1500)])])
    after = port(before, device="p100").graph
    assert device_of(after)[0] == P100
    assert device_of(before)[0] == V100
    _, there = apply_passes(before, [parse_pass("port:device=p100"), parse_pass("amp")])
    assert any("Tesla P100 PCIe 16 GB has no Tensor Cores" in note for note in there[1].notes)
    back = port(after, device="v100").graph
    assert back.duration_us == pytest.approx(before.duration_us)


def test_a_board_of_the_users_own_is_known_by_its_file(tmp_path):
    from importlib.resources import files

    path = tmp_path / "mine.toml"
    text = files("hal").joinpath("devices", "p100-pcie-16gb.toml").read_text()
    path.write_text(text.replace('name = "p100-pcie-16gb"', 'name = "mine"'))
    after = port(recorded([operator(*MM, kernels=[("sgemm", 1500)])]), device=str(path)).graph
    assert device_of(after)[0].name == "mine"


def test_the_board_of_the_recording_can_be_named():
    nameless = recorded([operator(*MM, kernels=[("sgemm", 1500)])], ())
    with pytest.raises(InputError, match=r"from: the trace does not say which board .*; name one: from=v100"):
        port(nameless, device="a100")
    outcome = port(nameless, device="a100", from_="v100")
    assert on_gpu(outcome) == pytest.approx([1500 * of_library(A100) / of_library(V100)])
    assert device_of(outcome.graph)[0] == A100


def test_a_graph_without_a_trace_goes_by_names():
    outcome = port(by_name("volta_sgemm_128x64", "bn_fw"), device="p100", from_="v100")
    rates = wave_ratio(V100, P100, share=0.0)
    assert on_gpu(outcome) == pytest.approx(
        [scaled(100, rates, V100, P100), scaled(100, wave_ratio(V100, P100), V100, P100)]
    )
    assert "2 calls have no prices: the graph was not made from a trace" in outcome.notes


def test_bad_boards_and_graphs_are_one_line():
    before = by_name("sgemm")
    with pytest.raises(InputError, match="device: no device is called 'v1000'"):
        port(before, device="v1000", from_="v100")
    with pytest.raises(InputError, match="from: no device is called 'x'"):
        port(before, device="v100", from_="x")
    with pytest.raises(InputError, match=r"device: .* is no GPU; name a GPU"):
        port(before, device="epyc-7763", from_="v100")
    with pytest.raises(InputError, match=r"from: .* is no GPU"):
        port(before, device="v100", from_="ipu-mk1")
    with pytest.raises(InputError, match="port: the graph has no task on a GPU"):
        port(graph([task("aten::mm", MAIN, 5.0)]), device="a100", from_="v100")


def test_it_is_written_as_other_passes_are():
    names = [parameter.name for parameter in registered()["port"].parameters]
    assert names == ["device", "from", "whole-waves"]
    request = parse_pass("port:device=a100,from=v100")
    assert request.parameters == {"device": "a100", "from_": "v100"}
    _, (applied,) = apply_passes(by_name("relu"), [request])
    assert applied.settings == " (device=a100, from=v100, whole-waves=no)"
    with pytest.raises(InputError, match="needs device; write port:device="):
        parse_pass("port")


@pytest.mark.slow
def test_the_recorded_resnet_50_ported_to_its_board_changes_nothing():
    from daydream.tasks.build import read_graph

    baseline = read_graph(recorded_trace("resnet50_v100_nw0"))
    outcome = port(baseline, device="v100")
    assert np.array_equal(outcome.graph.duration_us, baseline.duration_us)
    assert any(note.startswith("8736 tasks of 586.5 ms, 97.2% of the GPU's time") for note in outcome.notes)
