"""Text of the tensor-expression language -> :class:`TensorExpr`.

The text is parsed by an LALR grammar into a tree; values and indices are built from that tree, and nothing is ever
evaluated as Python. What the language means, with every error, is in ``docs/operators.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hal.support.errors import InputError
from sokoban.language.checks import (
    MAX_AXIS_SIZE,
    MAX_ELEMENTS,
    accumulate_dtype,
    check_dtype,
    check_numbers,
    check_shape,
    check_sizes,
    reach,
)
from sokoban.language.expression import (
    INTEGER_DTYPES,
    RESULT_DTYPE,
    AffineIndex,
    Axis,
    Call,
    GatheredIndex,
    Load,
    Reduction,
    Scan,
    Statement,
    Tensor,
    TensorExpr,
    Value,
    loads,
    rewrite,
    used_axes,
    walk,
)
from sokoban.language.gathers import check_places, index_tensors, with_extents
from sokoban.language.grammar import parse_tree
from sokoban.language.names import unused_name
from sokoban.language.reference import round_to_dtype
from sokoban.language.statements import Pads, build_statements


def parse_program(
    text: str,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, str],
    *,
    accumulate: str | None = None,
    name: str = "expr",
    shapes: Mapping[str, Sequence[int]] | None = None,
    pads: Pads | None = None,
    default_dtype: str = "float32",
    external_shapes: Mapping[str, Sequence[int]] | None = None,
) -> TensorExpr:
    """``text`` -> a normalised expression: every statement is one reduction, or point-wise.

    >>> product = parse_program("C[i,j] = sum(k, A[i,k] * B[k,j])", {"i": 4, "j": 3, "k": 2}, {})
    >>> [(tensor.name, tensor.shape) for tensor in product.tensors]
    [('A', (4, 2)), ('B', (2, 3)), ('C', (4, 3))]

    Args:
        text: statements, separated by semicolons or newlines.
        sizes: axis name -> number of elements; exactly the axes the text uses.
        dtypes: tensor name -> dtype. Other inputs and the output get ``default_dtype``, the output a wider one where
            that is too narrow for results; other tensors in between are never stored and get the dtype of
            ``accumulate``.
        accumulate: dtype of the arithmetic; None is float64 where a tensor is float64, int32 for sums of integers, else
            float32.
        shapes: input name -> shape. Inferred from the largest index where the input is never padded.
        pads: tensor name -> value of its elements outside, for loads that do not say ``| pad=`` themselves.
        name: of the operator.
        default_dtype: dtype of tensors that ``dtypes`` leaves out.
        external_shapes: tensor name -> the caller's shape of it, where it differs (:class:`Tensor`).

    Raises:
        InputError: ``field`` is the argument it is about (``expr``, ``sizes.k``, ``dtypes.A``, ``shapes.X``).
    """
    shapes, pads = shapes or {}, pads or {}
    check_sizes(sizes)
    tree = parse_tree(text)
    definitions = build_statements(tree, sizes, pads)
    statements = _lift_reductions(definitions, sizes)
    sizes = {**sizes, **{axis: 1 for s in statements for axis in s.axes if axis not in sizes}}
    _check_every_size_is_used(statements, sizes)
    _check_order_and_use(statements)
    places = index_tensors(statements)
    tensor_shapes = _tensor_shapes(statements, sizes, shapes)
    statements = [replace(s, value=_check_loads(s, sizes, tensor_shapes)) for s in statements]
    user_tensors = {d.tensor for d in definitions}
    tensor_dtypes, accumulate = _tensor_dtypes(
        statements,
        tensor_shapes,
        user_tensors,
        dict.fromkeys(places, "int32") | dict(dtypes),
        accumulate,
        default_dtype,
    )
    check_places(places, tensor_dtypes)
    statements = [replace(s, value=_stored_pads(s.value, tensor_dtypes)) for s in statements]
    for key in pads:
        if key not in tensor_shapes:
            raise InputError(f"pad.{key}", "the expression has no tensor of this name", "remove it")
    external = {key: tuple(shape) for key, shape in (external_shapes or {}).items()}
    tensors = tuple(Tensor(key, shape, tensor_dtypes[key], external.get(key)) for key, shape in tensor_shapes.items())
    if places:
        by_name = {tensor.name: tensor for tensor in tensors}
        statements = [with_extents(statement, sizes, by_name) for statement in statements]
    axes = tuple(Axis(axis, sizes[axis]) for axis in _axis_order(statements))
    return TensorExpr(name=name, axes=axes, tensors=tensors, statements=tuple(statements), accumulate=accumulate)


# Values to normalised statements


@dataclass(kw_only=True)
class _Lifted:
    """Reductions taken out of one statement, each a statement of its own."""

    owner: Statement
    taken: set[str]
    unit_axis: str
    order: tuple[str, ...]
    statements: list[Statement] = field(default_factory=list)
    loads: dict[Reduction | Scan, Load] = field(default_factory=dict)

    def lift(self, value: Value, *, top: bool = False) -> Value:
        """``value`` without reductions inside (``top`` itself may be one): ``sum(k, X[i,k]) / 2 -> Y_sum[i] / 2``."""
        if isinstance(value, Call):
            return Call(value.function, tuple(self.lift(argument) for argument in value.arguments))
        if not isinstance(value, Reduction | Scan):
            return value
        lifted = replace(value, body=self.lift(value.body))
        return lifted if top else self._load_of(lifted)

    def _load_of(self, reduction: Reduction | Scan) -> Load:
        if reduction not in self.loads:
            used = set(used_axes([reduction.body]))
            if isinstance(reduction, Reduction):
                used = used - set(reduction.axes) | ({reduction.rank} if reduction.rank else set())
            else:
                used = used | {reduction.axis}
            axes = tuple(axis for axis in self.order if axis in used)
            name = unused_name(f"{self.owner.tensor}_{reduction.function}", self.taken)
            self.taken.add(name)
            self.statements.append(Statement(name, axes or (self.unit_axis,), reduction))
            indices = tuple(AffineIndex.axis(axis) for axis in axes) or (AffineIndex(),)
            self.loads[reduction] = Load(name, indices)
        return self.loads[reduction]


def _lift_reductions(definitions: Sequence[Statement], sizes: Mapping[str, int]) -> list[Statement]:
    """Statements that are each one reduction or point-wise; a scalar reduction gets an axis ``one`` of size 1."""
    taken = {*sizes, *(d.tensor for d in definitions), *(load.tensor for d in definitions for load in loads(d.value))}
    unit_axis = unused_name("one", taken)
    taken.add(unit_axis)
    result: list[Statement] = []
    for definition in definitions:
        inner = (axis for node in walk(definition.value) if isinstance(node, Reduction) for axis in node.axes)
        unit = next((axis for axis in definition.axes if sizes[axis] == 1), unit_axis)
        lifted = _Lifted(owner=definition, taken=taken, unit_axis=unit, order=(*definition.axes, *dict.fromkeys(inner)))
        value = lifted.lift(definition.value, top=True)
        result += [*lifted.statements, Statement(definition.tensor, definition.axes, value)]
    return result


def _axis_order(statements: Sequence[Statement]) -> tuple[str, ...]:
    """Axis names by first use: what a statement defines, then what it reduces."""
    return tuple(dict.fromkeys(axis for s in statements for axis in _statement_axes(s)))


def _statement_axes(statement: Statement) -> Iterator[str]:
    yield from statement.axes
    if statement.reduction:
        yield from statement.reduction.axes


def _check_every_size_is_used(statements: Sequence[Statement], sizes: Mapping[str, int]) -> None:
    used = set(_axis_order(statements))
    for axis in sizes:
        if axis not in used:
            raise InputError(f"sizes.{axis}", "the expression does not use this axis", f"remove {axis} from sizes")


def _check_order_and_use(statements: Sequence[Statement]) -> None:
    defined_at = {}
    for position, statement in enumerate(statements):
        if statement.tensor in defined_at:
            raise InputError("expr", f"tensor {statement.tensor} is assigned twice", "give the second one another name")
        defined_at[statement.tensor] = position
    read: set[str] = set()
    for position, statement in enumerate(statements):
        for load in loads(statement.value):
            read.add(load.tensor)
            if defined_at.get(load.tensor, -1) >= position:
                raise InputError(
                    "expr",
                    f"statement {statement.tensor} reads {load.tensor} before it is defined",
                    f"move the statement of {load.tensor} up",
                )
    for statement in statements[:-1]:
        if statement.tensor not in read:
            raise InputError(
                "expr", f"tensor {statement.tensor} is never read; only the last statement is the output", "remove it"
            )


# Shapes and dtypes


def _tensor_shapes(
    statements: Sequence[Statement], sizes: Mapping[str, int], shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor: inputs by first use, then what the statements define."""
    written = {s.tensor: tuple(sizes[axis] for axis in s.axes) for s in statements}
    accesses: dict[str, list[Load]] = {}
    for load in (load for s in statements for load in loads(s.value)):
        accesses.setdefault(load.tensor, []).append(load)
    for tensor in shapes:
        if tensor not in accesses or tensor in written:
            raise InputError(f"shapes.{tensor}", "the expression has no input of this name", "remove it from shapes")
    result = {
        tensor: check_shape(tensor, shapes[tensor]) if tensor in shapes else _inferred_shape(tensor, group, sizes)
        for tensor, group in accesses.items()
        if tensor not in written
    }
    result.update(written)
    for tensor, group in accesses.items():
        for load in group:
            if len(load.indices) != len(result[tensor]):
                raise InputError(
                    "expr", f"{tensor} has {len(result[tensor])} dimension(s) and is read with {len(load.indices)}", ""
                )
    between = {statement.tensor for statement in statements[:-1]}
    for tensor, shape in result.items():
        # Tensors in between are never stored, and no reduction that a kernel has is larger than the output.
        if tensor not in between and math.prod(shape) > MAX_ELEMENTS:
            extents = "x".join(map(str, shape))
            raise InputError(
                f"shapes.{tensor}",
                f"{extents} is more than {MAX_ELEMENTS} elements (32-bit indexing)",
                "split the work",
            )
    return result


