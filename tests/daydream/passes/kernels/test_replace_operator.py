"""The loop on the CPU: a model recorded, its operators compiled, and its step predicted with them."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from daydream.cli import main
from daydream.graph.graph import TaskGraph
from daydream.graph.simulate import simulate
from daydream.passes.kernels.bundled_operators import read_bundles
from daydream.passes.kernels.replace_operator import replace_operator, replacements
from daydream.passes.unprofiled import unprofiled
from daydream.record.record import record
from daydream.tasks.build import read_graph
from hal.microbench.cpu.native import host_architecture
from hal.support.errors import InputError
from tests.codegen.cpu_bundles import CpuKernel, write_cpu_bundle
from tests.codegen.cpu_kernels import built, form_of, schedule_for

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("c_compiler")


class Net(torch.nn.Module):  # type: ignore[misc]
    """A residual block, then tokens through a layer norm, two linear layers, products with a transpose, softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(8)
        self.relu = torch.nn.ReLU(inplace=True)
        self.conv2 = torch.nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = torch.nn.BatchNorm2d(8)
        self.norm = torch.nn.LayerNorm(64)
        self.up, self.gelu, self.down = torch.nn.Linear(64, 48), torch.nn.GELU(), torch.nn.Linear(48, 64)

    def forward(self, x: Any) -> Any:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        tokens = self.relu(y).view(8, 64)
        tokens = tokens + self.down(self.gelu(self.up(self.norm(tokens))))
        heads = tokens.view(2, 4, 64)
        weights = torch.softmax(torch.bmm(heads, heads.transpose(1, 2)), -1)
        return torch.bmm(weights, heads)


@pytest.fixture(scope="module")
def net() -> Any:
    torch.manual_seed(0)
    model = Net().eval()
    for norm in (model.bn1, model.bn2):
        norm.running_mean.uniform_(-0.5, 0.5)
        norm.running_var.uniform_(0.5, 2.0)
    return model


@pytest.fixture(scope="module")
def image() -> Any:
    return torch.randn(1, 8, 8, 8)


@pytest.fixture(scope="module")
def trace(net: Any, image: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "net.json"
    with torch.inference_mode(), record(path, steps=2, warmup=2, timed=5, model=net, with_modules=False) as recorder:
        while recorder.written is None:
            net(image)
            recorder.step()
    return path


@pytest.fixture(scope="module")
def graph(trace: Path) -> TaskGraph:
    return read_graph(trace)


@pytest.fixture(scope="module")
def operators(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("operators") / "ops.json"
    done = CliRunner().invoke(main, ["operators", str(trace), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert done.stderr == "8 operators written to " + str(out) + "\n"
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def bundles(operators: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them compiled, with a time of 10 µs each."""
    folder = tmp_path_factory.mktemp("bundles")
    for number, data in enumerate(operators):
        form = form_of(**{**data, "name": f"op{number}"})
        schedule = schedule_for(form)
        kernel = CpuKernel(built(form, schedule), schedule, 1e-5)
        write_cpu_bundle(folder / f"op{number}", form, [kernel], device="cpu", architecture=host_architecture())
    return folder


def test_the_operators_of_a_trace_have_what_follows_them_as_their_epilogue(operators: list[dict[str, Any]]) -> None:
    bias = {"function": "bias_add", "axis": "f"}
    found = [(data["op"], data.get("epilogue", [])) for data in operators]
    assert found == [
        ("conv2d", [bias, "relu"]),
        ("conv2d", [bias, {"function": "residual_add"}, "relu"]),
        ("layer_norm", []),
        ("matmul", [{"function": "bias_add", "axis": "n"}, "gelu"]),
        ("matmul", [{"function": "bias_add", "axis": "n"}, {"function": "residual_add"}]),
        ("batch_matmul", []),
        ("softmax", []),
        ("batch_matmul", []),
    ]
    assert [data.get("transpose_b", False) for data in operators if data["op"] == "batch_matmul"] == [True, False]


def test_all_calls_that_compute_have_a_kernel(graph: TaskGraph, bundles: Path) -> None:
    replaced, unreplaced = replacements(graph, read_bundles(bundles))
    names = [one.kernel.name for one in replaced if one.run.calls[0].step == 0]
    assert names == [f"op{number}" for number in range(8)]
    assert {call.name for call in unreplaced} <= {"aten::view", "aten::transpose"}


def test_steps_are_timed_against_the_recorded_ones(graph: TaskGraph) -> None:
    assert graph.trace is not None
    metadata = graph.trace.metadata
    assert len(metadata["timed_seconds"]) == 5
    assert all(seconds > 0 for seconds in metadata["timed_seconds"])
    assert 0 < metadata["custom_call_us"] < 10_000
    timeline = simulate(unprofiled(graph).graph)
    assert math.isnan(timeline.sustained_us), "there is no GPU that the CPU could run ahead of"
    clean = timeline.step_us.mean()
    assert clean == pytest.approx(1e6 * sorted(metadata["timed_seconds"])[2], rel=0.01)


def test_a_step_gets_the_times_of_its_kernels(graph: TaskGraph, bundles: Path) -> None:
    steps, before = len(graph.steps), simulate(graph).step_us
    found, _ = replacements(graph, read_bundles(bundles))
    outcome = replace_operator(graph, bundle=str(bundles), call_us=7)
    gone = [sum(one.run.duration_us for one in found if one.run.calls[0].step == step) for step in range(steps)]
    # Eight kernels of 10 µs, each called for 7 µs, in place of all that they replace.
    assert simulate(outcome.graph).step_us == pytest.approx(before - gone + 8 * (10 + 7))
    assert outcome.notes[0].startswith("30 calls of ")
    assert "become 16 kernels of 0.16 ms, and 0.11 ms of calling them, 7.0 µs each" in outcome.notes[0]
    assert "op4: 2 x " in outcome.notes[5] and outcome.notes[5].endswith(" take 10 µs, predicted")


def test_much_slower_kernels_make_a_slower_step(graph: TaskGraph, bundles: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    shutil.copytree(bundles, slow)
    for path in slow.glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["kernels"][0]["profiled_seconds"] = 1.0
        path.write_text(json.dumps(manifest))
    fast = simulate(replace_operator(graph, bundle=str(bundles)).graph).step_us.mean()
    slower = simulate(replace_operator(graph, bundle=str(slow)).graph).step_us.mean()
    assert slower > 8e6 > simulate(graph).step_us.mean() and fast < slower


def test_only_some_operators(graph: TaskGraph, bundles: Path) -> None:
    found, _ = replacements(graph, read_bundles(bundles), "op[01]$")
    assert {one.kernel.name for one in found} == {"op0", "op1"}


def test_what_cannot_be_used_is_refused(graph: TaskGraph, bundles: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no manifest"):
        read_bundles(tmp_path)
    with pytest.raises(InputError, match="match: is no regular expression"):
        replace_operator(graph, bundle=str(bundles), match="(")
    with pytest.raises(InputError, match="computes nothing that the trace's CPU operators compute"):
        replace_operator(graph, bundle=str(bundles), match="nothing")
    unmeasured = replace(graph, trace=replace(graph.trace, metadata={}))
    with pytest.raises(InputError, match="call-us: is unknown"):
        replace_operator(unmeasured, bundle=str(bundles))
