"""Records of a bundle: those of ``manifest.json``, and a folder with its manifest.

:mod:`codegen.bundle.manifest` writes and checks manifests where the compiler runs, :mod:`codegen.bundle.reader` reads
them on a GPU's machine. Both know these records, which need Python alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from codegen.launch_shape import LaunchShape
from codegen.tensor_map import TensorMap

T = TypeVar("T")

#: Name of the manifest's file in the folder of a bundle.
MANIFEST = "manifest.json"

#: The layout of manifests that this version writes and reads.
FORMAT = 1

#: Ending of binaries that CPUs run, shared objects.
SHARED_OBJECT_SUFFIX = ".so"

#: dtype of a manifest -> bytes of an element; the table of :mod:`sokoban.language.expression` for a GPU's machine.
ITEM_BYTES = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int8": 1, "uint8": 1, "int32": 4,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One kernel argument, a pointer: ``shape`` as the caller shapes it, row-major and contiguous. Its first dimension
    is the largest size where ``ends_at_launch``."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    ends_at_launch: bool = False

    def at(self, size: int | None) -> Argument:
        """The argument where the size that is known at launch is ``size``."""
        return self if size is None or not self.ends_at_launch else replace(self, shape=(size, *self.shape[1:]))

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensor.

        >>> Argument(name="A", role="input", dtype="float16", shape=(3, 5)).size_bytes
        30
        """
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class VerificationRecord:
    """Outcome of running the tiling on a cut-down problem, the method, and the error to the float64 reference.

    Attributes:
        passed: the outputs agree, and none of the ``checks`` found anything.
        method: how the kernel was run: the target, and the twin where there was one; ``none`` where nothing ran.
        relative_error: as a power of ten; None where nothing ran, or the kernel did not come to an output.
        tolerance: the bound it was held to.
        axis_sizes: sizes of the problem that ran.
        reason: why it did not pass or did not run; empty otherwise.
        engine: what ran it: ``emulator``, ``opencl`` or ``native``; empty where nothing did, and in manifests from
            before 2026-11-23, as are the rest.
        checks: what the engine looked at.
        seeds: of the orders in which threads, warps and blocks ran, where the engine draws those.
        needless: barriers, waits and fences that ordered nothing.
        sizes: that are known at launch, for each of which it ran; empty where all sizes are known.
    """

    passed: bool
    method: str
    relative_error: float | None
    tolerance: float
    axis_sizes: dict[str, int]
    reason: str
    engine: str = ""
    checks: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    needless: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProfileRecord:
    """Measurement of a kernel by ``roller profile``.

    Attributes:
        predicted_rank: its rank when it was compiled.
        spread_seconds: distance between the quartiles of the repeated measurements; None where it was struck out.
        repeats: how many measurements; ``launches``: launches in each, over rotating copies of the tensors.
        prediction_error: (predicted - measured) / measured; None where it was struck out.
        relative_error: largest error of an output as in :class:`VerificationRecord`; None where nothing ran.
        tolerance: the bound it was held to; None where the bundle has no reference.
        struck_out: why its time does not count; empty where it does.
        loaded: ``cubin``, what the source was compiled for on the spot, such as ``NVRTC for sm_90``, or ``library``.
        board: name of the GPU or processor; ``capability`` its compute capability, such as ``9.0``, or its threads.
        versions: of the software that took part: ``cupy``, ``driver``, ``runtime``; ``python``, ``numpy``.
    """

    predicted_rank: int
    spread_seconds: float | None
    repeats: int
    launches: int
    prediction_error: float | None
    relative_error: float | None
    tolerance: float | None
    struck_out: str
    loaded: str
    board: str
    capability: str
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ReferenceLaunch:
    """One kernel of the reference; its parameters are pointers to ``tensors``, the one it writes last."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    tensors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ReferenceRecord:
    """The operator as plain float64 kernels, to check others on the device.

    Attributes:
        source: file name in the manifest's folder.
        launches: to be run in this order.
        workspace: float64 elements of every tensor that they write, the output among them.
        tolerance: largest relative error that counts as right.
        ranges: least and largest value of test data for every input.
        widths: columns of the tensors that lie side by side in the output's rows, each of which is judged by itself;
            left out where it is one tensor.
    """

    source: str
    launches: tuple[ReferenceLaunch, ...]
    workspace: dict[str, int]
    tolerance: float
    ranges: dict[str, tuple[float, ...]]
    widths: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LaunchRecord:
    """One kernel of several that together compute the operator.

    Attributes:
        label: what it computes, in words.
        entry, source, binary, schedule, grid, block, shared_bytes, dynamic_shared_bytes, registers, spill_bytes:
            as in :class:`KernelRecord`.
        seconds, bound: predicted time of this launch, and the stage that sets it.
        tensors: what its parameters point to, arguments or tensors of the workspace, the one it writes last.
        zero_output: it adds to that one, which has to be cleared before.
        architecture, tensor_maps, launch: as in :class:`KernelRecord`.
    """

    label: str
    entry: str
    source: str
    binary: str | None
    schedule: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    dynamic_shared_bytes: int
    registers: int | None
    spill_bytes: int | None
    seconds: float
    bound: str
    tensors: tuple[str, ...]
    zero_output: bool = False
    architecture: str | None = None
    tensor_maps: tuple[TensorMap, ...] = ()
    launch: LaunchShape | None = None

    def grid_at(self, size: int | None) -> tuple[int, int, int]:
        """Blocks of the launch for a size that is known at launch; None where the operator has none."""
        return self.grid if self.launch is None or size is None else self.launch.grid(size)

    @property
    def file(self) -> str:
        """The file that it is loaded from where the board is the bundle's."""
        return self.binary or self.source

    def bind(self, values: Mapping[str, T]) -> tuple[T, ...]:
        """Its parameters' values, in their order, by the names of tensors: the one place where arguments are bound.

        ``values`` are addresses, arrays or places of the bundle's arguments and of its workspace.
        """
        return tuple(values[name] for name in self.tensors)


