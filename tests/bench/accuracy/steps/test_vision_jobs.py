"""Rows of DeepLearningExamples."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

ROWS = """model,mode,board,gpus,precision,batch,images_per_second,latency_ms
resnet50,training,v100-sxm2-16gb,1,amp,256,1200.0,
resnet50,training,v100-sxm2-16gb,8,amp,256,8322.0,
efficientnet-b4,training,v100-sxm2-32gb,1,amp,64,89.0,
efficientnet-b4,training,v100-sxm2-32gb,8,amp,64,1565.0,
resnet50,inference,t4,1,amp,1,79.0,12.96
"""


def test_rates_that_eight_boards_exceed_many_times_are_left_out(tmp_path: Path) -> None:
    from bench.accuracy.steps.vision_jobs import rows_of

    path = tmp_path / "dle.csv"
    path.write_text(ROWS)
    assert [row["board"] for row in rows_of(path, "training")] == ["v100-sxm2-16gb"]
    assert [row["board"] for row in rows_of(path, "inference")] == ["t4"]
