"""Kernels from bundles: called on the suite's tensors, with what the bundle tells of the choice that was made."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.cpu.ours import check_bundles, competitor, first_choice, from_bundle
from bench.cpu.rivals import Operator, Unable
from hal.microbench.cpu.native import host_architecture
from hal.support.errors import InputError
from tests.codegen.cpu_bundles import CpuKernel, write_cpu_bundle
from tests.codegen.cpu_kernels import built, form_of, schedule_for


def bundle(*kernels: tuple[int, float | None], struck_out: str = "") -> Any:
    """One with kernels of these predicted ranks and measured seconds."""
    return SimpleNamespace(
        kernels=[
            SimpleNamespace(predicted_rank=rank, profiled_seconds=seconds, struck_out=struck_out)
            for rank, seconds in kernels
        ]
    )


def test_the_first_choice_is_compared_with_the_best_by_measurement() -> None:
    assert first_choice(bundle((2, 1.0), (1, 1.2), (3, None))) == pytest.approx(1.2)


def test_ranks_beyond_fifty_do_not_count() -> None:
    assert first_choice(bundle((1, 1.0), (51, 0.5))) == 1.0


def test_without_a_time_of_the_first_choice_there_is_no_ratio() -> None:
    assert first_choice(bundle((1, None), (2, 1.0))) is None
    assert first_choice(bundle()) is None


def test_the_fastest_of_ten_competes() -> None:
    assert competitor(bundle((1, 3.0), (10, 2.0), (11, 1.0))).predicted_rank == 10
    assert competitor(bundle((2, None), (1, None))).predicted_rank == 1
    with pytest.raises(Unable, match="struck out"):
        competitor(bundle((1, None), struck_out="wrong"))


def test_a_folder_of_bundles_that_is_none_is_refused(tmp_path: Any) -> None:
    with pytest.raises(InputError, match="there is no directory"):
        check_bundles(tmp_path / "none")


@pytest.mark.usefixtures("c_compiler")
def test_a_bundle_is_called_on_the_operators_tensors(tmp_path: Path) -> None:
    spec = {"op": "matmul", "m": 40, "n": 48, "k": 32, "epilogue": ["relu"]}
    form = form_of(**spec)
    schedule = schedule_for(form)
    kernel = CpuKernel(built(form, schedule), schedule, 1e-6)
    write_cpu_bundle(tmp_path / "small", form, [kernel], device="cpu", architecture=host_architecture())
    prepared = from_bundle(Operator({"name": "small", **spec}, (0,), {"bundles": str(tmp_path)}))
    assert prepared.facts == {
        "predicted_seconds": 1e-6, "first_choice": None, "detail": "rank 1",
    }  # fmt: skip
    a, b = np.ones((40, 32), np.float32), np.full((32, 48), 0.5, np.float32)
    assert np.array_equal(prepared.bind({"A": a, "B": b})(), np.full((40, 48), 16.0, np.float32))
