"""Tables and lines of commands, of results made by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from codegen.verify.result import Verification
from hal.catalog import load_device
from roller.command.tables import print_verified, verified_json

RACE = (
    'verify_kernel: race on shared A_shared+4080: written by thread 31 of block 197 at kernel.cu:51 "A_shared[i] = x;" '
    'and read by thread 215 of block 197 at kernel.cu:58 "y = A_shared[j];": no barrier is between (seed 2)'
)


def emulated(**more: Any) -> Verification:
    return Verification(
        **{
            "passed": True, "method": "cuda, emulated", "relative_error": 1e-7, "tolerance": 1e-4,
            "axis_sizes": {"m": 7}, "engine": "emulator", "checks": ("values", "races"), "seeds": (0, 1, 2), **more,
        }
    )  # fmt: skip


RESULTS = [
    ("good", [emulated(), emulated(relative_error=3e-5, needless=("line 41: __syncthreads();",))]),
    ("racy", [emulated(passed=False, relative_error=float("inf"), reason=RACE)]),
]


def test_a_race_and_a_needless_barrier_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    print_verified(RESULTS)
    assert capsys.readouterr().out.splitlines() == [
        "good rank 2: orders nothing: line 41: __syncthreads();",
        f"racy rank 1: cuda, emulated: {RACE}",
        "2 of 3 schedules of 2 operators agree with the reference (largest relative error 3.0e-05; "
        "run by cuda, emulated in 3 orders of threads)",
    ]


def test_json_has_the_race_as_it_is() -> None:
    name, checks = RESULTS[1]
    record = json.loads(verified_json(name, load_device("v100"), checks))
    assert record["checks"] == [
        {
            "passed": False, "method": "cuda, emulated", "relative_error": None, "tolerance": 1e-4,
            "axis_sizes": {"m": 7}, "reason": RACE, "engine": "emulator",
            "checks": ["values", "races"], "seeds": [0, 1, 2], "needless": [], "sizes": [],
        }
    ]  # fmt: skip
