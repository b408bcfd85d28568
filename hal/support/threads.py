"""Cores of a process, and threads of numerical libraries in processes of which there is one per core."""

from __future__ import annotations

import os

#: Variables that NumPy's and PyTorch's libraries read when they are loaded: a thread each. Threads that wait for work
#: spin for tens of milliseconds after every product, on cores on which other processes compute: on two cores with two
#: such processes small products took ten times the processor time.
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"), "1")


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
