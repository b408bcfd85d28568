"""Kinds of kernels by their names, operators and layers (thesis 4.4.4: select by keyword and by layer).

Names are those of cuDNN, cuBLAS, CUTLASS, ATen and Triton, and AMD's of MIOpen, Tensile, composable kernel and
AOTriton. A name that says nothing is judged by the operator that launched it, then by its layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from daydream.graph.graph import Dependency, Phase, TaskGraph, TaskKind, matching
from daydream.operators.inputs import RecordedTensor, inputs_of
from daydream.trace.trace import NONE, Category, Ints

Mask = NDArray[np.bool_]

_CONVOLUTION = re.compile(
    r"conv(?!ert)|[shb]cudnn_|winograd|[dw]grad(?!ient)|fprop|im2col|im2d2col|gcgemm|fft2d|cudnn::cnn"
    r"|igemm_(fwd|bwd|wrw)",
    re.I,
)
_GEMM = re.compile(
    r"gemm|gemv|nvjet|Cijk_|wgmma|(?<!sub)tensorop|cublas(?!.*split_?k_?reduce)|wvsplitk|matmul_kernel", re.I
)
_ATTENTION = re.compile(
    r"flash_(fwd|bwd|attn)|fmha|mha_(fwd|bwd)|attention_kernel|fused_attention|attn_(fwd|bwd)|unified_attention"
    r"|bwd_kernel_(dk_?dv|dq|fuse)|attn_bwd",
    re.I,
)
_MOVES_DATA = re.compile(
    r"split_?k_?reduce|winograd\w*(data|filter|output|delta|tiles)|im2col|im2d2col|fft2d|nchwtonhwc|nhwctonchw"
    r"|batched_transpose|transpose_(nchw|cnhw|packed)|subtensorop|reduce_wgrad|computeoffsets|computeb?w?\w*offsets"
    r"|elementwise|reduce_kernel|rocclr|postgsu|bwd_preprocess",
    re.I,
)
_BATCHNORM = re.compile(r"bn_fw|bn_bw|bn_inf|batch_?norm", re.I)
_POOLING = re.compile(r"pool(?!ed)", re.I)
_RELU = re.compile(r"relu|clamp_min|clamp_scalar|threshold", re.I)
_ELEMENTWISE = re.compile(r"elementwise|pointwise|multi_tensor_apply|triton_poi_|fused_dropout", re.I)
_FUSED_OPTIMIZER = re.compile(
    r"(adam|adamw|sgd|lamb|adagrad)\w*functor|fused_?(adam|sgd|adagrad|lamb)|rowwise_adagrad", re.I
)

#: What :func:`is_elementwise` looks for, as a regular expression regardless of case.
ELEMENTWISE = _ELEMENTWISE.pattern


def is_convolution(name: str) -> bool:
    """Kernels of a convolution by name alone; a GEMM that a convolution launches is recognised by its operator."""
    return _CONVOLUTION.search(name) is not None and not _ELEMENTWISE.search(name)


def is_gemm(name: str) -> bool:
    """Matrix multiplications, those that a convolution names as such excepted."""
    return _GEMM.search(name) is not None and not is_convolution(name) and not _ELEMENTWISE.search(name)


def is_batchnorm(name: str) -> bool:
    """Batch normalisation, forward and backward."""
    return _BATCHNORM.search(name) is not None


def is_relu(name: str) -> bool:
    """ReLU and its gradient. cuDNN's "relu" in the name of a convolution only says that it could apply one."""
    return _RELU.search(name) is not None and not (is_convolution(name) or is_gemm(name) or is_batchnorm(name))


def is_pooling(name: str) -> bool:
    """Pooling, forward and backward."""
    return _POOLING.search(name) is not None


def is_elementwise(name: str) -> bool:
    """Element-wise kernels, those over lists of tensors included."""
    return _ELEMENTWISE.search(name) is not None


