"""TVM's MetaSchedule on an operator: the workload as TVM has it, the search, a schedule that was found as a function.

The workload is the operator's own expression as TVM's tensor expressions: a block per statement, padding a block of its
own as in TVM's operator library, so that MetaSchedule's rules for inlining and tiling find what they expect.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from bench.cpu import tvm_build
from bench.cpu.tuned import Tuning
from hal.support.errors import InputError
from sokoban.language.expression import Load, Statement, TensorExpr, walk

#: Candidates measured before the cost model learns again: at 64 trials it guides three quarters of the search.
BATCH = 16
#: Candidates that did not build or run count as this many seconds in TVM's records.
_FAILED_SECONDS = 1e9
#: What a worker may take for one candidate.
_BUILD_SECONDS = 60.0
SEED = 1

Array = Any
Expr = Any


def target(llvm: str, threads: int) -> Any:
    """TVM's target for a processor by LLVM's name and a number of threads."""
    import tvm

    return tvm.target.Target({"kind": "llvm", "mcpu": llvm, "num-cores": threads})


def workload(expr: TensorExpr) -> Any:
    """The operator as a module: a function ``main`` of its inputs in order and its output, in their own shapes."""
    import tvm
    from tvm import te

    tensors = {tensor.name: te.placeholder(tensor.shape, tensor.dtype, name=tensor.name) for tensor in expr.inputs}
    for statement in expr.statements:
        tensors[statement.tensor] = _computed(expr, statement, tensors)
    arguments = [tensors[tensor.name] for tensor in (*expr.inputs, expr.output)]
    return tvm.IRModule({"main": te.create_prim_func(arguments).with_attr("global_symbol", "main")})


def _computed(expr: TensorExpr, statement: Statement, tensors: Mapping[str, Any]) -> Any:
    from tvm import te

    from codegen.tir import values

    reduction = statement.reduction
    body = statement.value if reduction is None else reduction.body
    dtype = expr.final_dtype if statement is expr.statements[-1] else expr.accumulate
    padded = {
        node: _padded(node, expr, tensors[node.tensor])
        for node in walk(body)
        if isinstance(node, Load) and node.pad is not None
    }

    def element(*indices: Expr) -> Expr:
        axes = dict(zip(statement.axes, indices, strict=True))
        reduced = []
        if reduction is not None:
            reduced = [te.reduce_axis((0, expr.sizes[axis]), name=axis) for axis in reduction.axes]
            axes.update(zip(reduction.axes, reduced, strict=True))

        def read(load: Load) -> Expr:
            source, lows = padded.get(load, (tensors[load.tensor], (0,) * len(load.indices)))
            at = [values.affine(index, axes) - low for index, low in zip(load.indices, lows, strict=True)]
            return source[tuple(at)].astype(dtype)

        value = values.evaluate(body, axes, read, dtype)
        if reduction is None:
            return value.astype(expr.tensor_by_name[statement.tensor].dtype)
        return values.reducer(reduction.function)(value, axis=reduced)

    return te.compute([expr.sizes[axis] for axis in statement.axes], element, name=statement.tensor)


def _padded(load: Load, expr: TensorExpr, source: Any) -> tuple[Any, tuple[int, ...]]:
    """Elements of a padded load as a tensor, and the index of its first element in the source."""
    from tvm import te, tirx

    from codegen.tir import values

    bounds = [index.bounds(expr.sizes) for index in load.indices]
    extents = expr.tensor_by_name[load.tensor].shape

    def element(*indices: Expr) -> Expr:
        at = [index + low for index, (low, _) in zip(indices, bounds, strict=True)]
        inside = [place >= 0 for place, (low, _) in zip(at, bounds, strict=True) if low < 0]
        inside += [
            place < extent for place, (_, high), extent in zip(at, bounds, extents, strict=True) if high >= extent
        ]
        value = source[tuple(at)]
        pad = values.constant(load.pad or 0.0, source.dtype)
        return tirx.if_then_else(tirx.all(*inside), value, pad) if inside else value

    tensor = te.compute([high - low + 1 for low, high in bounds], element, name=f"{load.tensor}_padded")
    return tensor, tuple(low for low, _ in bounds)


class Tuner:
    """MetaSchedule's search on one processor. Its slow imports are over when it is made: no search pays for them.

    Raises:
        InputError: what the search needs besides TVM is missing.
    """

    def __init__(self, llvm: str, threads: int) -> None:
        for module in ("xgboost", "cloudpickle", "scipy"):
            try:
                import_module(module)
            except ImportError as error:
                raise InputError("MetaSchedule", f"{error}", "pip install -e '.[tune]'") from None
        import_module("tvm.s_tir.tensor_intrin")
        self.target, self.threads = target(llvm, threads), threads

    def tune(self, expr: TensorExpr, trials: int) -> Tuning:
        """Search over that many candidates with TVM's default rules and its XGBoost cost model."""
        from tvm.s_tir import meta_schedule
        from tvm.s_tir.meta_schedule.builder import LocalBuilder

        module = workload(expr)
        started = time.perf_counter()
        with _quiet(), tempfile.TemporaryDirectory(prefix="metaschedule-") as folder:
            database = meta_schedule.tune_tir(
                mod=module,
                target=self.target,
                work_dir=folder,
                max_trials_global=trials,
                num_trials_per_iter=min(trials, BATCH),
                builder=LocalBuilder(
                    max_workers=self.threads,
                    timeout_sec=_BUILD_SECONDS,
                    f_build=tvm_build.BUILD,
                    initializer=tvm_build.register,
                ),
                seed=SEED,
                num_tuning_cores=self.threads,
            )
            seconds = time.perf_counter() - started
            return _best(database.get_all_tuning_records(), trials, seconds)


@contextmanager
def _quiet() -> Iterator[None]:
    """TVM tells of every batch, and of every tree that its cost model grows."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def _best(records: Sequence[Any], trials: int, seconds: float) -> Tuning:
    times = [min((float(value) for value in record.run_secs or ()), default=math.inf) for record in records]
    best = min(range(len(times)), key=times.__getitem__, default=None)
    good = best is not None and times[best] < _FAILED_SECONDS
    return Tuning(
        trials=trials,
        tried=len(records),
        failed=sum(value >= _FAILED_SECONDS for value in times),
        seconds=round(seconds, 3),
        best_seconds=times[best] if best is not None and good else None,
        day=datetime.date.today().isoformat(),
        trace=_trace_text(records[best].trace) if best is not None and good else None,
    )


def _trace_text(trace: Any) -> str:
    return json.dumps(_jsonable(trace.as_json()), separators=(",", ":"))


def _jsonable(value: Any) -> Any:
    """TVM's arrays and numbers as JSON has them."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if hasattr(value, "items"):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if hasattr(value, "__len__"):
        return [_jsonable(item) for item in value]
    return _jsonable(value.value)


def scheduled(expr: TensorExpr, trace: str) -> Any:
    """The operator under a schedule that was found before, nothing searched."""
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    schedule = Schedule(workload(expr))
    Trace.apply_json_to_schedule(json.loads(trace), schedule)
    return schedule.mod


def compiled(expr: TensorExpr, trace: str, llvm: str, threads: int) -> Callable[..., None]:
    """A schedule that was found before as a function of TVM's tensors: the inputs in order, then the output."""
    function: Callable[..., None] = tvm_build.build(scheduled(expr, trace), target(llvm, threads))["main"]
    return function
