"""``roller estimate`` as a person meets it, and what its figures are made of."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench.suites import suite_names, suite_path
from hal.catalog import load_device
from roller.cli import main
from roller.estimate.operators import IMPLEMENTATIONS, estimate_items, load_items
from roller.estimate.schedules import score
from roller.library import library_time
from roller.programs import SEARCH_POLICY, find_programs
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.files import schedules_from_json

MATMUL = {"op": "matmul", "m": 512, "n": 256, "k": 128}
CONV = {"op": "conv2d", "n": 8, "c": 16, "h": 14, "w": 14, "f": 32, "kh": 3, "kw": 3, "padding": 1}
V100 = load_device("v100")


def roller(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="roller")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*lines: Any) -> str:
    Path("ops.jsonl").write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return "ops.jsonl"


def estimates(*arguments: object) -> list[dict[str, Any]]:
    result = roller("estimate", *arguments, "--device", "v100", "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


def test_best_is_the_first_program_of_construction_and_search(here: Path) -> None:
    (found,) = estimates(write(MATMUL))
    expected = find_programs(kernel_form(operator_from_data(MATMUL)), V100, 1).direct[0]
    found_by = "search" if expected.policy == SEARCH_POLICY else "construction"
    assert found["seconds"] == expected.estimate.seconds
    assert found["bound"] == expected.estimate.bound
    (part,) = found["parts"]
    assert (part["found_by"], part["schedule"]) == (found_by, json.loads(json.dumps(expected.schedule.to_json())))
    assert set(found) == {"name", "device", "direction", "implementation", "seconds", "bound", "parts"}


def test_the_schedule_of_an_estimate_scores_the_same(here: Path) -> None:
    (found,) = estimates(write(MATMUL))
    text = json.dumps(found["parts"][0]["schedule"]).encode()
    scores = score(schedules_from_json(text, operator_from_data(MATMUL)), V100)
    assert scores.seconds[0] == pytest.approx(found["seconds"])


def test_search_may_find_a_better_one_and_is_named(here: Path) -> None:
    small = {"op": "matmul", "m": 128, "n": 256, "k": 256}
    (constructed,), (both,) = estimates(write(small)), estimates(write(small), "--search", "both")
    best = find_programs(kernel_form(operator_from_data(small)), V100, 1, "both").direct[0]
    assert both["seconds"] == best.estimate.seconds <= constructed["seconds"]
    assert both["parts"][0]["found_by"] == ("search" if best.policy == "search" else "construction")


def test_library_is_the_library_model(here: Path) -> None:
    (found,) = estimates(write(MATMUL), "--implementation", "library")
    expected = library_time(MATMUL, V100)
    assert (found["seconds"], found["call_seconds"]) == (expected.seconds, expected.call_seconds)
    assert found["kernel"] == expected.kernel and found["bound"] == expected.bound
    assert found["parts"][0]["tile"] == expected.parts[0].tile
    assert found["seconds"] < found["call_seconds"]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_directions_of_lines_and_of_the_command(here: Path, implementation: str) -> None:
    file = write(MATMUL, MATMUL | {"direction": "backward"}, MATMUL | {"direction": "forward"})
    mixed = estimates(file, "--implementation", implementation)
    assert [each["direction"] for each in mixed] == ["forward", "backward", "forward"]
    assert mixed[0]["seconds"] == pytest.approx(mixed[2]["seconds"])
    assert len(mixed[1]["parts"]) == 2
    assert mixed[1]["seconds"] == pytest.approx(sum(part["seconds"] for part in mixed[1]["parts"]))
    turned = estimates(file, "--implementation", implementation, "--direction", "backward")
    assert [each["direction"] for each in turned] == ["backward", "backward", "forward"]
    assert turned[0]["seconds"] == pytest.approx(mixed[1]["seconds"])


def test_the_way_back_of_a_product_is_its_two_products(here: Path) -> None:
    (back,) = estimates(write(MATMUL | {"direction": "backward"}))
    a = {"op": "matmul", "m": 512, "n": 128, "k": 256, "transpose_b": True}
    b = {"op": "matmul", "m": 128, "n": 256, "k": 512, "transpose_a": True}
    (first,), (second,) = estimates(write(a)), estimates(write(b))
    assert [part["label"] for part in back["parts"]] == ["gradient of A", "gradient of B"]
    assert back["seconds"] == pytest.approx(first["seconds"] + second["seconds"], rel=0.05)


@pytest.mark.slow
def test_one_operator_a_list_and_lines_are_the_same(here: Path) -> None:
    Path("one.json").write_text(json.dumps(MATMUL, indent=1))
    Path("list.json").write_text(json.dumps([MATMUL, CONV], indent=1))
    lines = write(MATMUL, "", CONV)
    assert estimates("one.json") == estimates(lines)[:1]
    assert estimates("list.json") == estimates(lines)


def test_names_may_repeat_and_are_derived_alike(here: Path) -> None:
    named = CONV | {"name": "stem"}
    gelu = MATMUL | {"epilogue": ["gelu"], "dtype": "float16"}
    expected = [operator_from_data(data).name for data in (named, named, CONV, gelu)]
    file = write(named, named, CONV, gelu)
    for implementation in IMPLEMENTATIONS:
        assert [each["name"] for each in estimates(file, "--implementation", implementation)] == expected


NO_LIBRARY = ("attention", "topk", "scatter_add", "grouped", "scaled")


def is_of_a_library(operator: Mapping[str, Any]) -> bool:
    """A V100 multiplies no eight-bit floats and has no FlashAttention or bfloat16; of int8 the library model
    knows no product, and of ranks and scattered rows nothing."""
    named = operator.get("op", "")
    return bool(named) and "8" not in operator.get("dtype", "") and not named.startswith(NO_LIBRARY)


@pytest.mark.parametrize("suite", suite_names())
@pytest.mark.slow
def test_every_operator_of_the_suites_has_an_estimate(suite: str) -> None:
    items = [item for item in load_items(suite_path(suite)) if is_of_a_library(item.data)]
    ours, library = (estimate_items(items, V100, implementation) for implementation in IMPLEMENTATIONS)
    assert [each.name for each in ours] == [each.name for each in library] == [item.data["name"] for item in items]
    assert all(each.seconds > 0 for each in (*ours, *library))
    assert all(each.call_seconds is not None and each.call_seconds > 0 for each in library)
    assert all(each.kernel != "roofline" for each in library)
    gradients = [item for item in load_items(suite_path(suite), "backward") if is_of_a_library(item.data)]
    backward = [item for item in gradients if "max" not in json.dumps(item.data)]
    # An addition passes its gradient on, so that nothing runs.
    library = estimate_items(gradients, V100, "library")
    assert all(each.seconds > 0 or each.kernel == "none" for each in library)
    softmax = [item for item in gradients if item.data["op"] == "softmax"]
    assert all(each.seconds > 0 for each in estimate_items([*backward[::10], *softmax], V100))


def test_the_table_tells_what_was_assumed(here: Path) -> None:
    file = write(MATMUL | {"name": "plain"}, MATMUL | {"name": "back", "direction": "backward"})
    ours = roller("estimate", file, "--device", "v100").output.splitlines()
    assert "block m=" in ours[1] and ours[1].split()[-1] in ("construction", "search")
    assert "2 kernels:" in ours[2] and ours[3].startswith("  gradient of A") and "ranked by RATIONAL" in ours[-1]
    library = roller("estimate", file, "--device", "v100", "--implementation", "library").output.splitlines()
    assert "sgemm" in library[1] and "2 calls:" in library[2] and "as framework calls" in library[-1]


def test_unknown_expressions_are_marked_as_rooflines(here: Path) -> None:
    chain = {"expr": "C[i,j] = sum(k, A[i,k] * B[k,j]); D[i,l] = sum(j, C[i,j] * E[j,l])",
             "sizes": {"i": 64, "j": 64, "k": 64, "l": 64}}  # fmt: skip
    result = roller("estimate", write(chain), "--device", "v100", "--implementation", "library")
    assert result.exit_code == 0
    assert "1 by roofline alone, no library kernel is known" in result.output


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([MATMUL, {"op": "matmul", "m": 8, "n": 8}], 'ops.jsonl[2].k: is missing; add "k"'),
        (
            [MATMUL, MATMUL | {"direction": "sideways"}],
            "ops.jsonl[2].direction: unknown direction 'sideways'; use one of forward, backward",
        ),
        (
            [MATMUL, MATMUL | {"direction": 3}],
            "ops.jsonl[2].direction: unknown direction 3; use one of forward, backward",
        ),
        (
            [json.dumps([MATMUL, 3])],
            'ops.jsonl[1]: expected an object, got a number; write {"op": ...} or {"expr": ...}',
        ),
        (["[]"], "ops.jsonl: an empty list; write at least one operator"),
        ([], "ops.jsonl: is empty; write one operator a line, or a JSON list of them"),
        (['{"op": "matmul",'], "ops.jsonl: broken JSON at line 2, column 1: it ends too early"),
        ([MATMUL, '{"op"'], "ops.jsonl[2]: broken JSON: Input data was truncated; write one operator a line"),
        ([MATMUL | {"name": 5}], "ops.jsonl.name: expected a string, got 5; name the operator in quotes"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(here: Path, lines: list[Any], message: str, implementation: str) -> None:
    result = roller("estimate", write(*lines), "--device", "v100", "--implementation", implementation)
    assert (result.exit_code, result.output) == (2, f"roller: {message}\n")


def test_what_has_no_backward_pass_of_ours_says_where_to_go(here: Path) -> None:
    pool = {"op": "max_pool2d", "n": 1, "c": 3, "h": 8, "w": 8, "kh": 2, "kw": 2, "stride": 2, "direction": "backward"}
    result = roller("estimate", write(MATMUL, pool), "--device", "v100")
    assert (
        result.exit_code == 2 and result.output.startswith("roller: ops.jsonl[2].") and result.output.count("\n") == 1
    )
    assert result.output.endswith("use --implementation library\n")
    assert estimates(write(pool), "--implementation", "library")[0]["seconds"] > 0


def test_boards_without_those_libraries_are_refused_for_them(here: Path) -> None:
    result = roller("estimate", write(MATMUL), "--device", "mi50", "--implementation", "library")
    assert result.exit_code == 2 and result.output.startswith("roller: --device: mi50 runs no cuBLAS")
    assert roller("estimate", write(MATMUL), "--device", "mi50").exit_code == 0


def test_estimates_need_no_compiler(here: Path) -> None:
    write(MATMUL)
    script = (
        "import sys\nfrom roller.estimate.operators import estimate_items, load_items\nfrom hal import load_device\n"
        "for each in ('best', 'library'):\n    estimate_items(load_items('ops.jsonl'), load_device('v100'), each)\n"
        "print([name for name in ('tvm', 'pyopencl', 'sympy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# Collectives

ALL_REDUCE = {"op": "all_reduce", "bytes": 2**29, "ranks": 8}


def collectives(*arguments: object) -> Result:
    return roller("estimate", "--implementation", "library", "--device", "h100", *arguments)


def test_collectives_are_priced_on_a_node(here: Path) -> None:
    file = write(ALL_REDUCE, MATMUL, ALL_REDUCE | {"node": "dgx-h100", "name": "sum"})
    result = collectives(file, "--node", "hgx-h100", "--json")
    assert result.exit_code == 0, result.output
    first, product, second = [json.loads(line) for line in result.output.splitlines()]
    assert (first["name"], first["kernel"], first["bound"]) == ("all_reduce_536870912_8ranks", "NVLS", "links")
    assert (second["name"], second["seconds"]) == ("sum", first["seconds"])
    assert product["kernel"] != "NVLS"


@pytest.mark.parametrize(
    ("operator", "options", "message"),
    [
        (ALL_REDUCE | {"ranks": 12}, [], "ops.jsonl.ranks: 12 do not fill nodes of 8 boards; write a multiple of 8"),
        (
            ALL_REDUCE | {"ranks": 1},
            [],
            "ops.jsonl.ranks: got 1, expected 2 or more; one rank has no other to exchange with",
        ),
        (ALL_REDUCE | {"node": "pcie-pair"}, [], "ops.jsonl.node: pcie-pair holds "),
        (ALL_REDUCE, ["--node", "hgx"], "node: no node is called 'hgx'; "),
        (
            ALL_REDUCE | {"direction": "backward"},
            [],
            "ops.jsonl.direction: a collective has no backward pass of its own; ",
        ),
        (ALL_REDUCE, ["--device", "p4"], "ops.jsonl.node: p4 has no usual node; name one with --node, "),
        (ALL_REDUCE, ["--implementation", "best"], "ops.jsonl.op: 'all_reduce' is a collective of several boards and "),
    ],
)
def test_collectives_that_cannot_be_are_one_line(
    here: Path, operator: dict[str, Any], options: list[str], message: str
) -> None:
    result = collectives(write(operator), *options)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert result.output.startswith(f"roller: {message}")
