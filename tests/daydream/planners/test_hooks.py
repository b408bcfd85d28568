"""The compiler asks for times of nodes and gets ours: memory budget, fx graphs, the scheduler, collectives."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed._functional_collectives as functional  # noqa: E402
from torch._functorch import config as functorch  # noqa: E402
from torch._functorch.partitioners import estimate_runtime  # noqa: E402
from torch._inductor import comms, config  # noqa: E402
from torch._inductor.fx_passes.overlap_scheduling import estimate_collective_time  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from daydream.operators.calls import operator_prices  # noqa: E402
from daydream.operators.inputs import Inputs, RecordedTensor  # noqa: E402
from daydream.planners import budget_runtime, node_runtime, op_runtime  # noqa: E402
from daydream.planners.collectives import CollectiveTimes  # noqa: E402
from daydream.planners.private import private  # noqa: E402
from hal.catalog import load_device  # noqa: E402
from hal.node_catalog import load_node  # noqa: E402
from hal.support.errors import InputError  # noqa: E402
from roller.library.collectives import collective_seconds  # noqa: E402

H100 = load_device("h100")


def matrix(rows: int, columns: int) -> RecordedTensor:
    return RecordedTensor((rows, columns), "float", (columns, 1))


def price(name: str, inputs: list[RecordedTensor], output: RecordedTensor) -> float:
    (of_call,) = operator_prices([(name, Inputs(tuple(inputs), ("",) * len(inputs)), (output,))], H100)
    return of_call.seconds * 1e3


PRODUCT = price("aten::mm", [matrix(256, 128), matrix(128, 64)], matrix(256, 64))


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def graph_of(function: Any, *arguments: Any, mode: str = "fake") -> Any:
    return make_fx(function, tracing_mode=mode)(*arguments).graph


def node_of(graph: Any, part: str) -> Any:
    return next(node for node in graph.nodes if part in str(node.target))


# Nodes of fx graphs


def product(x: Any, w: Any) -> Any:
    return torch.relu(x @ w).t()


@pytest.mark.parametrize("mode", ("fake", "symbolic"))
def test_a_node_takes_what_its_operator_takes(mode: str) -> None:
    graph = graph_of(product, torch.randn(256, 128), torch.randn(128, 64), mode=mode)
    runtime = node_runtime("h100")
    assert runtime(node_of(graph, "mm")) == pytest.approx(PRODUCT, rel=1e-12)
    assert runtime(node_of(graph, "aten.t")) == 0
    assert runtime(next(iter(graph.nodes))) is None


def test_the_first_node_has_its_whole_graph_priced() -> None:
    graph = graph_of(product, torch.randn(256, 128), torch.randn(128, 64))
    runtime = node_runtime("h100")
    runtime(node_of(graph, "mm"))
    assert [name for name, _, _ in runtime.times.priced] == ["aten::mm", "aten::relu"]


def test_a_processors_attention_is_priced_as_the_boards() -> None:
    def attend(q: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    halves = graph_of(attend, torch.randn(2, 8, 512, 64, dtype=torch.bfloat16))
    floats = graph_of(attend, torch.randn(2, 8, 512, 64))
    runtime = node_runtime("h100")
    flash, efficient = (runtime(node_of(graph, "flash_attention_for_cpu")) for graph in (halves, floats))
    assert flash is not None and efficient is not None and 0 < flash < efficient
    names = [name for name, _, _ in runtime.times.priced]
    assert names == [f"aten::_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient")]


def collectives(x: Any) -> Any:
    group = torch.distributed.group.WORLD
    gathered = functional.all_gather_single(x, 0, group)
    scattered = functional.reduce_scatter_single(gathered, "sum", 0, group)
    return functional.all_reduce(scattered, "sum", group)


def seconds(kind: str, message_bytes: int) -> float:
    times = collective_seconds(kind, message_bytes, 8, load_node("hgx-h100"), dtype="float32")
    return float(times.kernel_seconds)


@pytest.mark.usefixtures("eight_ranks")
def test_collectives_take_what_they_take_on_the_boards_node() -> None:
    graph = graph_of(collectives, torch.randn(1024, 64))
    runtime = node_runtime("h100")
    held = 1024 * 64 * 4
    for part, kind, message in (
        ("all_gather", "all_gather", 8 * held), ("reduce_scatter", "reduce_scatter", 8 * held),
        ("all_reduce", "all_reduce", held),
    ):  # fmt: skip
        node = node_of(graph, part)
        assert runtime(node) == pytest.approx(seconds(kind, message) * 1e3)
        assert estimate_collective_time(node, None, runtime) == runtime(node)
        assert 0 < runtime(node, 0) < runtime(node)
    assert runtime(node_of(graph, "reduce_scatter"), 2**20) == pytest.approx(seconds("reduce_scatter", 2**23) * 1e3)
    assert runtime(node_of(graph, "wait_tensor")) == 0


@pytest.mark.usefixtures("eight_ranks")
def test_a_group_that_nobody_knows_is_left_to_pytorch() -> None:
    graph = graph_of(collectives, torch.randn(1024, 64))
    reduction = node_of(graph, "all_reduce")
    torch.distributed.destroy_process_group()
    try:
        assert node_runtime("h100")(reduction) is None
        assert node_runtime("h100", ranks=8)(reduction) == pytest.approx(seconds("all_reduce", 1024 * 64 * 4) * 1e3)
        assert node_runtime("h100", ranks=12)(reduction) is None  # no whole nodes of eight
        assert node_runtime("p4")(node_of(graph, "all_gather")) is None  # no node comes with this board
    finally:
        torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())


def test_a_node_of_other_boards_is_refused() -> None:
    with pytest.raises(InputError, match="holds a100"):
        node_runtime("h100", node="dgx-a100")
    assert CollectiveTimes(H100, "hgx-h100").place == "hgx-h100"


# The memory budget


class Layers(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)).sin()
        return x


def products_in_backward(budget: float, estimator: Any) -> tuple[int, list[Any]]:
    """Products of the forward pass that the backward pass repeats, and the gradients."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    repeated = []

    def backward(graph: Any, _: Any) -> Any:
        repeated.append(sum(node.target is torch.ops.aten.addmm.default for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, batch = Layers(), torch.randn(64, 32)
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition
    )
    with functorch.patch(activation_memory_budget=budget, activation_memory_budget_runtime_estimator=estimator):
        torch.compile(model, backend=backend)(batch).sum().backward()
    return repeated[0], [parameter.grad for parameter in model.parameters()]


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_a_memory_budget_recomputes_by_our_times() -> None:
    estimator = budget_runtime("h100")
    nothing, gradients = products_in_backward(1.0, estimator)
    some, same_gradients = products_in_backward(0.5, estimator)
    assert nothing == 0 < some
    assert "aten::addmm" in {name for name, _, _ in estimator.times.priced}
    for gradient, same in zip(gradients, same_gradients, strict=True):
        torch.testing.assert_close(gradient, same)


def test_pytorchs_partitioner_asks_our_estimator() -> None:
    graph = graph_of(product, torch.randn(256, 128), torch.randn(128, 64))
    with functorch.patch(activation_memory_budget_runtime_estimator=budget_runtime("h100")):
        assert estimate_runtime(node_of(graph, "mm")) == pytest.approx(PRODUCT, rel=1e-12)
        assert estimate_runtime(node_of(graph, "aten.t")) == 0


def test_the_compilers_cache_tells_boards_apart_and_nothing_else() -> None:
    estimator = budget_runtime("h100")
    assert estimator.uuid() == budget_runtime("H100").uuid() != budget_runtime("a100").uuid()
    for hook in (op_runtime("h100"), node_runtime("h100")):
        before = pickle.dumps(hook)
        hook.times.milliseconds(("aten::mm", Inputs((matrix(8, 8), matrix(8, 8)), ("", "")), (matrix(8, 8),)))
        assert pickle.dumps(hook) == before
        assert pickle.loads(before).times.device == H100


# Nodes of the scheduler


def normed(x: Any) -> Any:
    return torch.layer_norm(x, (128,)) * 2


class Seen(Exception):
    """Ends a compilation before it writes code."""


@pytest.mark.usefixtures("eight_ranks")
def test_the_scheduler_asks_our_function() -> None:
    rows: list[tuple[str, float]] = []

    def watch(nodes: Any) -> Any:
        rows.extend(
            (str(getattr(node.node, "python_kernel_name", "")), comms.estimate_op_runtime(node)) for node in nodes
        )
        raise Seen

    @torch.compile
    def step(x: Any, w: Any) -> Any:
        group = torch.distributed.group.WORLD
        total = functional.all_reduce(x @ w, "sum", group)
        return total, normed(x)

    torch._dynamo.reset()
    settings = {"_post_fusion_custom_pass": watch, "estimate_op_runtime": op_runtime("h100"), "fx_graph_cache": False}
    with config.patch(settings), pytest.raises(Exception, match="Seen"):
        step(torch.randn(256, 128), torch.randn(128, 64))
    times = {name.split(".")[-2] if "." in name else name: time for name, time in rows}
    assert times["extern_kernels"] == pytest.approx(PRODUCT, rel=1e-12)
    assert times["all_reduce_"] == pytest.approx(seconds("all_reduce", 256 * 64 * 4) * 1e3)
    assert times["wait_tensor"] == 0
    # Eager mode has two kernels where the compiler writes one.
    runtime = node_runtime("h100")
    eager = [time for time in map(runtime, graph_of(normed, torch.randn(256, 128)).nodes) if time]
    assert len(eager) == 2
    assert 0 < times[""] < sum(eager)


# Other versions


def test_a_version_without_the_module_is_named() -> None:
    with pytest.raises(InputError, match=r"torch: PyTorch .*is for PyTorch 2\.13"):
        private("torch._inductor.nowhere", "nothing")
    with pytest.raises(InputError, match=r"is for PyTorch 2\.13"):
        private("torch._inductor.config", "nothing")
