"""Words that a harvest writes and a comparison reads: by Python alone, like all code of a machine with a GPU."""

from __future__ import annotations

import json
from pathlib import Path

#: Results of a harvest, in its folder.
HARVEST = "results.json"

#: Their format; it counts up when a reader of before would misunderstand them.
HARVEST_FORMAT = 2


def kernel_kind(bundle: Path, schedule_file: str, algorithm: str = "") -> str:
    """Instruction of a kernel and the way of its operands, ``wgmma_64xNx16, clusters of 2``, by its schedule's file.

    Args:
        bundle: folder of the kernel's files.
        schedule_file: name of its schedule's file.
        algorithm: of a kernel of several launches, which is its kind; empty for others.
    """
    if algorithm:
        return algorithm.partition(",")[0]
    path = bundle / schedule_file
    schedule = json.loads(path.read_bytes()) if path.is_file() else {}
    words = [str(schedule.get("instruction", "fma"))]
    words += ["attention"] if "keys" in schedule else []
    cluster = schedule.get("cluster", 0)
    words += [f"clusters of {cluster}" if cluster > 1 else "bulk copies"] if cluster else []
    return ", ".join(words)
