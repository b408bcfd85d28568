"""OpenCL kernels run on the CPU, where any machine can check what they compute."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hal.support.store import cache_folder

#: The CPU implementation that the project installs and tests with.
_POCL = "Portable Computing Language"

#: Stack of each of its threads, of which memory holds what is touched; and more than a ``pthread_attr_t`` takes.
_STACK_BYTES, _ATTRIBUTES_BYTES = 256 << 20, 128


class OpenClError(RuntimeError):
    """A kernel cannot be built or launched, or there is no OpenCL device; the message is one line.

    Attributes:
        log: the compiler's whole output; may be empty.
    """

    def __init__(self, message: str, log: str = "") -> None:
        self.message = " ".join(message.split())
        self.log = log
        super().__init__(self.message)

    def __reduce__(self) -> tuple[type[OpenClError], tuple[str, str]]:
        return OpenClError, (self.message, self.log)


@dataclass(frozen=True)
class _Session:
    """The one context and queue of a process. Not usable in a forked child: PoCL's threads stay behind."""

    cl: Any
    device: Any
    context: Any
    queue: Any
    process: int


def opencl_available() -> str | None:
    """Why kernels cannot be run here; None where they can."""
    try:
        _session()
    except OpenClError as error:
        return str(error)
    return None


def device_name() -> str:
    """The device that kernels run on, with its driver."""
    device = _session().device
    return f"{device.name.strip()} ({device.platform.name.strip()} {device.driver_version.strip()})"


def run_opencl(
    source: str,
    kernel: str,
    arguments: Sequence[np.ndarray[Any, Any]],
    global_size: Sequence[int],
    local_size: Sequence[int],
    *,
    output_indices: Sequence[int],
    optimized: bool = True,
) -> None:
    """Build ``source``, run its kernel ``kernel`` once and wait for it.

    Args:
        source: OpenCL C.
        kernel: name of one of its kernels.
        arguments: one array per buffer, inputs and outputs in the kernel's order. All of them are copied to the
            device, so an output that was poisoned before shows where the kernel did not write.
        global_size: work items per dimension, a multiple of ``local_size``.
        local_size: work items of a group per dimension.
        output_indices: positions in ``arguments`` of the arrays that receive the results.
        optimized: whether the compiler optimises, which takes it half a second; a short kernel has run to its end by
            then without.

    Raises:
        OpenClError: no device, the source does not compile, or the launch is impossible.
    """
    for position, array in enumerate(arguments):
        if not array.flags.c_contiguous or (position in output_indices and not array.flags.writeable):
            raise OpenClError(f"{kernel}: argument {position} has to be a contiguous array, an output also writeable")
    session = _session()
    cl = session.cl
    function = _build(session, source, kernel, optimized)
    try:
        if function.num_args != len(arguments):
            raise OpenClError(f"{kernel}: takes {function.num_args} arguments, not {len(arguments)}")
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        # An empty array still needs a buffer, and a buffer at least a byte.
        buffers = [
            cl.Buffer(session.context, flags, hostbuf=array if array.nbytes else np.zeros(1, np.uint8))
            for array in arguments
        ]
        for position, buffer in enumerate(buffers):
            function.set_arg(position, buffer)
        launch = cl.enqueue_nd_range_kernel(session.queue, function, tuple(global_size), tuple(local_size))
        launch.wait()
        for position in output_indices:
            if arguments[position].nbytes:
                cl.enqueue_copy(session.queue, arguments[position], buffers[position], is_blocking=True)
    except cl.Error as error:
        raise OpenClError(f"{kernel}: {error} (global {tuple(global_size)}, local {tuple(local_size)})") from error


def _build(session: _Session, source: str, kernel: str, optimized: bool) -> Any:
    """The kernel object. pyopencl's own binary cache stays off: PoCL has one below it."""
    cl = session.cl
    options = ["-w"] if optimized else ["-w", "-cl-opt-disable"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # compiler warnings of a kernel that builds
            program = cl.Program(session.context, source).build(options=options, cache_dir=False)
        return cl.Kernel(program, kernel)
    except cl.Error as error:
        log = str(error)
        first = next((line for line in log.splitlines() if re.search(r"\berror:", line)), log.splitlines()[0])
        raise OpenClError(f"{kernel}: {first}", log) from error


def _session() -> _Session:
    session = _open_session()
    if session.process != os.getpid():
        raise OpenClError("OpenCL was in use before this process was forked; start workers by 'spawn' instead")
    return session


@lru_cache(maxsize=1)
def _open_session() -> _Session:
    os.environ.setdefault("PYOPENCL_NO_CACHE", "1")
    if "POCL_CACHE_DIR" not in os.environ:
        os.environ["POCL_CACHE_DIR"] = str(_cache_directory())
    _widen_stacks()
    try:
        import pyopencl as cl
    except (ImportError, OSError) as error:
        raise OpenClError(f"pyopencl cannot be imported ({error}); run 'make setup'") from error
    try:
        devices = [
            (_POCL not in platform.name, device)
            for platform in cl.get_platforms()
            for device in platform.get_devices(cl.device_type.CPU)
        ]
        if not devices:
            raise OpenClError("no OpenCL CPU device; install one with 'make opencl' (Debian: pocl-opencl-icd)")
        device = min(devices, key=lambda entry: entry[0])[1]
        context = cl.Context([device])
        return _Session(cl, device, context, cl.CommandQueue(context), os.getpid())
    except cl.Error as error:
        raise OpenClError(
            f"no usable OpenCL platform ({error}); install one with 'make opencl' (Debian: pocl-opencl-icd)"
        ) from error


def _widen_stacks() -> None:
    """Give threads that are started from here on room for what all work-items of a group keep in local arrays: PoCL's
    threads, which run a group each, have it on their stacks."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        library = ctypes.CDLL(None)
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        if library.pthread_attr_init(attributes) == 0:
            library.pthread_attr_setstacksize(attributes, ctypes.c_size_t(_STACK_BYTES))
            library.pthread_setattr_default_np(attributes)


def _cache_directory() -> Path:
    """Where PoCL keeps compiled kernels.

    PoCL writes under a temporary name and renames, so killed processes leave nothing half-written behind (tried with
    SIGKILL at random moments). Its cache is therefore left on: a kernel seen before costs 0.05 s instead of 0.5 s,
    and with POCL_KERNEL_CACHE=0 it would leave a directory behind for every kernel all the same.
    """
    try:
        root = cache_folder("pocl")
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(root, os.W_OK | os.X_OK):
            return root
    except (OSError, RuntimeError):  # no home directory, or one that cannot be written
        pass
    private = tempfile.mkdtemp(prefix="roller-pocl-")
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return Path(private)
