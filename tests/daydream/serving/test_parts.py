"""Models as a serving engine runs them: which layers are one product, what is divided, what a token costs in bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from daydream.serving.parts import (
    TOKENS,
    Attention,
    Experts,
    Latent,
    Loop,
    Product,
    ServedModel,
    Sum,
    scaled_loop,
    served_model,
)  # fmt: skip
from hal.support.errors import InputError

pytestmark = pytest.mark.usefixtures("pytorch")


def _counted(model: ServedModel, kind: type) -> dict[object, int]:
    return {part: count for part, count in model.body.items() if isinstance(part, kind)}


def test_layers_that_read_the_same_are_one_product_and_pairs_are_divided(configuration: Callable[[str], str]) -> None:
    model = served_model(configuration("llama"))
    assert _counted(model, Product) == {
        Product(1024, 512, "n", True): 5, Product(512, 512, "k", True): 5, Product(2048, 512, "n", True): 5,
        Product(512, 1024, "k", True): 5,
    }  # fmt: skip
    assert list(model.head)[-1] == Product(2048, 512, "n", False)
    assert _counted(model, Attention) == {Attention(8, 4, 64, 64, 0): 5}
    # Behind attention and behind the second layers of a block, and behind the embedding.
    assert _counted(model, Sum) == {Sum(512): 11}


def test_weights_and_cache_are_those_of_the_configuration(configuration: Callable[[str], str]) -> None:
    model = served_model(configuration("llama"))
    products = 5 * (512 * 1024 + 512 * 512 + 512 * 2048 + 512 * 1024)
    others = 2 * 2048 * 512 + 11 * 512
    assert model.weight_bytes(1, 2.0) == 2 * (products + others)
    assert model.weight_bytes(2, 1.0) == (products + 2 * others) / 2
    assert model.cache_elements(1) == 5 * 2 * 4 * 64
    # Eight boards keep a head of keys each, which two of them have in common.
    assert model.cache_elements(8) == 5 * 2 * 64


def test_experts_run_by_a_kernel_of_their_own(configuration: Callable[[str], str]) -> None:
    model = served_model(configuration("mixtral"))
    assert _counted(model, Experts) == {Experts(512, 768, 8, 2): 5}
    assert Product(8, 512, "", False) in model.body
    assert sum(count for part, count in model.body.items() if isinstance(part, Loop) and "topk" in part.name) == 5
    # One token reads two experts of a layer, many read all.
    experts = 5 * 3 * 512 * 768
    assert model.active_elements(1000) - model.active_elements(1) == pytest.approx(6 * experts)


def test_latent_attention_is_one_module_with_a_small_cache(configuration: Callable[[str], str]) -> None:
    model = served_model(configuration("deepseek"))
    assert _counted(model, Latent) == {Latent(8, 512, 128, 64, 16, 32, 32): 5}
    assert _counted(model, Experts) == {Experts(512, 256, 16, 4): 3}
    # The shared expert of three layers, and the layers of two without experts.
    assert {part: count for part, count in _counted(model, Product).items() if part.divided} == {
        Product(2048, 512, "n", True): 2, Product(512, 1024, "k", True): 2, Product(512, 512, "n", True): 3,
        Product(512, 256, "k", True): 3,
    }  # fmt: skip
    assert model.cache_elements(4) == 5 * (64 + 16)


def test_a_loop_for_other_numbers_of_tokens_has_their_sizes(configuration: Callable[[str], str]) -> None:
    gate = next(part for part in served_model(configuration("llama")).body if isinstance(part, Loop) and part.divided
                and "silu" in part.name)  # fmt: skip
    _, inputs, outputs = scaled_loop(gate, 7)
    assert outputs[0].dims == (1, 7, 1024)
    assert {each.dims for each in inputs.tensors if each is not None} == {(1, 7, 1024)}
    assert TOKENS not in outputs[0].dims


def test_what_has_no_attention_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plain") / "net.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\ndef net():\n"
        "    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.zeros(1009, 8)\n"
    )
    with pytest.raises(InputError, match="no block with attention"):
        served_model(f"{path}:net")
