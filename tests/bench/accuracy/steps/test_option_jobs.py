"""Rows of NeMo's jobs as options of the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.accuracy.steps.option_jobs import nemo_rows

_COLUMNS = (
    "source,release,task,model,system,gpus,precision,gbs,mbs,sequence,fsdp,tp,pp,cp,vp,ep,step_seconds,"
    "tokens_per_second_gpu"
)


def options_of(folder: Path, row: str) -> tuple[str, ...]:
    """Options of the one row of a table."""
    path = folder / "nemo.csv"
    path.write_text(f"{_COLUMNS}\n{row}\n", "utf-8")
    (only,) = nemo_rows(path, folder)
    return only.options


@pytest.mark.parametrize(
    ("row", "carrier", "overlaps", "narrow"),
    [
        ("bridge,26.04,pretrain,GPT OSS 120B,DGX-GB200,64,BF16,1280,4,4096,0,1,1,1,,64,,100", "nccl", False, False),
        ("bridge,26.04,pretrain,GPT OSS 120B,DGX-B300,64,BF16,1280,4,4096,0,1,1,1,,8,,100", "deepep", False, False),
        ("bridge,26.04,pretrain,GPT OSS 120B,DGX-B300,64,BF16,1280,4,4096,0,1,1,1,,64,,100", "nccl", False, False),
        ("bridge,26.06,pretrain,DeepSeekV3,DGX-GB300,256,MXFP8,4096,1,4096,,1,2,1,8,32,,100", "deepep", True, True),
        ("bridge,26.04,pretrain,DeepSeekV3,DGX-GB300,256,MXFP8,4096,2,4096,0,1,2,1,8,32,,100", "deepep", False, True),
        ("bridge,26.04.01,pretrain,DeepSeekV3,DGX-B200,256,MXFP8,4096,1,4096,0,1,8,1,2,32,,9", "deepep", True, True),
        ("bridge,25.09,pretrain,Qwen3_30B_a3B (tokendrop),DGX-B200,8,FP8,8,1,4096,0,1,1,1,1,8,,9", "nccl", False, True),
        ("automodel,,pretrain,Qwen3 MoE 30B,DGX-H100,8,BF16,512,4,4096,8,1,1,1,,8,21.7,100", "deepep", False, False),
    ],
)  # fmt: skip
def test_recipes_say_who_carries_tokens(tmp_path: Path, row: str, carrier: str, overlaps: bool, narrow: bool) -> None:
    options = options_of(tmp_path, row)
    assert options[options.index("--dispatch") + 1] == carrier
    assert ("--overlap-batches" in options) is overlaps
    assert ("--narrow" in options) is narrow


def test_dense_rows_carry_no_tokens(tmp_path: Path) -> None:
    row = "bridge,26.04,pretrain,LLAMA3_70B,DGX-GB300,64,NVFP4,256,1,8192,0,1,4,1,5,,,7397"
    options = options_of(tmp_path, row)
    assert "--dispatch" not in options and "--narrow" not in options
    assert options[options.index("--precision") + 1] == "nvfp4"
