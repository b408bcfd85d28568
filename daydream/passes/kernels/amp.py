"""Automatic mixed precision (thesis 4.5.1 and table 4.1; Micikevicius et al.): shorter kernels in half precision."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from daydream.graph.edit import Edit
from daydream.graph.graph import Mark, Phase, TaskGraph, TaskKind, matching
from daydream.operators.pricing import Prices, describe_calls, device_of, is_auxiliary
from daydream.operators.pricing import price as price_of
from daydream.passes import Outcome, what_if
from daydream.passes.basis.bytes import changed_memory, memory_of
from daydream.passes.basis.casts import add_casts, has_single, stays_single
from daydream.passes.basis.gradients import Gradients, find_gradients
from daydream.passes.basis.halves import halved
from daydream.passes.basis.idioms import named
from daydream.passes.basis.narrow import is_mixed, narrow, of_integers
from daydream.passes.basis.scaler import SCALER, add_scaler
from daydream.trace.collectives import is_collective_name
from daydream.trace.trace import NONE, Floats, Ints
from hal.support.errors import InputError

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec
    from hal.spec.parts import Throughput

#: Kernels that are bound by arithmetic, by name (4.5.1: "e.g., sgemm, conv").
COMPUTE = re.compile(
    r"gemm|conv(?!ert)|xmma|cutlass|wgrad|dgrad|fprop|winograd|scudnn|attention|attn_|flash_|fmha|gemv|_dot_|cijk_|nvjet|bwd_kernel_d",
    re.IGNORECASE,
)

#: Kernels that use Tensor Cores already, with float32 operands.
TF32 = re.compile(r"tf32|s1688gemm|s16816gemm(?!_f16|_bf16)", re.IGNORECASE)

#: Kernels whose elements are no floating-point numbers: their types and table of indices stay as they are.
INTEGER = re.compile(r"offsets?kernel|<(?:long|int|bool|unsigned char)\b", re.IGNORECASE)

#: Kernels of the weight update by name: they work on parameters in float32.
_OVER_LISTS = re.compile(r"multi_?tensor_?apply|fused_?(adam|sgd|lamb|adagrad)", re.IGNORECASE)

#: The paper's speedup of compute-bound kernels.
_COMPUTE = 3.0

#: A reduction that takes longer than its bytes by this factor is bound by something else.
_SLOWER = 2.0


@dataclass(frozen=True)
class _Chosen:
    """The GPU tasks that change, by what bounds them, and what is known of their operators."""

    rows: Ints
    compute: NDArray[np.bool_]
    by_model: NDArray[np.bool_]
    calls: Prices | None

    def some(self, chosen: NDArray[np.bool_]) -> _Chosen:
        """The tasks that are kept."""
        calls = self.calls
        if calls is not None:
            calls = Prices(calls.rows[chosen], calls.calls, calls.call[chosen], calls.microseconds[chosen])
        return _Chosen(self.rows[chosen], self.compute[chosen], self.by_model[chosen], calls)


@what_if("amp")
@dataclass(frozen=True, kw_only=True)
class Amp:
    """Mixed precision: products in half precision, memory-bound kernels twice as fast, casts and GradScaler added.

    A kernel is compute-bound where its operator's arithmetic at the board's sustained rate takes longer than moving
    its tensors, in float32; without recorded sizes its name decides, as in the paper. Auxiliary kernels of a
    convolution (layouts, transforms) are memory-bound. Matrix products and convolutions with known sizes on a known
    board gain what Roller's library models say of it, other compute-bound kernels three times, as in the paper.
    A float32 product that was recorded slower than its price ran on a board at its power limit, as far as the board's
    file knows that limit: then it is compared with the price there. A reduction that took more than twice what its
    bytes take saves the time of half its bytes alone.

    Unlike the paper, what cannot gain stays: kernels that run in half precision already (by name, or by the recorded
    types of their operators; all of them where the step's products do), integer kernels, copies to and from the host,
    the update, which keeps float32 weights, and what autocast keeps in float32, forward and backward: softmax, losses,
    layer and group norms, exponentials, sums (batch norms and element-wise operators run in half precision).
    ``single=no`` shortens these too, as the paper does.

    Feature maps that other operators make take half the bytes, indices and masks what they did. Weights get copies in
    half precision besides, and so does the batch where a product or convolution reads it; autocast keeps them until the
    backward pass needs them.

    Assumptions: the factors hold for every kernel; nothing overflows.

    Attributes:
        compute_factor: speedup of compute-bound kernels without a price (NVIDIA reports up to 3 with Tensor Cores);
            another than 3 holds for all of them.
        memory_factor: speedup of memory-bound kernels: half the bytes.
        tf32_factor: speedup of compute-bound kernels that use Tensor Cores by way of TF32.
        communication_factor: speedup of collectives; 2 where gradients travel in half precision.
        update: whether the weight update runs in half precision too.
        device: the board, for the bound and for Tensor Cores; ``auto`` is the one recorded on.
        tensor_cores: ``auto`` looks at the board; ``yes`` or ``no``. Without them compute-bound kernels keep their
            durations.
        price: ``yes``: instead of the factors, the ratio of Roller's library estimates in float32 and float16, per
            operator with known sizes; ``auto``: for matrix products and convolutions alone; ``no``: factors.
        casts: adds the kernels that cast weights to half precision in the forward pass and their gradients to float32
            in the backward pass (autocast), where sizes and board are known; the paper adds none.
        single: whether operators that autocast keeps in float32 keep their durations.
        scaler: adds what ``GradScaler`` does before each update, and its wait; bfloat16 needs none.

    Raises:
        InputError: a factor is not positive, or the board is unknown.
    """

    compute_factor: float = _COMPUTE
    memory_factor: float = 2.0
    tf32_factor: float = 2.0
    communication_factor: float = 1.0
    update: bool = False
    device: str = "auto"
    tensor_cores: str = "auto"
    price: str = "auto"
    casts: bool = True
    single: bool = True
    scaler: bool = True

    def __post_init__(self) -> None:
        for name in ("compute_factor", "memory_factor", "tf32_factor", "communication_factor"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0):
                problem = f"{value} is no speedup"
                raise InputError(name.replace("_", "-"), problem, "give a positive number; 1 changes nothing")
        if self.tensor_cores not in ("auto", "yes", "no"):
            raise InputError("tensor-cores", f"there is no {self.tensor_cores!r}", "use auto, yes or no")
        _by_price(self.price)

    def __call__(self, graph: TaskGraph) -> Outcome:
        """The graph in mixed precision."""
        by_price = _by_price(self.price)
        spec, notes = _board(graph, self.device, needed=by_price == "yes")
        if self.tensor_cores == "auto" and spec is not None and spec.best_matrix_instruction("float16") is None:
            notes.append(f"{spec.title} has no Tensor Cores: compute-bound kernels keep their durations")
            return replace(self, tensor_cores="no")._changed(graph, spec, by_price, notes)
        return self._changed(graph, spec, by_price, notes)

    def _changed(self, graph: TaskGraph, spec: DeviceSpec | None, by_price: str, notes: list[str]) -> Outcome:
        chosen = _choose(graph, spec, self.update)
        if is_mixed(graph, _products(graph)):
            note = "the products of the step compute in 16 bits already: it has mixed precision, and stays as it is"
            return Outcome(graph, (note, *notes))
        if self.single:
            chosen, single_notes = _without_single(graph, chosen)
            notes = [*single_notes, *notes]
        factor = self._factors(graph, chosen)
        if spec is not None:
            _bound_by_latency(graph, chosen, spec, factor, self.memory_factor)
            is_usual = self.tensor_cores != "no" and self.compute_factor == _COMPUTE
            if by_price == "yes" or (by_price == "auto" and is_usual):
                products_alone, units = by_price == "auto", self.tensor_cores != "no"
                notes += _use_prices(graph, chosen, spec, factor, units, products_alone=products_alone)
        shorter = graph.scaled(chosen.rows, 1 / factor)
        changed = _with_collectives(shorter, self.communication_factor, notes)
        notes = [*_speed_notes(graph, chosen, factor), *notes]
        if spec is not None and len(chosen.rows):
            changed = self._with_additions(changed, chosen, spec, notes)
        before = memory_of(graph)
        changed, memory_notes, gain = changed_memory(changed, before, before and halved(graph, before, self.single))
        return Outcome(changed, (*notes, *memory_notes), gain)

    def _factors(self, graph: TaskGraph, chosen: _Chosen) -> Floats:
        """The speedup of every chosen task; without Tensor Cores arithmetic has none."""
        compute, tf32 = (1.0, 1.0) if self.tensor_cores == "no" else (self.compute_factor, self.tf32_factor)
        of_compute = np.where(named(graph, _uses_tf32)[chosen.rows], tf32, compute)
        return np.where(chosen.compute, of_compute, self.memory_factor)

    def _with_additions(self, graph: TaskGraph, chosen: _Chosen, spec: DeviceSpec, notes: list[str]) -> TaskGraph:
        """The graph with casts and the scaler's kernels as far as asked for; adds what to say of them to `notes`."""
        launches = graph.launch[graph.on_gpu & (graph.kind == TaskKind.KERNEL)]
        durations = graph.duration_us[launches[launches != NONE]]
        call_us = float(np.median(durations)) if len(durations) else 0.0
        gradients = _gradients(graph) if self.casts or self.scaler else None
        edit = Edit(graph)
        if self.casts:
            notes += add_casts(edit, chosen.calls, gradients, spec, call_us)
        if self.scaler and gradients is not None and not matching(graph.names, SCALER).any():
            notes.append(add_scaler(edit, gradients, spec, call_us))
        return edit.apply()


def _by_price(price: str | bool) -> str:
    """``auto``, ``yes`` or ``no`` in any spelling of the command line or Python."""
    text = str(price).lower()
    text = {"true": "yes", "on": "yes", "1": "yes", "false": "no", "off": "no", "0": "no"}.get(text, text)
    if text not in ("auto", "yes", "no"):
        raise InputError("price", f"there is no {price!r}", "use auto, yes or no")
    return text


def _products(graph: TaskGraph) -> Ints:
    """Kernels of matrix products, convolutions and attention, by name."""
    kernels = graph.on_gpu & (graph.kind == TaskKind.KERNEL) & (graph.mark == Mark.NONE)
    return np.flatnonzero(kernels & named(graph, _is_product))


def _is_product(name: str) -> bool:
    return bool(COMPUTE.search(name)) and not is_auxiliary(name)


def _never_gains(name: str) -> bool:
    """Kernels of integers and of collectives."""
    return bool(INTEGER.search(name)) or "nccl" in name.lower() or is_collective_name(name)


def _uses_tf32(name: str) -> bool:
    return bool(TF32.search(name))


def _board(graph: TaskGraph, device: str, *, needed: bool) -> tuple[DeviceSpec | None, list[str]]:
    """The board and what to say about it. Without one names decide alone, which is no error where that suffices."""
    try:
        spec, stands_in = device_of(graph, device)
    except InputError as error:
        if needed or device != "auto":
            raise
        return None, [f"{error.problem}; kernels are distinguished by name alone, Tensor Cores supposed"]
    return spec, [stands_in] if stands_in else []


def _choose(graph: TaskGraph, spec: DeviceSpec | None, update: bool) -> _Chosen:
    wanted = graph.on_gpu & (graph.kind == TaskKind.KERNEL) & (graph.mark == Mark.NONE) & ~named(graph, _never_gains)
    if not update:
        # Kernels over lists of tensors are the update's, also where a recording begins inside it.
        over_lists = named(graph, lambda name: bool(_OVER_LISTS.search(name)))
        wanted &= (graph.phase != Phase.UPDATE) & ~over_lists
    rows = np.flatnonzero(wanted)
    rows = rows[~narrow(graph, rows) & ~of_integers(graph, rows)]
    compute, by_model = named(graph, _is_product)[rows], np.zeros(len(rows), np.bool_)
    if spec is None or graph.trace is None:
        return _Chosen(rows, compute, by_model, None)
    calls = describe_calls(graph, rows, spec)
    kinds = np.array([call.work.kind if call.work is not None else "" for call in calls.calls] or [""])[calls.call]
    heavy = np.isin(kinds, ("convolution", "matrix product"))
    bounds = np.array([call.bound for call in calls.calls] or [""])[calls.call]
    main = ~named(graph, is_auxiliary)[rows]
    by_model = kinds != ""
    compute = np.where(by_model, (bounds == "compute") & (main | ~heavy), compute)
    gains = np.array([has_single(call) for call in calls.calls] or [True], np.bool_)[calls.call]
    return _Chosen(rows, compute, by_model, calls).some(gains)


def _without_single(graph: TaskGraph, chosen: _Chosen) -> tuple[_Chosen, list[str]]:
    """The choice without what autocast keeps in float32, and what to say of that."""
    gains = ~stays_single(graph, chosen.rows)
    if gains.all():
        return chosen, []
    time = graph.duration_us[chosen.rows[~gains]].sum() / 1e3
    note = f"{(~gains).sum()} kernels of {time:.1f} ms stay in float32 as autocast has it: softmax, losses, norms"
    return chosen.some(gains), [note]


def _bound_by_latency(graph: TaskGraph, chosen: _Chosen, spec: DeviceSpec, factor: Floats, memory: float) -> None:
    """Puts in place what reductions save that took far longer than their bytes: the time of these alone.

    Sums along columns have too few blocks to fill a board, whatever the type.
    """
    if chosen.calls is None:
        return
    bandwidth = spec.dram.bandwidth_bytes_per_second * 1e-6
    for place, call in enumerate(chosen.calls.calls):
        is_sum = call.work is not None and call.work.kind == "reduction"
        moving_us = call.work.bytes / bandwidth if call.work is not None and is_sum else 0.0
        if 0 < _SLOWER * moving_us < call.recorded_us:
            factor[(chosen.calls.call == place) & ~chosen.compute] = 1 / (
                1 - moving_us * (1 - 1 / memory) / call.recorded_us
            )


def _use_prices(
    graph: TaskGraph, chosen: _Chosen, spec: DeviceSpec, factor: Floats, matrix_units: bool, *, products_alone: bool
) -> list[str]:
    """Puts Roller's ratio in place of the factor wherever it has both estimates; says for how many."""
    if chosen.calls is None:
        return ["no operator has a ratio of its own: the graph was not made from a trace"]
    wanted = chosen.compute & chosen.by_model if products_alone else np.full(len(chosen.rows), True)
    # No price supposes TF32.
    wanted &= ~(chosen.compute & named(graph, _uses_tf32)[chosen.rows])
    rows = chosen.rows[wanted]
    if not len(rows):
        return []
    try:
        prices = price_of(graph, rows, spec, "library", dtype="float32")
        limited = price_of(graph, rows, _at_power_limit(spec), "library", dtype="float32").microseconds
        half = price_of(graph, rows, spec, "library", dtype="float16").microseconds
    except InputError as error:
        return [f"{error.problem}: kernels take the factors"]
    recorded = graph.duration_us[rows]
    single = np.where(
        limited > prices.microseconds, np.clip(recorded, prices.microseconds, limited), prices.microseconds
    )
    has_prices = np.isfinite(single) & np.isfinite(half) & (half > 0) & (single > 0)
    has_prices &= matrix_units | ~chosen.compute[wanted]
    places = np.flatnonzero(wanted)[has_prices]
    factor[places] = np.maximum(single[has_prices] / half[has_prices], 1.0)
    at_limit = int((has_prices & (single > prices.microseconds)).sum())
    power = f", {at_limit} of them recorded at the board's power limit" if at_limit else ""
    share = f"{has_prices.sum()} of {len(chosen.rows)} kernels"
    return [f"{share} take Roller's ratio of library times on {spec.title}, float32 over float16{power}, instead"]


def _at_power_limit(spec: DeviceSpec) -> DeviceSpec:
    """The board once its lanes run at what the power limit leaves them, in short products too."""
    import msgspec

    def limited(rate: Throughput) -> Throughput:
        limit = rate.power_limited_flops
        if limit is None or rate.best_flops is None or rate.best_flops <= limit:
            return rate
        return msgspec.structs.replace(rate, best_flops=limit, sustained_flops=min(rate.sustained_flops, limit))

    return msgspec.structs.replace(spec, throughput=tuple(limited(rate) for rate in spec.throughput))


def _speed_notes(graph: TaskGraph, chosen: _Chosen, factor: Floats) -> list[str]:
    """Notes on the choice of kernels, its rules, and the time it saves."""
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
    unchanged = int(kernels.sum()) - len(chosen.rows)
    return [*notes, f"{unchanged} kernels keep their durations: update, half precision, integers, float32, collectives"]


def _with_collectives(graph: TaskGraph, factor: float, notes: list[str]) -> TaskGraph:
    """The graph with faster collectives, and a note of how many there are."""
    if factor == 1.0:
        return graph
    of_nccl = named(graph, lambda name: "nccl" in name.lower())
    rows = np.flatnonzero((graph.kind == TaskKind.COMMUNICATION) | (graph.on_gpu & of_nccl))
    notes.append(f"{len(rows)} collectives {factor:g}x")
    return graph.scaled(rows, 1 / factor)


def _gradients(graph: TaskGraph) -> Gradients | None:
    """The gradients of every step, None where nothing says how large they are."""
    try:
        return find_gradients(graph) if graph.trace is not None else None
    except InputError:
        return None
