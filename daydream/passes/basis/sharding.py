"""The order in which FSDP2 (PyTorch's ``fully_shard``) gathers a step's units, and how many lie gathered at a time.

A unit's parameters are gathered before its forward and before its backward pass, its gradients' sum is scattered behind
the latter, all on one communicator. As PyTorch 2.13 does it: a unit's gathering is called right before the unit, so
that the host's lead is what overlaps it; it begins no earlier than the unit two before it, whose parameters it
replaces. In the backward pass the next unit's is called before this one's computation, which it overlaps. Computation
two units behind a scattering waits for that. What no unit holds, the root's, is gathered first and scattered last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

#: Units whose gathered parameters, or whose gradients to be scattered, are held at a time.
HELD_UNITS = 2


class Gathering(NamedTuple):
    """A unit's gathering, all by place in the pass.

    Attributes:
        unit: whose parameters.
        caller: the unit before which the host calls it.
        behind: the unit whose computation it may begin with; negative where it waits for none.
    """

    unit: int
    caller: int
    behind: int


def forward_gatherings(units: int, ahead: int = 0) -> Iterator[Gathering]:
    """Gatherings of a forward pass in the order of their calls, `ahead` units before they are needed.

    >>> [tuple(each) for each in forward_gatherings(4)]
    [(0, 0, -2), (1, 1, -1), (2, 2, 0), (3, 3, 1)]
    """
    for unit, caller in _called(units, ahead):
        # What is called ahead is called behind the unit's own wait, which lets one unit more go.
        yield Gathering(unit, caller, unit - HELD_UNITS if unit == caller else caller - 1)


def backward_gatherings(units: int, ahead: int = 1) -> Iterator[Gathering]:
    """Gatherings of a backward pass in the order of their calls, units in the order of that pass.

    >>> [tuple(each) for each in backward_gatherings(3)]
    [(0, 0, -1), (1, 0, 0), (2, 1, 1)]
    """
    for unit, caller in _called(units, ahead):
        yield Gathering(unit, caller, caller if unit > caller else -1)


def _called(units: int, ahead: int) -> Iterator[tuple[int, int]]:
    """Every unit with that before which it is called."""
    called = 0
    for caller in range(units):
        for unit in range(called, min(caller + ahead, units - 1) + 1):
            yield unit, caller
            called = unit + 1
