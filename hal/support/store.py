"""A bounded folder of finished results in the user's cache: written whole, the longest unused first to go."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hal.support.atomic import write_atomic

#: Bytes that a store may hold by default.
DEFAULT_LIMIT_BYTES = 1 << 30

#: Share of the limit that is left when a store had to be cut, so that the next result does not cut it again.
CUT_TO = 0.8

_DIGEST_BYTES = 32

#: Where the packages of this project lie, and their files that are code or data.
_ROOT = Path(__file__).parents[2]
_SUFFIXES = (".py", ".c", ".cpp", ".h", ".toml")


def cache_folder(name: str) -> Path:
    """``~/.cache/roller/<name>``, or below XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roller" / name


def digest(*texts: str | bytes) -> str:
    """A key that only these texts in this order have.

    >>> digest("ab", "c") == digest("a", "bc")
    False
    """
    digest_of_all = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for text in texts:
        data = text.encode() if isinstance(text, str) else text
        digest_of_all.update(len(data).to_bytes(8, "little"))
        digest_of_all.update(data)
    return digest_of_all.hexdigest()


def code_texts(*folders: str) -> Iterator[str | bytes]:
    """Paths and contents of this project's files of code and data in some folders, for :func:`digest`."""
    for top in folders:
        for folder, subfolders, names in os.walk(_ROOT / top):
            subfolders.sort()
            for name in sorted(names):
                if name.endswith(_SUFFIXES):
                    path = os.path.join(folder, name)
                    with open(path, "rb") as file:
                        yield os.path.relpath(path, _ROOT)
                        yield file.read()


def stamps(folder: str, suffixes: tuple[str, ...], others: Collection[str] = ("__pycache__",)) -> Iterator[str]:
    """Paths, sizes and times of change of the files below a folder, in a fixed order: contents are as they were where
    these are. Folders of the names in ``others`` are left out."""
    found, folders = [], [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in others:
                        folders.append(entry.path)
                elif entry.name.endswith(suffixes):
                    status = entry.stat()
                    found.append(f"{entry.path} {status.st_size} {status.st_mtime_ns}")
    yield from sorted(found)


def code_digest(*folders: str) -> str:
    """A digest of :func:`code_texts`, which are read where a file has changed since they were, or where
    ``ROLLER_CACHE`` is 0."""
    if os.environ.get("ROLLER_CACHE") == "0":
        return digest(*code_texts(*folders))
    store = Store(cache_folder("sources"))
    stamp = digest(*(text for top in folders for text in stamps(str(_ROOT / top), _SUFFIXES)))
    known = store.read(stamp)
    if known is None:
        known = digest(*code_texts(*folders)).encode()
        store.write(stamp, known)
    return known.decode()


def decoded(data: bytes | None, kind: Any) -> Any:
    """A kept value of a type; None where there is none, or it is none of that type."""
    import msgspec  # who loads a bundle reads nothing that was encoded, and may lack it

    try:
        return None if data is None else msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


@dataclass(frozen=True)
class Store:
    """Results by key, a file each, in a folder that only its owner can enter.

    A result that cannot be written, or is damaged, is as good as none: nothing here fails for want of a cache.
    """

    folder: Path

    @property
    def limit_bytes(self) -> int:
        """The bytes that results may take together."""
        try:
            return int(self._limit_file.read_text())
        except (OSError, ValueError):
            return DEFAULT_LIMIT_BYTES

    @property
    def _limit_file(self) -> Path:
        return self.folder / "limit"

    def set_limit(self, limit_bytes: int) -> None:
        """Keep to ``limit_bytes`` from now on, in later processes too."""
        self._make()
        write_atomic(self._limit_file, f"{limit_bytes}\n")
        self.trim()

    def read(self, key: str) -> bytes | None:
        """The result of that key, which counts as used now; None where there is none or it is not as it was written."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        checksum, result = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.blake2b(result, digest_size=_DIGEST_BYTES).digest() == checksum:
            return result
        with suppress(OSError):
            path.unlink()
        return None

    def write(self, key: str, result: bytes) -> None:
        """Keep a result."""
        with suppress(OSError):
            self._make()
            path = self._path(key)
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, hashlib.blake2b(result, digest_size=_DIGEST_BYTES).digest() + result)

    def remove(self, key: str) -> None:
        """Forget the result of ``key``, if it is there."""
        with suppress(OSError):
            self._path(key).unlink()

    def trim(self) -> None:
        """Remove results, the longest unused first, where all together take more than the limit."""
        entries = sorted(self._entries())
        total, limit = sum(size for _, size, _ in entries), self.limit_bytes
        if total <= limit:
            return
        for _, size, path in entries:
            if total <= CUT_TO * limit:
                return
            with suppress(OSError):
                path.unlink()
            total -= size

    def clear(self) -> None:
        """Remove every result; the limit stays."""
        for _, _, path in self._entries():
            with suppress(OSError):
                path.unlink()

    def usage(self) -> tuple[int, int]:
        """Number of results, and their bytes."""
        sizes = [size for _, size, _ in self._entries()]
        return len(sizes), sum(sizes)

    def _make(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key[2:]

    def _entries(self) -> Iterator[tuple[int, int, Path]]:
        """Last use in ns, bytes and place of every result, and of what a killed process left half-written."""
        for path in self.folder.glob("??/*"):
            with suppress(OSError):
                status = path.stat()
                yield status.st_mtime_ns, status.st_size, path
