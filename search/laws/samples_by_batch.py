"""How many samples a training needs to reach a target at each batch, from a study that searched its length as well.

One Gaussian process, with the sampler's prior of batches and rates, models the metric over everything that was searched, the
length of training among it. At each batch and length, the rate (and the values of the other parameters) counts that is the best
by the process's mean; a draw reaches the target with the fewest epochs with which that does. Only the ends of trainings count,
so any schedule will do: what a cosine schedule passes on its way to a longer training is another experiment.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from ...spaces.domain import searched_of
from ...spaces.errors import Fault, StudyFileError
from ...spaces.record import TrialRecord
from ...spaces.study.spec import StudySpec
from ..analysis.confirm import averaged
from ..analysis.gaussian_process import Array, fitted, single_threaded_blas
from ..analysis.rates import Estimate
from ..analysis.score_scale import ScoreScale
from ..suggest.priors.batch_rate_prior import BATCH, BatchRate, ScorePrior
from ..suggest.space_transform import SpaceTransform, distribution

# The parameter that says how long a training is.
EPOCHS = "epochs"
# Batches and lengths of the grid, values of all else at each of them, draws of the process, and their seed.
_BATCHES, _LENGTHS, _OTHERS, _DRAWS, _SEED = 9, 10, 32, 400, 0
_STEPS, _JITTER = 40, 1e-6
# Trials without which there is nothing to fit.
LEAST_TRIALS = 8


@dataclass(frozen=True)
class SamplesByBatch:
    """The samples with which the target is first reached, at each batch with the best of all else.

    Args:
        target: of the metric.
        batches: ascending.
        draws: (draws, batches), infinite where it is not reached with the most samples tried.
        least, most: samples tried.
        trials: settings that the model was fitted to.
    """

    target: float
    batches: tuple[int, ...]
    draws: Array
    least: float
    most: float
    trials: int

    def samples_at(self, place: int) -> Estimate:
        """At one of the batches; its ends are infinite where the target may need more than was tried."""
        low, middle, high = np.quantile(self.draws[:, place], [0.05, 0.5, 0.95], method="closest_observation")
        return Estimate(float(middle), float(low), float(high))

    def reached(self, place: int) -> float:
        """The probability that the target is reached with the most samples tried."""
        return float(np.isfinite(self.draws[:, place]).mean())

    @property
    def starts_late(self) -> bool:
        """Whether the fewest samples tried are probably enough for some batch, so that it may need less."""
        return bool(np.mean(self.draws.min(axis=1) <= self.least) > 0.5)

    def critical_batch(self) -> Estimate | None:
        """The smallest batch that needs twice the samples of the best one; infinite beyond the largest; None: too uncertain."""
        fewest = self.draws.min(axis=1)
        known = np.isfinite(fewest)
        if known.mean() < 0.95:
            return None
        found = _doublings(np.log(self.batches), np.log(self.draws[known]))
        low, middle, high = np.quantile(found, [0.05, 0.5, 0.95], method="closest_observation")
        return Estimate(float(middle), float(low), float(high))


def study_samples(
    name: str, spec: StudySpec, records: Sequence[TrialRecord], target: float, batches: Sequence[int] = ()
) -> SamplesByBatch:
    """Fit a study's complete trials; settings that were repeated count with their means.

    Raises:
        StudyFileError: it did not search batch and epochs, has too few trials, or a batch lies outside its range.
    """
    searched = searched_of(spec.domains())
    space = {key: distribution(domain) for key, domain in searched.items()}
    faults = [
        Fault(
            f"study {name}",
            f"expected a range of space.{key}, to fit samples to a target; got {spec.domains().get(key)}",
        )
        for key in (BATCH, EPOCHS)
        if not isinstance(space.get(key), IntDistribution | FloatDistribution)
    ]
    if not faults:
        low, high = space[BATCH].low, space[BATCH].high  # type: ignore[attr-defined]
        faults += [
            Fault("--batch", f"expected a batch in the study's range, {low} to {high}; got {batch}")
            for batch in batches
            if not low <= batch <= high
        ]
    complete = [
        record
        for record in averaged(records, spec.objectives)
        if record.accuracy is not None and record.facts.samples_budget and record.facts.epochs
    ]
    if not faults and len(complete) < LEAST_TRIALS:
        faults.append(
            Fault(f"study {name}", f"expected at least {LEAST_TRIALS} complete trials, got {len(complete)}")
        )
    if faults:
        raise StudyFileError(faults)
    fixed = spec.fixed()
    trials = [({**fixed, **record.parameters}, record.score or 0.0) for record in complete]
    per_epoch = [(record.facts.samples_budget or 0) / (record.facts.epochs or 1) for record in complete]
    found = samples_by_batch(
        trials,
        space,
        round(statistics.median(per_epoch)),
        spec.objectives.metric.score(target),
        batches,
        conditions={key: domain.when for key, domain in searched.items() if domain.when},
        scaled=fixed.get("rule") != "constant",
    )
    return replace(found, target=target)


def samples_by_batch(
    trials: Sequence[tuple[Mapping[str, Any], float]],
    space: Mapping[str, BaseDistribution],
    samples_per_epoch: int,
    target: float,
    batches: Sequence[int] = (),
    *,
    conditions: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    scaled: bool = True,
) -> SamplesByBatch:
    """Fit the metric to finished trainings, and see where it reaches the target.

    Args:
        trials: parameters and metric, higher is better.
        space: what was searched, batches and `epochs` among it.
        target: of the metric, higher is better.
        batches: beside those of a grid over the range.
        conditions: as for `SpaceTransform`.
        scaled: as for `BatchRate.of`.
    """
    transform = SpaceTransform(space, conditions)
    points = np.array([transform.encode(parameters) for parameters, _ in trials])
    metric = np.array([value for _, value in trials])
    place, scale = BatchRate.of(transform, scaled), ScoreScale(metric)
    low, high = (float(getattr(space[BATCH], end)) for end in ("low", "high"))
    grid = sorted({*(round(batch) for batch in np.geomspace(low, high, _BATCHES)), *batches})
    short, long = (float(getattr(space[EPOCHS], end)) for end in ("low", "high"))
    lengths = np.geomspace(short, long, _LENGTHS)
    from scipy.stats import qmc

    others = transform.round_to_feasible(np.asarray(qmc.Sobol(transform.width, seed=_SEED).random(_OTHERS)))
    spots = np.tile(others, (len(grid) * len(lengths), 1))
    spots = transform.with_numbers(spots, BATCH, np.repeat(np.array(grid, float), len(lengths) * _OTHERS))
    spots = transform.with_numbers(spots, EPOCHS, np.tile(np.repeat(lengths, _OTHERS), len(grid)))
    with single_threaded_blas():
        structure = None if place is None else ScorePrior(place)
        process = fitted(points, scale.of(metric), None, _STEPS, structure=structure)
        middle, covariance = process.joint(spots)
        covariance[np.diag_indices_from(covariance)] += _JITTER * process.std**2
        normal = np.random.default_rng(_SEED).standard_normal((len(spots), _DRAWS))
        drawn = middle[:, None] + np.linalg.cholesky(covariance) @ normal
    # The setting with the best mean, not the best of each draw: the maximum of 32 uncertain values is larger the more uncertain
    # they are, as large batches are, and critical batches came out 1.5 to 4 times too large (docs/log.md, 2026-11-27).
    chosen = middle.reshape(len(grid), len(lengths), _OTHERS).argmax(axis=2)
    each = drawn.reshape(len(grid), len(lengths), _OTHERS, _DRAWS)
    # (draws, batches, lengths)
    best = np.take_along_axis(each, chosen[:, :, None, None], axis=2)[:, :, 0].transpose(2, 0, 1)
    return SamplesByBatch(
        target,
        tuple(grid),
        _crossings(best, np.log(lengths * samples_per_epoch), float(scale.of(np.array([target]))[0])),
        short * samples_per_epoch,
        long * samples_per_epoch,
        len(trials),
    )


def _doublings(log_batches: Array, log_samples: Array) -> Array:
    """Where samples (draws, batches) first are twice the fewest, at larger batches than those; infinite where they are not.

    Linear between the logarithms of batches, and halfway where the larger one does not reach the target. Batches below the best
    one may need more as well, where rates are at the edge of what was searched.
    """
    over = log_samples - log_samples.min(axis=1, keepdims=True) - math.log(2)
    after = np.arange(len(log_batches)) > log_samples.argmin(axis=1)[:, None]
    reached = (over >= 0) & after
    first = reached.argmax(axis=1)
    rows, before = np.arange(len(over)), np.maximum(first - 1, 0)
    low, high = over[rows, before], over[rows, first]
    finite = np.isfinite(low) & np.isfinite(high)
    low, high = np.where(finite, low, -1.0), np.where(finite, high, 1.0)
    share = -low / np.maximum(high - low, 1e-12)
    found = np.exp(log_batches[before] + share * (log_batches[first] - log_batches[before]))
    return np.where(reached.any(axis=1), found, math.inf)


def _crossings(values: Array, log_samples: Array, level: float) -> Array:
    """Samples at which values (..., lengths) first reach a level, linear between lengths; infinite where they do not."""
    reached = values >= level
    first = reached.argmax(axis=-1)
    before = np.maximum(first - 1, 0)
    low, high = (np.take_along_axis(values, at[..., None], axis=-1)[..., 0] for at in (before, first))
    share = np.where(first > 0, (level - low) / np.maximum(high - low, 1e-12), 0.0)
    samples = np.exp(log_samples[before] + share * (log_samples[first] - log_samples[before]))
    return np.where(reached.any(axis=-1), samples, math.inf)
