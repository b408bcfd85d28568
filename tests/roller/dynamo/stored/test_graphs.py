"""Frozen graphs that were compiled before: code, kernels and constants without another compilation."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hal.catalog import load_device
from hal.microbench.cpu.topology import read_topology

torch = pytest.importorskip("torch")

import torch._inductor.constant_folding as folding  # noqa: E402

import roller  # noqa: E402
from roller.dynamo import packed, rewriting  # noqa: E402
from roller.dynamo.kernels import KernelShelf  # noqa: E402
from roller.dynamo.stored.derivations import (  # noqa: E402
    Derivations,
    Derived,
    Literal,
    Parameter,
    UnknownOriginError,
    computed,
    tensors_of,
)
from roller.dynamo.stored.graphs import GRAPHS, GraphStore  # noqa: E402

#: A shipped processor by the width of its vectors, in bits: this one, as far as kernels are concerned.
SPECS = {512: "xeon-platinum-8375c", 256: "epyc-7763"}
WIDTH = read_topology().simd_bits


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Small(torch.nn.Module):
    """A convolution with a batch norm, and a linear function of other weights every time."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(16)
        self.last = torch.nn.Linear(16, 32)
        torch.nn.init.normal_(self.norm.running_mean)

    def forward(self, images: Any) -> Any:
        return torch.relu(self.last(torch.relu(self.norm(self.first(images))).mean((2, 3))))


