"""Answers of ``daydream serve`` for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from daydream.report.tables import percent, table
from daydream.serving.search import SearchOutcome
from daydream.serving.served import PERCENTILES, Served
from hal.support.tables import new_table, print_line, print_table


def configuration(each: Served) -> str:
    """Boards and limits in a few words: ``2 x (4 h200), at most 64 sequences``."""
    prompts = "" if each.prompts is None else f" and {_boards(each.prompts.served)} for prompts"
    return f"{_boards(each)}{prompts}, at most {each.costs.engine.sequences} sequences"


def _boards(each: Served) -> str:
    engine = each.costs.engine
    boards = f"{engine.boards} {each.costs.device.name}"
    if engine.groups > 1:
        boards += f" in {engine.groups} groups"
    return f"{each.replicas} x ({boards})" if each.replicas > 1 else boards


def print_served(each: Served) -> None:
    """One simulation: what users see, and what the boards do."""
    print_line(f"{each.costs.model.title} on {configuration(each)}: {len(each.arrived):,} requests")
    print_line()
    print_table(_seen(each))
    record = each.record()
    print_line()
    print_line(
        f"{record['output_tokens_per_second']:,.0f} tokens/s, {each.tokens_per_second / each.boards:,.0f} a board,"
        f" {record['requests_per_second']:.3g} requests/s; {record['mean_sequences']:.0f} sequences in an iteration,"
        f" {record['iterations']:,} iterations, {record['preemptions']:,} sequences preempted"
    )
    busy, peak = percent(record["busy_share"]), percent(record["cache_share_at_peak"])
    print_line(
        f"boards busy for {busy}; {record['weight_bytes'] / 1e9:.1f} GB of weights a board leave room for"
        f" {record['cache_tokens']:,} tokens of keys and values, {peak} of it used at the peak"
    )
    if each.prompts is not None:
        carry, prompts = 1e3 * each.prompts.seconds, each.prompts.served
        print_line(
            f"{prompts.boards} boards for prompts busy for {percent(prompts.busy_share)}; keys and values of a prompt"
            f" are there after {carry.mean():,.1f} ms (p99 {np.percentile(carry, 99):,.1f}) by {each.prompts.link}"
        )
    for sentence in each.assumed:
        print_line(f"assumed: {sentence}")


def _seen(each: Served) -> Table:
    view = new_table(("ms",), ("mean", *(f"p{percentile}" for percentile in PERCENTILES)))
    rows = (("first token (TTFT)", each.ttft), ("further tokens (TPOT)", each.tpot), ("last token", each.latency))
    for name, times in rows:
        cells = [times.mean(), *(np.percentile(times, each) for each in PERCENTILES)] if len(times) else []
        view.add_row(name, *(_ms(float(cell)) for cell in cells))
    view.add_row("gap between tokens", "", *(_ms(each.gap(percentile)) for percentile in PERCENTILES))
    return view


def print_outcome(outcome: SearchOutcome, percentile: float, rows: int) -> None:
    """The cheapest configurations that keep a promise."""
    title = (
        f"{outcome.best[0].costs.model.title}: {len(outcome.best)} of {len(outcome.tried)} simulated keep the promise"
    )
    view = table(title, *columns(outcome, percentile))
    for each in outcome.best[:rows]:
        first, *cells = line(outcome, each, percentile)
        view.add_row(Text(first), *cells)
    print_table(view, drop=("tokens/s a user", "tokens/s a board"))
    for sentence in outcome.best[0].assumed:
        print_line(f"assumed: {sentence}")


def columns(outcome: SearchOutcome, percentile: float) -> Sequence[str]:
    """Headers of :func:`line`."""
    at = f" p{percentile:g} ms"
    price = "an hour" if outcome.hourly else "boards"
    return ("configuration", price, f"TTFT{at}", f"TPOT{at}", "tokens/s a board", "tokens/s a user")


def line(outcome: SearchOutcome, each: Served, percentile: float) -> Sequence[str]:
    """A configuration: its price, what is promised, and tokens a second of boards and users."""
    times = (_ms(float(np.percentile(times, percentile))) if len(times) else "-" for times in (each.ttft, each.tpot))
    return (
        configuration(each), f"{outcome.price(each):g}", *times, f"{each.tokens_per_second / each.boards:,.0f}",
        f"{each.user_tokens_per_second:,.1f}",
    )  # fmt: skip


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds < 10 else f"{1e3 * seconds:,.0f}"
