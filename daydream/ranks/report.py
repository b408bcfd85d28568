"""Findings in merged ranks, for people and programs: stragglers, skew, exposed communication, an even load, clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from daydream.graph.graph import Mark
from daydream.graph.simulate import Timeline
from daydream.ranks.causes import RankCause, SlowGroup, rank_causes, slow_groups
from daydream.ranks.collectives import Kind
from daydream.ranks.equal import simulate_ranks
from daydream.ranks.even import even_load
from daydream.ranks.merge import Merged
from daydream.ranks.skew import GroupTimes, RankTimes, attended, group_times, rank_times, skews, step_lengths_by_rank
from daydream.report.analysis import seconds
from daydream.report.breakdown import chosen_steps
from daydream.trace.trace import Floats

#: Ranks that hold the others up for less than this share of a step are no stragglers.
STRAGGLES = 0.01


@dataclass(frozen=True, kw_only=True)
class Skew:
    """A collective to which ranks came apart. Times are microseconds."""

    group: str
    step: str
    name: str
    last: int
    skew_us: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Findings:
    """A replayed job. Times are microseconds, means of the steps.

    Attributes:
        merged: the ranks.
        timeline: their replay.
        steps: indices of the steps that the figures are about.
        ranks: by rank, in order.
        groups: by process group, that with most communication first.
        worst: collectives to which ranks came most apart, the worst first.
        step_us: length of a step, mean of the ranks.
        even_us: under an even load, mean of the ranks.
        error: of the replay: mean over ranks and steps of its distance from the measured length, as a share of it.
        error_as_recorded: with clocks taken as they are; NaN where that was not asked for.
        causes: why ranks hold the others up, by rank; without those that are late for several reasons.
        slow: process groups whose data moves slower than that of their likes.
    """

    merged: Merged
    timeline: Timeline
    steps: tuple[int, ...]
    ranks: list[RankTimes]
    groups: list[GroupTimes]
    worst: list[Skew]
    step_us: float
    even_us: float
    error: float
    error_as_recorded: float = float("nan")
    causes: dict[int, RankCause] = field(default_factory=dict)
    slow: list[SlowGroup] = field(default_factory=list)

    @property
    def stragglers(self) -> list[RankTimes]:
        """Ranks that hold the others up, the worst first."""
        return _stragglers(self.ranks, self.step_us)


def _stragglers(ranks: Sequence[RankTimes], step_us: float) -> list[RankTimes]:
    late = [rank for rank in ranks if rank.held_up_us > STRAGGLES * step_us]
    return sorted(late, key=lambda rank: -rank.held_up_us)


def findings(merged: Merged, step: int | None = None, *, as_recorded: Merged | None = None, rows: int = 10) -> Findings:
    """Everything that tables say of a merged job.

    Args:
        merged: the ranks.
        step: only ``ProfilerStep#N``, else the N-th; None is all full ones.
        as_recorded: the same ranks without alignment, to compare the errors.
        rows: of the table of skews, at most.

    Raises:
        InputError: there is no such step.
    """
    graph = merged.graph
    steps = chosen_steps(graph, step)
    timeline = simulate_ranks(graph)
    even = simulate_ranks(even_load(graph))
    ranks, groups = rank_times(timeline, steps), group_times(timeline, steps)
    step_us = _mean(step_lengths_by_rank(timeline), steps)
    late = [rank.rank for rank in _stragglers(ranks, step_us)]
    return Findings(
        merged=merged,
        timeline=timeline,
        steps=steps,
        ranks=ranks,
        groups=groups,
        worst=_worst(timeline, steps, rows),
        step_us=step_us,
        even_us=_mean(step_lengths_by_rank(even), steps),
        error=replay_error(merged, timeline, steps),
        error_as_recorded=(
            float("nan") if as_recorded is None else replay_error(as_recorded, simulate_ranks(as_recorded.graph), steps)
        ),
        causes=rank_causes(timeline, steps, late),
        slow=slow_groups(groups),
    )


def replay_error(merged: Merged, timeline: Timeline, steps: Sequence[int]) -> float:
    """Mean over ranks and steps of how far a step's replay is from its measured length, as a share of it."""
    measured = merged.measured_us[:, list(steps)]
    replayed = step_lengths_by_rank(timeline)[:, list(steps)]
    is_measured = np.isfinite(measured) & np.isfinite(replayed) & (measured > 0)
    return (
        float(np.abs(replayed[is_measured] / measured[is_measured] - 1.0).mean()) if is_measured.any() else float("nan")
    )