def is_fused_optimizer(name: str) -> bool:
    """Optimizer kernels that do the whole update of a parameter at once."""
    return _FUSED_OPTIMIZER.search(name) is not None


def is_within_device(name: str) -> bool:
    """Copies from a board's memory to its own."""
    return "DtoD" in name or "Device -> Device" in name or name.startswith("__amd_rocclr_copyBuffer")


def is_compute_bound(name: str) -> bool:
    """GEMMs, convolutions and fused attention; not the transformations of layout and tile around them."""
    by_name = is_gemm(name) or is_convolution(name) or _ATTENTION.search(name) is not None
    return by_name and not _MOVES_DATA.search(name)


def operands(name: str) -> int:
    """Number of tensors that an element-wise kernel reads and writes.

    ATen's kernels say so in their name (``Array<char*, 3>``: two read, one written). Otherwise 3 where the name is
    that of a sum or product of two tensors, else 2.

    >>> operands("vectorized_elementwise_kernel<4, Array<char*, 3> >"), operands("relu")
    (3, 2)
    """
    match = re.search(r"Array<char ?\*, ?(\d+)", name)
    if match:
        return max(int(match[1]), 1)
    return 3 if re.search(r"binary|add|sub|mul(?!ti)|div", name, re.I) else 2


def named(graph: TaskGraph, predicate: Callable[[str], bool]) -> Mask:
    """For each task whether its name satisfies a predicate, which sees every distinct name once."""
    return np.array([predicate(name) for name in graph.names], np.bool_)[graph.name]


# Operators around a task


def outermost_operator(graph: TaskGraph, rows: Ints, wanted: Mask) -> Ints:
    """For each of these tasks the outermost CPU event around it that is `wanted` (by trace row), -1 without."""
    operators = np.full(len(rows), NONE)
    event = graph.operator[rows]
    while (live := event != NONE).any():
        hit = live & wanted[event]
        operators[hit] = event[hit]
        event = np.where(live, graph.enclosing[event], NONE)
    return operators


def operators_named(graph: TaskGraph, pattern: str) -> Mask:
    """For each trace row whether it is an operator of such a name.

    Autograd's wrapper around a backward function is not: sums of gradients run inside it, besides the function.
    """
    trace = graph.trace
    if trace is None:
        return np.zeros(len(graph.enclosing), np.bool_)
    fits = matching(trace.names, pattern) & ~matching(trace.names, r"^autograd::engine")
    return fits[trace.name] & (trace.category == Category.OPERATOR)


def host_of(graph: TaskGraph, rows: Ints) -> Ints:
    """CPU tasks of the operators that launch nothing but these GPU tasks, and their launches.

    Removing an operation altogether spares its operators' time too, not the launch alone.
    """
    calls = graph.launch[rows]
    calls = np.setdiff1d(calls[calls != NONE], graph.launch[np.setdiff1d(np.flatnonzero(graph.on_gpu), rows)])
    trace = graph.trace
    if trace is None or not len(rows):
        return calls
    every = np.flatnonzero(graph.on_gpu)
    gone = _launched_within(graph, every) == _launched_within(graph, rows)
    gone &= (_launched_within(graph, rows) > 0) & (trace.category == Category.OPERATOR)
    tasks = np.flatnonzero(graph.on_cpu & (graph.kind == TaskKind.CPU) & (graph.operator != NONE))
    inside = tasks[outermost_operator(graph, tasks, gone) != NONE]
    return np.union1d(calls, inside)


def idle_hosts(graph: TaskGraph, gone: Ints) -> Ints:
    """CPU tasks of the update that have nothing left to do without these GPU tasks: all but those that launch what
    stays or wait."""
    launches = graph.edge_kind == Dependency.LAUNCH
    gone_mask = np.zeros(len(graph), np.bool_)
    gone_mask[gone] = True
    busy = graph.edge_source[launches & ~gone_mask[graph.edge_target]]
    waits = graph.edge_target[graph.edge_kind == Dependency.SYNC]
    hosts = graph.select(kind=TaskKind.CPU, gpu=False, phase=Phase.UPDATE)
    launched = graph.edge_source[launches & gone_mask[graph.edge_target]]
    return np.setdiff1d(np.union1d(hosts, launched), np.union1d(busy, waits))


