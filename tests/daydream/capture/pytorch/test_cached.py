"""Steps behind tokens whose keys and values a cache of transformers holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from daydream.capture.options import CaptureOptions
from daydream.capture.sources import captured
from daydream.cli import main
from daydream.operators.attention import attention_sides, is_attention
from daydream.prediction.step import predicted
from hal.catalog import load_device
from hal.support.errors import InputError

pytestmark = pytest.mark.usefixtures("pytorch")


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2,
        "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return f"hf:{path}"


@pytest.mark.parametrize("tokens", [None, 4])
def test_a_new_token_sees_all_that_are_cached(model: str, tokens: int | None) -> None:
    options = CaptureOptions(batch=3, sequence=tokens, cached=500, mode="inference", dtype="bfloat16")
    step = captured(model, options)
    attentions = [each for each in step.operators if is_attention(each.name)]
    sides = [attention_sides(each.name, each.inputs) for each in attentions]
    new = tokens or 1
    assert [(each.b, each.queries, each.keys) for each in sides if each is not None] == [(3, new, 500 + new)] * 2
    products = [each.inputs.tensors[0] for each in step.operators if each.name == "aten::mm"]
    assert {each.dims[0] for each in products if each is not None} == {3 * new}
    assert any("500 tokens are in the cache" in each for each in step.assumed)


def test_a_step_holds_the_cache_once(model: str) -> None:
    capture = captured(model, CaptureOptions(batch=3, cached=5000, mode="inference", dtype="bfloat16"))
    (step,) = predicted(capture, [load_device("h100")])
    cache = 2 * 2 * 3 * 5001 * 4 * 32 * 2
    temporary = step.memory.allocated - sum(each.tensor.bytes for each in capture.parameters)
    assert cache < temporary < 2 * cache + 2**25


def test_training_has_no_cache(model: str) -> None:
    with pytest.raises(InputError, match="--cached: is of no step of training; add --mode inference"):
        captured(model, CaptureOptions(cached=500))


def test_models_without_a_cache_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text("import torch\n\ndef net():\n    return torch.nn.Linear(8, 8), torch.zeros(4, 8)\n")
    result = CliRunner().invoke(
        main, ["predict", f"{path}:net", "--device", "h100", "--mode", "inference", "--cached", "9"]
    )
    assert result.exit_code == 2
    assert "keeps no cache of keys and values" in result.output
