"""Kernels put on trial as users get them: a bundle of a small problem, written to a folder and read back.

The bundle is written by what writes every bundle (:mod:`codegen.bundle.writer`), read by what reads bundles next to a
GPU, and its launches bind arguments as the runtimes do (:meth:`codegen.bundle.records.LaunchRecord.bind`). An argument
that a manifest puts in another place than the kernel takes it is a wrong result here, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from codegen.built import BuiltKernel
from codegen.bundle.reader import read_bundle
from codegen.bundle.records import FORMAT, Bundle, LaunchRecord, Manifest, SizeRecord
from codegen.bundle.writer import BuiltLaunch, BuiltRank, arguments_of, kernel_record, write_files
from codegen.generators import GENERATORS
from codegen.target import Target
from sokoban.kernel.form import KernelForm
from sokoban.kernel.problem import Problem
from sokoban.language.expression import Tensor
from sokoban.schedule.patches import Schedule

#: A kernel of a program: what it computes, and how.
Step = tuple[Problem, Schedule]


@dataclass(frozen=True)
class Trial:
    """A bundle that is to be run here.

    Attributes:
        bundle: as it was read back; its folder is gone.
        files: contents of the folder by name.
        tensors: what launches read and write, by name.
    """

    bundle: Bundle
    files: Mapping[str, bytes]
    tensors: Mapping[str, Tensor]

    @property
    def launches(self) -> tuple[LaunchRecord, ...]:
        """The kernels in order."""
        return self.bundle.kernels[0].parts(self.bundle.arguments)

    def source(self, launch: LaunchRecord) -> str:
        """A kernel's text."""
        return self.files[launch.source].decode()

    def binary(self, launch: LaunchRecord) -> bytes:
        """A kernel's machine code."""
        assert launch.binary is not None
        return self.files[launch.binary]


@dataclass(frozen=True)
class Sized:
    """The size of an operator that is known at launch: its record, and the tensors whose first dimension it is."""

    record: SizeRecord
    tensors: tuple[str, ...]


def trial_of(
    form: KernelForm,
    steps: Sequence[Step],
    built: Sequence[BuiltKernel],
    target: Target,
    sized: Sized | None = None,
) -> Trial:
    """The bundle of kernels that compute ``form``, one per step; ``sized`` where a size is known at launch.

    Its arguments are those of the operator as its author wrote it, in that order.

    Raises:
        LoweringError: a kernel's text takes other parameters than the tensors of its problem.
        InputError: what was written does not read back.
    """
    generator = GENERATORS[target.generator]
    tensors = {tensor.name: tensor for problem, _ in steps for tensor in problem.tensors}
    output = steps[-1][0].output
    arguments = arguments_of(
        (*(tensors.get(tensor.name, tensor) for tensor in form.source.inputs), output),
        () if sized is None else sized.tensors,
    )
    launches = [
        BuiltLaunch(problem=problem, built=kernel, schedule=schedule.to_json())
        for (problem, schedule), kernel in zip(steps, built, strict=True)
    ]
    written = [problem.output for problem, _ in steps[:-1]]
    build = BuiltRank(launches=tuple(launches), workspace={tensor.name: tensor.size_bytes for tensor in written})
    manifest = Manifest(
        format=FORMAT,
        name=form.expr.name,
        device=target.generator,
        architecture=target.architecture,
        statements=(),
        axes=dict(form.expr.sizes) if sized is None else {**form.expr.sizes, sized.record.axis: _largest(sized)},
        fused_axes={},
        accumulate=form.expr.accumulate,
        arguments=arguments,
        notes=(),
        kernels=(kernel_record(1, build, arguments, generator),),
        launch_size=None if sized is None else sized.record,
    )
    with tempfile.TemporaryDirectory(prefix="roller-trial-") as folder:
        write_files(Path(folder), manifest, [build], generator)
        bundle = read_bundle(folder, runs_opencl=True)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return Trial(bundle, files, tensors)


def _largest(sized: Sized) -> int:
    return sized.record.ranges[-1].last
