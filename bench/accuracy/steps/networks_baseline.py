"""What predicts a network's step without pricing kernels: a line, and DNNAbacus's features with gradient boosting.

Both are fitted on the networks that our constants were chosen on, mode by mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.accuracy.steps.network_rows import NetworkScore
from sokoban.schedule.table import Floats


def fitted_line(scores: Sequence[NetworkScore]) -> Floats:
    """Seconds by a line through FLOPs and parameters, least squares of the relative errors."""
    measured = np.array([score.row.measured for score in scores])
    sides = np.array([(score.flops, score.parameters) for score in scores])
    predicted = np.zeros(len(scores))
    for kind in {score.row.kind for score in scores}:
        members = np.array([score.row.kind == kind for score in scores])
        chosen = members & np.array([score.row.chosen_on for score in scores])
        if not chosen.any():
            chosen = members
        logarithms = np.log(np.column_stack([sides, np.full(len(scores), np.e)]))
        line, *_ = np.linalg.lstsq(logarithms[chosen], np.log(measured[chosen]), rcond=None)
        predicted[members] = np.exp(logarithms[members] @ line)
    return predicted


def boosted(scores: Sequence[NetworkScore]) -> Floats:
    """Seconds by DNNAbacus (3.2): its nine features and the structure matrix, learned by gradient boosting.

    Channels of the input, learning rate and epochs are the same for all networks here; the optimizer is that of the
    mode. The logarithm of the time is learned, so that errors are relative ones.
    """
    from sklearn.ensemble import GradientBoostingRegressor

    names = sorted({pair for score in scores for pair in score.pairs})
    rows = [score.row for score in scores]
    features = np.array([
        (
            row.batch, row.image, 3, 0.1, 1, int(row.training), score.layers, score.flops, score.parameters,
            int(row.channels_last), *(score.pairs.get(name, 0) for name in names),
        )
        for score, row in zip(scores, rows, strict=True)
    ], dtype=np.float64)  # fmt: skip
    target = np.log([row.measured for row in rows])
    chosen = np.array([row.chosen_on for row in rows])
    if not chosen.any():
        chosen = ~chosen
    model = GradientBoostingRegressor(n_estimators=400, max_depth=5, learning_rate=0.05, subsample=0.7, random_state=0)
    model.fit(features[chosen], target[chosen])
    return np.asarray(np.exp(model.predict(features)), dtype=np.float64)
