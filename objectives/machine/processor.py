"""Processor cores: whether a thread had one when it could run, and who had it instead."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from .host import cgroup_limit

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


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Counters of this machine's cores at one moment; the difference of two is what happened between them.

    Each is None where it is not counted, which is not zero. That holds for sums and differences too.

    Args:
        elapsed_s: wall-clock time.
        busy_s: in which programs of this machine ran, summed over cores.
        stolen_s: in which they could have run, but the virtual machine's host ran something else, summed over cores. A host
            may leave it at zero, and none counts a neighbour on the other half of a physical core.
        waited_s: in which this thread was ready to run and waited for a core: throttled or not, but not while it was stolen.
        throttled_s: in which this process's control groups had used up their limits of processor time, summed over cores.
    """

    elapsed_s: float
    busy_s: float | None = None
    stolen_s: float | None = None
    waited_s: float | None = None
    throttled_s: float | None = None

    @classmethod
    def now(cls, *, waits: bool = False) -> Self:
        """Read them.

        Args:
            waits: this thread's waits for a core too; beside its own loaders and ranks they say nothing about others.
        """
        try:
            busy_s, stolen_s = busy_and_stolen_s((_PROC / "stat").read_text())
        except OSError:
            busy_s, stolen_s = None, None
        return cls(
            time.monotonic(),
            busy_s,
            stolen_s,
            waited_s() if waits else None,
            throttled_s(cgroup_limit("cpu.stat")),
        )

    def __add__(self, other: Self) -> Self:
        return self._each(other, 1)

    def __sub__(self, earlier: Self) -> Self:
        return self._each(earlier, -1)

    def _each(self, other: Self, sign: int) -> Self:
        pairs = [(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)]
        each: list[Any] = [
            None if mine is None or theirs is None else mine + sign * theirs for mine, theirs in pairs
        ]
        return type(self)(*each)

    @property
    def stolen_share(self) -> float | None:
        """Of the core time that this machine's programs could use, what its host gave to other virtual machines.

        >>> HostLoad(10.0, busy_s=9.0, stolen_s=3.0).stolen_share, HostLoad(10.0, busy_s=9.0).stolen_share
        (0.25, None)
        """
        if self.busy_s is None or self.stolen_s is None:
            return None
        wanted_s = self.busy_s + self.stolen_s
        return max(self.stolen_s, 0.0) / wanted_s if wanted_s > 0 else 0.0

    @property
    def held_back_s(self) -> float | None:
        """Seconds that this thread waited because of its own control groups' limits; None where its waits are not known.

        >>> HostLoad(10.0, waited_s=3.0, throttled_s=4.0).held_back_s, HostLoad(10.0, throttled_s=4.0).held_back_s
        (3.0, None)
        """
        return (
            None
            if self.waited_s is None or self.throttled_s is None
            else min(self.waited_s, self.throttled_s)
        )

    @property
    def held_back_share(self) -> float | None:
        """The same as a share of the time that was not spent waiting for others.

        >>> HostLoad(10.0, waited_s=6.0, throttled_s=4.0).held_back_share
        0.5
        """
        if self.held_back_s is None or self.waited_s is None:
            return None
        alone_s = self.elapsed_s - self.waited_s + self.held_back_s
        return self.held_back_s / alone_s if alone_s > 0 else 0.0


def busy_and_stolen_s(stat: str) -> tuple[float | None, float | None]:
    """Seconds of all cores together, from the text of `/proc/stat`: with a program, and with another virtual machine's.

    Source: https://docs.kernel.org/filesystems/proc.html#miscellaneous-kernel-statistics-in-proc-stat
    """
    name, *columns = stat.split("\n", 1)[0].split() or [""]
    if name != "cpu" or not all(map(str.isdecimal, columns)) or len(columns) < 7:
        return None, None
    # Guests' time, from the ninth column on, is a part of the user's.
    user, nice, system, _, _, irq, soft, *further = (
        int(column) / os.sysconf("SC_CLK_TCK") for column in columns
    )
    return user + nice + system + irq + soft, further[0] if further else None


def throttled_s(groups: Sequence[Sequence[str]]) -> float | None:
    """Seconds of all cores together in which a limit was used up, from the words of each group's `cpu.stat`.

    The most of all groups, since what holds back an outer one holds back those inside it. None where no group has a limit's
    counters. Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/scheduler/sched-bwc.html

    >>> throttled_s([["usage_usec", "9", "throttled_usec", "2000000"], ["throttled_time", "3000000000"], ["usage_usec", "9"]])
    3.0
    """
    found = []
    for words in groups:
        counters = dict(zip(words[::2], words[1::2], strict=False))
        for name, per_second in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
            if (counter := counters.get(name, "")).isdecimal():
                found.append(int(counter) / per_second)
    return max(found, default=None)


class OtherPrograms:
    """The share of this machine's cores that other programs have used since it was made.

    Two of a machine's cores may be halves of one, so a neighbour slows a program that never waits for a core.
    """

    def __init__(self) -> None:
        self._before, self._own = HostLoad.now(), _own(os.getpid())

    def share(self) -> float:
        """From 0 to 1; 0 where unknown."""
        load = HostLoad.now() - self._before
        known = (_PROC / "thread-self" / "children").exists()  # else our own processes would count as others
        if load.busy_s is None or not known or load.elapsed_s < 0.1:
            return 0.0
        others = (load.busy_s - self._used_s()) / load.elapsed_s
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
    user, system, user_of_children, system_of_children = (
        int(field) / os.sysconf("SC_CLK_TCK") for field in fields[11:15]
    )
    own = {process: (user + system, user_of_children + system_of_children)}
    for child in children:
        own |= _own(child)
    return own
