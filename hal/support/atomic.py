"""Files and directories that appear whole or not at all, whatever interrupts their writing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_atomic(path: Path | str, data: bytes | str) -> None:
    """Replace the file at ``path`` in one step.

    The data goes to a temporary file in the same folder, which is renamed when complete and removed when anything, a
    full disk or Ctrl-C included, stops the writing. Text is written as UTF-8 with its line ends as they are.
    """
    target = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:64]}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


@contextmanager
def staged_directory(final: Path | str) -> Iterator[Path]:
    """A directory to fill; it becomes ``final`` when the block ends and disappears when the block fails.

    It is built under a temporary name next to ``final``. A directory already at ``final`` stays untouched until the new
    one is complete, then gives way to it; if that last step fails, it is put back.
    """
    target = Path(final)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name[:64]}.", suffix=".part", dir=target.parent))
    try:
        os.chmod(staging, 0o777 & ~_umask())
        yield staging
        _replace_directory(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _replace_directory(staging: Path, target: Path) -> None:
    """Rename ``staging`` to ``target``; POSIX renames onto an empty directory only, so a full one steps aside first."""
    if not os.path.lexists(target):
        os.rename(staging, target)
        return
    if target.is_symlink() or not target.is_dir():
        raise NotADirectoryError(f"{target} exists and is not a directory")
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name[:64]}.", suffix=".old", dir=target.parent))
    try:
        os.rename(target, aside)
        try:
            os.rename(staging, target)
        except BaseException:
            os.rename(aside, target)
            raise
    except BaseException:
        with suppress(OSError):
            os.rmdir(aside)  # still empty where the old directory never moved; never removed with anything in it
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _umask() -> int:
    """The process's umask, which can only be read by setting it; ``mkstemp`` ignores it and makes private files."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