def _launched_within(graph: TaskGraph, rows: Ints) -> Ints:
    """For each trace row how many of these GPU tasks were launched inside it."""
    count = np.zeros(len(graph.enclosing), np.int64)
    event = graph.operator[rows]
    while len(event := event[event != NONE]):
        count += np.bincount(event, minlength=len(count))
        event = graph.enclosing[event]
    return count


# Roles


class Role(IntEnum):
    """Role of a GPU task, as far as the passes need to know."""

    OTHER = 0
    CONVOLUTION = 1
    BATCHNORM = 2
    RELU = 3
    POOLING = 4


_BY_NAME = {
    Role.CONVOLUTION: is_convolution,
    Role.POOLING: is_pooling,
    Role.RELU: is_relu,
    Role.BATCHNORM: is_batchnorm,
}
_BY_OPERATOR = {
    Role.CONVOLUTION: r"conv(?!ert)",
    Role.BATCHNORM: r"batch_?norm",
    Role.RELU: r"relu|threshold",
    Role.POOLING: r"pool(?!ed)",
}
_RELU_OPERATOR = r"relu|threshold|clamp_min|hardtanh"
_BY_LAYER = {
    # The innermost module decides: "conv_block.bn1" is a batch normalisation.
    Role.CONVOLUTION: r"(^|[./])[^./]*conv(?!ert)[^./]*$",
    Role.BATCHNORM: r"(^|[./])[^./]*(batch_?norm|(?<![a-z])bn)[^./]*$",
    Role.RELU: r"(^|[./])[^./]*relu[^./]*$",
    Role.POOLING: r"(^|[./])[^./]*pool[^./]*$",
}


def roles(graph: TaskGraph) -> Ints:
    """The :class:`Role` of each task: by its name, else by the operators around it, without operator by its layer.

    A kernel with an operator that says nothing is not judged by its layer: sums of gradients and moving averages
    are counted to layers, too. CPU tasks, copies and collectives are OTHER.
    """
    role = np.zeros(len(graph), np.int64)
    for kind, predicate in _BY_NAME.items():
        role[named(graph, predicate)] = kind
    candidates = graph.on_gpu & np.isin(graph.kind, (TaskKind.KERNEL, TaskKind.MEMSET))
    role[~candidates] = Role.OTHER
    if graph.trace is not None:
        # A clamp is a ReLU only where the operator says so: gradients and probabilities are clamped, too.
        rows = np.flatnonzero((role == Role.RELU) & (graph.operator != NONE))
        meant = outermost_operator(graph, rows, operators_named(graph, _RELU_OPERATOR)) != NONE
        role[rows[~meant]] = Role.OTHER
        for kind, pattern in _BY_OPERATOR.items():
            open_rows = np.flatnonzero(candidates & (role == Role.OTHER))
            inside = outermost_operator(graph, open_rows, operators_named(graph, pattern)) != NONE
            role[open_rows[inside]] = kind
    for kind, pattern in _BY_LAYER.items():
        fits = np.append(matching(graph.layers, pattern), False)[graph.layer]
        role[candidates & (role == Role.OTHER) & (graph.operator == NONE) & fits] = kind
    return role


@dataclass(frozen=True, eq=False)
class LayerRun:
    """Neighbouring tasks of one stream that belong to one call of a layer, in row order."""

    rows: Ints
    step: int
    layer: int

    @property
    def first(self) -> int:
        """Row of its first task."""
        return int(self.rows[0])

    @property
    def last(self) -> int:
        """Row of its last task."""
        return int(self.rows[-1])


