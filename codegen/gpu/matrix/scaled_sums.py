"""Sums of a step by ``mma.sync`` that are scaled on their way to those of all steps.

Products of a step are summed in registers of their own. Behind the last of them every lane adds what it has, multiplied
by the scale of its row in this step, which it has read while they were multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import mul

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from codegen.gpu.matrix.copied import CopiedProduct
from codegen.tir.reads import read_in_place
from codegen.tir.statements import allocate, named
from codegen.tir.values import Expr
from sokoban.kernel.matrix import FRAGMENT

#: Rows of a fragment whose sums a lane has.
LANE_ROWS = 2


class ScaledSums:
    """Sums of a step, and the scales of their rows.

    Attributes:
        products: the sums of a step, laid out as those of all steps are.
    """

    def __init__(self, kernel: CopiedProduct, first_row: Expr) -> None:
        """``first_row`` is that of the warp in its block."""
        self.kernel, self.first_row = kernel, first_row
        self.products = allocate("products", kernel.sum_count, "float32", "local")
        self.scales = allocate("scales", kernel.plan.fragments_m * LANE_ROWS, "float32", "local")

    @contextmanager
    def of_step(self, step: Expr) -> Iterator[None]:
        """Statements that sum the products of a step come in between."""
        with named(T.unroll, self.kernel.sum_count, "position") as position:
            T.buffer_store(self.products, tirx.const(0, "float32"), [position])
        self._read(step)
        yield
        self._add()

    def _read(self, step: Expr) -> None:
        """The scales of a lane's rows."""
        kernel, roles = self.kernel, self.kernel.roles
        ranges = {**kernel.form.sizes, **kernel.plan.padded}
        origin = {**kernel.origin, **kernel.step_origin(step)}
        with named(T.unroll, kernel.plan.fragments_m, "i") as i, named(T.unroll, LANE_ROWS, "half") as half:
            row = origin[roles.m] + self.first_row + i * FRAGMENT + self._row(half)
            scales = (
                read_in_place(
                    load, kernel.plan.tensors, kernel.block.buffers, {**origin, roles.m: row}, ranges,
                    bounds=kernel.plan.bounds,
                )
                for load in roles.scales
            )  # fmt: skip
            T.buffer_store(self.scales, reduce(mul, scales), [i * LANE_ROWS + half])

    def _row(self, half: Expr) -> Expr:
        """The row of a fragment that a lane has in its upper or lower half."""
        row = self.kernel.lane // 4
        return row * LANE_ROWS + half if self.kernel.has_interleaved_rows else row + half * (FRAGMENT // LANE_ROWS)

    def _add(self) -> None:
        """The sums of the step, scaled, to those of all steps."""
        kernel = self.kernel
        # Adjacent sums of a lane: of two columns, or of four where two products have every other column each.
        adjacent = 4 if kernel.roles.is_interleaved else 2
        fragment = kernel.sum_count // kernel.plan.fragments_m
        with named(T.unroll, kernel.sum_count, "position") as position:
            scale = self.scales[position // fragment * LANE_ROWS + position // adjacent % LANE_ROWS]
            T.buffer_store(kernel.sums, kernel.sums[position] + scale * self.products[position], [position])
