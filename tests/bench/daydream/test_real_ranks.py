"""The bench of real ranks on gloo: its parts, and the smallest job recorded, merged and predicted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from bench.daydream.gloo_models import Job, Training  # noqa: E402
from bench.daydream.gloo_ranks import Ranks  # noqa: E402
from bench.daydream.real_ranks import (  # noqa: E402
    Host,
    Line,
    Results,
    Row,
    jobs_of,
    line,
    main,
    met,
    predicted,
    step_seconds,
    tables,
)
from daydream.graph.graph import TaskKind  # noqa: E402
from daydream.ranks.merge import merge, read_ranks  # noqa: E402

pytestmark = pytest.mark.usefixtures("pytorch")


def test_a_line_goes_through_what_was_measured():
    times = [Line(latency_us=50.0, gbps=0.25).us(size) * 1e-6 for size in (1 << 18, 1 << 20, 1 << 22)]
    assert line((1 << 18, 1 << 20, 1 << 22), times) == Line(latency_us=50.0, gbps=0.25)


def test_no_line_begins_below_nothing():
    fitted = line((1000, 2000), (1e-6, 4e-6))
    assert fitted.latency_us == 0
    assert 0.5 < fitted.gbps < 1


def test_jobs_that_are_predicted_differ_from_the_recorded_one():
    base, others = jobs_of("mlp")
    assert base.name == "mlp-ddp2"
    assert [job.name for job in others] == [
        "mlp-ddp2-1mb", "mlp-ddp2-2mb", "mlp-ddp4", "mlp-ddp4-1mb", "mlp-fsdp2", "mlp-fsdp4",
    ]  # fmt: skip


def test_results_are_told_with_their_errors():
    host = Host(lines={"all_reduce": Line(latency_us=1e3, gbps=0.1)}, copy_gbps=2.0, call_us=300.0)
    rows = [Row(name="mlp-ddp2", predicted=0.104, measured=0.1)]
    results = Results(network="", hosts={"2": host}, replays=rows, untraced=rows, predictions=rows)
    assert "| mlp-ddp2 | 104.0 | 100.0 | +4.0% |" in tables(results)
    assert met(results)
    assert not met(
        Results(network="", hosts={}, replays=[Row(name="", predicted=1.1, measured=1.0)], untraced=[], predictions=[])
    )


@pytest.mark.parametrize("model", ["mlp", "transformer", "tiny"])
def test_models_train_on_one_rank(model: str):
    training = Training(Job(model=model, ranks=1, kind="plain", work=0.0))
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    training.step()
    assert any(not torch.equal(old, new) for old, new in zip(before, training.model.parameters(), strict=True))


def test_a_plan_without_buckets_is_refused_in_one_line(tmp_path: Path):
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    result = CliRunner().invoke(main, ["--plan", str(plan), "--models", "mlp"])
    assert result.exit_code == 2
    assert result.stderr == (
        f"bench.daydream.real_ranks: {plan}: holds no ddp.bucket_cap_mb_list; give a plan of `daydream optimize`\n"
    )


def test_an_unknown_model_is_refused_in_one_line():
    result = CliRunner().invoke(main, ["--models", "mlp,vgg"])
    assert result.exit_code == 2
    assert result.stderr == "bench.daydream.real_ranks: --models: there is no 'vgg'; name some of mlp, transformer\n"


@pytest.mark.slow
def test_two_ranks_are_recorded_merged_and_predicted(tmp_path: Path):
    job = Job(model="mlp", ranks=2, work=0.1)
    with Ranks(2) as ranks:
        paths = ranks.tell("record", job, 2, str(tmp_path))
        assert [Path(path).name for path in paths] == ["rank0.json.gz", "rank1.json.gz"]
        assert all(len(times) == 1 for times in ranks.tell("run", job, 1))
    merged = merge(read_ranks([tmp_path]))
    assert merged.graph.ranks == (0, 1)
    moving = merged.graph.kind == TaskKind.COMMUNICATION
    # Two buckets a step: of the last two layers, and of the others.
    assert moving.sum() == 2 * 2 * 2
    sizes = sorted(set(merged.graph.bytes[moving].tolist()))
    assert sizes == [4 * (512 * 512 + 512 + 5130), 4 * 5 * (512 * 512 + 512)]
    replayed = step_seconds([merged.graph])
    assert replayed == pytest.approx(float(np.nanmedian(merged.measured_us[0])) * 1e-6, rel=0.01)
    free = Host(
        lines=dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), Line(latency_us=0.0, gbps=1e6)),
        copy_gbps=1e6,
        call_us=0.0,
    )
    slow = Host(lines=dict.fromkeys(free.lines, Line(latency_us=0.0, gbps=0.01)), copy_gbps=1e6, call_us=0.0)
    exchanged = step_seconds([predicted(merged.graph, job, slow)]) - step_seconds([predicted(merged.graph, job, free)])
    # At 10 MB/s the second bucket's 5.3 MB are on the step, and more where the first holds it up.
    assert sizes[1] * 1e-7 - 0.01 < exchanged < sum(sizes) * 1e-7 + 0.01
