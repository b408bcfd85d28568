"""Small models that are served, and costs of iterations with numbers that can be added up by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daydream.serving.costs import Engine, IterationCosts
from daydream.serving.grid import Grid
from hal.catalog import load_device

_COMMON = {"hidden_size": 512, "num_hidden_layers": 5, "vocab_size": 2048, "max_position_embeddings": 4096,
           "tie_word_embeddings": False, "rms_norm_eps": 1e-5}  # fmt: skip

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "intermediate_size": 1024,
              "num_attention_heads": 8, "num_key_value_heads": 4},
    "mixtral": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "intermediate_size": 768,
                "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
                "sliding_window": None},
    "deepseek": {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "intermediate_size": 1024,
                 "moe_intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8,
                 "first_k_dense_replace": 2, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4,
                 "n_group": 4, "topk_group": 2, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
                 "qk_rope_head_dim": 16, "v_head_dim": 32},
}  # fmt: skip


@pytest.fixture
def configuration(tmp_path: Path) -> Callable[[str], str]:
    """Writes a model's configuration, and names it as the command line does."""

    def write(name: str) -> str:
        path = tmp_path / name / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(_COMMON | CONFIGURATIONS[name]))
        return f"hf:{path}"

    return write


def flat_costs(**changed: Any) -> IterationCosts:
    """Costs of which an iteration takes a second, and a tenth for each of its tokens; attention takes nothing."""
    engine = Engine(**{"sequences": 4, "tokens": 16, **changed.pop("engine", {})})
    nothing = Grid(np.array([1.0, 4096.0]), np.array([1.0, 4096.0]), np.zeros((2, 2)))
    values = {
        "model": None, "device": load_device("h100"), "engine": engine,
        "body": 1 + 0.1 * np.arange(engine.tokens + 1), "decode": nothing,
        "head": np.zeros(engine.sequences * (1 + engine.draft) + 1), "prefill": nothing, "launch": 0.0,
        "blocks": 1000, "weights": 1e9,
    }  # fmt: skip
    return IterationCosts(**(values | changed))
