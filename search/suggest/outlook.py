"""What one more training would reach: settings that were tried and others, at every length, as the models see them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..analysis.gaussian_process import Array
from .front_model import LEAST_PROBABILITY, FrontModel, KnownLogTaken
from .space_transform import SpaceTransform

EPOCHS, DEVICES = "epochs", "devices"
# Settings: the best of those that were tried, and others around them and anywhere; each at so many lengths.
_TRIED, _AROUND, _ANYWHERE, _LENGTHS = 16, 48, 48, 7
# Functions drawn from the posterior, which values are means over; of as many points as a covariance takes little time for.
_DRAWS = 96
_JITTER = 1e-6
# What is chosen as the best of many falls short of what models expect more often than it exceeds it: draws of what is measured
# that lie below the median are moved this many times as far from it (docs/log.md).
_SHORT_OF = 1.6
# Coordinates that are alike in so many digits are the same.
_SAME = 9


@dataclass(frozen=True)
class Outlook:
    """Possible trainings, and what they would reach.

    Args:
        points: (n, width), of the cube.
        setting: (n,), which rows are one setting at several lengths.
        tried: (n,), the number of the trial that trained this setting, whatever its length; -1 where none has.
        done: (n,), whether a trial has trained just this, or a final training does now; the same again would be the same again.
        seconds: (n,), of training.
        devices: (n,), that it trains on.
        reached: (draws, n), mean metric of each over seeds, higher is better: joint draws from the posterior.
        measured: (draws, n), what one training would reach in each draw, with its noise.
        best_so_far: (draws,), of the best complete trial, as it was trained, or of final trainings that run.
        unit: of the metric: its spread over good trials.
    """

    transform: SpaceTransform
    only: Mapping[str, Any]
    points: Array
    setting: np.ndarray[Any, np.dtype[np.int64]]
    tried: np.ndarray[Any, np.dtype[np.int64]]
    done: np.ndarray[Any, np.dtype[np.bool_]]
    seconds: Array
    devices: np.ndarray[Any, np.dtype[np.int64]]
    reached: Array
    measured: Array
    best_so_far: Array
    unit: float

    def parameters(self, row: int) -> dict[str, Any]:
        """The searched parameters of a row."""
        return self.transform.decode(self.points[row]) | dict(self.only)


def outlook(
    model: FrontModel,
    transform: SpaceTransform,
    only: Mapping[str, Any],
    known: KnownLogTaken,
    tried: Sequence[tuple[int, Mapping[str, Any]]],
    finals: Sequence[Mapping[str, Any]],
    rng: np.random.Generator,
) -> Outlook | None:
    """Trainings of the best settings and of others, each at several lengths where `epochs` is searched.

    Where `devices` is searched they are on as many as make them fastest, which changes nothing else.

    Args:
        only: parameters of a single value.
        tried: numbers and parameters of complete trials.
        finals: parameters of final trainings that run.

    Returns:
        None where no training can be planned.
    """
    numbers = np.array([number for number, _ in tried], dtype=np.int64)
    points = np.array([transform.encode(parameters) for _, parameters in tried]).reshape(-1, transform.width)
    best = np.argsort(-model.accuracy_model.mean_at(points))[:_TRIED] if len(points) else np.zeros(0, dtype=np.int64)
    around = points[rng.choice(best[:6], _AROUND)] if len(best) else np.zeros((0, transform.width))
    around = np.clip(around + rng.normal(0, 0.1, around.shape) * (rng.random(around.shape) < 0.5), 0, 1)
    others = transform.round_to_feasible(np.vstack([around, rng.random((_ANYWHERE, transform.width))]))
    # Every trial at its own length, for what is kept so far is one of them.
    at_lengths = _on_fastest(transform, known, _at_lengths(transform, np.vstack([points[best], others])))
    rows = np.vstack([points[best], at_lengths])
    lengths = (len(rows) - len(best)) // (len(best) + len(others))
    places = np.concatenate([numbers[best], np.repeat(np.append(numbers[best], np.full(len(others), -1)), lengths)])
    settings = np.concatenate([np.arange(len(best)), np.repeat(np.arange(len(best) + len(others)), lengths)])
    taken = known(rows)
    seconds = model.seconds_at(rows, taken) if taken is None or np.isnan(taken).any() else np.exp(taken[:, 0])
    planned = np.isfinite(seconds) if taken is None else np.isfinite(taken[:, 0])
    if model.success is not None:
        planned &= (model.success.mean_at(rows) >= LEAST_PROBABILITY) | (places >= 0)
    complete = np.arange(len(rows)) < len(best)
    running = np.array([transform.encode(parameters) for parameters in finals]).reshape(-1, transform.width)
    done = _among(rows, points) | _among(rows, running)
    if not planned.any():
        return None
    rows, places, seconds, settings = rows[planned], places[planned], seconds[planned], settings[planned]
    mean, covariance = model.accuracy_model.joint(rows)
    covariance[np.diag_indices_from(covariance)] += _JITTER * float(np.mean(np.diag(covariance)) + 1e-9)
    drawn = mean + rng.standard_normal((_DRAWS, len(rows))) @ _root(covariance).T
    reached = np.asarray(model.scale.back(drawn))
    noise = math.sqrt(math.exp(model.accuracy_model.log_noise)) * model.accuracy_model.std
    measured = np.asarray(model.scale.back(drawn + noise * rng.standard_normal(drawn.shape)))
    below = np.median(measured, axis=0) - measured
    measured = measured - (_SHORT_OF - 1) * np.maximum(below, 0.0)
    own = np.flatnonzero(complete[planned])
    best_so_far = reached[:, own[np.argmax(mean[own])]] if len(own) else reached.min(axis=1)
    for row in np.flatnonzero(_among(rows, running)):
        best_so_far = np.maximum(best_so_far, reached[:, row])
    return Outlook(
        transform,
        only,
        rows,
        settings,
        places,
        done[planned],
        np.asarray(seconds),
        np.array([{**only, **values}.get(DEVICES, 1) for values in transform.decode_many(rows)], dtype=np.int64),
        reached,
        measured,
        best_so_far,
        float(model.scale.unit),
    )


def _among(rows: Array, points: Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which of the rows (n, width) are one of the points (m, width), as (n,)."""
    known = {point.tobytes() for point in np.round(points, _SAME) + 0.0}
    return np.array([row.tobytes() in known for row in np.round(rows, _SAME) + 0.0], dtype=bool)


