"""One more resident block, where that costs nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from codegen.gpu.source import residency
from codegen.gpu.source.nvrtc import CompiledKernel, compile_cuda
from codegen.gpu.source.prelude import strip_prelude
from codegen.gpu.source.residency import resident_blocks, squeezed
from codegen.gpu.source.text import cuda_source
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.pipelines import BODY_STATEMENTS
from sokoban.schedule.tile import TileSchedule, sizes
from tests.codegen.lowering import lower


def test_registers_are_given_in_whole_units() -> None:
    assert resident_blocks(128, 256) == 2 and resident_blocks(129, 256) == 1
    # 65 registers of 32 lanes are 2080, rounded to 2304; 63 threads are two warps.
    assert resident_blocks(65, 63) == 65536 // (2304 * 2)


def test_a_kernel_is_squeezed_only_where_nothing_spills() -> None:
    form = kernel_form(operator_from_data({"op": "matmul", "m": 256, "n": 256, "k": 128}))
    schedule = TileSchedule(
        block=sizes({"m": 128, "n": 128}), thread=sizes({"m": 4, "n": 4}), vthreads=sizes({"m": 2, "n": 2}),
        step=sizes({"k": 16}), cached=("A", "B"), padding=sizes({"A": 4}), unroll=BODY_STATEMENTS, stages=2,
        turned=("A",),
    )  # fmt: skip
    source = strip_prelude(cuda_source(lower(form, schedule, entry="tight"), "sm_75", ["A", "B", "C"]))
    compiled = compile_cuda(source, "sm_75", name="tight")
    text, tight = squeezed(source, compiled, 256, compiled.shared_bytes, "sm_75", name="tight")
    before, after = (resident_blocks(one.registers, 256) for one in (compiled, tight))
    assert tight.spill_bytes == 0 and after >= before
    assert (f"__launch_bounds__(256, {after})" in text) == (after > before)
    # A block that fills shared memory leaves no room for another.
    assert squeezed(source, compiled, 256, 64 * 1024, "sm_75", name="tight") == (source, compiled)


def test_a_kernel_that_spills_is_compiled_for_fewer_blocks() -> None:
    # 64 threads that want just over 128 registers, which the compiler takes from some values for the sake of an eighth
    # block.
    form = kernel_form(
        operator_from_data(
            {"op": "conv2d", "n": 4, "c": 8, "h": 16, "w": 16, "f": 32, "kh": 3, "kw": 3, "padding": "SAME"}
        )
    )
    schedule = TileSchedule(
        block=sizes({"n": 2, "f": 32, "oh": 8, "ow": 8}), thread=sizes({"n": 1, "f": 4, "oh": 2, "ow": 4}),
        vthreads=sizes({"n": 1, "f": 1, "oh": 1, "ow": 2}), step=sizes({"c": 1, "kh": 3, "kw": 3}), cached=("X", "W"),
        padding=sizes({"W": 4}), unroll=BODY_STATEMENTS, stages=2, turned=("W",),
    )  # fmt: skip
    source = strip_prelude(cuda_source(lower(form, schedule, entry="full"), "sm_80", ["X", "W", "Y"]))
    compiled = compile_cuda(source, "sm_80", name="full")
    spilled = compiled if compiled.spill_bytes else replace(compiled, spill_bytes=8)
    text, relaxed = squeezed(source, spilled, 64, compiled.shared_bytes, "sm_80", name="full")
    assert relaxed.spill_bytes == 0 and "__launch_bounds__(64, " in text


@pytest.mark.parametrize(("threads", "most"), [(192, 255), (320, 200), (512, 128)])
def test_a_kernel_that_spills_with_all_registers_is_compiled_once(
    threads: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def compiled_again(source: str, architecture: str, *, name: str) -> CompiledKernel:
        asked.append(source)
        return replace(full, spill_bytes=0)

    monkeypatch.setattr(residency, "compile_cuda", compiled_again)
    full = CompiledKernel(cubin=b"", registers=most, spill_bytes=16, stack_bytes=8, shared_bytes=0, log="")
    source = f"__launch_bounds__({threads})"
    assert squeezed(source, full, threads, 0, "sm_80", name="kernel") == (source, full) and not asked
    fewer = replace(full, registers=most - 8)
    assert squeezed(source, fewer, threads, 0, "sm_80", name="kernel")[1].spill_bytes == 0 and len(asked) == 1


def test_blocks_that_are_worth_nothing_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def compiled_again(source: str, architecture: str, *, name: str) -> CompiledKernel:
        asked.append(source)
        return replace(compiled, registers=64)

    monkeypatch.setattr(residency, "compile_cuda", compiled_again)
    compiled = CompiledKernel(cubin=b"", registers=66, spill_bytes=0, stack_bytes=0, shared_bytes=0, log="")
    source = "__launch_bounds__(256)"
    kept = squeezed(source, compiled, 256, 0, "sm_70", name="kernel", worthwhile=(2, 5))
    assert kept == (source, compiled) and not asked
    text, tight = squeezed(source, compiled, 256, 0, "sm_70", name="kernel", worthwhile=(4,))
    assert asked == [text] == ["__launch_bounds__(256, 4)"] and tight.registers == 64
