"""Random schedules of small operators, for tests of what is computed from them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.tile import TileSchedule


def form_of(**operator: Any) -> KernelForm:
    """The canonical form of an operator given as keywords."""
    return kernel_form(operator_from_data(operator))


def matmul_schedule(
    block: tuple[int, int], thread: tuple[int, int], step: int, *, vthreads: tuple[int, int] = (1, 1), **more: Any
) -> TileSchedule:
    """A schedule of ``C[m, n] = sum(k, A[m, k] * B[k, n])``, both operands staged."""
    return TileSchedule(
        block=(("m", block[0]), ("n", block[1])),
        thread=(("m", thread[0]), ("n", thread[1])),
        vthreads=(("m", vthreads[0]), ("n", vthreads[1])),
        step=(("k", step),),
        cached=more.pop("cached", ("A", "B")),
        **more,
    )


@st.composite
def schedules(draw: st.DrawFn, form: KernelForm, max_threads: int = 1024) -> TileSchedule:
    """Any schedule whose blocks divide into threads; every operand staged, some of them padded."""
    block, thread, vthreads, left = {}, {}, {}, max_threads
    for axis in form.spatial:
        thread[axis] = draw(st.sampled_from([1, 1, 2, 3, 4]))
        vthreads[axis] = draw(st.sampled_from([1, 1, 2, 3]))
        threads = draw(st.integers(1, min(left, 40)))
        left //= threads
        block[axis] = thread[axis] * vthreads[axis] * threads
    names = tuple(dict.fromkeys(load.tensor for load in form.body_loads))
    return TileSchedule(
        block=tuple(block.items()),
        thread=tuple(thread.items()),
        vthreads=tuple(vthreads.items()),
        step=tuple((axis, draw(st.integers(1, form.sizes[axis]))) for axis in form.reduced),
        cached=names,
        padding=tuple((name, draw(st.integers(0, 9))) for name in names if draw(st.booleans())),
    )
