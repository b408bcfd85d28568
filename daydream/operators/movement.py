"""Operators that move elements: joining, indexing, tables, windows, sorting, and kernels that fuse many of these."""

from __future__ import annotations

import math
from collections.abc import Mapping

from daydream.operators.inputs import DTYPES, RecordedTensor, pair
from daydream.operators.traffic import Call, is_channels_last, moved_bytes, stored_bytes, tensors_of
from daydream.operators.work import Direction, Moved, Work, WorkPart

#: Operators that read everything and write their results once: instructions per result.
MOVES: Mapping[str, float] = {
    "cat": 12, "stack": 12, "split_with_sizes_copy": 12, "repeat": 24, "tile": 24, "flip": 24, "roll": 24,
    "constant_pad_nd": 24, "pixel_shuffle": 24, "pixel_unshuffle": 24, "channel_shuffle": 24, "diag_embed": 24,
    "reflection_pad1d": 24, "reflection_pad2d": 24, "replication_pad1d": 24, "replication_pad2d": 24,
    "reflection_pad1d_backward": 30, "reflection_pad2d_backward": 30, "replication_pad2d_backward": 30,
    "im2col": 24, "col2im": 40, "unfold_copy": 24, "unfold_backward": 30, "diagonal_copy": 12, "expand_copy": 12,
    "permute_copy": 24, "transpose_copy": 24, "view_copy": 12, "slice_scatter": 12, "select_scatter": 12,
    "masked_select": 12, "nonzero": 12, "_unsafe_masked_index": 12, "_pack_padded_sequence": 12,
    "upsample_nearest1d": 24, "upsample_nearest2d": 24, "upsample_nearest3d": 24, "upsample_linear1d": 40,
    "upsample_bilinear2d": 50, "upsample_bicubic2d": 150, "_upsample_bilinear2d_aa": 100, "upsample_trilinear3d": 80,
    "_upsample_bicubic2d_aa": 200, "upsample_nearest2d_backward": 30, "upsample_bilinear2d_backward": 60,
    "upsample_bicubic2d_backward": 200, "_upsample_bicubic2d_aa_backward": 300, "_upsample_bilinear2d_aa_backward": 150,
    "grid_sampler_2d": 80, "grid_sampler_2d_backward": 160,
    "nll_loss_backward": 2, "nll_loss2d_backward": 4, "_adaptive_avg_pool2d_backward": 24,
    "adaptive_max_pool2d_backward": 24, "_cdist_forward": 20, "_fft_r2c": 40, "_fft_c2c": 40, "_fft_c2r": 40,
    "_trilinear": 12, "_repeat_interleave": 12, "repeat_interleave": 12, "one_hot": 6, "cross": 12,
}  # fmt: skip

#: Names of kernels where they differ from the operator's.
_KERNELS: Mapping[str, str] = {
    "cat": "CatArrayBatchedCopy", "stack": "CatArrayBatchedCopy", "repeat": "elementwise_kernel",
    "tile": "elementwise_kernel", "constant_pad_nd": "elementwise_kernel", "_fft_r2c": "regular_fft",
    "_fft_c2c": "regular_fft", "_fft_c2r": "regular_fft",
}  # fmt: skip

#: Operators that read as many elements of a table as they write.
GATHERS: Mapping[str, str] = {
    "index": "index_elementwise_kernel", "_unsafe_index": "index_elementwise_kernel",
    "gather": "vectorized_gather_kernel", "take_along_dim": "vectorized_gather_kernel",
    "index_select": "indexSelectLargeIndex", "embedding": "indexSelectLargeIndex", "take": "index_elementwise_kernel",
}  # fmt: skip

#: Operators that add or write elements at places of a tensor: where the source stands; out of place it is copied first.
SCATTERS: Mapping[str, int] = {
    "index_put": 2, "_index_put_impl": 2, "_unsafe_index_put": 2, "index_add": 3, "index_copy": 3, "scatter": 3,
    "scatter_add": 3, "scatter_reduce": 3, "index_fill": 3, "masked_scatter": 2,
}  # fmt: skip

#: Gradients that are zeros but for what a view or an index showed: where the gradient stands.
SCATTERED_GRADIENTS = (
    "slice_backward",
    "select_backward",
    "diagonal_backward",
    "index_select_backward",
    "embedding_dense_backward",
)

