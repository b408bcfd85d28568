"""Launching the kernels of a bundle with CuPy, with NumPy and CuPy and nothing else.

A kernel runs from its cubin where the GPU is of its architecture, else NVRTC compiles its source for the GPU at hand.
Neither TVM nor sympy nor any part of the compiler is imported.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from codegen.bundle.records import Argument, Bundle, KernelRecord, LaunchRecord
from codegen.runtime.arrays import DeviceTensor, Tensors, cupy_module, holds, tensors_of
from codegen.runtime.operator import BundleOperator, mismatch
from codegen.runtime.tensor_maps import encoded
from hal.support.errors import InputError

#: Dynamic shared memory that a launch may have without asking for more (CUDA C++ Programming Guide, 16.4.3).
UNASKED_SHARED_BYTES = 48 * 1024

#: What the vector accesses of kernels rely on.
ALIGNMENT_BYTES = 16

_ARCHITECTURE = re.compile(r"sm_(\d+)(\d)([af]?)")


def runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """True if a cubin for ``architecture`` runs on a GPU of this compute capability.

    Their major numbers are equal and the GPU's minor one is no smaller; ``sm_90a`` runs on exactly 9.0 (CUDA C++
    Programming Guide, 5.1).

    >>> runs_on("sm_80", (8, 6)), runs_on("sm_90a", (9, 0)), runs_on("sm_86", (8, 0))
    (True, True, False)
    """
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None:
        return False
    major, minor = int(match[1]), int(match[2])
    if match[3] == "a":
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]


def capability_of(cupy: Any, device: int) -> tuple[int, int]:
    """Compute capability of a GPU: 9.0 is (9, 0); CuPy writes it as ``"90"``."""
    text = str(cupy.cuda.Device(device).compute_capability)
    return int(text[:-1]), int(text[-1])


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel on one GPU: its launches in order, each with CuPy's function; ``how`` is ``cubin`` or what NVRTC
    compiled the sources for.

    ``arguments`` names the pointers that it is given. ``streams`` holds the tensors between its launches, a set of them
    for every stream that it has been launched on: two launches on one stream follow each other, on two they may not.
    """

    entry: KernelRecord
    arguments: tuple[str, ...]
    steps: tuple[tuple[LaunchRecord, Any], ...]
    how: str
    streams: dict[int, dict[str, Any]] = field(default_factory=dict)

    def launch(self, pointers: Sequence[int], output_bytes: int, at_size: int | None = None) -> None:
        """Queue it on CuPy's current stream; ``pointers`` in the manifest's order, the output's last. ``at_size``
        is the size that is known at launch, where there is one."""
        addresses = dict(zip(self.arguments, pointers, strict=True))
        addresses |= {name: array.data.ptr for name, array in self.workspace().items()}
        for step, function in self.steps:
            last = step.tensors[-1]
            if step.zero_output:
                cupy = cupy_module()
                size = self.entry.workspace.get(last, output_bytes)
                cupy.cuda.runtime.memsetAsync(addresses[last], 0, size, cupy.cuda.get_current_stream().ptr)
            maps = {seen.tensor: seen.at(at_size) for seen in step.tensor_maps}
            bound = zip(step.tensors, step.bind(addresses), strict=True)
            parameters: tuple[Any, ...] = tuple(
                encoded(maps[name], address) if name in maps else address for name, address in bound
            )
            if step.launch is not None and at_size is not None:
                parameters = (*parameters, np.int32(at_size))
            function(step.grid_at(at_size), step.block, parameters, shared_mem=step.dynamic_shared_bytes)

    def workspace(self) -> dict[str, Any]:
        """The tensors between its launches for CuPy's current stream, as bytes; allocated when it is first asked for
        there, and kept as long as the kernel."""
        if not self.entry.workspace:
            return {}
        cupy = cupy_module()
        stream = cupy.cuda.get_current_stream().ptr
        if stream not in self.streams:
            sizes = self.entry.workspace.items()
            self.streams[stream] = {name: cupy.empty(count, "uint8") for name, count in sizes}
        return self.streams[stream]


