"""What the devices of a study's trials cost, for as long as trials hold them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Literal

from ....spaces.errors import Fault, StudyFileError
from ....spaces.laws.device import DeviceProfile
from ....spaces.planning import CostKey
from ....spaces.record import TrialRecord
from ....spaces.study.spec import StudySpec
from .attempt import Attempt


def device_names(profiles: Mapping[str, Mapping[CostKey, DeviceProfile]]) -> dict[str, str]:
    """The name of a device of each kind, by its profiles."""
    return {kind: next(iter(of_kind.values())).device for kind, of_kind in profiles.items()}


def prices_of(
    spec: StudySpec,
    devices: Mapping[str, str],
    kind: Literal["cpu", "gpu"],
    records: Iterable[TrialRecord] = (),
) -> tuple[dict[str, float | None], float | None]:
    """The price of each kind of device for an hour, None where unknown; and that at which the study's trials are compared.

    The latter is that of the kind that times the study, as it was when its first trial began.

    Args:
        devices: the name of a device of each kind, the kind that times the study first.

    Raises:
        StudyFileError: a price that the study needs is missing.
    """
    prices = {name: spec.devices.price_of(f"{name} {device}", kind) for name, device in devices.items()}
    timed_on = next(iter(prices))
    stored = next((record.facts.price for record in records if record.facts.price is not None), None)
    compared = prices[timed_on] if stored is None else stored
    needed = {name for name in prices if spec.budget.cost is not None}
    needed |= {timed_on} if spec.objectives.speed == "cost" and compared is None else set()
    given = f"one for {', '.join(spec.devices.prices)}" if spec.devices.prices else "none"
    faults = [
        Fault(
            "devices.prices",
            f"expected a price for {devices[name]}, which trials run on; got {given}. Write "
            f"{name or kind}: 1.8, or what it costs for an hour.",
        )
        for name in prices
        if name in needed and prices[name] is None
    ]
    if faults:
        raise StudyFileError(faults)
    return prices, compared


class Spending:
    """The cost of a study's trials so far.

    Args:
        prices: by kind of device, the hourly price of a trial's share of one.
        records: trials of earlier runs, with what they had cost.
    """

    def __init__(
        self, spec: StudySpec, prices: Mapping[str, float | None], records: Iterable[TrialRecord]
    ) -> None:
        self._limit, self._prices = spec.budget.cost, prices
        self._of_trials = {
            record.number: record.facts.spent for record in records if record.facts.spent is not None
        }

    def cost(self, kind: str, devices: int, seconds: float) -> float:
        """The cost of holding so many devices for so many seconds; 0 where their price is unknown."""
        return (self._prices.get(kind) or 0.0) * devices * seconds / 3600

    def of_attempt(self, attempt: Attempt) -> float:
        """The cost of an attempt's devices so far."""
        held_s = 0.0 if attempt.held_since is None else time.monotonic() - attempt.held_since
        return self.cost(attempt.kind, attempt.setup.plan.devices, held_s)

    def add(self, number: int, cost: float) -> None:
        """An attempt at a trial has ended."""
        if cost:
            self._of_trials[number] = self._of_trials.get(number, 0.0) + cost

    def of(self, number: int) -> float | None:
        """What a trial's attempts that ended have cost; None if that is unknown."""
        return self._of_trials.get(number)

    def over(self, running: float) -> str:
        """Why the study ends here; empty while the budget lasts.

        Args:
            running: the cost of attempts that have not ended.
        """
        total = sum(list(self._of_trials.values())) + running
        return (
            f"budget.cost: {self._limit:g} is spent"
            if self._limit is not None and total >= self._limit
            else ""
        )
