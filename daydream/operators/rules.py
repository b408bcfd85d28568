"""Rules from an operator's arguments and results to operators that Roller can price, and to kernels that stream.

Rules stand in tables, a file for each family: products, attention, convolutions, element-wise operators, what goes over
rows, what moves elements, and updates of many parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from daydream.operators import movement, pointwise, rowwise
from daydream.operators.attention import describe_attention, is_attention
from daydream.operators.convolutions import describe_convolution, is_convolution
from daydream.operators.engines import engine, is_engine
from daydream.operators.inputs import Inputs, RecordedTensor
from daydream.operators.products import PRODUCTS, grouped_product, product, recurrent
from daydream.operators.traffic import Call, tensors_of
from daydream.operators.updates import is_update, update
from daydream.operators.work import Work

Rule = Callable[[Call], Work | str]

#: Operators that make views or allocate memory, or work on the host.
VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "expand_as", "permute", "transpose", "t", "numpy_T",
    "squeeze", "unsqueeze", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "narrow", "as_strided",
    "detach", "alias", "diagonal", "unfold", "view_as", "view_as_real", "view_as_complex", "movedim", "swapaxes",
    "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes", "lift_fresh", "empty", "empty_like", "empty_strided",
    "new_empty", "new_empty_strided", "set", "resize", "resize_as", "_local_scalar_dense", "item", "is_same_size",
    "sym_size", "sym_stride", "sym_numel", "record_stream", "contiguous_view", "_to_cpu", "flatten", "unflatten",
    "_conj", "_neg_view", "real", "imag", "result_type", "requires_grad", "_has_compatible_shallow_copy_type",
})  # fmt: skip


def _table(*families: tuple[Iterable[str], Rule]) -> Mapping[str, Rule]:
    return {stem: rule for stems, rule in families for stem in stems}


#: Name without namespace and without the mark of in-place operators -> its rule.
RULES = _table(
    (pointwise.POINTWISE, pointwise.elementwise),
    (pointwise.FILLS, pointwise.fill),
    (rowwise.SOFTMAX, rowwise.softmax),
    (rowwise.LAYER_NORMS, rowwise.layer_norm),
    (rowwise.BATCH_NORMS, rowwise.batch_norm),
    (("native_group_norm", "native_group_norm_backward"), rowwise.group_norm),
    (rowwise.REDUCTIONS, rowwise.reduction),
    (rowwise.SCANS, rowwise.scan),
    (movement.MOVES, movement.moves),
    (movement.GATHERS, movement.gather),
    (movement.SCATTERS, movement.scatter),
    (movement.SCATTERED_GRADIENTS, movement.scattered_gradient),
    (movement.POOLS, movement.pool),
    (movement.ADAPTIVE_POOLS, movement.adaptive_pool),
    (movement.SORTS, movement.sort),
    (("_cudnn_rnn", "_cudnn_rnn_backward"), recurrent),
    (("_grouped_mm",), grouped_product),
)


def launches_nothing(name: str, inputs: Inputs, outputs: tuple[RecordedTensor, ...]) -> bool:
    """True if a captured operator has no kernels: it makes a view, allocates, or has no element to work on."""
    if name.rpartition("::")[2].removesuffix("_") in VIEWS:
        return True
    tensors = outputs or tuple(tensors_of(inputs))
    return bool(tensors) and not any(tensor.elements for tensor in tensors)


@lru_cache(maxsize=65536)
def describe(name: str, inputs: Inputs, outputs: tuple[RecordedTensor, ...] = ()) -> Work | str:
    """The work of an operator, or in words why it is unknown.

    Names are those of the operators that launch kernels (``aten::addmm``), in place or not. Recorded operators come
    without their results: what is written then has the size of the largest input, and many operators have no rule.
    Assumptions: log-softmax costs what softmax costs; batch norm reads its input twice forward and five times over in
    all backward; of recorded tensors of integers nothing is known.

    Args:
        name: with its namespace.
        inputs: arguments in the order of the schema.
        outputs: results, of captured operators.
    """
    if name in PRODUCTS:
        return product(Call(name, inputs, outputs))
    if is_attention(name):
        return describe_attention(name, inputs)
    if is_convolution(name):
        return describe_convolution(name, inputs, outputs)
    call = Call(name, inputs, outputs)
    if is_engine(name):
        return engine(call)
    if is_update(name):
        return update(call)
    if name.startswith("inductor::"):
        return movement.fused(call)
    rule = RULES.get(call.stem)
    return rule(call) if rule is not None else f"no rule for {name}"
