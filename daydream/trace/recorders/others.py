"""Files that hold no timeline or hide it, each with the command that makes one that can be read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hal.support.errors import InputError

_KINETO = "record with torch.profiler and export_chrome_trace"


@dataclass(frozen=True, kw_only=True)
class OtherFormat:
    """A format by the end of its name or its first bytes.

    Attributes:
        endings: of names, in small letters.
        problem: what it is.
        remedy: the command; ``{path}`` and ``{stem}`` are filled in.
        begins: pattern that the first bytes match; None where they say nothing.
    """

    endings: tuple[str, ...]
    problem: str
    remedy: str
    begins: re.Pattern[bytes] | None = None


_NSYS, _ROCPROF = "nsys export --type sqlite", "rocprofv3 --runtime-trace --output-format json"

_FORMATS = (
    OtherFormat(
        endings=(".nsys-rep", ".qdrep", ".qdstrm"),
        problem="is a report of Nsight Systems, whose format is not public",
        remedy=f"convert it with {_NSYS} -o {{stem}}.sqlite {{path}}",
    ),
    OtherFormat(
        endings=(".ncu-rep",),
        begins=re.compile(rb"NVR\0"),
        problem="is a report of Nsight Compute: counters of kernels that ran alone, no timeline",
        remedy=f"record one with nsys profile -o {{stem}} and convert it with {_NSYS} {{stem}}.nsys-rep",
    ),
    OtherFormat(
        endings=(".pftrace", ".perfetto-trace", ".perfetto"),
        begins=re.compile(rb"\n[^\0]{0,63}?[\0-\x08]", re.DOTALL),
        problem="is a Perfetto trace in protocol buffers",
        remedy=f"record with {_ROCPROF}, or convert one of PyTorch's with traceconv json {{path}} {{stem}}.json",
    ),
    OtherFormat(endings=(".otf2",), problem="is an OTF2 trace", remedy=f"record with {_ROCPROF}"),
    OtherFormat(
        endings=("perf.data",),
        begins=re.compile(rb"PERFILE2"),
        problem="is a file of perf: samples of the CPU, no kernel of a GPU",
        remedy=f"{_KINETO}, or nsys profile --trace=cuda,nvtx",
    ),
    OtherFormat(
        endings=(".xplane.pb",),
        problem="is a profile of XLA in protocol buffers",
        remedy="record with nsys profile --trace=cuda,nvtx, or rocprofv3",
    ),
    OtherFormat(
        endings=(".et", ".chakra"),
        problem="is a Chakra execution trace in protocol buffers: operators and their order, without times",
        remedy="give the Kineto trace that it was linked from "
        "(chakra_jsonizer --input_filename {path} --output_filename {stem}.json shows what is in it)",
    ),
    OtherFormat(
        endings=(".pickle", ".pkl"),
        begins=re.compile(rb"\x80[\x02-\x05]"),
        problem="is a pickle, as of PyTorch's memory snapshots: allocations, no timeline",
        remedy=f"{_KINETO} with profile_memory=True",
    ),
    OtherFormat(
        endings=("_trace.csv", "_stats.csv"),
        begins=re.compile(rb'"?Kind"?,"?Agent_Id|"?Domain"?,"?Function'),
        problem="is a table of rocprofv3, one of several that make a timeline",
        remedy=f"record with {_ROCPROF}",
    ),
)

#: Compressed files by their first bytes, with what decompresses them.
_COMPRESSED = (
    (b"PK\x03\x04", "a zip archive", "unzip"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "zstd -d"),
    (b"BZh", "compressed with bzip2", "bzip2 -d"),
    (b"\xfd7zXZ\x00", "compressed with xz", "xz -d"),
)

_PASSES = re.compile(rb'"cat"\s*:\s*"(?:forward|backward)-(?:compute|send|recv)"')
_EXECUTION_TRACE = re.compile(rb'"schema"\s*:\s*"\d+\.\d+\.\d+-chakra')


def refuse_others(path: Path, head: bytes) -> None:
    """Refuses a file that holds no timeline that can be read.

    Args:
        path: its name.
        head: its first bytes, decompressed.

    Raises:
        InputError: it is of such a format; the remedy is the command that makes another of it.
    """
    for begin, what, command in _COMPRESSED:
        if head.startswith(begin):
            raise InputError(str(path), f"is {what}", f"decompress it with {command} {path}")
    name, stem = path.name.lower(), str(path)
    is_json = head.lstrip()[:1] in (b"{", b"[")
    for each in _FORMATS:
        named = next((ending for ending in each.endings if name.endswith(ending)), "")
        if (head and named and not is_json) or (each.begins is not None and each.begins.match(head) is not None):
            stem = stem[: len(stem) - len(named)] if named.startswith(".") else stem
            raise InputError(str(path), each.problem, each.remedy.format(path=path, stem=stem))
    if _EXECUTION_TRACE.search(head):
        raise InputError(
            str(path), "is an execution trace of PyTorch (Chakra): operators without times on a GPU",
            "give the Kineto trace of the same run, and this one with --execution-trace",
        )  # fmt: skip
    if _PASSES.search(head):
        raise InputError(
            str(path), "is a timeline of a job's passes and exchanges (Megatron's timers): no kernels, no calls",
            "record ranks with torch.profiler, and give their folder to daydream merge",
        )  # fmt: skip
