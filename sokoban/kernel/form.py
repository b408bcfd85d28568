"""The canonical form in which construction, the cost model and code generation see an operator.

Whatever statements an operator was written with, after inlining and axis fusion (thesis 6.3.2) it is one of six
kinds:

``tile``
    at most one reduction, then one point-wise statement over the same spatial axes: contractions, convolutions,
    pooling, reductions, element-wise functions, transposes, each with its epilogue.
``rows``
    several reductions over the same columns of each row, then one point-wise statement over rows and columns:
    softmax, layer norm and their kin.
``line``
    what goes along one axis in order (a scan, the place of a largest or smallest value, values by rank, rows added
    where places say), then one point-wise statement; its kernels are in :mod:`sokoban.kernel.line`.
``attention``
    two products with a softmax between them, as :mod:`sokoban.language.named.attention` writes it. Its axes stay as
    they are; what its kernels compute is in :mod:`sokoban.kernel.attention`.
``attention_gradient``
    its gradient after one side, as :mod:`sokoban.language.named.attention_gradient` writes it; its kernels are in
    :mod:`sokoban.kernel.attention_gradient`.
``sequence``
    several of the first three, one after the other, which :mod:`sokoban.kernel.stages` makes of what is none of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hal.support.errors import InputError
from sokoban.kernel.attention import attention_flops
from sokoban.kernel.attention_gradient import gradient_flops, unread_bytes
from sokoban.kernel.kernel import ExpressionKernel, LaunchAxis
from sokoban.kernel.line import LineKernel, line_expression
from sokoban.kernel.matrix import MatrixRoles, product_roles
from sokoban.kernel.normalize import drop_unit_axes, fuse_axes, inline_pointwise
from sokoban.kernel.regions import read_bytes
from sokoban.kernel.rows import as_rows
from sokoban.kernel.statements import (
    axes_of,
    distinct_reduced_axes,
    reads_elementwise,
    reduction_of,
    renamed_to,
    too_much,
)
from sokoban.language.expression import (
    FLOAT8_DTYPES,
    AffineIndex,
    AxisValue,
    Load,
    Reduction,
    Statement,
    Tensor,
    TensorExpr,
    Value,
    loads,
    rewrite,
    walk,
)
from sokoban.language.named.attention import Attention
from sokoban.language.named.attention_gradient import AttentionGradient
from sokoban.language.named.base import tag_of
from sokoban.language.named.expressions import in_program


@dataclass(frozen=True, kw_only=True)
class KernelForm(ExpressionKernel):
    """An operator in canonical form.

    Attributes:
        source: the operator as the user wrote it.
        expr: the same operator over fused axes (unless they were asked to stay apart); its tensors are contiguous views
            of the source's.
        kind: ``"tile"``, ``"rows"``, ``"line"``, ``"attention"``, ``"attention_gradient"`` or ``"sequence"``.
        reductions: the reduction statements in order; in a ``tile`` at most one, over the axes of ``final``.
        final: the point-wise statement that defines the output (the identity where the operator has no epilogue).
        fused: pairs of a fused axis and the axes that it stands for.
        stages: forms of the kernels of a ``sequence``, in order.
        launch_axis: the axis whose size is known at launch, which has the largest; None where all sizes are known.
    """

    source: TensorExpr
    expr: TensorExpr
    kind: str
    reductions: tuple[Statement, ...]
    final: Statement
    fused: tuple[tuple[str, tuple[str, ...]], ...]
    stages: tuple[KernelForm, ...] = ()
    launch_axis: LaunchAxis | None = None

    #: A compiler writes its text, which has no narrow floats in OpenCL C.
    KEEPS_NARROW_FLOATS = False

    @property
    def name(self) -> str:
        """Name of the operator."""
        return self.expr.name

    @property
    def stated(self) -> tuple[Statement, ...]:
        """The statements as the user wrote them."""
        return self.source.statements

    def launched(self, axis: str) -> KernelForm:
        """The kernel with the size of one of the author's axes known at launch."""
        fused = next(((name, parts) for name, parts in self.fused if axis in parts), (axis, (axis,)))
        elements = math.prod(self.source.sizes[part] for part in fused[1] if part != axis)
        return replace(self, launch_axis=LaunchAxis(fused[0], elements))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Elements of every axis."""
        return self.expr.sizes

    @cached_property
    def reduction(self) -> Reduction | None:
        """The reduction of a ``tile``; None for point-wise operators."""
        return self.reductions[0].reduction if self.reductions else None

    @cached_property
    def spatial(self) -> tuple[str, ...]:
        """Axes over which blocks and threads are laid out: the output's, in a ``rows`` kernel those of a row."""
        return self.reductions[0].axes if self.is_rows else self.final.axes

    @cached_property
    def walked(self) -> tuple[str, ...]:
        """Spatial axes of more than one element."""
        return tuple([axis for axis in self.spatial if self.sizes[axis] > 1])

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The output axes of a ``rows`` kernel that its reductions run over; empty in a ``tile``."""
        return tuple(axis for axis in self.final.axes if axis not in self.spatial)

    @cached_property
    def reduced(self) -> tuple[str, ...]:
        """Reduction axes of the (first) reduction."""
        return self.reduction.axes if self.reduction else ()

    @cached_property
    def body(self) -> Value:
        """Value that is evaluated most often: the reduction's body, or the final value where nothing is reduced."""
        return self.reduction.body if self.reduction else self.final.value

    @cached_property
    def body_loads(self) -> tuple[Load, ...]:
        """Distinct loads of :attr:`body`; of a product of matrices its operands alone, not the places of their rows."""
        if self.roles is not None:
            return tuple(load for load in loads(self.body) if load in (self.roles.a, self.roles.b))
        return loads(self.body)

    @cached_property
    def scale_loads(self) -> tuple[Load, ...]:
        """Distinct loads of :attr:`body` that scale sums of products of matrices; none of any other operator."""
        return () if self.roles is None else tuple(dict.fromkeys(self.roles.scales))

    @cached_property
    def sum_sets(self) -> int:
        """Sets of sums that a kernel of matrix instructions has: two where those of a step are scaled by themselves."""
        return 2 if self.scale_loads else 1

    @cached_property
    def scattered_loads(self) -> frozenset[Load]:
        """Loads of :attr:`body` that lie in no tile: those at places that are read, and the reads of these places."""
        gathered = [load for load in loads(self.body) if load.places]
        return frozenset([*gathered, *[place for load in gathered for place in load.places]])

    @cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """Spatial axes that every load of :attr:`body` reads along: outputs share no data across them."""
        walked = [{axis for index in load.indices for axis in index.axes} for load in self.body_loads]
        return tuple(axis for axis in self.spatial if all(axis in axes for axes in walked))

    @cached_property
    def final_loads(self) -> tuple[Load, ...]:
        """Loads of input tensors by an epilogue; none where the final statement is the body itself."""
        produced = {statement.tensor for statement in self.reductions}
        return tuple(
            load
            for load in loads(self.final.value)
            if load.tensor not in produced and not (self.reduction is None and load in self.body_loads)
        )

    @cached_property
    def reduction_loads(self) -> tuple[Load, ...]:
        """Distinct loads of input tensors by all reductions."""
        produced = {statement.tensor for statement in self.reductions}
        reads = [load for statement in self.reductions for load in loads(statement.value)]
        return tuple(dict.fromkeys(load for load in reads if load.tensor not in produced))

    @cached_property
    def later_loads(self) -> tuple[Load, ...]:
        """Loads of input tensors that the (first) reduction does not read: by the others of a ``rows`` kernel, and by
        the final statement (:attr:`final_loads`)."""
        others = (*self.reduction_loads, *self.final_loads)
        return tuple(dict.fromkeys(load for load in others if load not in self.body_loads))

    @cached_property
    def is_rows_of_products(self) -> bool:
        """True if it is a ``rows`` kernel that reads its operands again in other rows: none of those of one reduction
        lies along all axes of a row, as in two products side by side. Nothing keeps them close to the units."""
        if not self.is_rows:
            return False
        walked, inputs = set(self.walked), {tensor.name for tensor in self.expr.inputs}
        for statement in self.reductions:
            read = [load for load in loads(reduction_of(statement).body) if load.tensor in inputs]
            lies_along = [{axis for index in load.indices for axis in index.axes} for load in read]
            if read and not any(walked <= axes for axes in lies_along):
                return True
        return False

    @cached_property
    def reduces_contiguously(self) -> bool:
        """True if a reduced axis walks the innermost dimension of the largest input.

        Threads that share a reduction then stand side by side along it, otherwise along the outputs.
        """
        tensors = self.expr.tensor_by_name
        produced = {statement.tensor for statement in self.reductions}
        candidates = [load for load in self.body_loads if load.tensor not in produced and load.indices]
        if not candidates:
            return True
        largest = max(candidates, key=lambda load: tensors[load.tensor].element_count)
        return any(largest.indices[-1].coefficient(axis) for axis in self.reduced)

    @cached_property
    def body_operations(self) -> int:
        """Arithmetic operations per evaluation of the body, the combining step of the reduction included; scales of
        products of matrices multiply none of them."""
        if self.scale_loads:
            return 2
        return operation_count(self.body) + (1 if self.reduction else 0)

    @cached_property
    def points(self) -> int:
        """Evaluations of the body in the whole operator."""
        return math.prod(self.sizes[axis] for axis in self.final.axes if axis not in self.columns) * math.prod(
            self.sizes[axis] for axis in self.reduced
        )

    @cached_property
    def attention(self) -> Attention:
        """The operator that an ``attention`` is."""
        attention = self.source.operator_as(Attention)
        assert attention is not None
        return attention

    @cached_property
    def attention_gradient(self) -> AttentionGradient:
        """The operator that an ``attention_gradient`` is."""
        gradient = self.source.operator_as(AttentionGradient)
        assert gradient is not None
        return gradient

    @cached_property
    def is_tile(self) -> bool:
        """True if it has at most one reduction, over the output's own axes."""
        return self.kind == "tile"

    @cached_property
    def is_rows(self) -> bool:
        """True if it has several reductions over the columns of each row."""
        return self.kind == "rows"

    @cached_property
    def is_composed(self) -> bool:
        """True if no schedule of tiles computes it whole: attention, its gradients, a sequence of kernels."""
        return self.kind in _COMPOSED_FLOPS

    @property
    def is_attention(self) -> bool:
        """True if it is attention or a gradient of it, which have kernels of their own."""
        return self.kind.startswith("attention")

    @property
    def is_line(self) -> bool:
        """True if it goes along one axis in order, which has kernels of its own."""
        return self.kind == "line"

    @property
    def line_kernel(self) -> LineKernel:
        """The kernel of a ``line``."""
        assert self.is_line
        return LineKernel(expr=self.expr)

    @cached_property
    def flops(self) -> float:
        """Arithmetic operations of the whole operator: a multiply-add counts two, the softmax of attention none."""
        if self.is_composed:
            return _COMPOSED_FLOPS[self.kind](self)
        outputs = math.prod(self.sizes[axis] for axis in self.final.axes)
        total = float(outputs * operation_count(self.final.value))
        return total + sum(map(self._reduction_flops, self.reductions))

    def _reduction_flops(self, statement: Statement) -> float:
        """Arithmetic operations of a reduction. Scales multiply the sum of a depth, not every product."""
        reduction = reduction_of(statement)
        count = math.prod(self.sizes[axis] for axis in statement.axes + reduction.axes)
        if self.roles is not None and self.scale_loads:
            return 2.0 * (count + count // self.sizes[self.roles.k])
        return float(count * (operation_count(reduction.body) + 1))

    @cached_property
    def roles(self) -> MatrixRoles | None:
        """The roles of the axes where the operator is a product of matrices; None where it is none."""
        return product_roles(self.expr, self.final.axes, self.reduction) if self.is_tile else None

    @cached_property
    def input_dtype(self) -> str:
        """The element type of what the body reads first, of the output where it reads nothing; of a matrix product's
        operands as an instruction multiplies them (``tfloat32``)."""
        if self.roles is not None:
            return self.roles.dtype
        return self.expr.tensor_by_name[self.body_loads[0].tensor].dtype if self.body_loads else self.expr.output.dtype

    @cached_property
    def needs_matrix(self) -> bool:
        """True if the operator reads eight-bit floats, which ordinary arithmetic takes none of."""
        return any(tensor.dtype in FLOAT8_DTYPES for tensor in self.expr.inputs)

    @cached_property
    def compulsory_bytes(self) -> int:
        """Bytes of all inputs and the output, each once; of what is read at places alone as many rows as are named."""
        read = sum(read_bytes(self.expr, tensor) for tensor in (*self.expr.inputs, self.expr.output))
        return read - (unread_bytes(self.attention_gradient) if self.kind == "attention_gradient" else 0)


#: Kind of an operator that no schedule of tiles computes whole -> its arithmetic operations.
_COMPOSED_FLOPS: Mapping[str, Callable[[KernelForm], float]] = {
    "line": lambda form: float(
        _line_operations(form.line_kernel)
        + math.prod(form.sizes[axis] for axis in form.final.axes) * operation_count(form.final.value)
    ),
    "attention": lambda form: attention_flops(form.attention),
    "attention_gradient": lambda form: gradient_flops(form.attention_gradient),
    "sequence": lambda form: sum(stage.flops for stage in form.stages),
}


def _line_operations(kernel: LineKernel) -> int:
    """Operations by which a kernel of lines takes in the elements of all lines, or of all rows that are scattered."""
    if kernel.scatter is not None:
        return kernel.length * kernel.columns * (operation_count(kernel.scatter.value) + 1)
    return kernel.lines * kernel.length * (operation_count(kernel.body) + 1)


def operation_count(value: Value) -> int:
    """Calls inside a value; selections and comparisons count like arithmetic.

    >>> from sokoban.language.expression import AffineIndex, Call
    >>> element = Load("X", (AffineIndex.axis("i"),))
    >>> operation_count(Call("exp", (Call("mul", (element, element)),)))
    2
    """
    return sum(1 for node in walk(value) if not isinstance(node, (Load, AxisValue)) and hasattr(node, "arguments"))


def kernel_form(source: TensorExpr, *, fuse: bool = True) -> KernelForm:
    """Bring an operator into canonical form.

    With ``fuse=False`` the operator keeps the axes that the user gave it, those of size 1 included:
    ``Y[n,c] = relu(X[n,c])`` is then a kernel over ``n`` and ``c``, not over ``n.c``. Schedules made elsewhere name the
    user's axes.

    >>> from sokoban.language.parser import parse_program
    >>> relu = parse_program("Y[n,c] = relu(X[n,c])", {"n": 3, "c": 5}, {})
    >>> kernel_form(relu).spatial, kernel_form(relu, fuse=False).spatial
    (('n.c',), ('n', 'c'))

    Raises:
        InputError: the operator needs more than one kernel (for instance one contraction of another's result).
    """
    operator = attention_of(source)
    if operator is not None:
        return _attention_form(source, operator, fuse)
    expr, fused = source.rewritten(), dict[str, tuple[str, ...]]()
    if fuse:
        # In this order: a reduction over one element becomes point-wise when its axis goes, and is then inlined.
        expr, fused = fuse_axes(inline_pointwise(drop_unit_axes(expr)))
    else:
        expr = inline_pointwise(expr)
    places = [each for each in expr.statements[:-1] if each.is_of_lines and each.reduction is not None]
    if places and all(expr.sizes[axis] == 1 for axis in expr.statements[-1].axes):
        expr, _ = _scalars_on_an_axis(expr, places)
    line = line_expression(expr)
    if line is not None:
        return _form(source, "line", line, (), fused)
    reductions = [statement for statement in expr.statements if statement.reduction is not None]
    if expr.statements[-1].reduction is not None:
        expr, reductions = _with_identity_epilogue(expr)
    if not reductions:
        return _form(source, "tile", expr, (), fused)
    expr, reductions = _scalars_on_an_axis(expr, reductions)
    final = expr.statements[-1]
    _check_reads_inside(expr, {statement.tensor for statement in reductions})
    if len(reductions) == 1 and reads_elementwise(final, reductions[0]):
        expr, (reduction,) = distinct_reduced_axes(expr, (reductions[0],), final.axes)
        renamed = renamed_to(final, reduction)
        expr = replace(expr, axes=axes_of(expr, (renamed, final)), statements=(renamed, final))
        return _form(source, "tile", expr, (renamed,), fused)
    try:
        rows = as_rows(expr, tuple(reductions), final)
    except InputError:
        repeated = _repeated_where_broadcast(expr, reductions, final)
        if repeated is None:
            raise
        return _form(source, "tile", repeated, repeated.statements[:-1], fused)
    return _form(source, "rows", rows, rows.statements[:-1], fused)


def _form(
    source: TensorExpr,
    kind: str,
    expr: TensorExpr,
    reductions: tuple[Statement, ...],
    fused: Mapping[str, tuple[str, ...]],
) -> KernelForm:
    """The form whose final statement is the last one."""
    return KernelForm(
        source=source, expr=expr, kind=kind, reductions=reductions, final=expr.statements[-1],
        fused=_still_named(fused, expr),
    )  # fmt: skip


def attention_of(source: TensorExpr) -> Attention | AttentionGradient | None:
    """The attention, or the gradient of it, that an operator is; None where it is anything else."""
    return source.operator_as(Attention) or source.operator_as(AttentionGradient)


def _attention_form(source: TensorExpr, operator: Attention | AttentionGradient, fuse: bool) -> KernelForm:
    """Attention or a gradient of it: the program of the operator, on the tensors of its ``source``.

    Raises:
        InputError: more statements follow it, or it was to keep axes for a schedule of tiles or for a gradient.
    """
    if not fuse:
        problem = "attention is no product over its own axes: its kernels take no schedules of tiles"
        raise InputError(source.name, problem, "use roller estimate --implementation library")
    if source.epilogue:
        problem = "kernels of attention have no epilogue"
        raise InputError(source.name, problem, "make the epilogue an operator of its own")
    expr = in_program(operator, source)
    return KernelForm(
        source=source, expr=expr, kind=tag_of(operator), reductions=(), final=expr.statements[-1], fused=()
    )  # fmt: skip


def _still_named(fused: Mapping[str, tuple[str, ...]], expr: TensorExpr) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The fused axes that ``expr`` has: a fused column may have taken the output's name for it."""
    return tuple((name, parts) for name, parts in fused.items() if name in expr.sizes)


def _check_reads_inside(expr: TensorExpr, produced: set[str]) -> None:
    """Refuse a padded read beyond the end of a reduction's result: the kernel would compute what should be padding."""
    for statement in expr.statements:
        for load in loads(statement.value):
            if load.tensor not in produced or load.pad is None:
                continue
            for index, extent in zip(load.indices, expr.tensor_by_name[load.tensor].shape, strict=True):
                if index.is_plain_axis and expr.sizes[index.axes[0]] > extent:
                    raise too_much(expr, f"{statement.tensor} reads {load.tensor} beyond its end")


def _with_identity_epilogue(expr: TensorExpr) -> tuple[TensorExpr, list[Statement]]:
    """``C = sum(...)`` -> ``C_acc = sum(...); C = C_acc``: the accumulator has its own dtype and its own name."""
    last = expr.statements[-1]
    tensor = expr.output
    accumulator = Tensor(f"{tensor.name}_acc", tensor.shape, expr.accumulate)
    copy = Statement(
        tensor.name, last.axes, Load(accumulator.name, tuple(AffineIndex.axis(axis) for axis in last.axes))
    )
    statements = (*expr.statements[:-1], Statement(accumulator.name, last.axes, last.value), copy)
    tensors = (*expr.tensors[:-1], accumulator, tensor)
    with_copy = replace(expr, tensors=tensors, statements=statements)
    return with_copy, [statement for statement in statements if statement.reduction is not None]


def _scalars_on_an_axis(expr: TensorExpr, reductions: list[Statement]) -> tuple[TensorExpr, list[Statement]]:
    """Reductions to a single number over one axis of size 1, which the output gets too.

    ``T[one] = sum(k, X[k]); Y[i] = X[i] / T[0]`` -> ``Y[one, i] = X[i] / T[one]``: the only row of a kernel over rows.
    The output stays as it is where it is a single number itself.
    """
    if not all(len(statement.axes) == 1 and expr.sizes[statement.axes[0]] == 1 for statement in reductions):
        return expr, reductions
    final, output = expr.statements[-1], expr.output
    is_number = all(expr.sizes[axis] == 1 for axis in final.axes)
    unit = final.axes[0] if is_number else reductions[0].axes[0]
    produced = {statement.tensor for statement in reductions}

    def on_axis(statement: Statement) -> Statement:
        moved: dict[Value, Value] = {
            load: Load(load.tensor, (AffineIndex.axis(unit),))
            for load in loads(statement.value)
            if load.tensor in produced and load.indices[0].bounds(expr.sizes) == (0, 0)
        }
        value = statement.value
        if isinstance(value, Reduction):
            return Statement(
                statement.tensor, (unit,), Reduction(value.function, value.axes, rewrite(value.body, moved))
            )
        axes = statement.axes if is_number else (unit, *statement.axes)
        return Statement(statement.tensor, axes, rewrite(value, moved))

    statements = tuple(on_axis(statement) for statement in expr.statements)
    if not is_number:
        output = Tensor(output.name, (1, *output.shape), output.dtype, output.caller_shape)
    tensors = tuple(output if tensor.name == output.name else tensor for tensor in expr.tensors)
    on_one_axis = replace(expr, tensors=tensors, statements=statements)
    return on_one_axis, [statement for statement in statements if statement.reduction is not None]


#: Most points of a reduction that is computed again for every output that shares it: they take no longer than the
#: launch of a second kernel, some microseconds at ten Tera operations per second.
MAX_REPEATED_POINTS = 2**24


def _repeated_where_broadcast(expr: TensorExpr, reductions: list[Statement], final: Statement) -> TensorExpr | None:
    """One reduction whose result is broadcast, computed for every output; None where that is impossible or too slow.

    ``C[j] = sum(k, X[k,j]); D[i,j] = C[j] * Y[i,j]`` -> ``C[i,j] = sum(k, X[k,j])``, read in place.
    """
    reads = {load for load in loads(final.value) if load.tensor == reductions[0].tensor}
    if len(reductions) > 1 or len(reads) != 1:
        return None
    read = next(iter(reads))
    names = [index.axes[0] for index in read.indices if index.is_plain_axis]
    if len(names) != len(read.indices) or len(set(names)) != len(names) or not set(names) <= set(final.axes):
        return None
    expr, (reduction,) = distinct_reduced_axes(expr, (reductions[0],), final.axes)
    if math.prod(expr.sizes[axis] for axis in (*final.axes, *reduction_of(reduction).axes)) > MAX_REPEATED_POINTS:
        return None
    renamed = renamed_to(final, reduction)
    everywhere = Statement(renamed.tensor, final.axes, renamed.value)
    in_place = Load(read.tensor, tuple(AffineIndex.axis(axis) for axis in final.axes))
    final = Statement(final.tensor, final.axes, rewrite(final.value, {read: in_place}))
    shape = tuple(expr.sizes[axis] for axis in final.axes)
    tensors = tuple(
        Tensor(tensor.name, shape, tensor.dtype) if tensor.name == read.tensor else tensor for tensor in expr.tensors
    )
    statements = (everywhere, final)
    return replace(expr, axes=axes_of(expr, statements), tensors=tensors, statements=statements)
