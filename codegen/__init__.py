"""From schedule to kernel: TVM lowering, device compilers, verification, bundles.

The names here import neither TVM nor sympy; lowering and verification load TVM when they are called.

Names are imported when they are first used: code of a GPU's machine (:mod:`codegen.runtime.gpu`,
:mod:`roller.profile.profile`) needs NumPy and CuPy and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from codegen.tir.tvm_import import hide_torch_from_tvm
from hal.support.lazy import imported_on_use

if TYPE_CHECKING:
    from codegen.built import BuiltKernel
    from codegen.bundle.manifest import manifest_schema, read_manifest, to_json
    from codegen.bundle.records import (
        FORMAT,
        Argument,
        Bundle,
        KernelRecord,
        LaunchRecord,
        Manifest,
        VerificationRecord,
    )
    from codegen.compile.build import build_kernel, verify_chain, verify_schedule
    from codegen.compile.request import BuildRequest, BuiltProgram
    from codegen.verify.result import Verification
    from hal.support.atomic import staged_directory, write_atomic

#: Module -> the names it gives to the package.
_HOMES = {
    "codegen.bundle.manifest": (
        "manifest_schema",
        "read_manifest",
        "to_json",
    ),
    "codegen.bundle.records": (
        "FORMAT",
        "Argument",
        "Bundle",
        "KernelRecord",
        "LaunchRecord",
        "Manifest",
        "VerificationRecord",
    ),
    "codegen.built": ("BuiltKernel",),
    "codegen.compile.build": (
        "build_kernel",
        "verify_chain",
        "verify_schedule",
    ),
    "codegen.compile.request": (
        "BuildRequest",
        "BuiltProgram",
    ),
    "codegen.verify.result": ("Verification",),
    "hal.support.atomic": (
        "staged_directory",
        "write_atomic",
    ),
}

__getattr__ = imported_on_use(__name__, _HOMES)

hide_torch_from_tvm()

__all__ = [
    "FORMAT",
    "Argument",
    "BuildRequest",
    "BuiltKernel",
    "BuiltProgram",
    "Bundle",
    "KernelRecord",
    "LaunchRecord",
    "Manifest",
    "Verification",
    "VerificationRecord",
    "build_kernel",
    "manifest_schema",
    "read_manifest",
    "staged_directory",
    "to_json",
    "verify_chain",
    "verify_schedule",
    "write_atomic",
]