@dataclass(frozen=True, kw_only=True)
class KernelRecord:
    """One way to compute the operator: a kernel, or several launched one after the other.

    With ``launches`` the operator is those, in this order, over the arguments and a workspace; what else is said of
    entry, files, extents, registers and tiles is then of the longest of them. A kernel that does it alone has one
    where its parameters come in another order than the arguments.

    Attributes:
        rank: 1 is the best.
        entry: function name in the source and the binary.
        source, binary, schedule: file names in the manifest's folder; ``binary`` None where the device only gets
        source. grid, block: launch extents (x, y, z).
        shared_bytes: shared memory per block; ``dynamic_shared_bytes`` of it is given at launch.
        registers, spill_bytes: per thread, as the device compiler reports them; None without a binary.
        seconds: predicted time, launch included; ``bound`` the stage that sets it; ``stage_seconds`` every stage.
        tiles: tile at each memory layer, by axis.
        policy: how construction came to it.
        verified: True only if the check ran and passed; None where it was not asked for.
        zero_output: the kernel adds to its output, which therefore has to be cleared before each launch.
        profiled_seconds: median measured time; None before ``roller profile`` and where a kernel was struck out.
        profile: the rest of what was measured.
        launches: empty for a kernel that does it alone over all arguments in their order.
        workspace: bytes of every tensor between the launches, by name.
        tolerance: relative error of its results that counts as right where that is more than the reference's.
        architecture: what its binary was compiled for, ``sm_90a``; None where it is the manifest's.
        tensor_maps: of the tensors that it takes as tensor maps, which the launcher has the driver make.
        launch: its grid by the size that is known at launch, which it takes as its last parameter; None where ``grid``
            holds for every size that it is launched for.
    """

    rank: int
    entry: str
    source: str
    binary: str | None
    schedule: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    dynamic_shared_bytes: int
    registers: int | None
    spill_bytes: int | None
    seconds: float
    bound: str
    stage_seconds: dict[str, float]
    tiles: dict[str, dict[str, int]]
    policy: str
    verified: bool | None
    verification: VerificationRecord | None
    zero_output: bool = False
    profiled_seconds: float | None = None
    profile: ProfileRecord | None = None
    launches: tuple[LaunchRecord, ...] = ()
    workspace: dict[str, int] = field(default_factory=dict)
    tolerance: float | None = None
    architecture: str | None = None
    tensor_maps: tuple[TensorMap, ...] = ()
    launch: LaunchShape | None = None

    @property
    def predicted_rank(self) -> int:
        """Rank when it was compiled."""
        return self.rank if self.profile is None else self.profile.predicted_rank

    @property
    def struck_out(self) -> str:
        """Why a profile refused it; empty where none did."""
        return "" if self.profile is None else self.profile.struck_out

    def parts(self, arguments: Sequence[Argument]) -> tuple[LaunchRecord, ...]:
        """Its launches in order; for a kernel that does it alone, the kernel itself over all ``arguments``."""
        if self.launches:
            return self.launches
        return (
            LaunchRecord(
                label=self.policy,
                entry=self.entry,
                source=self.source,
                binary=self.binary,
                schedule=self.schedule,
                grid=self.grid,
                block=self.block,
                shared_bytes=self.shared_bytes,
                dynamic_shared_bytes=self.dynamic_shared_bytes,
                registers=self.registers,
                spill_bytes=self.spill_bytes,
                seconds=self.seconds,
                bound=self.bound,
                tensors=tuple(argument.name for argument in arguments),
                zero_output=self.zero_output,
                architecture=self.architecture,
                tensor_maps=self.tensor_maps,
                launch=self.launch,
            ),
        )


