"""Chains among other programs: ranks, bundles, pages, estimates, the option that leaves them out."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from codegen.built import BuiltKernel
from codegen.bundle.manifest import read_manifest
from codegen.bundle.reader import read_bundle
from codegen.bundle.records import Bundle
from codegen.compile.request import BuildRequest
from codegen.verify.result import Verification
from hal.catalog import load_device
from hal.support.errors import InputError
from roller.algorithms import ALGORITHMS, ChainProgram, parse_algorithms
from roller.cli import main
from roller.command.tables import compiled_json, print_compiled
from roller.compile.bundles import manifest, write_bundle
from roller.compile.pipeline import compile_operators, verify_operators
from roller.construct.program import RProgram
from roller.estimate.operators import Item, SchedulePart, estimate_items
from roller.explain.page import explain
from roller.programs import find_programs
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import operator_from_data

V100 = load_device("v100")
TALL = {"op": "matmul", "m": 64, "n": 64, "k": 65536, "name": "tall"}
RESNET = {
    "op": "conv2d", "n": 128, "c": 256, "h": 14, "w": 14, "f": 256, "kh": 3, "kw": 3, "padding": "SAME",
    "name": "resnet",
}  # fmt: skip
SQUARE = {"op": "matmul", "m": 4096, "n": 4096, "k": 4096, "name": "square"}


RIGHT = Verification(passed=True, method="made up", relative_error=1e-6, tolerance=1e-4, axis_sizes={"m": 64})


class Pool:
    """Builds and checks nothing; notes what it was asked for."""

    def __init__(self, spills: int = 0) -> None:
        self.requests: list[BuildRequest] = []
        self.checks: list[Any] = []
        self.spills = spills

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(arguments[0], BuildRequest):
            request = arguments[0]
            self.requests.append(request)
            spills = self.spills if "_part_1" in request.entry else 0
            source = f"// {request.entry}"
            entry = f"{request.entry}_kernel"
            future.set_result(
                BuiltKernel(
                    entry=entry,
                    source=source,
                    binary=b"x",
                    grid=(1, 1, 1),
                    block=(32, 1, 1),
                    shared_bytes=0,
                    dynamic_shared_bytes=0,
                    registers=32,
                    spill_bytes=spills,
                )
            )
        else:
            self.checks.append(arguments[0])
            future.set_result(RIGHT)
        return future


@pytest.mark.parametrize(("operator", "algorithm"), [(TALL, "split-k"), (RESNET, "winograd")])
def test_chains_and_single_kernels_share_the_ranks(operator: dict[str, Any], algorithm: str) -> None:
    programs = find_programs(kernel_form(operator_from_data(operator)), V100, 10, "roller")
    ranked = programs.ranked(10)
    assert isinstance(ranked[0], ChainProgram) and ranked[0].algorithm == algorithm
    assert len(ranked) == 10
    assert sum(isinstance(program, RProgram) for program in ranked) >= 5
    seconds = [program.estimate.seconds for program in ranked]
    assert seconds == sorted(seconds)
    # The programs of one kernel are those that there are without chains.
    alone = find_programs(kernel_form(operator_from_data(operator)), V100, 10, "roller", ("direct",))
    assert alone.direct == programs.direct and alone.considered == ()


def test_where_no_algorithm_applies_nothing_changes() -> None:
    programs = find_programs(kernel_form(operator_from_data(SQUARE)), V100, 5, "roller")
    assert programs.ranked(5) == list(programs.direct)
    assert [one.algorithm for one in programs.considered] == ["split-k", "split-rows", "winograd", "flat-image"]
    assert all(one.declined for one in programs.considered)


def test_chains_are_for_gpus() -> None:
    programs = find_programs(kernel_form(operator_from_data(RESNET)), load_device("ipu"), 3, "roller")
    assert programs.ranked(3) == list(programs.direct)
    assert {one.declined for one in programs.considered} == {"kernels of ipu-mk1 are not launched one after the other"}


def test_without_direct_there_are_chains_alone_or_none() -> None:
    tall = find_programs(kernel_form(operator_from_data(TALL)), V100, 10, "roller", ("split-k",))
    assert all(isinstance(program, ChainProgram) for program in tall.ranked(3, ("split-k",)))
    square = find_programs(kernel_form(operator_from_data(SQUARE)), V100, 10, "roller", ("winograd",))
    with pytest.raises(InputError, match=r"--algorithms: none applies to square \(winograd: it is no 3x3"):
        square.ranked(3, ("winograd",))


# Bundles


def compiled(operator: dict[str, Any], pool: Pool, **options: Any) -> Any:
    given = {"top_k": 4, "verify": 1, "method": "roller", **options}
    (result,) = compile_operators([operator_from_data(operator)], V100, pool=pool, **given)  # type: ignore[arg-type]
    return result


def test_a_bundle_lists_launches_workspace_and_files(tmp_path: Path) -> None:
    pool = Pool()
    folder = write_bundle(compiled(TALL, pool), V100, tmp_path).directory
    record, bundle = read_manifest(folder), read_bundle(folder)
    best = record.kernels[0]
    assert best.policy.startswith("split-k, ") and best.verified
    assert [launch.tensors for launch in best.launches] == [("A", "B", "C_slices"), ("C_slices", "C")]
    slices = int(best.policy.removeprefix("split-k, ").split()[0])
    assert best.workspace == {"C_slices": 4 * 64 * 64 * slices}
    assert best.seconds == pytest.approx(sum(launch.seconds for launch in best.launches), rel=1e-5)
    assert [launch.entry for launch in best.launches] == ["roller_tall_part_1_kernel", "roller_tall_part_2_kernel"]
    for launch in best.launches:
        assert (folder / launch.source).read_text() == f"// {launch.entry.removesuffix('_kernel')}"
        assert launch.binary is not None and (folder / launch.binary).read_bytes() == b"x"
        assert json.loads((folder / launch.schedule).read_text())
    alone = next(kernel for kernel in record.kernels if not kernel.launches)
    written = json.loads((folder / "manifest.json").read_text())["kernels"][alone.rank - 1]
    assert not {"launches", "workspace", "tolerance"} & set(written)
    assert bundle.kernels[0].launches[1].tensors == ("C_slices", "C")


def test_a_chain_is_verified_as_a_whole() -> None:
    pool = Pool()
    result = compiled(TALL, pool)
    assert len(pool.checks) == 1
    assert result.kernels[0].built.verification.passed


def test_a_chain_that_spills_ranks_behind_kernels_that_do_not() -> None:
    result = compiled(TALL, Pool(spills=4096))
    assert not any(isinstance(kernel.program, ChainProgram) for kernel in result.kernels)


def test_a_large_convolution_asks_for_its_tolerance(tmp_path: Path) -> None:
    deep = {**RESNET, "c": 1024, "f": 1024, "h": 7, "w": 7}
    record = write_bundle(compiled(deep, Pool()), V100, tmp_path).manifest
    assert record.kernels[0].policy == "winograd, F(4x4, 3x3)"
    assert record.kernels[0].tolerance is not None and 1e-4 < record.kernels[0].tolerance < 1e-3
    assert list(record.kernels[0].workspace) == ["Y_filters", "Y_patches", "Y_products"]


@pytest.mark.usefixtures("emulator")
def test_what_is_verified_are_chains_too() -> None:
    pool = Pool()
    ((_, checks),) = verify_operators([operator_from_data(TALL)], V100, top_k=2, pool=pool, method="roller")  # type: ignore[arg-type]
    assert len(checks) == 2 and len(pool.checks) == 2


# Reports


@pytest.mark.parametrize(("operator", "count"), [(TALL, 2), (RESNET, 4)])
def test_tables_and_json_tell_chains_apart(
    operator: dict[str, Any], count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = compiled(operator, Pool())
    bundle = Bundle(tmp_path, manifest(result, V100, None))
    print_compiled([(result, bundle)], V100, 1.0)
    shown = capsys.readouterr().out
    assert f"{result.kernels[0].program.policy}: longest of {count}" in shown
    assert " ms algorithms)" in shown
    record = json.loads(compiled_json(result, bundle))
    assert record["algorithm_seconds"] > 0
    launches = record["kernels"][0]["launches"]
    assert [launch["source"] for launch in launches] == [
        str(tmp_path / f"kernel_1_part_{number}.cu") for number in range(1, count + 1)
    ]


@pytest.mark.parametrize("operator", [TALL, RESNET])
def test_a_page_tells_the_kernels_and_the_alternatives(operator: dict[str, Any]) -> None:
    programs = find_programs(kernel_form(operator_from_data(operator)), V100, 10, "roller")
    ranked = programs.ranked(10)
    best = ranked[0]
    assert isinstance(best, ChainProgram)
    page = explain(programs, 1, ranked)
    assert f"How rank 1 was composed: {best.policy}" in page
    for number, part in enumerate(best.parts, start=1):
        assert f"Kernel {number} of {len(best.parts)}: {part.label}" in page
    assert "times as fast as the best single kernel's" in page
    direct = next(number for number, program in enumerate(ranked, start=1) if isinstance(program, RProgram))
    assert "How rank" in explain(programs, direct, ranked)
    for text in (page, explain(programs, direct, ranked)):
        assert all(len(line) <= 150 and line == line.rstrip() for line in text.splitlines())
        assert "Algorithms of several kernels, against" in text


def test_a_declined_algorithm_says_why() -> None:
    programs = find_programs(kernel_form(operator_from_data(SQUARE)), V100, 5, "roller")
    page = explain(programs, 1, programs.ranked(5))
    assert "split-k: not tried, as its 1024 blocks fill the 80 SMs" in page
    assert "winograd: not tried, as it is no 3x3 convolution of stride 1" in page


def test_estimates_are_the_sum_of_the_kernels() -> None:
    (with_chains,) = estimate_items([Item("", TALL, "forward")], V100)
    (alone,) = estimate_items([Item("", TALL, "forward")], V100, algorithms=("direct",))
    assert with_chains.seconds < alone.seconds
    assert with_chains.seconds == sum(part.seconds for part in with_chains.parts)
    kinds = [part.algorithm for part in with_chains.parts if isinstance(part, SchedulePart)]
    assert len(kinds) == 2 and all(kind.startswith("split-k, ") for kind in kinds)
    assert [part.algorithm for part in alone.parts if isinstance(part, SchedulePart)] == ["direct"]


# The command line


def run(command: str, file: Path, *options: str) -> Result:
    return CliRunner().invoke(main, [command, str(file), "--device", "v100", "--search", "roller", *options])


def test_the_option_leaves_algorithms_out(tmp_path: Path) -> None:
    file = tmp_path / "op.json"
    file.write_text(json.dumps(RESNET))
    assert "2 kernels" not in run("estimate", file, "--algorithms", "direct").output
    assert "4 kernels:" in run("estimate", file).output
    page = run("explain", file, "--algorithms", "direct,split-k").output
    assert "How rank 1 was constructed" in page and "winograd" not in page
    assert "How rank 1 was composed: winograd, F(4x4, 3x3)" in run("explain", file, "--algorithms", "winograd").output


def test_an_unknown_algorithm_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "op.json"
    file.write_text(json.dumps(TALL))
    result = CliRunner().invoke(
        main, ["explain", str(file), "--device", "v100", "--algorithms", "fft"], prog_name="roller"
    )
    assert result.exit_code == 2
    assert result.stderr == (
        "roller: --algorithms: there is no 'fft'; list some of direct, split-k, split-rows, winograd, flat-image, "
        "split-line\n"
    )


def test_lists_of_algorithms_are_read() -> None:
    assert parse_algorithms(None) == ALGORITHMS
    assert parse_algorithms("winograd, direct") == ("direct", "winograd")
    with pytest.raises(InputError, match="names no algorithm"):
        parse_algorithms(" , ")


def test_a_picture_shows_single_kernels_only(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "op.json"
    file.write_text(json.dumps(TALL))
    result = run("explain", file, "--plot", str(tmp_path / "p.svg"))
    assert result.exit_code == 2
    assert "rank 1 of tall is split-k" in result.stderr