def _inferred_shape(tensor: str, group: Sequence[Load], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The smallest shape that holds every index."""
    rank = len(group[0].indices)
    by_dimension = [
        [
            load.indices[d]
            for load in group
            if len(load.indices) == rank and not isinstance(load.indices[d], GatheredIndex)
        ]
        for d in range(rank)
    ]
    kind = "padded" if any(load.pad is not None for load in group) else "gathered"
    if kind == "padded" or not all(by_dimension):
        raise InputError(
            f"shapes.{tensor}",
            f"the shape of a {kind} input cannot be inferred",
            f'give it: "shapes": {{"{tensor}": [...]}}',
        )
    highs = [max(index.bounds(sizes)[1] for index in indices) for indices in by_dimension]
    return tuple(max(high + 1, 1) for high in highs)


def _check_loads(statement: Statement, sizes: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> Value:
    """The statement's value; loads that are always inside lose their pad, others must have one."""
    replacements: dict[Value, Value] = {}
    for load in loads(statement.value):
        outside = None
        for dimension, (index, extent) in enumerate(zip(load.indices, shapes[load.tensor], strict=True)):
            if isinstance(index, GatheredIndex):
                continue
            low, high = index.bounds(sizes)
            if reach(index, sizes) > MAX_AXIS_SIZE:
                raise InputError(
                    "expr",
                    f"statement {statement.tensor}: an index of {load.tensor} goes beyond 32-bit integers",
                    "use smaller strides and offsets",
                )
            if low < 0 or high >= extent:
                outside = outside or (dimension, low, high, extent)
        if outside is None and load.pad is not None and not load.places:
            replacements[load] = replace(load, pad=None)
        if outside is not None and load.pad is None:
            dimension, low, high, extent = outside
            raise InputError(
                "expr",
                f"statement {statement.tensor} reads {load.tensor} dimension {dimension} at {low} to {high}, "
                f"outside 0 to {extent - 1} of its shape {list(shapes[load.tensor])}",
                "write | pad=0 in the brackets, or correct the index, size or shape",
            )
    return rewrite(statement.value, replacements) if replacements else statement.value


def _stored_pads(value: Value, dtypes: Mapping[str, str]) -> Value:
    """A value whose pads are elements of their tensors: rounded to a narrow float, whole among integers.

    Infinities stay among floats; an integer's infinity is its own largest or least number.
    """
    replacements: dict[Value, Value] = {}
    for load in loads(value):
        dtype = dtypes[load.tensor]
        if load.pad is None or dtype in ("float32", "float64"):
            continue
        if dtype in INTEGER_DTYPES:
            most = 2 ** (7 if dtype == "int8" else 31)
            if math.isinf(load.pad):
                replacements[load] = replace(load, pad=float(most - 1 if load.pad > 0 else -most))
                continue
            if not float(load.pad).is_integer() or not -most <= load.pad < most:
                problem = f"{load.pad:g} pads {load.tensor}, whose elements are {dtype}"
                raise InputError("expr", problem, f"pad by a whole number of {dtype}")
            continue
        if not math.isfinite(load.pad):
            continue
        rounded = float(round_to_dtype(np.asarray(load.pad), dtype))
        if rounded != load.pad:
            replacements[load] = replace(load, pad=rounded)
    return rewrite(value, replacements) if replacements else value


def _tensor_dtypes(
    statements: Sequence[Statement],
    shapes: Mapping[str, tuple[int, ...]],
    user_tensors: set[str],
    dtypes: Mapping[str, str],
    accumulate: str | None,
    default_dtype: str,
) -> tuple[dict[str, str], str]:
    for tensor, dtype in dtypes.items():
        check_dtype(dtype, f"dtypes.{tensor}")
        if tensor not in shapes or (tensor not in user_tensors and any(s.tensor == tensor for s in statements)):
            raise InputError(f"dtypes.{tensor}", "the expression has no tensor of this name", "remove it from dtypes")
    inner = {statement.tensor for statement in statements[:-1]}
    result = {tensor: dtypes.get(tensor, default_dtype) for tensor in shapes if tensor in dtypes or tensor not in inner}
    output = statements[-1].tensor
    places = {s.tensor for s in statements if s.reduction is not None and s.reduction.is_place}
    if output not in dtypes:
        result[output] = "int32" if output in places else RESULT_DTYPE.get(default_dtype, default_dtype)
    accumulate = accumulate_dtype(statements, result, accumulate, output)
    check_numbers(statements, accumulate)
    usual = dict.fromkeys(places, "int32")
    return {tensor: result.get(tensor, usual.get(tensor, accumulate)) for tensor in shapes}, accumulate
