"""Automatic mixed precision (thesis 4.5.1 and table 4.1; Micikevicius et al.): shorter kernels in half precision."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from daydream.graph.edit import Edit
from daydream.graph.graph import Dependency, Mark, Phase, TaskGraph, TaskKind, matching
from daydream.operators.autocast import keeps_single
from daydream.operators.pricing import CallPrice, Prices, describe_calls, device_of, is_auxiliary
from daydream.operators.pricing import price as price_of
from daydream.passes import Outcome, what_if
from daydream.passes.basis.bytes import changed_memory, memory_of
from daydream.passes.basis.halves import halved
from daydream.trace.trace import NONE, Floats, Ints
from hal.support.errors import InputError

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: Kernels that are bound by arithmetic, by name (4.5.1: "e.g., sgemm, conv").
COMPUTE = re.compile(
    r"gemm|conv(?!ert)|xmma|cutlass|wgrad|dgrad|fprop|winograd|scudnn|attention|flash_|fmha|gemv|_dot_", re.IGNORECASE
)

#: Kernels that compute in half precision already.
HALF = re.compile(r"half|bfloat16|bf16|fp16|f16f16|h884|h1688|h16816|s884|s16816gemm_f16|hgemm|hmma", re.IGNORECASE)

#: Kernels that use Tensor Cores already, with float32 operands.
TF32 = re.compile(r"tf32|s1688gemm|s16816gemm(?!_f16|_bf16)", re.IGNORECASE)

#: Kernels whose elements are no floating-point numbers: their types and table of indices stay as they are.
INTEGER = re.compile(r"offsets?kernel|<(?:long|int|bool|unsigned char)\b", re.IGNORECASE)

NCCL = re.compile(r"nccl", re.IGNORECASE)

#: Kernels of operators that autocast keeps in float32, by name.
SINGLE = re.compile(r"softmax|layer_?norm|group_?norm|RowwiseMoments|nll_?loss|cross_entropy", re.IGNORECASE)

#: Bytes moved per element that becomes half precision: 4 read and 2 written.
CAST_BYTES = 6


@dataclass(frozen=True)
class _Chosen:
    """The GPU tasks that change, by what bounds them, and what is known of their operators."""

    rows: Ints
    compute: NDArray[np.bool_]
    by_model: NDArray[np.bool_]
    calls: Prices | None


@what_if("amp")
def amp(
    graph: TaskGraph,
    *,
    compute_factor: float = 3.0,
    memory_factor: float = 2.0,
    tf32_factor: float = 2.0,
    communication_factor: float = 1.0,
    update: bool = False,
    device: str = "auto",
    tensor_cores: str = "auto",
    price: bool = False,
    casts: bool = False,
    single: bool = True,
) -> Outcome:
    """Mixed precision: compute-bound kernels three times as fast, memory-bound ones twice.

    A kernel is compute-bound where its operator's arithmetic at the board's sustained rate takes longer than moving
    its tensors, in float32; without recorded sizes its name decides, as in the paper. Auxiliary kernels of a
    convolution (layouts, transforms) are memory-bound. Unlike the paper, what cannot gain stays: kernels that run in
    half precision already, integer kernels, copies to and from the host, the update, which keeps float32 weights, and
    what autocast keeps in float32, forward and backward: softmax, losses, layer and group norms, exponentials, sums
    (batch norms and element-wise operators run in half precision). ``single=no`` shortens these too, as the paper does.

    Feature maps that other operators make take half the bytes, indices and masks what they did. Weights get copies in
    half precision besides, and so does the batch where a product or convolution reads it; autocast keeps them until the
    backward pass needs them.

    Assumptions: the factors hold for every kernel; nothing overflows.

    Args:
        graph: the baseline.
        compute_factor: speedup of compute-bound kernels (NVIDIA reports up to 3 with Tensor Cores).
        memory_factor: speedup of memory-bound kernels: half the bytes.
        tf32_factor: speedup of compute-bound kernels that use Tensor Cores by way of TF32.
        communication_factor: speedup of collectives; 2 where gradients travel in half precision.
        update: whether the weight update runs in half precision too.
        device: the board, for the bound and for Tensor Cores; ``auto`` is the one recorded on.
        tensor_cores: ``auto`` looks at the board; ``yes`` or ``no``. Without them compute-bound kernels keep their
            durations.
        price: instead of the factors, the ratio of Roller's library estimates in float32 and float16, per operator
            with known sizes.
        casts: adds the kernels that cast the weights of each matrix product and convolution to half precision in the
            forward pass (autocast); the paper adds none.
        single: whether operators that autocast keeps in float32 keep their durations.

    Raises:
        InputError: a factor is not positive, or the board is unknown.
    """
    factors = {"compute-factor": compute_factor, "memory-factor": memory_factor, "tf32-factor": tf32_factor}
    _check({**factors, "communication-factor": communication_factor}, tensor_cores)
    spec, notes = _board(graph, device, needed=price or casts)
    if tensor_cores == "auto" and spec is not None and spec.best_matrix_instruction("float16") is None:
        tensor_cores = "no"
        notes.append(f"{spec.title} has no Tensor Cores: compute-bound kernels keep their durations")
    if tensor_cores == "no":
        compute_factor = tf32_factor = 1.0
    chosen = _choose(graph, spec, update)
    if single:
        chosen, kept = _without_single(graph, chosen)
        notes = [*kept, *notes]
    factor = _factors(graph, chosen, compute_factor, memory_factor, tf32_factor)
    if price and spec is not None:
        notes.append(_use_prices(graph, chosen, spec, factor, tensor_cores != "no"))
    changed = _with_collectives(graph.scaled(chosen.rows, 1 / factor), communication_factor, notes)
    notes = [*_told(graph, chosen, factor), *notes]
    if casts and spec is not None:
        changed, note = _with_casts(changed, chosen, spec)
        notes.append(note)
    before = memory_of(graph)
    changed, told, gain = changed_memory(changed, before, before and halved(graph, before, single))
    return Outcome(changed, (*notes, *told), gain)


def _check(factors: dict[str, float], tensor_cores: str) -> None:
    for name, value in factors.items():
        if not (np.isfinite(value) and value > 0):
            raise InputError(name, f"{value} is no speedup", "give a positive number; 1 changes nothing")
    if tensor_cores not in ("auto", "yes", "no"):
        raise InputError("tensor-cores", f"there is no {tensor_cores!r}", "use auto, yes or no")


def _board(graph: TaskGraph, device: str, *, needed: bool) -> tuple[DeviceSpec | None, list[str]]:
    """The board and what to say about it. Without one names decide alone, which is no error where that suffices."""
    try:
        spec, stands_in = device_of(graph, device)
    except InputError as error:
        if needed or device != "auto":
            raise
        return None, [f"{error.problem}; kernels are told apart by name alone, Tensor Cores supposed"]
    return spec, [stands_in] if stands_in else []


def _choose(graph: TaskGraph, spec: DeviceSpec | None, update: bool) -> _Chosen:
    texts = graph.names
    skipped = np.array(
        [bool(HALF.search(t) or INTEGER.search(t) or NCCL.search(t)) for t in texts] or [False], np.bool_
    )
    wanted = graph.on_gpu & (graph.kind == TaskKind.KERNEL) & (graph.mark == Mark.NONE) & ~skipped[graph.name]
    if not update:
        wanted &= graph.phase != Phase.UPDATE
    rows = np.flatnonzero(wanted)
    by_name = np.array([bool(COMPUTE.search(t)) and not is_auxiliary(t) for t in texts] or [False], np.bool_)
    compute, by_model = by_name[graph.name[rows]], np.zeros(len(rows), np.bool_)
    if spec is None or graph.trace is None:
        return _Chosen(rows, compute, by_model, None)
    calls = describe_calls(graph, rows, spec)
    kinds = np.array([call.work.kind if call.work is not None else "" for call in calls.calls] or [""])[calls.call]
    heavy = np.isin(kinds, ("convolution", "matrix product"))
    bounds = np.array([call.bound for call in calls.calls] or [""])[calls.call]
    main = ~np.array([is_auxiliary(t) for t in texts] or [False], np.bool_)[graph.name[rows]]
    by_model = kinds != ""
    compute = np.where(by_model, (bounds == "compute") & (main | ~heavy), compute)
    gains = np.array([_gains(call) for call in calls.calls] or [True], np.bool_)[calls.call]
    narrowed = Prices(rows[gains], calls.calls, calls.call[gains], calls.microseconds[gains])
    return _Chosen(rows[gains], compute[gains], by_model[gains], narrowed)


def _single(graph: TaskGraph, rows: Ints) -> NDArray[np.bool_]:
    """Which GPU tasks autocast leaves in float32: by their operator, without one by their name."""
    by_name = np.array([bool(SINGLE.search(text)) for text in graph.names] or [False], np.bool_)[graph.name[rows]]
    if graph.trace is None:
        return by_name
    kept = np.array([keeps_single(name) for name in graph.trace.names] or [False], np.bool_)
    operator = graph.operator[rows]
    return np.where(operator == NONE, by_name, kept[graph.trace.name[operator]])


def _without_single(graph: TaskGraph, chosen: _Chosen) -> tuple[_Chosen, list[str]]:
    """The choice without what autocast keeps in float32, and what to say of that."""
    gains = ~_single(graph, chosen.rows)
    if gains.all():
        return chosen, []
    calls = chosen.calls
    narrowed = (
        None if calls is None else Prices(calls.rows[gains], calls.calls, calls.call[gains], calls.microseconds[gains])
    )
    time = graph.duration_us[chosen.rows[~gains]].sum() / 1e3
    note = f"{(~gains).sum()} kernels of {time:.1f} ms stay in float32 as autocast has it: softmax, losses, norms"
    return _Chosen(chosen.rows[gains], chosen.compute[gains], chosen.by_model[gains], narrowed), [note]


def _gains(call: CallPrice) -> bool:
    """Whether an operator has float32 tensors to make smaller; where nothing is known, it does."""
    return call.work.dtype == "float32" if call.work is not None else not call.reason.startswith("elements of type")


def _factors(graph: TaskGraph, chosen: _Chosen, compute: float, memory: float, tf32: float) -> Floats:
    """The speedup of every chosen task."""
    on_matrix_units = np.array([bool(TF32.search(text)) for text in graph.names] or [False], np.bool_)
    of_compute = np.where(on_matrix_units[graph.name[chosen.rows]], tf32, compute)
    return np.where(chosen.compute, of_compute, memory)


def _use_prices(graph: TaskGraph, chosen: _Chosen, spec: DeviceSpec, factor: Floats, matrix_units: bool) -> str:
    """Puts Roller's ratio in place of the factor wherever it has both estimates; says for how many."""
    if chosen.calls is None:
        return "no operator has a ratio of its own: the graph was not made from a trace"
    single = price_of(graph, chosen.rows, spec, "library", dtype="float32").microseconds
    half = price_of(graph, chosen.rows, spec, "library", dtype="float16").microseconds
    has_prices = np.isfinite(single) & np.isfinite(half) & (half > 0) & (single > 0)
    has_prices &= matrix_units | ~chosen.compute
    factor[has_prices] = single[has_prices] / half[has_prices]
    share = f"{has_prices.sum()} of {len(has_prices)} kernels"
    return f"{share} take Roller's ratio of library times on {spec.title}, float32 over float16, instead"


