"""The time of a trial's all-reduce over all machines and within each: what the network between them costs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...spaces.errors import ProfilingError
from ...spaces.laws.step_time import Exchange
from ..machine import accelerator
from ..parallel.meeting import RankDiedError
from ..parallel.rank_processes import over_ranks, shares_of

# The first sums open connections.
_DROPPED, _ROUNDS = 3, 15


def exchange_over(
    devices: int, kind: Literal["cpu", "gpu"], cpus: int, gradient_bytes: int
) -> Exchange | None:
    """Time the all-reduce of a trial's gradients over its ranks; None where they are all on one machine.

    Raises:
        ProfilingError: a rank died.
    """
    if len(shares := shares_of(devices)) == 1:
        return None
    try:
        ranks = over_ranks(devices, kind, cpus, exchange_in_rank, kind, gradient_bytes, shares)
        with closing(ranks) as reports:  # type: ignore[type-var]
            over_all_s, within_s = next(reports)
    except RankDiedError as error:
        raise ProfilingError(f"timing sums over {devices} devices: {error}") from None
    return Exchange(len(shares), gradient_bytes, over_all_s, within_s)


def exchange_in_rank(
    kind: Literal["cpu", "gpu"], gradient_bytes: int, shares: Sequence[int]
) -> Iterator[tuple[float, float]]:
    """One rank's part: the medians of seconds over all ranks, and over those of its own machine."""
    device = accelerator.device_of(kind)
    gradients = torch.zeros(max(gradient_bytes // 4, 1), device=device)
    first, own = 0, None
    for share in shares:
        ranks = list(range(first, first + share))
        group = dist.new_group(ranks)  # all ranks take part in making each
        own = group if dist.get_rank() in ranks else own
        first += share
    times: list[tuple[float, float]] = []
    for _ in range(_DROPPED + _ROUNDS):
        times.append((_sum_s(gradients, None), _sum_s(gradients, own)))
    over_all, within = zip(*times[_DROPPED:], strict=True)
    yield median(over_all), median(within)


def _sum_s(gradients: torch.Tensor, group: Any) -> float:
    _wait_for_all(gradients)
    started = time.perf_counter()
    dist.all_reduce(gradients, group=group)
    accelerator.synchronize(gradients.device)
    return time.perf_counter() - started


def _wait_for_all(gradients: torch.Tensor) -> None:
    dist.barrier()
    accelerator.synchronize(gradients.device)
