"""Two recordings compared: by hand, by schema, and the pair of a program before and after AMP."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from daydream.answers import replay
from daydream.cli import main
from daydream.diff.compare import Amount, Difference, OperatorChange, compare, status
from daydream.diff.page import page
from daydream.diff.record import schema_text
from tests.daydream.ranks.synthetic import Job, write
from tests.daydream.traces import Builder

ROOT = Path(__file__).resolve().parents[3]
CASES = ROOT.parent / "shared" / "cases" / "traces"


def daydream(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="daydream")


def written(path: Path, kernels: list[list[tuple[str, str, float]]], board: str = "Tesla V100-SXM2-16GB") -> Path:
    """Steps of 1000 us with an operator of 10 us for each of (operator, kernel, microseconds)."""
    builder = Builder(head={"deviceProperties": [{"id": 0, "name": board}]})
    number = 0
    for step, work in enumerate(kernels):
        start, free = 1000.0 * step, 0.0
        builder.step(step, start, 1000.0)
        for place, (operator, kernel, duration) in enumerate(work):
            number += 1
            begin = start + 20.0 * place + 1.0
            builder.operator(operator, begin, 10.0, external=number)
            if not kernel:
                continue
            builder.launch(begin + 2, 5.0, correlation=number, external=number)
            free = max(free, begin + 8.0)
            builder.kernel(kernel, free, duration, correlation=number, external=number)
            free += duration
    return builder.write(path)


def difference(before: Path, after: Path) -> Difference:
    first, second = replay(before), replay(after)
    return compare(first.timeline, second.timeline, (first.steps, second.steps))


def named(result: Difference, name: str) -> OperatorChange:
    return next(each for each in result.operators if each.name == name)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Before and after: a product becomes faster by another kernel, a copy is new, a ReLU is gone, a sum stays."""
    relu, copy = ("aten::relu", "relu", 50.0), ("aten::copy_", "copy", 20.0)
    spreads = (-2.0, 0.0, 2.0)
    before = [[("aten::mm", "sgemm", 300.0 + each), relu, ("aten::sum", "reduce", 80.0)] for each in spreads]
    after = [[("aten::mm", "h884gemm", 100.0 + each), copy, ("aten::sum", "reduce", 80.4)] for each in spreads]
    return written(tmp_path / "before.json", before), written(tmp_path / "after.json", after)


def test_operators_are_slower_faster_new_gone_or_the_same(pair: tuple[Path, Path]) -> None:
    result = difference(*pair)
    became = {each.name: each.status for each in result.operators}
    assert became == {"aten::mm": "faster", "aten::relu": "gone", "aten::copy_": "new"}
    assert result.same >= 1, "the sum, within a hundredth"
    product = named(result, "aten::mm")
    assert (product.before.us, product.after.us) == (pytest.approx(300), pytest.approx(100))
    # Three steps at -2, 0 and 2: a standard deviation of 2 over the root of three.
    assert product.before.error_us == pytest.approx(2 / 3**0.5)
    assert [(each.name, each.status) for each in product.kernels] == [("sgemm", "gone"), ("h884gemm", "new")]
    assert result.kinds[0].name == "matrix product"
    assert result.before.gpu_us == pytest.approx(300 + 50 + 80)


def test_a_difference_within_the_spread_of_the_steps_is_none() -> None:
    wide = Amount(1, 100.0, 8.0)
    assert status(wide, Amount(1, 120.0, 8.0)) == "same"
    assert status(wide, Amount(1, 130.0, 8.0)) == "slower"
    assert status(Amount(1, 130.0, 8.0), wide) == "faster"
    assert status(Amount(), Amount()) == "same"


def test_an_operator_called_in_both_is_not_new_where_it_begins_to_run_kernels(tmp_path: Path) -> None:
    work = [("aten::mm", "sgemm", 300.0)]
    before = written(tmp_path / "before.json", [[*work, ("aten::to", "", 0.0)]] * 2)
    after = written(tmp_path / "after.json", [[*work, ("aten::to", "cast", 30.0)]] * 2)
    cast = named(difference(before, after), "aten::to")
    assert (cast.status, cast.before.count, cast.after.count) == ("slower", 0, 1)
    assert named(difference(after, before), "aten::to").status == "faster"


