"""Softmax, normalisations and reductions: operators that go over rows of their input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from daydream.operators.copies import with_copies
from daydream.operators.inputs import DTYPES, RecordedTensor
from daydream.operators.pointwise import main_tensor, streamed
from daydream.operators.traffic import Call, is_channels_last, moved_bytes, stored_bytes, tensors_of
from daydream.operators.work import Direction, Moved, Work, WorkPart

#: Softmax and its gradient: the argument that names the dimension.
SOFTMAX = {"_softmax": 1, "_log_softmax": 1, "softmax": 1, "log_softmax": 1, "_softmax_backward_data": 2,
           "_log_softmax_backward_data": 2, "_safe_softmax": 1}  # fmt: skip

#: Layer norms, by where they have the shape of what is normalised.
LAYER_NORMS = {"native_layer_norm": 1, "layer_norm": 1, "native_layer_norm_backward": 2, "_fused_rms_norm": 1,
               "_fused_rms_norm_backward": 2, "rms_norm": 1}  # fmt: skip

_NORMS = ("cudnn_batch_norm", "native_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit", "batch_norm",
          "_native_batch_norm_legit_functional", "_batch_norm_with_update", "_native_batch_norm_legit_no_training",
          "_batch_norm_no_update", "_batch_norm_with_update_functional")  # fmt: skip

#: Batch norm and its gradient.
BATCH_NORMS = frozenset((*_NORMS, *(f"{name}_backward" for name in _NORMS)))

#: Where batch norms say whether they make statistics of the batch.
_TRAINING_AT = {"native_batch_norm": 5, "_native_batch_norm_legit": 5, "cudnn_batch_norm": 5, "miopen_batch_norm": 5,
                "native_batch_norm_backward": 7, "batch_norm": 5}  # fmt: skip

#: Reductions: instructions per element of the input.
REDUCTIONS: Mapping[str, float] = {
    "sum": 3, "mean": 3, "amax": 3, "amin": 3, "max": 4, "min": 4, "argmax": 6, "argmin": 6, "prod": 3, "norm": 4,
    "linalg_vector_norm": 4, "var": 10, "var_mean": 10, "std": 10, "std_mean": 10, "any": 3, "all": 3, "nansum": 4,
    "logsumexp": 16, "aminmax": 6, "count_nonzero": 3, "median": 20, "nanmedian": 20, "mode": 40, "_linalg_det": 20,
    "nll_loss_forward": 3, "bincount": 10,
    "nll_loss2d_forward": 3, "dist": 4, "trace": 3, "equal": 3, "searchsorted": 60, "bucketize": 60, "histc": 20,
}  # fmt: skip

#: Scans, and PyTorch's helpers that captured ones call.
SCANS: Mapping[str, str] = {
    "cumsum": "cumsum", "cumprod": "cumprod", "cummax": "cummax", "cummin": "cummin", "logcumsumexp": "logcumsumexp",
    "_cummax_helper": "cummax", "_cummin_helper": "cummin", "_logcumsumexp": "logcumsumexp",
}  # fmt: skip

#: Instructions per element of a scan by CUB over the only dimension.
_SCAN_INSTRUCTIONS = 8.0

#: Instructions per element of softmax and of group norm, where they do not have Roller's form.
_SOFTMAX_INSTRUCTIONS, _NORM_INSTRUCTIONS = 20.0, 10.0

#: Batch norm with statistics: tensors that move, by whether it is the backward pass and whether images lie in NHWC.
#: The persistent kernels for NHWC take a third more backward than five tensors, as networks' steps show.
_NORM_PASSES = {(False, False): 3.0, (False, True): 3.0, (True, False): 5.0, (True, True): 6.5}

#: The same of the backward pass over floats in NCHW, as a recording has it (ResNet-50 on a V100): 5.3 to 6.1 at the
#: rate of DRAM from 256 channels on.
_FLOAT_PASSES = 5.5

#: Longest row that a warp keeps in registers; rows that a large board works on at a time, a block for each.
_WARP_ROW, _ROWS = 1024, 256

#: Threads of a block that goes over a group's elements, and round trips to memory that a step of it takes: a load, and
#: the running moments' divisions, which wait for those of the step before. Chosen on KernelBench's group norm (35).
_GROUP_THREADS, _MOMENT_TRIPS = 512, 2.1

#: Threads of the one block that adds up the loss of picked elements (``NLL_LOSS_THREADS``).
_LOSS_THREADS = 32

#: Softmax over other than the last dimension: times that a tensor is read and written, over the share of DRAM's rate
#: that threads reach which wait for each load of four bytes (``cunn_SpatialSoftMaxForward``); from KernelBench's 49.
_SPATIAL_PASSES, _SPATIAL_SHARE = 4.0, 0.55


def softmax(call: Call) -> Work | str:
    """The work of softmax or log-softmax, which costs the same."""
    backward = call.stem.endswith("_data")
    work = _along_rows(call, "softmax", SOFTMAX[call.stem], backward=backward)
    if isinstance(work, str) or not call.outputs:
        return work
    tensors = tensors_of(call.inputs)
    if not _is_last(call):
        return with_copies(_spatial_softmax(call, work, backward=backward), tensors)
    types = {tensor.dtype for tensor in tensors} | {tensor.dtype for tensor in call.outputs}
    is_log_gradient = call.stem == "_log_softmax_backward_data"
    if len(types) == 1 and not is_log_gradient:
        return with_copies(work, tensors)
    # Autocast reads halves and writes floats in one kernel; the gradient of log-softmax needs no product before it.
    total = moved_bytes(call.inputs, call.outputs)
    gradient, columns = stored_bytes(tensors_of(call.inputs)[0]), work.parts[0].data["shape"][1]
    reads_twice = is_log_gradient and columns > _WARP_ROW
    moved = Moved(
        kernel="cunn_SoftMaxBackward" if backward else "cunn_SoftMaxForward",
        bytes=total,
        outputs=float(call.outputs[0].elements),
        instructions=_SOFTMAX_INSTRUCTIONS,
        model="row-wise",
        again=float(gradient) if reads_twice else 0.0,
        between=_ROWS * total / call.outputs[0].elements * columns if reads_twice else 0.0,
    )
    part = WorkPart({}, work.parts[0].direction, moved)
    priced = Work(kind=work.kind, parts=(part,), flops=work.flops, bytes=total, dtype=work.dtype)
    return with_copies(priced, tensors)


def _is_last(call: Call) -> bool:
    """True if softmax goes over the last dimension, or over the last that has adjacent elements."""
    dims, axis = tensors_of(call.inputs)[0].dims, call.inputs.value(SOFTMAX[call.stem])
    return type(axis) is not int or not dims or math.prod(dims[axis % len(dims) + 1 :]) == 1


def _spatial_softmax(call: Call, work: Work, *, backward: bool) -> Work:
    """Softmax with a thread per element of the other dimensions, which walks its row with a stride."""
    total = moved_bytes(call.inputs, call.outputs)
    size = float(stored_bytes(tensors_of(call.inputs)[0]))
    passes = (_SPATIAL_PASSES + backward) / _SPATIAL_SHARE
    moved = Moved(
        kernel=f"cunn_SpatialSoftMax{'Backward' if backward else 'Forward'}",
        bytes=total,
        outputs=float(call.outputs[0].elements),
        instructions=_SOFTMAX_INSTRUCTIONS,
        model="row-wise",
        again=max(passes * size - total, 0.0),
        between=total,
    )
    part = WorkPart({}, work.parts[0].direction, moved)
    return Work(kind=work.kind, parts=(part,), flops=work.flops, bytes=total, dtype=work.dtype)


def layer_norm(call: Call) -> Work | str:
    """The work of layer norm or RMS norm."""
    backward = call.stem.endswith("_backward")
    shape = call.inputs.value(LAYER_NORMS[call.stem])
    columns = math.prod(shape) if isinstance(shape, list) and all(type(size) is int for size in shape) else 0
    work = _along_rows(call, "layer_norm", None, backward=backward, columns=columns)
    if isinstance(work, str):
        return work
    if "rms_norm" in call.stem:
        work = replace(work, parts=tuple(replace(part, variant="rms") for part in work.parts))
    return with_copies(work, _activations(call)) if call.outputs else work


def _activations(call: Call) -> list[RecordedTensor]:
    """The tensors that have the dimensions of the first."""
    tensors = tensors_of(call.inputs)
    return [tensor for tensor in tensors if tensor.dims == tensors[0].dims]


def _along_rows(call: Call, op: str, axis_at: int | None, *, backward: bool, columns: int = 0) -> Work | str:
    main = main_tensor(call.inputs)
    if isinstance(main, str):
        return main
    tensor, dtype = main
    axis = call.inputs.value(axis_at) if axis_at is not None else None
    position = axis if type(axis) is int and -len(tensor.dims) <= axis < len(tensor.dims) else -1
    columns = columns or (tensor.dims[position] if tensor.dims else 1)
    if op == "layer_norm":
        # Gamma has the shape of what is normalised.
        trailing = {tensor.dims[start:] for start in range(1, len(tensor.dims))}
        gammas = [each.elements for each in call.inputs.tensors if each is not None and each.dims in trailing]
        columns = gammas[0] if gammas else columns
    data = {"op": op, "shape": [tensor.elements // columns, columns], "dtype": dtype}
    direction: Direction = "backward" if backward else "forward"
    passes = 3 if backward else 2
    return streamed(op.replace("_", " "), tensor.elements, dtype, passes, 8, WorkPart(data, direction))


def batch_norm(call: Call) -> Work | str:
    """The work of batch norm.

    Recorded ones are two sums and an application, as Roller would build them. The layout of captured ones is known:
    with statistics of the batch cuDNN reads the input twice and writes once forward; backward it reads both tensors
    twice and writes one. Its kernels for NCHW have a block per channel. Without statistics one pass scales and shifts.
    """
    backward = call.stem.endswith("_backward")
    main = main_tensor(call.inputs)
    if isinstance(main, str):
        return main
    tensor, dtype = main
    if len(tensor.dims) < 2:
        return "an input of fewer than two dimensions"
    count, layout = tensor.elements, "nhwc" if is_channels_last(tensor) else "1C11_kernel_NCHW"
    training = call.inputs.value(_TRAINING_AT.get(call.stem, 99))
    if not backward and (training is False or "no_training" in call.stem or "no_update" in call.stem):
        scale = WorkPart({"op": "elementwise", "shape": [count], "dtype": dtype, "function": "mul", "scalar": True})
        return streamed("batch norm", count, dtype, 2, 2, scale)
    if not call.outputs:
        return _recorded_norm(tensor, dtype, backward=backward)
    passes = _NORM_PASSES[backward, layout == "nhwc"]
    if backward and layout != "nhwc" and tensor.dtype == "float":
        passes = _FLOAT_PASSES
    kind = "gradient of batch norm" if backward else "batch norm"
    if not backward and layout != "nhwc" and tensor.dtype == "float":
        work = streamed(kind, count, dtype, passes, 6, *_native_norm(tensor))
        return with_copies(work, _activations(call))
    moved = Moved(
        kernel=f"bn_{'bw' if backward else 'fw_tr'}_{layout}",
        bytes=float(passes * stored_bytes(tensor)),
        outputs=float(count),
        model="row-wise",
        blocks=0.0 if layout == "nhwc" else float(tensor.dims[1]),
    )
    work = streamed(kind, count, dtype, passes, 10 if backward else 6, WorkPart({}, moved=moved))
    return with_copies(work, _activations(call), channels_last=layout == "nhwc")


def _native_norm(tensor: RecordedTensor) -> tuple[WorkPart, WorkPart]:
    """Batch norm of floats in NCHW: a block per channel reads it once, then every element is scaled and shifted."""
    size, count = float(stored_bytes(tensor)), float(tensor.elements)
    channels = float(tensor.dims[1])
    statistics = Moved(
        kernel="batch_norm_collect_statistics_kernel",
        bytes=size,
        outputs=channels,
        instructions=_NORM_INSTRUCTIONS * count / channels,
        model="row-wise",
        blocks=channels,
    )
    apply = Moved(
        kernel="batch_norm_transform_input_kernel", bytes=2 * size, outputs=count, instructions=8.0, model="row-wise"
    )
    return WorkPart({}, moved=statistics), WorkPart({}, moved=apply)


def _recorded_norm(tensor: RecordedTensor, dtype: str, *, backward: bool) -> Work:
    n, c, pixels, count = tensor.dims[0], tensor.dims[1], math.prod(tensor.dims[2:]), tensor.elements
    reduce = WorkPart({"op": "reduce", "function": "sum", "shape": [n, c, pixels], "axes": [0, 2], "dtype": dtype})
    apply = {"op": "elementwise", "shape": [count], "dtype": dtype}
    if backward:
        parts = (reduce, reduce, WorkPart(apply | {"function": "add"}))
        return streamed("gradient of batch norm", count, dtype, 5, 10, *parts)
    return streamed("batch norm", count, dtype, 3, 6, reduce, WorkPart(apply | {"function": "mul", "scalar": True}))


def group_norm(call: Call) -> Work | str:
    """The work of group norm: moments of each group, then scale and shift; backward both tensors are read twice."""
    backward = call.stem.endswith("_backward")
    data = call.inputs.tensor(1 if backward else 0)
    groups = call.inputs.value(8 if backward else 6)
    if data is None or not data.dims or type(groups) is not int:
        return "sizes of its operands not recorded"
    count, size = float(data.elements), float(stored_bytes(data))
    read = 2 * size if backward else size
    threads = float(data.dims[0] * groups * _GROUP_THREADS)
    moments = Moved(
        kernel="ComputeInternalGradientsCUDAKernel" if backward else "RowwiseMomentsCUDAKernel",
        bytes=read,
        outputs=threads,
        instructions=_NORM_INSTRUCTIONS * count / threads,
        model="row-wise",
        blocks=float(data.dims[0] * groups),
        trips=0.0 if backward else _MOMENT_TRIPS * math.ceil(count / threads),
    )
    apply = Moved(kernel="elementwise_kernel", bytes=read + size, outputs=count, instructions=30.0, model="row-wise")
    parts = tuple(WorkPart({}, moved=moved) for moved in (moments, apply))
    dtype = DTYPES.get(data.dtype, "float32")
    work = Work(kind="group norm", parts=parts, flops=8 * count, bytes=moments.bytes + apply.bytes, dtype=dtype)
    return with_copies(work, _activations(call), channels_last=is_channels_last(data))


def scan(call: Call) -> Work | str:
    """The work of a scan: CUB's over an only dimension where no places are kept, else a kernel by the dimension."""
    from roller.library.parts import KEEP_PLACES

    source = call.inputs.tensor(0)
    axis = next((value for place in (1, 3) if type(value := call.inputs.value(place)) is int), None)
    if source is None or axis is None:
        return "tensor or dimension not recorded"
    if not source.elements:
        return "an empty tensor"
    dims = source.dims or (1,)
    axis %= len(dims)
    before, columns, inner = math.prod(dims[:axis]), dims[axis], math.prod(dims[axis + 1 :])
    outputs = call.outputs or (source,)
    total = float(stored_bytes(source) + sum(each.bytes for each in outputs))
    moved = Moved(kernel="DeviceScanKernel", bytes=total, outputs=float(source.elements), model="row-wise",
                  instructions=_SCAN_INSTRUCTIONS, launches=2)  # fmt: skip
    if columns != source.elements or SCANS[call.stem] in KEEP_PLACES:
        kernel = f"tensor_kernel_scan_{'innermost' if inner == 1 else 'outer'}_dim"
        walk = (float(before), float(columns), float(inner))
        moved = replace(moved, kernel=kernel, launches=1, walk=walk, scan=SCANS[call.stem])
    dtype = DTYPES.get(source.dtype, "float32")
    flops = float(source.elements)
    work = Work(kind="scan", parts=(WorkPart({}, moved=moved),), flops=flops, bytes=total, dtype=dtype)
    return with_copies(work, [source])


