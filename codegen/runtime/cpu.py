"""CPU kernels of a bundle as functions of NumPy arrays: what runs them imports neither TVM nor a compiler.

All kernels of a process share the threads of the first that was loaded, so that several shared objects do not fight
for the cores.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.bundle.records import SHARED_OBJECT_SUFFIX, Argument, Bundle, KernelRecord, LaunchRecord
from codegen.runtime.operator import BundleOperator, mismatch
from hal.support.errors import InputError

Array = NDArray[Any]

#: Bytes that scratch memory is aligned to: a page.
_ALIGNMENT_BYTES = 4096

_lock = threading.Lock()


#: The first shared object, once there is one: its threads are those of all kernels.
_first: list[ctypes.CDLL] = []
#: What a shared object needs of an OpenMP runtime, as GCC's and LLVM's have it.
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_max_threads")


@dataclass(frozen=True)
class _Step:
    """A kernel of an operator.

    Attributes:
        function: its entry in the shared object.
        places: its tensors' places among the arguments of the operator and the workspace.
        pointers: the type of its table of addresses.
    """

    function: Any
    places: tuple[int, ...]
    pointers: Any

    @staticmethod
    def of(shared_object: ctypes.CDLL, launch: LaunchRecord, places: Mapping[str, int]) -> _Step:
        """A kernel by its record.

        Raises:
            InputError: the shared object has no such function.
        """
        try:
            function: Any = shared_object[launch.entry]
        except AttributeError:
            raise InputError(launch.file, f"has no function {launch.entry}", "compile the operator again") from None
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int32
        bound = launch.bind(places)
        return _Step(function, bound, ctypes.c_void_p * (len(bound) + 1))


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
        launches = kernel.parts(bundle.arguments)
        objects = [_loaded(bundle.directory / launch.file) for launch in launches]
        self._parallel, self.threads = _shared_pool(objects[0])
        self._scratch = _aligned(self.threads * max(launch.dynamic_shared_bytes for launch in launches))
        # Calls of several threads take turns: scratch memory and what lies between kernels are one for all.
        self._turn = threading.Lock()
        self._workspace = {name: _aligned(size) for name, size in kernel.workspace.items()}
        names = [*(argument.name for argument in bundle.arguments), *self._workspace]
        places = {name: place for place, name in enumerate(names)}
        self._steps = [
            _Step.of(shared_object, launch, places) for shared_object, launch in zip(objects, launches, strict=True)
        ]
        self._own_addresses = [array.ctypes.data for array in self._workspace.values()]
        self._scratch_address = self._scratch.ctypes.data
        # The name of an array's dtype takes longer to make than to compare the dtype.
        self._dtypes = {argument.dtype: np.dtype(argument.dtype) for argument in bundle.arguments}

    def use_openmp(self) -> bool:
        """Run on the threads of OpenMP from now on, which a program like PyTorch uses for its own; False where
        the process has none."""
        parallel = _openmp_pool()
        if parallel is not None:
            self._parallel = parallel
        return parallel is not None

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
        addresses = [array.ctypes.data for array in (*arrays, result)]
        tables = [(step.function, self._table(step, addresses)) for step in self._steps]
        parallel, calls = (
            self._parallel,
            [(function, ctypes.cast(table, ctypes.c_void_p)) for function, table in tables],
        )

        def run(held: object = (arrays, tables)) -> Array:  # what the pointers point to lives as long as this does
            for function, pointers in calls:
                if function(parallel, pointers):
                    self._refuse()
            return result

        return run

    def run(self, *addresses: int) -> None:
        """Run the kernels over tensors that lie at these addresses, the output's last. Nothing of them is checked.

        Raises:
            InputError: this processor lacks the kernel's instructions.
        """
        with self._turn:
            for step in self._steps:
                if step.function(self._parallel, self._table(step, addresses)):
                    self._refuse()

    def _table(self, step: _Step, addresses: Sequence[int]) -> Any:
        """Arguments of a kernel: its tensors, and scratch memory."""
        everything = (*addresses, *self._own_addresses)
        return step.pointers(*(everything[place] for place in step.places), self._scratch_address)

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
        if not _first:
            shared_object.roller_threads.restype = ctypes.c_int64
            _first.append(shared_object)
        return _address(_first[0].roller_parallel), int(_first[0].roller_threads())


def _openmp_pool() -> int | None:
    """Address of the function that shares blocks out among the threads of the OpenMP runtime of the process; None
    without one."""
    process = ctypes.CDLL(None)
    try:
        runtime = [ctypes.c_void_p(_address(getattr(process, name))) for name in _OPENMP]
    except AttributeError:
        return None
    with _lock:
        _first[0].roller_set_openmp(*runtime)
        return _address(_first[0].roller_parallel_openmp)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _aligned(size: int) -> Array:
    """Page-aligned bytes; calls take turns, so that one piece of scratch memory does for all of them."""
    raw = np.empty(size + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + max(1, size)]
