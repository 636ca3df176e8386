"""Processor cores: whether a thread had one when it could run, and how many other programs used meanwhile."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
# Cores that an idle machine's own services, and Ray's, use.
_IDLE_CORES = 0.15


def waited_s() -> float | None:
    """Seconds that this thread has been ready to run and waited for a core since it started; None where unknown.

    Linux counts them: https://docs.kernel.org/scheduler/sched-stats.html, "schedstats for processes".
    """
    try:
        return int((_PROC / "thread-self" / "schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


class OtherPrograms:
    """The share of this machine's cores that other programs have used since it was made.

    Two of a machine's cores may be halves of one, so a neighbour slows a program that never waits for a core.
    """

    def __init__(self) -> None:
        self._started, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s(os.getpid())

    def share(self) -> float:
        """From 0 to 1; 0 where unknown."""
        busy_s, elapsed_s = _busy_s(), time.monotonic() - self._started
        known = (_PROC / "thread-self" / "children").exists()  # else our own processes would count as others
        if busy_s is None or self._busy_s is None or not known or elapsed_s < 0.1:
            return 0.0
        others = ((busy_s - self._busy_s) - (_own_s(os.getpid()) - self._own_s)) / elapsed_s
        cores = os.cpu_count() or 1
        return min(max((others - _IDLE_CORES) / cores, 0.0), 1.0)


def _busy_s() -> float | None:
    """Seconds that this machine's cores have been busy, the hypervisor's other guests included, summed over cores."""
    try:
        user, nice, system, _, _, irq, soft, stolen, *_ = map(int, (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _own_s(process: int) -> float:
    """CPU seconds of a process and of those that it has started, living or not."""
    try:
        fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
        tasks = list((_PROC / str(process) / "task").iterdir())
    except (OSError, ValueError):
        return 0.0  # it has ended; its parent counts it
    children: list[int] = []
    for task in tasks:
        with suppress(OSError):  # a thread may end meanwhile
            children += map(int, (task / "children").read_text().split())
    own = sum(map(int, fields[11:15])) / float(os.sysconf("SC_CLK_TCK"))
    return own + sum(map(_own_s, children))
