"""Construction and search side by side: who found a program, and which come first."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from codegen.built import BuiltKernel
from codegen.compile.request import BuildRequest
from codegen.verify.result import Verification
from hal.catalog import load_device
from hal.support.errors import InputError
from roller.cli import main
from roller.compile.bundles import manifest
from roller.compile.pipeline import compile_operators, verify_operators
from roller.construct.construct import construct
from roller.construct.program import Reason
from roller.explain.page import explain
from roller.programs import METHODS, SEARCH_POLICY, Programs, find_programs, schedule_key
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule
from sokoban.search.search import search

V100 = load_device("v100")


def form_of(**operator: Any) -> KernelForm:
    return kernel_form(operator_from_data(operator))


#: The thesis's example of an operator too small for aligned tiles (6.6).
SMALL = form_of(op="matmul", m=128, n=256, k=256)
REGULAR = form_of(op="matmul", m=4096, n=4096, k=1024)


def test_each_method_finds_its_own_programs() -> None:
    by_method = {method: find_programs(SMALL, V100, 5, method) for method in METHODS}
    assert by_method["roller"].direct == construct(SMALL, V100, 5).programs
    assert by_method["roller"].search is None and by_method["roller"].search_seconds == 0.0
    assert {program.policy for program in by_method["sokoban"].direct} == {SEARCH_POLICY}
    assert by_method["sokoban"].constructed_count == 0 < by_method["sokoban"].searched_count
    assert by_method["both"].constructed_count > 0 and by_method["both"].searched_count > 0
    assert [len(programs.direct) for programs in by_method.values()] == [5, 5, 5]


def test_both_together_are_the_best_of_either() -> None:
    constructed, result = construct(SMALL, V100, 6), search(SMALL, V100, 6)
    together = Programs.of(constructed, result, top_k=6).direct
    seconds = [program.estimate.seconds for program in together]
    every = {schedule_key(p.schedule, SMALL): p.estimate.seconds for p in constructed.programs}
    every |= {schedule_key(s, SMALL): e.seconds for s, e in zip(result.schedules, result.estimates, strict=True)}
    assert seconds == sorted(every.values())[:6]
    assert len({schedule_key(program.schedule, SMALL) for program in together}) == 6


def test_a_schedule_that_both_find_is_constructions() -> None:
    constructed = construct(SMALL, V100, 3)
    result = search(SMALL, V100, 3)
    same = replace(
        result,
        schedules=tuple(program.schedule for program in constructed.programs),
        estimates=tuple(program.estimate for program in constructed.programs),
    )
    assert Programs.of(constructed, same, top_k=9).direct == constructed.programs


def test_a_key_sees_through_defaults_that_are_written_out() -> None:
    short = TileSchedule(block=(("m", 8), ("n", 8)), thread=(("m", 1), ("n", 1)))
    long = short.with_(
        vthreads=(("m", 1), ("n", 1)), step=(("k", 256),), reduce_threads=(("k", 1),), padding=(("A", 0),)
    )
    assert schedule_key(short, SMALL) == schedule_key(long, SMALL)
    assert schedule_key(short, SMALL) != schedule_key(short.with_(cached=("A",)), SMALL)
    assert schedule_key(short, SMALL) != schedule_key(long.with_(padding=(("A", 1),)), SMALL)


def test_search_finds_what_alignment_rules_out_of_an_irregular_operator() -> None:
    odd = form_of(op="matmul", m=65, n=999, k=777)
    alone = construct(odd, V100, 1).programs[0].estimate.seconds
    assert find_programs(odd, V100, 1).direct[0].estimate.seconds < 0.97 * alone


def test_construction_is_near_the_optimum_of_a_large_regular_operator() -> None:
    alone = construct(REGULAR, V100, 1).programs[0].estimate.seconds
    assert alone < 1.1 * search(REGULAR, V100, 1).estimates[0].seconds


def test_a_searched_program_says_how_it_was_found() -> None:
    programs = Programs.of(None, search(SMALL, V100, 2), top_k=2)
    second = programs.direct[1]
    assert isinstance(second.reasons[0], Reason)
    assert second.reasons[0].layer == "search" and second.reasons[0].tile == "its rank 2"
    page = explain(programs, 2)
    assert "How rank 2 was found: search" in page
    assert f"{programs.searched_count} schedules left by closed forms" in page
    assert f"the best of {programs.searched_count} programs" in page


class Pool:
    """Runs searches at once and builds nothing; notes what it was asked for."""

    def __init__(self) -> None:
        self.searches: list[str] = []
        self.schedules: list[TileSchedule] = []

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if function is search:
            self.searches.append(arguments[0].expr.name)
            future.set_result(search(*arguments))
        elif isinstance(arguments[0], BuildRequest):
            self.schedules.append(arguments[0].schedule)
            future.set_result(
                BuiltKernel(
                    entry="k",
                    source="",
                    binary=b"",
                    grid=(1, 1, 1),
                    block=(32, 1, 1),
                    shared_bytes=0,
                    dynamic_shared_bytes=0,
                    registers=32,
                    spill_bytes=0,
                )
            )
        else:
            self.schedules.append(arguments[1])
            future.set_result(
                Verification(passed=True, method="made up", relative_error=0.0, tolerance=1e-4, axis_sizes={})
            )
        return future


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_compiled_kernels_say_who_found_them(method: str) -> None:
    names = ("one", "two", "three")
    expressions = [operator_from_data({"op": "matmul", "m": 65, "n": 33, "k": 170, "name": name}) for name in names]
    pool = Pool()
    results = list(compile_operators(expressions, V100, top_k=3, verify=0, pool=pool, method=method))  # type: ignore[arg-type]
    # The first search runs while the pool still starts.
    assert pool.searches == ([] if method == "roller" else ["two", "three"])
    for result in results:
        wanted = find_programs(result.form, V100, 3, method).direct
        assert [kernel.program.schedule for kernel in result.kernels] == [program.schedule for program in wanted]
        policies = [record.policy for record in manifest(result, V100, None).kernels]
        assert policies == [program.policy for program in wanted]


@pytest.mark.usefixtures("emulator")
def test_what_is_verified_is_what_would_be_compiled() -> None:
    pool, expr = Pool(), operator_from_data({"op": "matmul", "m": 65, "n": 33, "k": 170})
    ((name, checks),) = verify_operators([expr], V100, top_k=3, pool=pool)  # type: ignore[arg-type]
    assert (name, len(checks)) == (expr.name, 3)
    assert pool.schedules == [program.schedule for program in find_programs(kernel_form(expr), V100, 3).direct]


def test_an_unknown_method_is_refused() -> None:
    result = CliRunner().invoke(
        main, ["compile", "x.json", "--device", "v100", "--search", "magic"], prog_name="roller"
    )
    assert result.exit_code == 2
    assert "'magic' is not one of 'roller', 'sokoban', 'both'" in result.stderr
    with pytest.raises(InputError, match="there is no 'magic'"):
        find_programs(SMALL, V100, 1, "magic")


@pytest.mark.parametrize("method", ["roller", "both"])
def test_vectors_have_programs_of_construction_alone(method: str) -> None:
    found = find_programs(form_of(op="matmul", m=64, n=64, k=64), load_device("epyc-9654"), method=method)
    assert found.direct and found.search is None
    assert all(program.policy != SEARCH_POLICY for program in found.direct)


def test_search_does_not_know_vectors() -> None:
    with pytest.raises(InputError, match="those of epyc-9654 are elements of vectors; leave it out"):
        find_programs(form_of(op="matmul", m=64, n=64, k=64), load_device("epyc-9654"), method="sokoban")
