"""Adjacent results that are computed one by one and leave as a vector; operands that lie along them come as vectors.

TVM makes vectors of a whole statement, which falls apart into scalar accesses where a function has no vector form
(``erf``) or a type has none (eight halves).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.tir.lowered import identifier
from codegen.tir.reads import places, read_in_place
from codegen.tir.statements import local_buffer, named, vector_read, vector_write
from codegen.tir.values import Expr
from sokoban.kernel.form import KernelForm
from sokoban.language.expression import Call, Load, Value, loads, walk
from sokoban.language.functions import primitives_of

_ZERO = tirx.const(0, "int32")

#: Functions that TVM has no vectors of.
SCALAR_FUNCTIONS = frozenset({"erf"})


def is_scalar(value: Value, functions: Collection[str] = SCALAR_FUNCTIONS) -> bool:
    """True if one of some functions is in ``value``, or in what its functions are composed of, so that no vector of it
    can be computed."""
    called = {node.function for node in walk(value) if isinstance(node, Call)}
    return any(function in functions or primitives_of(function) & set(functions) for function in called)


class AdjacentResults:
    """Registers for the results of ``width`` adjacent elements of the output, and for the operands along them.

    Args:
        form: the operator.
        width: elements per vector (:func:`sokoban.schedule.accesses.store_vector`, so that operands lie as they do).
        sources: tensors in global memory, by name.
        name: gives registers a name that the kernel has not got.
    """

    def __init__(
        self,
        form: KernelForm,
        width: int,
        sources: Mapping[str, Expr],
        name: Callable[[str], str] = lambda wanted: wanted,
    ) -> None:
        self.width, self.sources, self.outputs = width, sources, form.final.axes
        self.tensors, self.sizes = form.expr.tensor_by_name, form.sizes
        tensors, last = form.expr.tensor_by_name, form.final.axes[-1]
        self._results = local_buffer(name("results"), width, form.expr.output.dtype)
        self._operands = {
            load: local_buffer(name(f"{identifier(load.tensor)}_operands"), width, tensors[load.tensor].dtype)
            for load in (loads(form.final.value) if width > 1 else ())
            if load.tensor in sources and load.pad is None and load.indices and load.indices[-1].coefficient(last)
        }

    def store(
        self,
        output: Expr,
        axes: Mapping[str, Expr],
        value: Callable[[dict[str, Expr], Mapping[Load, Expr], Expr], Expr],
    ) -> None:
        """Write the elements from ``axes`` on to the output; ``value`` computes one from its place, those of its
        operands that are in registers, and its number in the vector."""
        last, width = self.outputs[-1], self.width

        def gathered(place: Load) -> Expr:
            return read_in_place(place, self.tensors, self.sources, axes, self.sizes)

        for load, buffer in self._operands.items():
            *outer, innermost = places(load, axes, gathered)
            vector_write(buffer, _ZERO, width, self.sources[load.tensor][(*outer, tirx.Ramp(innermost, 1, width))])
        with named(T.unroll, width, "lane") as lane:
            taken = {load: buffer[lane] for load, buffer in self._operands.items()}
            T.buffer_store(self._results, value({**axes, last: axes[last] + lane}, taken, lane), [lane])
        indices = [axes[axis] for axis in self.outputs]
        indices[-1] = indices[-1] if width == 1 else tirx.Ramp(indices[-1], 1, width)
        T.buffer_store(output, vector_read(self._results, _ZERO, width), indices)
