"""``roller cache``: the finished kernels that ``roller compile`` keeps, the steps that ``daydream`` captured, and what
was compiled for this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import click

from hal.support.errors import InputError
from hal.support.store import Store, cache_folder

#: Bytes of a unit as people write it.
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

#: Folders of what is compiled for this machine when it is first wanted: C of this package, the runtime of the emulator,
#: and what PoCL keeps of the kernels that it ran. There are also measurements of this processor, which stay.
COMPILED = ("native", "emulator", "pocl")

#: Folder of the captured steps that ``daydream`` keeps.
CAPTURES = "captures"


@click.command("cache")
@click.option("--size", default=None, metavar="BYTES", help="Keep at most so much, as in 512M or 2G, from now on.")
@click.option(
    "--clear/--no-clear", default=False, help="Remove everything that can be made again; what was measured stays."
)
def cache_command(size: str | None, clear: bool) -> None:
    """Where finished kernels are kept, how many there are, and how much room they may take; steps that daydream
    captured; and what was compiled for this machine itself, which has no limit."""
    from codegen.compile.toolchain import kernel_store

    store, steps = kernel_store(), Store(cache_folder(CAPTURES))
    if size is not None:
        store.set_limit(parse_bytes(size))
    if clear:
        store.clear()
        steps.clear()
        for path in (path for name in COMPILED for path, _ in _files(name)):
            with suppress(OSError):
                path.unlink()
    count, used = store.usage()
    click.echo(f"{store.folder}: {count} results, {bytes_text(used)} of at most {bytes_text(store.limit_bytes)}")
    count, used = steps.usage()
    click.echo(f"{steps.folder}: {count} captured steps, {bytes_text(used)} of at most {bytes_text(steps.limit_bytes)}")
    folders = ", ".join(f"{name} {bytes_text(sum(size for _, size in _files(name)))}" for name in COMPILED)
    click.echo(f"{store.folder.parent}: {folders}, compiled for this machine")


def _files(name: str) -> Iterator[tuple[Path, int]]:
    """Contents of a folder of the cache, the folders in it included, and its bytes; other processes change it."""
    for path in cache_folder(name).rglob("*"):
        with suppress(OSError):
            if path.is_file():
                yield path, path.stat().st_size


def parse_bytes(text: str) -> int:
    """Bytes of a size as people write it.

    >>> parse_bytes("512M") == 512 * 2**20, parse_bytes("1.5 GiB") == 3 * 2**29
    (True, True)

    Raises:
        InputError: it is no size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise InputError("--size", f"{text!r} is no number of bytes", "write it as 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def bytes_text(count: int) -> str:
    """Bytes in the largest unit that keeps the number above one.

    >>> bytes_text(1536), bytes_text(0)
    ('1.5 KiB', '0 B')
    """
    unit = max((name for name, size in _UNITS.items() if count >= size), key=_UNITS.__getitem__, default="")
    return f"{count / _UNITS[unit]:.3g} {unit}iB" if unit else f"{count} B"