def load_kernel(bundle: Bundle, entry: KernelRecord, device: int) -> LoadedKernel:
    """A kernel of a bundle on a GPU, ready to launch.

    Raises:
        InputError: it cannot be loaded or compiled there, or it needs more shared memory than the GPU has.
    """
    cupy = cupy_module()
    capability = capability_of(cupy, device)
    launches = entry.parts(bundle.arguments)
    fits = all(step.binary and runs_on(step.architecture or bundle.architecture, capability) for step in launches)
    how = "cubin" if fits else f"NVRTC for sm_{capability[0]}{capability[1]}"
    steps = []
    with cupy.cuda.Device(device):
        for step in launches:
            _check_shared(cupy, step, device)
            path = bundle.directory / step.file
            module = cupy.RawModule(path=str(path)) if fits else source_module(bundle.directory / step.source)
            steps.append((step, _function(module, step, how)))
    return LoadedKernel(entry, tuple(argument.name for argument in bundle.arguments), tuple(steps), how)


def source_module(source: Path) -> Any:
    """CuPy's module of a CUDA source, to be compiled by NVRTC for the GPU that is current when it is used."""
    options = ("--std=c++17", "-default-device", *(f"-I{folder}" for folder in header_directories()))
    return cupy_module().RawModule(code=source.read_text(), options=options, backend="nvrtc")


def header_directories() -> list[str]:
    """Headers of the CUDA wheels that go with CuPy: of CUDA 12 a folder per package, of CUDA 13 one for all."""
    major = int(cupy_module().cuda.runtime.runtimeGetVersion()) // 1000
    folders = []
    for package in ("nvidia.cuda_runtime", "nvidia.cuda_cccl") if major < 13 else (f"nvidia.cu{major}",):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            spec = None
        for location in (spec.submodule_search_locations or ()) if spec else ():
            folder = Path(location) / "include"
            folders += [str(folder)] if folder.is_dir() else []
    return folders


def _check_shared(cupy: Any, entry: LaunchRecord, device: int) -> None:
    limit = int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])
    if entry.dynamic_shared_bytes > limit:
        problem = f"needs {entry.dynamic_shared_bytes} bytes of shared memory a block, this GPU gives {limit}"
        raise InputError(entry.source, problem, "choose another rank or compile for this board")


def _function(module: Any, entry: LaunchRecord, how: str) -> Any:
    """The kernel's function; CuPy loads and compiles when it is asked for it."""
    try:
        function = module.get_function(entry.entry)
        if entry.dynamic_shared_bytes > UNASKED_SHARED_BYTES:
            function.max_dynamic_shared_size_bytes = entry.dynamic_shared_bytes
    except Exception as error:  # CuPy's compiler and driver errors share no base class of theirs
        remedy = "compile the operator for this GPU's architecture"
        raise InputError(entry.source, f"cannot be loaded ({how}): {error}", remedy) from error
    return function


