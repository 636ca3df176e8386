"""The connection to Ray ends without ending this process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.ray]

# A second thread leaves references in cycles and makes the garbage collector run, as any thread's allocations do.
_LEAVES_RAY = """
import threading
import time
import ray
from bsearch.cluster.connection import disconnect, start_local_ray

start_local_ray(1, num_cpus=1)
references = [ray.put(1) for _ in range(10_000)]

def litter():
    while references:
        cycle = [references.pop()]
        cycle.append(cycle)
        del cycle
        [[] for _ in range(1000)]
        time.sleep(1e-4)

thread = threading.Thread(target=litter, daemon=True)
thread.start()
time.sleep(0.2)
before = len(references)
disconnect()
print("left while it littered:", before > len(references) > 0)
thread.join()
print("no more references")
"""


@pytest.mark.long
def test_references_in_garbage_do_not_end_the_process_that_leaves_ray() -> None:
    ended = subprocess.run([sys.executable, "-c", _LEAVES_RAY], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == ["left while it littered: True", "no more references"]