def _root(covariance: Array) -> Array:
    try:
        return np.asarray(np.linalg.cholesky(covariance))
    except np.linalg.LinAlgError:  # many rows are nearly the same
        values, vectors = np.linalg.eigh(covariance)
        return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))


def _at_lengths(transform: SpaceTransform, points: Array) -> Array:
    """Points (n, width), each at every length (n · lengths, width), those of one point in a row."""
    if EPOCHS not in transform.space:
        return points
    place = transform.place(EPOCHS)
    copies = np.repeat(points, _LENGTHS, axis=0)
    copies[:, place] = np.tile(np.linspace(0.0, 1.0, _LENGTHS), len(points))
    return transform.round_to_feasible(copies)


def _on_fastest(transform: SpaceTransform, known: KnownLogTaken, points: Array) -> Array:
    """Points (n, width), each on the number of devices on which it is fastest by the law."""
    counts = transform.values(DEVICES)
    if len(counts) < 2 or known(points) is None:
        return points
    each = np.array(
        [[transform.encode({**values, DEVICES: count}) for values in transform.decode_many(points)] for count in counts]
    )
    taken = np.array([known(of_count)[:, 0] for of_count in each])  # type: ignore[index]  # a law knows all or none
    return np.asarray(each[np.argmin(np.where(np.isnan(taken), math.inf, taken), axis=0), np.arange(len(points))])


__all__ = ["DEVICES", "EPOCHS", "Outlook", "outlook"]
