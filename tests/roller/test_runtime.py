"""Compiled operators in a program, and as operators of PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import roller
from hal import InputError
from tests.codegen.bundles import write_bundle


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
