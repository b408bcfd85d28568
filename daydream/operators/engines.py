"""Operators of serving engines by their names: vLLM's, SGLang's and FlashInfer's norms, gates and rotary embeddings.

Recordings have them as custom operators of PyTorch. Which kernel each launches is what its source says of current
releases (vLLM 0.19, sgl-kernel, FlashInfer 0.6); their times are those of :mod:`roller.library.streaming.row_kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from daydream.operators.inputs import DTYPES, RecordedTensor
from daydream.operators.traffic import Call, tensors_of
from daydream.operators.work import Moved, Work, WorkPart


class _Engine(NamedTuple):
    """A kernel by its name in ``ROW_KERNELS``, the argument that has its rows, and results per element of that."""

    kernel: str
    at: int
    share: float = 1.0


_GATES = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "mul_and_silu", "fatrelu_and_mul", "swigluoai_and_mul")

#: Namespaces of operators whose kernels are FlashInfer's.
_FLASHINFER = ("sgl_kernel", "flashinfer")

#: Operators by name. Gates write first, and read twice as many columns.
ENGINES: Mapping[str, _Engine] = {
    "_C::rms_norm": _Engine("vllm rms_norm", 1),
    "_C::fused_add_rms_norm": _Engine("vllm fused_add_rms_norm", 0),
    **{f"_C::{gate}": _Engine("vllm act_and_mul by vectors", 1, 0.5) for gate in _GATES},
    **{f"_C::gelu_{kind}": _Engine("vllm activation", 1) for kind in ("new", "fast", "quick")},
    **{f"{name}::rmsnorm": _Engine("flashinfer rmsnorm", 1) for name in _FLASHINFER},
    **{f"{name}::fused_add_rmsnorm": _Engine("flashinfer fused_add_rmsnorm", 0) for name in _FLASHINFER},
    **{f"{name}::{gate}": _Engine("flashinfer act_and_mul", 1, 0.5) for name in _FLASHINFER for gate in _GATES[:3]},
}

#: vLLM's rotary embedding: positions, queries, keys, elements of a head, table of cosines and sines.
ROTARY = "_C::rotary_embedding"


def is_engine(name: str) -> bool:
    """True if an operator of this name is one of a serving engine whose kernel is known.

    >>> is_engine("_C::rms_norm"), is_engine("aten::rms_norm")
    (True, False)
    """
    return name in ENGINES or name == ROTARY


def engine(call: Call) -> Work | str:
    """The work of an operator of a serving engine: one kernel with a block per row."""
    if call.name == ROTARY:
        return _rotary(call)
    kernel, at, share = ENGINES[call.name]
    source = call.inputs.tensor(at)
    if source is None or not source.elements:
        return f"sizes of {call.name}'s operands not recorded"
    rows = source.elements // source.dims[-1]
    return _work(call, kernel, source, (rows, source.dims[-1] * share, 0.0))


def _rotary(call: Call) -> Work | str:
    positions, query, key, table = (call.inputs.tensor(at) for at in (0, 1, 2, 4))
    head = call.inputs.value(3)
    if positions is None or query is None or table is None or not positions.elements or type(head) is not int:
        return f"sizes of {call.name}'s operands not recorded"
    # A column is a pair of the elements of a head that are turned.
    share = table.dims[-1] / head / 2
    sizes = [tensor.elements / positions.elements * share if tensor is not None else 0.0 for tensor in (query, key)]
    return _work(call, "vllm rotary_embedding", query, (positions.elements, *sizes))


def _work(call: Call, kernel: str, source: RecordedTensor, walk: tuple[float, ...]) -> Work | str:
    dtype = DTYPES.get(source.dtype)
    if dtype is None:
        return f"elements of type {source.dtype or 'unknown'}"
    outputs = walk[0] * (walk[1] + walk[2])
    total = float(sum(tensor.bytes for tensor in tensors_of(call.inputs)))
    moved = Moved(kernel=kernel, bytes=total, outputs=outputs, dtype=dtype, model="row-wise", walk=walk)
    part = WorkPart({}, moved=moved)
    return Work(kind="row-wise", parts=(part,), flops=4 * outputs, bytes=total, dtype=dtype)