def _told(graph: TaskGraph, chosen: _Chosen, factor: Floats) -> list[str]:
    """What was chosen, how, and how much shorter it is."""
    notes = []
    for title, of_kind in (("compute", chosen.compute), ("memory", ~chosen.compute)):
        before = graph.duration_us[chosen.rows[of_kind]]
        after = float((before / factor[of_kind]).sum())
        gain = f", {before.sum() / after:.2f}x" if after > 0 else ""
        by_model = int(chosen.by_model[of_kind].sum())
        notes.append(
            f"{of_kind.sum()} {title}-bound kernels of {before.sum() / 1e3:.1f} ms take {after / 1e3:.1f} ms{gain}"
            f" ({by_model} by their operators' sizes, {of_kind.sum() - by_model} by name)"
        )
    kernels = (graph.kind == TaskKind.KERNEL) & graph.on_gpu
    kept = int(kernels.sum()) - len(chosen.rows)
    return [*notes, f"{kept} kernels keep their durations: update, half precision, integers, float32, collectives"]


def _with_collectives(graph: TaskGraph, factor: float, notes: list[str]) -> TaskGraph:
    """The graph with faster collectives, and a note of how many there are."""
    if factor == 1.0:
        return graph
    named = matching(graph.names, NCCL.pattern)[graph.name]
    rows = np.flatnonzero((graph.kind == TaskKind.COMMUNICATION) | (graph.on_gpu & named))
    notes.append(f"{len(rows)} collectives {factor:g}x")
    return graph.scaled(rows, 1 / factor)


