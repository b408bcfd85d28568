"""The library's products and convolutions on weights that it packed: their expected time, and kernels of ours or the
library for all of a graph, by times that are measured here where both are expected to take about as long."""

from __future__ import annotations

import json
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hal.spec.device import DeviceSpec
from hal.support.atomic import write_atomic
from hal.support.store import digest
from roller.dynamo.constants import on_real_tensors, use_huge_pages
from roller.dynamo.kernels import Kernel, KernelShelf
from roller.dynamo.operators import region_operator, writer_of
from roller.dynamo.prices import CALL_SECONDS, VIEWS, bandwidth_for
from roller.dynamo.proof import numbers
from roller.dynamo.regions import Region
from roller.dynamo.streaming import reading_bandwidth, streams_weights
from roller.dynamo.sums import is_constant, shape_of
from sokoban.kernel.instructions import value_instructions
from sokoban.model.cpu.stages import CACHE_OVERLAP
from sokoban.model.cpu.work import FUNCTION_INSTRUCTIONS

_aten = torch.ops.aten

log = logging.getLogger("roller.backend")

#: Share of a processor's peak that oneDNN's products and dense convolutions reach besides what they read and write, on
#: weights that were packed before: ViT-small and ResNet-50, as Inductor runs them frozen on two cores of a Xeon with
#: AVX-512, by their time over that of our kernels in the same turns and what is predicted for those.
PACKED_SHARES = {"matmul": 0.85, "conv2d": 0.75}

#: Times within so much of each other are alike as far as they are predicted: kernels of ours are taken then, since
#: those were held against PyTorch's and leave nothing behind them to loops of their own.
CERTAIN = 1.03

#: The same of measured times, whose medians differ so from run to run.
CERTAIN_TIMED = 1.06

#: Time of oneDNN's depthwise and grouped convolutions as a multiple of ours: the less of the two orders of images, 4.6
#: and 2.5 times (docs/bench-cpu.md's processor), less what a network's own order of images spares it.
GROUPED_TIMES = 2.0

#: Expected times whose ratio is less are measured before one of the two is chosen.
DOUBTFUL = 1.6

#: Share of a graph's products whose kernels are timed, the longest first, and how many kernels at most: others are
#: taken to be right or wrong by as much.
TRIED_SHARE, MOST_TRIED = 0.7, 6

#: Rounds of a measurement, and seconds after which it ends with fewer.
ROUNDS, LEAST_ROUNDS, MOST_SECONDS = 8, 4, 1.0

#: Bytes that are read before every call that is timed: a network comes back to a layer's weights after others have
#: been in the caches. Products of 128 rows took 1.13 to 1.3 times as long then on a Xeon with 2 MiB of its own for each
#: core, and their order changed: those of the library lost less. What changes from call to call is written after those,
#: as the layer before writes it: with all of it in memory the library was ahead by 3 to 25 % where whole networks said
#: -15 to 10.
EVICTING_BYTES = 1 << 26

#: Folder of a shelf with measured times of kernels and of the library's, by the kernel's name.
TRIALS = "trials"

#: Seconds of a region's kernel and of the library's operator.
Times = tuple[float, float]


# Expected


def packed_seconds(region: Region, ours_seconds: float, device: DeviceSpec) -> float:
    """Time of a library's product or convolution on weights that never change: the arithmetic of all cores, and what it
    reads and writes, weights from memory; of convolutions in groups by ours. Functions behind it are a loop of
    Inductor's."""
    return _library_seconds(region, ours_seconds, device) + _loop_seconds(region, device)


def seconds_in_network(region: Region, shelf: KernelShelf) -> float:
    """Expected time of a region's kernel in a network; 0 where it has none.

    Weights come from memory while the kernel works, at the first touch of each panel, and both add up as far as what
    comes into a core's own caches does. Kernels that are priced for empty caches have them already.
    """
    seconds, weights = shelf.seconds(region.expr), _weight_seconds(region, shelf.device)
    if not seconds or streams_weights(region.expr, shelf.device):
        return max(seconds, weights) if seconds else 0.0
    return float((seconds**CACHE_OVERLAP + weights**CACHE_OVERLAP) ** (1 / CACHE_OVERLAP))


def _library_seconds(region: Region, ours_seconds: float, device: DeviceSpec) -> float:
    anchor = region.anchor
    if not _is_dense(region):
        return GROUPED_TIMES * ours_seconds
    arithmetic = 2 * anchor.multiply_adds / (PACKED_SHARES[anchor.kind] * device.peak_flops("float32"))
    changing = [node for node in anchor.operands.values() if not is_constant(node)]
    moved = 4 * (math.prod(region.shape) + sum(math.prod(shape_of(node)) for node in changing))
    return arithmetic + moved / bandwidth_for(moved, device) + _weight_seconds(region, device)


