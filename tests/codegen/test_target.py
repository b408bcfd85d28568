"""Targets say of a device what compilers have to know."""

from __future__ import annotations

from codegen.target import Target
from hal import load_device


def test_a_target_is_what_compilers_have_to_know_of_a_device() -> None:
    assert Target.of(load_device("a100")) == Target("cuda", "sm_80", 32)
    assert Target.of(load_device("epyc-9654")).vector_bytes == 64


def test_a_device_without_a_code_generator_is_given_cudas() -> None:
    device = load_device("ipu-mk1")
    assert device.code_generator is None
    assert Target.of(device).generator == "cuda"


def test_only_cuda_sizes_shared_memory_at_launch() -> None:
    assert Target("cuda-source", "sm_80", 32).row.has_dynamic_shared
    assert not Target("opencl-source", "", 64).row.has_dynamic_shared
