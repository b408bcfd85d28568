"""The thread pool and kernels for processors under AddressSanitizer and ThreadSanitizer, and faults that they find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.cpu.function import LoweredCpu
from codegen.cpu.lower import lower
from codegen.cpu.shared_object import POOL, _call_text, llvm_text
from codegen.tir.lowering import LoweringRequest
from hal.microbench.cpu.native import host_architecture
from sokoban.kernel.form import KernelForm
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from tests.codegen.cpu_kernels import form_of, host, schedule_for
from tests.codegen.sanitizers import Outcome, announced, linked, object_of, run, sanitizer_missing

pytestmark = pytest.mark.usefixtures("c_compiler")

FOLDER = Path(__file__).parent
SANITIZERS = ("address", "thread")

#: Operators, no size of which is a multiple of anything, and what their schedules do not do by default.
OPERATORS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"op": "matmul", "m": 25, "n": 35, "k": 17, "epilogue": [{"function": "bias_add", "axis": "n"}, "gelu"]}, {}),
    ({"op": "matmul", "m": 13, "n": 41, "k": 19, "dtype": "float64"}, {"step": {"k": 8}}),
    ({"op": "batch_matmul", "b": 3, "m": 9, "n": 21, "k": 25, "transpose_b": True}, {"cached": False}),
    ({"op": "conv2d", "n": 1, "c": 5, "h": 9, "w": 11, "f": 17, "kh": 3, "kw": 3, "stride": 2, "padding": 1},
     {"vector_axis": "f"}),
    ({"op": "depthwise_conv2d", "n": 1, "c": 5, "h": 7, "w": 13, "kh": 3, "kw": 3, "padding": "SAME"}, {}),
    ({"op": "max_pool2d", "n": 1, "c": 3, "h": 9, "w": 9, "kh": 3, "kw": 3, "stride": 2, "padding": 1}, {}),
    ({"op": "reduce", "function": "sum", "shape": [40, 37], "axes": [0]}, {"cached": False}),
    ({"op": "softmax", "shape": [7, 61]}, {}),
    ({"op": "elementwise", "function": "add", "shape": [9, 41]}, {}),
    ({"op": "transpose", "shape": [20, 41], "perm": [1, 0]}, {}),
)  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """A kernel as LLVM's text, not yet instrumented, and what calls it."""

    form: KernelForm
    lowered: LoweredCpu
    text: str
    call: str


@pytest.fixture(scope="module", autouse=True)
def sanitizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    for sanitizer in SANITIZERS:
        missing = sanitizer_missing(sanitizer, tmp_path_factory.mktemp(sanitizer))
        if missing is not None:
            pytest.skip(missing)


@pytest.fixture(scope="module")
def kernels() -> tuple[Kernel, ...]:
    found = []
    for number, (fields, how) in enumerate(OPERATORS):
        form = form_of(**fields)
        lowered = lower(LoweringRequest(form, schedule_for(form, **how), f"op_{number}", host()))
        call = _call_text(lowered, lowered.entry, len(form.expr.inputs) + 1)
        found.append(Kernel(form, lowered, llvm_text(lowered, host_architecture(), "ll"), call))
    return tuple(found)


def outcome_of(
    kernels: tuple[Kernel, ...], sanitizer: str, folder: Path, call: Callable[[str], str] = str, missing: int = 0
) -> tuple[Outcome, list[np.ndarray]]:
    """What comes of kernels under a sanitizer: how the program ended, and their outputs.

    Args:
        call: changes the text of what calls a kernel.
        missing: elements that every output's memory is too short by.
    """
    parts, files = [FOLDER / "sanitized_kernels.c"], []
    for kernel in kernels:
        entry, expr = kernel.lowered.entry, kernel.form.expr
        (folder / f"{entry}.o").write_bytes(object_of(announced(kernel.text, sanitizer)))
        (folder / f"{entry}.c").write_text(call(kernel.call))
        parts += [folder / f"{entry}.o", folder / f"{entry}.c"]
        inputs = random_inputs(expr, 1)
        arrays = [np.ascontiguousarray(inputs[tensor.name], tensor.dtype) for tensor in expr.inputs]
        sizes = [*(array.nbytes for array in arrays), output_bytes(kernel) - missing * item_bytes(kernel)]
        header = np.array([len(sizes), *sizes, kernel.lowered.scratch_bytes], np.int64)
        files.append(folder / f"{entry}.data")
        files[-1].write_bytes(b"".join(array.tobytes() for array in (header, *arrays)))
    entries = [kernel.lowered.entry for kernel in kernels]
    table = folder / "table.c"
    table.write_text(
        "".join(f"extern int {entry}();\n" for entry in entries)
        + f"int (*const kernels[])() = {{ {', '.join(entries)}, 0 }};\n"
    )
    outcome = run(linked(folder / "program", [*parts, table], sanitizer), *files)
    outputs = [
        np.frombuffer(file.read_bytes()[: output_bytes(kernel)], kernel.form.expr.output.dtype)
        for kernel, file in zip(kernels, files, strict=True)
    ]
    return outcome, outputs


