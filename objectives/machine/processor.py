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
        self._started, self._busy_s, self._own = time.monotonic(), _busy_s(), _own(os.getpid())

    def share(self) -> float:
        """From 0 to 1; 0 where unknown."""
        busy_s, elapsed_s = _busy_s(), time.monotonic() - self._started
        known = (_PROC / "thread-self" / "children").exists()  # else our own processes would count as others
        if busy_s is None or self._busy_s is None or not known or elapsed_s < 0.1:
            return 0.0
        others = (busy_s - self._busy_s - self._used_s()) / elapsed_s
        cores = os.cpu_count() or 1
        return min(max((others - _IDLE_CORES) / cores, 0.0), 1.0)

    def _used_s(self) -> float:
        """CPU seconds of this process and its descendants since then."""
        own = _own(os.getpid())
        ended_before_s = sum(sum(times) for process, times in self._own.items() if process not in own)
        by_living_s = by_ended_s = 0.0
        for process, (cpu_s, children_s) in own.items():
            cpu_before_s, children_before_s = self._own.get(process, (0.0, 0.0))
            by_living_s += cpu_s - cpu_before_s
            by_ended_s += children_s - children_before_s
        # One that ended adds all its time to its parent's children, also what is from before; or nothing (Ray's own do).
        return by_living_s + max(by_ended_s - ended_before_s, 0.0)


def _busy_s() -> float | None:
    """Seconds that this machine's cores have been busy, the hypervisor's other guests included, summed over cores."""
    try:
        user, nice, system, _, _, irq, soft, stolen, *_ = map(int, (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + soft + stolen) / os.sysconf("SC_CLK_TCK")


def _own(process: int) -> dict[int, tuple[float, float]]:
    """CPU seconds of a process and of its living descendants: their own, and those of children that they waited for."""
    try:
        fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
        tasks = list((_PROC / str(process) / "task").iterdir())
    except (OSError, ValueError):
        return {}  # it has ended
    children: list[int] = []
    for task in tasks:
        with suppress(OSError):  # a thread may end meanwhile
            children += map(int, (task / "children").read_text().split())
    user, system, user_of_children, system_of_children = (int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15])
    own = {process: (user + system, user_of_children + system_of_children)}
    for child in children:
        own |= _own(child)
    return own
