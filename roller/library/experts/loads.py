"""Tokens over experts: how many each expert of the busiest board gets, and how many tiles of rows that makes.

Uniform: tokens take experts in turn. Power law: expected shares are drawn from ``p(x) ~ x^-a``, one from each of as
many equal parts of the distribution as there are experts; what rounding leaves goes to the least loaded of each board
in turn, as AIConfigurator's collectors route (``_generate_power_law_distribution`` of ``collector/helper.py``), or with
``power_law_1.2_in_order`` to the experts in the order of their load as an older version of it did (commit 526f823b), so
that few tokens meet on one board.
Draws are those of a fixed seed: the same layer has the same loads always.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from roller.library.arrays import Ints
from sokoban.language.layers import exponent, is_in_order

#: Sides of tiles along the tokens that the summaries count.
TILE_ROWS = (8, 16, 32, 64, 128, 256)

#: Draws whose means are taken.
DRAWS = 3

#: A power law reaches from one token to this share of all that an expert may get, or where experts are more than what
#: tokens ask for, between these expected numbers.
_MOST_SHARE, _RARE = 0.8, (0.01, 2.0)


@dataclass(frozen=True)
class Loads:
    """Work of the busiest board as a layer of experts routes its tokens; means over draws.

    Attributes:
        pairs: tokens times their experts, of the experts of this board.
        active: experts with a token.
        tiles: tiles of rows of experts of this board, by :data:`TILE_ROWS`.
        empty_tiles: of experts of other boards, which kernels with a map of experts visit and fill with zeros.
    """

    pairs: float
    active: float
    tiles: tuple[float, ...]
    empty_tiles: tuple[float, ...]

    @property
    def sizes(self) -> tuple[float, ...]:
        """All numbers in a row: pairs, active, tiles, empty tiles."""
        return (self.pairs, self.active, *self.tiles, *self.empty_tiles)


def loads_of(sizes: tuple[int, ...]) -> Loads:
    """Loads of groups of given sizes, all on one board."""
    return _summary([(np.array(sizes), np.array(sizes))])


@lru_cache(maxsize=65_536)
def loads(tokens: int, experts: int, top_k: int, distribution: str, boards: int) -> Loads:
    """Loads of the busiest of ``boards`` that share ``experts``, of ``tokens`` with ``top_k`` experts each.

    >>> loads(64, 8, 2, "uniform", 4).pairs
    32.0
    """
    alpha = exponent(distribution)
    here = max(1, experts // boards)
    if alpha is None:
        counts = _uniform(tokens, experts, top_k)
        return _summary([(counts[:here], counts)])
    draws = []
    generator = np.random.default_rng(0)
    for _ in range(DRAWS):
        counts = _power_law(tokens, experts, top_k, alpha, generator)
        if is_in_order(distribution):
            counts = _in_order(counts, tokens * top_k, tokens)
        counts = counts[: here * boards].reshape(boards, here)
        if not is_in_order(distribution):
            counts = _balanced(counts, tokens * top_k, tokens)
        draws.append((counts[np.argmax(counts.sum(axis=1))], counts.ravel()))
    return _summary(draws)


def _uniform(tokens: int, experts: int, top_k: int) -> Ints:
    """Token i takes the experts i, i + s, i + 2 s ... for s = experts / top_k, around; fewer than s, evenly apart."""
    stride = -(-experts // top_k)
    firsts = np.arange(tokens)
    if tokens < stride:
        firsts = firsts * stride // tokens
    counts = np.bincount(firsts % stride, minlength=stride)
    return np.asarray(counts[np.arange(experts) % stride])


def _power_law(tokens: int, experts: int, top_k: int, alpha: float, generator: np.random.Generator) -> Ints:
    """Rounded expected tokens of every expert, in an order by chance; the sum may be a little off."""
    pairs = tokens * top_k
    low, high = (1.0, max(1.0, _MOST_SHARE * tokens)) if pairs > experts else _RARE
    place = (np.arange(experts) + generator.random(experts)) / experts
    # 1 has a logarithm for its integral; next to it the powers serve.
    power = 1 - alpha if alpha != 1 else 1e-9
    shares = ((high**power - low**power) * place + low**power) ** (1 / power)
    counts = np.minimum(np.round(shares / shares.sum() * pairs), tokens).astype(np.int64)
    return counts[generator.permutation(experts)]


def _in_order(counts: Ints, pairs: int, most: int) -> Ints:
    """Counts with the sum ``pairs``: the least loaded experts get one each, in as many rounds as it takes.

    Of equal ones those behind are first. Where there are too many, they give one each, and the busiest what those
    without any cannot.

    >>> _in_order(np.array([0, 3, 0, 0]), 5, 9).tolist()
    [0, 3, 1, 1]
    """
    missing = int(pairs - counts.sum())
    order = np.argsort(-counts, kind="stable")[::-1]
    changed = counts.copy()
    while missing > 0:
        lucky = order[changed[order] < most][:missing]
        changed[lucky] += 1
        missing -= len(lucky)
    if missing < 0:
        givers = order[:-missing]
        changed[givers[changed[givers] > 0]] -= 1
        changed[np.argmax(changed)] -= changed.sum() - pairs
    return changed


def _balanced(counts: Ints, pairs: int, most: int) -> Ints:
    """Counts (boards, experts of a board) with the sum ``pairs``: boards take turns at what is missing or too much."""
    missing = int(pairs - counts.sum())
    boards = len(counts)
    shares = abs(missing) // boards + (np.arange(boards) < abs(missing) % boards)
    if missing >= 0:
        return np.stack([np.minimum(_raised(row, share), most) for row, share in zip(counts, shares, strict=True)])
    return np.stack([np.maximum(-_raised(-row, share), 0) for row, share in zip(counts, shares, strict=True)])


def _raised(counts: Ints, amount: int) -> Ints:
    """Counts whose least are raised to one level, ``amount`` added in all.

    >>> _raised(np.array([5, 0, 1]), 4).tolist()
    [5, 3, 2]
    """
    ordered = np.sort(counts)
    needed = np.arange(1, len(ordered) + 1) * ordered - np.cumsum(ordered)
    raised = int(np.searchsorted(needed, amount, side="right"))
    level, over = divmod(int(ordered[:raised].sum()) + int(amount), raised)
    out = np.maximum(counts, level)
    out[np.flatnonzero(counts <= level)[:over]] += 1
    return out


def _summary(draws: list[tuple[Ints, Ints]]) -> Loads:
    def tiles(counts: Ints) -> list[float]:
        return [float(np.ceil(counts / rows).sum()) for rows in TILE_ROWS]

    mine = np.mean([tiles(here) for here, _ in draws], axis=0)
    everybody = np.mean([tiles(counts) for _, counts in draws], axis=0)
    return Loads(
        float(np.mean([here.sum() for here, _ in draws])),
        float(np.mean([(here > 0).sum() for here, _ in draws])),
        tuple(mine.tolist()),
        tuple((everybody - mine).tolist()),
    )