def _mean(lengths: Floats, steps: Sequence[int]) -> float:
    chosen = lengths[:, list(steps)]
    return float(np.nanmean(chosen)) if np.isfinite(chosen).any() else float("nan")


def _worst(timeline: Timeline, steps: Sequence[int], rows: int) -> list[Skew]:
    graph = timeline.graph
    came = attended(timeline)
    meeting, last, skew, _ = skews(came)
    task = {row: place for row, place in zip(came.meeting.tolist(), came.task.tolist(), strict=True)}
    marked = bool((graph.mark != Mark.NONE).any())
    worst = []
    for place in np.argsort(-skew, kind="stable").tolist():
        row = task[int(meeting[place])]
        step = int(graph.step[row])
        if marked and step not in steps:
            continue
        worst.append(
            Skew(
                group=graph.threads[graph.thread[meeting[place]]].label.removeprefix("group "),
                step=graph.steps[step].name if step >= 0 else "",
                name=graph.text(row),
                last=graph.ranks[last[place]],
                skew_us=float(skew[place]),
            )
        )
        if len(worst) == rows:
            break
    return worst


# For programs


def findings_record(result: Findings) -> dict[str, Any]:
    """The findings as JSON: times in seconds, mean of the steps."""
    merged = result.merged
    kinds = [Kind(kind).text for kind in np.unique(merged.meetings.kind).tolist()]
    return {
        "ranks": len(merged.graph.ranks),
        "steps": [merged.graph.steps[index].name for index in result.steps],
        "collectives": merged.meetings.count,
        "kinds": kinds,
        "left_alone": int(merged.meetings.alone.sum()),
        "step_seconds": seconds(result.step_us),
        "even_load_seconds": seconds(result.even_us),
        "replay_error": _rounded(result.error),
        "replay_error_as_recorded": _rounded(result.error_as_recorded),
        "stragglers": [rank.rank for rank in result.stragglers],
        "by_rank": [
            {
                "rank": rank.rank,
                "file": str(path),
                "step_seconds": seconds(rank.step_us),
                "work_seconds": seconds(rank.work_us),
                "moving_seconds": seconds(rank.moving_us),
                "waiting_seconds": seconds(rank.waited_us),
                "last": _rounded(rank.last),
                "holds_up_seconds": seconds(rank.held_up_us),
                **_cause_record(result.causes.get(rank.rank)),
            }
            for rank, path in zip(result.ranks, merged.paths, strict=True)
        ],
        "by_group": [
            {
                "group": group.name,
                "ranks": group.ranks,
                "collectives": _rounded(group.count),
                "bytes": None if np.isnan(group.bytes) else round(group.bytes),
                "moving_seconds": seconds(group.moving_us),
                "waiting_seconds": seconds(group.waited_us),
                "exposed_seconds": seconds(group.exposed_us),
                "exposed": _rounded(group.exposed),
                "skew_seconds": seconds(group.skew_us),
            }
            for group in result.groups
        ],
        "slow_links": [
            {"group": each.name, "bytes_per_second": round(each.rate), "usual_bytes_per_second": round(each.usual)}
            for each in result.slow
        ],
        "worst": [
            {
                "group": each.group,
                "step": each.step,
                "name": each.name,
                "last": each.last,
                "skew_seconds": seconds(each.skew_us),
            }
            for each in result.worst
        ],
        "clocks": [
            {
                "host": host,
                "offset_seconds": seconds(float(merged.clocks.offset_us[index])),
                "drift": float(f"{merged.clocks.drift[index]:.3g}"),
                "jitter_seconds": seconds(float(merged.clocks.jitter_us[index])),
            }
            for index, host in enumerate(merged.clocks.hosts)
        ],
    }


def _cause_record(cause: RankCause | None) -> dict[str, Any]:
    if cause is None:
        return {"cause": None, "cause_seconds": None}
    return {"cause": cause.cause.text, "cause_seconds": seconds(cause.without_us)}