@dataclass(frozen=True, kw_only=True)
class SizeRange:
    """Sizes that one kernel is launched for.

    Attributes:
        first, last: the least and the largest of them.
        rank: of the kernel.
        seconds: that it is expected to take for the largest.
        best_seconds: that the best kernel for that size alone would take.
    """

    first: int
    last: int
    rank: int
    seconds: float
    best_seconds: float


@dataclass(frozen=True, kw_only=True)
class SizeRecord:
    """The size of an operator that is known at launch.

    Attributes:
        axis: its axis, whose size in ``axes`` is the largest.
        multiple: of which every size is one.
        ranges: which kernel is launched for which size, from the least size on.
    """

    axis: str
    multiple: int
    ranges: tuple[SizeRange, ...]

    def range_of(self, size: int) -> SizeRange | None:
        """The range that a size lies in; None where it is in none, or no multiple."""
        found = next((each for each in self.ranges if each.first <= size <= each.last), None)
        return None if size % self.multiple else found


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """``manifest.json``.

    Attributes:
        name: the operator's name, also the directory's.
        device, architecture: what it was compiled for.
        statements: the operator as expressions over ``axes``.
        fused_axes: axes of the tiles that stand for several of ``axes``.
        allow_tf32: products of float32 may round their operands to TensorFloat-32.
        arguments: in launch order, the output last.
        notes: what a reader should know, such as why there is no binary.
        kernels: by rank: as predicted, and by measured time once they are profiled.
        reference: how to compute the right result on the device; None where that cannot be said in CUDA C.
        launch_size: the size that is known at launch, and which kernels are for which; None where all sizes are known.
        profiling_seconds: how long ``roller profile`` took on a processor for so many kernels (wall clock, checks
            included, imports not); empty before, and of GPUs.
    """

    format: int
    name: str
    device: str
    architecture: str
    statements: tuple[str, ...]
    axes: dict[str, int]
    fused_axes: dict[str, tuple[str, ...]]
    accumulate: str
    arguments: tuple[Argument, ...]
    notes: tuple[str, ...]
    kernels: tuple[KernelRecord, ...]
    reference: ReferenceRecord | None = None
    allow_tf32: bool = False
    launch_size: SizeRecord | None = None
    profiling_seconds: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bundle:
    """A folder that a compilation left, and its manifest."""

    directory: Path
    manifest: Manifest

    @property
    def name(self) -> str:
        """Name of the operator."""
        return self.manifest.name

    @property
    def device(self) -> str:
        """Name of the device that it was compiled for."""
        return self.manifest.device

    @property
    def architecture(self) -> str:
        """Architecture that its kernels were compiled for, where they say none of their own."""
        return self.manifest.architecture

    @property
    def kernels(self) -> tuple[KernelRecord, ...]:
        """Its kernels by rank."""
        return self.manifest.kernels

    @property
    def reference(self) -> ReferenceRecord | None:
        """Kernel of the reference on the device."""
        return self.manifest.reference

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Arguments of a launch, the output last."""
        return self.manifest.arguments

    @property
    def inputs(self) -> tuple[Argument, ...]:
        """Inputs of an operator."""
        return self.arguments[:-1]

    @property
    def output(self) -> Argument:
        """Output of an operator."""
        return self.arguments[-1]

    @property
    def is_for_cpu(self) -> bool:
        """True if its kernels are shared objects, which CPUs run."""
        return (self.kernels[0].binary or "").endswith(SHARED_OBJECT_SUFFIX)
