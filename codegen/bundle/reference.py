"""Any operator as plain CUDA C, to check its kernels on the device that runs them.

A kernel per statement, in float64 throughout and with no tiling at all: a thread computes an element of the
statement's tensor with loops over the reduction. Where there are few elements and much to reduce, a block shares one.
A thread goes along a whole line of a scan.
The text comes from the operator as its author wrote it, so it shares nothing with the kernels that it judges, and it
includes no headers, so that every NVRTC compiles it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from codegen.bundle.records import ReferenceLaunch, ReferenceRecord
from codegen.tolerance import output_widths, tolerance_of
from sokoban.language.expression import (
    RANKED_REDUCTIONS,
    AffineIndex,
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
)
from sokoban.language.functions import FUNCTIONS, expanded
from sokoban.language.random_data import input_ranges

#: Name of the file in a bundle.
SOURCE = "reference.cu"

#: Threads of a block.
THREADS = 256

#: A block shares an element where there are fewer elements than a GPU keeps threads busy and at least so many points.
FEW_ELEMENTS = 2**14
SHARED_POINTS = 4 * THREADS

_ELEMENTS = {
    "float16": "unsigned short", "bfloat16": "unsigned short", "float32": "float", "float64": "double",
    "int8": "signed char", "int32": "int", "float8_e4m3fn": "unsigned char", "float8_e5m2": "unsigned char",
}  # fmt: skip
_WIDEN = {
    "float16": "from_half({})", "bfloat16": "from_bfloat16({})", "float32": "(double){}", "float64": "{}",
    "int8": "(double){}", "int32": "(double){}", "float8_e4m3fn": "from_e4m3({})", "float8_e5m2": "from_half({} << 8)",
}  # fmt: skip

_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==",
    "ne": "!=", "and": "&&", "or": "||",
}  # fmt: skip
_NAMES = {
    "pow": "pow", "min": "smaller", "max": "larger", "abs": "fabs", "exp": "exp", "log": "log", "sqrt": "sqrt",
    "tanh": "tanh", "erf": "erf", "sin": "sin", "cos": "cos", "floor": "floor", "ceil": "ceil",
}  # fmt: skip
_COMBINE = {"sum": "{} + {}", "prod": "{} * {}", "max": "larger({}, {})", "min": "smaller({}, {})"}
_IDENTITY = {"sum": "0.0", "prod": "1.0", "max": "-INFINITE", "min": "INFINITE"}

_HEAD = """\
// The operator in float64, statement by statement, for checking kernels against it.
#define INFINITE (1e308 * 10.0)
#define FUNCTION static __device__ __forceinline__ double
FUNCTION from_bfloat16(unsigned short bits) {
  union { unsigned u; float f; } value;
  value.u = (unsigned)bits << 16;
  return value.f;
}
FUNCTION from_half(unsigned short bits) {
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double size = exponent == 31 ? (fraction ? INFINITE - INFINITE : INFINITE)
              : exponent ? ldexp(1024.0 + fraction, exponent - 25) : ldexp((double)fraction, -24);
  return bits >> 15 ? -size : size;
}
FUNCTION from_e4m3(unsigned char bits) {
  int exponent = bits >> 3 & 15, fraction = bits & 7;
  double size = exponent == 15 && fraction == 7 ? INFINITE - INFINITE
              : exponent ? ldexp(8.0 + fraction, exponent - 10) : ldexp((double)fraction, -9);
  return bits >> 7 ? -size : size;
}
FUNCTION larger(double a, double b) { return a > b || a != a ? a : b; }
FUNCTION smaller(double a, double b) { return a < b || a != a ? a : b; }
"""


@dataclass(frozen=True)
class ReferenceKernel:
    """``reference.cu`` and what the manifest says of it."""

    source: str
    record: ReferenceRecord


def reference_kernel(expr: TensorExpr, entry: str) -> ReferenceKernel:
    """The reference of an operator.

    Args:
        entry: first part of the kernels' names; statement 0 becomes ``<entry>_reference_0``.

    Raises:
        ValueError: a tensor has a dtype without a meaning here.
    """
    unknown = [tensor.dtype for tensor in expr.tensors if tensor.dtype not in _ELEMENTS]
    if unknown:
        raise ValueError(f"no reference for {unknown[0]}")
    written = {statement.tensor for statement in expr.statements}
    kernels = [_Kernel(expr, statement, written) for statement in expr.statements]
    names = [f"{entry}_reference_{number}" for number in range(len(kernels))]
    source = "\n".join([_HEAD, *(kernel.text(name) for kernel, name in zip(kernels, names, strict=True))])
    return ReferenceKernel(
        source,
        ReferenceRecord(
            source=SOURCE,
            launches=tuple(
                ReferenceLaunch(
                    entry=name,
                    grid=(kernel.blocks, 1, 1),
                    block=(THREADS, 1, 1),
                    tensors=(*kernel.reads, kernel.statement.tensor),
                )
                for kernel, name in zip(kernels, names, strict=True)
            ),
            workspace={
                name: expr.tensor_by_name[name].element_count for name in expr.tensor_by_name if name in written
            },
            tolerance=tolerance_of(expr),
            ranges={name: tuple(pair) for name, pair in input_ranges(expr).items()},
            widths=output_widths(expr),
        ),
    )


class _Kernel:
    """The kernel of one statement."""

    def __init__(self, expr: TensorExpr, statement: Statement, written: set[str]) -> None:
        self.expr, self.statement, self.written = expr, statement, written
        self.reads = list(dict.fromkeys(load.tensor for load in loads(statement.value)))
        scan, reduction = statement.scan, statement.reduction
        #: The axes that threads are laid out over.
        self.axes = tuple(axis for axis in statement.axes if scan is None or axis != scan.axis)
        self.elements = math.prod(expr.sizes[axis] for axis in self.axes)
        self.points = math.prod(expr.sizes[axis] for axis in reduction.axes) if reduction else 1
        is_divisible = not statement.is_of_lines
        self.shared = is_divisible and self.elements < FEW_ELEMENTS and self.points >= SHARED_POINTS
        self.blocks = self.elements if self.shared else -(-self.elements // THREADS)
        # 64-bit indices cost a device several times as much, so only where they are needed.
        counts = (
            expr.tensor_by_name[statement.tensor].element_count,
            self.points,
            *(expr.tensor_by_name[name].element_count for name in self.reads),
        )
        self.index = "long long" if max(counts) >= 2**30 else "int"

    def text(self, name: str) -> str:
        """The kernel's definition."""
        parameters = [f"const {self._element(tensor)}* __restrict__ {_variable(tensor)}" for tensor in self.reads]
        parameters.append(f"double* __restrict__ {_variable(self.statement.tensor)}")
        body = self._shared_body() if self.shared else self._body()
        return "\n".join(
            [
                f'extern "C" __global__ void __launch_bounds__({THREADS}) {name}({", ".join(parameters)}) {{',
                *(f"  {line}" for line in body),
                "}",
                "",
            ]
        )

    def _element(self, tensor: str) -> str:
        return "double" if tensor in self.written else _ELEMENTS[self.expr.tensor_by_name[tensor].dtype]

    def _body(self) -> list[str]:
        """A thread per element."""
        lines = [
            f"const long long element = (long long)blockIdx.x * {THREADS} + threadIdx.x;",
            f"if (element >= {self.elements}) return;",
            *self._decoded("element", self.axes),
        ]
        if self.statement.scan is not None:
            return [*lines, *self._scanned(self.statement.scan)]
        reduction = self.statement.reduction
        if reduction is None:
            return [*lines, f"{self._output('element')} = {self._value(self.statement.value)};"]
        if reduction.rank is not None:
            return [*lines, *self._ranked(reduction)]
        if reduction.is_place:
            return [*lines, *self._place(reduction)]
        lines.append(f"double total = {_IDENTITY[reduction.function]};")
        for axis in reduction.axes:
            name = _variable(axis)
            lines.append(f"for ({self.index} {name} = 0; {name} < {self.expr.sizes[axis]}; ++{name})")
        lines += [f"  {self._accumulate(reduction)}", f"{self._output('element')} = total;"]
        return lines

    def _scanned(self, scan: Scan) -> list[str]:
        """A line from its one end to the other."""
        axis, size = _variable(scan.axis), self.expr.sizes[scan.axis]
        step = (
            f"{axis} = {size - 1}; {axis} >= 0; --{axis}"
            if scan.is_reversed
            else f"{axis} = 0; {axis} < {size}; ++{axis}"
        )
        tensor = self.expr.tensor_by_name[self.statement.tensor]
        own = Load(tensor.name, tuple(AffineIndex.axis(each) for each in self.statement.axes))
        store = f"  {self._output(_offset([_index(index) for index in own.indices], tensor))} = total;"
        total = f"  total = {_COMBINE[scan.function].format('total', self._value(scan.body))};"
        both = [store, total] if scan.is_exclusive else [total, store]
        return [f"double total = {_IDENTITY[scan.function]};", f"for ({self.index} {step}) {{", *both, "}"]

    def _place(self, reduction: Reduction) -> list[str]:
        """The place of the first of the largest or smallest values, NaN among them."""
        (axis,) = reduction.axes
        name, order = _variable(axis), ">" if reduction.function == "argmax" else "<"
        return [
            f"double best = {_IDENTITY['max' if order == '>' else 'min']}; {self.index} place = 0;",
            f"for ({self.index} {name} = 0; {name} < {self.expr.sizes[axis]}; ++{name}) {{",
            f"  const double value = {self._value(reduction.body)};",
            f"  if (best == best && (value {order} best || value != value)) best = value, place = {name};",
            "}",
            f"{self._output('element')} = place;",
        ]

    def _ranked(self, reduction: Reduction) -> list[str]:
        """The value or place of a rank: as often the best of what comes behind the one before."""
        (axis,), rank = reduction.axes, _variable(reduction.rank or "")
        name, order = _variable(axis), ">" if RANKED_REDUCTIONS[reduction.function] else "<"

        def precedes(value: str, place: str, other: str, other_place: str) -> str:
            is_first = f"({value} {order} {other} || {value} != {value}) && {other} == {other}"
            is_equal = f"{value} == {other} || ({value} != {value} && {other} != {other})"
            return f"(({is_first}) || (({is_equal}) && {place} < {other_place}))"

        behind = precedes("before", "place_before", "value", name)
        return [
            f"double best = 0, before = 0; {self.index} place = -1, place_before = -1;",
            f"for ({self.index} round = 0; round <= {rank}; ++round) {{",
            "  before = best, place_before = place, place = -1;",
            f"  for ({self.index} {name} = 0; {name} < {self.expr.sizes[axis]}; ++{name}) {{",
            f"    const double value = {self._value(reduction.body)};",
            f"    if (round > 0 && !{behind}) continue;",
            f"    if (place < 0 || {precedes('value', name, 'best', 'place')}) best = value, place = {name};",
            "  }",
            "}",
            f"{self._output('element')} = {'place' if reduction.is_place else 'best'};",
        ]

    def _shared_body(self) -> list[str]:
        """A block per element: every thread reduces its share, then the threads halve until one is left."""
        reduction = self.statement.reduction
        assert reduction is not None
        combined = _COMBINE[reduction.function].format("part[threadIdx.x]", "part[threadIdx.x + half]")
        return [
            f"__shared__ double part[{THREADS}];",
            *self._decoded("blockIdx.x", self.statement.axes),
            f"double total = {_IDENTITY[reduction.function]};",
            f"for ({self.index} point = threadIdx.x; point < {self.points}; point += {THREADS}) {{",
            *(f"  {line}" for line in self._decoded("point", reduction.axes)),
            f"  {self._accumulate(reduction)}",
            "}",
            "part[threadIdx.x] = total;",
            f"for (int half = {THREADS // 2}; half > 0; half /= 2) {{",
            "  __syncthreads();",
            f"  if (threadIdx.x < half) part[threadIdx.x] = {combined};",
            "}",
            f"if (threadIdx.x == 0) {self._output('blockIdx.x')} = part[0];",
        ]

    def _accumulate(self, reduction: Reduction) -> str:
        return f"total = {_COMBINE[reduction.function].format('total', self._value(reduction.body))};"

    def _output(self, element: str) -> str:
        return f"{_variable(self.statement.tensor)}[{element}]"

    def _decoded(self, number: str, axes: tuple[str, ...]) -> list[str]:
        """Declarations that take a row-major element number apart into axes."""
        lines, below = [], 1
        for axis in reversed(axes):
            size = self.expr.sizes[axis]
            lines.append(f"const {self.index} {_variable(axis)} = {number} / {below} % {size};")
            below *= size
        return lines

    def _value(self, value: Value) -> str:
        """A value as a C expression, fully bracketed."""
        if isinstance(value, Constant):
            return _number(value.value)
        if isinstance(value, AxisValue):
            return f"(double)({_index(value.index)})"
        if isinstance(value, Load):
            return self._load(value)
        assert isinstance(value, Call), "a normalised statement has no inner reduction"
        if FUNCTIONS[value.function].value is not None:
            return self._value(expanded(value))
        arguments = [self._value(argument) for argument in value.arguments]
        if value.function in _INFIX:
            return f"({arguments[0]} {_INFIX[value.function]} {arguments[1]})"
        special: Mapping[str, Callable[..., str]] = {
            "neg": lambda a: f"(-{a})",
            "not": lambda a: f"(!{a})",
            "select": lambda condition, yes, no: f"({condition} ? {yes} : {no})",
        }
        if value.function in special:
            return special[value.function](*arguments)
        return f"{_NAMES[value.function]}({', '.join(arguments)})"

    def _load(self, load: Load) -> str:
        tensor = self.expr.tensor_by_name[load.tensor]
        places = [self._place_of(index) for index in load.indices]
        element = f"{_variable(load.tensor)}[{_offset(places, tensor)}]"
        value = element if load.tensor in self.written else _WIDEN[tensor.dtype].format(element)
        if load.pad is None:
            return value
        inside = []
        for index, place, extent in zip(load.indices, places, tensor.shape, strict=True):
            low, high = index.bounds(self.expr.sizes)
            inside += [f"{place} >= 0"] if low < 0 else []
            inside += [f"{place} < {extent}"] if high >= extent else []
        return f"({' && '.join(inside)} ? {value} : {_number(load.pad)})" if inside else value

    def _place_of(self, index: AffineIndex) -> str:
        """An index; one that is read itself within its dimension, or one outside where that is the pad."""
        if not isinstance(index, GatheredIndex):
            return _index(index)
        read = f"({self.index}){self._load(index.place)}"
        return f"({read} < {index.low} ? {index.low} : {read} > {index.high} ? {index.high} : {read})"


def _variable(name: str) -> str:
    """A name of the user's as one of C, apart from C's own words and from the names above."""
    return f"v_{name}"


def _number(value: float) -> str:
    """A constant to the last bit."""
    if math.isnan(value):
        return "(INFINITE - INFINITE)"
    if math.isinf(value):
        return "INFINITE" if value > 0 else "(-INFINITE)"
    return f"({value!r})"


def _index(index: AffineIndex) -> str:
    terms = [_variable(axis) if factor == 1 else f"{factor} * {_variable(axis)}" for axis, factor in index.terms]
    return f"({' + '.join([*terms, str(index.offset)] if index.offset or not terms else terms)})"


def _offset(places: Sequence[str], tensor: Tensor) -> str:
    """Row-major element number of a load: ``((m) * 17 + (k))``; unsigned nowhere, so negative parts cancel."""
    total = ""
    for place, extent in zip(places, tensor.shape, strict=True):
        total = f"({total} * {extent} + {place})" if total else place
    return total or "0"
