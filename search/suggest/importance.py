"""How much each searched parameter mattered to the metric, in a study's own trials."""

from __future__ import annotations

import warnings

import numpy as np
import optuna
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.trial import create_trial

from ..analysis.score_scale import ScoreScale
from ..store.stored import StoredStudy
from .space_transform import distribution

# Fewer complete trials than this per searched parameter say little.
_TRIALS_EACH = 5


def parameter_importances(study: StoredStudy) -> dict[str, float]:
    """Shares of the metric's variance over the space that each parameter explains by itself, the largest first; or none.

    By fANOVA (Hutter et al., ICML 2014), on the scale on which the sampler compares scores: near the best it is linear,
    far below it is compressed.
    """
    # A parameter that applies in only some trials has no share of the variance over all of them.
    space = {name: distribution(domain) for name, domain in study.spec.searched().items() if not domain.when}
    chosen = [
        record
        for record in study.records
        if record.outcome == "complete"
        and record.accuracy is not None
        and not record.is_repeat
        and space.keys() <= record.parameters.keys()
    ]
    if len(space) < 2 or len(chosen) < _TRIALS_EACH * len(space):
        return {}
    score = np.array([record.score for record in chosen])
    levels = ScoreScale(score).of(score)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        rebuilt = optuna.create_study(direction="maximize")
        for record, level in zip(chosen, levels, strict=True):
            parameters = {name: record.parameters[name] for name in space}
            with_values = create_trial(params=parameters, distributions=dict(space), value=float(level))
            rebuilt.add_trial(with_values)
        return dict(get_param_importances(rebuilt, evaluator=FanovaImportanceEvaluator(seed=0)))
