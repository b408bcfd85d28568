"""Kernels of regions: compiled once for a device, kept, and run once on numbers before anything depends on them."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from codegen.bundle.reader import choose_kernel, read_bundle
from codegen.bundle.records import Bundle
from codegen.generators import GENERATORS
from hal.spec.device import DeviceSpec
from hal.support.atomic import write_atomic
from hal.support.errors import InputError
from hal.support.store import cache_folder, digest
from roller.dynamo.regions import Region
from roller.dynamo.streaming import streams_weights, with_empty_caches
from sokoban.language.expression import TensorExpr

#: PyTorch's words for where a tensor lies.
ON_PROCESSOR, ON_GPU = "cpu", "cuda"

#: Bundles that a shelf holds at most: a gigabyte, more or less.
_MOST_BUNDLES = 8192

#: Folder of a shelf that says, for operators whose weights may lie in several orders, which was chosen.
ORDERS = "orders"

#: Letters of a key that a kernel's name ends in: enough for all operators of a process.
_KEY_LETTERS = 16


def is_processor(device: DeviceSpec) -> bool:
    """True for cores of a machine like this one, whose kernels PyTorch runs on tensors of the CPU."""
    return device.code_generator is not None and GENERATORS[device.code_generator].lane == "element"


@dataclass(frozen=True)
class Kernel:
    """A compiled operator.

    Attributes:
        bundle: as it lies on disk.
        seconds: how long it is expected to take, launches included.
        is_new: whether it was compiled now.
    """

    bundle: Bundle
    seconds: float
    is_new: bool


@dataclass(frozen=True)
class KernelShelf:
    """Bundles of a device by what they compute: a folder each, in the user's cache.

    Attributes:
        device: what kernels are compiled for.
        folder: where they lie.
        jobs: processes that compile.
        verify: whether the emulator runs new kernels, cut down, before they are written.
    """

    device: DeviceSpec
    folder: Path
    jobs: int
    verify: bool
    _seconds: dict[str, float] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(device: DeviceSpec, folder: Path | None = None, jobs: int | None = None) -> KernelShelf:
        """The shelf of a device, below ``~/.cache/roller`` where no folder is given."""
        # Kernels for processors run here at their full size before they are used.
        verify = not is_processor(device)
        return KernelShelf(device, folder or cache_folder("backend"), jobs or os.cpu_count() or 1, verify)

    def name_of(self, expr: TensorExpr) -> str:
        """The name of an operator: its kind's word and a digest of all that its kernel follows from."""
        key = digest(self.surroundings, repr(replace(expr, name="")))
        return f"{expr.name[:40]}_{key[:_KEY_LETTERS]}"

    @cached_property
    def surroundings(self) -> str:
        """All that kernels follow from besides their operators."""
        from codegen.compile.toolchain import toolchain

        return digest(toolchain(), repr(self.device))

    @property
    def lanes(self) -> int:
        """Elements of a vector of a processor in float32; 0 of a GPU."""
        return self.device.teu.lanes if is_processor(self.device) else 0

    @cached_property
    def _emptied(self) -> DeviceSpec:
        return with_empty_caches(self.device)

    def device_for(self, expr: TensorExpr) -> DeviceSpec:
        """The device as an operator finds it: one that takes as long as its weights comes upon empty caches."""
        return self._emptied if is_processor(self.device) and streams_weights(expr, self.device) else self.device

    def fastest(self, region: Region) -> Region:
        """A region in the order of its weights that is expected to take the least time; which one it is stays on the
        shelf."""
        if not region.orders:
            return region
        choice = self.folder / ORDERS / self.name_of(region.expr)
        with suppress(OSError, ValueError, IndexError):
            return region.in_order(int(choice.read_text("utf-8")))
        seconds = [self.seconds(each.expr) or math.inf for each in (region, *region.others)]
        number = seconds.index(min(seconds))
        with suppress(OSError):
            choice.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(choice, str(number))
        return region.in_order(number)

    def seconds(self, expr: TensorExpr) -> float:
        """Expected time of an operator's kernel, compiled or not; 0 where it has none."""
        name = self.name_of(expr)
        if name not in self._seconds:
            stored = self._stored(name, is_new=False)
            self._seconds[name] = self._constructed_seconds(expr) if stored is None else stored.seconds
        return self._seconds[name]

    def _constructed_seconds(self, expr: TensorExpr) -> float:
        from roller.construct.program import DIRECT
        from roller.programs import find_programs, form_on

        try:
            device = self.device_for(expr)
            programs = find_programs(form_on(expr, device), device, 1, "roller", (DIRECT,)).ranked(1)
        except InputError:
            return 0.0
        return programs[0].estimate.seconds if programs else 0.0

    def kernels(self, expressions: Sequence[TensorExpr]) -> Mapping[str, Kernel | str]:
        """Kernels by :meth:`name_of`, compiled where they are not there yet; a reason where there is none."""
        named = {self.name_of(expr): expr for expr in expressions}
        kernels: dict[str, Kernel | str] = {}
        for name in named:
            stored = self._stored(name, is_new=False)
            if stored is not None:
                kernels[name] = stored
        missing = [replace(expr, name=name) for name, expr in named.items() if name not in kernels]
        if missing:
            for name, reason in self._compile(missing):
                kernel = None if reason else self._stored(name, is_new=True)
                kernels[name] = reason if kernel is None else kernel
        return kernels

    def _stored(self, name: str, *, is_new: bool) -> Kernel | None:
        try:
            bundle = read_bundle(self.folder / name)
        except InputError:
            return None
        with suppress(OSError):
            os.utime(self.folder / name)
        return Kernel(bundle, choose_kernel(bundle, None).seconds, is_new)

    def _compile(self, expressions: Sequence[TensorExpr]) -> Iterator[tuple[str, str]]:
        """Bundles written for operators: the name, and why there is none."""
        from codegen.compile.cache import stored_first
        from roller.compile.bundles import WrongKernelError, write_bundle
        from roller.compile.pipeline import compile_operators
        from roller.compile.workers import worker_pool
        from roller.construct.program import DIRECT

        possible, refused = _constructible(expressions, self.device)
        yield from refused
        streaming = [expr for expr in possible if self.device_for(expr) is not self.device]
        others = [expr for expr in possible if self.device_for(expr) is self.device]
        batches = [batch for batch in (others, streaming) if batch]
        with worker_pool(self.jobs) as pool:
            stored_or_built = stored_first(pool)
            while batches:
                batch, done = batches.pop(0), 0
                device = self.device_for(batch[0])
                try:
                    for operator in compile_operators(
                        batch, device, top_k=1, verify=int(self.verify), pool=stored_or_built, method="roller",
                        algorithms=(DIRECT,),
                    ):  # fmt: skip
                        done += 1
                        try:
                            write_bundle(operator, self.device, self.folder)
                        except WrongKernelError as error:
                            yield operator.expr.name, str(error)
                        else:
                            yield operator.expr.name, ""
                except (InputError, BrokenProcessPool) as error:
                    # One of them has no kernel: the others are compiled by themselves.
                    if len(batch) - done == 1:
                        yield batch[done].name, str(error)
                    else:
                        batches += [[expr] for expr in batch[done:]]
        self._trim()

    def _trim(self) -> None:
        """Take out the bundles that were used longest ago, where there are too many."""
        bundles = sorted(self.folder.glob("*/manifest.json"), key=lambda path: path.parent.stat().st_mtime)
        for path in bundles[: max(0, len(bundles) - _MOST_BUNDLES)]:
            shutil.rmtree(path.parent, ignore_errors=True)


def _constructible(
    expressions: Sequence[TensorExpr], device: DeviceSpec
) -> tuple[list[TensorExpr], list[tuple[str, str]]]:
    """Operators that have programs on a device, and those that have none with the reason."""
    from roller.programs import form_on

    possible, refused = [], []
    for expr in expressions:
        try:
            form_on(expr, device)
        except InputError as error:
            refused.append((expr.name, str(error)))
        else:
            possible.append(expr)
    return possible, refused
