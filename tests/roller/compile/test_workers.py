"""Worker processes that start while their caller goes away."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hal.support.threads import ONE_THREAD

ROOT = Path(__file__).resolve().parents[3]

# Interrupted between the fork of a worker and the orders it waits for: a moment that only luck meets otherwise.
INTERRUPTED = """
import os
import time
from multiprocessing import forkserver

from roller.compile.workers import worker_pool

connect = forkserver.connect_to_new_process
read_signed = forkserver.read_signed
workers = []

def interrupted(fds):
    answer, orders = connect(fds)
    workers.append(read_signed(answer))
    if {closed}:
        os.close(orders)
        while os.path.exists(f"/proc/{{workers[0]}}"):  # it has said all it has to say
            time.sleep(0.01)
    raise KeyboardInterrupt

forkserver.connect_to_new_process = interrupted
try:
    with worker_pool(1) as pool:
        pool.submit(print)
except KeyboardInterrupt:
    print("interrupted", len(workers))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for a process in /proc")
@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize("closed", [True, False])
def test_a_worker_says_nothing_when_its_caller_is_interrupted(closed: bool) -> None:
    code = INTERRUPTED.format(closed=closed)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted 1\n", "")


THREADS = """
import os
from hal.support.threads import ONE_THREAD
from roller.compile.workers import worker_pool

with worker_pool(1) as pool:
    print({pool.submit(os.getenv, name).result() for name in ONE_THREAD})
"""


@pytest.mark.slow
@pytest.mark.usefixtures("device_compiler")
def test_a_worker_computes_references_on_one_thread() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ONE_THREAD}
    done = subprocess.run([sys.executable, "-c", THREADS], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{'1'}\n", "")
