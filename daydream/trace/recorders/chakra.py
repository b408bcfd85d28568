"""Execution traces of PyTorch (Chakra), joined to the Kineto trace of the same run.

An execution trace (``torch.profiler.ExecutionTraceObserver``) has no times on a GPU. What it adds to a Kineto trace
that was recorded without shapes are the sizes, types and values of every operator's arguments. Both number the calls
alike: ``rf_id`` in the one, "Record function id" in the other, 0 where the observer did not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from daydream.trace.text import Notes, read_bytes
from daydream.trace.trace import Category, Trace
from hal.support.errors import InputError

_TENSOR = re.compile(r"^Tensor\((.*)\)$")
_RECORD = ("Record function id", "rf_id")
_SIZES = "Input Dims"


def with_execution(trace: Trace, path: Path) -> Trace:
    """The trace with sizes, types and values of arguments from the execution trace of the same run.

    What the trace has itself stays.

    Raises:
        InputError: the file is no execution trace, or none of its operators is in the trace.
    """
    arguments_of = dict(_arguments(path))
    operators = [row for row in range(len(trace)) if trace.category[row] == Category.OPERATOR]
    arguments = list(trace.arguments)
    met = added = 0
    for row in operators:
        recorded = arguments[row]
        name, more = arguments_of.get(_number(recorded), ("", {}))
        if name != trace.text(row):
            continue
        met += 1
        if _SIZES not in recorded:
            arguments[row] = {**recorded, **more}
            added += 1
    if not met:
        raise InputError(
            str(path),
            f"has no operator of {trace.path}",
            "give the execution trace of the same run, recorded with the profiler's execution_trace_observer",
        )
    sentence = f"{added} of {len(operators)} operators have their sizes from the execution trace"
    return replace(trace, arguments=tuple(arguments), warnings=(*trace.warnings, *([sentence] if added else [])))


def _number(arguments: dict[str, Any]) -> int:
    """The number of a call; 0 where there is none."""
    value = next((arguments[key] for key in _RECORD if key in arguments), 0)
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0


def _arguments(path: Path) -> Iterator[tuple[int, tuple[str, dict[str, Any]]]]:
    """Number, name and arguments, as Kineto writes them, of every operator in an execution trace."""
    import msgspec

    try:
        nodes = msgspec.json.decode(read_bytes(path, Notes()))["nodes"]
        for node in nodes:
            # Up to 1.0.1 a node had its attributes as fields, later as a list.
            attributes = {**node, **{each["name"]: each.get("value") for each in node.get("attrs", ())}}
            inputs = node.get("inputs", {})
            if isinstance(inputs, list):
                inputs = {"values": inputs, "shapes": node["input_shapes"], "types": node["input_types"]}
            number = _number(attributes)
            if number > 0:
                yield number, (str(node["name"]), _as_kineto(**inputs))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        where = f"{type(error).__name__}: {error}"
        raise InputError(
            str(path), f"is no execution trace of PyTorch ({where})", "record one with ExecutionTraceObserver"
        ) from None


def _as_kineto(values: list[Any], shapes: list[Any], types: list[str], **_: Any) -> dict[str, Any]:
    concrete, spelled = [], []
    for value, kind in zip(values, types, strict=True):
        tensor = _TENSOR.match(kind)
        is_tensor = tensor is not None or kind.startswith("GenericList[Tensor")
        concrete.append("" if is_tensor or value is None else str(value))
        spelled.append(tensor[1] if tensor else _kind(kind))
    return {_SIZES: list(shapes), "Input type": spelled, "Concrete Inputs": concrete}


def _kind(kind: str) -> str:
    if kind.startswith("GenericList[Tensor"):
        return "TensorList"
    return "ScalarList" if kind.startswith("GenericList") else "" if kind in ("None", "NoneType") else "Scalar"
