"""Kernels of training: what Liger's layers launch, and the errors of cuDNN's attention."""

from __future__ import annotations

import pytest

from bench.accuracy.data import default_directory
from bench.accuracy.library.training_kernels import (
    ATTENTION_BAR,
    Measured,
    inductor_columns,
    kernel_table,
    read_attention,
    read_liger,
)
from roller.library.calls import LibraryCall

DIRECTORY = default_directory() / "training_kernels"


def test_times_between_events_have_a_launch_and_a_gap_more_than_those_of_kernels() -> None:
    call = LibraryCall(kind="rows", label="norm", sizes=(64, 4096, 0), dtype="bfloat16", variant="triton rms_norm")
    pair = [
        Measured(board="NVIDIA H200", group=name, seconds=1e-4, calls=(call,), events=events)
        for name, events in (("kernel", False), ("events", True))
    ]
    ratios = [float(str(cell)) for cell in kernel_table(pair).columns[4].cells]
    assert ratios[1] - ratios[0] == pytest.approx((2e-6 + 1e-6) / 1e-4, abs=0.011)


def test_columns_are_sliced_until_blocks_fill_the_units() -> None:
    assert inductor_columns(16_384, 128, 132) == (128, 16)
    assert inductor_columns(4096, 16_384, 132) == (8, 64)


def test_attention_of_cudnn_is_within_the_bar() -> None:
    pytest.importorskip("pyarrow.parquet")
    rows = read_attention(DIRECTORY / "attention.parquet")
    if not rows:
        pytest.skip("no measured attention")
    assert max(float(str(cell).rstrip("%")) for cell in kernel_table(rows).columns[3].cells) <= ATTENTION_BAR


def test_layers_without_a_description_are_left_out() -> None:
    pytest.importorskip("pyarrow.parquet")
    rows = read_liger(DIRECTORY / "liger.parquet")
    if not rows:
        pytest.skip("no measured layers")
    assert {each.group.split(", ")[0] for each in rows} == {"Liger", "PyTorch", "torch.compile"}
    assert not any("fused_moe" in each.group for each in rows)
