"""The connection to Ray ends without ending this process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from bsearch.cluster import connection
from ray._private import services

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


def test_a_node_that_is_slow_to_begin_is_waited_for_and_a_dead_one_is_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def get_node(address: str) -> str:
        asked.append(address)
        if len(asked) < 3:
            raise RuntimeError("it has not begun")
        return "node"

    monkeypatch.setattr(services, "get_node", get_node)
    with connection._unlike_rays_defaults():
        assert services.get_node("head") == "node"
    assert services.get_node is get_node
    asked.clear()
    monkeypatch.setattr(connection, "_BEGINS_S", 0.0)
    with connection._unlike_rays_defaults(), pytest.raises(RuntimeError, match="not begun"):
        services.get_node("head")
