"""Attention as library calls: one of FlashAttention or those of one written out, and the boards that have neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hal.catalog import load_device
from hal.support.errors import InputError
from roller.cli import main
from roller.library import library_calls, library_time, library_times
from roller.library.calls import KINDS
from roller.library.named_calls import named_calls
from roller.library.recognise import recognise
from sokoban.language.operators import operator_from_data

Data = dict[str, Any]
H100, V100 = load_device("h100"), load_device("v100")
LLAMA: Data = {"op": "attention", "b": 2, "heads": 32, "kv_heads": 8, "queries": 4096, "head_dim": 128, "causal": True,
               "dtype": "bfloat16"}  # fmt: skip


def summary(data: Data, direction: Any = "forward") -> list[tuple[str, tuple[float, ...]]]:
    return [(call.label, call.sizes) for call in library_calls(data, direction)]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"keys": 5000, "window": 128, "value_dim": 64, "dtype": "float16"},
        {"kv_heads": 32, "causal": False, "dtype": "float8_e4m3fn"},
        {"epilogue": [{"function": "residual_add"}, "relu"]},
        {"queries": 40960, "epilogue": [{"function": "bias_add", "axis": "h"}]},
    ],
)
def test_the_operator_and_its_expression_are_the_same_calls(keys: Data) -> None:
    data = LLAMA | keys
    assert named_calls(data) == recognise(operator_from_data(data))


def test_flash_is_one_call_with_its_sizes() -> None:
    (call,) = library_calls(LLAMA | {"keys": 8192, "window": 1024, "page": 64, "value_dim": 64})
    assert (call.kind, call.dtype, call.direction) == ("attention", "bfloat16", "forward")
    assert dict(zip(KINDS["attention"], call.sizes, strict=True)) == {
        "b": 2, "heads": 32, "kv_heads": 8, "queries": 4096, "keys": 8192, "head_dim": 128, "value_dim": 64,
        "causal": 1, "window": 1024, "page": 64,
    }  # fmt: skip
    (back,) = library_calls(LLAMA, "backward")
    assert (back.kind, back.label, back.direction) == ("attention", "gradient of attention", "backward")


def test_eager_is_what_pytorch_launches_for_attention_written_out() -> None:
    rows, scores = 2 * 32 * 4096, 2 * 32 * 4096 * 4096
    keys, all_keys = 2 * 8 * 4096 * 128, 2 * 32 * 4096 * 128
    assert summary(LLAMA | {"algorithm": "eager"}) == [
        ("repeat keys", (2 * (keys + all_keys), all_keys, all_keys, 0, 0, 0)),
        ("repeat values", (2 * (keys + all_keys), all_keys, all_keys, 0, 0, 0)),
        ("batch_matmul", (64, 4096, 4096, 128)),
        ("mul (number)", (scores,)),
        ("add", (scores,)),
        ("softmax", (rows, 4096)),
        ("batch_matmul", (64, 4096, 128, 4096)),
    ]
    bare = {"kv_heads": 32, "causal": False, "dtype": "float32", "algorithm": "eager"}
    labels = [label for label, _ in summary(LLAMA | bare)]
    assert labels == ["batch_matmul", "mul (number)", "softmax", "batch_matmul"]


def test_the_way_back_of_eager_is_that_of_its_calls() -> None:
    assert [label for label, _ in summary(LLAMA | {"algorithm": "eager"}, "backward")] == [
        "gradient of the first operand", "gradient of the second operand", "gradient of softmax", "gradient of add",
        "gradient of mul (number)", "gradient of the first operand", "gradient of the second operand",
        "gradient of repeat values", "gradient of repeat keys",
    ]  # fmt: skip


def test_an_estimate_is_the_sum_of_its_calls_and_flash_is_faster() -> None:
    flash, eager, back = library_times(
        [LLAMA, LLAMA | {"algorithm": "eager"}, LLAMA], H100, ["forward", "forward", "backward"]
    )
    assert eager.seconds == pytest.approx(sum(part.seconds for part in eager.parts))
    assert flash.seconds < 0.5 * eager.seconds
    assert flash.seconds < back.seconds
    assert flash.kernel.startswith("FlashAttention 3")


def test_a_mask_leaves_work_out() -> None:
    whole, causal, window = (
        library_time(LLAMA | {"queries": 16384} | keys, H100).seconds
        for keys in ({"causal": False}, {}, {"window": 1024})
    )
    assert window < 0.5 * causal and causal < 0.75 * whole


def test_boards_without_tensor_cores_take_eager_alone() -> None:
    with pytest.raises(InputError) as caught:
        library_time(LLAMA, V100)
    assert str(caught.value) == (
        "--device: v100-sxm2-16gb has no FlashAttention, which takes Tensor Cores of sm_80 or newer; "
        'use "algorithm": "eager"'
    )
    assert library_time(LLAMA | {"algorithm": "eager"}, V100).seconds > 0


@pytest.mark.parametrize("board", ["l4", "rtx-pro-6000"])
def test_boards_of_flash_attention_2_take_no_eight_bit_floats(board: str) -> None:
    with pytest.raises(InputError, match=r'for float8_e4m3fn, which takes .* sm_90 .* use "dtype": "bfloat16"'):
        library_time(LLAMA | {"dtype": "float8_e4m3fn"}, load_device(board))
    assert library_time(LLAMA, load_device(board)).kernel.startswith("FlashAttention 2")


@pytest.mark.parametrize(
    ("data", "direction", "message"),
    [
        (LLAMA | {"dtype": "float32"}, "forward",
         '[0].dtype: FlashAttention has no kernel for float32; use "dtype": "bfloat16" or "algorithm": "eager"'),
        (LLAMA | {"dtype": "float8_e5m2"}, "backward",
         '[0].dtype: FlashAttention has no backward pass in float8_e5m2; use "dtype": "bfloat16"'),
        (LLAMA | {"kv_heads": 5}, "forward",
         "[0].kv_heads: 32 heads are no multiple of 5; use a divisor of heads"),
    ],
)  # fmt: skip
def test_bad_input_names_its_place(data: Data, direction: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        library_times([data], H100, direction)
    assert str(caught.value) == message


def test_the_command_prints_the_kernel_and_ours_next_to_it(tmp_path: Path) -> None:
    file = tmp_path / "op.json"
    file.write_text(json.dumps(LLAMA | {"name": "core"}))
    run = CliRunner()
    invoked = run.invoke(main, ["estimate", str(file), "--implementation", "library", "--device", "h100", "--json"])
    assert invoked.exit_code == 0
    assert json.loads(invoked.stdout)["kernel"].startswith("FlashAttention 3")
    ours = run.invoke(main, ["estimate", str(file), "--device", "h100", "--json"])
    assert ours.exit_code == 0
    assert 0.5 < json.loads(ours.stdout)["seconds"] / json.loads(invoked.stdout)["seconds"] < 2


@pytest.mark.parametrize(
    ("changes", "device"), [({"dtype": "float64"}, "h100"), ({"head_dim": 52}, "h100"), ({}, "ice-lake")]
)
def test_what_has_no_kernel_of_its_own_is_written_out(tmp_path: Path, changes: dict[str, Any], device: str) -> None:
    file = tmp_path / "op.json"
    file.write_text(json.dumps(LLAMA | {"name": "core"} | changes))
    invoked = CliRunner().invoke(main, ["estimate", str(file), "--device", device, "--search", "roller", "--json"])
    assert invoked.exit_code == 0, invoked.stderr
    parts = json.loads(invoked.stdout)["parts"]
    assert [part["label"].rpartition(": ")[2] for part in parts] == ["makes Logits", "makes P", "makes Y"]


def test_what_we_cannot_build_is_refused_in_a_line(tmp_path: Path) -> None:
    file, out = tmp_path / "op.json", tmp_path / "out"
    file.write_text(json.dumps(LLAMA | {"name": "core", "queries": 64, "dtype": "float8_e4m3fn"}))
    for command in (["compile", str(file), "--out", str(out)], ["estimate", str(file)], ["explain", str(file)]):
        refused = CliRunner().invoke(main, [*command, "--device", "h100"])
        assert (refused.exit_code, refused.stdout) == (2, ""), command
        assert "float8_e4m3fn" in refused.stderr and refused.stderr.count("\n") == 1
        assert not out.exists()


def test_keys_lie_in_pages_where_servers_keep_them_there() -> None:
    def page(**changed: Any) -> float:
        return library_calls(LLAMA | changed)[0].sizes[-1]

    assert page() == 64, "causal"
    assert page(causal=False) == 0
    assert page(causal=False, queries=1, keys=4096) == 64
    assert (page(page=0), page(page=16)) == (0, 16)
    assert library_calls(LLAMA, "backward")[0].sizes[-1] == 0
