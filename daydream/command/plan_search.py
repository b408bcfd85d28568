"""``daydream plan --search``: every way to divide a job, bounded on all cores, the best ones simulated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from daydream.command.engines import answers
from daydream.command.planning import board_of, calls_of, exchange_of, node_of, units_for
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.plan.search import Candidate, FittingPlan
    from daydream.plan.units import Units

#: Prints what is going on.
echo = partial(click.echo, err=True)

#: Samples of the micro-batches that are captured where more than two sizes are tried: others lie on the line through
#: them. (Of one sample PyTorch makes no copies that it makes of several.)
_CAPTURED = (2, 3)


class Captures:
    """Captured steps of candidates, each once.

    Args:
        model: as the user named it.
        device: the board's name.
        options: of the command.
        sizes: samples of the micro-batches that will be asked for.
    """

    def __init__(self, model: str, device: str, options: Mapping[str, Any], sizes: Collection[int] = ()) -> None:
        self._model, self._device, self._options = model, board_of(device), options
        self._derives = len(sizes) > len(_CAPTURED)
        self._units: dict[tuple[Any, ...], Units] = {}

    def __call__(self, candidate: Candidate) -> Units:
        """The step of a rank of a candidate.

        Raises:
            InputError: its tensor ranks cannot divide the model.
        """
        from daydream.capture.narrow import with_precision

        key = (*candidate.capturing, candidate.batch, candidate.precision)
        if key not in self._units:
            units = self._at(candidate, candidate.batch)
            capture = with_precision(units.capture, candidate.precision)
            self._units[key] = replace(units, capture=capture)
        return self._units[key]

    def _at(self, candidate: Candidate, batch: int) -> Units:
        from daydream.plan.batches import at_batch

        key = (*candidate.capturing, batch)
        if key not in self._units:
            units = None
            if self._derives and batch not in _CAPTURED:
                first, second = (self._at(candidate, each) for each in _CAPTURED)
                units = at_batch(first, second, batch)
            self._units[key] = units or units_for(
                self._model, self._device, candidate.layout, {**self._options, "context": candidate.layout.context},
                batch=batch, checkpoint=candidate.checkpoint, precision="16-bit",
            )  # fmt: skip
        return self._units[key]


def searched(
    model: str, where: tuple[str, str | None, int | None], ranks: int, rows: int, options: dict[str, Any]
) -> tuple[list[FittingPlan], int]:
    """Plans that fit, the fastest first, and how many were tried; ``where`` is board, node, and boards of it.

    Raises:
        InputError: nothing can be tried, or nothing fits.
    """
    from daydream.plan.experts import expert_counts
    from daydream.plan.layout import Layout
    from daydream.plan.search import Candidate, CandidateOutcome, SearchSpace, best, captures

    board, place = board_of(where[0]), node_of(board_of(where[0]), *where[1:])
    if options["global_batch"] is None:
        raise InputError("--search", "needs the samples of a step", "add --global-batch")
    base = Layout(tensor=options["tensor"], pipeline=options["pipeline"], **exchange_of(options))
    captured = Captures(model, where[0], options)
    uncut = captured(Candidate(layout=Layout(), batch=1, checkpoint="none", precision="16-bit"))
    checkpoints = ("none", "selective", "full") if options["checkpoint"] == "none" else (options["checkpoint"],)
    space = SearchSpace(
        ranks=ranks, global_batch=options["global_batch"], node=place, base=base, blocks=len(uncut.blocks),
        checkpoints=checkpoints, precisions=tuple(dict.fromkeys((options["precision"], *options["try_precision"]))),
        experts=expert_counts(uncut.capture), tokens=options["sequence"] or 0,
    )  # fmt: skip
    tried = list(space.candidates())
    if not tried:
        problem = f"{options['global_batch']} samples cannot be shared by {ranks} boards"
        raise InputError("--global-batch", problem, "choose a multiple of the boards")
    tried = _divisible(tried, captured)
    engine = {name: options.pop(name) for name in ("jobs", "resume")}
    groups = captures(tried)
    common = {"model": model, "device": where[0], "node": where[1], "boards": where[2], "options": options}
    parts = [common | {"candidates": [asdict(tried[each]) for each in places]} for places in groups.values()]
    done = answers(search_part, parts, progress=lambda words: echo(f"daydream: {words} kinds of ranks"), **engine)
    problems = [answer["problem"] for answer in done if "problem" in answer]
    for error in {str(each): each for each in (InputError(*problem) for problem in problems)}.values():
        if len(problems) == len(done):
            raise error
        echo(f"daydream: left out: {error}")
    limits = {
        place: CandidateOutcome(*pair)
        for places, answer in zip(groups.values(), done, strict=True) if "problem" not in answer
        for place, pair in zip(places, answer["bounds"], strict=True)
    }  # fmt: skip
    some = [tried[each] for each in limits]
    plans = best(some, list(limits.values()), captured, board, place, *calls_of(options), count=rows)
    return plans, len(some)


def _divisible(tried: list[Candidate], captured: Captures) -> list[Candidate]:
    """The candidates without those of tensor ranks where two of them cannot divide the model already.

    Raises:
        InputError: none is left.
    """
    several = min((each for each in tried if each.layout.tensor > 1), key=lambda each: each.layout.tensor, default=None)
    if several is None:
        return tried
    try:
        captured(several)
    except InputError as error:
        alone = [each for each in tried if each.layout.tensor == 1]
        if not alone:
            raise
        echo(f"daydream: left out: {error}")
        return alone
    return tried


def search_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """Bounds of seconds and bytes of all candidates of one kind of capture as JSON, or why it cannot be captured."""
    from daydream.plan.layout import Layout
    from daydream.plan.search import Candidate, bounds

    tried = [Candidate(**{**each, "layout": Layout(**each["layout"])}) for each in part["candidates"]]
    board, options = board_of(part["device"]), part["options"]
    place = node_of(board, part["node"], part["boards"])
    captured = Captures(part["model"], part["device"], options, {each.batch for each in tried})
    try:
        limits = bounds(tried, captured, board, place, *calls_of(options))
    except InputError as error:
        return {"problem": [error.field, error.problem, error.remedy]}
    return {"bounds": [list(each) for each in limits]}
