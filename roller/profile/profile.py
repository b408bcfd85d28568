"""Profiles of bundles: their kernels measured on GPUs, wrong ones struck out, manifests ranked by measured time.

It needs NumPy and CuPy alone. Several GPUs share the bundles between them, a process each; machines
of a cluster get whole bundles as bytes, so that they share no disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from codegen.bundle.reader import find_bundles, manifest_data, read_bundle
from codegen.bundle.records import MANIFEST, Bundle, KernelRecord
from codegen.runtime.arrays import cupy_module
from hal.support.atomic import write_atomic
from hal.support.errors import InputError
from roller.profile.child import Runner
from roller.profile.gpu import MeasureOptions
from roller.profile.gpu_worker import GpuRunner
from roller.profile.measurement import Board, Measurement

if TYPE_CHECKING:
    from roller.profile.cpu import CpuMeasureOptions

#: Counts up when measurements change their meaning, so that kept ones are not taken for such.
METHOD = 1


@dataclass(frozen=True)
class KernelProfile:
    """A kernel and what was measured of it; ``cached`` where that was known before."""

    entry: KernelRecord
    measurement: Measurement
    cached: bool

    @property
    def prediction_error(self) -> float | None:
        """(predicted - measured) / measured."""
        seconds = self.measurement.seconds
        return None if seconds is None else (self.entry.seconds - seconds) / seconds


@dataclass(frozen=True, kw_only=True)
class OperatorProfile:
    """A profiled bundle: its folder, the GPU or processor, and the measured kernels, fastest first and struck-out ones
    last. ``seconds`` is how long measuring took on a processor (wall clock); None of GPUs, whose times may be known."""

    directory: Path
    name: str
    device: str
    board: Board
    kernels: tuple[KernelProfile, ...]
    seconds: float | None = None

    @property
    def best(self) -> KernelProfile | None:
        """The fastest kernel that is right; None where none is."""
        return self.kernels[0] if self.kernels and self.kernels[0].measurement.seconds is not None else None


@dataclass(frozen=True)
class ProfileOptions:
    """Choice of kernels, and the options of measuring them.

    Attributes:
        top_k: kernels of a bundle, by predicted rank.
        measure: how each is measured.
        cache: folder of known measurements; None measures all anew and keeps nothing.
    """

    top_k: int = 100
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    cache: Path | None = None


def default_cache() -> Path:
    """Where measurements are kept between runs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "roller" / "profiles"


def profile_in_process(
    directory: Path, options: ProfileOptions, measure: CpuMeasureOptions
) -> Iterator[OperatorProfile]:
    """Profile a bundle for CPUs, or all such bundles in a folder, on this machine's cores; no cache is asked.

    Raises:
        InputError: there is no bundle, or it cannot be measured here.
    """
    from roller.profile.cpu_worker import CpuRunner

    return profile(directory, [0], options, lambda device, _: CpuRunner(measure))


def is_for_cpu(directory: Path) -> bool:
    """True if the bundle, or all bundles in a folder, hold shared objects, which CPUs run.

    Raises:
        InputError: there is no bundle, or some are for processors and others for GPUs.
    """
    kinds = {read_bundle(folder).is_for_cpu: folder.name for folder in find_bundles(directory)}
    if len(kinds) > 1:
        problem = f"{kinds[True]} is for processors, {kinds[False]} for GPUs"
        raise InputError(str(directory), problem, "profile them one by one")
    return next(iter(kinds))


def parse_devices(text: str) -> list[int]:
    """GPU numbers of ``cuda:1``, ``cuda:0,cuda:2`` or ``all``.

    >>> parse_devices("cuda:2,cuda:0")
    [0, 2]

    Raises:
        InputError: the text is none of these.
    """
    if text == "all":
        try:
            return list(range(int(cupy_module().cuda.runtime.getDeviceCount())))
        except InputError:
            raise
        except Exception as error:  # without a driver CuPy raises an error class of its own
            raise InputError("--device", f"CuPy finds no GPU: {error}", "run this where nvidia-smi lists one") from None
    numbers = [part.strip().removeprefix("cuda:") for part in text.split(",")]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        raise InputError("--device", f"{text!r} names no GPU", "write cuda:0, cuda:0,cuda:1 or all")
    return sorted({int(number) for number in numbers})


def profile(
    directory: Path,
    devices: Sequence[int],
    options: ProfileOptions,
    runner: Callable[[int, MeasureOptions], Runner] = GpuRunner,
) -> Iterator[OperatorProfile]:
    """Profile a bundle, or all bundles in a folder, in order; each manifest is written when its bundle is done.

    Args:
        devices: GPUs that share the bundles; they have to be of one kind.
        runner: who measures on a GPU.

    Raises:
        InputError: there is no bundle or no GPU, a bundle has no reference, or the GPUs differ.
    """
    folders = find_bundles(directory)
    runners = [runner(device, options.measure) for device in devices]
    try:
        boards = [runner.board() for runner in runners]
        _check_alike(devices, boards)
        free: queue.SimpleQueue[Runner] = queue.SimpleQueue()
        for idle in runners:
            free.put(idle)

        def job(folder: Path) -> OperatorProfile:
            taken = free.get()
            try:
                return profile_bundle(folder, taken, boards[0], options)
            finally:
                free.put(taken)

        with ThreadPoolExecutor(len(runners)) as threads:
            try:
                for result in threads.map(job, folders):
                    rank_manifest(result)
                    yield result
            finally:  # also when the caller wants no more: what is being measured ends with its process
                threads.shutdown(wait=False, cancel_futures=True)
                _close(runners)
    finally:
        _close(runners)