# Casts


def _with_casts(graph: TaskGraph, chosen: _Chosen, spec: DeviceSpec) -> tuple[TaskGraph, str]:
    """Before every forward product its weights' cast, which autocast keeps for the backward pass."""
    edit, added, total = Edit(graph), 0, 0.0
    launches = graph.launch[graph.on_gpu & (graph.kind == TaskKind.KERNEL)]
    durations = graph.duration_us[launches[launches != NONE]]
    call_us = float(np.median(durations)) if len(durations) else 0.0
    for call in chosen.calls.calls if chosen.calls is not None else ():
        elements = _weights(call) if graph.phase[call.main] != Phase.BACKWARD and _gains(call) else 0
        if not elements:
            continue
        seconds = CAST_BYTES * elements / spec.dram.bandwidth_bytes_per_second + spec.launch_overhead_seconds
        first = int(call.rows[0])
        shared = {"phase": int(graph.phase[first]), "layer": int(graph.layer[first])}
        task = edit.add("cast weights to half", TaskKind.KERNEL, seconds * 1e6, before=first, **shared)
        if graph.launch[first] != NONE:
            launch = edit.add("cudaLaunchKernel", TaskKind.CPU, call_us, before=int(graph.launch[first]), **shared)
            edit.depend(launch, task, Dependency.LAUNCH)
        added, total = added + 1, total + seconds
    return edit.apply(), f"{added} casts of weights added, {total * 1e3:.2f} ms on the GPU, {call_us:.1f} µs per launch"


def _weights(call: CallPrice) -> int:
    """Elements of the weights of a forward convolution or plain matrix product; 0 of anything else."""
    if call.work is None or call.work.direction != "forward":
        return 0
    data = call.work.parts[0].data
    if data.get("op") == "conv2d":
        return int(data["f"] * data["c"] // data["groups"] * data["kh"] * data["kw"])
    return int(data["k"] * data["n"]) if data.get("op") == "matmul" else 0
