"""The table of code generators covers every device, and says who runs what."""

from __future__ import annotations

from typing import get_args

import pytest

from codegen.compile.build import _BUILDERS
from codegen.generators import ENGINES, GENERATORS, engine_for, has_chains
from hal.catalog import all_devices
from hal.spec.parts import CodeGenerator, Lane
from hal.support.errors import InputError


def test_every_generator_of_a_device_has_a_row_and_a_builder() -> None:
    assert set(get_args(CodeGenerator)) == set(GENERATORS) == set(_BUILDERS)
    assert set(get_args(Lane)) == set(ENGINES)
    for device in all_devices():
        if device.code_generator is not None:
            assert GENERATORS[device.code_generator].lane == device.teu.lane


def test_chains_are_for_generators_that_launch_several_kernels() -> None:
    assert has_chains("cuda") and has_chains("opencl-source")
    assert not has_chains("llvm") and not has_chains(None)


def test_an_engine_runs_kernels_of_its_own_lanes() -> None:
    assert (engine_for("thread"), engine_for("element"), engine_for("thread", "emulator")) == (
        "opencl", "native", "emulator",
    )  # fmt: skip
    with pytest.raises(InputError, match="--engine: 'native' does not run kernels of this device; use opencl"):
        engine_for("thread", "native")
