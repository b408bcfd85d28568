"""Compiled operators in a program, and as operators of PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import roller
from codegen.generators import linker
from codegen.runtime import torch_operator
from hal.microbench.cpu.native import host_architecture
from hal.support.errors import InputError
from tests.codegen.bundles import write_bundle
from tests.codegen.cpu_bundles import CpuKernel, write_cpu_bundle
from tests.codegen.cpu_kernels import built, form_of, schedule_for


def test_load_is_there_without_the_compiler(tmp_path: Path) -> None:
    operator = roller.load(write_bundle(tmp_path), rank=1)
    assert [argument.shape for argument in operator.inputs] == [(5, 8), (8,)]
    assert operator.output.name == "Y"
    with pytest.raises(InputError, match="holds no manifest"):
        roller.load(tmp_path)
    with pytest.raises(AttributeError, match="has no attribute 'unload'"):
        _ = roller.unload


def test_a_bundle_becomes_an_operator_of_torch(tmp_path: Path) -> None:
    op = roller.torch_op(write_bundle(tmp_path), name="registered")
    assert roller.torch_op(tmp_path / "twice", name="roller::registered") is op
    schema = str(torch.ops.roller.registered.default._schema)
    assert schema == "roller::registered(Tensor X, Tensor B) -> Tensor"


def test_its_name_comes_from_the_bundle(tmp_path: Path) -> None:
    roller.torch_op(write_bundle(tmp_path, name="3x3-conv.1"))
    assert torch.ops.roller.op_3x3_conv_1.default is not None
    roller.torch_op(write_bundle(tmp_path, name="spaced"), name="mine::other_name")
    assert torch.ops.mine.other_name.default is not None


@pytest.mark.parametrize("name", ["", "a b", "a::b::c", "::a", "a-b"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="is no name of an operator; write name or namespace::name"):
        roller.torch_op(write_bundle(tmp_path), name=name)


def test_a_name_stands_for_one_bundle(tmp_path: Path) -> None:
    roller.torch_op(write_bundle(tmp_path, name="a"), name="taken")
    with pytest.raises(InputError, match=r"name: roller::taken is already the operator of .*; give another name"):
        roller.torch_op(write_bundle(tmp_path, name="b"), name="taken")


def test_tensors_on_the_cpu_are_refused_in_one_line(tmp_path: Path) -> None:
    op = roller.torch_op(write_bundle(tmp_path), name="on_cpu")
    with pytest.raises(InputError) as caught:
        op(torch.zeros(5, 8), torch.zeros(8))
    assert str(caught.value) == "roller::on_cpu: its tensors are on the CPU; move them to a GPU with .cuda()"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A product of (8, 12) and (12, 16) for this machine's processor."""
    if linker() is None:
        pytest.skip("there is no C compiler to link with")
    form = form_of(op="matmul", m=8, n=16, k=12)
    schedule = schedule_for(form)
    folder = tmp_path_factory.mktemp("libraries") / "op"
    kernel = CpuKernel(built(form, schedule), schedule, 1e-6)
    return write_cpu_bundle(folder, form, [kernel], device="cpu", architecture=host_architecture())


def test_a_library_takes_arrays(library: Path) -> None:
    operator: Any = roller.load(library)
    a, b = np.ones((8, 12), np.float32), np.full((12, 16), 0.5, np.float32)
    np.testing.assert_array_equal(operator(a, b), np.full((8, 16), 6.0))
    assert repr(operator) == "<op(A: float32[8, 12], B: float32[12, 16]) -> C: float32[8, 16], rank 1 for cpu>"


def factors() -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of the library, of one seed."""
    generator = torch.Generator().manual_seed(5)
    return torch.rand(8, 12, generator=generator), torch.rand(12, 16, generator=generator)


def test_a_library_becomes_an_operator_of_torch_on_the_cpu(library: Path) -> None:
    op = roller.torch_op(library, name="product")
    a, b = factors()
    torch.testing.assert_close(op(a, b), a @ b)
    torch.testing.assert_close(torch.ops.roller.product(a, b), a @ b)
    assert roller.torch_op(library, name="product") is op
    assert op(a.to("meta"), b.to("meta")).shape == (8, 16)
    torch.library.opcheck(op, (a, b))


def test_a_profiler_and_the_compiler_see_it(library: Path) -> None:
    op = roller.torch_op(library, name="seen")
    a, b = factors()
    with torch.profiler.profile() as profile:
        op(a, b)
    assert "roller::seen" in {event.key for event in profile.key_averages()}
    compiled = torch.compile(lambda x, y: op(x, y) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b), a @ b + 1)


def test_tensors_that_the_library_does_not_take_are_refused(library: Path) -> None:
    op = roller.torch_op(library, name="strict")
    a, b = factors()
    for given, message in (
        ((a.T, b), r"roller::strict.A: has shape \[12, 8\]; it takes \[8, 12\]"),
        ((a, b.double()), "roller::strict.B: is float64; it takes float32"),
        ((a.T.contiguous().T, b), "roller::strict.A: is not dense and row-major; give a contiguous copy"),
    ):
        with pytest.raises(InputError, match=message):
            op(*given)


def test_a_library_refuses_tensors_on_a_gpu() -> None:
    with pytest.raises(InputError, match=r"roller::x: its tensors are on a GPU; move them to the CPU with .cpu"):
        torch_operator._elsewhere("roller::x")(torch.zeros(1))


def test_shapes_are_known_without_memory(tmp_path: Path) -> None:
    op = roller.torch_op(write_bundle(tmp_path), name="fake")
    result = op(torch.empty(5, 8, device="meta"), torch.empty(8, device="meta"))
    assert (result.shape, result.dtype, result.device.type) == ((5, 8), torch.float32, "meta")
    with pytest.raises(InputError, match=r"roller::fake\.X: has shape \[8, 5\]; it takes \[5, 8\]"):
        op(torch.empty(8, 5, device="meta"), torch.empty(8, device="meta"))
    with pytest.raises(InputError, match=r"roller::fake\.B: is float16; it takes float32"):
        op(torch.empty(5, 8, device="meta"), torch.empty(8, device="meta", dtype=torch.float16))


def test_export_takes_it_as_one_node(tmp_path: Path) -> None:
    op = roller.torch_op(write_bundle(tmp_path), name="exported")

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = op(x, b).relu()
            return result

    graph = torch.export.export(Model(), (torch.zeros(5, 8), torch.zeros(8))).graph
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert called == ["roller.exported.default", "aten.relu.default"]


def test_bfloat16_is_torchs_own(tmp_path: Path) -> None:
    op = roller.torch_op(write_bundle(tmp_path, dtype="bfloat16"), name="brain")
    x = torch.empty(5, 8, device="meta", dtype=torch.bfloat16)
    assert op(x, torch.empty(8, device="meta", dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_without_torch_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_bundle(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"torch: cannot be imported .*; pip install torch"):
        roller.torch_op(folder, name="torchless")
