"""A trial over several machines: how its devices are shared out, and Ray as what starts its ranks there.

A trial keeps to one machine where one has room. Otherwise it is given equal shares of several, as large as possible, in one
placement group: a bundle for each share, packed on as few machines as possible.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .connection import nodes

# Ray notices after half a minute that a machine no longer answers.
_MISSED_S, _ASKED_S = 40.0, 0.5
# Ray's resource for a kind of accelerator.
KIND = "accelerator_type:"
# The smallest amount that can be requested of the resource that names a kind.
_KIND_AMOUNT = 0.001


def resources_of(devices: int, cores: int, gpus: float, kind: str | None) -> dict[str, float]:
    """The Ray resources of a number of a trial's devices on one machine.

    Args:
        cores: CPUs of each device.
        gpus: of each device.
        kind: of accelerator that the machine has to have.

    >>> resources_of(2, cores=4, gpus=0.5, kind="A100")
    {'CPU': 8, 'GPU': 1.0, 'accelerator_type:A100': 0.001}
    """
    needed: dict[str, float] = {"CPU": cores * devices}
    if gpus:
        needed["GPU"] = devices * gpus
    if kind is not None:
        needed[KIND + kind] = _KIND_AMOUNT
    return needed


def shares(devices: int, rooms: Iterable[int]) -> tuple[int, ...] | None:
    """How many of a trial's devices are on each machine, the largest share first; None where they do not fit.

    Args:
        rooms: the devices of each machine.

    >>> shares(4, [8, 8]), shares(16, [8, 8]), shares(12, [8, 4, 4]), shares(16, [8, 4, 4]), shares(3, [1, 1])
    ((4,), (8, 8), (8, 4), (4, 4, 4, 4), None)
    """
    rooms = list(rooms)
    for share in range(min(devices, max(rooms, default=0)), 0, -1):
        split = [share] * (devices // share) + ([devices % share] if devices % share else [])
        if _placed(split, rooms) is not None:
            return tuple(split)
    return None


def trials_that_fit(split: Sequence[int], rooms: Iterable[int]) -> int:
    """How many trials with these shares fit side by side.

    >>> trials_that_fit((2,), [8, 5]), trials_that_fit((8, 8), [8, 8, 8]), trials_that_fit((8, 4), [8, 8, 8, 8])
    (6, 1, 2)
    """
    left: list[int] | None = list(rooms)
    count = -1
    while left is not None:
        count, left = count + 1, _placed(split, left)
    return count


def _placed(split: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """What is left of each room with these shares in them, each where it leaves least; None where one does not fit."""
    left = list(rooms)
    for share in split:
        best = min(
            (place for place, room in enumerate(left) if room >= share), key=left.__getitem__, default=None
        )
        if best is None:
            return None
        left[best] -= share
    return left


class RayMachines:
    """The machines of this worker's placement group, with one bundle for each share of a trial's ranks.

    Implements `objectives.parallel.machines.Machines`.
    """

    def __init__(self, shares: tuple[int, ...]) -> None:
        self.shares = shares
        self.address = ray.util.get_node_ip_address()
        self._group: Any = ray.util.get_current_placement_group()
        self._nodes: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        self._calls: list[Any] = []

    def start(self, machine: int, function: Callable[..., None], *arguments: Any) -> None:
        if machine == 1:  # of another set of ranks
            self._calls.clear()
        bundle = self._group.bundle_specs[machine]
        place: Any = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=machine)
        task = ray.remote(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            max_retries=0,
            max_calls=1,  # what its ranks leave behind ends with its process
            scheduling_strategy=place,
        )(function)
        self._calls.append(task.remote(*arguments))

    def failed(self) -> str:
        done, self._calls = (
            ray.wait(self._calls, num_returns=len(self._calls), timeout=0) if self._calls else ([], [])
        )
        for call in done:
            try:
                ray.get(call)
            except RayError as error:
                return str(error).strip().splitlines()[-1]
        return ""

    def has_left(self, machine: int) -> bool:
        node, until = self._nodes[machine], time.monotonic() + _MISSED_S
        while time.monotonic() < until:
            with suppress(ConnectionError):
                if node not in {entry["NodeID"] for entry in nodes()}:
                    return True
            time.sleep(_ASKED_S)
        return False


@cache  # ranks are kept for the next trial of the same worker
def machines_of(shares: tuple[int, ...]) -> RayMachines | None:
    """Those of this worker's placement group; None where all of a trial's ranks are on its own machine."""
    return RayMachines(shares) if len(shares) > 1 else None
