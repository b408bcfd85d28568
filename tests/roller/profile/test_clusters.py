"""Clusters by URL: which library is asked, with what, and what is said where it is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hal.support.errors import InputError
from roller.profile.clusters import PoolExecutor, cluster_executor


class Client:
    """Dask's client, as far as it is used."""

    def __init__(self, url: str, timeout: str, set_as_default: bool) -> None:
        if "nobody" in url:
            raise OSError("Timed out trying to connect")
        self.url, self.asked, self.closed = url, {}, False  # type: dict[str, Any]
        self.workers = {"w": {"resources": {"GPU": 1}}} if "gpus" in url else {"w": {}}
        opened.append(self)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def scheduler_info(self) -> dict[str, Any]:
        return {"workers": self.workers}

    def get_executor(self, **keywords: Any) -> ThreadPoolExecutor:
        self.asked = keywords
        return ThreadPoolExecutor(1)


opened: list[Client] = []


@pytest.fixture
def dask(monkeypatch: pytest.MonkeyPatch) -> list[Client]:
    module = ModuleType("distributed")
    module.Client = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "distributed", module)
    opened.clear()
    return opened


def test_a_dask_scheduler_gives_its_executor(dask: list[Client]) -> None:
    with cluster_executor("tcp://host:8786") as executor:
        assert executor.submit(len, "abc").result() == 3
    assert (dask[0].url, dask[0].asked, dask[0].closed) == ("tcp://host:8786", {"pure": False}, True)


def test_dask_workers_that_count_gpus_lend_one_per_job(dask: list[Client]) -> None:
    with cluster_executor("tcp://gpus:8786"):
        assert dask[0].asked == {"pure": False, "resources": {"GPU": 1}}


def test_a_ray_head_gives_a_pool_with_a_gpu_per_job(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def pool(**keywords: Any) -> Any:
        asked.update(keywords)
        return ThreadPool(1)

    module = ModuleType("ray.util.multiprocessing")
    module.Pool = pool  # type: ignore[attr-defined]
    for name, one in (("ray", ModuleType("ray")), ("ray.util", ModuleType("ray.util")), (module.__name__, module)):
        monkeypatch.setitem(sys.modules, name, one)
    with cluster_executor("ray://head:10001") as executor:
        assert executor.submit(int, "12", base=3).result() == 5
    assert asked == {"ray_address": "ray://head:10001", "ray_remote_args": {"num_gpus": 1}}


def test_a_failing_job_of_a_pool_fails_its_future() -> None:
    def now(function: Callable[..., Any], args: Any, keywords: Any, callback: Any, error_callback: Any) -> None:
        try:
            callback(function(*args, **keywords))
        except ValueError as error:
            error_callback(error)

    executor = PoolExecutor(SimpleNamespace(apply_async=now))
    assert executor.submit(int, "7").result() == 7
    with pytest.raises(ValueError, match="invalid literal"):
        executor.submit(int, "seven").result()


@pytest.mark.parametrize("url", ["host:8786", "http://host", "", "8786"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"is no cluster's URL; give tcp://host:8786 \(Dask\) or ray://host:10001"):
        cluster_executor(url).__enter__()


@pytest.mark.parametrize(
    ("url", "module", "message"),
    [
        ("tcp://h:1", "distributed", r"--jobs: needs Dask, which cannot be imported .*; pip install distributed"),
        ("ray://h:1", "ray.util.multiprocessing", r"--jobs: needs Ray, which cannot be imported .*; pip install ray"),
    ],
)
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, url: str, module: str, message: str) -> None:
    monkeypatch.setitem(sys.modules, module.partition(".")[0], None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        cluster_executor(url).__enter__()


def test_a_scheduler_that_does_not_answer_is_one_line(dask: list[Client]) -> None:
    with pytest.raises(InputError, match="--jobs: tcp://nobody:1 does not answer: Timed out"):
        cluster_executor("tcp://nobody:1").__enter__()
