"""Wait until a cluster's machines have joined: `python -m bsearch.cluster.submit.joined MACHINES SECONDS`, with RAY_ADDRESS."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is imported: it reads this once

import ray


def main(machines: int, limit_s: float) -> int:
    """Exit code 0 once `machines` machines have joined, 1 if they have not within `limit_s`."""
    host, _, port = os.environ["RAY_ADDRESS"].rpartition(":")
    end = time.monotonic() + limit_s
    joined = 0
    while time.monotonic() < end:
        try:
            if not ray.is_initialized():
                socket.create_connection(
                    (host, int(port)), timeout=5
                ).close()  # Ray itself would wait for minutes
                ray.init(address=f"{host}:{port}", log_to_driver=False, logging_level=logging.ERROR)
            joined = sum(bool(node["Alive"]) for node in ray.nodes())
        except (OSError, RuntimeError):
            pass  # not up yet
        if joined >= machines:
            return 0
        time.sleep(0.5)
    print(
        f"bsearch: {joined} of {machines} machines joined Ray at {host}:{port} within {limit_s:g} s",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2])))
