"""How an optimizer step of any integer batch is split: shares per device, micro-batches per share.

Invariants, each tested: the micro-batches of a step hold exactly `effective_batch` samples; they have at most
two sizes, which differ by one; the largest is ceil(ceil(B/d)/k) and never exceeds the cap; unless accumulation k
is requested, it is the smallest that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from .errors import InfeasiblePlanError

# Which activations a block stores for the backward pass: all; the outputs of matrix products, convolutions and attention; only
# its input. The others are recomputed. It changes memory and time, not the result.
ActivationCheckpointing = Literal["none", "selective", "full"]

# What is sharded across a trial's devices: nothing; parameters, gradients and the optimizer state (FSDP2).
Sharding = Literal["ddp", "fsdp2"]

# How a loss over the embeddings of a whole batch is computed: in one micro-batch, or in several that run twice (gradient
# caching). Empty for all other losses.
Embedding = Literal["", "whole", "cached"]


@lru_cache(maxsize=1024)
def even_parts(total: int, parts: int) -> tuple[int, ...]:
    """Split samples into parts that differ by at most one, larger parts first.

    So any integer batch is possible: 257 samples on 4 devices need no padding. With fewer samples than parts, the
    empty parts come first: gradients are all-reduced after the last micro-batch, so a device may skip its first
    micro-batches but never the last.

    Returns:
        Samples per part, shape (parts,); they sum to `total`.

    >>> even_parts(257, 4)
    (65, 64, 64, 64)
    >>> even_parts(2, 3)
    (0, 1, 1)
    """
    share, left = divmod(total, parts)
    if share == 0:
        return (0,) * (parts - left) + (1,) * left
    return (share + 1,) * left + (share,) * (parts - left)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One optimizer step: `effective_batch` samples as `accumulation` micro-batches on each of `devices` devices.

    Args:
        activation_checkpointing: which activations are stored for the backward pass; the others are recomputed.

    >>> plan = BatchPlan(effective_batch=500, accumulation=3)
    >>> plan.micro_batches(), plan.largest_micro_batch
    ((167, 167, 166), 167)
    >>> [BatchPlan(257, accumulation=2, devices=4).micro_batches(device) for device in range(4)]
    [(33, 32), (32, 32), (32, 32), (32, 32)]
    """

    effective_batch: int
    accumulation: int = 1
    devices: int = 1
    activation_checkpointing: ActivationCheckpointing = "none"

    def __post_init__(self) -> None:
        for name in ("effective_batch", "accumulation", "devices"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InfeasiblePlanError(f"{name}: expected an integer >= 1, got {value!r}")
        if self.effective_batch < self.devices:
            raise InfeasiblePlanError(
                f"effective_batch: expected at least one sample for each of {self.devices} devices, got {self.effective_batch}",
                violation=(self.devices - self.effective_batch) / self.devices,
            )

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples per device in one step, shape (devices,)."""
        return even_parts(self.effective_batch, self.devices)

    def micro_batches(self, device: int = 0) -> tuple[int, ...]:
        """Samples per micro-batch on one device, shape (accumulation,); those of 0 samples are skipped."""
        return even_parts(self.shares[device], self.accumulation)

    @property
    def largest_micro_batch(self) -> int:
        """ceil(ceil(B/d)/k): the size that has to fit memory."""
        return -(-self.shares[0] // self.accumulation)

    @property
    def smallest_micro_batch(self) -> int:
        """The smallest non-empty micro-batch; batch statistics need more than one sample."""
        return max(self.shares[-1] // self.accumulation, 1)


def plan_batch(
    effective_batch: int,
    *,
    devices: int = 1,
    accumulation: int | None = None,
    largest_micro_batch: int | None = None,
    smallest_micro_batch: int = 1,
    every_micro_batch: bool = False,
    activation_checkpointing: ActivationCheckpointing = "none",
    accumulation_low: int = 1,
    accumulation_high: int | None = None,
) -> BatchPlan:
    """Plan one step under a cap: the lowest accumulation that fits, or the requested one if that is higher.

    Args:
        accumulation: requested micro-batches per step; raised to the minimum that fits.
        largest_micro_batch: the cap, the most samples that fit on one device; None for no cap.
        smallest_micro_batch: the fewest samples that the model works with (2 with batch statistics).
        every_micro_batch: no device may skip a micro-batch, because devices synchronise in each (SyncBatchNorm).
        activation_checkpointing: what the cap holds for.
        accumulation_low: the fewest micro-batches per step, if there are as many samples: what the cap holds for.
        accumulation_high: the most micro-batches per step that the study allows.

    Raises:
        InfeasiblePlanError: fewer samples than devices, a micro-batch that is too small, or a higher accumulation
            than the study allows.

    >>> plan_batch(500, largest_micro_batch=200)
    BatchPlan(effective_batch=500, accumulation=3, devices=1, activation_checkpointing='none')
    """
    if largest_micro_batch is not None and largest_micro_batch < 1:
        raise InfeasiblePlanError(f"largest micro-batch: expected an integer >= 1, got {largest_micro_batch}")
    largest_share = BatchPlan(effective_batch, devices=devices).shares[0]
    fewest = 1 if largest_micro_batch is None else -(-largest_share // largest_micro_batch)
    # With more micro-batches than samples in the largest share, some would be empty on every device.
    wanted = min(max(accumulation or 1, accumulation_low), largest_share)
    plan = BatchPlan(effective_batch, max(fewest, wanted), devices, activation_checkpointing)
    if accumulation_high is not None and plan.accumulation > accumulation_high:
        raise InfeasiblePlanError(
            f"effective_batch {effective_batch}: expected at most {accumulation_high} micro-batches per step, "
            f"got {plan.accumulation} of at most {largest_micro_batch} samples",
            violation=plan.accumulation / accumulation_high - 1,
        )
    if plan.smallest_micro_batch < smallest_micro_batch:
        raise InfeasiblePlanError(
            f"effective_batch {effective_batch} in {plan.accumulation} micro-batches on {devices} devices: expected "
            f"at least {smallest_micro_batch} samples per micro-batch (the model does not work with fewer), "
            f"got {plan.smallest_micro_batch}",
            violation=(smallest_micro_batch - plan.smallest_micro_batch) / smallest_micro_batch,
        )
    if every_micro_batch and plan.shares[-1] < plan.accumulation:
        raise InfeasiblePlanError(
            f"effective_batch {effective_batch} in {plan.accumulation} micro-batches on {devices} devices: expected a sample "
            f"in every micro-batch of every device, since SyncBatchNorm synchronises in each; got {plan.shares[-1]}",
            violation=plan.accumulation / plan.shares[-1] - 1,
        )
    return plan


def accumulation_limits(embedding: Embedding, *, couples_samples: bool) -> dict[str, int]:
    """What a loss that compares the samples of a batch says of a step's micro-batches, as keyword arguments of `plan_batch`.

    >>> accumulation_limits("cached", couples_samples=False), accumulation_limits("", couples_samples=True)
    ({'accumulation_low': 2}, {'accumulation_high': 1})
    """
    if embedding == "cached":
        return {"accumulation_low": 2}
    return {"accumulation_high": 1} if couples_samples or embedding == "whole" else {}


@dataclass(frozen=True, slots=True)
class Steps:
    """Consecutive steps with the same plan."""

    count: int
    plan: BatchPlan


def step_plans(plan: BatchPlan, samples_budget: int, **limits: Any) -> tuple[Steps, ...]:
    """The steps of a whole training in order; their samples sum to `samples_budget` exactly.

    Workers run exactly these steps, and the step-time law predicts their time.

    Args:
        limits: `largest_micro_batch`, `smallest_micro_batch`, `every_micro_batch`, `activation_checkpointing` and the least
            and most accumulation, as for `plan_batch`.

    Raises:
        InfeasiblePlanError: the remainder has no plan, neither on its own nor joined to the step before.

    >>> [(steps.count, steps.plan.effective_batch) for steps in step_plans(BatchPlan(4), 10, largest_micro_batch=4)]
    [(2, 4), (1, 2)]
    """
    batch = plan.effective_batch
    # All steps but the last two are the same, and there may be millions of them.
    same = max(samples_budget // batch - 1, 0)
    sizes = list(step_sizes(samples_budget - same * batch, batch, devices=plan.devices, **limits))
    runs = [Steps(same + sum(size == batch for size in sizes), plan)]
    runs += [Steps(1, plan_batch(size, devices=plan.devices, **limits)) for size in sizes if size != batch]
    return tuple(run for run in runs if run.count)


def step_sizes(
    samples_budget: int,
    effective_batch: int,
    *,
    devices: int,
    **limits: Any,
) -> Iterator[int]:
    """Samples of each step of a training, in order; they sum to `samples_budget` exactly.

    The remainder is a step of its own if it can be planned; otherwise it joins the step before.

    >>> list(step_sizes(10, 4, devices=1)), list(step_sizes(9, 4, devices=1, smallest_micro_batch=2))
    ([4, 4, 2], [4, 5])
    """
    steps, remainder = divmod(samples_budget, effective_batch)
    if remainder:
        try:
            plan_batch(remainder, devices=devices, **limits)
        except InfeasiblePlanError:
            if steps == 0:
                raise
            yield from (effective_batch for _ in range(steps - 1))
            yield effective_batch + remainder
            return
    yield from (effective_batch for _ in range(steps))
    if remainder:
        yield remainder
