"""Kernels of earlier runs come without the pool; what could turn out otherwise next time is not kept."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from codegen.built import BuiltKernel
from codegen.compile.build import build_kernel, verify_schedule
from codegen.compile.cache import KnownFirst
from codegen.verify.result import Verification
from hal.support.store import Store

PASSED = Verification(passed=True, method="opencl", relative_error=1e-7, tolerance=1e-4, axis_sizes={"m": 3})
KERNEL = BuiltKernel(
    entry="f_kernel", source="text", binary=b"\x7fELF", grid=(5, 1, 1), block=(32, 1, 1), shared_bytes=0,
    dynamic_shared_bytes=0, registers=17, spill_bytes=0,
)  # fmt: skip
NOT_RUN = replace(PASSED, passed=False, relative_error=None, reason="no OpenCL")


class Pool(Executor):
    """Returns one kernel or check, and counts how often."""

    def __init__(self, result: BuiltKernel | Verification) -> None:
        self.result, self.asked = result, 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.asked += 1
        future: Future[Any] = Future()
        future.set_result(self.result)
        return future


@pytest.mark.parametrize(
    ("asked", "result", "times"),
    [
        (build_kernel, KERNEL, 1),
        (build_kernel, replace(KERNEL, error="refused"), 2),
        (verify_schedule, PASSED, 1),
        (verify_schedule, NOT_RUN, 2),
    ],
    ids=["built", "failed", "checked", "could not be checked"],
)
def test_what_is_known_is_not_asked_for_again(
    tmp_path: Path, asked: Callable[..., Any], result: BuiltKernel | Verification, times: int
) -> None:
    pool = Pool(result)
    for _ in range(2):
        assert KnownFirst(pool, Store(tmp_path)).submit(asked, "a request").result() == result
    assert pool.asked == times


def test_another_request_is_another_kernel(tmp_path: Path) -> None:
    pool = Pool(KERNEL)
    for request in ("one", "two", "one"):
        KnownFirst(pool, Store(tmp_path)).submit(build_kernel, request)
    assert pool.asked == 2


def test_other_work_is_the_pools(tmp_path: Path) -> None:
    pool = Pool(KERNEL)
    for _ in range(2):
        KnownFirst(pool, Store(tmp_path)).submit(len, "work")
    assert pool.asked == 2
    assert Store(tmp_path).usage() == (0, 0)
