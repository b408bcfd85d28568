"""Ranks merged: who met whom, clocks found again, waiting distinguished from moving data, files that do not fit."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from daydream.cli import main
from daydream.graph.graph import TaskKind
from daydream.graph.simulate import simulate
from daydream.ranks.collectives import Kind
from daydream.ranks.even import even_load
from daydream.ranks.merge import Merged, merge, read_ranks
from daydream.ranks.report import findings, replay_error
from daydream.ranks.skew import group_times, rank_times
from hal.support.errors import InputError
from tests.daydream.ranks.jobs import gloo_trace
from tests.daydream.ranks.synthetic import Job, planted_job, recordings, worst_clock_us, write

SMALL = Job(ranks=2, steps=2, layers=6, buckets=2, offset_us=(0.0, 25_000.0))


def merged(job: Job, folder: Path, **options: Any) -> Merged:
    return merge(read_ranks(write(job, folder)), **options)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["merge", *map(str, arguments)], prog_name="daydream")


@pytest.mark.parametrize("hosts", (2, 8))
def test_planted_clocks_are_found_within_five_microseconds(hosts: int, tmp_path: Path) -> None:
    job = planted_job(hosts, 1, 20_000.0, seed=7, steps=3)
    ranks = read_ranks(write(job, tmp_path))
    aligned, as_recorded = merge(ranks), merge(ranks, aligned=False)
    assert worst_clock_us(job, aligned) < 5.0
    steps = range(job.steps)
    assert replay_error(aligned, simulate(aligned.graph), steps) < 0.001
    assert replay_error(as_recorded, simulate(as_recorded.graph), steps) > 0.01


def test_collectives_carry_what_the_trace_tells_of_them(tmp_path: Path) -> None:
    (rank, _) = read_ranks(write(SMALL, tmp_path))
    own = rank.collectives
    assert len(own) == SMALL.steps * SMALL.buckets
    assert {Kind(kind) for kind in own.kind} == {Kind.ALL_REDUCE}
    assert (own.groups[0].name, own.groups[0].ranks) == ("0", (0, 1))
    assert own.bytes.tolist() == [4.0 * 6_553_600] * len(own)


def test_the_slow_rank_holds_the_other_up(tmp_path: Path) -> None:
    job = Job(ranks=2, steps=2, layers=12, buckets=2, load=(1.0, 1.2), spread=0.0, jitter_us=0.0)
    timeline = simulate(merged(job, tmp_path).graph)
    fast, slow = rank_times(timeline, (0, 1))
    assert (fast.last, slow.last) == (0.0, 1.0)
    # Of 24 kernels each is 40 µs longer, 18 before the first meeting. The first all-reduce lasts until 18 * 240 + 500,
    # which is when the fast rank comes to the second.
    assert slow.held_up_us == pytest.approx(18 * 40 + 24 * 240 - (18 * 240 + 500), abs=200)
    assert fast.waited_us == pytest.approx(slow.held_up_us)
    (group,) = group_times(timeline, (0, 1))
    assert (group.ranks, group.count) == (2, 2.0)
    assert group.moving_us == pytest.approx(2 * 500.0, rel=0.01)
    even = simulate(even_load(timeline.graph))
    assert even.step_us.mean() == pytest.approx(timeline.step_us.mean() - 24 * 20, abs=80)


def test_ranks_on_gloo_wait_for_the_one_that_calls_last(tmp_path: Path) -> None:
    gloo_trace(tmp_path, 0, work_us=1000.0, end_us=5000.0)
    gloo_trace(tmp_path, 1, work_us=3000.0, end_us=5000.0)
    whole = merge(read_ranks([tmp_path]))
    timeline = simulate(whole.graph)
    assert timeline.step_us.tolist() == pytest.approx([5200.0])
    early, late = rank_times(timeline, (0,))
    assert early.waited_us == pytest.approx(2000.0)
    assert early.moving_us == late.moving_us == pytest.approx(5000.0 - 3070.0)
    # The work of the late rank alone decides.
    rows = whole.graph.select(name="aten::linear")
    equal = whole.graph.with_durations(rows, 1000.0)
    assert simulate(equal).step_us.tolist() == pytest.approx([3200.0])


def test_groups_that_share_a_name_do_not_meet(tmp_path: Path) -> None:
    documents = []
    for pair, load in enumerate((1.0, 1.5)):
        job = Job(ranks=2, steps=1, layers=4, buckets=1, spread=0.0, load=(load, load))
        for number, document in recordings(job):
            document["distributedInfo"] = {"rank": 2 * pair + number, "world_size": 4}
            documents.append(document)
            for event in document["traceEvents"]:
                if "Process Group Ranks" in event["args"]:
                    event["args"] |= {"Process Group Name": "tp", "Process Group Ranks": str([2 * pair, 2 * pair + 1])}
    whole = merge(read_ranks(_written(documents, tmp_path)))
    assert whole.meetings.labels == ("tp (0, 1)", "tp (2, 3)")
    timeline = simulate(whole.graph)
    assert max(rank.waited_us for rank in rank_times(timeline, (0,))[:2]) < 300.0
    assert {group.name for group in group_times(timeline, (0,))} == {"tp (0, 1)", "tp (2, 3)"}


def test_collectives_of_one_recording_alone_are_left_alone(tmp_path: Path) -> None:
    documents = [document for _, document in recordings(SMALL)]
    last = max(event["ts"] for event in documents[1]["traceEvents"] if event["name"].startswith("nccl"))
    documents[1]["traceEvents"] = [event for event in documents[1]["traceEvents"] if event["ts"] != last]
    whole = merge(read_ranks(_written(documents, tmp_path)))
    assert whole.meetings.count == SMALL.steps * SMALL.buckets - 1
    assert whole.meetings.alone.tolist() == [1, 0]


def test_every_meeting_moves_the_same_data_on_all_ranks(tmp_path: Path) -> None:
    whole = merged(SMALL, tmp_path)
    moving = np.flatnonzero(whole.graph.kind == TaskKind.COMMUNICATION)
    assert len(moving) == 2 * whole.meetings.count
    assert (whole.graph.duration_us[moving] < 600.0).all()


def test_the_command_names_stragglers_and_what_an_even_load_would_save(tmp_path: Path) -> None:
    write(Job(ranks=4, per_host=2, steps=2, layers=8, buckets=2, load=(1.0, 1.0, 1.3, 1.0)), tmp_path / "job")
    answer_data = json.loads(run(tmp_path / "job", "--json").output)
    assert answer_data["stragglers"] == [2]
    assert (answer_data["ranks"], answer_data["collectives"], len(answer_data["clocks"])) == (4, 4, 2)
    assert answer_data["even_load_seconds"] < answer_data["step_seconds"]
    assert answer_data["by_group"][0]["exposed"] > 0
    html, out = tmp_path / "page.html", tmp_path / "line.json"
    result = run(tmp_path / "job", "--html", html, "--out", out)
    assert result.exit_code == 0
    assert "ranks that hold the others up: 2" in result.output
    assert "rank 2" in html.read_text() and "<svg" in html.read_text()
    named = {e["args"]["name"] for e in json.loads(out.read_text())["traceEvents"] if e["name"] == "process_name"}
    assert {f"rank {rank} (replayed)" for rank in range(4)} <= named


def test_other_commands_take_a_folder_of_ranks(tmp_path: Path) -> None:
    write(SMALL, tmp_path / "job")
    answer = CliRunner().invoke(
        main, ["whatif", str(tmp_path / "job"), "--pass", "scale:match=sgemm,factor=0.5", "--json"]
    )
    answer_data = json.loads(answer.output)
    assert answer_data["predicted_seconds"] < 0.75 * answer_data["baseline_seconds"]
    assert answer_data["passes"][0]["notes"][-1] == "on each of 2 ranks; the notes above are of rank 0"


def test_recordings_without_steps_are_measured_whole(tmp_path: Path) -> None:
    documents = [document for _, document in recordings(SMALL)]
    for document in documents:
        document["traceEvents"] = [e for e in document["traceEvents"] if not e["name"].startswith("ProfilerStep")]
    whole = merge(read_ranks(_written(documents, tmp_path)))
    assert whole.measured_us.shape == (2, 1)
    assert replay_error(whole, simulate(whole.graph), (0,)) < 0.001


@pytest.mark.slow
def test_several_processes_read_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write(SMALL, tmp_path)
    monkeypatch.setattr("daydream.ranks.merge.MANY_FILES", 2)
    alone, together = read_ranks(paths), read_ranks(paths, jobs=2)
    assert [rank.number for rank in together] == [0, 1]
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one.graph.duration_us, other.graph.duration_us)
        assert one.graph.trace is not None and other.graph.trace is not None
        assert one.graph.trace.arguments == other.graph.trace.arguments
    paths[1].write_bytes(b"{")
    with pytest.raises(InputError, match="is not a trace"):
        read_ranks(paths, jobs=2)


def test_findings_count_ranks_in_their_order(tmp_path: Path) -> None:
    whole = merged(SMALL, tmp_path)
    assert [rank.rank for rank in findings(whole).ranks] == [0, 1]


# Files that do not fit


def _written(documents: list[dict[str, Any]], folder: Path) -> list[Path]:
    paths = [folder / f"rank{number}.json" for number in range(len(documents))]
    for path, document in zip(paths, documents, strict=True):
        path.write_text(json.dumps(document))
    return paths


def refused(result: Result) -> str:
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1
    return result.output


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    paths = write(Job(ranks=4, steps=1, layers=2, buckets=1), tmp_path)
    out = tmp_path / "line.json"
    assert refused(run(*paths[:2], paths[3], "--out", out)) == (
        f"daydream: {paths[0]}: is of a job of 4 ranks, of which rank 2 has no file; add them, or write --partial\n"
    )
    assert not out.exists()
    assert run(*paths[:2], paths[3], "--partial").exit_code == 0


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    paths = write(SMALL, tmp_path)
    again = tmp_path / "again.pt.trace.json.gz"
    again.write_bytes(paths[1].read_bytes())
    assert refused(run(*paths, again)) == (
        f"daydream: {again}: is of rank 1, and so is {paths[1]}; give one file per rank\n"
    )


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    paths = write(SMALL, tmp_path)
    paths[1].write_bytes(paths[1].read_bytes()[:-30])
    assert refused(run(*paths)) == f"daydream: {paths[1]}: is cut off: its end is missing; copy or record it again\n"


def test_a_clock_that_jumped_is_refused(tmp_path: Path) -> None:
    documents = [document for _, document in recordings(Job(ranks=2, steps=4, layers=6, buckets=2))]
    events = documents[1]["traceEvents"]
    middle = sorted(event["ts"] for event in events)[len(events) // 2]
    for event in events:
        event["ts"] += 5000.0 if event["ts"] > middle else 0.0
    paths = _written(documents, tmp_path)
    message = refused(run(*paths))
    assert message.startswith(f"daydream: {paths[1]}: its clock contradicts the others'")
    assert run(*paths, "--no-align").exit_code == 0


def test_a_file_of_another_job_is_refused(tmp_path: Path) -> None:
    documents = [document for _, document in recordings(SMALL)]
    for event in documents[1]["traceEvents"]:
        if "Collective name" in event["args"]:
            event["args"]["Collective name"] = "_all_gather_base"
    paths = _written(documents, tmp_path)
    assert refused(run(*paths)) == (
        f"daydream: {paths[1]}: its 4 collectives of group 0 do not fit the 4 of {paths[0]}; give traces of the same "
        "steps of one job\n"
    )


def test_a_rank_that_no_file_tells_is_asked_for(tmp_path: Path) -> None:
    documents = [document for _, document in recordings(SMALL)]
    documents[1]["distributedInfo"] = {}
    paths = _written(documents, tmp_path)
    nameless = paths[1].rename(tmp_path / "other.json.gz")
    nameless.write_bytes(gzip.compress(nameless.read_bytes()))
    assert refused(run(paths[0], nameless)) == (
        f"daydream: {nameless}: does not tell its rank; call the file rank0.json, or record with a process group\n"
    )
