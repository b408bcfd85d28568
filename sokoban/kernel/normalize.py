"""Rewrites of a tensor expression into canonical form (thesis 6.3.2); the output's elements stay the same.

``drop_unit_axes`` -> ``inline_pointwise`` -> ``fuse_axes`` turns what users write into what schedules are built for:
reductions, then at most one point-wise statement, over as few axes as the accesses allow. Input tensors keep their
order and, through ``external_shape``, the caller's shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hal.support.errors import InputError
from sokoban.language.expression import (
    REDUCTION_IDENTITY,
    AffineIndex,
    Axis,
    AxisValue,
    Call,
    Constant,
    GatheredIndex,
    Load,
    Reduction,
    Scan,
    Statement,
    Tensor,
    TensorExpr,
    Value,
    loads,
    walk,
    with_places,
)

#: Most nodes, and levels, of a value after inlining; larger ones are refused, as every later pass would walk them all.
MAX_INLINED_NODES = 20_000
MAX_INLINED_DEPTH = 150


# Point-wise statements into their readers


def inline_pointwise(expr: TensorExpr) -> TensorExpr:
    """Point-wise statements substituted into the statements that read them.

    What remains are reductions, and one point-wise statement at the end if the output is not a reduction itself. A
    padded read of a point-wise tensor becomes ``select(inside, value, pad)``.

    >>> from sokoban.language.expression import statement_text
    >>> from sokoban.language.parser import parse_program
    >>> expr = parse_program("E[i,j] = exp(X[i,j]); S[i] = sum(j, E[i,j])", {"i": 3, "j": 5}, {})
    >>> [statement_text(statement) for statement in inline_pointwise(expr).statements]
    ['S[i] = sum([j], exp(X[i, j]))']

    Raises:
        InputError: the statements multiply each other beyond :data:`MAX_INLINED_NODES`.
    """
    definitions: dict[str, Statement] = {}
    statements: list[Statement] = []
    for statement in expr.statements:
        value = _Inliner(expr, definitions).value(statement.value)
        _check_size(value, statement, expr)
        statement = replace(statement, value=value)
        if statement.is_pointwise and statement is not expr.statements[-1] and statement.tensor != expr.output.name:
            definitions[statement.tensor] = statement
        else:
            statements.append(statement)
    return _with_statements(expr, statements, expr.tensors)


class _Inliner:
    """Replaces loads of defined tensors, and stops early where the result grows too large."""

    def __init__(self, expr: TensorExpr, definitions: Mapping[str, Statement]) -> None:
        self.expr = expr
        self.definitions = definitions
        self.nodes = 0

    def value(self, value: Value) -> Value:
        """``value`` without loads of point-wise tensors."""
        self.nodes += 1
        if self.nodes > MAX_INLINED_NODES:
            raise _too_large(self.expr)
        if isinstance(value, Call):
            return Call(value.function, tuple(self.value(argument) for argument in value.arguments))
        if isinstance(value, Reduction | Scan):
            return replace(value, body=self.value(value.body))
        if isinstance(value, Load) and value.tensor in self.definitions:
            return self._inlined(value)
        return value

    def _inlined(self, load: Load) -> Value:
        definition = self.definitions[load.tensor]
        shape = self.expr.tensor_by_name[load.tensor].shape
        body = definition.value
        self.nodes += sum(1 for _ in walk(body))
        if self.nodes > MAX_INLINED_NODES:
            raise _too_large(self.expr)
        replacements = dict(zip(definition.axes, load.indices, strict=True))
        substituted = substitute_axes(body, replacements)
        if load.pad is None:
            return substituted
        condition = _is_inside(load, shape, self.expr.sizes)
        if condition is None:
            return substituted
        return Call("select", (condition, self._padded(substituted), Constant(load.pad)))

    def _padded(self, value: Value) -> Value:
        """``value`` with a pad on every load that may now be outside; select discards what such a load gives."""
        if isinstance(value, Call):
            return Call(value.function, tuple(self._padded(argument) for argument in value.arguments))
        if isinstance(value, Load) and value.pad is None:
            shape = self.expr.tensor_by_name[value.tensor].shape
            if any(_inside(i, extent, self.expr.sizes) for i, extent in zip(value.indices, shape, strict=True)):
                return replace(value, pad=0.0)
        return value


def _is_inside(load: Load, shape: Sequence[int], sizes: Mapping[str, int]) -> Value | None:
    """The condition under which a load is inside of a tensor; None where it always is."""
    condition: Value | None = None
    for index, extent in zip(load.indices, shape, strict=True):
        for test in _inside(index, extent, sizes):
            condition = test if condition is None else Call("and", (condition, test))
    return condition


def _inside(index: AffineIndex, extent: int, sizes: Mapping[str, int]) -> list[Value]:
    """The comparisons that keep ``index`` in 0 ... extent - 1, without those that always hold."""
    low, high = index.bounds(sizes)
    tests: list[Value] = []
    if low < 0:
        tests.append(Call("ge", (_axis_value(index), Constant(0.0))))
    if high >= extent:
        tests.append(Call("lt", (_axis_value(index), Constant(float(extent)))))
    return tests


def _axis_value(index: AffineIndex) -> Value:
    return AxisValue(index) if index.terms else Constant(float(index.offset))


def _check_size(value: Value, statement: Statement, expr: TensorExpr) -> None:
    """Refuses values that recursive passes could not walk."""
    pending, nodes = [(value, 1)], 0
    while pending:
        node, depth = pending.pop()
        nodes += 1
        if depth > MAX_INLINED_DEPTH or nodes > MAX_INLINED_NODES:
            raise _too_large(expr, statement.tensor)
        if isinstance(node, Call):
            pending.extend((argument, depth + 1) for argument in node.arguments)
        elif isinstance(node, Reduction | Scan):
            pending.append((node.body, depth + 1))


def _too_large(expr: TensorExpr, tensor: str = "") -> InputError:
    where = f"statement {tensor}" if tensor else "a statement"
    return InputError(
        "expr",
        f"with its point-wise statements inlined, {where} of {expr.name} has more than {MAX_INLINED_NODES} terms "
        f"or {MAX_INLINED_DEPTH} levels",
        "split the operator into several",
    )


def substitute_axes(value: Value, replacements: Mapping[str, AffineIndex]) -> Value:
    """Every axis of ``replacements`` exchanged for its index: ``X[2*h + 1]`` with h -> ``i - 1`` is ``X[2*i - 1]``.

    Axes that ``value`` reduces or scans must not be among them.
    """
    if isinstance(value, AxisValue):
        return _axis_value(value.index.substitute(replacements))
    if isinstance(value, Load):
        return replace(value, indices=tuple(index.substitute(replacements) for index in value.indices))
    if isinstance(value, Call):
        return Call(value.function, tuple(substitute_axes(argument, replacements) for argument in value.arguments))
    if isinstance(value, Reduction | Scan):
        return replace(value, body=substitute_axes(value.body, replacements))
    return value


def _with_statements(
    expr: TensorExpr, statements: Sequence[Statement], tensors: Sequence[Tensor], sizes: Mapping[str, int] | None = None
) -> TensorExpr:
    """The expression with other statements, without the tensors and axes that these do not mention."""
    sizes = expr.sizes if sizes is None else sizes
    written = [s.tensor for s in statements]
    read = {load.tensor for s in statements for load in loads(s.value)} | set(written)
    used = {axis for s in statements for axis in (*s.axes, *(s.reduction.axes if s.reduction else ()))}
    axes = tuple(Axis(axis, size) for axis, size in sizes.items() if axis in used)
    return replace(expr, axes=axes, tensors=tuple(t for t in tensors if t.name in read), statements=tuple(statements))


# Axes of size one


def drop_unit_axes(expr: TensorExpr) -> TensorExpr:
    """Axes of size 1 and dimensions of extent 1 removed.

    A statement keeps one axis and a tensor one dimension even if all are 1; a dimension read through padding stays. A
    reduction over nothing but unit axes becomes point-wise.

    >>> from sokoban.language.expression import statement_text
    >>> from sokoban.language.parser import parse_program
    >>> text, sizes = "Y[n,f] = sum([c,kh], X[n,c,kh] * W[f,c,kh])", {"n": 1, "f": 8, "c": 4, "kh": 1}
    >>> statement_text(drop_unit_axes(parse_program(text, sizes, {})).statements[0])
    'Y[f] = sum([c], (X[c] * W[f, c]))'
    """
    zero = {axis.name: AffineIndex() for axis in expr.axes if axis.size == 1}
    dimensions_of = {tensor.name: _lasting_dimensions(tensor, expr) for tensor in expr.tensors}

    def dropped(value: Value) -> Value:
        if isinstance(value, Load):
            lasting = replace(value, indices=tuple(value.indices[d] for d in dimensions_of[value.tensor]))
            return with_places(lasting, dropped)
        if isinstance(value, Call):
            return Call(value.function, tuple(dropped(argument) for argument in value.arguments))
        if isinstance(value, Reduction):
            axes = tuple(axis for axis in value.axes if axis not in zero)
            if not axes and value.is_place:
                return Constant(0.0)
            rank = None if value.rank in zero else value.rank
            return Reduction(value.function, axes, dropped(value.body), rank) if axes else dropped(value.body)
        if isinstance(value, Scan):
            if value.axis in zero:
                return Constant(REDUCTION_IDENTITY[value.function]) if value.is_exclusive else dropped(value.body)
            return replace(value, body=dropped(value.body))
        return value

    statements = [
        Statement(s.tensor, tuple(s.axes[d] for d in dimensions_of[s.tensor]), dropped(substitute_axes(s.value, zero)))
        for s in expr.statements
    ]
    tensors = [_reshaped(tensor, tuple(tensor.shape[d] for d in dimensions_of[tensor.name])) for tensor in expr.tensors]
    return _with_statements(expr, statements, tensors)


def _lasting_dimensions(tensor: Tensor, expr: TensorExpr) -> tuple[int, ...]:
    """Dimensions of more than one element, or with a read that may be outside or at a place that is read; at least
    one."""
    outside = {
        d
        for statement in expr.statements
        for load in loads(statement.value)
        if load.tensor == tensor.name
        for d, index in enumerate(load.indices)
        if isinstance(index, GatheredIndex) or (load.pad is not None and index.bounds(expr.sizes) != (0, 0))
    }
    dimensions = tuple(d for d, extent in enumerate(tensor.shape) if extent != 1 or d in outside)
    return dimensions or tuple(range(len(tensor.shape)))[:1]


def _reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if shape == tensor.shape:
        return tensor
    return replace(tensor, shape=shape, external_shape=tensor.caller_shape)


# Axis fusion


def fuse_axes(expr: TensorExpr) -> tuple[TensorExpr, dict[str, tuple[str, ...]]]:
    """Axes that every access walks together merged into one, and which axes each merged one stands for.

    Two axes merge where every tensor that has one of them has both, side by side in this order and whole, in every
    access, and every statement treats both alike (spatial, reduced or absent).

    >>> from sokoban.language.expression import statement_text
    >>> from sokoban.language.parser import parse_program
    >>> text = "Y[n,c,h,w] = relu(X[n,c,h,w] + b[c])"
    >>> expr, members = fuse_axes(parse_program(text, {"n": 2, "c": 3, "h": 5, "w": 7}, {}))
    >>> statement_text(expr.statements[0]), members
    ('Y[n, c, h.w] = relu((X[n, c, h.w] + b[c]))', {'h.w': ('h', 'w')})
    """
    members: dict[str, tuple[str, ...]] = {axis.name: (axis.name,) for axis in expr.axes}
    pair = _fusible_pair(expr)
    while pair is not None:
        a, b = pair
        fused = f"{a}.{b}"
        members[fused] = members.pop(a) + members.pop(b)
        expr = _fuse_pair(expr, a, b, fused)
        pair = _fusible_pair(expr)
    return expr, {name: originals for name, originals in members.items() if len(originals) > 1}


def _fusible_pair(expr: TensorExpr) -> tuple[str, str] | None:
    """The first two axes in the order of the statements that may be merged."""
    for statement in expr.statements:
        reduced = statement.reduction.axes if statement.reduction else ()
        candidates = dict.fromkeys(zip(statement.axes, statement.axes[1:], strict=False))
        candidates |= dict.fromkeys((a, b) for a in reduced for b in reduced if a != b)
        for a, b in candidates:
            if can_fuse(expr, a, b):
                return a, b
    return None


def can_fuse(expr: TensorExpr, a: str, b: str) -> bool:
    """True if axes ``a`` and ``b`` may become one (the conditions of :func:`fuse_axes`)."""
    merged: dict[str, set[int | None]] = {}
    for statement in expr.statements:
        reduced = statement.reduction.axes if statement.reduction else ()
        if statement.scan is not None and statement.scan.axis in (a, b):
            return False
        if statement.reduction is not None and statement.reduction.rank in (a, b):
            return False
        if (a in statement.axes) != (b in statement.axes) or (a in reduced) != (b in reduced):
            return False
        accesses = [(statement.tensor, tuple(AffineIndex.axis(axis) for axis in statement.axes))]
        accesses += [(load.tensor, load.indices) for load in loads(statement.value)]
        for tensor, indices in accesses:
            position = _pair_position(indices, a, b)
            if position is None and any({a, b} & _walked_by(index) for index in indices):
                return False
            if position is not None and expr.tensor_by_name[tensor].shape[position + 1] != expr.sizes[b]:
                return False
            merged.setdefault(tensor, set()).add(position)
        if any(isinstance(node, AxisValue) and {a, b} & set(node.index.axes) for node in walk(statement.value)):
            return False
    return all(len(positions) == 1 for positions in merged.values())


def _pair_position(indices: Sequence[AffineIndex], a: str, b: str) -> int | None:
    """The dimension where plain ``a`` is followed by plain ``b``, both used nowhere else in ``indices``."""
    positions = [position for position, index in enumerate(indices) if {a, b} & _walked_by(index)]
    if len(positions) != 2 or positions[1] != positions[0] + 1:
        return None
    first, second = positions
    are_single_axes = indices[first] == AffineIndex.axis(a) and indices[second] == AffineIndex.axis(b)
    return first if are_single_axes else None


def _walked_by(index: AffineIndex) -> set[str]:
    """Axes that an index walks its dimension by; none where it is read, which is an access of its own."""
    return set() if isinstance(index, GatheredIndex) else set(index.axes)


def _fuse_pair(expr: TensorExpr, a: str, b: str, fused: str) -> TensorExpr:
    """``expr`` with axes ``a`` and ``b`` merged; :func:`can_fuse` holds."""
    merged_at: dict[str, int] = {}

    def fused_access(tensor: str, indices: tuple[AffineIndex, ...]) -> tuple[AffineIndex, ...]:
        position = _pair_position(indices, a, b)
        if position is None:
            return indices
        merged_at[tensor] = position
        return (*indices[:position], AffineIndex.axis(fused), *indices[position + 2 :])

    def fused_value(value: Value) -> Value:
        if isinstance(value, Load):
            indices = tuple(
                replace(index, terms=_fused_terms(index, a, b, fused)) if isinstance(index, GatheredIndex) else index
                for index in fused_access(value.tensor, value.indices)
            )
            return with_places(replace(value, indices=indices), fused_value)
        if isinstance(value, Call):
            return Call(value.function, tuple(fused_value(argument) for argument in value.arguments))
        if isinstance(value, Reduction):
            return replace(value, axes=_fused_names(value.axes, a, b, fused), body=fused_value(value.body))
        if isinstance(value, Scan):
            return replace(value, body=fused_value(value.body))
        return value

    statements = []
    for statement in expr.statements:
        fused_access(statement.tensor, tuple(AffineIndex.axis(axis) for axis in statement.axes))
        axes = _fused_names(statement.axes, a, b, fused)
        statements.append(Statement(statement.tensor, axes, fused_value(statement.value)))
    tensors = []
    for tensor in expr.tensors:
        shape, position = tensor.shape, merged_at.get(tensor.name)
        if position is not None:
            shape = (*shape[:position], math.prod(shape[position : position + 2]), *shape[position + 2 :])
        tensors.append(_reshaped(tensor, shape))
    sizes = {
        (fused if axis == a else axis): size * (expr.sizes[b] if axis == a else 1)
        for axis, size in expr.sizes.items()
        if axis != b
    }
    return _with_statements(expr, statements, tensors, sizes)


def _fused_terms(index: AffineIndex, a: str, b: str, fused: str) -> tuple[tuple[str, int], ...]:
    """Terms of an index that counts along ``a`` in rows of ``b``."""
    terms = {axis: factor for axis, factor in index.terms if axis not in (a, b)}
    return AffineIndex.of({**terms, fused: index.coefficient(b)}).terms


def _fused_names(axes: tuple[str, ...], a: str, b: str, fused: str) -> tuple[str, ...]:
    return tuple(fused if axis == a else axis for axis in axes if axis != b)
