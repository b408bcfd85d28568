"""Every kernel compiles for an architecture of every generation, and spills nowhere but where it is meant to."""

from __future__ import annotations

import pytest

from codegen.gpu.source.nvrtc import compile_cuda, supported_architectures
from hal.microbench import kernel_texts

_TYPICAL = (50, 61, 70, 75, 80, 90)
#: And the newest, whatever the compiler's is.
_COMPILED = sorted({*_TYPICAL, max(supported_architectures())})


def _one_source(capability: int) -> str:
    """All kernels in one text: starting the compiler takes longer than most of them."""
    return "\n".join(
        {kernel.entry: kernel.source for kernel in kernel_texts(capability) if not kernel.registers}.values()
    )


@pytest.mark.parametrize("capability", _COMPILED)
def test_every_kernel_compiles(capability: int) -> None:
    source = _one_source(capability)
    compiled = compile_cuda(source, f"sm_{capability}", name="microbench")
    entries = [kernel.entry for kernel in kernel_texts(capability) if not kernel.registers]
    assert all(entry.encode() in compiled.cubin for entry in entries)


@pytest.mark.parametrize("capability", (53, 70, 90))
def test_no_loop_reads_or_writes_spilled_registers(capability: int) -> None:
    # The register tiles grow until they spill: that is what they are for.
    kernels = {kernel.entry: kernel for kernel in kernel_texts(capability) if not kernel.entry.startswith("tile_")}
    source = "\n".join(kernel.source for kernel in kernels.values())
    assert compile_cuda(source, f"sm_{capability}", name="microbench").spill_bytes == 0


def test_no_kernel_needs_a_header() -> None:
    for capability in _TYPICAL:
        assert "#include" not in _one_source(capability)


def test_names_are_unique() -> None:
    for capability in _TYPICAL:
        entries = [kernel.entry for kernel in kernel_texts(capability)]
        assert len(entries) == len(set(entries))