def _close(runners: Sequence[Runner]) -> None:
    for runner in runners:
        runner.close()


def profile_on_cluster(directory: Path, executor: Executor, options: ProfileOptions) -> Iterator[OperatorProfile]:
    """Profile a bundle, or all bundles in a folder, on a cluster: each on the first GPU of the machine that takes it.

    Raises:
        InputError: there is no bundle, a bundle has no reference, or the GPUs differ; errors of a job come back as they
            are.
    """
    folders = find_bundles(directory)
    carried = replace(options, cache=None)  # a path of this machine
    jobs = [executor.submit(remote_profile, _files(folder), folder.name, carried) for folder in folders]
    board: Board | None = None
    for folder, job in zip(folders, jobs, strict=True):
        result = replace(job.result(), directory=folder)
        board = board or result.board
        _check_alike([str(folders[0]), str(folder)], [board, result.board])
        rank_manifest(result)
        yield result


def remote_profile(files: dict[str, bytes], name: str, options: ProfileOptions) -> OperatorProfile:
    """Work of a machine of the cluster: unpack a bundle and profile it in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="roller-profile-") as parent:
        folder = Path(parent) / name
        folder.mkdir()
        for file, content in files.items():
            (folder / file).write_bytes(content)
        runner = GpuRunner(0, options.measure)
        try:
            return profile_bundle(folder, runner, runner.board(), replace(options, cache=default_cache()))
        finally:
            runner.close()


def _files(folder: Path) -> dict[str, bytes]:
    """The files of a bundle that measuring takes."""
    bundle = read_bundle(folder)
    names = {MANIFEST, *([bundle.reference.source] if bundle.reference else [])}
    parts = [part for kernel in bundle.kernels for part in kernel.parts(bundle.arguments)]
    names |= {name for part in parts for name in (part.source, part.binary) if name is not None}
    return {name: (folder / name).read_bytes() for name in sorted(names) if (folder / name).is_file()}


def _check_alike(names: Sequence[object], boards: Sequence[Board]) -> None:
    """A manifest is ranked for one kind of GPU."""
    for name, board in zip(names, boards, strict=True):
        if board != boards[0]:
            problem = f"{names[0]} is a {boards[0].name}, {name} a {board.name} or has other software"
            raise InputError("--device", problem, "profile copies of the folder, one per kind of GPU")


def profile_bundle(folder: Path, runner: Runner, board: Board, options: ProfileOptions) -> OperatorProfile:
    """Measure the kernels of one bundle, except for those whose times are known."""
    bundle = read_bundle(folder)
    if bundle.manifest.launch_size is not None:
        axis = bundle.manifest.launch_size.axis
        problem = f"holds kernels of many {axis}, whose times are not measured yet"
        raise InputError(str(folder), problem, f"compile the operator with a number for {axis}")
    if bundle.reference is None and not bundle.is_for_cpu:
        raise InputError(str(folder), "has no reference to check its kernels against", "compile the operator again")
    chosen = sorted(bundle.kernels, key=lambda kernel: kernel.predicted_rank)[: options.top_k]
    # Turns on a processor that others use too are comparable within a run alone.
    cache = None if bundle.is_for_cpu else options.cache
    keys = {} if cache is None else {k.rank: _key(bundle, k, board, options.measure) for k in chosen}
    recalled = {rank: _recall(cache, key) for rank, key in keys.items()}
    recorded = {rank: measurement for rank, measurement in recalled.items() if measurement is not None}
    missing = [kernel.rank for kernel in chosen if kernel.rank not in recorded]
    start = time.perf_counter()
    fresh = dict(runner.measure(folder, missing)) if missing else {}
    seconds = time.perf_counter() - start if bundle.is_for_cpu else None
    for rank, measurement in fresh.items():
        if cache is not None and not measurement.struck_out:
            _remember(cache, keys[rank], measurement)
    kernels = [KernelProfile(k, (recorded | fresh)[k.rank], k.rank in recorded) for k in chosen]
    return OperatorProfile(
        directory=folder,
        name=bundle.name,
        device=bundle.device,
        board=board,
        kernels=tuple(sorted(kernels, key=_order)),
        seconds=seconds,
    )


def _order(kernel: KernelProfile) -> tuple[bool, float, int]:
    seconds = kernel.measurement.seconds
    return seconds is None, seconds or 0.0, kernel.entry.predicted_rank


# Known measurements

#: Fields of a launch that its time depends on.
_LAUNCH_FACTS = (
    "entry", "source", "binary", "grid", "block", "dynamic_shared_bytes", "tensors", "zero_output", "architecture",
    "tensor_maps",
)  # fmt: skip


def _key(bundle: Bundle, kernel: KernelRecord, board: Board, options: MeasureOptions) -> str:
    """Key of a measurement: the kernel and how it is launched, what it is judged by, the board, the method."""
    reference = bundle.reference
    assert reference is not None
    parts = kernel.parts(bundle.arguments)
    files = [name for part in parts for name in (part.source, part.binary) if name is not None]
    hashes = [hashlib.sha256((bundle.directory / name).read_bytes()).hexdigest() for name in [reference.source, *files]]
    launches = [{fact: getattr(part, fact) for fact in _LAUNCH_FACTS} for part in parts]
    arguments = [asdict(argument) for argument in bundle.arguments]
    judge = asdict(reference)
    judge["launches"] = [[step.entry, step.grid, step.block, step.tensors] for step in reference.launches]
    kernel_facts = [launches, kernel.workspace, kernel.tolerance]
    facts = [METHOD, hashes, kernel_facts, arguments, judge, asdict(board), asdict(options)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _recall(cache: Path | None, key: str) -> Measurement | None:
    if cache is None:
        return None
    try:
        return Measurement(**json.loads((cache / f"{key}.json").read_bytes()))
    except (OSError, ValueError, TypeError):  # not there, or written by another version
        return None


def _remember(cache: Path, key: str, measurement: Measurement) -> None:
    """Keep a measurement; a folder that cannot be written costs the next run its time, and nothing else."""
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        write_atomic(cache / f"{key}.json", json.dumps(asdict(measurement)))


# The manifest


def rank_manifest(result: OperatorProfile) -> None:
    """Write measured times into the manifest and rank its kernels by them.

    Measured kernels come first, then those that were not measured on this board, in predicted order, then those that
    were struck out. Files keep the number of the predicted rank.
    """
    data, board = manifest_data(result.directory), (result.board.name, result.board.capability)
    profiles = {kernel.entry.predicted_rank: kernel for kernel in result.kernels}
    for kernel in data["kernels"]:
        earlier = kernel.get("profile") or {}
        predicted_rank = earlier.get("predicted_rank", kernel["rank"])
        if predicted_rank in profiles:
            kernel |= _record(profiles[predicted_rank], result.board)
        elif earlier and (earlier.get("board"), earlier.get("capability")) != board:
            kernel |= {"rank": predicted_rank}
            for key in ("profiled_seconds", "profile"):
                kernel.pop(key, None)
    data["kernels"].sort(key=_rank_key)
    for rank, kernel in enumerate(data["kernels"], start=1):
        if kernel["rank"] != rank and "profile" not in kernel:
            kernel["profile"] = _unmeasured(kernel["rank"], result.board)
        kernel["rank"] = rank
    if result.seconds is not None:
        data.setdefault("profiling_seconds", {})[str(len(result.kernels))] = _rounded(result.seconds)
    text = json.dumps(data, indent=2, ensure_ascii=False)
    write_atomic(result.directory / MANIFEST, text + "\n")


def _rank_key(kernel: dict[str, Any]) -> tuple[bool, bool, float, int]:
    profile = kernel.get("profile") or {}
    seconds = kernel.get("profiled_seconds")
    return (
        bool(profile.get("struck_out")),
        seconds is None,
        seconds or 0.0,
        profile.get("predicted_rank", kernel["rank"]),
    )


def _record(kernel: KernelProfile, board: Board) -> dict[str, Any]:
    """Record of a measured kernel in the manifest; see :class:`codegen.bundle.records.ProfileRecord`."""
    m = kernel.measurement
    profile = {
        "predicted_rank": kernel.entry.predicted_rank,
        "spread_seconds": _rounded(m.spread_seconds),
        "repeats": m.repeats,
        "launches": m.launches,
        "prediction_error": _rounded(kernel.prediction_error),
        "relative_error": _rounded(m.relative_error),
        "tolerance": m.tolerance,
        "struck_out": m.struck_out,
        "loaded": m.loaded,
        "board": board.name,
        "capability": board.capability,
        "versions": board.versions,
    }
    return {"profiled_seconds": _rounded(m.seconds), "profile": profile}


def _unmeasured(predicted_rank: int, board: Board) -> dict[str, Any]:
    """Record in the manifest of a kernel that was not measured, whose rank changed because others were."""
    return {
        "predicted_rank": predicted_rank, "spread_seconds": None, "repeats": 0, "launches": 0,
        "prediction_error": None, "relative_error": None, "tolerance": None, "struck_out": "",
        "loaded": "", "board": board.name, "capability": board.capability, "versions": board.versions,
    }  # fmt: skip


def _rounded(value: float | None) -> float | None:
    """A number with six significant digits.

    >>> _rounded(1.23456789e-6), _rounded(None)
    (1.23457e-06, None)
    """
    return None if value is None else float(f"{value:.6g}")
