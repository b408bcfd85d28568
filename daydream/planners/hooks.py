"""Functions that PyTorch's compiler asks for times: of scheduler nodes, of nodes of fx graphs.

All return milliseconds. ``torch._inductor.config.estimate_op_runtime``, ``custom_runtime_estimation`` of
``torch._inductor.config.aten_distributed_optimizations`` and
``torch._functorch.config.activation_memory_budget_runtime_estimator`` take them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from daydream.capture.pytorch.arguments import TYPE_NAMES, tensors_in
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.planners.collectives import CollectiveTimes, collective_kind
from daydream.planners.private import private, unsupported
from daydream.planners.times import COMMUNICATION, Call, OperatorTimes, hint

try:
    from torch._inductor.custom_graph_pass import CustomRuntimeEstimator
except ImportError as error:
    raise unsupported(error) from error

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: The name under which kernels are priced that the compiler writes: each distinct tensor is read or written once.
FUSED = "inductor::fused"


class BoardTimes:
    """Times of operators on a board, and of what it exchanges with the others of its node.

    Args:
        device: a board's name or its spec.
        node: name or file of the node that collectives run on; None takes the board's usual one.
        ranks: members of groups that ``torch.distributed`` does not know.

    Attributes:
        times: of operators.
        collectives: of collectives.

    Raises:
        InputError: there is no such board or node.
    """

    def __init__(self, device: str | DeviceSpec, *, node: str | None = None, ranks: int | None = None) -> None:
        self.times = OperatorTimes(device)
        self.collectives = CollectiveTimes(self.times.device, node, ranks)


# Nodes of fx graphs


class NodeTimes(BoardTimes):
    """A function for ``torch._inductor.config.aten_distributed_optimizations.custom_runtime_estimation``.

    It takes a node of an fx graph and, for collectives, bytes to take in place of those of its result; it returns
    milliseconds, and None for what PyTorch shall estimate itself: operators with graphs of their own, and collectives
    among a group of unknown size or one that does not fit the node. Waiting for a collective takes no time.
    """

    def __call__(self, fx_node: torch.fx.Node, override_size: int | None = None) -> float | None:
        """Milliseconds of a node, of a collective with a result of so many bytes; None where PyTorch shall say."""
        target = fx_node.target
        if fx_node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            return None
        if target.namespace in COMMUNICATION:
            return _collective(self.collectives, fx_node, target, override_size)
        return self.times.of_node(fx_node) if "val" in fx_node.meta else None


def _collective(
    collectives: CollectiveTimes, fx_node: torch.fx.Node, target: torch._ops.OpOverload, override_size: int | None
) -> float | None:
    name = target._schema.name
    if "wait_tensor" in name:
        return 0.0
    kind = collective_kind(name)
    values = torch.fx.node.map_arg(fx_node.args, lambda argument: argument.meta.get("val"))
    given = list(tensors_in(values[0])) if values else []
    if kind is None or not given:
        return None
    arguments = dict(zip((each.name for each in target._schema.arguments), values, strict=False)) | fx_node.kwargs
    size = arguments.get("group_size")
    ranks = hint(size) if size is not None else collectives.group_size(arguments.get("group_name"))
    if override_size is not None:
        return collectives.of_output(kind, override_size, ranks, given[0].dtype)
    held = sum(hint(tensor.numel()) * tensor.element_size() for tensor in given)
    return collectives.of_input(kind, held, ranks, given[0].dtype)


# The memory budget


class BudgetRuntime(CustomRuntimeEstimator):
    """An estimator for ``torch._functorch.config.activation_memory_budget_runtime_estimator``, in milliseconds.

    With ``activation_memory_budget`` below 1 the partitioner recomputes what costs least; this says what it costs.

    Args:
        device: a board's name or its spec.

    Raises:
        InputError: there is no such board.
    """

    def __init__(self, device: str | DeviceSpec) -> None:
        self.times = OperatorTimes(device)

    def __call__(self, node: torch.fx.Node) -> float:
        """Milliseconds of a node; 0 for views and for what has no price."""
        return self.times.of_node(node)

    def uuid(self) -> str:
        """What the compiler's cache tells graphs of one board from those of another by."""
        return f"roller {hashlib.sha256(repr(self.times.device).encode()).hexdigest()}"


