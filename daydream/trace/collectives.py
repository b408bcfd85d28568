"""Which kernels are collectives: by what the profiler says of them, then by their names.

Names are those of NCCL, RCCL with MSCCL, oneCCL and HCCL; of vLLM's, SGLang's, AITER's, FlashInfer's and TensorRT-LLM's
own all-reduces; of PyTorch's symmetric memory and NVSHMEM; of DeepEP and its relatives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

#: Libraries that do nothing else.
_LIBRARY = re.compile(r"^(?:void\s+)?(?:nccl|rccl|mscclk|msccl_|mscclpp|onecclk|hccl|nvshmem|rocshmem)", re.IGNORECASE)

#: Functions of other libraries, in the name without template arguments and parameters.
_FUNCTION = re.compile(
    r"cross_?device_?reduce|multimem|quick_?reduce|deep_ep::\w*::(?:\w*dispatch|\w*combine|barrier)"
    r"|(?<!warp)(?<!warp_)(?<!block)(?<!block_)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|a2a_kernel"
    r"|(?:one|two)_?shot_(?:push|pull)",
    re.IGNORECASE,
)

#: Inductor names a point-wise kernel or a reduction after every operator that it works for, collectives included.
_GENERATED = re.compile(r"^triton_(?:poi|red|per|for|tem)_")

#: Kernels of ATen flatten and copy tensors for a collective: they are no part of it, though the profiler says so.
_ATEN = re.compile(r"\bat::|\bat_cuda|\bcub::|elementwise|CatArray|Memcpy|Memset", re.IGNORECASE)

#: Kinds of collectives by parts of names without punctuation; those that hold others come first.
_WORDS = (
    ("crossdevicereduce", "allreduce"),
    ("quickreduce", "allreduce"),
    ("allreduce", "allreduce"),
    ("reducescatter", "reducescatter"),
    ("allgather", "allgather"),
    ("alltoall", "alltoall"),
    ("deepep", "alltoall"),
    ("barrier", "barrier"),
    ("broadcast", "broadcast"),
    ("sendrecv", "sendrecv"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
    ("recv", "recv"),
    ("send", "send"),
)


@lru_cache(maxsize=65536)
def is_collective_name(name: str) -> bool:
    """Kernels of a collective by name alone.

    >>> is_collective_name("ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)")
    True
    >>> is_collective_name("void vllm::cross_device_reduce_1stage<__half, 2>(vllm::RankData*, int)")
    True
    >>> is_collective_name("void softmax_kernel<WarpAllReduce<float>>(float*)"), is_collective_name("Memcpy DtoD")
    (False, False)
    """
    if _LIBRARY.match(name):
        return True
    return not _GENERATED.match(name) and _FUNCTION.search(_function(name)) is not None


def is_collective(name: str, arguments: Mapping[str, Any]) -> bool:
    """Kernels of a collective by the profiler's "Collective name", else by name."""
    if isinstance(arguments.get("Collective name"), str) and not _ATEN.search(name):
        return True
    return is_collective_name(name)


def collective_word(*texts: object) -> str:
    """The kind of a collective in NCCL's words (``allreduce``, ``reducescatter``, ...), by the first text that says it.

    >>> collective_word(None, "_allgather_base"), collective_word("ncclDevKernel_Generic"), collective_word("send")
    ('allgather', '', 'send')
    """
    for text in texts:
        letters = re.sub(r"[^a-z]", "", str(text or "").lower())
        for part, word in _WORDS:
            if part in letters:
                return word
    return ""


def _function(name: str) -> str:
    """A kernel's name without template arguments and parameters."""
    return re.split(r"[<(]", name.replace("(anonymous namespace)", ""), maxsplit=1)[0]