def test_the_same_recording_differs_in_nothing(pair: tuple[Path, Path]) -> None:
    result = difference(pair[0], pair[0])
    assert result.operators == ()
    assert {kind.status for kind in result.kinds} == {"same"}


def test_the_table_says_what_changed(pair: tuple[Path, Path]) -> None:
    result = daydream("diff", *pair)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "A step takes 1.00 ms before and 1.00 ms after: as fast." in lines
    assert any(line.startswith("Operators: 1 faster, 1 new, 1 gone; ") for line in lines)
    row = next(line for line in lines if line.startswith("aten::mm")).split()
    assert row[1:7] == ["faster", "1", "0.300", "->", "0.100", "-0.200"]
    assert any(line.split()[:2] == ["h884gemm", "new"] for line in lines)


def test_the_answer_follows_the_published_schema(pair: tuple[Path, Path]) -> None:
    schema = json.loads(daydream("schema", "diff").stdout)
    answer = json.loads(daydream("diff", *pair, "--json").stdout)
    jsonschema.validate(answer, schema)
    assert answer["operators"][0]["name"] == "aten::mm"
    assert answer["operators"][0]["change_seconds"] == pytest.approx(-200e-6)
    assert answer["before"]["device"] == "Tesla V100-SXM2-16GB"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**answer, "operators": [{"name": "aten::mm"}]}, schema)


def test_the_published_schema_is_the_generated_one() -> None:
    published = ROOT / "daydream" / "diff" / "diff.schema.json"
    assert published.read_text() == schema_text(), "daydream schema diff > daydream/diff/diff.schema.json"


def test_the_page_has_every_operator_and_escapes_names(tmp_path: Path) -> None:
    first = [[("aten::mm", "gemm<float, 4>", 300.0)]] * 2
    second = [[("aten::mm", "gemm<half, 4>", 100.0), ("a<b>::c", "k", 9.0)]] * 2
    before, after = written(tmp_path / "before.json", first), written(tmp_path / "after.json", second, "Tesla T4")
    result = daydream("diff", before, after, "--html", tmp_path / "diff.html")
    assert result.exit_code == 0
    text = (tmp_path / "diff.html").read_text()
    assert text == page(difference(before, after))
    assert "gemm&lt;half, 4&gt;" in text and "a&lt;b&gt;::c" in text and "<b>" not in text
    assert "The boards differ: Tesla V100-SXM2-16GB before, Tesla T4 after." in text


@pytest.mark.parametrize("arguments", [("diff", "a.json", "b.json"), ("diff", "a.json", "b.json", "--html", "x.pdf")])
def test_bad_input_is_one_line(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = daydream(*arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_of_a_job_differ_by_what_makes_one_late(tmp_path: Path) -> None:
    first, second = write(Job(steps=3, spread=0.01, loading_us=(100.0, 3100.0)), tmp_path)
    result = difference(first, second)
    loading = named(result, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
    assert (loading.status, loading.before.count) == ("slower", 0)
    assert loading.cpu_change_us == pytest.approx(3000, rel=0.01)
    # The rank that waits for the other one has the longer collectives.
    collectives = named(result, "record_param_comms")
    assert collectives.status == "faster" and collectives.change_us < -2000
    assert {kind.name: kind.status for kind in result.kinds}["matrix product"] == "same"


@pytest.mark.skipif(not CASES.is_dir(), reason="needs ../shared/cases/traces")
def test_products_after_amp_on_a_t4() -> None:
    result = difference(CASES / "truth_amp_before_t4.json.gz", CASES / "truth_amp_after_t4.json.gz")
    products = next(kind for kind in result.kinds if kind.name == "matrix product")
    # Measured: 3.95 ms of products a step before, 0.76 after.
    assert products.before.us == pytest.approx(3950, rel=0.01)
    assert products.after.us == pytest.approx(760, rel=0.02)
    assert named(result, "aten::_amp_foreach_non_finite_check_and_unscale_").status == "new"
    gone = {kernel.name for kernel in named(result, "aten::mm").kernels if kernel.status == "gone"}
    assert {"volta_sgemm_128x64_nt", "volta_sgemm_128x64_nn"} <= gone
