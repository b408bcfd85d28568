"""Bytes of captured steps against PyTorch's MemTracker on the same tensors without data, to the byte."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from daydream.memory.footprint import MemoryKind, footprint

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("timm", "transformers")), reason="needs what builds models"
)

#: Configurations of transformers, small.
_TEXT = {"vocab_size": 128, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {**_TEXT, "architectures": ["LlamaForCausalLM"], "intermediate_size": 96, "num_key_value_heads": 2},
    "bert": {**_TEXT, "architectures": ["BertForSequenceClassification"], "intermediate_size": 96},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "vocab_size": 128, "n_layer": 2, "n_embd": 64, "n_head": 4},
    "opt": {**_TEXT, "architectures": ["OPTForCausalLM"], "ffn_dim": 96, "word_embed_proj_dim": 64},
}

NETWORKS = ("resnet18", "mobilenetv3_small_050", "vit_tiny_patch16_224", "mixer_s32_224")


def tracked(text: str, optimizer: str) -> dict[str, int]:
    """What MemTracker says of the peak of a training step, by its own kinds."""
    from torch.distributed._tools.mem_tracker import MemTracker

    from daydream.capture.models.hugging_face import positions_without_data
    from daydream.capture.pytorch.meta_kernels import board_kernels
    from daydream.capture.pytorch.optimizers import optimizer_of
    from daydream.capture.pytorch.step import scalar_of
    from daydream.capture.sources import load_subject

    subject = load_subject(text, batch=2, sequence=16, training=True)
    model = subject.model.train()
    update = optimizer_of(list(model.parameters()), optimizer, "foreach")
    tracker = MemTracker()
    inputs = [each for each in (*subject.args, *subject.kwargs.values()) if isinstance(each, torch.Tensor)]
    tracker.track_external(model, update, *inputs)
    with board_kernels("flash"), positions_without_data(), tracker:
        loss = (subject.loss or scalar_of)(model(*subject.args, **subject.kwargs))
        loss.backward()
        del loss
        update.step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("meta")]
    return {str(kind).rpartition(".")[2]: size for kind, size in peak.items()}


def compared(text: str, optimizer: str) -> tuple[int, int]:
    """Bytes at the peak, captured and tracked; what outlives the step is held against the parameters."""
    from daydream.capture.options import CaptureOptions
    from daydream.capture.sources import captured

    capture = captured(text, CaptureOptions(batch=2, sequence=16, optimizer=optimizer))
    memory, truth = footprint(capture), tracked(text, optimizer)
    owners = memory.owners()
    assert owners[MemoryKind.WEIGHTS] == truth["PARAM"] + truth["BUFFER"]
    parameters = sum(each.tensor.bytes for each in capture.parameters)
    # The tracker counts what the update makes for itself as the optimizer's.
    assert owners[MemoryKind.OPTIMIZER] == (2 if optimizer == "adamw" else 1) * parameters <= truth["OPT"]
    assert truth["PARAM"] == parameters
    gradients = [each for each in memory.held if each.kind is MemoryKind.GRADIENTS]
    assert sum(each.bytes for each in gradients) == parameters
    return memory.peak_bytes, truth["Total"]


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_hold_what_is_tracked(name: str) -> None:
    captured_peak, tracked_peak = compared(f"timm:{name}", "sgd")
    assert captured_peak == tracked_peak


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_transformers_hold_what_is_tracked(kind: str, tmp_path: Path) -> None:
    import json

    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **CONFIGURATIONS[kind]}))
    captured_peak, tracked_peak = compared(f"hf:{path}", "adamw")
    assert captured_peak == tracked_peak


#: Networks of other kinds, of which what outlives a step is compared.
OTHERS = ("convnext_atto", "swin_tiny_patch4_window7_224", "ghostnet_050", "resmlp_12_224", "mobilevit_xxs")


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_weights_gradients_and_states_are_exact(name: str) -> None:
    from daydream.capture.options import CaptureOptions
    from daydream.capture.sources import captured, load_subject

    model = load_subject(f"timm:{name}", batch=2, training=True).model
    parameters = sum(each.numel() * each.element_size() for each in model.parameters())
    buffers = sum(each.numel() * each.element_size() for each in model.buffers())
    held = footprint(captured(f"timm:{name}", CaptureOptions(batch=2, optimizer="adam"))).held

    def total(kind: MemoryKind) -> int:
        return sum(each.bytes for each in held if each.kind is kind)

    assert total(MemoryKind.WEIGHTS) == parameters + buffers
    assert total(MemoryKind.GRADIENTS) == parameters
    assert total(MemoryKind.OPTIMIZER) == 2 * parameters
