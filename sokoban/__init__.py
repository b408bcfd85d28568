"""Tensor expressions, tile schedules and the RATIONAL cost model (thesis chapter 5).

Names are imported when they are first used: code generation needs expressions and schedules, and no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.support.lazy import imported_on_use

if TYPE_CHECKING:
    from sokoban.kernel.form import KernelForm, kernel_form
    from sokoban.kernel.regions import compute_workload, data_dimension, memory_footprint, subtensor_sizes
    from sokoban.language.expression import Axis, Load, Reduction, Statement, Tensor, TensorExpr, statement_text
    from sokoban.language.operators import load_operators, operator_schema, operators_from_json
    from sokoban.model.estimates import Estimate, EstimateTable
    from sokoban.model.gpu.breakdown import STAGES
    from sokoban.model.rational import estimate, estimate_schedules
    from sokoban.schedule.table import ScheduleTable
    from sokoban.schedule.tile import TileSchedule, sizes

#: Module -> the names it gives to the package.
_HOMES = {
    "sokoban.kernel.form": (
        "KernelForm",
        "kernel_form",
    ),
    "sokoban.kernel.regions": (
        "compute_workload",
        "data_dimension",
        "memory_footprint",
        "subtensor_sizes",
    ),
    "sokoban.language.expression": (
        "Axis",
        "Load",
        "Reduction",
        "Statement",
        "Tensor",
        "TensorExpr",
        "statement_text",
    ),
    "sokoban.language.operators": (
        "load_operators",
        "operator_schema",
        "operators_from_json",
    ),
    "sokoban.model.estimates": (
        "Estimate",
        "EstimateTable",
    ),
    "sokoban.model.gpu.breakdown": ("STAGES",),
    "sokoban.model.rational": (
        "estimate",
        "estimate_schedules",
    ),
    "sokoban.schedule.table": ("ScheduleTable",),
    "sokoban.schedule.tile": (
        "TileSchedule",
        "sizes",
    ),
}

__getattr__ = imported_on_use(__name__, _HOMES)

__all__ = [
    "STAGES",
    "Axis",
    "Estimate",
    "EstimateTable",
    "KernelForm",
    "Load",
    "Reduction",
    "ScheduleTable",
    "Statement",
    "Tensor",
    "TensorExpr",
    "TileSchedule",
    "compute_workload",
    "data_dimension",
    "estimate",
    "estimate_schedules",
    "kernel_form",
    "load_operators",
    "memory_footprint",
    "operator_schema",
    "operators_from_json",
    "sizes",
    "statement_text",
    "subtensor_sizes",
]
