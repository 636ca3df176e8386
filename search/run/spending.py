"""What the devices of a study's trials cost, for as long as trials hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from ...spaces.errors import Fault, StudyFileError
from ...spaces.study import StudySpec
from ...spaces.trial import TrialRecord


def prices_of(spec: StudySpec, kinds: Iterable[str], device: Literal["cpu", "gpu"]) -> dict[str, float | None]:
    """The price of each kind of device for an hour, the one that times the study first; None where it is unknown.

    Raises:
        StudyFileError: a price that the study needs is missing.
    """
    prices = {kind: spec.devices.price_of(kind, device) for kind in kinds}
    timed_on = next(iter(prices))
    needed = list(prices) if spec.budget.cost is not None else [timed_on] if spec.objectives.speed == "cost" else []
    faults = [
        Fault(
            "devices.prices",
            f"expected a price for {kind or device}, which trials run on; got one for {', '.join(spec.devices.prices)}. "
            f"Write {kind or device}: 1.8, or another price for an hour.",
        )
        for kind in needed
        if prices[kind] is None
    ]
    if faults:
        raise StudyFileError(faults)
    return prices


class Spending:
    """The cost of a study's trials so far.

    Args:
        prices: by kind of device, of one for an hour.
        records: trials of earlier runs, with what they had cost.
    """

    def __init__(self, spec: StudySpec, prices: Mapping[str, float | None], records: Iterable[TrialRecord]) -> None:
        self._limit, self._share, self.prices = spec.budget.cost, spec.devices.share, prices
        self._of_trials = {one.number: one.facts.spent for one in records if one.facts.spent is not None}

    def cost(self, kind: str, devices: int, seconds: float) -> float:
        """Of devices held for so many seconds; 0 where their price is unknown."""
        return (self.prices.get(kind) or 0.0) * devices * self._share * seconds / 3600

    def add(self, number: int, cost: float) -> None:
        """An attempt at a trial has ended."""
        if cost:
            self._of_trials[number] = self._of_trials.get(number, 0.0) + cost

    def of(self, number: int) -> float | None:
        """What a trial's attempts that ended have cost; None if that is unknown."""
        return self._of_trials.get(number)

    def over(self, running: float = 0.0) -> str:
        """Why the study ends here; empty while the budget lasts.

        Args:
            running: the cost of attempts that have not ended.
        """
        total = sum(list(self._of_trials.values())) + running
        return f"budget.cost: {self._limit:g} is spent" if self._limit is not None and total >= self._limit else ""


__all__ = ["Spending", "prices_of"]
