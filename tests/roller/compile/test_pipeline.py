"""From operator to ranked kernels, with a builder that says what each schedule costs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import msgspec
import pytest

from codegen.built import BuiltKernel
from codegen.bundle.manifest import read_manifest
from codegen.bundle.reader import read_bundle
from codegen.bundle.records import Manifest
from codegen.bundle.reference import ReferenceKernel, reference_kernel
from codegen.compile.build import verify_schedule
from codegen.compile.request import BuildRequest
from codegen.verify.result import Verification
from hal.catalog import load_device
from hal.support.errors import InputError
from roller.compile import bundles, pipeline
from roller.compile.bundles import WrongKernelError, manifest, write_bundle
from roller.compile.pipeline import SPARES, CompiledOperator, compile_operators, entry_name
from roller.construct.construct import construct
from sokoban.kernel.form import kernel_form
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule

V100 = load_device("v100")
EXPR = operator_from_data({"op": "matmul", "m": 65, "n": 33, "k": 17, "name": "small"})
PROGRAMS = construct(kernel_form(EXPR), V100, 4 + SPARES).programs

PASSED = Verification(passed=True, method="made up", relative_error=1e-7, tolerance=1e-4, axis_sizes={"m": 65})
WRONG = Verification(
    passed=False,
    method="made up",
    relative_error=0.5,
    tolerance=1e-4,
    axis_sizes={"m": 65},
    reason="relative error 0.5 is above 0.0001",
)

#: Bytes that no kernel spills without taking longer than the next.
SPILLED = 4096

Answer = Callable[[TileSchedule], dict[str, Any]]
Check = Callable[[TileSchedule], Verification]


class Builder(Executor):
    """Runs nothing: kernels are made up by ``answer``, what their verification says by ``check``."""

    def __init__(self, answer: Answer, check: Check) -> None:
        self.answer = answer
        self.check = check
        self.requests: list[BuildRequest] = []
        self.verified: list[TileSchedule] = []

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        if function is verify_schedule:
            _, schedule, *_ = arguments
            self.verified.append(schedule)
            future.set_result(self.check(schedule))
            return future
        (request,) = arguments
        self.requests.append(request)
        kernel = {
            "entry": request.entry + "_kernel", "source": repr(request.schedule), "binary": b"\x7fELF",
            "grid": (1, 1, 1), "block": (32, 1, 1), "shared_bytes": 0, "dynamic_shared_bytes": 0, "registers": 32,
            "spill_bytes": 0,
        }  # fmt: skip
        future.set_result(BuiltKernel(**(kernel | self.answer(request.schedule))))
        return future


def as_usual(schedule: TileSchedule) -> dict[str, Any]:
    return {}


def rank_of(schedule: TileSchedule) -> int:
    """0 for the schedule that construction likes best."""
    return [program.schedule for program in PROGRAMS].index(schedule)


def compiled(
    answer: Answer = as_usual, *, check: Check = lambda schedule: PASSED, top_k: int = 4, verify: int = 1
) -> tuple[CompiledOperator, Builder]:
    builder = Builder(answer, check)
    (result,) = compile_operators([EXPR], V100, top_k=top_k, verify=verify, pool=builder, method="roller")
    return result, builder


def order(result: CompiledOperator) -> list[int]:
    return [rank_of(kernel.program.schedule) for kernel in result.kernels]


def test_kernels_that_build_keep_the_order_of_construction() -> None:
    result, builder = compiled()
    assert order(result) == [0, 1, 2, 3]
    assert [rank_of(schedule) for schedule in builder.verified] == [0]
    assert {request.target.architecture for request in builder.requests} == {"sm_70"}
    assert {request.entry for request in builder.requests} == {"roller_small"}


def test_a_kernel_that_spills_gives_way_to_a_spare_that_is_faster() -> None:
    result, _ = compiled(lambda schedule: {"spill_bytes": SPILLED * (rank_of(schedule) < 2)})
    assert order(result) == [2, 3, 4, 5]
    # Verified is what stands at rank 1 in the end.
    assert [kernel.built.verification is not None for kernel in result.kernels] == [True, False, False, False]


def test_a_kernel_whose_spills_cost_less_than_a_spare_is_kept_behind_the_others() -> None:
    result, builder = compiled(lambda schedule: {"spill_bytes": 8 * (rank_of(schedule) == 1)})
    assert order(result) == [0, 2, 3, 1] and len(builder.requests) == 4


def test_a_spare_begins_as_soon_as_a_kernel_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way: list[tuple[Future[Any], Any]] = []
    begun: list[int] = []

    class Later(Builder):
        def submit(self, function: Any, *arguments: Any) -> Future[Any]:  # type: ignore[override]
            future = super().submit(function, *arguments)
            if function is verify_schedule:
                return future
            under_way.append((Future(), future.result()))
            return under_way[-1][0]

    def next_ends(futures: Any, return_when: str) -> None:
        begun.append(len(builder.requests))
        future, kernel = under_way.pop(0)
        future.set_result(kernel)

    monkeypatch.setattr(pipeline, "wait", next_ends)
    builder = Later(lambda schedule: {"spill_bytes": SPILLED * (rank_of(schedule) == 1)}, lambda schedule: PASSED)
    (result,) = compile_operators([EXPR], V100, top_k=4, verify=1, pool=builder, method="roller")
    # Four at first, a fifth once the second has ended; nothing else when all have.
    assert begun == [4, 4, 5, 5, 5] and order(result) == [0, 2, 3, 4]


def test_a_kernel_that_took_many_registers_is_priced_and_ranked_by_them() -> None:
    result, _ = compiled(lambda schedule: {"registers": 255 if rank_of(schedule) == 0 else 32})
    seconds = [kernel.seconds for kernel in result.kernels]
    assert seconds == sorted(seconds)
    first = next(kernel for kernel in result.kernels if rank_of(kernel.program.schedule) == 0)
    assert first.seconds >= first.program.estimate.seconds
    assert manifest(result, V100, None).kernels[0].seconds == pytest.approx(seconds[0], rel=1e-5)


def test_a_kernel_far_behind_the_first_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "worthwhile_blocks", lambda problem, schedule, device: (7,))
    _, builder = compiled()
    assert [request.worthwhile_blocks for request in builder.requests] == [(7,)] * 4
    seconds = {program.schedule: program.estimate.seconds for program in PROGRAMS}
    assert max(seconds.values()) > min(seconds.values())
    monkeypatch.setattr(pipeline, "SQUEEZED_REACH", 1.0)
    _, builder = compiled(top_k=len(PROGRAMS))
    for request in builder.requests:
        assert isinstance(request.schedule, TileSchedule)
        is_first = seconds[request.schedule] == seconds[builder.requests[0].schedule]
        assert request.worthwhile_blocks == ((7,) if is_first else ())


def test_where_all_spill_the_fastest_still_leads() -> None:
    result, builder = compiled(lambda schedule: {"spill_bytes": 8})
    assert [kernel.seconds for kernel in result.kernels] == sorted(kernel.seconds for kernel in result.kernels)
    assert len({request.schedule for request in builder.requests}) == 4 + SPARES


def test_a_schedule_that_does_not_build_is_replaced_and_named() -> None:
    result, _ = compiled(lambda schedule: {"error": f"no {rank_of(schedule)}" * (rank_of(schedule) == 1)})
    assert order(result) == [0, 2, 3, 4]
    assert result.failures == ("no 1",)


def test_an_operator_without_any_kernel_is_an_error() -> None:
    with pytest.raises(InputError) as caught:
        compiled(lambda schedule: {"error": "ptxas says no"})
    assert str(caught.value) == "small: no program could be built: ptxas says no; change the operator, or report it"


@pytest.mark.parametrize("wrong_ranks", [{0}, {0, 1}, {0, 1, 2}])
def test_a_wrong_kernel_is_struck_out_and_the_next_takes_its_rank(wrong_ranks: set[int]) -> None:
    result, _ = compiled(check=lambda schedule: WRONG if rank_of(schedule) in wrong_ranks else PASSED)
    first = result.kernels[0].built.verification
    count = len(wrong_ranks)
    # Spares fill the ranks behind.
    assert order(result) == [count, count + 1, count + 2, count + 3] and first is not None and first.passed
    assert [each.verification for each in result.struck_out] == [WRONG] * count and result.error == ""


def test_an_operator_whose_kernels_are_all_wrong_has_none_and_says_how_far_off_they_are(tmp_path: Path) -> None:
    result, builder = compiled(check=lambda schedule: WRONG)
    count = len(builder.requests)
    assert result.kernels == () and len(result.struck_out) == count
    problem = f"all {count} kernels tried failed verification by made up: relative error 0.5 is above 0.0001"
    assert result.error == problem
    with pytest.raises(WrongKernelError, match=f"small: {problem}"):
        write_bundle(result, V100, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_manifest_says_what_ran_a_kernel_and_what_it_looked_at(tmp_path: Path) -> None:
    emulated = Verification(
        passed=True,
        method="cuda, emulated",
        relative_error=3e-6,
        tolerance=1e-4,
        axis_sizes={"m": 65},
        engine="emulator",
        checks=("values", "races"),
        seeds=(0, 1, 2),
        needless=("line 41: __syncthreads();",),
    )
    result, _ = compiled(check=lambda schedule: emulated)
    write_bundle(result, V100, tmp_path)
    checked = read_manifest(tmp_path / result.expr.name).kernels[0].verification
    assert checked is not None
    assert (checked.engine, checked.checks, checked.seeds) == ("emulator", ("values", "races"), (0, 1, 2))
    assert checked.needless == ("line 41: __syncthreads();",)
    assert checked == read_bundle(tmp_path / result.expr.name).kernels[0].verification


def test_a_check_that_could_not_run_says_nothing_about_the_kernel() -> None:
    missing = Verification(
        passed=False,
        method="none",
        relative_error=None,
        tolerance=1e-4,
        axis_sizes={},
        reason="not run: no OpenCL CPU device",
    )
    result, _ = compiled(check=lambda schedule: missing)
    assert order(result) == [0, 1, 2, 3]
    record = manifest(result, V100, None).kernels[0]
    assert record.verified is None
    assert record.verification is not None and record.verification.reason == "not run: no OpenCL CPU device"
    assert manifest(result, V100, None).notes == ("unverified: not run: no OpenCL CPU device",)


def test_a_dead_worker_is_named_with_the_operator() -> None:
    class Dead(Builder):
        def submit(self, function: Any, *arguments: Any) -> Future[Any]:  # type: ignore[override]
            future: Future[Any] = Future()
            future.set_exception(BrokenProcessPool("gone"))
            return future

    with pytest.raises(BrokenProcessPool, match="small: a build process died; try fewer --jobs"):
        next(iter(compile_operators([EXPR], V100, top_k=1, verify=0, pool=Dead(as_usual, lambda schedule: PASSED))))


def test_nothing_is_built_when_the_last_operator_is_refused() -> None:
    narrow = operator_from_data({"op": "matmul", "m": 16, "n": 16, "k": 32, "dtype": "float8_e4m3fn"})
    builder = Builder(as_usual, lambda schedule: PASSED)
    with pytest.raises(InputError, match="float8_e4m3fn"):
        list(compile_operators([EXPR, narrow], V100, top_k=1, verify=0, pool=builder, method="roller"))
    assert builder.requests == []


def test_operators_come_out_in_order_however_many_are_under_way() -> None:
    def named(name: str) -> TensorExpr:
        return operator_from_data({"op": "elementwise", "function": "relu", "shape": [77], "name": name})

    names = [f"op{i}" for i in range(7)]
    for ahead in (0, 2, 9):
        builder = Builder(as_usual, lambda schedule: PASSED)
        results = compile_operators(
            [named(n) for n in names], V100, top_k=1, verify=0, pool=builder, method="roller", ahead=ahead
        )
        assert [result.expr.name for result in results] == names
        assert [request.entry for request in builder.requests] == [f"roller_{name}" for name in names]


def test_an_entry_name_is_a_c_identifier() -> None:
    assert entry_name("matmul-1.5_x") == "roller_matmul_1_5_x"
    assert entry_name("3x3") == "roller_3x3"


def test_a_bundle_says_all_a_caller_needs(tmp_path: Path) -> None:
    data = {
        "op": "conv2d", "n": 2, "c": 6, "h": 9, "w": 7, "f": 4, "kh": 3, "kw": 3, "groups": 2, "dtype": "float16",
        "name": "grouped", "epilogue": [{"function": "bias_add", "axis": "f"}],
    }  # fmt: skip
    expr = operator_from_data(data)
    builder = Builder(as_usual, lambda schedule: PASSED)
    (result,) = compile_operators([expr], V100, top_k=2, verify=1, pool=builder)
    folder = write_bundle(result, V100, tmp_path).directory
    assert folder == tmp_path / "grouped"
    record = read_manifest(folder)
    assert [(a.name, a.role, a.dtype, a.shape) for a in record.arguments] == [
        ("X", "input", "float16", (2, 6, 9, 7)),
        ("W", "input", "float16", (4, 3, 3, 3)),
        ("bias", "input", "float16", (4,)),
        ("Out", "output", "float16", (2, 4, 7, 5)),
    ]
    assert record.axes == {"n": 2, "g": 2, "f": 2, "oh": 7, "ow": 5, "c": 3, "kh": 3, "kw": 3}
    for kernel in record.kernels:
        assert kernel.tiles.keys() == {"registers", "shared"}
        assert kernel.seconds == max([kernel.seconds, *kernel.stage_seconds.values()])
        assert kernel.bound in kernel.stage_seconds
        assert (folder / kernel.source).read_text() == repr(result.kernels[kernel.rank - 1].program.schedule)
    # An error is a figure of the machine that ran it: only its power of ten is kept.
    assert record.kernels[0].verification is not None
    assert record.kernels[0].verification.relative_error == 1e-7


def test_writing_a_bundle_gives_what_reading_it_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = compiled()
    texts = []

    def counted(expr: TensorExpr, entry: str) -> ReferenceKernel:
        texts.append(entry)
        return reference_kernel(expr, entry)

    monkeypatch.setattr(bundles, "reference_kernel", counted)
    bundle = write_bundle(result, V100, tmp_path)
    assert bundle == read_bundle(tmp_path / "small")
    assert bundle.manifest == read_manifest(bundle.directory)
    assert texts == ["roller_small"]


def test_a_bundle_carries_the_reference_that_its_kernels_are_checked_with(tmp_path: Path) -> None:
    result, _ = compiled()
    folder = write_bundle(result, V100, tmp_path).directory
    reference = read_manifest(folder).reference
    assert reference is not None
    assert [launch.entry for launch in reference.launches] == ["roller_small_reference_0"]
    assert "roller_small_reference_0(" in (folder / reference.source).read_text()


def test_boards_without_cuda_get_no_reference(tmp_path: Path) -> None:
    result, _ = compiled(lambda schedule: {"binary": None})
    folder = write_bundle(result, load_device("mi50"), tmp_path).directory
    assert read_manifest(folder).reference is None
    assert not (folder / "reference.cu").exists()


def test_a_manifest_of_another_shape_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": 1}')
    with pytest.raises(msgspec.ValidationError):
        read_manifest(tmp_path)
    assert next(iter(Manifest.__dataclass_fields__)) == "format"
