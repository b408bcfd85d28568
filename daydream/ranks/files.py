"""The files of a job's ranks: which file is of which rank and host, and whether all are there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from daydream.trace.files import ENDINGS, read_trace
from daydream.trace.trace import Trace
from hal.support.errors import InputError, listed

_RANK = re.compile(r"rank[-_]?(\d{1,7})(?!\d)", re.IGNORECASE)
#: What ``torch.profiler.tensorboard_trace_handler`` calls a file: host, process, time.
_HANDLER = re.compile(r"^(?P<host>.+)_\d+\.\d+\.pt\.trace\.json(?:\.gz)?$")


@dataclass(frozen=True)
class RankFile:
    """A trace with the rank and host that it is of. `host` tells clocks apart; it is the file's name where unknown."""

    path: Path
    rank: int
    host: str
    trace: Trace


def trace_files(paths: Sequence[Path]) -> list[Path]:
    """The files named, or all traces in the folders named, by name.

    Raises:
        InputError: a folder has no trace, or fewer than two files are left.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(entry for entry in path.iterdir() if entry.name.endswith(ENDINGS) and entry.is_file())
            if not inside:
                raise InputError(str(path), "has no trace", f"give a folder of files that end in {listed(ENDINGS)}")
            files += inside
        else:
            files.append(path)
    if len(files) < 2:
        raise InputError(str(files[0]) if files else "RANK", "is the only trace", "give those of two ranks or more")
    return files


def read_rank(path: Path, hosts: int = 0) -> RankFile:
    """One file, whole.

    Args:
        path: a file of a profiler.
        hosts: how many ranks share a host, rank by rank; 0 for what the file says.

    Raises:
        InputError: it cannot be read, is cut off, or does not tell its rank.
    """
    trace = read_trace(path)
    if not trace.complete:
        raise InputError(str(path), "is cut off: its end is missing", "copy or record it again")
    rank = _rank_of(path, trace)
    return RankFile(path, rank, f"host {rank // hosts}" if hosts else _host_of(path, trace), trace)


def _rank_of(path: Path, trace: Trace) -> int:
    rank = trace.distributed.get("rank")
    if type(rank) is int and rank >= 0:
        return rank
    named = _RANK.search(path.name)
    if named is None:
        raise InputError(
            str(path), "does not tell its rank", "call the file rank0.json, or record with a process group"
        )
    return int(named[1])


def _host_of(path: Path, trace: Trace) -> str:
    if trace.host:
        return trace.host
    handled = _HANDLER.match(path.name)
    return handled["host"] if handled else path.name


class Roll:
    """Who has come: refuses a rank that comes twice, and tells which are missing."""

    def __init__(self) -> None:
        self._paths: dict[int, Path] = {}
        self._world: tuple[int, Path] | None = None

    def add(self, rank: int, path: Path, size: object) -> None:
        """Notes a file.

        Args:
            rank: whose it is.
            path: the file.
            size: how many ranks it says that there are, if it says so.

        Raises:
            InputError: another file is of this rank, or the two disagree on the number of ranks.
        """
        if rank in self._paths:
            raise InputError(str(path), f"is of rank {rank}, and so is {self._paths[rank]}", "give one file per rank")
        self._paths[rank] = path
        if type(size) is not int:
            return
        if rank >= size:
            raise InputError(str(path), f"is of rank {rank} of {size} ranks", "record it again")
        if self._world is not None and self._world[0] != size:
            raise InputError(
                str(path), f"is of a job of {size} ranks, {self._world[1]} of {self._world[0]}", "give one job's"
            )
        self._world = self._world or (size, path)

    def check_all(self) -> None:
        """Refuses a job of which ranks are missing.

        Raises:
            InputError: names the missing ones.
        """
        first = min(self._paths)
        size, path = self._world or (max(self._paths) + 1, self._paths[first])
        missing = [str(rank) for rank in range(size) if rank not in self._paths]
        if missing:
            shown = listed(missing) if len(missing) <= 6 else f"{len(missing)} of them, {missing[0]} the first,"
            have = "has" if len(missing) == 1 else "have"
            raise InputError(
                str(path),
                f"is of a job of {size} ranks, of which rank{'' if len(missing) == 1 else 's'} {shown} {have} no file",
                "add them, or write --partial",
            )
