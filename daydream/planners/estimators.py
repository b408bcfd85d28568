"""PyTorch's estimators of a model's step that runs under ``FakeTensorMode``, with times of a board that is not there.

Both are used as PyTorch's own are, and ``torch.distributed._tools.ilp_utils`` and ``sac_ilp`` take them as such::

    estimator = RollerRuntimeEstimator("h100")
    with FakeTensorMode():
        model, batch = ...
        with estimator("operator-level-cost-model"):
            model(batch).sum().backward()
    estimator.display_modulewise_stats()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from daydream.planners.private import unsupported
from hal.support.errors import InputError

try:
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator
except ImportError as error:
    raise unsupported(error) from error

from daydream.planners.board import board_operators
from daydream.planners.times import OperatorTimes, dispatched_call

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

#: The one mode of PyTorch's estimators that asks a model; the other one measures on a GPU.
COST_MODEL = "operator-level-cost-model"


class RollerRuntimeEstimator(RuntimeEstimator):
    """Milliseconds of a step and of every module of it, forward and backward, on a board.

    Tensors may be on ``cpu`` or ``meta``; attention and dropout are the operators that they are on a board. What boards
    exchange counts nothing, as PyTorch's documentation of the class says.

    Args:
        device: a board's name or its spec.

    Attributes:
        times: of the board's operators.

    Raises:
        InputError: there is no such board.
    """

    def __init__(self, device: str | DeviceSpec) -> None:
        super().__init__()
        self.times = OperatorTimes(device)
        self._as_on_board = ExitStack()

    def __call__(self, estimate_mode_type: str = COST_MODEL) -> Self:
        """The estimator itself, for ``with``.

        Raises:
            InputError: the mode is another than ``operator-level-cost-model``.
        """
        check_mode(estimate_mode_type)
        super().__call__(estimate_mode_type)
        self._estimate = priced_run(self.times)
        return self

    def __enter__(self) -> Self:
        """Starts to estimate."""
        self._as_on_board.enter_context(board_operators())
        try:
            return super().__enter__()
        except BaseException:
            self._as_on_board.close()
            raise

    def __exit__(self, *error: Any) -> None:
        """Ends to estimate."""
        try:
            super().__exit__(*error)
        finally:
            self._as_on_board.close()


class RollerSACEstimator(SACEstimator):
    """Memory and time of what modules could recompute (selective activation checkpointing), on a board.

    Args:
        device: a board's name or its spec.

    Attributes:
        times: of the board's operators.

    Raises:
        InputError: there is no such board.
    """

    def __init__(self, device: str | DeviceSpec) -> None:
        super().__init__()
        self.times = OperatorTimes(device)
        self._as_on_board = ExitStack()

    def __call__(self, estimate_mode_type: str = COST_MODEL) -> Self:
        """The estimator itself, for ``with``.

        Raises:
            InputError: the mode is another than ``operator-level-cost-model``.
        """
        check_mode(estimate_mode_type)
        super().__call__(estimate_mode_type)
        self._estimate_runtime = priced_run(self.times)
        return self

    def __enter__(self) -> Self:
        """Starts to estimate."""
        self._as_on_board.enter_context(board_operators())
        try:
            return super().__enter__()
        except BaseException:
            self._as_on_board.close()
            raise

    def __exit__(self, *error: Any) -> None:
        """Ends to estimate."""
        try:
            super().__exit__(*error)
        finally:
            self._as_on_board.close()


def priced_run(times: OperatorTimes) -> Callable[..., tuple[Any, float]]:
    """A function that runs an operator without data and returns its result and its milliseconds."""

    def estimate(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Any, float]:
        result = operator(*args, **(kwargs or {}))
        return result, times.milliseconds(dispatched_call(operator, args, kwargs or {}, result))

    return estimate


def check_mode(mode: str) -> None:
    """Refuses modes that measure.

    Raises:
        InputError: the mode is another than ``operator-level-cost-model``.
    """
    if mode != COST_MODEL:
        raise InputError("estimate_mode_type", f"{mode!r} is not what a model can do", f"write {COST_MODEL!r}")