def _loop_seconds(region: Region, device: DeviceSpec) -> float:
    """Time of the functions behind a sum of products as a loop of its own; 0 where there are none."""
    if all(node.target in VIEWS for node in region.nodes[1:]):
        return 0.0
    others = {operand.node for operand in region.operands} - set(region.anchor.operands.values())
    elements = math.prod(region.shape)
    moved = 4 * (2 * elements + sum(math.prod(shape_of(node)) for node in others))
    cost = sum(value_instructions(each.value, costs=FUNCTION_INSTRUCTIONS) for each in region.expr.statements)
    computed = 2 * elements * cost / device.peak_flops("float32")
    return CALL_SECONDS + max(moved / bandwidth_for(moved, device), computed)


def _weight_seconds(region: Region, device: DeviceSpec) -> float:
    """Time in which a region's weights come from memory: those of a whole network leave caches between two calls."""
    weights = [math.prod(shape_of(node)) for node in region.anchor.operands.values() if is_constant(node)]
    return 4 * max(weights, default=0) / reading_bandwidth(device)


# Chosen


def dearer_than_packed(regions: Sequence[Region], shelf: KernelShelf, module: Any = None) -> dict[str, str]:
    """All kernels of weights that never change, by name with the reason why the library's are taken, or none.

    A library that packs weights keeps what lies between its operators in an order of its own, and every change between
    its kernels and ours costs a copy.

    Args:
        regions: of a graph for a processor.
        shelf: of that processor.
        module: the graph, for times that are measured here and kept on the shelf; None for those that are there.
    """
    device = shelf.device
    frozen = [region for region in regions if any(map(is_constant, region.anchor.operands.values()))]
    ours = {region: seconds_in_network(region, shelf) for region in frozen}
    library = {region: _library_seconds(region, ours[region], device) for region in frozen}
    ours_total, library_total = sum(ours.values()), sum(library.values())
    loops = sum(_loop_seconds(region, device) for region in frozen)
    verb, certain = "is expected to take", CERTAIN
    if ours_total < DOUBTFUL * (library_total + loops) and library_total + loops < DOUBTFUL * ours_total:
        # Of few rows, both sides wait for the same weights.
        doubtful = [region for region in frozen if not streams_weights(region.expr, shelf.device)]
        kinds = [[region for region in doubtful if _is_dense(region) == dense] for dense in (True, False)]
        counts = [_tried({each: max(ours[each], library[each]) for each in kind}, shelf) for kind in kinds]
        tried = {**counts[0], **counts[1]}
        times = _stored(tried, shelf) if module is None else _measured(module, tried, shelf)
        for kind, count in zip(kinds, counts, strict=True):
            if times.keys() & count.keys():
                ours_total += (_scale(times, count, ours, 0) - 1) * sum(ours[region] for region in kind)
                library_total += (_scale(times, count, library, 1) - 1) * sum(library[region] for region in kind)
                verb, certain = "takes, by times of its longest products here,", CERTAIN_TIMED
    theirs = library_total + loops
    if ours_total <= certain * theirs:
        return {}
    reason = f"oneDNN on packed weights {verb} {theirs * 1e3:.2f} ms for the graph, {ours_total * 1e3:.2f} ms ours"
    return {shelf.name_of(region.expr): reason for region in frozen}


def _is_dense(region: Region) -> bool:
    return region.anchor.kind in PACKED_SHARES and "g" not in region.anchor.sizes


def _scale(
    times: Mapping[Region, Times], counts: Mapping[Region, int], expected: Mapping[Region, float], side: int
) -> float:
    """Measured time over the expected one."""
    measured = sum(count * times[region][side] for region, count in counts.items() if region in times)
    return measured / sum(count * expected[region] for region, count in counts.items() if region in times)


def _tried(seconds: Mapping[Region, float], shelf: KernelShelf) -> dict[Region, int]:
    """Regions whose kernels are timed, one of each kernel, with how many have it."""
    totals: Counter[str] = Counter()
    alike: dict[str, list[Region]] = {}
    for region, each in seconds.items():
        name = shelf.name_of(region.expr)
        totals[name] += each  # type: ignore[assignment]
        alike.setdefault(name, []).append(region)
    tried, share = {}, 0.0
    for name, total in totals.most_common(MOST_TRIED):
        if share < TRIED_SHARE * sum(totals.values()):
            tried[alike[name][0]] = len(alike[name])
            share += total
    return tried


# Measured


@dataclass(frozen=True, eq=False)
class TimedCall:
    """Call that is timed.

    Attributes:
        run: makes the call.
        changing: its operands that are no constants.
    """

    run: Callable[[], Any]
    changing: tuple[Any, ...]


def _path(region: Region, shelf: KernelShelf) -> Path:
    """File of a kernel's times, which are of this PyTorch and of as many threads."""
    threads = digest(torch.__version__, str(torch.get_num_threads()))[:8]
    return shelf.folder / TRIALS / f"{shelf.name_of(region.expr)}_{threads}"


def _stored(regions: Mapping[Region, int], shelf: KernelShelf) -> dict[Region, Times]:
    """Times that are on the shelf; none where one is missing."""
    times = {}
    for region in regions:
        with suppress(OSError, ValueError):
            ours, library = json.loads(_path(region, shelf).read_text("utf-8"))
            times[region] = (float(ours), float(library))
    return times if len(times) == len(regions) else {}


