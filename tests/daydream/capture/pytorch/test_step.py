"""Steps of small networks captured, held against the same steps run with data."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from daydream.graph.graph import Phase

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode, flop_registry  # noqa: E402

from daydream.capture.captured import Capture, CapturedOperator  # noqa: E402
from daydream.capture.pytorch.arguments import TYPE_NAMES  # noqa: E402
from daydream.capture.pytorch.checkpoints import apply_checkpoints  # noqa: E402
from daydream.capture.pytorch.meta_kernels import board_kernels  # noqa: E402
from daydream.capture.pytorch.step import Subject, capture  # noqa: E402
from tests.daydream.capture.networks import NETWORKS, Convolutional, Encoder  # noqa: E402

#: What a board runs, for what a processor runs in its place: every occurrence of the second list becomes the first.
SUBSTITUTES = [
    (["_scaled_dot_product_efficient_attention"], ["_scaled_dot_product_flash_attention_for_cpu"]),
    (["_scaled_dot_product_efficient_attention_backward"], ["_scaled_dot_product_flash_attention_for_cpu_backward"]),
    (["native_dropout"], ["bernoulli_", "div_", "mul"]),
]


def captured(name: str, device: str = "meta", **options: Any) -> Capture:
    make, inputs = NETWORKS[name]
    with torch.device(device):
        subject = Subject(title=name, model=make(), args=[inputs()], batch=2)
    with board_kernels(options.pop("attention", "efficient")):
        return capture(subject, device=device, **{"training": True, **options})


def stem(operator: CapturedOperator) -> str:
    return operator.name.removeprefix("aten::")


def launched(step: Capture) -> list[tuple[str, str, tuple[int, ...]]]:
    """Phase, name and sizes of the first result of every operator that runs a kernel."""
    return [
        (each.phase.name, stem(each), each.outputs[0].dims if each.outputs else ())
        for each in step.operators
        if each.launches
    ]


def as_on_a_board(operators: list[tuple[str, str, tuple[int, ...]]]) -> list[tuple[str, str, tuple[int, ...]]]:
    result: list[tuple[str, str, tuple[int, ...]]] = []
    for operator in operators:
        result.append(operator)
        for board, processor in SUBSTITUTES:
            if [name for _, name, _ in result[-len(processor) :]] == processor:
                last = result[-1]
                result[-len(processor) :] = [(last[0], name, last[2]) for name in board]
    return result


@pytest.mark.parametrize("dtype", ["float32", "amp"])
@pytest.mark.parametrize("name", ["convolutional", "u-net", "causal"])
def test_operators_are_those_of_a_run_with_data(name: str, dtype: str) -> None:
    without, with_data = captured(name, dtype=dtype), captured(name, "cpu", dtype=dtype)
    flash = [
        (
            phase,
            operator.replace("_flash_", "_efficient_") if operator.endswith(("attention", "backward")) else operator,
            dims,
        )
        for phase, operator, dims in launched(without)
    ]
    assert flash == as_on_a_board(launched(with_data))
    assert [each.order for each in without.parameters] == [each.order for each in with_data.parameters]


def test_dropout_is_one_operator_each_way() -> None:
    without, with_data = launched(captured("encoder")), as_on_a_board(launched(captured("encoder", "cpu")))
    named = [operator for _, operator, _ in without]
    assert named.count("native_dropout") == named.count("native_dropout_backward") == 2
    # The gradient of a dropout written out is a product.
    products = iter(["native_dropout_backward", "native_dropout_backward"])
    by_call = [
        (phase, next(products) if (phase, operator) == ("BACKWARD", "mul") else operator, dims)
        for phase, operator, dims in with_data
    ]
    assert by_call == without


def test_recurrent_layers_are_one_call_of_cudnn() -> None:
    counts = Counter(operator for _, operator, _ in launched(captured("recurrent")))
    assert counts["_cudnn_rnn"] == counts["_cudnn_rnn_backward"] == 1
    assert counts["addmm"] == 1, "only the head multiplies by itself"


@pytest.mark.parametrize("cell", ["LSTMCell", "GRUCell"])
def test_cells_are_two_products_and_a_kernel(cell: str) -> None:
    with torch.device("meta"):
        subject = Subject(title=cell, model=getattr(torch.nn, cell)(8, 4), args=[torch.empty(3, 8)])
    with board_kernels("eager"):
        counts = Counter(stem(each) for each in capture(subject, training=True).operators)
    fused = "_thnn_fused_lstm_cell" if cell == "LSTMCell" else "_thnn_fused_gru_cell"
    assert (counts["mm"], counts[fused]) == (4, 1)


# FLOPs


def flops(step: Capture) -> int:
    """Of all captured operators, by the formulas of PyTorch's counter."""
    types = {name: dtype for dtype, name in TYPE_NAMES.items()}

    def tensor(each: Any) -> Any:
        return torch.empty(each.dims, dtype=types[each.dtype], device="meta")

    total = 0
    for operator in step.operators:
        packet = getattr(torch.ops.aten, stem(operator))
        if packet in flop_registry:
            schema = getattr(packet, operator.overload)._schema
            # What is passed by keyword alone, such as a factor, changes no count.
            arguments = [
                tensor(each) if each is not None else operator.inputs.value(position)
                for position, each in enumerate(operator.inputs.tensors)
                if not schema.arguments[position].kwarg_only
            ]
            outputs = [tensor(each) for each in operator.outputs]
            if stem(operator) == "convolution_backward":
                # Gradients that are not wanted are not among the results.
                known = iter(outputs)
                outputs = [next(known) if wanted else None for wanted in operator.inputs.value(10)]
            total += flop_registry[packet](*arguments, out_val=outputs[0] if len(outputs) == 1 else tuple(outputs))
    return total


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_flops_are_those_that_pytorch_counts(name: str) -> None:
    with FlopCounterMode(display=False) as counter:
        step = captured(name)
    assert counter.get_total_flops() == flops(step)
    if name != "recurrent":
        assert flops(step) > 0


