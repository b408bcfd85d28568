"""Stored graphs with all that another process needs for them, as PyTorch's files of compiled models hold them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen.bundle.reader import read_bundle
from codegen.bundle.records import MANIFEST
from hal.catalog import load_device
from hal.support.atomic import write_atomic
from hal.support.errors import InputError
from roller.dynamo.kernels import KernelShelf
from roller.dynamo.stored.graphs import StoredGraph
from roller.dynamo.stored.probes import remembered_probes


def parameter_name(number: int) -> str:
    """The name of a parameter of a frozen graph by its place among them."""
    return f"roller_parameter_{number}"


@dataclass(frozen=True)
class GraphPackage:
    """A stored graph whose parameters are inputs.

    Attributes:
        device: name of the processor that it was compiled for.
        surroundings: all that its kernels follow from besides their operators.
        graph: with parameters by :func:`parameter_name`.
        positions: where parameters are among the graph's inputs.
        other_positions: where the others are.
        kernels: files of its kernels' bundles, by folder and name.
    """

    device: str
    surroundings: str
    graph: StoredGraph
    positions: tuple[int, ...]
    other_positions: tuple[int, ...]
    kernels: Mapping[str, Mapping[str, bytes]]

    @property
    def own(self) -> Sequence[Any]:
        """A packaged graph has no tensors but its parameters."""
        return ()

    @staticmethod
    def of(
        graph: StoredGraph, shelf: KernelShelf, positions: tuple[int, ...], other_positions: tuple[int, ...]
    ) -> GraphPackage:
        """The package of a graph whose kernels are on a shelf."""
        names = sorted({operator.kernel for operator in graph.operators})
        kernels = {name: _files(shelf.folder / name) for name in names}
        return GraphPackage(shelf.device.name, shelf.surroundings, graph, positions, other_positions, kernels)

    def to_bytes(self) -> bytes:
        """The package as :meth:`from_bytes` reads it."""
        return pickle.dumps(self)

    @staticmethod
    def from_bytes(data: bytes) -> GraphPackage:
        """A package as :meth:`to_bytes` wrote it.

        Raises:
            RuntimeError: it was compiled for another processor, or by another release.
        """
        package: GraphPackage = pickle.loads(data)
        try:
            is_ours = package._shelf.surroundings == package.surroundings
        except InputError:  # a device that only the other machine has
            is_ours = False
        if not is_ours:
            raise RuntimeError(
                f"the graph was compiled for another {package.device} than this one, or by another release of roller:"
                " compile it here"
            )
        return package

    @property
    def _shelf(self) -> KernelShelf:
        return KernelShelf.of(load_device(self.device))

    def code(self, parameters: Sequence[Any], inputs: Sequence[Any]) -> Callable[..., Any]:
        """The graph with some parameters as a function of its other inputs."""
        shelf = self._shelf
        for name, files in self.kernels.items():
            _put(shelf.folder / name, files)
        tensors = {parameter_name(number): tensor for number, tensor in enumerate(parameters)}
        with remembered_probes():
            return self.graph.loaded(tensors, shelf)

    def package(self) -> GraphPackage:
        """The package itself."""
        return self


def _files(folder: Path) -> dict[str, bytes]:
    """Files that a bundle is loaded from."""
    bundle = read_bundle(folder)
    names = {MANIFEST, *(part.file for kernel in bundle.kernels for part in kernel.parts(bundle.arguments))}
    return {name: (folder / name).read_bytes() for name in sorted(names)}


def _put(folder: Path, files: Mapping[str, bytes]) -> None:
    """Put a bundle's files into a folder, the manifest last, unless it has one."""
    if (folder / MANIFEST).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(files, key=MANIFEST.__eq__):
        write_atomic(folder / name, files[name])