def layer_runs(graph: TaskGraph, role: Ints, wanted: Role, phase: Phase) -> list[LayerRun]:
    """The calls of layers of this role in a phase: runs of tasks with one step, layer and outermost operator."""
    rows = graph.by_thread[graph.on_gpu[graph.by_thread]]
    chosen = (role[rows] == wanted) & (graph.phase[rows] == phase)
    if not chosen.any():
        return []
    owner = outermost_operator(graph, rows, operators_named(graph, _BY_OPERATOR[wanted]))
    keys = np.stack([graph.thread[rows], graph.step[rows], graph.layer[rows], owner, chosen])
    fresh = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))
    starts = np.flatnonzero(fresh)
    runs = []
    for begin, end in zip(starts, np.append(starts[1:], len(rows)), strict=True):
        if chosen[begin]:
            row = rows[begin]
            runs.append(LayerRun(rows[begin:end], int(graph.step[row]), int(graph.layer[row])))
    return sorted(runs, key=lambda run: run.first)


def backward_of(forward: list[LayerRun], backward: list[LayerRun]) -> list[LayerRun | None]:
    """For each forward call the backward one: the backward pass runs through the calls of a layer in reverse.

    Within each step the calls of a layer are matched by the layer's name; where a step's backward calls have no
    layer names in common with its forward ones, all calls are, provided there are equally many. What begins before the
    forward call has ended, as in a damaged trace, answers nothing.
    """
    partners: list[LayerRun | None] = [None] * len(forward)
    for step in {run.step for run in forward}:
        of_step = [i for i, run in enumerate(forward) if run.step == step]
        theirs = [run for run in backward if run.step == step]
        shared = {forward[i].layer for i in of_step} & {run.layer for run in theirs} - {NONE}
        if not shared:
            if len(of_step) == len(theirs):
                for i, run in zip(of_step, reversed(theirs), strict=True):
                    partners[i] = run
            continue
        for layer in shared:
            calls = [i for i in of_step if forward[i].layer == layer]
            answers = [run for run in reversed(theirs) if run.layer == layer]
            for i, run in zip(calls, answers, strict=False):
                partners[i] = run
    return [
        answer if answer is not None and call.last < answer.first else None
        for call, answer in zip(forward, partners, strict=True)
    ]


def preceding(graph: TaskGraph) -> Ints:
    """For each task the one before it on its ordered thread, -1 without."""
    before = np.full(len(graph), NONE)
    rows = np.flatnonzero(graph.following != NONE)
    before[graph.following[rows]] = rows
    return before


# Typical values of a graph


def launch_us(graph: TaskGraph, default: float = 5.0) -> float:
    """Median duration of the CPU calls that launch kernels, microseconds; `default` where the graph has none."""
    calls = np.unique(graph.edge_source[graph.edge_kind == Dependency.LAUNCH])
    return float(np.median(graph.duration_us[calls])) if len(calls) else default


def launch_latency_us(graph: TaskGraph) -> float:
    """Median time from the end of a launch call to the earliest start of its kernel, microseconds."""
    lags = graph.edge_lag_us[graph.edge_kind == Dependency.LAUNCH]
    return float(np.median(lags)) if len(lags) else 0.0


def tensors(graph: TaskGraph, operator: int) -> list[RecordedTensor]:
    """The tensors that an operator (a trace row) got, as far as recorded; those in lists are left out."""
    if graph.trace is None or operator == NONE:
        return []
    inputs = inputs_of(graph.trace, operator)
    return [tensor for tensor in inputs.tensors if tensor is not None] if inputs is not None else []


def renamed(graph: TaskGraph, rows: Ints, name: str) -> TaskGraph:
    """The graph with another name for these tasks."""
    names = graph.names if name in graph.names else (*graph.names, name)
    changed = graph.name.copy()
    changed[rows] = names.index(name)
    return replace(graph, names=names, name=changed)
