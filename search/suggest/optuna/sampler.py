"""FrontSampler: `FrontSuggester` as an ordinary Optuna sampler, for plain Optuna."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial

from ....spaces.names import Direction
from ....spaces.record import TrialRecord
from ..front_suggester import FrontSuggester
from ..trial_history import PriorTrial
from .copy import record_of


class FrontSampler(BaseSampler):
    """Expected hypervolume improvement over seconds (first objective, minimized) and accuracy (second).

    Trials that ended without values teach where training fails. A pruned trial with the user attributes `expected_seconds`,
    `expected_accuracy` and `expected_std` (the prediction when it was stopped) counts as an observation with that noise.

    Args:
        space: what is searched; not given, the parameters that finished trials have in common.
        conditions, known_seconds, prior_trials, scaled, by_time, floor, seed: as for `FrontSuggester`.

    Raises:
        ValueError: when it suggests: the study has other objectives, or seconds that are not above 0.
    """

    def __init__(
        self,
        *,
        space: Mapping[str, BaseDistribution] | None = None,
        conditions: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
        known_seconds: Callable[[Mapping[str, Any]], float] | None = None,
        prior_trials: Sequence[PriorTrial] = (),
        scaled: bool = True,
        by_time: bool = False,
        floor: float = -math.inf,
        seed: int = 0,
    ) -> None:
        if space is not None and not space:
            raise ValueError("FrontSampler: expected at least one parameter in space, got none")
        self._space = dict(space) if space is not None else None
        self._how: dict[str, Any] = {
            "conditions": conditions,
            "known_seconds": known_seconds,
            "prior_trials": prior_trials,
            "scaled": scaled,
            "by_time": by_time,
            "floor": floor,
            "seed": seed,
        }
        self._independent = RandomSampler(seed=seed)
        self._common = IntersectionSearchSpace()
        self._known: WeakKeyDictionary[Study, tuple[FrontSuggester, list[TrialRecord]]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_known"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_known": WeakKeyDictionary()}

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        space = self._space if self._space is not None else self._common.calculate(study)
        return {name: distribution for name, distribution in space.items() if not distribution.single()}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._independent.sample_independent(study, trial, param_name, param_distribution)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        suggester, records = self._of(study, search_space)
        return suggester.proposed(records, trial.number)[0][0]

    def _of(
        self, study: Study, space: dict[str, BaseDistribution]
    ) -> tuple[FrontSuggester, list[TrialRecord]]:
        """What suggests for a study, and its trials."""
        if len(study.directions) != 2 or study.directions[0] != StudyDirection.MINIMIZE:
            got = ", ".join(direction.name.lower() for direction in study.directions)
            raise ValueError(
                f"FrontSampler: expected two objectives, seconds, minimized, and a metric; got {got}"
            )
        known = self._known.get(study)
        if known is None or known[0].transform.space != space:
            suggester = FrontSuggester(space, **self._how)
            known = self._known[study] = suggester, [] if known is None else known[1]
        records, trials = known[1], study.get_trials(deepcopy=False)
        direction: Direction = "maximize" if study.directions[1] == StudyDirection.MAXIMIZE else "minimize"
        for trial in trials:
            if trial.number == len(records):
                records.append(record_of(trial, direction))
            elif not records[trial.number].has_ended:  # one that has ended does not change
                records[trial.number] = record_of(trial, direction)
        for record in records:
            if record.values is not None and record.values[0] <= 0:
                got = f"{record.values[0]} of trial {record.number}"
                raise ValueError(f"FrontSampler: expected seconds above 0 as first value, got {got}")
        return known
