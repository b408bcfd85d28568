"""What TorchInductor would fuse of captured steps: kernels, their bytes, what is kept and what is made again."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from daydream.capture.captured import Capture, CapturedOperator  # noqa: E402
from daydream.capture.fusion.inductor import ASSUMED, fused  # noqa: E402
from daydream.capture.fusion.values import arguments_of, tensors_by_storage  # noqa: E402
from daydream.capture.options import CaptureOptions  # noqa: E402
from daydream.capture.pytorch.step import Subject  # noqa: E402
from daydream.capture.sources import captured  # noqa: E402
from daydream.graph.graph import Phase  # noqa: E402
from daydream.operators.inputs import RecordedTensor  # noqa: E402

B, T, C, H = 4, 32, 64, 4
INFERENCE = CaptureOptions(mode="inference")
#: Bytes of a tensor of all tokens.
TOKENS = 4 * B * T * C
#: Bytes of the scores of all heads.
SCORES = 4 * B * H * T * T


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.Linear(4 * C, C)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Attention(nn.Module):
    """Attention written out, behind a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.dropout = nn.Linear(C, 3 * C), nn.Linear(C, C), nn.Dropout(0.1)
        self.register_buffer("mask", torch.ones(1, 1, T, T, dtype=torch.bool))

    def forward(self, x: Any) -> Any:
        q, k, v = self.into(x).view(B, T, 3, H, C // H).permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.where(self.mask, (q @ k.transpose(-1, -2)) * 0.25, -1e9)
        return self.out((self.dropout(torch.softmax(scores, -1)) @ v).transpose(1, 2).reshape(B, T, C))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(C, 4 * C, bias=False), nn.Linear(C, 4 * C, bias=False)
        self.down = nn.Linear(4 * C, C, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.second, self.norm2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x: Any) -> Any:
        hidden = F.relu(self.norm1(self.first(x)))
        return F.max_pool2d(F.relu(self.norm2(self.second(hidden)) + hidden), 2)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(500, C), nn.LayerNorm(C), nn.Linear(C, 500)

    def forward(self, ids: Any) -> Any:
        return F.cross_entropy(self.head(self.norm(self.tokens(ids))).view(-1, 500), ids.view(-1))


NETS: dict[str, tuple[type[nn.Module], Any]] = {
    "feed-forward": (FeedForward, torch.zeros(B, T, C)),
    "attention": (Attention, torch.zeros(B, T, C)),
    "gated": (Gated, torch.zeros(B, T, C)),
    "convolutions": (Convolutions, torch.zeros(2, 8, 16, 16)),
    "language": (Language, torch.zeros(B, T, dtype=torch.int64)),
}


def step(name: str, *, training: bool = False, optimizer: str = "none", dtype: str = "float32") -> Capture:
    make, inputs = NETS[name]
    with torch.device("meta"):
        model = make()
    subject = Subject(title=name, model=model, args=(inputs.to("meta"),), loss=torch.sum, batch=B)
    mode = "training" if training else "inference"
    return captured(subject, CaptureOptions(mode=mode, dtype=dtype, optimizer=optimizer, attention="eager"))


def generated(capture: Capture, phase: Phase | None = None) -> list[CapturedOperator]:
    return [
        each for each in capture.operators
        if each.name.startswith("inductor::") and (phase is None or each.phase == phase)
    ]  # fmt: skip


def names(capture: Capture, phase: Phase | None = None) -> list[str]:
    return [each.name.removeprefix("inductor::triton_") for each in generated(capture, phase)]


def moved(operator: CapturedOperator) -> int:
    return sum(tensor.bytes for tensor in arguments_of(operator)) + sum(tensor.bytes for tensor in operator.outputs)


# Kernels


def test_a_norm_and_an_activation_are_a_kernel_each() -> None:
    result = fused(step("feed-forward"))
    assert names(result) == ["per_fused_native_layer_norm", "poi_fused_gelu", "poi_fused_add"]
    norm, gelu, add = generated(result)
    # The statistics of a norm that nobody reads are not written.
    assert moved(norm) == 2 * TOKENS + 2 * 4 * C
    assert moved(gelu) == 2 * 4 * TOKENS
    assert moved(add) == 3 * TOKENS
    assert [each.name for each in result.operators if not each.name.startswith("inductor")] == ["aten::addmm"] * 2
    assert result.assumed == (ASSUMED,)


def test_scores_are_read_and_written_once() -> None:
    """Scale, mask and softmax of 64 KiB of scores are a kernel; operators one by one move them six times."""
    result = fused(step("attention"))
    softmax = next(each for each in generated(result) if "softmax" in each.name)
    assert softmax.name == "inductor::triton_per_fused__softmax_mul_where"
    assert moved(softmax) == 2 * SCORES + T * T
    assert {tensor.dims for tensor in softmax.outputs} == {(B, H, T, T)}


def test_the_mask_of_dropout_is_written_and_the_softmax_made_again() -> None:
    """The backward pass has the scores, the sums of their rows and the mask, a byte each: no probabilities."""
    result = fused(step("attention", training=True))
    forward = next(each for each in generated(result, Phase.FORWARD) if "softmax" in each.name)
    backward = next(each for each in generated(result, Phase.BACKWARD) if "softmax" in each.name)
    sums = 2 * 4 * B * H * T
    assert "native_dropout" in forward.name
    assert moved(forward) == SCORES + T * T + (SCORES + SCORES // 4 + sums)
    assert moved(backward) == 3 * SCORES + SCORES // 4 + T * T + sums


def test_what_a_product_needs_again_is_kept() -> None:
    """The second product's weights need what GELU has made, its gradient what it was made of."""
    result = fused(step("feed-forward", training=True))
    gelu = next(each for each in generated(result, Phase.BACKWARD) if "gelu" in each.name)
    assert gelu.name == "inductor::triton_poi_fused_gelu_backward"
    assert moved(gelu) == 3 * 4 * TOKENS


def test_an_activation_is_made_again_from_what_is_kept_anyway() -> None:
    result = fused(step("gated", training=True))
    forward, backward = names(result, Phase.FORWARD), names(result, Phase.BACKWARD)
    assert forward[0] == "poi_fused_mul_silu"
    assert next(name for name in backward if "silu" in name) == "poi_fused_mul_silu_backward"
    kernel = next(each for each in generated(result, Phase.BACKWARD) if "silu" in each.name)
    # Gate, up and the gradient in, two gradients out.
    assert moved(kernel) == 5 * 4 * TOKENS


def test_batch_norm_sums_columns_before_its_elements() -> None:
    result = fused(step("convolutions", training=True))
    assert [name for name in names(result, Phase.FORWARD) if "batch_norm" in name] == [
        "red_fused_native_batch_norm", "poi_fused_native_batch_norm_relu",
        "red_fused_native_batch_norm", "poi_fused_add_native_batch_norm_relu",
    ]  # fmt: skip
    inference = names(fused(step("convolutions")))
    assert inference[:2] == ["poi_fused_native_batch_norm_relu", "poi_fused_add_native_batch_norm_relu"]
    # Windows of the pooling read other elements than they make.
    assert inference[2] == "poi_fused_max_pool2d_with_indices"


def test_the_loss_reads_logits_and_not_their_logarithms() -> None:
    result = fused(step("language", training=True))
    logits = 4 * B * T * 500
    softmax = next(each for each in generated(result, Phase.FORWARD) if "log_softmax" in each.name)
    assert moved(softmax) == logits + 2 * 4 * B * T
    backward = next(each for each in generated(result, Phase.BACKWARD) if "log_softmax" in each.name)
    assert 2 * logits < moved(backward) < 2.1 * logits
    embedding = generated(result, Phase.FORWARD)[0]
    assert embedding.name == "inductor::triton_per_fused_embedding_native_layer_norm"
    # Of the table the rows of the tokens alone; their numbers; the result, its statistics and two weights.
    assert moved(embedding) == 2 * TOKENS + 8 * B * T + 2 * 4 * B * T + 2 * 4 * C


@pytest.mark.parametrize(("optimizer", "tensors"), [("sgd", 5), ("adamw", 7)])
def test_an_update_is_one_kernel(optimizer: str, tensors: int) -> None:
    """SGD with momentum reads weights, gradients and momenta and writes two of them, AdamW one more."""
    before = step("gated", training=True, optimizer=optimizer)
    (update,) = generated(fused(before), Phase.UPDATE)
    assert update.name.startswith("inductor::triton_for_fused_")
    weights = sum(each.tensor.bytes for each in before.parameters)
    assert moved(update) == pytest.approx(tensors * weights, rel=0.01)


# What holds for every step


@pytest.mark.parametrize("dtype", ["float32", "amp"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_kernels_run_in_order(net: str, training: bool, dtype: str) -> None:
    """Whatever a kernel reads of the step was written before; libraries' calls are the same; nothing moves more."""
    before = step(net, training=training, dtype=dtype, optimizer="sgd")
    after = fused(before)
    written: set[int] = set()
    for operator in after.operators:
        strange = [each for each in operator.read if before.storages[each].kind == "step" and each not in written]
        made_in_setup = {each for each in strange if not any(each in other.made for other in before.operators)}
        assert set(strange) == made_in_setup, operator.name
        written.update(operator.written)
        assert operator.launches
        assert operator.forward < after.operators.index(operator)
    stays = [each.name for each in after.operators if not each.name.startswith("inductor::")]
    kept = [each.name for each in before.operators if each.launches and each.name in set(stays)]
    assert sorted(stays) == sorted(kept)
    launched = [each for each in before.operators if each.launches]
    assert len(after.operators) <= len(launched)
    assert sum(map(moved, after.operators)) <= sum(map(moved, launched))
    freed = [storage for operator in after.operators for storage in operator.freed]
    assert len(freed) == len(set(freed))


def test_gradients_know_the_kernel_that_they_are_of() -> None:
    result = fused(step("feed-forward", training=True))
    product = next(each for each in result.operators if each.name == "aten::mm")
    assert result.operators[product.forward].name == "aten::addmm"
    assert result.modules[product.module].path == "down"


def test_views_of_one_storage() -> None:
    """Keys and queries of one projection are two tensors of it; a square reads its tensor once."""
    part, bias = RecordedTensor((2, 8), "float", (24, 1)), RecordedTensor((8,), "float", (1,))
    assert tensors_by_storage([part, part, bias], [5, 6]) == {5: [part, part], 6: [bias]}
    assert tensors_by_storage([part, part], [5, 6]) == {5: [part], 6: [part]}

    class Square(nn.Module):
        def forward(self, x: Any) -> Any:
            first, second = x.chunk(2, -1)
            return first * second, x * x

    inputs = torch.zeros(8, 64, device="meta")
    halves, square = generated(fused(captured(Subject(title="square", model=Square(), args=(inputs,)), INFERENCE)))
    assert (moved(halves), moved(square)) == (4 * 8 * (64 + 32), 4 * 8 * 128)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="TorchInductor needs a compiler")
@pytest.mark.parametrize("net", ["feed-forward", "gated"])
def test_inductor_makes_the_same_kernels(net: str) -> None:
    """The kernels that PyTorch's compiler names on a CPU are those that are supposed, views left out."""
    import re

    from torch._inductor.utils import run_and_get_code

    make, inputs = NETS[net]
    model = torch.compile(make().eval())
    with torch.no_grad():
        _, (code,) = run_and_get_code(model, inputs)
    called = re.findall(r"cpp_fused_(\w+?)_\d+ = async_compile", code)
    words = [re.sub(r"_?(?:_unsafe_view|view)", "", name).strip("_") for name in called]
    assert words == [name.removeprefix("poi_fused_").removeprefix("per_fused_") for name in names(fused(step(net)))]
