"""Lowered kernels as source text: CUDA C++ for NVIDIA, OpenCL C for AMD and for the CPU that verifies everything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import tvm

from codegen.lower import Lowered

#: TVM writes this suffix behind the name of every device function it splits off.
KERNEL_SUFFIX = "_kernel"


class LoweringError(RuntimeError):
    """TVM could not lower a schedule; the message is one line."""


@lru_cache(maxsize=16)
def _target(kind: str, architecture: str, warp_size: int) -> Any:
    fields: dict[str, Any] = {
        "kind": kind,
        "max_num_threads": 1024,
        "thread_warp_size": warp_size,
        "host": {"kind": "llvm"},
    }
    if kind == "cuda":
        fields |= {"arch": architecture, "max_shared_memory_per_block": 49152, "max_threads_per_block": 1024}
    return tvm.target.Target(fields)


def cuda_source(lowered: Lowered, architecture: str, parameters: Sequence[str]) -> str:
    """CUDA source of a lowered kernel with TVM's prelude, its parameters in the order of ``parameters``."""
    return _source(lowered, _target("cuda", architecture, 32), parameters)


def opencl_source(lowered: Lowered, parameters: Sequence[str], wavefront: int = 1) -> str:
    """OpenCL C source of a lowered kernel, its parameters in the order of ``parameters``."""
    return _source(lowered, _target("opencl", "", wavefront), parameters)


def _source(lowered: Lowered, target: Any, parameters: Sequence[str]) -> str:
    try:
        executable = tvm.compile(lowered.module, target)
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "")
        raise LoweringError(f"{lowered.entry}: {reason[:300]}") from error
    source: str = executable.mod.imports[0].inspect_source()
    return _order_parameters(source, lowered.entry + KERNEL_SUFFIX, parameters)


def _order_parameters(source: str, kernel: str, parameters: Sequence[str]) -> str:
    """TVM sorts a device function's parameters by name; ours are the inputs in order, then the output."""
    rank = {f"{name}_ptr": position for position, name in enumerate(parameters)}

    def ordered(match: re.Match[str]) -> str:
        given = [part.strip() for part in match.group(2).split(",")]
        names = [part.split()[-1].lstrip("*") for part in given]
        if sorted(names) != sorted(rank):
            raise LoweringError(f"{kernel}: parameters {names} are not the operator's {list(rank)}")
        return match.group(1) + ", ".join(sorted(given, key=lambda part: rank[part.split()[-1].lstrip("*")])) + ")"

    return re.sub(rf"(\b{re.escape(kernel)}\()([^)]*)\)", ordered, source)
