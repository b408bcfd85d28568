"""Construction of rows that registers do not hold."""

from __future__ import annotations

from hal.catalog import load_device
from roller.construct.construct import construct
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import operator_from_data
from tests.codegen.lowering import lower


def test_construction_keeps_rows_that_registers_do_not_hold() -> None:
    """A board keeps what it has room for; every program's shared memory fits a block."""
    form = kernel_form(operator_from_data({"op": "softmax", "shape": [1024, 50257]}))
    for name in ("v100", "a100", "h100"):
        device = load_device(name)
        programs = construct(form, device).programs
        assert programs[0].schedule.kept_columns
        assert programs[0].estimate.seconds < 0.7 * min(
            program.estimate.seconds for program in construct(form, device, 100).programs
            if not program.schedule.kept_columns
        )  # fmt: skip
        for program in programs:
            lowered = lower(form, program.schedule, entry="kept")
            assert lowered.shared_bytes <= device.limits.shared_bytes_per_block_opt_in
