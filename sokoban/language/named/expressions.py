"""Named operators as expressions, which carry the operator that wrote them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from sokoban.language.expression import (
    AffineIndex,
    Axis,
    AxisValue,
    Call,
    Load,
    Origin,
    Reduction,
    Scan,
    Statement,
    TensorExpr,
    Value,
    loads,
    with_places,
)
from sokoban.language.named.base import NamedProgram, with_epilogue
from sokoban.language.names import unused_name
from sokoban.language.parser import parse_program


def program_expression(operator: NamedProgram, name: str) -> TensorExpr:
    """The expression of an operator, its epilogue included, by a name.

    Raises:
        InputError: keys of the operator contradict each other.
    """
    unextended = operator.program()
    program = with_epilogue(unextended, operator.epilogue)
    expr = parse_program(
        program.text, program.sizes, program.dtypes, accumulate=operator.accumulate, name=name, shapes=program.shapes,
        default_dtype=program.default_dtype or operator.dtype, external_shapes=program.external_shapes,
    )  # fmt: skip
    return replace(expr, allow_tf32=operator.allow_tf32, origin=Origin(operator=operator, result=unextended.output))


def program_as(operator: NamedProgram, expr: TensorExpr) -> TensorExpr:
    """The program of an operator by the name of ``expr``, and with its names of tensors and axes where they have the
    same part in the operator that ``expr`` is."""
    assert expr.origin is not None
    names = dict(expr.origin.names)
    program = program_expression(operator, expr.name)
    if operator.epilogue or not expr.epilogue:
        return renamed(program, names)
    return renamed(program, names, _names(expr.epilogue) - {expr.origin.result})


def in_program(operator: NamedProgram, expr: TensorExpr) -> TensorExpr:
    """The expression of an ``operator`` in the statements of that operator's program, with its own statements behind
    them where it has an epilogue that the operator has not."""
    program = program_as(operator, expr)
    epilogue = () if operator.epilogue else expr.epilogue
    tensors = {tensor.name: tensor for tensor in program.tensors}
    tensors |= {tensor.name: tensor for tensor in (*expr.inputs, expr.output)}
    for statement in epilogue:
        tensors[statement.tensor] = expr.tensor_by_name[statement.tensor]
    if epilogue:
        result = program.output.name
        tensors[result] = expr.tensor_by_name[result]
    written = {statement.tensor for statement in (*program.statements, *epilogue)}
    inputs = [name for name in tensors if name not in written]
    axes = {axis.name: axis for axis in program.axes} | {
        axis.name: axis for axis in expr.axes if axis.name in _names(epilogue)
    }
    return replace(
        program,
        axes=tuple(axes.values()),
        tensors=tuple(tensors[name] for name in (*inputs, *(name for name in tensors if name in written))),
        statements=(*program.statements, *epilogue),
    )


def _names(statements: Iterable[Statement]) -> set[str]:
    """Tensors and axes of statements."""
    names: set[str] = set()
    for statement in statements:
        reduced = statement.reduction.axes if statement.reduction else ()
        names.update((statement.tensor, *statement.axes, *reduced, *(load.tensor for load in loads(statement.value))))
    return names


def renamed(expr: TensorExpr, names: Mapping[str, str], taken: Collection[str] = ()) -> TensorExpr:
    """The expression with tensors and axes of other names, by those that they have; what has one of these names or one
    that is ``taken``, and is not named, gives way.

    >>> from sokoban.language.expression import statement_text
    >>> from sokoban.language.parser import parse_program
    >>> product = parse_program("C[i,j] = sum(k, A[i,k] * B[k,j])", {"i": 4, "j": 3, "k": 2}, {})
    >>> statement_text(renamed(product, {"A": "X", "B": "A", "C": "k"}).statements[0])
    'k[i, j] = sum([k_2], (X[i, k_2] * A[k_2, j]))'
    """
    if not names:
        return expr
    names_in_use = [*expr.sizes, *(tensor.name for tensor in expr.tensors)]
    chosen = {name: names[name] for name in names_in_use if name in names}
    used = {*chosen.values(), *taken}
    for name in names_in_use:
        if name not in chosen:
            chosen[name] = unused_name(name, used)
            used.add(chosen[name])
    return replace(
        expr,
        axes=tuple(Axis(chosen[axis.name], axis.size) for axis in expr.axes),
        tensors=tuple(replace(tensor, name=chosen[tensor.name]) for tensor in expr.tensors),
        statements=tuple(
            Statement(chosen[each.tensor], tuple(chosen[axis] for axis in each.axes), renamed_value(each.value, chosen))
            for each in expr.statements
        ),
        origin=None if expr.origin is None else _renamed_origin(expr.origin, chosen),
    )


def _renamed_origin(origin: Origin, names: Mapping[str, str]) -> Origin:
    """The origin of an expression whose tensors and axes got other names."""
    before = {now: program_name for program_name, now in origin.names}
    pairs = ((before.get(name, name), new) for name, new in names.items())
    return replace(origin, result=names[origin.result], names=tuple(pairs))


def renamed_value(value: Value, names: Mapping[str, str]) -> Value:
    """``value`` with axes and tensors of other names, by those that they have.

    >>> from sokoban.language.expression import value_text
    >>> element = Load("X", (AffineIndex.of({"i": 2}, 1),))
    >>> value_text(renamed_value(Reduction("sum", ("i",), element), {"i": "k", "X": "A"}))
    'sum([k], A[2*k + 1])'
    """
    if isinstance(value, Call):
        return Call(value.function, tuple(renamed_value(argument, names) for argument in value.arguments))
    if isinstance(value, Reduction):
        axes = tuple(names.get(axis, axis) for axis in value.axes)
        rank = None if value.rank is None else names.get(value.rank, value.rank)
        return Reduction(value.function, axes, renamed_value(value.body, names), rank)
    if isinstance(value, Scan):
        return replace(value, axis=names.get(value.axis, value.axis), body=renamed_value(value.body, names))
    moved = {axis: AffineIndex.axis(name) for axis, name in names.items()}
    if isinstance(value, Load):
        indices = tuple(index.substitute(moved) for index in value.indices)
        renamed = Load(names.get(value.tensor, value.tensor), indices, value.pad)
        return with_places(renamed, lambda place: replace(place, tensor=names.get(place.tensor, place.tensor)))
    return AxisValue(value.index.substitute(moved)) if isinstance(value, AxisValue) else value