#: Pooling with windows: kernel and what reads its sides (first argument after the input).
POOLS = {"max_pool2d_with_indices": "max_pool_forward_nchw", "max_pool2d": "max_pool_forward_nchw",
         "avg_pool2d": "avg_pool2d_out_cuda_frame", "max_pool2d_with_indices_backward": "max_pool_backward_nchw",
         "max_pool2d_backward": "max_pool_backward_nchw",
         "avg_pool2d_backward": "avg_pool2d_backward_out_cuda_frame",
         "max_pool3d_with_indices": "max_pool3d_with_indices_single_out_frame",
         "avg_pool3d": "avg_pool3d_cuda_update_output"}  # fmt: skip

#: Pooling in NCHW, a result per thread: integer instructions for its place, whose indices take divisions, and for an
#: element of its window: a maximum compares values and keeps a place. Chosen on KernelBench's 42 and 44.
_PLACE_INTEGERS, _MAXIMUM_INTEGERS, _MEAN_INTEGERS = 100.0, 15.0, 8.5

#: Pooling whose windows follow from the sizes.
ADAPTIVE_POOLS = {"_adaptive_avg_pool2d": "adaptive_average_pool", "adaptive_avg_pool2d": "adaptive_average_pool",
                  "_adaptive_avg_pool3d": "adaptiveaveragepool", "adaptive_max_pool2d": "adaptivemaxpool"}  # fmt: skip

#: Sorting: passes over keys and indices, as radix sorts of so many bits take.
SORTS: Mapping[str, float] = {"sort": 8, "argsort": 8, "topk": 4, "msort": 8, "kthvalue": 4, "unique_consecutive": 4,
                              "_unique2": 12, "unique_dim": 12}  # fmt: skip

#: Bytes of a place.
_PLACE_BYTES = 8

_GATHER_INSTRUCTIONS, _SCATTER_INSTRUCTIONS, _SORT_INSTRUCTIONS = 12.0, 20.0, 40.0

#: Integer instructions for the row and the column of an element in a table, by divisions of 64 bits; chosen on
#: embeddings of A100s in LLMs' layers (vidur), with models of even place by name.
_ROW_INTEGERS = 110.0

#: Instructions per element that a fused kernel reads or writes.
_FUSED_INSTRUCTIONS = 20.0


def moves(call: Call) -> Work | str:
    """The work of an operator that reads all that it is given and writes its results."""
    kernel = _KERNELS.get(call.stem, call.stem)
    return _stream(call, kernel, moved_bytes(call.inputs, call.outputs), MOVES[call.stem])


def _stream(
    call: Call, kernel: str, total: float, instructions: float, kind: str = "movement", *, integers: float = 0.0
) -> Work | str:
    outputs = float(sum(tensor.elements for tensor in call.outputs))
    if not call.outputs:
        return f"no rule for {call.name}"
    moved = Moved(kernel=kernel, bytes=total, outputs=outputs, instructions=instructions, integers=integers)
    part = WorkPart({}, moved=moved)
    return Work(kind=kind, parts=(part,), flops=0.0, bytes=total, dtype=call.dtype or "float32")


def gather(call: Call) -> Work | str:
    """The work of reading elements of a table: as many as are written, and their places."""
    if not call.outputs:
        return _recorded_embedding(call) if call.stem == "embedding" else f"no rule for {call.name}"
    table, *indices = tensors_of(call.inputs)
    written = float(sum(tensor.bytes for tensor in call.outputs))
    total = min(written, table.bytes) + written + sum(stored_bytes(index) for index in indices)
    kernel = GATHERS[call.stem]
    integers = _ROW_INTEGERS if kernel == "indexSelectLargeIndex" else 0.0
    return _stream(call, kernel, total, 0.0 if integers else _GATHER_INSTRUCTIONS, integers=integers)


def _recorded_embedding(call: Call) -> Work | str:
    table, index = call.inputs.tensor(0), call.inputs.tensor(1)
    if table is None or index is None or len(table.dims) != 2:
        return "sizes of its operands not recorded"
    dtype = DTYPES.get(table.dtype)
    if dtype is None or not table.elements * index.elements:
        return f"elements of type {table.dtype or 'unknown'}" if dtype is None else "an empty tensor"
    count = index.elements * table.dims[1]
    part = WorkPart({"op": "elementwise", "function": "neg", "shape": [count], "dtype": dtype})
    moved = 2.0 * part.data["shape"][0] * (table.bytes / table.elements)
    return Work(kind="embedding", parts=(part,), flops=0.0, bytes=moved, dtype=dtype)


