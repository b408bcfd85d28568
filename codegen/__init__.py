"""From schedule to kernel: TVM lowering, device compilers, verification, bundles.

The names here import neither TVM nor sympy; lowering and verification load TVM when they are called.

Names are imported when they are first used: what runs beside a GPU (:mod:`codegen.launch`, :mod:`codegen.profile`)
needs NumPy and CuPy and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from codegen.tvm_import import hide_torch_from_tvm
from hal.lazy import imported_on_use

if TYPE_CHECKING:
    from codegen.atomic import staged_directory, write_atomic
    from codegen.build import BuildRequest, BuiltChain, BuiltKernel, build_kernel, verify_chain, verify_schedule
    from codegen.bundle import (
        FORMAT,
        Argument,
        KernelRecord,
        LaunchRecord,
        Manifest,
        VerificationRecord,
        manifest_schema,
        read_manifest,
        to_json,
    )
    from codegen.verification import Verification

#: Module -> the names it gives to the package.
_HOMES = {
    "codegen.atomic": (
        "staged_directory",
        "write_atomic",
    ),
    "codegen.build": (
        "BuildRequest",
        "BuiltChain",
        "BuiltKernel",
        "build_kernel",
        "verify_chain",
        "verify_schedule",
    ),
    "codegen.bundle": (
        "FORMAT",
        "Argument",
        "KernelRecord",
        "LaunchRecord",
        "Manifest",
        "VerificationRecord",
        "manifest_schema",
        "read_manifest",
        "to_json",
    ),
    "codegen.verification": ("Verification",),
}

__getattr__ = imported_on_use(__name__, _HOMES)

hide_torch_from_tvm()

__all__ = [
    "FORMAT",
    "Argument",
    "BuildRequest",
    "BuiltChain",
    "BuiltKernel",
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
