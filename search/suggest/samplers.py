"""The samplers by their names: `FrontSuggester` is bsearch's own, `OptunaSuggester` asks one of Optuna's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...spaces.study.goals import Objectives
from .space_transform import SearchSpace
from .suggester import Suggester
from .trial_history import PriorTrial


def suggester_of(
    sampler: str,
    space: SearchSpace,
    objectives: Objectives,
    *,
    trials: int = 0,
    known_seconds: Callable[[Mapping[str, Any]], float] | None = None,
    prior_trials: Sequence[PriorTrial] = (),
    doubted: bool = False,
    by_time: bool = False,
    pauses: bool = False,
    seed: int = 0,
) -> Suggester:
    """The named sampler: `front`, one of Optuna's, or `module:attr` of any Optuna sampler.

    Args:
        trials: that the study has already.
        known_seconds, prior_trials, doubted, by_time, pauses: as for `FrontSuggester`, the only one that uses them.

    Raises:
        StudyFileError: it cannot be imported or is not a sampler.
    """
    if sampler != "front":
        from .optuna.suggester import OptunaSuggester  # imports all of Optuna's samplers

        return OptunaSuggester(sampler, space, objectives, seed + trials)
    from .front_suggester import FrontSuggester  # imports NumPy and Optuna's distributions

    return FrontSuggester(
        space.searched,
        conditions=space.conditions,
        expected=space.expected,
        known_seconds=known_seconds,
        prior_trials=prior_trials,
        doubted=doubted,
        scaled=space.fixed.get("rule") != "constant",
        by_time=by_time,
        pauses=pauses,
        floor=objectives.metric.least_score,
        seed=seed,
    )
