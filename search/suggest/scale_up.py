"""The best batch and learning rate of a larger training, from trials of smaller ones and what is published.

What is best moves with the samples D of a training and the parameters N of its model as powers of them:

    batch ∝ D^a N^b,    rate ∝ D^c N^d

so in coordinates that move along, u = ln batch − a ln D − b ln N and v = ln rate − c ln D − d ln N, trainings of every size
have the same best setting: one Gaussian process of accuracy over (u, v, ln D, ln N, other parameters) serves all of them. The
exponents are draws from a prior around the published laws, each weighted by how well that process then explains the trials.
Trials of one size say nothing about exponents, and the interval is the disagreement of what is published.

Sources: Step Law, arXiv 2503.04715; Power Lines, arXiv 2505.13738, as nanochat uses it (rate with the square root of the batch,
and N^-0.25); the critical batch follows data and not model size, arXiv 2410.21676; the timescale of weight decay is a constant
share of the training, arXiv 2405.13698, or shrinks with samples per parameter, Power Lines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...spaces.errors import StudyFileError
from ...spaces.study import StudySpec
from ...spaces.study_file import study_from_dict
from ...spaces.trial import TrialRecord
from ..analysis.accuracy_scale import AccuracyScale
from ..analysis.best_rate import other_coordinates
from ..analysis.gaussian_process import Array, GaussianProcess, conditioned, fitted, single_threaded_blas
from ..analysis.rates import Estimate
from .batch_rate_prior import AccuracyPrior, BatchRate

# The fewest complete trials of a fit, and the most: of more, an even selection.
FEWEST, _MOST = 12, 160
# Draws of the exponents from their prior, those that are kept, and points of the surface on which each looks for its best.
_DRAWS, _KEPT, _POINTS, _LINE = 1200, 160, 220, 25
# Batches at which a rate is reported, as multiples of the best, where they lie among those tried.
_MULTIPLES = (0.5, 1.0, 2.0, 4.0)
_JITTER = 1e-6
# A bound of what was tried is the best's as far as is known where so large a share of the draws end at it.
_AT_EDGE, _MARGIN = 0.25, 0.04
_ADAPTIVE = ("Adam", "Lion", "RMSprop", "NAdam", "RAdam", "Adafactor", "Sophia", "Adagrad", "Adadelta", "Muon")
# How much of the number of samples per parameter the timescale of weight decay follows: from none to this power.
_DECAY_POWER = 0.52
# A next study searches batches and rates this many times smaller and larger than what is expected to be best.
_AROUND = 5
_NOT_NEXT = {"baseline", "stopping", "target", "storage", "branches"}
# A next study: its trials, its sizes relative to the largest, and what it may cost, in trainings of the target's size.
NEXT_TRIALS, _NEXT_SIZES, _NEXT_COST = 16, (0.1, 0.2, 0.33, 0.5, 2.0, 3.0, 5.0), 2.0


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
        parameters: of its model.
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
        given_up: accuracy below the best's, as the largest of the trials have it.
    """

    multiple: float
    effective_batch: Estimate
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
        settings: at the best batch and around it.
        exponents: by name, beforehand and as the trials have them.
        carried: the best batch and rate at `begin`.
        edges: names of what is best at the end of what was tried, so that more may be better.
        effective_draws: of the exponents, that the trials leave; few mean that they contradict what is published.
    """

    begin: Size
    target: Size
    trials: int
    sizes: tuple[Size, ...]
    settings: tuple[SettingAt, ...]
    exponents: dict[str, tuple[Estimate, Estimate]]
    carried: tuple[Estimate, Estimate]
    edges: tuple[str, ...]
    effective_draws: float
    next: NextStudy | None

    @property
    def best(self) -> SettingAt:
        return next(one for one in self.settings if one.multiple == 1)

    def by_law(self, law: Law) -> tuple[float, float]:
        """The batch and the rate where the best at `begin` is carried over by a published law alone."""
        moved = np.reshape(law.exponents, (2, 2)) @ (self.target.logs - self.begin.logs)
        return self.carried[0].value * math.exp(moved[0]), self.carried[1].value * math.exp(moved[1])


def scale_up(
    name: str,
    records: Sequence[TrialRecord],
    data: float = 1.0,
    model: float = 1.0,
    direction: Literal["minimize", "maximize"] = "maximize",
) -> ScaledUp:
    """Predict the best setting of a larger training.

    Args:
        name: of the study, for messages.
        records: of one study or of several that differ in nothing but sizes.
        data, model: the samples and the parameters of the larger training, over those of the largest tried.
        direction: of the metric.

    Raises:
        StudyFileError: too few complete trials, or they do not differ in batch and rate.
    """
    complete = [one for one in records if one.outcome == "complete" and one.accuracy is not None and one.facts.learning_rate]
    if len(complete) < FEWEST:
        raise StudyFileError(f"study {name}: expected at least {FEWEST} complete trials, got {len(complete)}")
    if len(complete) > _MOST:
        complete = [complete[place] for place in np.linspace(0, len(complete) - 1, _MOST).round().astype(int)]
    tried = np.array([[math.log(one.settings["effective_batch"]), math.log(one.facts.learning_rate or 1)] for one in complete])
    for column, key in enumerate(("effective_batch", "reference_rate")):
        if np.ptp(tried[:, column]) < math.log(1.5):
            raise StudyFileError(
                f"study {name}: space.{key}: expected values that differ by half at least, to tell which is best"
            )
    sizes = [_size(one) for one in complete]
    logs = np.array([size.logs for size in sizes])
    begin = Size(max(one.samples for one in sizes), max(one.parameters for one in sizes))
    with single_threaded_blas():
        return _Fit(complete, tried, logs, begin, direction).scaled(
            Size(begin.samples * data, begin.parameters * model), tuple(sorted(set(sizes), key=lambda one: one.cost))
        )


def _size(record: TrialRecord) -> Size:
    samples = record.facts.samples_budget or 1
    return Size(float(samples), float(record.facts.extra.get("model_parameters", 1)))


def adaptive(records: Sequence[TrialRecord]) -> bool:
    """Whether the trials' optimizer divides by the gradient's size, as those of the published laws do."""
    names = {str(one.facts.extra.get("optimizer", "")) for one in records}
    return any(name.startswith(_ADAPTIVE) for name in names)


class _Fit:
    """The posterior of exponents and surface.

    Args:
        tried: (n, 2), logarithms of batch and rate.
        logs: (n, 2), logarithms of the sizes.
        begin: the size that coordinates are relative to.
    """

    def __init__(
        self, records: Sequence[TrialRecord], tried: Array, logs: Array, begin: Size, direction: Literal["minimize", "maximize"]
    ) -> None:
        self.begin, self.tried, self.away = begin, tried, logs - begin.logs
        sign = 1.0 if direction == "maximize" else -1.0
        accuracies = sign * np.array([one.accuracy for one in records], dtype=np.float64)
        self.scale = AccuracyScale(accuracies)
        self.values = self.scale.of(accuracies)
        others = other_coordinates(records, without={"epochs"})
        sized = [_follows(column, self.away) for column in others.T]
        self.others = others[:, [not follows for follows in sized]]
        self.best = self._best(records, accuracies)
        self.slope = (0.5, 0.2) if adaptive(records) else (0.7, 0.25)
        self.decay = records[self.best].facts.weight_decay or 0.0
        width = 4 + self.others.shape[1]
        self.structure = AccuracyPrior(BatchRate(0, 1, np.ones(width), self.slope))
        self.middle = tried.mean(axis=0)
        self.rng = np.random.default_rng(0)

    def _best(self, records: Sequence[TrialRecord], accuracies: Array) -> int:
        """The best trial of the largest size that has one."""
        cost = self.away.sum(axis=1)
        largest = cost >= cost.max() - 1e-9
        return int(np.argmax(np.where(largest, accuracies, -np.inf)))

    def _prior(self) -> Array:
        """Draws of the exponents, (draws, 4)."""
        rng, count = self.rng, _DRAWS
        by_data = rng.normal(0.477, 0.12, count)
        by_model = rng.normal(0.0, 0.1, count)
        if self.slope[0] == 0.5:
            rate_by_model = rng.normal(-0.48, 0.2, count)
            rest = rng.normal(0.02, 0.1, count)
        else:  # nothing is published of SGD
            rate_by_model = rng.normal(-0.25, 0.25, count)
            rest = rng.normal(0.0, 0.2, count)
        return np.column_stack([by_data, by_model, self.slope[0] * (by_data + by_model) + rest, rate_by_model])

    def _points(self, exponents: Array) -> Array:
        """The trials where these exponents put them, (n, 4 + others); the process's own coordinates begin at a half."""
        moved = self.tried - self.middle - self.away @ np.reshape(exponents, (2, 2)).T
        return np.asarray(np.column_stack([moved, self.away, self.others]) + 0.5)

    def scaled(self, target: Size, sizes: tuple[Size, ...]) -> ScaledUp:
        prior = self._prior()
        log_weights, process = np.zeros(len(prior)), None
        for _ in range(2):
            weights = np.exp(log_weights - log_weights.max())
            likely = prior.T @ weights / weights.sum()
            process = fitted(self._points(likely), self.values, structure=self.structure, prior=(0.0, 1.0))
            log_weights = np.array([self._log_likelihood(self._given(process, one)) for one in prior])
        assert process is not None
        weights = np.exp(log_weights - log_weights.max())
        weights /= weights.sum()
        # Evenly spaced quantiles instead of random draws.
        order = np.searchsorted(np.cumsum(weights), (np.arange(_KEPT) + 0.5) / _KEPT)
        kept = prior[np.minimum(order, len(prior) - 1)]
        processes = [self._given(process, one) for one in kept]
        tops = np.array([self._top(*each) for each in zip(processes, kept, strict=True)])  # (kept, 2): u, v
        moved = np.einsum("kij,j->ki", kept.reshape(-1, 2, 2), target.logs - self.begin.logs)
        at = tops + moved + self.middle  # log batch and log rate at the target
        settings = []
        for multiple in _MULTIPLES:
            each = zip(processes, kept, tops, strict=True)
            rows = np.array([self._at_batch(*one, shift=math.log(multiple)) for one in each])
            rates, given_up, inside = rows[:, 0] + moved[:, 1] + self.middle[1], rows[:, 1], rows[:, 2]
            if multiple != 1 and inside.mean() < 0.5:
                continue
            batches = at[:, 0] + math.log(multiple)
            settings.append(
                SettingAt(
                    multiple,
                    _exp(batches),
                    _exp(rates if multiple != 1 else at[:, 1]),
                    self._weight_decay(target, batches, rates),
                    Estimate.of(given_up),
                )
            )
        before, after = ({key: Estimate.of(draws[:, place]) for place, key in enumerate(EXPONENTS)} for draws in (prior, kept))
        begun = tops + self.middle
        return ScaledUp(
            begin=self.begin,
            target=target,
            trials=len(self.values),
            sizes=sizes,
            settings=tuple(settings),
            exponents={key: (before[key], after[key]) for key in EXPONENTS},
            carried=(_exp(begun[:, 0]), _exp(begun[:, 1])),
            edges=self._edges(tops, kept),
            effective_draws=float(1 / (weights**2).sum()),
            next=self._next(kept, tops, at, target),
        )

    def _given(self, process: GaussianProcess, exponents: Array) -> GaussianProcess:
        return conditioned(
            self._points(exponents), self.values, process.free, process.log_noise, 0.0, 1.0, structure=self.structure
        )

    def _log_likelihood(self, process: GaussianProcess) -> float:
        spread = process.factor.T @ process.weights
        return float(-0.5 * spread @ spread - np.log(np.diag(process.factor)).sum())

    def _places(self, spots: Array) -> Array:
        """Points of the largest size with the best trial's other parameters at (u, v), (m, 2)."""
        others = np.tile(self.others[self.best], (len(spots), 1))
        return np.asarray(np.column_stack([spots, np.zeros_like(spots), others]) + 0.5)

    def _bounds(self, exponents: Array) -> tuple[Array, Array]:
        """The smallest and the largest u and v tried."""
        spots = self._points(exponents)[:, :2] - 0.5
        return spots.min(axis=0), spots.max(axis=0)

    def _top(self, process: GaussianProcess, exponents: Array) -> Array:
        """Where one draw of the surface has its maximum, (2,)."""
        low, high = self._bounds(exponents)
        spots = low + (high - low) * self.rng.random((_POINTS, 2))
        return np.asarray(spots[self._drawn(process, spots).argmax()])

    def _drawn(self, process: GaussianProcess, spots: Array) -> Array:
        """One draw of the surface at spots (m, 2), (m,)."""
        points = self._places(spots)
        middle, covariance = process.joint(points)
        covariance[np.diag_indices_from(covariance)] += _JITTER
        return np.asarray(middle + np.linalg.cholesky(covariance) @ self.rng.standard_normal(len(spots)))

    def _at_batch(self, process: GaussianProcess, exponents: Array, top: Array, shift: float) -> tuple[float, float, float]:
        """At a batch that is a multiple of the best: the best v, the accuracy below the best's, and whether it was tried."""
        low, high = self._bounds(exponents)
        line = np.linspace(low[1], high[1], _LINE)
        spots = np.vstack([np.column_stack([np.full(_LINE, batch), line]) for batch in (top[0] + shift, top[0])])
        drawn = self._drawn(process, spots)
        place = int(drawn[:_LINE].argmax())
        here, there = self.scale.back(np.array([drawn[:_LINE].max(), drawn[_LINE:].max()]))
        inside = low[0] - 1e-9 <= top[0] + shift <= high[0] + 1e-9
        return float(line[place]), float(there - here), float(inside)

    def _weight_decay(self, target: Size, batches: Array, rates: Array) -> Estimate | None:
        if not self.decay:
            return None
        batch, rate = self.tried[self.best]
        per_parameter = (target.samples / target.parameters) / (self.begin.samples / self.begin.parameters)
        power = self.rng.uniform(0.0, _DECAY_POWER, len(batches))
        # timescale = batch / (rate · decay · samples), as a share of the training
        log_timescale = -power * math.log(per_parameter)
        moved = (batches - batch) - (rates - rate) - math.log(target.samples / self.begin.samples) - log_timescale
        return _exp(moved + math.log(self.decay))

    def _edges(self, tops: Array, kept: Array) -> tuple[str, ...]:
        bounds = np.array([self._bounds(one) for one in kept])  # (kept, 2, 2)
        share = (tops - bounds[:, 0]) / (bounds[:, 1] - bounds[:, 0])
        found = []
        for column, name in enumerate(("effective_batch", "learning_rate")):
            if (share[:, column] < _MARGIN).mean() > _AT_EDGE:
                found.append(f"smallest {name}")
            elif (share[:, column] > 1 - _MARGIN).mean() > _AT_EDGE:
                found.append(f"largest {name}")
        return tuple(found)

    def _next(self, kept: Array, tops: Array, at: Array, target: Size) -> NextStudy | None:
        """The study of one more size that would narrow the intervals most, by linear regression between draws.

        A study's best is taken to be known as well as this one's is, with as many trials, on top of its exponents.
        """
        spread = np.maximum(tops.var(axis=0) * len(self.values) / NEXT_TRIALS, 0.01)
        found: list[tuple[float, NextStudy]] = []
        for times in _NEXT_SIZES:
            size = Size(self.begin.samples * times, self.begin.parameters)
            cost = NEXT_TRIALS * size.cost / target.cost
            if cost > _NEXT_COST or size.samples > target.samples:
                continue
            there = tops + np.einsum("kij,j->ki", kept.reshape(-1, 2, 2), size.logs - self.begin.logs)
            told = at.var(axis=0) * (there.var(axis=0) + spread)
            shared = ((at - at.mean(axis=0)) * (there - there.mean(axis=0))).mean(axis=0)
            narrows = np.sqrt(np.maximum(1 - shared**2 / told, 0.01)).tolist()
            middle = np.exp(np.median(there + self.middle, axis=0))
            study = NextStudy(size, float(middle[0]), float(middle[1]), NEXT_TRIALS, (narrows[0], narrows[1]), cost)
            found.append((math.log(narrows[0]) + math.log(narrows[1]), study))
        return min(found, key=lambda one: one[0])[1] if found else None


