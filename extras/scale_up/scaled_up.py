"""What is said of a larger training, and the published laws that it is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...search.analysis.gaussian_process import Array
from ...search.analysis.rates import Estimate
from ...spaces.record import TrialRecord


@dataclass(frozen=True, slots=True)
class Law:
    """A published law: exponents of the batch and of the rate.

    Attributes:
        batch_by_data, batch_by_model, rate_by_data, rate_by_model: a, b, c and d.
    """

    name: str
    batch_by_data: float
    batch_by_model: float
    rate_by_data: float
    rate_by_model: float

    @property
    def exponents(self) -> Array:
        return np.array([self.batch_by_data, self.batch_by_model, self.rate_by_data, self.rate_by_model])


LAWS = (Law("Step Law", 0.571, 0.0, 0.307, -0.713), Law("Power Lines", 0.383, 0.0, 0.192, -0.25))
EXPONENTS = ("batch_by_data", "batch_by_model", "rate_by_data", "rate_by_model")


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a training.

    Args:
        samples: that it trains on, repeated ones counted each time.
        parameters: of its model; 1 where training code of one's own does not report them.
    """

    samples: float
    parameters: float

    @property
    def logs(self) -> Array:
        return np.log([self.samples, self.parameters])

    @property
    def cost(self) -> float:
        """Proportional to its floating-point operations."""
        return self.samples * self.parameters


@dataclass(frozen=True, slots=True)
class SettingAt:
    """A setting of the larger training.

    Args:
        multiple: its batch over the best.
        learning_rate: the best at that batch.
        weight_decay: that keeps its timescale; None where there is none.
        given_up: accuracy below the best's, as trainings of the largest size tried have it.
    """

    multiple: float
    effective_batch: int
    learning_rate: Estimate
    weight_decay: Estimate | None
    given_up: Estimate


@dataclass(frozen=True, slots=True)
class NextStudy:
    """The study that would narrow the intervals most.

    Args:
        size: of its trainings.
        narrows: factors by which the intervals of batch and rate would shrink, on log scales.
        cost: its trials, in trainings of the larger size.
    """

    size: Size
    effective_batch: float
    learning_rate: float
    trials: int
    narrows: tuple[float, float]
    cost: float


@dataclass(frozen=True, slots=True)
class ScaledUp:
    """What trials of smaller sizes say of a larger one.

    Args:
        begin: the largest size tried; target: what was asked for.
        sizes: the different sizes of the trials.
        batch: the best of the larger training.
        settings: at that batch and around it.
        exponents: by name, beforehand and as the trials have them.
        carried: the best batch and rate at `begin`, which would be carried over unchanged.
        adaptive: the optimizer is one that the published laws are about; None where the trials do not name it.
        passes: over its training data, at most, that one of the trials made; the published laws are of one.
        edges: names of what is best at the end of what was tried, so that more may be better.
        contradicted: names of exponents that these trials put far from what was expected beforehand.
        effective_draws: of the exponents, that carry the weight: few make intervals rough.
    """

    begin: Size
    target: Size
    trials: int
    sizes: tuple[Size, ...]
    batch: Estimate
    settings: tuple[SettingAt, ...]
    exponents: dict[str, tuple[Estimate, Estimate]]
    carried: tuple[float, float]
    adaptive: bool | None
    passes: float
    edges: tuple[str, ...]
    contradicted: tuple[str, ...]
    effective_draws: float
    next: NextStudy | None

    @property
    def best(self) -> SettingAt:
        return next(setting for setting in self.settings if setting.multiple == 1)

    @property
    def published(self) -> bool:
        """Whether there are published laws of trainings like these."""
        return bool(self.adaptive) and self.passes <= 1

    def by_law(self, law: Law) -> tuple[float, float]:
        """The batch and the rate where the best at `begin` is carried over by a published law alone."""
        moved = np.reshape(law.exponents, (2, 2)) @ (self.target.logs - self.begin.logs)
        return self.carried[0] * math.exp(moved[0]), self.carried[1] * math.exp(moved[1])


def size_of(record: TrialRecord) -> Size:
    """The size of a trial's training."""
    return Size(float(record.facts.samples_budget or 1), float(record.facts.model_parameters or 1))


def follows_size(column: Array, sizes: Array) -> bool:
    """Whether a parameter is the size under another name, such as a width."""
    if np.ptp(column) == 0:
        return False
    return any(np.ptp(size) > 0 and abs(np.corrcoef(column, size)[0, 1]) > 0.9 for size in sizes.T)
