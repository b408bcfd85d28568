"""Models as the command line names them: files, timm, transformers, and what is wrong with them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hal.support.errors import InputError

torch = pytest.importorskip("torch")

from daydream.capture.captured import Capture  # noqa: E402
from daydream.capture.sources import CaptureOptions, captured, load_subject  # noqa: E402

FILE = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layer = torch.nn.Linear(width, 4)

    def forward(self, rows):
        return self.layer(rows)

def pair(batch=3):
    print("said by the model")
    return Net(), torch.zeros(batch, 8)

def by_name():
    return Net(), {"rows": torch.zeros(5, 8)}

def with_loss():
    return Net(), [torch.zeros(2, 8)], lambda scores: scores.square().mean()

def everything(batch):
    return {"model": Net(), "inputs": torch.zeros(batch, 8), "optimizer": "adam", "batch": batch}

def on_processor():
    return Net().to_empty(device="cpu"), torch.zeros(2, 8, device="cpu")

def number():
    return 3

def alone():
    return Net()

def no_tensor():
    return Net(), 7

def wrong_key():
    return {"model": Net(), "input": torch.zeros(2, 8)}

def wrong_optimizer():
    return {"model": Net(), "inputs": torch.zeros(2, 8), "optimizer": "lion"}

def sizes():
    return Net(9), torch.zeros(2, 8)

def raises():
    raise KeyError("weights")

def leaves():
    raise SystemExit(3)

class Reads(Net):
    def forward(self, rows):
        return super().forward(rows) * rows.sum().item()

def reads():
    return Reads(), torch.zeros(2, 8)

class Selects(Net):
    def forward(self, rows):
        return super().forward(rows).nonzero()

def selects():
    return Selects(), torch.zeros(2, 8)

def deep():
    return deep()

class Huge(Net):
    def forward(self, rows):
        return super().forward(rows) + torch.ones(10**13)

def huge():
    return Huge(), torch.zeros(2, 8)

def board():
    return Net().cuda(), torch.zeros(2, 8)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(FILE)
    return path


def names(step: Capture) -> list[str]:
    return [each.name.removeprefix("aten::") for each in step.operators if each.launches]


@pytest.mark.parametrize(("function", "batch"), [("pair", 3), ("by_name", 5), ("with_loss", 2), ("on_processor", 2)])
def test_functions_return_models_in_several_ways(file: Path, function: str, batch: int) -> None:
    step = captured(f"{file}:{function}", CaptureOptions())
    assert step.batch == batch
    assert names(step)[0] == "addmm"
    assert ("pow" in names(step)) == (function == "with_loss")


def test_sizes_reach_the_function(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert captured(f"{file}:pair", CaptureOptions(batch=7)).batch == 7
    assert capsys.readouterr().out == "", "standard output is for answers"
    step = captured(f"{file}:everything", CaptureOptions(batch=6))
    assert step.batch == 6
    assert "_foreach_addcdiv_" in names(step)
    assert "_foreach_addcdiv_" not in names(captured(f"{file}:everything", CaptureOptions(batch=6, optimizer="sgd")))


def test_one_function_needs_no_name(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("import torch\ndef f():\n    return torch.nn.ReLU(), torch.zeros(2)\n")
    assert names(captured(str(path), CaptureOptions(mode="inference"))) == ["relu"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("number", "returned int"),
        ("alone", "returned a model without inputs"),
        ("no_tensor", "inputs without a tensor"),
        ("wrong_key", "a dict with input"),
        ("wrong_optimizer", "the optimizer 'lion'"),
        ("everything", "needs batch; add --batch"),
        ("sizes", "net.py:10: RuntimeError"),
        ("raises", "net.py:47: KeyError"),
        ("leaves", "net.py:50: SystemExit: 3"),
        ("reads", "net.py:54: reads values of a tensor on the host"),
        ("selects", "net.py:61: torch.nonzero makes a result as large as data demand"),
        ("deep", "RecursionError"),
        ("huge", "net.py:71: needs more memory than there is"),
        ("nothing", "has no function 'nothing'"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(file: Path, function: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as error:
        captured(f"{file}:{function}", CaptureOptions())
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="PyTorch knows boards here")
def test_a_model_that_asks_for_a_board(file: Path) -> None:
    with pytest.raises(InputError, match=r"net\.py:77: asks for a board; leave the device out"):
        load_subject(f"{file}:board")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("resnet50", "names no model"),
        ("timm:resnet81", "did you mean"),
        ("hf:nowhere.json", "No such file"),
        ("nowhere.py:f", "No such file"),
        ("timm:", "names no model"),
    ],
)
def test_what_names_no_model(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_subject(text)


def test_a_file_that_is_no_python(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def f(:\n")
    with pytest.raises(InputError, match=r"broken\.py:1: SyntaxError"):
        load_subject(f"{path}:f")


# timm


@pytest.mark.parametrize("channels_last", [False, True])
def test_networks_of_timm(channels_last: bool) -> None:
    pytest.importorskip("timm")
    options = CaptureOptions(batch=2, dtype="amp", channels_last=channels_last, image=64)
    step = captured("timm:test_resnet", options)
    assert step.batch == 2 and step.training
    first = next(each for each in step.operators if each.name == "aten::convolution")
    image = first.inputs.tensor(0)
    assert image is not None and image.dims == (2, 3, 64, 64) and image.dtype == "c10::Half"
    assert (image.strides[1] == 1) == channels_last
    assert "nll_loss_backward" in names(step)
    assert any("autocast" in each for each in step.assumed)


def test_images_of_the_size_that_a_network_is_tested_on() -> None:
    pytest.importorskip("timm")
    sizes = [load_subject("timm:resnet18", training=training).args[0].shape[-1] for training in (True, False)]
    assert sizes == [224, 288]


# transformers

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 100,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
TWO_SIDED = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 100,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 8}
IMAGES = {**SIZES, "image_size": 32, "patch_size": 8}

#: Class, kind, fields, and the kernel of attention that boards with flash attention run for it in halves.
MODELS = [
    ("BertForMaskedLM", "bert", SIZES, "flash"),
    ("BertForPreTraining", "bert", SIZES, "flash"),
    ("RobertaForSequenceClassification", "roberta", SIZES, "flash"),
    ("DistilBertForQuestionAnswering", "distilbert", {"dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 64},
     "flash"),
    ("AlbertForMaskedLM", "albert", {**SIZES, "embedding_size": 16}, "flash"),
    ("ElectraForPreTraining", "electra", SIZES, "flash"),
    ("GPT2LMHeadModel", "gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100}, "flash"),
    ("GPTNeoXForCausalLM", "gpt_neox", SIZES, "flash"),
    ("OPTForCausalLM", "opt", {"hidden_size": 32, "num_hidden_layers": 1, "ffn_dim": 64, "num_attention_heads": 4,
                               "word_embed_proj_dim": 32}, "flash"),
    ("LlamaForCausalLM", "llama", GROUPED, "flash"),
    ("MistralForCausalLM", "mistral", {**GROUPED, "sliding_window": 8}, "efficient"),
    ("MixtralForCausalLM", "mixtral", {**GROUPED, "num_local_experts": 4}, "flash"),
    ("Qwen2ForCausalLM", "qwen2", GROUPED, "flash"),
    ("Qwen3MoeForCausalLM", "qwen3_moe", {**GROUPED, **EXPERTS}, "flash"),
    ("Gemma2ForCausalLM", "gemma2", {**GROUPED, "head_dim": 8}, ""),
    ("BloomForCausalLM", "bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 100}, ""),
    ("T5ForConditionalGeneration", "t5", {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 4, "d_kv": 8,
                                          "vocab_size": 100}, "efficient"),
    ("BartForConditionalGeneration", "bart", TWO_SIDED, "flash"),
    ("WhisperForConditionalGeneration", "whisper", {**TWO_SIDED, "max_source_positions": 20}, "flash"),
    ("ViTForImageClassification", "vit", IMAGES, "flash"),
    ("SegformerForSemanticSegmentation", "segformer", {"image_size": 64, "hidden_sizes": [16, 16, 16, 16],
                                                       "depths": [1, 1, 1, 1]}, "flash"),
    ("MambaForCausalLM", "mamba", {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 100}, ""),
]  # fmt: skip


def written(folder: Path, kind: str, fields: dict[str, Any], architecture: str | None) -> str:
    architectures = {} if architecture is None else {"architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **architectures, **fields}))
    return f"hf:{folder}"


@pytest.mark.parametrize(("architecture", "kind", "fields", "kernel"), MODELS, ids=[each[0] for each in MODELS])
def test_models_of_transformers(
    tmp_path: Path, architecture: str, kind: str, fields: dict[str, Any], kernel: str
) -> None:
    pytest.importorskip("transformers")
    source = written(tmp_path, kind, fields, architecture)
    step = captured(source, CaptureOptions(batch=2, sequence=12, dtype="amp"))
    counts = Counter(names(step))
    attention = {each for each in counts if "attention" in each and not each.endswith("backward")}
    assert attention == ({f"_scaled_dot_product_{kernel}_attention"} if kernel else set())
    assert step.modules[0].kind == architecture
    assert counts["_foreach_lerp_"], "AdamW unless another optimizer is asked for"
    assert counts["nll_loss_forward"] + counts["nll_loss2d_forward"] or architecture.startswith("Electra")
    assert {each.order >= 0 for each in step.parameters if each.trained} >= {True}
    gradients = [each for each in step.parameters if each.order >= 0]
    assert len(gradients) >= 0.9 * len(step.parameters)


def test_what_is_assumed_of_windows(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = written(tmp_path, "mistral", {**GROUPED, "sliding_window": 8}, "MistralForCausalLM")
    message = [any("window" in each for each in load_subject(source, sequence=length).assumed) for length in (8, 9)]
    assert message == [False, True]


def test_attention_written_out(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = written(tmp_path, "llama", GROUPED, "LlamaForCausalLM")
    eager = Counter(names(captured(source, CaptureOptions(sequence=12, attention="eager", mode="inference"))))
    assert (eager["bmm"], eager["_softmax"]) == (4, 2), "two products a layer"


@pytest.mark.parametrize(("version", "kernel"), [("cudnn", "cudnn"), ("flash3", "cudnn"), ("flash2", "efficient")])
def test_latent_attention_has_keys_longer_than_its_values(tmp_path: Path, version: str, kernel: str) -> None:
    pytest.importorskip("transformers")
    latent = {
        **SIZES, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    source = written(tmp_path, "deepseek_v3", latent, "DeepseekV3ForCausalLM")
    step = captured(source, CaptureOptions(sequence=16, dtype="bfloat16", attention=version))
    attention = [each for each in step.operators if each.name == f"aten::_scaled_dot_product_{kernel}_attention"]
    sides = {tuple(tensor.dims[-1] for tensor in each.inputs.tensors[:3] if tensor) for each in attention}
    assert attention and sides == {(24, 24, 16)}


def test_a_class_in_place_of_the_configurations(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = written(tmp_path, "bert", SIZES, "BertForMaskedLM")
    subject = load_subject(source, class_name="AutoModelForSequenceClassification", training=True)
    assert type(subject.model).__name__ == "BertForSequenceClassification"
    assert subject.kwargs["labels"].shape == (1,)


@pytest.mark.parametrize(
    ("data", "class_name", "message"),
    [
        ('{"model_type": "bert"}', None, "architectures: is missing"),
        ('{"architectures": ["BertModel"]}', None, "model_type: is missing"),
        ('{"model_type": "brt", "architectures": ["BertModel"]}', None, "did you mean"),
        ('{"model_type": "bert", "architectures": ["BertModle"]}', None, "no model class 'BertModle'; did you mean"),
        ('{"model_type": "bert"}', "GPT2LMHeadModel", "--class: GPT2LMHeadModel is not for models of the kind bert"),
        ('{"model_type": "bert"}', "AutoModelForVision", "--class: transformers has no model class"),
        ('{"model_type": "bert", "hidden_size": "wide"}', "BertModel", "hidden_size"),
        ('{"model_type": "bert", "hidden_size": 30, "num_attention_heads": 4}', "BertModel", "multiple"),
        ('{"model_type": "be', None, "is no JSON"),
        ("[]", None, "model_type: is missing"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_one_line(
    tmp_path: Path, data: str, class_name: str | None, message: str
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(data)
    with pytest.raises(InputError, match=re.escape(message)) as error:
        load_subject(f"hf:{path}", class_name=class_name)
    assert "\n" not in str(error.value)


def test_experts_chosen_by_the_data_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "num_experts": 4}
    source = written(tmp_path, "switch_transformers", fields, "SwitchTransformersForConditionalGeneration")
    with pytest.raises(InputError, match=r"torch.nonzero makes a result as large as data demand"):
        captured(source, CaptureOptions(sequence=8))


# Checkpoints


def test_checkpoints_by_path(file: Path) -> None:
    pytest.importorskip("timm")
    options = {"batch": 2, "image": 64}
    counts = [
        Counter(names(captured("timm:test_vit", CaptureOptions(checkpoint=each, **options))))["addmm"]
        for each in ("none", "blocks.0", "full")
    ]
    assert counts[0] < counts[1] < counts[2]
    with pytest.raises(InputError, match="no module has such a path"):
        captured("timm:test_vit", CaptureOptions(checkpoint="layers.9", **options))
    with pytest.raises(InputError, match="repeats no block"):
        captured(f"{file}:pair", CaptureOptions(checkpoint="full"))
