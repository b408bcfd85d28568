"""TorchDynamo imported when something is compiled, in processes where it has not been imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

BEFORE = """
import sys
from daydream.capture.models.deferred_dynamo import defer_dynamo
defer_dynamo()
defer_dynamo()
import torch
from torch.utils.checkpoint import checkpoint

def compiled():
    return "torch._dynamo.convert_frame" in sys.modules

layer = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(layer.parameters())
checkpoint(layer, torch.ones(2, 4), use_reentrant=False).sum().backward()
optimizer.step()

@torch.compiler.disable
def hidden(x):
    return x + 1

@torch.compiler.disable(recursive=False)
def shallow(x):
    return x + 1

@torch.compiler.allow_in_graph
def whole(x):
    return x + 1

graphs = []

def backend(graph, inputs):
    graphs.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
    return graph
"""


def run(text: str) -> str:
    done = subprocess.run([sys.executable, "-c", BEFORE + text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_step_with_checkpoints_and_an_optimizer_imports_none_of_it() -> None:
    text = "from torch._dynamo.utils import is_compile_supported\n"
    assert run(text + "print(compiled(), layer.weight.grad is not None, hidden(1), shallow(1), whole(1))") == (
        "False True 2 2 2"
    )


def test_compiling_imports_it_and_finds_the_functions_that_were_marked_before() -> None:
    text = """
early, config = sys.modules["torch._dynamo"], torch._dynamo.config
compile = torch.compile(backend=backend)
result = compile(lambda x: whole(hidden(shallow(x * 2) * 3) * 5))(torch.ones(1))
print(compiled(), float(result), graphs)
print(config is torch._dynamo.config, early is not torch._dynamo, early.reset is torch._dynamo.reset)
"""
    assert run(text).splitlines() == ["True 51.0 [['mul'], ['mul'], ['mul', 'whole']]", "True True True"]


def test_a_module_of_it_imports_all_of_it() -> None:
    text = """
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import is_compile_supported
print(compiled(), sys.modules["torch._dynamo.testing"].CompileCounter is CompileCounter, is_compile_supported("cpu"))
"""
    assert run(text) == "True True True"
