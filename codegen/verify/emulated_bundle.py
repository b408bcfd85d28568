"""Kernels of a bundle run on the processor as a GPU would run them: what a program does without the board at hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from codegen.bundle.reader import choose_kernel
from codegen.bundle.records import Bundle
from codegen.verify.emulator import run_cuda_on_cpu
from codegen.verify.guards import numbers, stored

#: Points of an operator's loops from which on optimising its kernel's text pays.
_POINTS_WORTH_OPTIMIZING = 4e6


def emulate(bundle: Bundle, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The output of a bundle's kernel, as float64.

    Args:
        bundle: of CUDA kernels.
        arrays: the inputs in order, of the shapes that the bundle names; they are rounded to its dtypes.

    Raises:
        EmulatorError: g++ refuses a kernel's text, or it crashes, hangs or breaks a rule of CUDA.
    """
    kernel = choose_kernel(bundle, None)
    memory = {
        argument.name: stored(np.asarray(array, np.float64), argument.dtype)
        for argument, array in zip(bundle.inputs, arrays, strict=True)
    }
    memory |= {name: np.zeros(count, np.uint8) for name, count in kernel.workspace.items()}
    memory[bundle.output.name] = stored(np.zeros(bundle.output.shape), bundle.output.dtype)
    is_long = math.prod(bundle.manifest.axes.values()) > _POINTS_WORTH_OPTIMIZING
    for launch in kernel.parts(bundle.arguments):
        names = launch.tensors
        if launch.zero_output:
            memory[names[-1]] = np.zeros_like(memory[names[-1]])
        emulation = run_cuda_on_cpu(
            (bundle.directory / launch.source).read_text(),
            launch.entry,
            launch.bind(memory),
            launch.grid,
            launch.block,
            [len(names) - 1],
            launch.dynamic_shared_bytes,
            optimized=is_long,
            seeds=(0,),
            maps=launch.tensor_maps,
        )
        memory[names[-1]] = emulation.outputs[0]
    return numbers(memory[bundle.output.name], bundle.output.dtype)
