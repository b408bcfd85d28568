"""From schedule to kernel: TVM lowering, device compilers, verification, bundles.

The names here import neither TVM nor sympy; lowering and verification load TVM when they are called.
"""

from codegen.atomic import staged_directory, write_atomic
from codegen.build import BuildRequest, BuiltKernel, build_kernel, verify_schedule
from codegen.bundle import (
    FORMAT,
    Argument,
    KernelRecord,
    Manifest,
    VerificationRecord,
    manifest_schema,
    read_manifest,
    to_json,
)
from codegen.verification import Verification

__all__ = [
    "FORMAT",
    "Argument",
    "BuildRequest",
    "BuiltKernel",
    "KernelRecord",
    "Manifest",
    "Verification",
    "VerificationRecord",
    "build_kernel",
    "manifest_schema",
    "read_manifest",
    "staged_directory",
    "to_json",
    "verify_schedule",
    "write_atomic",
]