@pytest.mark.parametrize("name", ["convolutional", "u-net"])
def test_flops_are_those_of_a_run_with_data(name: str) -> None:
    make, inputs = NETWORKS[name]
    with FlopCounterMode(display=False) as counter:
        make()(inputs()).sum().backward()
    assert counter.get_total_flops() == flops(captured(name, optimizer="none"))


# Storages


@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.parametrize("dtype", ["float32", "amp"])
def test_only_gradients_are_held_when_the_step_ends(name: str, dtype: str) -> None:
    step = captured(name, dtype=dtype)
    held: set[int] = set()
    for operator in step.operators:
        assert not held & set(operator.made)
        held |= set(operator.made)
        held -= set(operator.freed)
    gradients = Counter(each.tensor.bytes for each in step.parameters)
    assert Counter(step.storages[each].bytes for each in held) == gradients
    assert {step.storages[each].kind for each in held} == {"step"}


def test_storages_say_what_they_hold() -> None:
    step = captured("convolutional", optimizer="adam")
    kinds = Counter(each.kind for each in step.storages)
    assert kinds["parameter"] == len(step.parameters) == 9
    assert kinds["buffer"] == 6, "two batch norms: mean, variance, batches"
    assert kinds["optimizer"] == 18 and kinds["host"] >= 9, "two moments each, and a counter on the host"
    assert kinds["input"] == 1


def test_inference_frees_everything() -> None:
    step = captured("causal", training=False)
    made = {each for operator in step.operators for each in operator.made}
    assert made == {each for operator in step.operators for each in operator.freed} & made
    assert {each.phase for each in step.operators} == {Phase.FORWARD}


def test_tied_weights_are_one_parameter() -> None:
    step = captured("causal")
    names = [each.name for each in step.parameters]
    assert "embedding.weight" in names and "head.weight" not in names
    embedding = step.parameters[names.index("embedding.weight")]
    assert embedding.order == max(each.order for each in step.parameters), "complete after both of its uses"