def next_study(spec: StudySpec, records: Sequence[TrialRecord], found: NextStudy) -> dict[str, Any]:
    """A study file's content for that study: the same but for its size, its space around the best, and its budget.

    Args:
        spec: of the study whose trials these are.
    """
    largest = max((one for one in records if one.facts.epochs), key=lambda one: _size(one).samples)
    assert largest.facts.epochs and largest.facts.samples_budget
    epochs = found.size.samples / (largest.facts.samples_budget / largest.facts.epochs)
    batch = round(found.effective_batch)
    content = spec.model_dump(mode="json", exclude_defaults=True, exclude=_NOT_NEXT)
    content |= {
        "study": f"{spec.study}-next",
        "space": {
            **content["space"],
            "effective_batch": {"low": max(1, round(batch / _AROUND)), "high": round(batch * _AROUND)},
            "reference_rate": {
                "low": float(f"{found.learning_rate / _AROUND:.2g}"),
                "high": float(f"{found.learning_rate * _AROUND:.2g}"),
                "at_batch": batch,
            },
            "epochs": float(f"{epochs:.4g}"),
        },
        "budget": {"trials": found.trials},
    }
    study_from_dict(content)
    return content


def _follows(column: Array, sizes: Array) -> bool:
    """Whether a parameter is the size under another name, such as a width."""
    return any(np.ptp(size) > 0 and abs(np.corrcoef(column, size)[0, 1]) > 0.9 for size in sizes.T)


def _exp(logs: Array) -> Estimate:
    found = Estimate.of(logs)
    return Estimate(math.exp(found.value), math.exp(found.low), math.exp(found.high))


__all__ = ["EXPONENTS", "FEWEST", "LAWS", "Law", "NextStudy", "ScaledUp", "SettingAt", "Size", "next_study", "scale_up"]
