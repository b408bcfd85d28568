"""Frozen graphs in PyTorch's own files of models that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hal.catalog import load_device
from hal.microbench.cpu.topology import read_topology

torch = pytest.importorskip("torch")

import roller  # noqa: E402
from codegen.bundle.records import MANIFEST  # noqa: E402
from roller.dynamo.frozen import FrozenGraph, ModuleSource  # noqa: E402
from roller.dynamo.kernels import KernelShelf  # noqa: E402
from roller.dynamo.stored.graphs import CompiledGraph  # noqa: E402
from roller.dynamo.stored.packages import GraphPackage, parameter_name  # noqa: E402
from tests.roller.dynamo.stored.test_graphs import Small  # noqa: E402

#: A shipped processor by the width of its vectors, in bits: this one, as far as kernels are concerned.
SPECS = {512: "xeon-platinum-8375c", 256: "epyc-7763"}
WIDTH = read_topology().simd_bits


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Doubled:
    """A stored graph that multiplies its input by its parameter."""

    operators = ()

    def loaded(self, parameters: Any, shelf: KernelShelf) -> Any:
        parameter = parameters[parameter_name(0)]
        return lambda rows: [rows * parameter]


def package(**changes: Any) -> GraphPackage:
    shelf = KernelShelf.of(load_device("epyc-7763"))
    graph: Any = Doubled()
    return replace(GraphPackage.of(graph, shelf, (0,), (1,)), **changes)


class TestPackage:
    def test_another_process_gives_it_parameters(self) -> None:
        graph = FrozenGraph.deserialize_compile_artifacts(package().to_bytes())
        rows, weights = torch.randn(3), torch.randn(3)
        assert torch.equal(graph(weights, rows)[0], weights * rows)
        weights.add_(1.0)
        assert torch.equal(graph(weights, rows)[0], weights * rows)
        other = torch.randn(3)
        assert torch.equal(graph(other, rows)[0], other * rows)
        again = FrozenGraph.deserialize_compile_artifacts(FrozenGraph.serialize_compile_artifacts(graph))
        assert torch.equal(again(other, rows)[0], other * rows)

    @pytest.mark.parametrize("changes", [{"surroundings": "of another release"}, {"device": "the-other-machines"}])
    def test_it_is_refused_where_its_kernels_are_not_this_machines(self, changes: dict[str, Any]) -> None:
        with pytest.raises(RuntimeError, match=r"was compiled for another .*: compile it here"):
            GraphPackage.from_bytes(package(**changes).to_bytes())

    def test_kernels_are_put_where_they_are_missing(self, tmp_path: Path) -> None:
        files = {MANIFEST: b"{}", "kernel_1.so": b"code"}
        package(kernels={"product": files}).code([torch.ones(1)], [])
        folder = tmp_path / "home" / "roller" / "backend" / "product"
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
        package(kernels={"product": {MANIFEST: b"of another"}}).code([torch.ones(1)], [])
        assert (folder / MANIFEST).read_bytes() == b"{}"

    @pytest.mark.parametrize("stored", [None, Doubled()])
    def test_a_graph_with_tensors_of_its_own_has_none(self, stored: Any) -> None:
        module = torch.fx.symbolic_trace(torch.nn.Linear(3, 3))
        graph: Any = stored
        shelf = KernelShelf.of(load_device("epyc-7763"))
        source = ModuleSource(lambda module, _: CompiledGraph(module, graph, shelf), module)
        frozen = FrozenGraph(source)
        frozen(torch.randn(2, 3))
        with pytest.raises(RuntimeError, match="cannot be written"):
            FrozenGraph.serialize_compile_artifacts(frozen)


@pytest.mark.slow
@pytest.mark.usefixtures("device_compiler", "c_compiler")
@pytest.mark.skipif(WIDTH not in SPECS, reason=f"no shipped processor has vectors of {WIDTH} bits")
class TestOnThisProcessor:
    def backend(self, folder: Path) -> Any:
        return roller.backend(device=SPECS[WIDTH], cache=folder, jobs=1, competes=False)

    def test_a_graph_compiled_ahead_of_time_takes_other_weights(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images, path = torch.randn(2, 3, 12, 12), str(tmp_path / "small.pt2")
        with torch.no_grad():
            compiled: Any = torch.compile(Small(0).eval(), fullgraph=True, backend=self.backend(tmp_path / "kernels"))
            compiled.forward.aot_compile(((images,), {})).save_compiled_function(path)
            torch.compiler.reset()
            monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", None)
            monkeypatch.setattr("torch._dynamo.convert_frame.trace_frame", None)
            model = Small(1).eval()
            with open(path, "rb") as file:
                loaded: Any = torch.compiler.load_compiled_function(file)
            result, expected = loaded(model, images), model(images)
        assert (result - expected).abs().max() < 1e-5 * expected.abs().max()
