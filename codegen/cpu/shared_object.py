"""A lowered CPU kernel to a shared object that needs nothing but libc: TVM's LLVM writes assembly, the system's
compiler assembles and links it, so that what can be read is what runs.

The object has one function for callers, ``int32_t NAME(roller_parallel_for parallel, void *const *tensors)``:
``tensors`` are the inputs in order, the output, and scratch memory for every thread; ``parallel`` shares the blocks out
(0: the object's own threads).
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from codegen.cpu.function import BLOCKS, LoweredCpu
from codegen.generators import linker
from codegen.tir.lowered import LoweringError, reason_of

#: Lines of assembly: the start of a section, what only debuggers read, and labels that LLVM puts there for them.
_SECTION = re.compile(r"^\t\.(?:section\t|text\b|data\b|bss\b)")
_FOR_DEBUGGERS = re.compile(r"^\t\.(?:file|loc)\t")
_MARK = re.compile(r"^(\.Ltmp\d+):$")
_MARKS = re.compile(r"\.Ltmp\d+\b")


def without_debugging(assembly: str) -> str:
    """A program without debug sections, lines of a source that does not exist, and labels that only these use. They
    are two thirds of the text, and in a format that older assemblers do not read."""
    lines, debugging = [], False
    for line in assembly.splitlines():
        if _SECTION.match(line):
            debugging = ".debug" in line
        if not debugging and not _FOR_DEBUGGERS.match(line):
            lines.append(line)
    used = {mark for line in lines if not _MARK.match(line) for mark in _MARKS.findall(line)}
    return "".join(f"{line}\n" for line in lines if not (match := _MARK.match(line)) or match[1] in used)


POOL = Path(__file__).parent / "runtime" / "pool.c"

_CALL = """
#include <stdint.h>

typedef void (*roller_task)(void *state, int64_t worker, int64_t begin, int64_t end);
typedef void (*roller_parallel_for)(roller_task task, void *state, int64_t count);
extern void roller_parallel(roller_task task, void *state, int64_t count);

/* Which kernel, and how much scratch memory a thread has. */
extern void {blocks_function}({parameters}, int64_t begin, int64_t end);

static void run(void *state, int64_t worker, int64_t begin, int64_t end) {{
    void *const *tensors = state;
    {blocks_function}({arguments}, (char *)tensors[{scratch}] + worker * INT64_C({scratch_bytes}), begin, end);
}}

/* 0; or 1 where this processor lacks the vectors that the kernel was compiled for. */
int32_t {entry}(roller_parallel_for parallel, void *const *tensors) {{
    if (!({supported}))
        return 1;
    (parallel ? parallel : roller_parallel)(run, (void *)tensors, INT64_C({blocks}));
    return 0;
}}
"""
#: What a processor must have for vectors of so many bytes, as a condition in C.
_SUPPORTED = {
    64: " && ".join(f'__builtin_cpu_supports("avx512{part}")' for part in ("f", "vl", "bw", "dq")),
    32: '__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")',
}
_COMPILE_OPTIONS = ("-std=c11", "-O2", "-fPIC", "-fvisibility=default", "-w")
_LINK_OPTIONS = ("-lm", "-lpthread", "-Wl,-z,noexecstack")


@dataclass(frozen=True, kw_only=True)
class SharedObject:
    """A kernel as machine code.

    Attributes:
        entry: name of the function for callers.
        data: the shared object's bytes.
        assembly: what LLVM made of the kernel, to be read.
        blocks: how many blocks it has.
        scratch_bytes: scratch memory per thread, aligned to 64 bytes.
    """

    entry: str
    data: bytes
    assembly: str
    blocks: int
    scratch_bytes: int


def build_shared_object(lowered: LoweredCpu, architecture: str, tensors: int) -> SharedObject:
    """Compile and link a kernel.

    Args:
        lowered: the kernel.
        architecture: the processor by LLVM's name, ``cascadelake``.
        tensors: how many the operator has, its output among them.

    Raises:
        LoweringError: LLVM or the linker refused it, or there is no C compiler.
    """
    entry = lowered.entry
    assembly = _assembly(lowered, architecture)
    compiler = linker()
    if compiler is None:
        raise LoweringError(f"{entry}: there is no C compiler to link with; install gcc or clang")
    with tempfile.TemporaryDirectory(prefix="roller-cpu-") as folder:
        kernel, call, pool, linked = (
            os.path.join(folder, name) for name in ("kernel.s", "call.c", "pool.o", "kernel.so")
        )
        Path(kernel).write_text(assembly, "utf-8")
        Path(call).write_text(_call_text(lowered, entry, tensors), "utf-8")
        Path(pool).write_bytes(_pool_object(compiler))
        _run([compiler, *_COMPILE_OPTIONS, "-shared", "-o", linked, call, pool, kernel, *_LINK_OPTIONS], entry)
        data = Path(linked).read_bytes()
    return SharedObject(
        entry=entry, data=data, assembly=assembly, blocks=lowered.blocks, scratch_bytes=lowered.scratch_bytes
    )


@lru_cache(maxsize=2)
def _pool_object(compiler: str) -> bytes:
    """The thread pool as machine code, compiled once a process: that takes longer than linking a kernel."""
    with tempfile.TemporaryDirectory(prefix="roller-cpu-") as folder:
        target = os.path.join(folder, "pool.o")
        _run([compiler, *_COMPILE_OPTIONS, "-c", "-o", target, os.fspath(POOL)], POOL.name)
        return Path(target).read_bytes()


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        problem = f"{os.path.basename(command[0])} does not link it: {done.stderr.strip()[-300:]}"
        raise LoweringError(f"{what}: {problem}")


def _call_text(lowered: LoweredCpu, entry: str, tensors: int) -> str:
    return _CALL.format(
        entry=entry,
        blocks_function=entry + BLOCKS,
        parameters=", ".join(["void *"] * (tensors + 1)),
        arguments=", ".join(f"tensors[{number}]" for number in range(tensors)),
        scratch=tensors,
        scratch_bytes=lowered.scratch_bytes,
        blocks=lowered.blocks,
        supported=_SUPPORTED.get(lowered.vector_bytes, "1") if platform.machine() == "x86_64" else "1",
    )


@lru_cache(maxsize=8)
def _target(architecture: str) -> Any:
    return tvm.target.Target({"kind": "llvm", "mcpu": architecture, "opt-level": 3})


def _assembly(lowered: LoweredCpu, architecture: str) -> str:
    return without_debugging(llvm_text(lowered, architecture, "asm"))


def llvm_text(lowered: LoweredCpu, architecture: str, kind: str) -> str:
    """Text of a kernel by TVM's LLVM: ``"asm"``, its assembly, or ``"ll"``, the optimised program that this is of.

    Without `LowerTVMBuiltin`, which turns local buffers into calls of TVM's runtime: ours become registers or stack.
    """
    target = _target(architecture)
    # Local buffers are as small as they get: a fifth of TVM's time would go to finding that out.
    context = tvm.transform.PassContext(disabled_pass=["s_tir.CompactBufferAllocation"])
    try:
        module = tirx.transform.BindTarget(target)(lowered.module)
        pipeline, _, _ = tirx.get_default_tir_pipeline(target)
        with target, context:
            module = pipeline(module)
        code = tvm.get_global_func("target.build.llvm")(tirx.transform.LowerIntrin()(module), target)
        return str(code.inspect_source(kind))
    except Exception as error:
        raise LoweringError(f"{lowered.entry}: {reason_of(error)}") from error
