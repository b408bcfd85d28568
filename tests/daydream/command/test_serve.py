"""``daydream serve`` from the command line: answers, searches, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from daydream.cli import main
from tests.daydream.serving.conftest import CONFIGURATIONS

pytestmark = pytest.mark.usefixtures("pytorch")


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 512, "num_hidden_layers": 5, "vocab_size": 2048, "tie_word_embeddings": False}
    path.write_text(json.dumps(sizes | CONFIGURATIONS["llama"]))
    return f"hf:{path}"


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_an_answer_tells_what_users_see(model: str) -> None:
    output = _run(model, "--device", "h100", "--rate", "20", "--requests", "50")
    for word in ("first token (TTFT)", "further tokens (TPOT)", "tokens/s", "sequences preempted", "assumed: the host"):
        assert word in output


def test_an_answer_as_json_has_the_numbers_of_its_options(model: str) -> None:
    record = json.loads(_run(
        model, "--device", "h100", "--concurrency", "8", "--requests", "40", "--output", "50", "--tensor", "2",
        "--replicas", "2", "--price", "h100=3.6", "--json",
    ))  # fmt: skip
    assert (record["boards"], record["tensor"], record["replicas"], record["requests"]) == (4, 2, 2, 40)
    assert record["output_tokens_per_second"] == pytest.approx(40 * 50 / record["seconds"], rel=1e-5)
    per_million = 3.6 * 4 / 3600 / record["output_tokens_per_second"] * 1e6
    assert record["price_per_million_output_tokens"] == pytest.approx(per_million, rel=1e-5)
    assert record["ttft_seconds"]["p50"] <= record["ttft_seconds"]["p99"]


def test_a_search_names_the_cheapest_first_and_writes_a_page(model: str, tmp_path: Path) -> None:
    page = tmp_path / "search.html"
    lines = _run(
        model, "--device", "h100,l40s", "--rate", "100", "--requests", "100", "--search", "--ttft", "200",
        "--tpot", "20", "--price", "h100=3,l40s=1", "--json", "--html", str(page),
    ).splitlines()  # fmt: skip
    records = [json.loads(each) for each in lines]
    costs = [each["boards"] * {"h100-sxm-80gb": 3, "l40s": 1}[each["device"]] for each in records]
    assert costs == sorted(costs)
    assert records[0]["device"] == "l40s"
    text = page.read_text()
    assert "tokens/s a user" in text
    assert text.count("<circle") >= len(records)


def test_drafts_and_boards_for_prompts_are_in_the_answer(model: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = (model, "--device", "h100", "--rate", "20", "--requests", "40", "--draft", "3", "--accept", "0.5",
                 "--prefill", "2", "--prefill-device", "h200", "--prefill-tensor", "2", "--html",
                 str(page))  # fmt: skip
    output = _run(*arguments)
    assert "on 1 h100-sxm-80gb and 2 x (2 h200) for prompts, at most 256 sequences" in output
    assert "1.88 tokens an iteration of a sequence; what drafts runs on the same boards" in " ".join(output.split())
    assert "4 boards for prompts busy for" in output
    record = json.loads(_run(*arguments, "--json"))
    assert (record["boards"], record["draft"], record["tokens_an_iteration"]) == (5, 3, 1.875)
    assert (record["prefill"]["device"], record["prefill"]["boards"]) == ("h200", 4)
    assert "for prompts" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--device", "h100", "--search", "--rate", "1"), "--search: needs a promise to keep; add --ttft or --tpot"),
        (("--device", "h100", "--search", "--ttft", "9"), "--search: needs to know when requests arrive"),
        (("--device", "h100", "--tpot", "9"), "--ttft: and --tpot are promises that --search keeps; add --search"),
        (("--device", "k80"), "--device: k80 has no FlashAttention, as servers run it; choose another"),
        (
            ("--device", "h100", "--tensor", "16"),
            "--tensor: hgx-h100 has 8 boards, 16 are to share a layer; write 8 at most",
        ),
        (
            ("--device", "h100", "--prefill", "1", "--prefill-device", "h100,h200"),
            "--prefill-device: several boards were named; name one",
        ),
        (("--device", "h100,h200"), "--device: several boards were named; name one, or add --search"),
        (("--device", "h100", "--tensor", "3"), "--tensor: 3 boards cannot share a layer of 1024 columns"),
        (("--device", "h100", "--expert", "8"), "--expert: hf:"),
        (("--device", "h100", "--accept", "0.5"), "--draft: is 0: nothing is drafted; say how many tokens"),
        (("--device", "h100", "--prefill-tensor", "2"), "--prefill-tensor: is of boards for prompts alone; add"),
        (("--device", "h100", "--separate"), "--separate: is what --search tries; add --search, or write --prefill"),
        (("--device", "h100", "--prefill", "1", "--concurrency", "4"), "--concurrency: needs boards that do both"),
        (("--device", "h100", "--draft", "3", "--drafter", "nothing"), "nothing"),
        (("--device", "h100", "--draft", "9", "--max-tokens", "512"), "256 sequences need 10 tokens each"),
        (("--device", "h100", "--rate", "nan"), "--rate: got nan; write a number"),
        (("--device", "h100", "--prompt", "x"), "--prompt: got 'x'"),
        (("--device", "v100"), "--device: v100-sxm2-16gb has no FlashAttention"),
        (("--device", "h100", "--html", "a.txt"), "--html: a.txt has no ending that is known"),
        (("--device", "h100", "--trace", "none.csv"), "none.csv: cannot be read"),
        (("--device", "h100", "--rate", "9", "--search", "--ttft", "0.001"), "--ttft, --tpot: nothing of"),
        (("--device", "h100", "--rate", "9", "--search", "--ttft", "9", "--replicas", "2"), "--replicas: is what"),
    ],
)
def test_what_cannot_be_answered_is_one_line(model: str, arguments: tuple[str, ...], line: str) -> None:
    result = CliRunner().invoke(main, ["serve", model, *arguments])
    assert result.exit_code == 2
    assert line in result.output
    assert "Traceback" not in result.output