def item_bytes(kernel: Kernel) -> int:
    return np.dtype(kernel.form.expr.output.dtype).itemsize


def output_bytes(kernel: Kernel) -> int:
    return kernel.form.expr.output.element_count * item_bytes(kernel)


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_kernels_are_clean(kernels: tuple[Kernel, ...], sanitizer: str, tmp_path: Path) -> None:
    outcome, outputs = outcome_of(kernels, sanitizer, tmp_path)
    assert outcome == Outcome(0, "")
    for kernel, output in zip(kernels, outputs, strict=True):
        wanted = evaluate(kernel.form.expr, random_inputs(kernel.form.expr, 1)).ravel()
        np.testing.assert_allclose(output, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("number", [0, 8])
def test_an_element_too_far_is_found(kernels: tuple[Kernel, ...], number: int, tmp_path: Path) -> None:
    outcome, _ = outcome_of((kernels[number],), "address", tmp_path, missing=1)
    assert "AddressSanitizer: heap-buffer-overflow" in outcome.report and "WRITE of size" in outcome.report
    assert f"op_{number}_blocks" in outcome.report


def test_two_threads_that_write_one_element_are_found(kernels: tuple[Kernel, ...], tmp_path: Path) -> None:
    """Every portion also runs the block before its first, which writes what is written there anyway."""
    outcome, _ = outcome_of(
        (kernels[8],),
        "thread",
        tmp_path,
        lambda text: changed(text, {", begin, end);\n}": ", begin - !!begin, end);\n}"}),
    )
    assert "ThreadSanitizer: data race" in outcome.report and "op_8_blocks" in outcome.report


def pool_outcome(pool: str, sanitizer: str, folder: Path) -> Outcome:
    changed = folder / "pool.c"
    changed.write_text(pool)
    wrapped = ",".join(
        f"--wrap={name}" for name in ("sched_getaffinity", "sched_getcpu", "pthread_attr_setaffinity_np", "fopen")
    )
    return run(linked(folder / "pool", [FOLDER / "sanitized_pool.c", changed], sanitizer, f"-Wl,{wrapped}"))


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_the_pool_is_clean(sanitizer: str, tmp_path: Path) -> None:
    assert pool_outcome(POOL.read_text(), sanitizer, tmp_path) == Outcome(0, "")


@pytest.mark.parametrize(
    "changes",
    [
        {"atomic_load_explicit(&pool.busy, memory_order_acquire); spins++": "0; spins++"},
        {"(&pool.busy, 1, memory_order_release)": "(&pool.busy, 1, memory_order_relaxed)"},
        {
            "(uint64_t)own, memory_order_release)": "(uint64_t)own, memory_order_relaxed)",
            "SPINS = 20000": "SPINS = 2000000000",
        },
    ],
    ids=["no wait for the others", "a wait that orders nothing", "a start that orders nothing"],
)
def test_a_pool_without_its_order_is_found(changes: dict[str, str], tmp_path: Path) -> None:
    assert "ThreadSanitizer: data race" in pool_outcome(changed(POOL.read_text(), changes), "thread", tmp_path).report


def test_a_pool_with_room_for_fewer_threads_is_found(tmp_path: Path) -> None:
    smaller = changed(POOL.read_text(), {"core[CPU_SETSIZE], cores": "core[2], cores"})
    assert "AddressSanitizer: stack-buffer-overflow" in pool_outcome(smaller, "address", tmp_path).report


def changed(text: str, changes: dict[str, str]) -> str:
    for right, wrong in changes.items():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    return text
