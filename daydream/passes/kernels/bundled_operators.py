"""Compiled operators by what they compute: which bundle of a folder does the work of a recorded call, and how fast."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from codegen.bundle.manifest import read_manifest
from codegen.bundle.operators import operator_of
from codegen.bundle.reader import choose_kernel, read_bundle
from hal.support.errors import InputError
from sokoban.language.expression import TensorExpr, statement_text

#: What an operator computes, whatever it is called: statements, sizes, tensors, and how values are accumulated.
Identity = tuple[Any, ...]


@dataclass(frozen=True)
class BundledOperator:
    """A bundle as what can take the place of calls.

    Attributes:
        folder: where it lies.
        name: of the operator.
        seconds: how long its best kernel takes.
        profiled: whether that was measured.
    """

    folder: Path
    name: str
    seconds: float
    profiled: bool


def identity(expr: TensorExpr) -> Identity:
    """Identity of an operator's computation."""
    tensors = tuple((tensor.name, tensor.dtype, tensor.caller_shape) for tensor in (*expr.inputs, expr.output))
    statements = tuple(statement_text(statement) for statement in expr.statements)
    return statements, tuple(sorted(expr.sizes.items())), tensors, expr.accumulate


def read_bundles(folder: Path) -> Mapping[Identity, BundledOperator]:
    """The operators compiled into a folder, or the one whose folder it is. Of those that compute the same, the fastest.

    Raises:
        InputError: there is no bundle, or a damaged one.
    """
    operators: dict[Identity, BundledOperator] = {}
    paths = [folder / "manifest.json", *sorted(folder.glob("*/manifest.json"))]
    for path in paths:
        if path.is_file():
            key, compiled = _read(path.parent)
            fastest = operators.get(key)
            if fastest is None or compiled.seconds < fastest.seconds:
                operators[key] = compiled
    if not operators:
        raise InputError("bundle", f"{folder} holds no manifest.json", "give a folder that roller compile wrote")
    return operators


def _read(folder: Path) -> tuple[Identity, BundledOperator]:
    try:
        manifest = read_manifest(folder)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(os.fspath(folder), f"is no bundle: {error}", "compile the operator again") from None
    kernel = choose_kernel(read_bundle(folder), None)
    measured = kernel.profiled_seconds
    seconds = kernel.seconds if measured is None else measured
    return identity(operator_of(manifest)), BundledOperator(folder, manifest.name, seconds, measured is not None)
