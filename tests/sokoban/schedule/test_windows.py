"""Which schedules read their windows from registers, and what RATIONAL makes of that."""

from __future__ import annotations

from typing import Any

import numpy as np

from hal.catalog import load_device
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.language.operators import operator_from_data
from sokoban.model.gpu.breakdown import breakdown
from sokoban.schedule.table import ScheduleTable
from sokoban.schedule.tile import TileSchedule, sizes
from sokoban.schedule.windows import PATCH_STATEMENTS, has_windows, reads_patches, slide_of, slides, with_patches


def form_of(**data: Any) -> KernelForm:
    return kernel_form(operator_from_data(data))


DEPTHWISE = form_of(op="depthwise_conv2d", n=2, c=6, h=21, w=21, kh=5, kw=5, stride=2, padding="SAME")
MATMUL = form_of(op="matmul", m=8, n=8, k=8)


def patch(form: KernelForm = DEPTHWISE, *, own: int = 4, **changes: Any) -> TileSchedule:
    thread = {axis: own if axis == "oh" else 1 for axis in form.spatial}
    block = {**thread, form.spatial[-1]: 8}
    steps = {axis: form.sizes[axis] for axis in form.reduced}
    return TileSchedule(block=sizes(block), thread=sizes(thread), step=sizes(steps), unroll=PATCH_STATEMENTS).with_(
        **changes
    )


def test_a_schedule_asks_for_patches_by_staging_nothing_and_unrolling_all() -> None:
    assert has_windows(DEPTHWISE) and not has_windows(MATMUL)
    assert reads_patches(DEPTHWISE, patch())
    # 4 outputs with 25 points each.
    assert reads_patches(DEPTHWISE, patch(unroll=100)) and not reads_patches(DEPTHWISE, patch(unroll=99))
    assert not reads_patches(DEPTHWISE, patch(cached=("W",)))
    assert not reads_patches(DEPTHWISE, patch(step=sizes({"kh": 1, "kw": 5})))
    assert not reads_patches(MATMUL, TileSchedule(block=sizes({"m": 8, "n": 8}), thread=sizes({"m": 1, "n": 1})))


def test_a_thread_slides_along_the_dimension_in_which_its_windows_overlap() -> None:
    slide = slide_of(DEPTHWISE, patch().thread_of)
    assert slide is not None
    assert (slide.axis, slide.stride, slide.window, slide.dilation) == ("oh", 2, "kh", 1)
    image, weights = sorted(DEPTHWISE.body_loads, key=lambda load: load.tensor, reverse=True)
    assert slides(image, slide) and not slides(weights, slide)
    assert slide_of(DEPTHWISE, patch(own=1).thread_of) is None


def test_reads_are_counted_per_element_of_the_patch() -> None:
    """Four outputs below each other cover 3 * 2 + 5 rows of 5 elements; each by itself would read 25."""
    device = load_device("v100")
    schedules = [patch(), patch(own=1)]
    parts = breakdown(ScheduleTable.of(DEPTHWISE, schedules), PlacedForm(DEPTHWISE, device))
    image = next(load for load in DEPTHWISE.body_loads if load.tensor == "X")
    assert parts.step.reads[image].instructions.tolist() == [11 * 5, 25]


def test_search_unrolls_what_fits() -> None:
    small, large, staged = patch(unroll=64), patch(own=16, unroll=64), patch(unroll=64, cached=("X", "W"))
    large = large.with_(thread=sizes({**large.thread_of, "ow": 8}))
    table = with_patches(ScheduleTable.of(DEPTHWISE, [small, large, staged]))
    assert table.unroll.tolist() == [PATCH_STATEMENTS, 64, 64]
    plain = ScheduleTable.of(MATMUL, [TileSchedule(block=sizes({"m": 8, "n": 8}), thread=sizes({"m": 1, "n": 1}))])
    assert np.array_equal(with_patches(plain).unroll, plain.unroll)
