"""Scores over random uneven splits of real validation samples: they have to be those of the samples together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...spaces.errors import BsearchError
from ...spaces.laws.examination import Finding
from ..data.batches import SampleKeys
from ..evaluation import Evaluation
from ..loading import error_line
from ..machine.device_memory import is_out_of_memory
from ..training import TrainingRun
from .copies import ATTEMPTS, copied, location_of
from .fixed_noise import fixed_noise, seed_draws
from .reading import POOL, subset_fetchers, varied
from .step import SPLITS, Indices, in_precision, uneven_parts

# Validation samples whose scores are compared at most.
_SAMPLES = 48
# The fewest that are compared, however slow the model.
_FEWEST = 4
# Target time of the comparison, in seconds.
_BUDGET_S = 0.7
# Largest relative difference that counts as rounding, by precision.
_SAME = {torch.float64: 1e-6, torch.float32: 1e-4, None: 2e-2}

_NO_SUM = (
    "{name}: expected a ratio of sums over samples, got {whole:.4g} from {samples} samples in one batch and {split:.4g} in "
    "several. Return WholeSet(metric, outputs, targets), with a torchmetrics metric or a function of all outputs and targets; "
    "for a mean, Score(sum, count)."
)
_NOT_WHOLE = (
    "{name}: expected a metric of the whole set, got {whole:.4g} from {samples} samples in one batch and {split:.4g} in "
    "several: its arguments depend on the batch, or the metric handles batches differently. Pass probabilities rather than "
    "logits: torchmetrics applies a sigmoid only to batches with values outside [0, 1]."
)


def first_scores(run: TrainingRun) -> dict[str, float]:
    """The scores of a few validation samples; of all of them where a metric does not work with few."""
    try:
        return run.evaluate(few_samples(run))
    except Exception as error:
        if is_out_of_memory(error):
            raise
    return run.evaluate()


def few_samples(run: TrainingRun) -> Sequence[SampleKeys]:
    """A few validation samples, in several batches."""
    chosen = _chosen(run)[:16]
    parts = [chosen[start : start + 4] for start in range(0, len(chosen), 4)]
    return [SampleKeys(part, np.zeros_like(part), run.setup.seed) for part in parts]


def score_findings(run: TrainingRun) -> Iterator[Finding]:
    """Scores that differ between samples together and in parts."""
    chosen, where, note = _chosen(run), location_of(run, "score", "validation data"), ""
    samples = len(chosen)
    if samples < 2:
        return
    keys = SampleKeys(chosen, np.zeros_like(chosen), run.setup.seed)
    collated, sliced = subset_fetchers(run.validation_fetcher, keys, run.on_device)
    fetch = sliced or collated
    for dtype, perturbed in ATTEMPTS:
        try:
            other = copied(run, dtype, perturbed=perturbed)
            other.model.eval()

            def evaluated(
                parts: Sequence[Indices], seed: int = 0, other: TrainingRun = other, dtype: Any = dtype
            ) -> Evaluation:
                return _evaluated(other, [in_precision(fetch(part), dtype) for part in parts], seed)

            samples, count = _affordable(evaluated, len(chosen))
            whole = evaluated([np.arange(samples)])
            parts = [uneven_parts(samples, 1, run.setup.seed + number) for number in range(count)]
            splits = [evaluated(each).values() for each in parts]
            again = (
                evaluated([np.arange(samples)], seed=1).values()
                if splits[0] != whole.values()
                else whole.values()
            )
        except BsearchError:
            raise
        except Exception as error:
            note = note or error_line(error)
            continue
        for name, value in whole.values().items():
            split = max((scores.get(name, math.nan) for scores in splits), key=partial(_off, value))
            # One prediction may flip by rounding where outputs nearly tie.
            rounds = dtype is None and abs(value - split) * samples < 1.5
            if _off(value, again.get(name, math.nan)) > _SAME[dtype]:
                yield Finding(
                    "scores_not_compared", where, f"{name}: draws random numbers that cannot be held fixed"
                )
            elif (off := _off(value, split)) > _SAME[dtype] and not rounds:
                text = _NO_SUM if name in whole.sums else _NOT_WHOLE
                yield Finding(
                    "score", where, text.format(name=name, whole=value, samples=samples, split=split), off
                )
        return
    yield Finding("scores_not_compared", where, f"scores could not be compared unsplit and split: {note}")


def _chosen(run: TrainingRun) -> Indices:
    """At random, since data sets are often sorted by class, and of as many kinds as there are."""
    size = len(run.validation_fetcher.dataset)  # type: ignore[arg-type]
    pool = np.random.default_rng(run.setup.seed).choice(size, min(POOL, size), replace=False)
    return varied(
        run.validation_fetcher, SampleKeys(pool, np.zeros_like(pool), run.setup.seed), _SAMPLES
    ).index


def _affordable(evaluated: Callable[[Sequence[Indices]], Evaluation], most: int) -> tuple[int, int]:
    """How many samples, up to `most`, can be evaluated in a second or so, and in how many splits."""
    fewest = min(_FEWEST, most)
    took: list[float] = []
    while len(took) < 2 and sum(took) < 5 * _BUDGET_S:  # the first may import what a metric needs
        started = time.perf_counter()
        evaluated([np.arange(fewest)])
        took.append(time.perf_counter() - started)
    took_s = min(took)
    samples = min(max(int(fewest * _BUDGET_S / ((1 + SPLITS) * took_s)), fewest), most)
    return samples, SPLITS if (1 + SPLITS) * took_s < 2 * _BUDGET_S else 1


def _evaluated(run: TrainingRun, batches: Sequence[Any], seed: int = 0) -> Evaluation:
    evaluation = Evaluation(run.task)
    for batch in batches:
        seed_draws(seed)
        with torch.no_grad(), fixed_noise("rows", run.model):
            evaluation.add(run.scores(batch))
    return evaluation


def _off(value: float, other: float) -> float:
    """Relative difference of two scores; infinite where one alone is undefined or infinite."""
    if value == other or (math.isnan(value) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(value) and math.isfinite(other)):
        return math.inf
    return abs(value - other) / max(abs(value), abs(other))