def scatter(call: Call) -> Work | str:
    """The work of writing or adding elements at places; a result of its own begins as a copy."""
    tensors = tensors_of(call.inputs)
    if not call.outputs or len(tensors) < 2:
        return f"no rule for {call.name}"
    target, others = tensors[0], tensors[1:]
    source = max(others, key=lambda tensor: tensor.bytes)
    changed = min(float(source.elements), float(target.elements)) * target.bytes / max(target.elements, 1)
    places = sum(stored_bytes(tensor) for tensor in others)
    at = Moved(
        kernel="indexing_backward_kernel" if "put" in call.stem else "scatter_kernel",
        bytes=places + 2 * changed,
        outputs=float(source.elements),
        instructions=_SCATTER_INSTRUCTIONS,
    )
    parts = [WorkPart({}, moved=at)]
    if not call.name.endswith("_"):
        copied = 2.0 * call.outputs[0].bytes
        copy = Moved(
            kernel="vectorized_elementwise_kernel", bytes=copied, outputs=float(target.elements), model="element-wise"
        )
        parts.insert(0, WorkPart({}, moved=copy))
    total = sum(part.moved.bytes for part in parts if part.moved is not None)
    return Work(kind="movement", parts=tuple(parts), flops=0.0, bytes=total, dtype=call.dtype or "float32")


def scattered_gradient(call: Call) -> Work | str:
    """The work of a gradient that is zero but for what was taken: zeros, and the taken elements written over them."""
    if not call.outputs:
        return f"no rule for {call.name}"
    output, given = call.outputs[0], tensors_of(call.inputs)
    zeros = Moved(
        kernel="vectorized_elementwise_kernel",
        bytes=float(output.bytes),
        outputs=float(output.elements),
        instructions=1.0,
        model="element-wise",
    )
    is_sum = call.stem == "embedding_dense_backward"
    read = float(sum(stored_bytes(tensor) for tensor in given))
    taken = given[0].elements if given else 0
    rows = float(taken * output.bytes / max(output.elements, 1))
    at = Moved(
        kernel="embedding_backward_feature_kernel" if is_sum else "elementwise_kernel",
        bytes=read + rows * (2 if is_sum else 1),
        outputs=float(taken),
        instructions=_SCATTER_INSTRUCTIONS,
    )
    parts = (WorkPart({}, moved=zeros), WorkPart({}, moved=at))
    return Work(kind="movement", parts=parts, flops=0.0, bytes=zeros.bytes + at.bytes, dtype=call.dtype or "float32")


def pool(call: Call) -> Work | str:
    """The work of pooling over windows, as one of Roller's operators; places of maxima are eight bytes each."""
    backward = call.stem.endswith("_backward")
    tensor = call.inputs.tensor(int(backward))
    if tensor is not None and call.outputs and len(tensor.dims) == 5:
        return _pool_volumes(call, tensor)
    if tensor is None or len(tensor.dims) != 4:
        return "sizes of its operands not recorded" if tensor is None else "pooling without a batch"
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        return f"elements of type {tensor.dtype or 'unknown'}"
    window, stride, padding = (pair(call.inputs.value(1 + backward + i)) for i in range(3))
    if window is None:
        return "its window was not recorded"
    stride = stride or window
    op = "avg_pool2d" if call.stem.startswith("avg") else "max_pool2d"
    n, c, h, w = tensor.dims
    rows, columns = padding or (0, 0)
    # A window that is larger than its image, rounded up, has one place, and less to read.
    window = (min(window[0], h + 2 * rows), min(window[1], w + 2 * columns))
    data = {
        "op": op, "n": n, "c": c, "h": h, "w": w, "kh": window[0], "kw": window[1], "stride": list(stride),
        "padding": [rows, columns, rows, columns], "dtype": dtype,
    }  # fmt: skip
    direction: Direction = "backward" if backward else "forward"
    size = tensor.bytes / tensor.elements if tensor.elements else 0.0
    total = tensor.elements * size * (1 + 1 / (stride[0] * stride[1]))
    moved = None
    if call.outputs:
        total = moved_bytes(call.inputs, call.outputs)
        # Backward every element of the input looks at the windows that have it.
        taps = window[0] * window[1] / (stride[0] * stride[1] if backward else 1)
        instructions = 3.0 * max(taps, 1.0) + (20.0 if backward else 0.0)
        places = not backward and not is_channels_last(tensor)
        moved = Moved(
            kernel=POOLS[call.stem],
            bytes=total,
            outputs=float(call.outputs[0].elements),
            instructions=0.0 if places else instructions,
            integers=_window_integers(call, taps) if places else 0.0,
        )
    part = WorkPart(data, direction, moved)
    return Work(kind="pooling", parts=(part,), flops=float(tensor.elements), bytes=total, dtype=dtype)


