"""Named operators as expressions, which carry the operator that wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sokoban.language.expression import Axis, Origin, Statement, TensorExpr, renamed_value
from sokoban.language.named.base import NamedProgram, with_epilogue
from sokoban.language.names import unused_name
from sokoban.language.parser import parse_program


def program_expression(operator: NamedProgram, name: str) -> TensorExpr:
    """The expression of an operator, its epilogue included, by a name.

    Raises:
        InputError: keys of the operator contradict each other.
    """
    own = operator.program()
    program = with_epilogue(own, operator.epilogue)
    expr = parse_program(
        program.text, program.sizes, program.dtypes, accumulate=operator.accumulate, name=name, shapes=program.shapes,
        default_dtype=program.default_dtype or operator.dtype, external_shapes=program.external_shapes,
    )  # fmt: skip
    return replace(expr, allow_tf32=operator.allow_tf32, origin=Origin(operator=operator, result=own.output))


def program_as(operator: NamedProgram, expr: TensorExpr) -> TensorExpr:
    """The program of an operator by the name of ``expr``, and with its names of tensors where they have the same part
    in the operator that ``expr`` is."""
    assert expr.origin is not None
    return renamed(program_expression(operator, expr.name), dict(expr.origin.names))


def renamed(expr: TensorExpr, names: Mapping[str, str]) -> TensorExpr:
    """The expression with tensors and axes of other names, by those that they have; what has a name that is taken
    gives way.

    >>> from sokoban.language.expression import statement_text
    >>> from sokoban.language.parser import parse_program
    >>> product = parse_program("C[i,j] = sum(k, A[i,k] * B[k,j])", {"i": 4, "j": 3, "k": 2}, {})
    >>> statement_text(renamed(product, {"A": "X", "B": "A", "C": "k"}).statements[0])
    'k[i, j] = sum([k_2], (X[i, k_2] * A[k_2, j]))'
    """
    own = [*expr.sizes, *(tensor.name for tensor in expr.tensors)]
    chosen = {name: names[name] for name in own if name in names}
    taken = set(chosen.values())
    for name in own:
        if name not in chosen:
            chosen[name] = unused_name(name, taken)
            taken.add(chosen[name])
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
    before = {now: own for own, now in origin.names}
    pairs = ((before.get(name, name), new) for name, new in names.items())
    return replace(origin, result=names[origin.result], names=tuple(pair for pair in pairs if pair[0] != pair[1]))
