"""Configurations of transformers of the models that NeMo's tables name, as their makers published them."""

from __future__ import annotations

from typing import Any

#: NeMo's adapters: next to queries, keys and values; AutoModel's are next to all projections.
LORA = ("--lora", "rank=32,modules=q_proj,k_proj,v_proj")
AUTOMODEL_LORA = ("--lora", "rank=16")

#: What AutoModel's recipes of adapters on two nodes set besides (``examples/llm_benchmark``, ``*_2nodes.yaml``).
AUTOMODEL_RECIPES: dict[str, tuple[str, ...]] = {
    "llama-70b": ("--sequence-parallel", "--overlap-tensor", "--checkpoint", "full"),
    "qwen-32b": ("--checkpoint", "full"),
}


def _llama(hidden: int, heads: int, between: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_attention_heads":
        heads, "num_key_value_heads": 8, "intermediate_size": between, "num_hidden_layers": layers, "vocab_size":
        128256, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    }  # fmt: skip


def _qwen(hidden: int, heads: int, groups: int, between: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": hidden, "num_attention_heads":
        heads, "num_key_value_heads": groups, "intermediate_size": between, "num_hidden_layers": layers, "vocab_size":
        152064, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    }  # fmt: skip


def _grok(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 6144, "num_attention_heads":
        48, "num_key_value_heads": 8, "intermediate_size": 32768, "num_hidden_layers": layers, "vocab_size": 131072,
        "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 8192, "hidden_act": "gelu",
        "sliding_window": None,
    }  # fmt: skip


def _deepseek(experts: int, heads: int, dense: int, groups: int, vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "vocab_size": vocabulary, "n_routed_experts": experts,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": groups, "topk_group": max(groups // 2, 1),
        "first_k_dense_replace": dense, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 8192,
    }  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads":
        64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_hidden_layers": layers,
        "num_local_experts": experts, "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128,
    }  # fmt: skip


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama-8b": _llama(4096, 32, 14336, 32),
    "llama-70b": _llama(8192, 64, 28672, 80),
    "llama-405b": _llama(16384, 128, 53248, 126),
    "qwen-7b": _qwen(3584, 28, 4, 18944, 28),
    "qwen-32b": _qwen(5120, 40, 8, 27648, 64),
    "nemotron-15b": {
        "architectures": ["NemotronForCausalLM"], "model_type": "nemotron", "hidden_size": 6144,
        "num_attention_heads": 48, "num_key_value_heads": 8, "intermediate_size": 24576, "num_hidden_layers": 32,
        "vocab_size": 256000, "max_position_embeddings": 4096, "partial_rotary_factor": 0.5,
    },
    "qwen3-30b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
        "norm_topk_prob": True,
    },
    "deepseek-v3": _deepseek(256, 128, 3, 8, 129280),
    "kimi-k2": _deepseek(384, 64, 1, 1, 163840),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gpt-oss-20b": _gpt_oss(24, 32),
    **{f"grok-{layers}": _grok(layers) for layers in (2, 4, 8, 16, 32, 64)},
}  # fmt: skip

#: Names of the configurations by the tables' words.
MODELS = {
    "LLAMA3_70B": "llama-70b", "LLAMA3.1_405B": "llama-405b", "Llama3 8B": "llama-8b", "Llama3 70B": "llama-70b",
    "Qwen2.5 7B": "qwen-7b", "Qwen2.5 32B": "qwen-32b", "DeepSeekV3": "deepseek-v3", "DeepSeek V3 671B": "deepseek-v3",
    "GPT OSS 120B": "gpt-oss-120b", "GPT-OSS 20B": "gpt-oss-20b", "Qwen3_30B_a3B": "qwen3-30b",
    "Qwen3 MoE 30B": "qwen3-30b", "Kimi K2": "kimi-k2",
}  # fmt: skip

#: Grok-1 on H100 by boards, as its recipe's page has it: layers, tokens, stages, context, experts' ranks, chunks,
#: samples.
_GROK_H100 = {
    8: (2, 4096, 1, 1, 2, 1, 1024), 16: (4, 4096, 1, 1, 4, 1, 1024), 32: (4, 4096, 1, 1, 8, 1, 1024),
    64: (8, 8192, 1, 2, 8, 1, 1024), 128: (16, 8192, 2, 2, 8, 8, 1024), 256: (32, 8192, 4, 2, 8, 8, 1024),
    512: (64, 8192, 8, 2, 8, 8, 1024), 1024: (64, 8192, 8, 2, 8, 8, 2048), 2048: (64, 8192, 8, 2, 8, 8, 4096),
}  # fmt: skip

#: On GB200, without stages and context.
_GROK_GB200 = {boards: (64, 8192, 1, 1, 8, 1, 2 * boards) for boards in (128, 256, 512)}


def grok(boards: int, board: str) -> tuple[str, dict[str, int]] | None:
    """The configuration and the division of Grok-1 on so many boards; None where its page has none."""
    found = (_GROK_GB200 if board == "gb200" else _GROK_H100).get(boards)
    if found is None:
        return None
    layers, sequence, pipeline, context, expert, chunks, samples = found
    return f"grok-{layers}", {
        "tensor": 4, "pipeline": pipeline, "context": context, "expert": expert, "chunks": chunks, "batch": 1,
        "sequence": sequence, "samples": samples,
    }  # fmt: skip
