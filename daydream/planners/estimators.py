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

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from daydream.planners.private import unsupported
from hal.support.errors import InputError

try:
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator, SACStats
except ImportError as error:
    raise unsupported(error) from error

from daydream.planners.board import board_operators
from daydream.planners.times import Call, OperatorTimes, dispatched_call

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec

Entered = TypeVar("Entered")

#: The one mode of PyTorch's estimators that asks a model; the other one measures on a GPU.
COST_MODEL = "operator-level-cost-model"


class OnBoard:
    """Base of both estimators: the operators of a board that need not be there, and their times.

    Args:
        device: a board's name or its spec.

    Attributes:
        times: of the board's operators.

    Raises:
        InputError: there is no such board, or it runs no library whose kernels are modelled.
    """

    def __init__(self, device: str | DeviceSpec) -> None:
        super().__init__()
        self.times = OperatorTimes(device)
        self._as_on_board = ExitStack()


class RollerRuntimeEstimator(OnBoard, RuntimeEstimator):
    """Milliseconds of a step and of every module of it, forward and backward, on a board.

    Tensors may be on ``cpu`` or ``meta``; attention and dropout are the operators that they are on a board. What boards
    exchange counts nothing, as PyTorch's documentation of the class says. Times stand when the ``with`` block ends: all
    operators are priced together then.
    """

    def __init__(self, device: str | DeviceSpec) -> None:
        super().__init__(device)
        # Call, modules around it, whether in the backward pass -> how often.
        self._calls: Counter[tuple[Call | None, frozenset[str], bool]] = Counter()

    def __call__(self, estimate_mode_type: str = COST_MODEL) -> Self:
        """The estimator itself, for ``with``.

        Raises:
            InputError: the mode is another than ``operator-level-cost-model``.
        """
        check_mode(estimate_mode_type)
        return super().__call__(estimate_mode_type)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs an operator without data and notes its call."""
        result, call = noted_run(func, args, kwargs)
        self._calls[call, frozenset(self._mod_tracker.parents), self._mod_tracker.is_bw] += 1
        return result

    def __enter__(self) -> Self:
        """Starts to take notes."""
        self._calls.clear()
        return entered(self._as_on_board, super().__enter__)

    def __exit__(self, *error: Any) -> None:
        """Prices what was noted, prints the step's time as PyTorch does, and stops to take notes."""
        with self._as_on_board:
            if error[0] is None:
                self._sum_up()
            super().__exit__(*error)

    def _sum_up(self) -> None:
        self.times.price(call for call, _, _ in self._calls)
        for (call, modules, backward), times in self._calls.items():
            milliseconds = times * self.times.milliseconds(call)
            for module in modules:
                self.mod_runtimes[module]["bw" if backward else "fw"] += milliseconds
            self.total_runtime += milliseconds


class RollerSACEstimator(OnBoard, SACEstimator):
    """Memory and time of what modules could recompute (selective activation checkpointing), on a board."""

    def __call__(self, estimate_mode_type: str = COST_MODEL) -> Self:
        """The estimator itself, for ``with``.

        Raises:
            InputError: the mode is another than ``operator-level-cost-model``.
        """
        check_mode(estimate_mode_type)
        super().__call__(estimate_mode_type)
        # What PyTorch takes for a time is the call, until the module ends and all of its calls are priced together.
        self._estimate_runtime = cast(Any, noted_run)
        return self

    def _get_sac_stats(self, data: list[Any], force_store_random: bool) -> SACStats:
        calls = [operator.time_taken for operator in data]
        self.times.price(calls)
        times = map(self.times.milliseconds, calls)
        priced = [replace(operator, time_taken=time) for operator, time in zip(data, times, strict=True)]
        return super()._get_sac_stats(priced, force_store_random)

    def __enter__(self) -> Self:
        """Starts to take notes."""
        return entered(self._as_on_board, super().__enter__)

    def __exit__(self, *error: Any) -> None:
        """Stops to take notes."""
        with self._as_on_board:
            super().__exit__(*error)


def noted_run(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Any, Call | None]:
    """The result of an operator on tensors without data, and its call; None where it launches nothing."""
    result = operator(*args, **(kwargs or {}))
    return result, dispatched_call(operator, args, kwargs or {}, result)


def entered(stack: ExitStack, enter: Callable[[], Entered]) -> Entered:
    """Result of ``enter``; from then on operators are those of a board until the stack is closed."""
    stack.enter_context(board_operators())
    try:
        return enter()
    except BaseException:
        stack.close()
        raise


def check_mode(mode: str) -> None:
    """Refuses modes that measure.

    Raises:
        InputError: the mode is another than ``operator-level-cost-model``.
    """
    if mode != COST_MODEL:
        raise InputError("estimate_mode_type", f"{mode!r} is not what a model can do", f"write {COST_MODEL!r}")
