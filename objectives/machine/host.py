"""Cores and memory of this machine that this process may use: fewer where it is bound to some cores, or in a container."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath


def bound_cores() -> int:
    """Cores that this process may run on, a container's limit aside."""
    # Neither macOS nor Windows binds a process to cores.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_here() -> int:
    """Cores that this process may use: `bound_cores`, or fewer where its container gets less time; at least 1."""
    return max(int(min([float(bound_cores()), *container_cores()])), 1)


def container_cores(limits: Sequence[Sequence[str]] | None = None) -> list[float]:
    """What each control group of this process allows, in cores; empty where none does."""
    read = cgroup_limit("cpu.max") if limits is None else limits
    return [int(quota) / int(period) for quota, period in read if quota != "max"]


def host_bytes() -> int:
    """Physical memory of this machine, or what its container may use."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *container_bytes()])


def container_bytes(limits: Sequence[Sequence[str]] | None = None) -> list[int]:
    """What each control group of this process allows; empty where none does."""
    read = cgroup_limit("memory.max") if limits is None else limits
    return [int(words[0]) for words in read if words and words[0] != "max"]


def cgroup_limit(
    file: str, cgroups: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")
) -> list[list[str]]:
    """The words of a file (`cpu.max`, `memory.max`, `cpu.stat`) in this process's control group and in all its ancestors.

    Version 1 has a hierarchy for each controller; it and version 2 may both be there.
    """
    try:
        own = [line.split(":", 2) for line in mine.read_text().splitlines()]
    except OSError:
        return []
    controller, found = file.split(".")[0], []
    for _, controllers, path in (fields for fields in own if len(fields) == 3):
        if controllers and controller not in controllers.split(","):
            continue
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            with suppress(OSError):
                found.append((cgroups / controllers / folder / file).read_text().split())
    return found
