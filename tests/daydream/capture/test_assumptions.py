"""Values that a model reads of tensors without data, as they are supposed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from daydream.capture.assumptions import USUAL, assumption_texts, parse_assumptions, values_assumed  # noqa: E402
from daydream.capture.failures import DataDependentError  # noqa: E402
from daydream.capture.options import CaptureOptions  # noqa: E402
from daydream.capture.pytorch.step import Subject  # noqa: E402
from daydream.capture.sources import captured  # noqa: E402
from daydream.graph.graph import Phase  # noqa: E402
from hal.support.errors import InputError  # noqa: E402


class Picks(torch.nn.Module):
    """A product of the rows that a mask has, twice where the sum of all is not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        picked = self.layer(rows[rows[:, 0] > 0])
        return self.layer(picked) if rows.sum().item() != 0 else picked


def rows_of_products(*assume: str) -> list[int]:
    """Rows of every product of a step."""
    with torch.device("meta"):
        subject = Subject(title="picks", model=Picks(), args=[torch.empty(40, 8)])
    step = captured(subject, CaptureOptions(mode="inference", assume=assume))
    assert all(sentence in step.assumed for sentence in assumption_texts(parse_assumptions(assume)))
    return [each.outputs[0].dims[0] for each in step.operators if each.name == "aten::addmm"]


def test_results_are_as_large_as_supposed() -> None:
    assert rows_of_products("nonzero=0.25", "item=0") == [10]
    assert rows_of_products("nonzero=0.5", "item=1") == [20, 20]


def test_without_assumptions_values_are_refused() -> None:
    with pytest.raises(DataDependentError, match="--assume"):
        rows_of_products()
    with pytest.raises(DataDependentError, match="reads values"):
        rows_of_products("nonzero=0.5")


def test_assumptions_end_with_the_capture() -> None:
    with values_assumed({"nonzero": 0.5, "item": 3.0}):
        number = torch.empty((), device="meta", dtype=torch.int64)
        assert (number.item(), f"{number}", bool(torch.empty((), device="meta", dtype=torch.bool))) == (3, "3", True)
        assert torch.masked_select(torch.empty(8, device="meta"), torch.empty(8, device="meta") > 0).shape == (4,)
    with pytest.raises(RuntimeError, match="meta"):
        torch.empty((), device="meta").item()


@pytest.mark.parametrize("text", ["nonzero", "nonzero=much", "nonzero=1.5", "weights=0", "item=1e400"])
def test_what_is_no_assumption_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError, match="--assume") as error:
        parse_assumptions([text])
    assert "\n" not in str(error.value)


def test_models_whose_parameters_were_made_on_the_host_train(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = {
        "model_type": "wavlm", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3],
        "num_feat_extract_layers": 2, "architectures": ["WavLMForSequenceClassification"], "classifier_proj_size": 16,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    step = captured(f"hf:{path}", CaptureOptions(sequence=4000, assume=USUAL))
    assert any(operator.phase == Phase.BACKWARD for operator in step.operators)
