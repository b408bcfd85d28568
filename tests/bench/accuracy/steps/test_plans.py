"""Measured jobs of many boards: how rows are read, and one of them predicted."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.accuracy.data import default_directory

ROWS = default_directory() / "models" / "torchtitan.csv"

pytestmark = pytest.mark.usefixtures("pytorch")


def test_columns_of_both_files_are_distinguished(tmp_path: Path) -> None:
    from bench.accuracy.steps.plans import read_runs

    within, beyond = tmp_path / "single.csv", tmp_path / "multi.csv"
    within.write_text("# GPUs,...\n4,16,2,1024,16,12,512,2,1,2,250.0\n")
    beyond.write_text("Parameters,...\n3.6,4,16,2,1024,16,12,512,2,1,2,250.0\n")
    (run,), (other,) = read_runs(within), read_runs(beyond)
    assert run == other
    assert (run.tensor, run.data, run.pipeline, run.layers, run.seconds) == (2, 1, 2, 12, 0.25)
    assert run.layout.micro_batches == 8 and run.layout.waits and not run.layout.overlap


def test_megatrons_kernels_cost_their_bytes() -> None:
    from bench.accuracy.steps.megatron_model import gpt_subject
    from daydream.capture.options import CaptureOptions
    from daydream.operators.calls import work_of_call
    from daydream.plan.source import planned_units

    def subject() -> object:
        return gpt_subject(layers=4, hidden=64, heads=4, sequence=32, batch=2)

    units = planned_units(subject, CaptureOptions(batch=2, dtype="float16", checkpoint="full"), tensor=2)  # type: ignore[arg-type]
    softmax = next(each for each in units.capture.operators if each.name == "megatron::masked_softmax")
    work = work_of_call(softmax.name, softmax.inputs, softmax.outputs)
    # Scores of two samples and a rank's two heads in 16 bits: what the mask leaves is read, all are written.
    assert work is not None and work.bytes == 1.5 * 2 * (2 * 2) * 32 * 32 and len(units.blocks) == 4


@pytest.mark.slow
@pytest.mark.skipif(not ROWS.is_file(), reason="the measured models are not next to this checkout")
def test_torchtitans_memory_is_predicted(tmp_path: Path) -> None:
    from bench.accuracy.steps.plans import BARS, titan_runs

    head, *rows = ROWS.read_text().splitlines()
    some = tmp_path / "torchtitan.csv"
    some.write_text(f"{head}\n{next(row for row in rows if 'fsdp8,yes,bfloat16' in row)}\n")
    (run,) = titan_runs(some)
    assert run.gibibytes is not None and run.seconds is not None
    assert abs(run.step.memory.reserved / 2**30 / run.gibibytes - 1) < BARS["memory"]
    assert abs(run.step.seconds / run.seconds - 1) < BARS["time"]
