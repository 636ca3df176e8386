"""How one optimizer step of any integer batch is made: shares per device, passes per share.

The laws (each a test): the passes of a step hold exactly `effective_batch` samples; at most two
sizes occur and they differ by one; the largest is ceil(ceil(B/d)/k) and never above the cap; with no
wish for k, k is the smallest that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .errors import InfeasiblePlanError


def even_parts(total: int, parts: int) -> tuple[int, ...]:
    """Split samples into parts that differ by at most one, larger parts first.

    This keeps every integer batch reachable: 257 samples on 4 devices need no padding. Where there are
    fewer samples than parts, the empty parts come first: only a step's last pass synchronises, so a
    device with little to do skips its first passes and never the last.

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
    """One optimizer step: `effective_batch` samples as `accumulation` passes on each of `devices`.

    >>> plan = BatchPlan(effective_batch=500, accumulation=3)
    >>> plan.passes(), plan.largest_micro_batch
    ((167, 167, 166), 167)
    >>> [BatchPlan(257, accumulation=2, devices=4).passes(device) for device in range(4)]
    [(33, 32), (32, 32), (32, 32), (32, 32)]
    """

    effective_batch: int
    accumulation: int = 1
    devices: int = 1

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
        """Samples per pass on one device, shape (accumulation,); 0 is a pass the device skips."""
        return even_parts(self.shares[device], self.accumulation)

    def all_micro_batches(self) -> Iterator[int]:
        """Sizes of every pass that runs, device after device."""
        for device in range(self.devices):
            yield from (size for size in self.micro_batches(device) if size)

    @property
    def largest_micro_batch(self) -> int:
        """ceil(ceil(B/d)/k): the size that memory has to hold."""
        return -(-self.shares[0] // self.accumulation)

    @property
    def smallest_micro_batch(self) -> int:
        """The smallest pass that runs; batch statistics may need more than one sample in it."""
        return max(self.shares[-1] // self.accumulation, 1)


def plan_batch(
    effective_batch: int,
    *,
    devices: int = 1,
    accumulation: int | None = None,
    largest_micro_batch: int | None = None,
    smallest_micro_batch: int = 1,
    every_micro_batch: bool = False,
    accumulation_high: int | None = None,
) -> BatchPlan:
    """Plan one step under a cap: the fewest passes that fit, or the wished number where that is more.

    Args:
        accumulation: wished passes per step; below the legal minimum it is raised to it.
        largest_micro_batch: the cap, samples that fit one pass on one device; None for no cap.
        smallest_micro_batch: samples below which the model does not work (2 with batch statistics).
        every_micro_batch: no device may skip a pass, because devices talk in each (synchronised batch statistics).
        accumulation_high: passes the study allows at most.

    Raises:
        InfeasiblePlanError: fewer samples than devices, a pass below the smallest workable size, or
            more passes needed than the study allows.

    >>> plan_batch(500, largest_micro_batch=200)
    BatchPlan(effective_batch=500, accumulation=3, devices=1)
    """
    if largest_micro_batch is not None and largest_micro_batch < 1:
        raise InfeasiblePlanError(f"largest micro-batch: expected an integer >= 1, got {largest_micro_batch}")
    largest_share = BatchPlan(effective_batch, devices=devices).shares[0]
    fewest = 1 if largest_micro_batch is None else -(-largest_share // largest_micro_batch)
    # More passes than the largest share has samples would be empty on every device.
    plan = BatchPlan(effective_batch, max(fewest, min(accumulation or 1, largest_share)), devices)
    if accumulation_high is not None and plan.accumulation > accumulation_high:
        raise InfeasiblePlanError(
            f"effective_batch {effective_batch}: expected at most {accumulation_high} passes per step, "
            f"but micro-batches of at most {largest_micro_batch} need {plan.accumulation}",
            violation=plan.accumulation / accumulation_high - 1,
        )
    if plan.smallest_micro_batch < smallest_micro_batch:
        raise InfeasiblePlanError(
            f"effective_batch {effective_batch} in {plan.accumulation} passes on {devices} devices: expected "
            f"at least {smallest_micro_batch} samples in a pass (the model does not work on fewer), "
            f"got {plan.smallest_micro_batch}",
            violation=(smallest_micro_batch - plan.smallest_micro_batch) / smallest_micro_batch,
        )
    if every_micro_batch and plan.shares[-1] < plan.accumulation:
        raise InfeasiblePlanError(
            f"effective_batch {effective_batch} in {plan.accumulation} passes on {devices} devices: expected samples for every "
            "pass of every device, since synchronised batch statistics are talked about in each",
            violation=plan.accumulation / plan.shares[-1] - 1,
        )
    return plan


def step_plans(plan: BatchPlan, samples_budget: int, **limits: Any) -> tuple[int, tuple[BatchPlan, ...]]:
    """How a whole training is stepped: so many steps by the plan itself, then the plans of its last steps.

    What a worker runs and what the step-time law prices is this.

    Args:
        limits: `largest_micro_batch`, `smallest_micro_batch` and `every_micro_batch` as for `plan_batch`.

    Raises:
        InfeasiblePlanError: the last step's remainder has no plan, nor has it together with the step before.

    >>> step_plans(BatchPlan(4, accumulation=2), 10, largest_micro_batch=4)
    (2, (BatchPlan(effective_batch=2, accumulation=1, devices=1),))
    """
    batch, devices = plan.effective_batch, plan.devices
    # All but the last two steps are alike, and there may be millions of them.
    alike = max(samples_budget // batch - 1, 0)
    sizes = list(step_sizes(samples_budget - alike * batch, batch, devices=devices, **limits))
    full = sum(size == batch for size in sizes)
    return alike + full, tuple(plan_batch(size, devices=devices, **limits) for size in sizes if size != batch)


def step_sizes(
    samples_budget: int,
    effective_batch: int,
    *,
    devices: int = 1,
    **limits: Any,
) -> Iterator[int]:
    """Samples of each step of a training, in order: they sum to `samples_budget` exactly.

    The last step's remainder is a step of its own where a plan for it exists; else it joins the step before.

    >>> list(step_sizes(10, 4)), list(step_sizes(9, 4, smallest_micro_batch=2))
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