def _measured(module: Any, regions: Mapping[Region, int], shelf: KernelShelf) -> dict[Region, Times]:
    """Times of kernels and of the library's operators for the same anchors, in turns and with other data in the
    caches. A region that cannot be timed has none."""
    times = _stored(regions, shelf)
    if times:
        return times
    kernels = shelf.kernels([region.expr for region in regions])
    calls: dict[Region, tuple[TimedCall, TimedCall]] = {}
    with on_real_tensors():
        for region in regions:
            kernel = kernels.get(shelf.name_of(region.expr))
            try:
                library = library_call(module, region)
                if isinstance(kernel, Kernel) and library is not None:
                    pair = (_kernel_call(module, region, kernel), library)
                    for call in pair:
                        call.run()
                    calls[region] = pair
            except Exception as error:  # where kernels are put in, one that does not run here is said to be so
                log.info("%s is not timed: %s: %s", region.expr.name, type(error).__name__, error)
        times = dict(zip(calls, _in_turns(list(calls.values())), strict=True))
    for region, seconds in times.items():
        with suppress(OSError):
            path = _path(region, shelf)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(seconds))
    return times


def _in_turns(pairs: Sequence[tuple[TimedCall, TimedCall]]) -> list[Times]:
    samples: list[tuple[list[float], list[float]]] = [([], []) for _ in pairs]
    others = torch.zeros(EVICTING_BYTES // 4)
    start = time.perf_counter()
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() > start + MOST_SECONDS:
            break
        for pair, sample in zip(pairs, samples, strict=True):
            for call, seconds in zip(pair, sample, strict=True):
                others.sum()
                for tensor in call.changing:
                    tensor.mul_(1.0)
                before = time.perf_counter()
                call.run()
                seconds.append(time.perf_counter() - before)
    return [(statistics.median(ours), statistics.median(library)) for ours, library in samples]


def _kernel_call(module: Any, region: Region, kernel: Kernel) -> TimedCall:
    formats = tuple(operand.memory_format for operand in region.operands)
    op = region_operator(kernel.bundle, region.shape, region.memory_format, formats)
    generator = torch.Generator().manual_seed(0)
    numbers_of = [operand.arranged(numbers(module, operand.node, generator)) for operand in region.operands]
    values = [value.contiguous(memory_format=each) for value, each in zip(numbers_of, formats, strict=True)]
    are_constant = [is_constant(operand.node) for operand in region.operands]
    # Whoever holds a constant itself holds it where it is.
    values = [value.clone() if fixed else value for value, fixed in zip(values, are_constant, strict=True)]
    # As in the graph that takes the kernel; the library's own order of weights has no pages that could be moved.
    use_huge_pages([value for value, fixed in zip(values, are_constant, strict=True) if fixed], ())
    changing = tuple(value for value, fixed in zip(values, are_constant, strict=True) if not fixed)
    # As a compiled graph calls it: PyTorch's dispatcher would come in between, in Python.
    out = torch.empty(region.shape, dtype=values[0].dtype).contiguous(memory_format=region.memory_format)
    return TimedCall(partial(writer_of(op), *values, out=out), changing)


def library_call(module: Any, region: Region) -> TimedCall | None:
    """A region's anchor by the library on packed weights, as Inductor runs it on frozen ones; None where it would not
    pack them. Runs within :func:`on_real_tensors`."""
    node, generator = region.anchor.node, torch.Generator().manual_seed(0)
    if node.target is _aten.convolution.default:
        image, weight, bias, stride, padding, dilation, is_transposed, _, groups = node.args
        if is_transposed or not is_constant(weight) or not (bias is None or is_constant(bias)):
            return None
        values = numbers(module, image, generator).contiguous(memory_format=region.anchor.memory_format)
        reorder = torch.ops.mkldnn._reorder_convolution_weight
        packed = reorder(numbers(module, weight, generator), padding, stride, dilation, groups, list(values.shape))
        added = None if bias is None else numbers(module, bias, generator)
        arguments: tuple[Any, ...] = (values, packed, added, padding, stride, dilation, groups, "none", [], "")
        changing = () if is_constant(image) else (values,)
        return TimedCall(partial(torch.ops.mkldnn._convolution_pointwise, *arguments), changing)
    if node.target not in (_aten.mm.default, _aten.addmm.default):
        return None
    rows, weight = node.args[-2:]
    if not is_constant(weight) or numbers(module, weight, generator).dtype != torch.float32:
        return None
    values, transposed = numbers(module, rows, generator), numbers(module, weight, generator).t().contiguous()
    changing = () if is_constant(rows) else (values,)
    if not torch._C.has_mkl:
        return TimedCall(partial(torch.mm, values, numbers(module, weight, generator)), changing)
    packed = torch.ops.mkl._mkl_reorder_linear_weight(transposed, len(values))
    return TimedCall(partial(torch.ops.mkl._mkl_linear, values, packed, transposed, None, len(values)), changing)
