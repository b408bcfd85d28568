"""A profile of what never ran: PyTorch's profile-guided estimator reads our times from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._inductor.fx_passes.profile_guided_estimation import ProfileGuidedEstimator  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from daydream.capture.pytorch.step import Subject, capture  # noqa: E402
from daydream.planners import node_runtime, write_profile  # noqa: E402
from daydream.planners.collectives import CollectiveTimes  # noqa: E402
from hal.catalog import load_device  # noqa: E402
from hal.support.errors import InputError  # noqa: E402


def network(x: Any, w: Any, table: Any, places: Any) -> Any:
    hidden = torch.nn.functional.gelu(x @ w).to(torch.bfloat16)
    return torch.softmax(hidden.float() + table[places], -1).sum(0)


@pytest.fixture(scope="module")
def graph() -> Any:
    arguments = torch.randn(512, 256), torch.randn(256, 384), torch.randn(64, 384), torch.zeros(512, dtype=torch.int64)
    return make_fx(network, tracing_mode="fake")(*arguments)


def test_pytorch_reads_our_times_of_every_operator(graph: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    count = write_profile(path, graph, "h100")
    read, ours = ProfileGuidedEstimator(path), node_runtime("h100")
    looked_up = 0
    for node in graph.graph.nodes:
        # PyTorch looks up nothing whose tensors stand in lists, as those of an index do.
        if ours(node) and "index" not in str(node.target):
            looked_up += 1
            assert read(node) == pytest.approx(ours(node), rel=1e-12), node
    assert looked_up == count - 1 >= 6


def test_a_captured_step_is_found_by_a_graph_of_it(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 128))
        batch = torch.randn(512, 64)
    path = str(tmp_path / "profile.json")
    write_profile(path, capture(Subject(title="network", model=model, args=(batch,))), "h100")
    read, ours = ProfileGuidedEstimator(path), node_runtime("h100")
    graph = make_fx(torch.nn.Sequential(*model), tracing_mode="fake", _allow_non_fake_inputs=True)(batch).graph
    times = [(read(node), ours(node)) for node in graph.nodes if ours(node)]
    assert len(times) == 3
    assert all(found == pytest.approx(expected, rel=1e-12) for found, expected in times)


def test_collectives_of_a_group_are_found_between_the_sizes_too(graph: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    write_profile(path, graph, "h100", groups=[range(8)])
    profile = ProfileGuidedEstimator(path).profile
    times = CollectiveTimes(load_device("h100"))
    ranks = tuple(range(8))
    for elements, tolerance in ((2**20, 1e-12), (3_000_000, 0.05)):
        read = profile.lookup_collective("reduce_scatter_tensor", ranks, elements, "BFloat16")
        assert read is not None
        ours = times.of_output("reduce_scatter", 2 * elements, 8, torch.bfloat16)
        assert read[0] == pytest.approx(ours, rel=tolerance)
    assert profile.lookup_collective("all_reduce", (0, 1), 2**20, "BFloat16") is None


def test_the_file_is_a_trace_of_kernels_one_after_another(graph: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, graph.graph, "a100")
    events = json.loads(path.read_text())["traceEvents"]
    kernels = [event for event in events if event["cat"] == "kernel"]
    ends = [event["ts"] + event["dur"] for event in kernels]
    assert [event["ts"] for event in kernels[1:]] == pytest.approx(ends[:-1])
    operators = {event["args"]["External id"]: event["name"] for event in events if event["cat"] == "cpu_op"}
    assert {event["args"]["External id"] for event in kernels} == set(operators)
    assert "aten::mm" in operators.values()


def test_a_profile_that_cannot_be_is_refused_and_not_begun(graph: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        write_profile(tmp_path / "nowhere" / "profile.json", graph, "h100")
    with pytest.raises(InputError, match="12 ranks do not fit"):
        write_profile(tmp_path / "profile.json", graph, "h100", groups=[range(12)])
    with pytest.raises(InputError, match="do not fit a node"):
        write_profile(tmp_path / "profile.json", graph, "p4", groups=[range(2)])
    assert list(tmp_path.iterdir()) == []