def _rounded(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None


# For people


def print_findings(result: Findings, rows: int) -> None:
    """Tables of the ranks that stand out, the groups, the worst skews and the clocks."""
    from daydream.report.tables import ms, number, percent, table
    from hal.support.tables import print_line, print_table

    merged = result.merged
    print_line(_headline(result))
    print_line()
    ranks = table(
        "Ranks, ms per step", "rank", "step", "works", "moves data", "waits", "last to come", "holds up", "because"
    )
    shown = sorted(result.ranks, key=lambda rank: -rank.held_up_us)[:rows]
    for rank in shown:
        ranks.add_row(
            str(rank.rank), ms(rank.step_us), ms(rank.work_us), ms(rank.moving_us), ms(rank.waited_us),
            percent(rank.last), ms(rank.held_up_us), because(result, rank),
        )  # fmt: skip
    print_table(ranks)
    if len(result.ranks) > rows:
        print_line(f"{len(result.ranks) - rows} ranks more hold the others up for less")
    print_line()
    groups = table(
        "Process groups, ms per step and rank",
        "group", "ranks", "collectives", "MB", "moving", "waiting", "exposed", "of it", "skew",
    )  # fmt: skip
    for group in result.groups[:rows]:
        groups.add_row(
            _text(group.name), str(group.ranks), f"{group.count:g}", number(group.bytes / 1e6), ms(group.moving_us),
            ms(group.waited_us), ms(group.exposed_us), percent(group.exposed), ms(group.skew_us),
        )  # fmt: skip
    print_table(groups)
    print_line()
    worst = table("Collectives that ranks came to most apart", "collective", "group", "step", "last", "apart, ms")
    for each in result.worst[: min(rows, 5)]:
        worst.add_row(_text(each.name), _text(each.group), _text(each.step), str(each.last), ms(each.skew_us))
    print_table(worst)
    if len(merged.clocks.hosts) > 1:
        print_line()
        clocks = table("Clocks", "host", "behind, us", "drift, us/s", "jitter, us")
        for index, host in enumerate(merged.clocks.hosts[:rows]):
            clocks.add_row(
                _text(host), number(merged.clocks.offset_us[index]), number(merged.clocks.drift[index] * 1e6),
                number(merged.clocks.jitter_us[index]),
            )  # fmt: skip
        print_table(clocks)
    print_line()
    for sentence in conclusions(result):
        print_line(sentence)


def because(result: Findings, rank: RankTimes) -> str:
    """Why a rank holds the others up; a dash for one that does not, or for several reasons."""
    cause = result.causes.get(rank.rank)
    return "-" if cause is None else cause.cause.text


def _text(text: str) -> Any:
    """A cell without markup: names hold brackets."""
    from rich.text import Text

    from daydream.report.tables import short

    return Text(short(text))


def _headline(result: Findings) -> str:
    merged = result.merged
    hosts = len(merged.clocks.hosts)
    return (
        f"{len(merged.graph.ranks)} ranks with {hosts} clock{'' if hosts == 1 else 's'}, "
        f"{merged.meetings.count} collectives, {len(merged.graph)} tasks"
    )


def _late_text(rank: RankTimes, result: Findings) -> str:
    """A rank that holds the others up, for how long, and why."""
    from daydream.report.tables import ms

    cause = result.causes.get(rank.rank)
    why = "for several reasons" if cause is None else f"{cause.cause.text} {ms(cause.without_us)}"
    return f"{rank.rank} ({ms(rank.held_up_us)} ms, {why})"


def conclusions(result: Findings) -> list[str]:
    """Conclusions from the figures, a sentence each."""
    from daydream.report.tables import ms, percent

    merged = result.merged
    sentences = [f"step {ms(result.step_us)} ms, replayed within {percent(result.error)}"]
    if np.isfinite(result.error_as_recorded):
        sentences[0] += f" (with clocks as recorded: {percent(result.error_as_recorded)})"
    late = result.stragglers
    if late:
        named = ", ".join(_late_text(rank, result) for rank in late[:5])
        more = f" and {len(late) - 5} more" if len(late) > 5 else ""
        sentences.append(f"ranks that hold the others up: {named}{more}")
    else:
        sentences.append(f"no rank holds the others up for {percent(STRAGGLES)} of a step")
    for group in result.slow[:5]:
        rates = f"{group.rate / 1e9:.3g} GB/s a rank, groups like it {group.usual / 1e9:.3g}"
        sentences.append(f"slow link: group {group.name} moves {rates}")
    saved = result.step_us - result.even_us
    sentences.append(f"under an even load {ms(result.even_us)} ms: {percent(saved, result.step_us)} less")
    unmet = [
        host for host, jitter in zip(merged.clocks.hosts, merged.clocks.jitter_us, strict=True) if jitter != jitter
    ]
    if result.merged.aligned and unmet and len(merged.clocks.hosts) > 1:
        sentences.append(f"clocks as recorded, since they met no other: {', '.join(unmet[:5])}")
    alone = int(result.merged.meetings.alone.sum())
    if alone:
        sentences.append(f"{alone} collectives were recorded on some of their ranks only, and stay as they are")
    return sentences