def constants_of(module: Any) -> dict[str, Any]:
    """Tensors that a graph reads, by name."""
    return {node.target: getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr"}


class Weights(torch.nn.Module):
    """Parameters that functions of a graph read."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.full((2, 3), value))
        self.shift = torch.nn.Parameter(torch.full((2, 3), value + 1))


class TestDerivations:
    def test_constants_of_other_parameters_are_computed_likewise(self) -> None:
        graph = torch.fx.Graph()
        rows, matrix, shift = graph.placeholder("rows"), graph.get_attr("matrix"), graph.get_attr("shift")
        parts = graph.call_function(torch.ops.aten.split.Tensor, (matrix, 1))
        total = graph.call_function(torch.ops.aten.sum.default, (graph.call_function(operator.getitem, (parts, 1)),))
        scaled = graph.call_function(torch.ops.aten.mul.Tensor, (total, shift))
        graph.output([graph.call_function(torch.ops.aten.add.Tensor, (rows, each)) for each in (scaled, shift)])
        module = torch.fx.GraphModule(Weights(1.0), graph)
        derivations = Derivations(module)
        with derivations.recorded(), torch.no_grad():
            folding.constant_fold(module)
        origins = {name: derivations.origin(tensor) for name, tensor in constants_of(module).items()}
        values, filled = computed(origins, tensors_of(Weights(5.0)))
        filled.result()
        assert sorted(float(value.detach().mean()) for value in values.values()) == [6.0, 15.0 * 6.0]
        assert {type(origin) for origin in origins.values()} == {Parameter, Derived}

    def test_a_tensor_of_the_graphs_own_is_kept(self) -> None:
        graph = torch.fx.Graph()
        owner = torch.nn.Module()
        owner.register_buffer("own", torch.ones(3))
        derivations = Derivations(torch.nn.Module())
        node = graph.call_function(torch.ops.aten.neg.default, (graph.get_attr("own"),))
        graph.output(node)
        module = torch.fx.GraphModule(owner, graph)
        with derivations.recorded():
            folding.constant_fold(module)
        ((name, tensor),) = constants_of(module).items()
        origin = derivations.origin(tensor)
        assert isinstance(origin.arguments[0], Literal)
        assert torch.equal(computed({name: origin}, {})[0][name], -torch.ones(3))

    def test_what_was_not_recorded_has_no_origin(self) -> None:
        with pytest.raises(UnknownOriginError):
            Derivations(torch.nn.Linear(2, 2)).origin(torch.ones(2))


def shelf_in(folder: Path) -> KernelShelf:
    return KernelShelf.of(load_device("epyc-7763"), folder, 1)


class TestKeys:
    def graph(self, weight: Any) -> Any:
        graph, owner = torch.fx.Graph(), torch.nn.Module()
        owner.register_parameter("weight", torch.nn.Parameter(weight))
        rows, constant = graph.placeholder("rows"), graph.get_attr("weight")
        graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (rows, constant)),))
        return torch.fx.GraphModule(owner, graph)

    def test_they_hold_shapes_and_options_and_no_numbers(self, tmp_path: Path) -> None:
        store = GraphStore(shelf_in(tmp_path), True)
        rows = torch.randn(2, 3)
        key = store.key(self.graph(torch.randn(3)), [rows])
        assert key is not None
        assert key == store.key(self.graph(torch.randn(3)), [torch.randn(2, 3)])
        assert key != store.key(self.graph(torch.randn(3)), [torch.randn(3, 3)])
        assert key != store.key(self.graph(torch.randn(1)), [rows])
        assert key != GraphStore(shelf_in(tmp_path), False).key(self.graph(torch.randn(3)), [rows])

    def test_there_is_none_for_symbols(self, tmp_path: Path) -> None:
        assert GraphStore(shelf_in(tmp_path)).key(self.graph(torch.ones(1)), [3]) is None


@pytest.mark.slow
@pytest.mark.usefixtures("device_compiler", "c_compiler")
@pytest.mark.skipif(WIDTH not in SPECS, reason=f"no shipped processor has vectors of {WIDTH} bits")
class TestOnThisProcessor:
    def run(self, folder: Path, model: Any, inputs: Any, **options: Any) -> tuple[Any, list[Any]]:
        """Outputs of a model that is compiled as by another process, and the decisions."""
        torch.compiler.reset()
        chosen = roller.backend(device=SPECS[WIDTH], cache=folder, jobs=1, **options)
        decisions: list[Any] = []
        chosen.listeners.append(decisions.extend)
        with torch.no_grad():
            return torch.compile(model, backend=chosen)(inputs), decisions

    @pytest.mark.parametrize("competes", [False, True])
    def test_a_stored_graph_takes_other_weights_and_is_not_compiled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, competes: bool
    ) -> None:
        # The library's share decides that its kernels on packed weights stay where they compete.
        monkeypatch.setitem(packed.PACKED_SHARES, "conv2d", 1e3)
        monkeypatch.setitem(packed.PACKED_SHARES, "matmul", 1e3)
        monkeypatch.setattr(packed, "CALL_SECONDS", 0.0)
        images = torch.randn(2, 3, 12, 12)
        _, decisions = self.run(tmp_path, Small(0).eval(), images, competes=competes)
        assert {decision.is_taken for decision in decisions} == {not competes}
        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", None)
        model = Small(1).eval()
        result, again = self.run(tmp_path, model, images, competes=competes)
        assert [each.reason for each in again] == [each.reason for each in decisions]
        expected = model(images)
        assert (result - expected).abs().max() < 1e-5 * expected.abs().max()

    def test_what_writes_to_its_buffers_is_not_stored(self, tmp_path: Path) -> None:
        self.run(tmp_path, Small(0), torch.randn(2, 3, 12, 12), competes=False)
        assert not list((tmp_path / GRAPHS).rglob("*"))

    def test_a_graph_whose_kernel_failed_is_tried_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rewriting, "fault_of", lambda *_: "it is off")
        _, decisions = self.run(tmp_path, Small(0).eval(), torch.randn(2, 3, 12, 12), competes=False)
        assert all(decision.has_failed for decision in decisions)
        assert not list((tmp_path / GRAPHS).rglob("*"))

    def test_a_graph_whose_kernels_are_gone_is_compiled_anew(self, tmp_path: Path) -> None:
        model, images = Small(0).eval(), torch.randn(2, 3, 12, 12)
        result, _ = self.run(tmp_path, model, images, competes=False)
        for path in tmp_path.glob("*/manifest.json"):
            path.unlink()
        again, decisions = self.run(tmp_path, model, images, competes=False)
        assert torch.equal(result, again)
        assert all(decision.is_taken for decision in decisions)
