"""Updates of many parameters at once: ``_foreach_*`` operators and fused optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from daydream.operators.inputs import DTYPES, RecordedTensor
from daydream.operators.traffic import Call
from daydream.operators.work import Moved, Work, WorkPart

#: ``multi_tensor_apply``: elements per block, blocks per launch, and tensors per launch by lists of tensors.
CHUNK, BLOCKS = 65536, 320
TENSORS: Mapping[int, int] = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}

#: Fused optimizers: how many of their first lists are written: parameters and state, but not the gradients.
_FUSED: Mapping[str, tuple[int, ...]] = {
    "_fused_adam": (0, 2, 3), "_fused_adamw": (0, 2, 3), "_fused_sgd": (0, 2), "_fused_adagrad": (0, 2),
}  # fmt: skip

#: Instructions per element of a fused optimizer, and of one operator on lists.
_FUSED_INSTRUCTIONS, _LIST_INSTRUCTIONS = 60.0, 6.0

#: Operators on lists that read nothing of what they write.
_WRITE_ONLY = ("_foreach_zero", "_foreach_copy")


def is_update(name: str) -> bool:
    """True if an operator of this name works on lists of tensors.

    >>> is_update("aten::_foreach_add_"), is_update("aten::_fused_adamw_"), is_update("aten::add_")
    (True, True, False)
    """
    stem = name.removeprefix("aten::").removesuffix("_")
    return stem.startswith("_foreach_") or stem in _FUSED or stem == "_amp_foreach_non_finite_check_and_unscale"


def launches_of(sizes: Sequence[int], lists: int) -> int:
    """Kernels that ``multi_tensor_apply`` launches for tensors of so many elements.

    >>> launches_of([1000] * 150, lists=1), launches_of([2**24], lists=1), launches_of([10] * 50, lists=4)
    (2, 1, 2)
    """
    most = TENSORS.get(lists, min(TENSORS.values()))
    launches, tensors, blocks = 0, 0, 0
    for size in sizes:
        tensors += 1
        chunks = -(-size // CHUNK)
        while chunks:
            taken = min(chunks, BLOCKS - blocks)
            chunks -= taken
            blocks += taken
            if blocks == BLOCKS or (tensors == most and not chunks):
                launches, blocks = launches + 1, 0
                # A tensor that is not done goes on in the next launch.
                tensors = 1 if chunks else 0
    return launches + (blocks > 0)


def update(call: Call) -> Work | str:
    """The work of an operator on lists: every tensor read once, and those that change written."""
    lists = [each for each in call.inputs.lists if each]
    if not lists:
        return f"the lists of {call.name} not recorded"
    stem = call.stem
    written = _written(call, lists)
    read = lists[1:] if stem in _WRITE_ONLY else lists
    total = float(sum(tensor.bytes for each in (*read, written) for tensor in each))
    if stem in _FUSED:
        # The counts of steps are scalars.
        lists = lists[: max(_FUSED[stem]) + 1]
    sizes = [tensor.elements for tensor in lists[0]]
    if not sum(sizes):
        return "an empty tensor"
    moved = Moved(
        kernel="multi_tensor_apply_kernel",
        bytes=total,
        outputs=float(sum(tensor.elements for tensor in written) or sum(sizes)),
        instructions=_FUSED_INSTRUCTIONS if stem in _FUSED else _LIST_INSTRUCTIONS,
        launches=launches_of(sizes, len(lists)),
        is_cold=True,
    )
    dtype = DTYPES.get(lists[0][0].dtype, "float32")
    part = WorkPart({}, moved=moved)
    return Work(kind="update", parts=(part,), flops=float(sum(sizes)), bytes=total, dtype=dtype)


def _written(call: Call, lists: Sequence[tuple[RecordedTensor, ...]]) -> tuple[RecordedTensor, ...]:
    """The tensors that are written: results, or in place what came first."""
    if call.stem in _FUSED:
        return tuple(tensor for position in _FUSED[call.stem] if position < len(lists) for tensor in lists[position])
    return lists[0] if call.name.endswith("_") or not call.outputs else call.outputs
