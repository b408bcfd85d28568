"""Executors of clusters that somebody else runs: Dask and Ray, by URL. Neither is imported unless it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from hal.support.errors import InputError

#: What Dask's documentation calls the resource of a worker that has a board to itself.
_DASK_RESOURCE = "GPU"

_DASK_SCHEMES = ("tcp", "tls", "ucx", "ws", "wss")


@contextmanager
def cluster_executor(url: str, *, boards: bool = True) -> Iterator[Executor]:
    """A cluster's executor: ``tcp://host:8786`` (a Dask scheduler) or ``ray://host:10001`` (a Ray head).

    With ``boards`` each job gets a GPU to itself: with Ray always, with Dask where workers were started with the
    resource ``GPU``.

    Raises:
        InputError: the URL is of neither, its library is missing, or there is no answer.
    """
    scheme = urlsplit(url).scheme
    if scheme == "ray":
        with _ray(url, boards=boards) as executor:
            yield executor
    elif scheme in _DASK_SCHEMES:
        with _dask(url, boards=boards) as executor:
            yield executor
    else:
        raise InputError("--jobs", f"{url!r} is no cluster's URL", "give tcp://host:8786 (Dask) or ray://host:10001")


@contextmanager
def _dask(url: str, *, boards: bool) -> Iterator[Executor]:
    distributed = _library("distributed", "Dask")
    try:
        client = distributed.Client(url, timeout="10s", set_as_default=False)
    except (OSError, ValueError) as error:
        raise _nobody(url, error) from None
    with client:
        workers = client.scheduler_info()["workers"].values()
        resources = {name for worker in workers for name in worker.get("resources", {})}
        limits = {"resources": {_DASK_RESOURCE: 1}} if boards and _DASK_RESOURCE in resources else {}
        with client.get_executor(pure=False, **limits) as executor:
            yield executor


@contextmanager
def _ray(url: str, *, boards: bool) -> Iterator[Executor]:
    multiprocessing = _library("ray.util.multiprocessing", "Ray")
    try:
        pool = multiprocessing.Pool(ray_address=url, ray_remote_args={"num_gpus": int(boards)})
    except (OSError, ValueError, RuntimeError) as error:
        raise _nobody(url, error) from None
    try:
        yield PoolExecutor(pool)
    finally:
        pool.terminate()


class PoolExecutor(Executor):
    """A pool in the manner of ``multiprocessing`` as an executor."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self.pool.apply_async(function, args, kwargs, callback=future.set_result, error_callback=future.set_exception)
        return future


def _library(module: str, name: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise InputError(
            "--jobs", f"needs {name}, which cannot be imported ({error})", f"pip install {package}"
        ) from None


def _nobody(url: str, error: Exception) -> InputError:
    return InputError("--jobs", f"{url} does not answer: {error}", "start a scheduler there, or leave --jobs out")
