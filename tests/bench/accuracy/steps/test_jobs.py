"""Steps of jobs that really ran; skipped where the measured data are missing."""

from __future__ import annotations

import numpy as np
import pytest

from bench.accuracy.data import default_directory

pytestmark = pytest.mark.usefixtures("pytorch")

FOLDER = default_directory() / "jobs"


@pytest.fixture
def measured() -> None:
    if not (FOLDER / "llmfoundry.csv").is_file():
        pytest.skip("no measured jobs")


@pytest.mark.usefixtures("measured")
def test_a_few_jobs_are_within_their_bars() -> None:
    from bench.accuracy.steps.jobs import BARS, read_jobs

    jobs = read_jobs(FOLDER / "llmfoundry.csv")
    few = [job for job in jobs if job.model == "3b" and job.sequence in (2048, 8192) and job.boards == 8]
    assert len(few) >= 3
    errors = np.array([job.step().seconds / job.seconds - 1 for job in few])
    assert np.abs(errors).mean() < BARS["llm-foundry"]


def test_norms_and_metrics_are_those_of_the_job() -> None:
    from functools import partial

    from bench.accuracy.steps.mpt_model import METRICS, mpt_subject
    from daydream.capture.options import CaptureOptions
    from daydream.plan.source import planned_units

    options = CaptureOptions(batch=1, dtype="amp-bfloat16", parameters="bfloat16", optimizer="adamw")
    operators = planned_units(partial(mpt_subject, "125m", sequence=64, batch=1), options).capture.operators
    norms = {each.outputs[0].dtype for each in operators if each.name == "aten::native_layer_norm"}
    assert norms == {"c10::BFloat16"}
    names = [each.name for each in operators]
    assert names.count("flash_attn::cross_entropy") == names.count("flash_attn::cross_entropy_backward") == 1
    assert names.count("aten::_log_softmax") == METRICS