# Modules


def test_backward_operators_name_the_module_whose_gradient_they_make() -> None:
    step = captured("convolutional")
    by_call = [
        (stem(each), step.modules[each.module].path)
        for each in step.operators
        if each.phase == Phase.BACKWARD and stem(each) == "convolution_backward"
    ]
    assert by_call == [("convolution_backward", "body.0"), ("convolution_backward", "stem.0")]
    for operator in step.operators:
        if stem(operator) == "convolution_backward":
            assert stem(step.operators[operator.forward]) == "convolution"


# Optimizers


@pytest.mark.parametrize(
    ("name", "implementation", "expected"),
    [
        ("sgd", "fused", {"_fused_sgd_": 1}),
        ("adamw", "fused", {"_fused_adamw_": 1}),
        ("adam", "foreach", {"_foreach_lerp_": 1, "_foreach_addcdiv_": 1}),
        ("sgd", "for-loop", {"mul_": 9, "add_": 18}),
        ("none", "foreach", {}),
    ],
)
def test_optimizers_come_in_three_ways(name: str, implementation: str, expected: dict[str, int]) -> None:
    step = captured("convolutional", optimizer=name, implementation=implementation)
    counts = Counter(stem(each) for each in step.operators if each.phase == Phase.UPDATE and each.launches)
    assert {each: counts[each] for each in expected} == expected
    assert bool(counts) == bool(expected)


@pytest.mark.parametrize(
    ("implementation", "expected"),
    [("foreach", {"_foreach_norm": 1, "_foreach_mul_": 1}), ("for-loop", {"linalg_vector_norm": 10, "mul_": 9})],
)
def test_gradients_are_clipped_by_the_norm_of_all(implementation: str, expected: dict[str, int]) -> None:
    options: dict[str, Any] = {"optimizer": "none", "implementation": implementation}
    step = captured("convolutional", clip=True, **options)
    counts = Counter(stem(each) for each in step.operators if each.phase == Phase.UPDATE and each.launches)
    assert {each: counts[each] for each in expected} == expected
    assert not any(each.phase == Phase.UPDATE for each in captured("convolutional", **options).operators)


# Checkpoints


@pytest.mark.parametrize("dtype", ["float32", "amp"])
def test_checkpoints_compute_again_in_the_backward_pass(dtype: str) -> None:
    def step(which: str) -> Capture:
        with torch.device("meta"):
            model = torch.nn.Sequential(*(Encoder() for _ in range(2)))
            subject = Subject(title="blocks", model=model, args=[torch.empty(2, 8, 32)])
        apply_checkpoints(model, which)
        with board_kernels("flash"):
            return capture(subject, training=True, dtype=dtype)

    plain, again = step("none"), step("full")

    def products(each: Capture, phase: Phase) -> Counter[tuple[str, str, str]]:
        return Counter(
            (stem(operator), each.modules[operator.module].path, operator.outputs[0].dtype)
            for operator in each.operators
            if operator.phase == phase and stem(operator) in ("addmm", "native_layer_norm", "native_dropout")
        )

    assert not products(plain, Phase.BACKWARD)
    forward = products(plain, Phase.FORWARD)
    assert products(again, Phase.FORWARD) == forward
    recomputed = products(again, Phase.BACKWARD)
    assert not recomputed - forward, "the same operators in the same modules and types"
    assert {path for _, path, _ in recomputed} >= {"0.mix", "0.wide", "1.mix", "1.wide"}
    held = [max_held(each) for each in (plain, again)]
    assert held[1] < held[0]


def max_held(step: Capture) -> int:
    most = now = 0
    for operator in step.operators:
        now += sum(step.storages[each].bytes for each in operator.made)
        most = max(most, now)
        now -= sum(step.storages[each].bytes for each in operator.freed if step.storages[each].kind == "step")
    return most


# Attention


