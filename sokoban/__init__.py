"""Tensor expressions, tile schedules and the RATIONAL cost model (thesis chapter 5)."""

from sokoban.estimates import Estimate, EstimateTable
from sokoban.expression import Axis, Load, Reduction, Statement, Tensor, TensorExpr, statement_text
from sokoban.kernel_form import KernelForm, kernel_form
from sokoban.operators import load_operators, operator_schema, operators_from_json
from sokoban.rational import STAGES, estimate, estimate_schedules
from sokoban.regions import compute_workload, data_dimension, memory_footprint, subtensor_sizes
from sokoban.schedule import TileSchedule, sizes
from sokoban.table import ScheduleTable

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
