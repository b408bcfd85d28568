"""CPU kernels of a bundle as functions of NumPy arrays: what runs them imports neither TVM nor a compiler.

All kernels of a process share the threads of the first that was loaded, so that several shared objects do not fight
for the cores.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.bundle.records import SHARED_OBJECT_SUFFIX, Argument, Bundle, KernelRecord
from codegen.runtime.operator import BundleOperator, mismatch
from hal.support.errors import InputError

Array = NDArray[Any]

#: Bytes that scratch memory is aligned to: a page.
_ALIGNMENT_BYTES = 4096

_lock = threading.Lock()
#: ``roller_parallel`` and ``roller_threads`` of the first shared object, once there is one.
_pool: list[tuple[int, int]] = []


class CpuOperator(BundleOperator):
    """An operator of a bundle: ``c = operator(a, b)`` takes NumPy arrays in the order of :attr:`inputs` and returns a
    new one. Other Python threads run meanwhile.

    Raises:
        InputError: the kernel is no shared object, or cannot be loaded on this machine.
    """

    tensor_word = "arrays"

    def __init__(self, bundle: Bundle, kernel: KernelRecord) -> None:
        super().__init__(bundle, kernel)
        if kernel.binary is None or not kernel.binary.endswith(SHARED_OBJECT_SUFFIX):
            raise InputError(kernel.source, "is no shared library", "give a bundle compiled for a CPU")
        shared_object = _loaded(bundle.directory / kernel.binary)
        try:
            self._function: Any = shared_object[kernel.entry]
        except AttributeError:
            raise InputError(kernel.binary, f"has no function {kernel.entry}", "compile the operator again") from None
        self._function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._function.restype = ctypes.c_int32
        self._parallel, self.threads = _shared_pool(shared_object)
        self._scratch = _aligned(self.threads * kernel.dynamic_shared_bytes)
        self._scratch_address = self._scratch.ctypes.data
        # The name of an array's dtype takes longer to make than to compare the dtype.
        self._dtypes = {argument.dtype: np.dtype(argument.dtype) for argument in bundle.arguments}
        self._pointers: Any = ctypes.c_void_p * (len(bundle.arguments) + 1)

    def __call__(self, *arrays: Array, out: Array | None = None) -> Array:
        """Run the kernel.

        Args:
            arrays: one per input, in order, dense and row-major.
            out: an array to write to in place of a new one; it may not overlap the inputs.

        Raises:
            InputError: an array is not what the kernel takes, or this processor lacks the kernel's instructions.
        """
        result = self._checked(arrays, out)
        self.run(*(array.ctypes.data for array in (*arrays, result)))
        return result

    def bound(self, *arrays: Array, out: Array | None = None) -> Callable[[], Array]:
        """A function without arguments that runs the kernel over these arrays and returns the output, always the same
        one: what is checked at every other call is checked once.

        Raises:
            InputError: an array is not what the kernel takes.
        """
        result = self._checked(arrays, out)
        addresses = self._pointers(*(array.ctypes.data for array in (*arrays, result)), self._scratch_address)
        function, parallel, pointers = self._function, self._parallel, ctypes.cast(addresses, ctypes.c_void_p)

        def run(held: object = (arrays, addresses)) -> Array:  # what the pointers point to lives as long as this does
            if function(parallel, pointers):
                self._refuse()
            return result

        return run

    def run(self, *addresses: int) -> None:
        """Run the kernel over tensors that lie at these addresses, the output's last. Nothing of them is checked.

        Raises:
            InputError: this processor lacks the kernel's instructions.
        """
        if self._function(self._parallel, self._pointers(*addresses, self._scratch_address)):
            self._refuse()

    def _refuse(self) -> None:
        problem = f"was compiled for {self.bundle.architecture}, whose vectors this processor does not have"
        raise InputError(self.bundle.name, problem, "compile it for this machine")

    def _checked(self, arrays: Sequence[Array], out: Array | None) -> Array:
        """The output, where the arrays are what the kernel takes."""
        self._check_count(arrays)
        result = np.empty(self.output.shape, self.output.dtype) if out is None else out
        for argument, array in zip((*self.inputs, self.output), (*arrays, result), strict=True):
            self._check(argument, array)
        for argument, array in zip(self.inputs, arrays, strict=True):
            if np.may_share_memory(array, result):
                raise self._overlap(argument)
        return result

    def _check(self, argument: Argument, array: Array) -> None:
        if not isinstance(array, np.ndarray):
            raise self._error(argument.name, f"is {type(array).__name__}", "give a NumPy array")
        fits_dtype = array.dtype == self._dtypes[argument.dtype]
        if array.shape != argument.shape or not fits_dtype or not array.flags.c_contiguous:
            remedy = "give np.ascontiguousarray of it"
            name, dtype = self.bundle.name, array.dtype.name
            raise mismatch(name, argument, array.shape, dtype, fits_dtype=fits_dtype, remedy=remedy)


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        # Its own path, not one that the dynamic linker would search for.
        return ctypes.CDLL(os.fspath(path.resolve()))
    except OSError as error:
        raise InputError(str(path), f"cannot be loaded: {error}", "compile the operator for this machine") from None


def _shared_pool(shared_object: ctypes.CDLL) -> tuple[int, int]:
    """Address of the function that shares blocks out, and how many threads do."""
    with _lock:
        if not _pool:
            threads = shared_object.roller_threads
            threads.restype = ctypes.c_int64
            address = ctypes.cast(shared_object.roller_parallel, ctypes.c_void_p).value
            assert address is not None
            _pool.append((address, int(threads())))
        return _pool[0]


def _aligned(size: int) -> Array:
    """Page-aligned bytes; calls take turns, so that one piece of scratch memory does for all of them."""
    raw = np.empty(size + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + max(1, size)]
