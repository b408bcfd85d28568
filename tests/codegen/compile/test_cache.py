"""Kernels of earlier runs come without the pool; what could turn out otherwise next time is not kept."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from codegen.compile.build import build_kernel
from codegen.compile.cache import KnownFirst
from codegen.compile.request import BuiltKernel
from codegen.verify.result import Verification
from hal.support.store import Store

PASSED = Verification(passed=True, method="opencl", relative_error=1e-7, tolerance=1e-4, axis_sizes={"m": 3})
KERNEL = BuiltKernel(
    entry="f_kernel", source="text", binary=b"\x7fELF", grid=(5, 1, 1), block=(32, 1, 1), shared_bytes=0,
    dynamic_shared_bytes=0, registers=17, spill_bytes=0, verification=PASSED,
)  # fmt: skip
NOT_RUN = replace(PASSED, passed=False, relative_error=None, reason="no OpenCL")


class Pool(Executor):
    """Builds one kernel, and counts how often."""

    def __init__(self, kernel: BuiltKernel) -> None:
        self.kernel, self.asked = kernel, 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.asked += 1
        future: Future[Any] = Future()
        future.set_result(self.kernel)
        return future


@pytest.mark.parametrize(
    ("kernel", "times"),
    [
        (KERNEL, 1),
        (replace(KERNEL, verification=None), 1),
        (replace(KERNEL, verification=NOT_RUN), 2),
        (replace(KERNEL, error="refused"), 2),
    ],
    ids=["verified", "not to be verified", "could not be verified", "failed"],
)
def test_a_kernel_is_built_once_where_nothing_was_missing(tmp_path: Path, kernel: BuiltKernel, times: int) -> None:
    pool = Pool(kernel)
    for _ in range(2):
        assert KnownFirst(pool, Store(tmp_path)).submit(build_kernel, "a request").result() == kernel
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