def _window_integers(call: Call, taps: float) -> float:
    """Integer instructions per result of a window of so many elements in NCHW."""
    each = _MEAN_INTEGERS if call.stem.startswith("avg") else _MAXIMUM_INTEGERS
    return _PLACE_INTEGERS + each * taps


def _pool_volumes(call: Call, tensor: RecordedTensor) -> Work | str:
    """The work of pooling over three dimensions."""
    window = call.inputs.value(1)
    sides = window * 3 if isinstance(window, list) and len(window) == 1 else window
    if not isinstance(sides, list) or len(sides) != 3 or not all(type(side) is int for side in sides):
        return "its window was not recorded"
    total = moved_bytes(call.inputs, call.outputs)
    moved = Moved(
        kernel=POOLS[call.stem],
        bytes=total,
        outputs=float(call.outputs[0].elements),
        instructions=0.0,
        integers=_window_integers(call, math.prod(sides)),
    )
    dtype = call.dtype or "float32"
    return Work(kind="pooling", parts=(WorkPart({}, moved=moved),), flops=0.0, bytes=total, dtype=dtype)


def adaptive_pool(call: Call) -> Work | str:
    """The work of pooling over windows that follow from the sizes: every element of the input is read once."""
    source = call.inputs.tensor(0)
    if source is None or not call.outputs:
        return f"no rule for {call.name}"
    points = 3.0 * source.elements / max(call.outputs[0].elements, 1)
    total = moved_bytes(call.inputs, call.outputs)
    return _stream(call, ADAPTIVE_POOLS[call.stem], total, points, "pooling")


def sort(call: Call) -> Work | str:
    """The work of sorting: passes over keys and their places."""
    source = call.inputs.tensor(0)
    ranked = _ranked(call, source) if call.stem == "topk" and source is not None else None
    if source is None or not (call.outputs or ranked):
        return f"no rule for {call.name}"
    if ranked is not None:
        part = WorkPart({}, moved=ranked)
        return Work(kind="sorting", parts=(part,), flops=0.0, bytes=ranked.bytes, dtype=ranked.dtype)
    outputs = max(sum(tensor.elements for tensor in call.outputs), 1)
    selects = call.stem in ("topk", "kthvalue")
    total = SORTS[call.stem] * (source.bytes if selects else source.bytes + 8 * source.elements)
    instructions = _SORT_INSTRUCTIONS * source.elements / outputs
    return _stream(call, "gatherTopK" if selects else "radixSortKVInPlace", total, instructions, "sorting")


def _ranked(call: Call, source: RecordedTensor) -> Moved | None:
    """PyTorch's kernels of values by rank; None where sizes were not recorded, or for integers."""
    k, axis = call.inputs.value(1), call.inputs.value(2)
    axis = axis if type(axis) is int else -1
    dtype, is_axis = DTYPES.get(source.dtype), -len(source.dims) <= axis < len(source.dims)
    columns = source.dims[axis] if is_axis else 0
    if type(k) is not int or dtype is None or not 1 <= k <= columns or not source.elements:
        return None
    rows = source.elements // columns
    total = source.bytes + rows * k * (source.bytes / source.elements + _PLACE_BYTES)
    return Moved(
        kernel="topk", bytes=total, outputs=2.0 * rows * k, model="row-wise", dtype=dtype,
        walk=(float(rows), float(columns), float(k)),
    )  # fmt: skip


def fused(call: Call) -> Work | str:
    """The work of a kernel that TorchInductor makes of several operators: what goes in and what comes out."""
    given = tensors_of(call.inputs)
    if not call.outputs:
        return f"no rule for {call.name}"
    total = moved_bytes(call.inputs, call.outputs)
    outputs = sum(tensor.elements for tensor in call.outputs)
    largest = max(tensor.elements for tensor in (*given, *call.outputs))
    instructions = _FUSED_INSTRUCTIONS * largest / max(outputs, 1)
    return _stream(call, call.stem, total, instructions, "fused")
