"""Sizes that are known at launch: ``{"up to": 8192, "multiple": 1}`` in place of a number.

An operator has one of them at most. Its axis is the first dimension of every tensor that has it, and is not reduced, so
that no element's place in memory depends on the size: kernels compiled for the largest get the size when they are
launched, and end where the tensors do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hal.support.errors import InputError, listed
from sokoban.language.checks import MAX_AXIS_SIZE, shown
from sokoban.language.expression import AffineIndex, Axis, GatheredIndex, LaunchSize, Load, Tensor, TensorExpr, walk

#: Keys of a size that is known at launch.
MOST_KEY, MULTIPLE_KEY = "up to", "multiple"


def taken_out(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """JSON data of an operator with the largest size in place of sizes that are known at launch, and these by the path
    of their key: ``m``, ``sizes.m``, ``shape[0]``.

    Raises:
        InputError: there are several, or one is not what it should be.
    """
    fields = {key: value for key, value in data.items() if isinstance(value, dict) and MOST_KEY in value}
    sizes = data.get("sizes")
    named = {key: value for key, value in sizes.items() if isinstance(value, dict)} if isinstance(sizes, dict) else {}
    shape = data.get("shape")
    extents = (
        {place: each for place, each in enumerate(shape) if isinstance(each, dict)} if isinstance(shape, list) else {}
    )
    given = {**fields, **{f"sizes.{key}": value for key, value in named.items()}}
    given |= {f"shape[{place}]": value for place, value in extents.items()}
    if not given:
        return data, {}
    if len(given) > 1:
        raise InputError(list(given)[1], f"{listed(list(given))} are both left to the launch", "leave it one of them")
    for path, value in given.items():
        _check(path, value)
    data = {**data, **{key: value[MOST_KEY] for key, value in fields.items()}}
    if named and isinstance(sizes, dict):
        data["sizes"] = {**sizes, **{key: value[MOST_KEY] for key, value in named.items()}}
    if extents and isinstance(shape, list):
        data["shape"] = [extents[place][MOST_KEY] if place in extents else each for place, each in enumerate(shape)]
    return data, given


def _check(path: str, value: dict[str, Any]) -> None:
    """Raises InputError unless a size that is known at launch has the right keys and numbers."""
    for key in value:
        if key not in (MOST_KEY, MULTIPLE_KEY):
            raise InputError(f"{path}.{key}", "is no key of a size that is known at launch", 'write {"up to": 8192}')
    if MOST_KEY not in value:
        raise InputError(path, f'lacks "{MOST_KEY}"', 'write {"up to": 8192}')
    for key, number in value.items():
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= MAX_AXIS_SIZE:
            raise InputError(f"{path}.{key}", f"{shown(number)} is not between 1 and {MAX_AXIS_SIZE}", "")
    if value[MOST_KEY] % value.get(MULTIPLE_KEY, 1):
        problem = f"{value[MOST_KEY]} is no multiple of {value[MULTIPLE_KEY]}"
        raise InputError(f"{path}.{MOST_KEY}", problem, "round it up")


def with_launch_size(
    expr: TensorExpr, path: str, value: Mapping[str, int], written: Callable[[int], Mapping[str, int]]
) -> TensorExpr:
    """An operator, read for the largest size, of which a size is known at launch.

    Args:
        expr: the operator.
        path: the key of the size.
        value: what stands there.
        written: sizes of the operator's axes by a number in place of the size.

    Raises:
        InputError: no axis, or not one alone, is of that size, or the axis has another place than the first somewhere.
    """
    most, multiple = value[MOST_KEY], value.get(MULTIPLE_KEY, 1)
    before, after = written(most), written(most + 1)
    changed = {axis: after[axis] - size for axis, size in before.items() if after.get(axis) != size}
    if set(changed.values()) != {1} or len(changed) > 1:
        problem = f"several sizes follow from it: {', '.join(changed)}" if changed else "is the size of no axis"
        raise InputError(path, f"cannot be left to the launch: {problem}", "write a number")
    size = LaunchSize(next(iter(changed)), most, multiple)
    problem = _place_problem(expr, size.axis)
    if problem:
        raise InputError(path, f"cannot be left to the launch: {problem}", "write a number")
    return replace(expr, launch_size=size)


def _place_problem(expr: TensorExpr, axis: str) -> str:
    """Problem of an axis whose size is known at launch; empty where it is the first dimension of whatever has it."""
    for statement in expr.statements:
        for node in walk(statement.value):
            if axis in getattr(node, "axes", ()) or getattr(node, "axis", None) == axis:
                return f"{statement.tensor} is summed, or goes, along {axis}"
            if isinstance(node, Load):
                tensor = expr.tensor_by_name[node.tensor]
                places = [place for place, index in enumerate(node.indices) if axis in _own_axes(index)]
                is_whole = not places or (node.indices[0].is_plain_axis and tensor.shape[0] == expr.sizes[axis])
                if places not in ([], [0]) or not is_whole:
                    return f"{axis} is not the first dimension of {node.tensor}, from its first element to its last"
        if axis in statement.axes[1:]:
            return f"{axis} is not the first dimension of {statement.tensor}"
    if axis not in expr.statements[-1].axes:
        return f"{expr.output.name} has no {axis}"
    if not any(axis in _axes_of(expr, tensor) for tensor in expr.inputs):
        return f"no input has {axis}"
    for tensor in (*expr.inputs, expr.output):
        if axis in _axes_of(expr, tensor) and tensor.caller_shape[0] != tensor.shape[0]:
            return f"{axis} is not the first dimension of {tensor.name} as callers shape it"
    return ""


def has_rows(expr: TensorExpr, tensor: Tensor) -> bool:
    """True if a tensor's first dimension is the size that is known at launch."""
    return expr.launch_size is not None and expr.launch_size.axis in _axes_of(expr, tensor)


def _axes_of(expr: TensorExpr, tensor: Tensor) -> tuple[str, ...]:
    """Axes that index a tensor."""
    written = [axis for statement in expr.statements if statement.tensor == tensor.name for axis in statement.axes]
    nodes = [node for statement in expr.statements for node in walk(statement.value)]
    read = [node for node in nodes if isinstance(node, Load) and node.tensor == tensor.name]
    return (*written, *(axis for node in read for index in node.indices for axis in _own_axes(index)))


def _own_axes(index: AffineIndex) -> tuple[str, ...]:
    """Axes that an index is made of: none where a tensor holds it, which is as long as its own dimension."""
    return () if isinstance(index, GatheredIndex) else index.axes


def at_size(expr: TensorExpr, size: int) -> TensorExpr:
    """The operator with a number in place of its size that is known at launch."""
    assert expr.launch_size is not None
    axis = expr.launch_size.axis

    def resized(tensor: Tensor) -> Tensor:
        if axis not in _axes_of(expr, tensor):
            return tensor
        external = tensor.external_shape
        return replace(
            tensor,
            shape=(size, *tensor.shape[1:]),
            external_shape=None if external is None else (size, *external[1:]),
        )

    return expr.rewritten(
        launch_size=None,
        axes=tuple(Axis(each.name, size) if each.name == axis else each for each in expr.axes),
        tensors=tuple(map(resized, expr.tensors)),
    )
