"""Tensors of forward operators that autograd keeps for gradients, from recorded sizes of arguments alone.

A recording names no storages. A tensor is taken for the one of its sizes and type that was written last; what an
operator writes has the sizes of its first argument where it works element by element, else those of the next one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from daydream.operators.inputs import Inputs, RecordedTensor, inputs_of
from daydream.trace.dtypes import element_bytes
from daydream.trace.trace import NONE, Ints, Trace

#: Outermost operators whose gradients need arguments of theirs: which (weights are kept anyway).
SAVES_ARGUMENTS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose2d", "linear"), (0,)),
    **dict.fromkeys(("batch_norm", "layer_norm", "group_norm", "instance_norm", "native_layer_norm", "rms_norm"), (0,)),
    **dict.fromkeys(("gelu", "silu", "mish", "hardswish", "elu", "hardtanh", "pow", "log", "abs", "cos", "sin"), (0,)),
    **dict.fromkeys(("mm", "bmm", "matmul", "mul", "div", "baddbmm"), (0, 1)),
    **dict.fromkeys(("scaled_dot_product_attention",), (0, 1, 2)),
    "addmm": (1,),
    "embedding": (1,),
}

#: Those whose gradients need their result.
SAVES_RESULTS = frozenset({
    "relu", "leaky_relu", "sigmoid", "tanh", "softmax", "log_softmax", "exp", "sqrt", "rsqrt", "cross_entropy_loss",
    "scaled_dot_product_attention", "threshold", "clamp_min",
})  # fmt: skip

#: Bytes for every element of the first argument that are kept besides: masks of dropout; indices of 2x2 pooling.
SAVES_MORE: Mapping[str, float] = {"dropout": 1.0, "max_pool2d": 2.0}

#: What writes tensors of other sizes than its first argument's.
_RESIZES = frozenset({
    "conv1d", "conv2d", "conv3d", "convolution", "conv_transpose2d", "linear", "mm", "bmm", "matmul", "addmm",
    "baddbmm", "embedding", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "cat", "flatten", "view", "reshape",
    "permute", "transpose", "unflatten", "split", "chunk", "mean", "sum",
})  # fmt: skip


@dataclass
class SavedTensor:
    """A tensor that autograd keeps: bytes, the moment it is made in, and the last one that needs it."""

    bytes: float
    born: int
    died: int = NONE


@dataclass
class _Tensors:
    """The tensors written so far, the last of each size and type."""

    latest: dict[tuple[tuple[int, ...], str], SavedTensor] = field(default_factory=dict)
    every: list[SavedTensor] = field(default_factory=list)
    unknown: int = NONE

    def read(self, tensor: RecordedTensor, moment: int, *, first: bool) -> SavedTensor:
        """The tensor that an argument is; a first argument may be what an operator of unknown result wrote."""
        key = (tensor.dims, tensor.dtype)
        if key not in self.latest or (first and self.unknown != NONE):
            return self.write(tensor, self.unknown if first and self.unknown != NONE else moment)
        return self.latest[key]

    def write(self, tensor: RecordedTensor, moment: int) -> SavedTensor:
        """A new tensor of these sizes."""
        made = SavedTensor(float(tensor.bytes), moment)
        self.latest[tensor.dims, tensor.dtype] = made
        self.every.append(made)
        return made

    def keep(self, size: float, moment: int, until: int) -> None:
        """Memory that no tensor of the program is."""
        self.every.append(SavedTensor(size, moment, until))


def saved_tensors(
    trace: Trace, events: Ints, forward: Sequence[int], backward_of: Mapping[int, int]
) -> list[SavedTensor]:
    """The tensors that a step's forward operators keep, each once.

    Args:
        trace: with recorded sizes.
        events: the trace row of every moment.
        forward: the moments of outermost forward operators.
        backward_of: the moment of the gradient of each, where there is one.
    """
    tensors = _Tensors()
    for moment in forward:
        row = int(events[moment])
        name = trace.text(row).rpartition("::")[2]
        inputs = inputs_of(trace, row)
        arguments = [] if inputs is None else [each for each in inputs.tensors if each is not None]
        if not arguments or inputs is None or not arguments[0].dims:
            # Counters are no part of what follows.
            continue
        stem = name.removesuffix("_")
        until = backward_of.get(moment, NONE)
        _call(tensors, stem, moment, until, inputs, in_place=name != stem)
    return [each for each in tensors.every if each.died != NONE]


def _call(tensors: _Tensors, stem: str, moment: int, until: int, inputs: Inputs, *, in_place: bool) -> None:
    first = next(each for each in inputs.tensors if each is not None)
    wanted = SAVES_ARGUMENTS.get(stem, ())
    read = None
    for place, tensor in enumerate(inputs.tensors):
        if tensor is None:
            continue
        argument = tensors.read(tensor, moment, first=tensor is first)
        read = argument if tensor is first else read
        if place in wanted and until != NONE:
            argument.died = max(argument.died, until)
        if tensor is first:
            tensors.unknown = NONE
    if until != NONE and stem in SAVES_MORE:
        size = first.elements * (SAVES_MORE[stem] if stem != "dropout" else element_bytes("bool"))
        tensors.keep(size, moment, until)
    if stem in _RESIZES:
        tensors.unknown = moment
        return
    result = read if in_place and read is not None else tensors.write(first, moment)
    if until != NONE and stem in SAVES_RESULTS:
        result.died = max(result.died, until)