class GpuOperator(BundleOperator):
    """An operator of a bundle as a function of GPU tensors.

    ``c = operator(a, b)`` takes CuPy arrays, PyTorch tensors or anything else with DLPack, without copying them, in
    the order of :attr:`inputs`; launches on the current stream of their framework and device; and returns a new tensor
    of the same framework. It does not wait for the GPU, and puts nothing on one until tensors there are given.

    Raises:
        InputError: the bundle is for CPUs.
    """

    def __init__(self, bundle: Bundle, kernel: KernelRecord) -> None:
        super().__init__(bundle, kernel)
        if bundle.is_for_cpu:
            raise InputError(
                str(bundle.directory), "holds shared libraries, no GPU kernels", "load it with roller.load"
            )
        #: Kernels by device and rank.
        self.loaded: dict[tuple[int, int], LoadedKernel] = {}

    def __call__(self, *tensors: Any, out: Any = None) -> Any:
        """Queue the kernel and return its output.

        Args:
            tensors: one per input, in order, dense and row-major, all on one GPU.
            out: a tensor to write to in place of a new one; it may not overlap the inputs.

        Raises:
            InputError: a tensor is not what the kernel takes, or the kernel cannot be loaded on the GPU.
        """
        self._check_count(tensors)
        size = self._size(tensors)
        described = [self._checked(a.at(size), t) for a, t in zip(self.inputs, tensors, strict=True)]
        kernel, output = self.kernel_at(size), self.output.at(size)
        framework = self._framework(tensors)
        device = self._one_device(described)
        with cupy_module().cuda.Device(device), framework.stream(device):
            result = framework.empty(output.shape, output.dtype, tensors, device) if out is None else out
            target = self._checked(output, result)
            self._check_target(described, target, size)
            pointers = [t.pointer for t in (*described, target)]
            self.on_device(device, kernel).launch(pointers, output.size_bytes, size)
            return framework.give(result, tensors[0]) if out is None else out

    def _size(self, tensors: Sequence[Any]) -> int | None:
        """The size that is known at launch, by the tensors that are given."""
        if self.bundle.manifest.launch_size is None:
            return None
        return self.size_of([tuple(getattr(tensor, "shape", ())) for tensor in tensors])

    def on_device(self, device: int, kernel: KernelRecord | None = None) -> LoadedKernel:
        """A kernel on a GPU, by default that of the operator, loaded when it is first needed there; a warning says
        where NVRTC stood in."""
        kernel = kernel or self.kernel
        if (device, kernel.rank) not in self.loaded:
            loaded = load_kernel(self.bundle, kernel, device)
            if loaded.how != "cubin" and kernel.binary is not None:
                text = f"{self.bundle.name} was compiled for {self.bundle.architecture}, here by {loaded.how}"
                warnings.warn(f"{text}; its rank was predicted for {self.bundle.device}", stacklevel=3)
            self.loaded[device, kernel.rank] = loaded
        return self.loaded[device, kernel.rank]

    def _framework(self, tensors: Sequence[Any]) -> Tensors:
        """The framework of all tensors; the streams of several would not wait for each other."""
        kinds = {kind.name: kind for kind in map(tensors_of, tensors)}
        if len(kinds) > 1:
            raise self._error("", f"the tensors are of {' and '.join(kinds)}", "give all of one framework")
        return next(iter(kinds.values()))

    def _checked(self, argument: Argument, tensor: Any) -> DeviceTensor:
        """Kind of a tensor, if it is what the kernel takes as this argument."""
        try:
            described = tensors_of(tensor).describe(tensor)
        except InputError as error:
            raise self._error(argument.name, error.problem, error.remedy) from None
        fits_dtype = holds(argument.dtype, described.dtype)
        if described.shape != argument.shape or not fits_dtype or not described.contiguous:
            raise mismatch(self.bundle.name, argument, described.shape, described.dtype, fits_dtype=fits_dtype)
        if described.pointer % ALIGNMENT_BYTES:
            problem = f"starts at an address that is no multiple of {ALIGNMENT_BYTES} bytes"
            raise self._error(argument.name, problem, "give a copy with memory of its own")
        return described

    def _one_device(self, described: Sequence[DeviceTensor]) -> int:
        devices = sorted({tensor.device for tensor in described})
        if len(devices) > 1:
            raise self._error("", f"the tensors are on GPUs {devices}", "move all to one")
        return devices[0]

    def _check_target(self, described: Sequence[DeviceTensor], target: DeviceTensor, size: int | None) -> None:
        """The output lies on the inputs' GPU, apart from all of them."""
        if target.device != described[0].device:
            raise self._error(
                self.output.name, f"is on GPU {target.device}", f"the inputs are on {described[0].device}"
            )
        end = target.pointer + self.output.at(size).size_bytes
        for argument, tensor in zip(self.inputs, described, strict=True):
            if tensor.pointer < end and target.pointer < tensor.pointer + argument.at(size).size_bytes:
                raise self._overlap(argument)
