"""The table of code generators covers every device, and says who runs what."""

from __future__ import annotations

from typing import get_args

import pytest

from codegen.compile.build import _BUILDERS
from codegen.generators import GENERATORS
from codegen.verify import engines
from codegen.verify.engines import CHECKS, engine_for, fallback_reason
from hal.catalog import all_devices
from hal.spec.parts import CodeGenerator, Lane
from hal.support.errors import InputError


def test_every_generator_of_a_device_has_a_row_and_a_builder() -> None:
    assert set(get_args(CodeGenerator)) == set(GENERATORS) == set(_BUILDERS)
    assert set(get_args(Lane)) == {generator.lane for generator in GENERATORS.values()}
    for device in all_devices():
        if device.code_generator is not None:
            assert GENERATORS[device.code_generator].lane == device.teu.lane


def test_an_engine_runs_kernels_of_its_own_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "emulator_available", lambda: None)
    assert {engine for generator in GENERATORS.values() for engine in generator.engines} == set(CHECKS)
    assert [engine_for(name) for name in GENERATORS] == ["emulator", "emulator", "opencl", "native"]
    assert (engine_for("cuda", "opencl"), engine_for("opencl-source", "emulator")) == ("opencl", "emulator")
    with pytest.raises(
        InputError, match="--engine: 'native' does not run kernels of this device; use emulator and opencl"
    ):
        engine_for("cuda", "native")


def test_without_a_compiler_cuda_is_verified_by_opencl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "emulator_available", lambda: "there is no g++")
    assert [engine_for(name) for name in GENERATORS] == ["opencl", "opencl", "opencl", "native"]
    assert (
        fallback_reason("cuda") == "there is no g++"
        and fallback_reason("llvm") == fallback_reason("opencl-source") == ""
    )
    assert engine_for("cuda", "emulator") == "emulator"
