"""The best learning rate at each batch, as fitted by `best_rate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ...spaces.learning_rate import RULE_EXPONENTS

if TYPE_CHECKING:
    from .gaussian_process import Array


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its 90 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, draws: Array) -> Self:
        low, middle, high = np.quantile(draws, [0.05, 0.5, 0.95])
        return cls(float(middle), float(low), float(high))

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class RateAt:
    """The fitted best rate at a batch; `edge`: it lies beyond the rates tried, so it is an extrapolation."""

    effective_batch: int
    learning_rate: Estimate
    edge: bool


@dataclass(frozen=True, slots=True)
class BestRates:
    """The best rate as fitted to a study's trials.

    Args:
        exponent: p, of the batch in the best rate.
        rates: at a few batches, ascending.
        trials: in the fit.
        left_out: complete trials that did not learn, and diverged ones: the fit is of rates that work.
        bend: a batch with the exponents below and above it, where the latter is significantly smaller; else None. The rates
            then follow each side's own slope.
    """

    exponent: Estimate
    rates: tuple[RateAt, ...]
    trials: int
    left_out: int
    bend: tuple[int, Estimate, Estimate] | None

    @property
    def trusted(self) -> bool:
        """Whether the ridge lies within the rates tried, for most of the batches."""
        return sum(rate.edge for rate in self.rates) * 2 < len(self.rates)

    @property
    def holds(self) -> dict[str, bool]:
        """Whether the data are consistent with each rule that is a power of the batch: never where the slope changes."""
        return {
            rule: self.bend is None and self.exponent.holds(exponent)
            for rule, exponent in RULE_EXPONENTS.items()
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"trusted": self.trusted, "holds": self.holds}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        rates = (
            RateAt(rate["effective_batch"], Estimate(**rate["learning_rate"]), rate["edge"])
            for rate in values["rates"]
        )
        bend = values["bend"] and (
            values["bend"][0],
            Estimate(**values["bend"][1]),
            Estimate(**values["bend"][2]),
        )
        return cls(Estimate(**values["exponent"]), tuple(rates), values["trials"], values["left_out"], bend)


@dataclass(frozen=True, slots=True)
class StoredRates:
    """The fit at the end of a run, as the database holds it.

    Args:
        ended: trials that had ended; later ones make it stale.
        rates: None where the trials do not determine the best rate.
    """

    ended: int
    rates: BestRates | None

    def to_dict(self) -> dict[str, Any]:
        return {"ended": self.ended, "rates": self.rates and self.rates.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(values["ended"], values["rates"] and BestRates.from_dict(values["rates"]))