def reduction(call: Call) -> Work | str:
    """The work of a sum, a mean or another reduction."""
    main = main_tensor(call.inputs)
    if call.outputs and call.inputs.tensor(0) is not None:
        return _captured_reduction(call, main)
    if call.stem not in ("sum", "mean"):
        return f"no rule for {call.name}"
    if isinstance(main, str):
        return main
    tensor, dtype = main
    if not tensor.dims:
        return "a single number"
    return streamed("reduction", tensor.elements, dtype, 1, 1, WorkPart(_reduce(call, tensor, dtype)))


def _picked_loss(call: Call, source: RecordedTensor) -> Work:
    """The loss of picked elements: a block of one warp goes over all rows, reads each class and then its element."""
    rows = float(source.elements // max(source.dims[-1], 1))
    is_summed = call.outputs[0].elements == 1
    total = rows * (8.0 + 32.0)
    moved = Moved(
        kernel="nll_loss_forward_reduce_cuda_kernel_2d" if is_summed else "nll_loss_forward_no_reduce_cuda_kernel",
        bytes=total,
        outputs=rows,
        model="row-wise",
        blocks=1.0 if is_summed else 0.0,
        trips=2 * math.ceil(rows / _LOSS_THREADS) if is_summed else 0.0,
    )
    dtype = DTYPES.get(source.dtype, "float32")
    return Work(kind="reduction", parts=(WorkPart({}, moved=moved),), flops=rows, bytes=total, dtype=dtype)


def _reduce(call: Call, tensor: RecordedTensor, dtype: str) -> dict[str, Any]:
    axes, rank = call.inputs.value(1), len(tensor.dims)
    positions = [axis % rank for axis in axes if type(axis) is int] if isinstance(axes, list) and rank else []
    shape = list(tensor.dims)
    return {
        "op": "reduce",
        "function": call.stem,
        "shape": shape,
        "axes": positions or list(range(rank)),
        "dtype": dtype,
    }


def _captured_reduction(call: Call, main: tuple[RecordedTensor, str] | str) -> Work | str:
    source = call.inputs.tensor(0)
    assert source is not None
    if not source.elements:
        return "an empty tensor"
    dtype = DTYPES.get(source.dtype, "float32")
    total = moved_bytes(call.inputs, call.outputs)
    if call.stem == "nll_loss_forward":
        return _picked_loss(call, source)
    is_supported = call.stem in ("sum", "mean") and {source.dtype} == {each.dtype for each in call.outputs} & set(
        DTYPES
    )
    if is_supported and len(source.dims) and not isinstance(main, str) and stored_bytes(source) == source.bytes:
        part = WorkPart(_reduce(call, source, dtype))
    else:
        outputs = float(max(sum(each.elements for each in call.outputs), 1))
        instructions = REDUCTIONS[call.stem] * source.elements / outputs
        moved = Moved(kernel="reduce_kernel", bytes=total, outputs=outputs, instructions=instructions)
        part = WorkPart({}, moved=moved)
    return Work(kind="reduction", parts=(part,), flops=float(source.elements), bytes=total, dtype=dtype)