def attention_of(attention: str, dtype: str, **arguments: Any) -> set[str]:
    class Attend(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, query: Any, key: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(query, key, key, **arguments)

    heads = 2 if arguments.get("enable_gqa") else 4
    width = arguments.pop("width", 16)
    tensors = [torch.empty(1, each, 8, width, device="meta") for each in (4, heads)]
    with board_kernels(attention):
        step = capture(Subject(title="attend", model=Attend(), args=tensors), dtype=dtype)
    return {stem(each) for each in step.operators if "attention" in each.name or stem(each) == "bmm"}


@pytest.mark.parametrize(
    ("attention", "dtype", "arguments", "kernel"),
    [
        ("flash", "bfloat16", {}, "_scaled_dot_product_flash_attention"),
        ("flash", "amp", {"is_causal": True}, "_scaled_dot_product_flash_attention"),
        ("flash", "amp", {"enable_gqa": True}, "_scaled_dot_product_flash_attention"),
        ("flash", "float32", {}, "_scaled_dot_product_efficient_attention"),
        ("flash", "float16", {"attn_mask": True}, "_scaled_dot_product_efficient_attention"),
        ("efficient", "float16", {}, "_scaled_dot_product_efficient_attention"),
        ("efficient", "float16", {"enable_gqa": True}, "bmm"),
        ("eager", "float16", {}, "bmm"),
    ],
)
def test_attention_takes_the_kernel_that_a_board_would(
    attention: str, dtype: str, arguments: dict[str, Any], kernel: str
) -> None:
    if "attn_mask" in arguments:
        arguments = {"attn_mask": torch.empty(8, 8, dtype=torch.bool, device="meta")}
    assert attention_of(attention, dtype, **arguments) == {kernel}


def test_frozen_parameters_have_no_gradient() -> None:
    with torch.device("meta"):
        subject = Subject(title="frozen", model=Convolutional(), args=[torch.empty(1, 3, 16, 16)])
    for parameter in subject.model.stem.parameters():
        parameter.requires_grad_(False)
    step = capture(subject, training=True)
    assert [each.order for each in step.parameters if not each.trained] == [-1] * 3
    assert sorted(each.order for each in step.parameters if each.trained) == list(range(6))


def test_convolutions_have_the_layout_that_cudnn_gives_them() -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.Conv2d(16, 8, 1))
    image = torch.empty(2, 8, 9, 9, device="meta")
    layouts = {}
    for layout in (torch.contiguous_format, torch.channels_last):
        model = network.to("meta").to(memory_format=layout)
        with board_kernels("efficient"):
            step = capture(Subject(title="layout", model=model, args=[image], batch=2), training=True, dtype="amp")
        layouts[layout] = [
            each.outputs[0].strides[1] for each in step.operators if stem(each) in ("convolution", "native_batch_norm")
        ]
    # Of an image in NCHW, weights in NHWC make a result in NHWC.
    assert layouts == {torch.contiguous_format: [49, 49, 49], torch.channels_last: [1, 1, 1]}


def test_autocast_to_bfloat16_casts_weights_that_are_float32_alone() -> None:
    def casts_weights(parameters: str) -> bool:
        model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 32), torch.nn.GELU()).to("meta")
        subject = Subject(title="norm", model=model, args=[torch.zeros(4, 16, device="meta")], batch=4)
        step = capture(subject, training=True, dtype="amp-bfloat16", parameters=parameters)
        norm, product = (
            next(each for each in step.operators if each.name == name)
            for name in ("aten::native_layer_norm", "aten::addmm")
        )
        # Norms stay in float32, products are of 16 bits.
        assert (norm.outputs[0].dtype, product.outputs[0].dtype) == ("float", "c10::BFloat16")
        forward = [each for each in step.operators if each.name == "aten::_to_copy" and each.phase == Phase.FORWARD]
        return (32, 16) in [each.outputs[0].dims for each in forward]

    # Gathered in bfloat16, as FSDP's mixed precision does, the weights need no cast of their own.
    assert casts_weights("") and not casts_weights("bfloat16")