# Nodes of the scheduler


class SchedulerTimes(BoardTimes):
    """A function for ``torch._inductor.config.estimate_op_runtime``.

    It takes a node of TorchInductor's scheduler and returns milliseconds. Kernels of libraries are priced by the ATen
    operator that they come from, templates too, without what was fused to them; kernels that the compiler writes by the
    bytes that they read and write, as the scheduler counts them; collectives by what the node's boards exchange. What
    remains has PyTorch's own estimate.
    """

    def __call__(self, snode: Any) -> float:
        """Milliseconds of a node of the scheduler, fused and grouped ones included."""
        utils = "torch._inductor.utils"
        if isinstance(snode, private("torch._inductor.scheduler", "GroupedSchedulerNode")):
            return float(sum(self(member) for member in snode.snodes))
        if isinstance(snode, private("torch._inductor.scheduler", "NopKernelSchedulerNode")):
            return 0.0
        if private(utils, "is_wait")(snode.node):
            return 0.0
        if private(utils, "is_collective")(snode.node):
            time = self._collective(snode.node)
            return float(snode.get_estimated_runtime()) if time is None else time
        called = [member for member in snode.get_nodes() if member.is_extern() or member.is_template()]
        if called:
            return sum(self._called(member) for member in called)
        return self.times.milliseconds(fused_call(snode))

    def _called(self, snode: Any) -> float:
        if isinstance(snode.node, private("torch._inductor.ir", "MultiOutput")):
            return 0.0
        origin = origin_of(snode.node)
        return float(snode.get_estimated_runtime()) if origin is None else self.times.of_node(origin)

    def _collective(self, kernel: Any) -> float | None:
        kind = collective_kind(str(kernel.python_kernel_name))
        if kind is None or not kernel.inputs:
            return None
        held = private("torch._inductor.comm_analysis", "get_collective_input_size_bytes")(kernel)
        ranks = self.collectives.group_size(kernel.constant_args[-1])
        return self.collectives.of_input(kind, held, ranks, kernel.inputs[0].get_dtype())


def origin_of(kernel: Any) -> torch.fx.Node | None:
    """The node of the fx graph that a library's kernel or a template computes; None where that is unknown.

    A product whose result is exchanged in place says that it comes from the exchange; it is told by its name.
    """
    nodes = [
        node
        for node in (kernel.get_origin_node(), *kernel.origins)
        if node is not None and isinstance(node.target, torch._ops.OpOverload) and "val" in node.meta
    ]
    operators = [node for node in nodes if node.target.namespace not in COMMUNICATION]
    words = str(getattr(kernel, "python_kernel_name", "")).split(".")
    named = [node for node in operators if node.target._schema.name.rpartition("::")[2] in words]
    return next(iter([*named, *operators]), None)


def fused_call(snode: Any) -> Call | None:
    """A kernel that the compiler writes, as a call that reads and writes so many elements; None where it does neither.

    Its buffers are flat: of each so many elements as the scheduler counts, which are fewer than it has where the kernel
    takes a part.
    """
    graph = private("torch._inductor.virtualized", "V").graph
    counted = snode.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    written = {dependency.name for dependency in snode.read_writes.writes}
    reads: list[RecordedTensor] = []
    writes: list[RecordedTensor] = []
    for name, held in counted.items():
        dtype = graph.get_dtype(name)
        elements = int(np.ceil(held / dtype.itemsize))
        tensor = RecordedTensor((elements,), TYPE_NAMES.get(dtype, str(dtype)), (1,))
        if elements:
            (writes if name in written else reads).append(tensor)
    if not reads and not writes:
        return None
    return FUSED, Inputs(tuple(reads), ("",) * len(reads)), tuple(writes)


#: What PyTorch's settings are given, by names that say what for.
node_runtime, budget_runtime, op_runtime = NodeTimes, BudgetRuntime, SchedulerTimes
