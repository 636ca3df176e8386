"""Any of Optuna's samplers as a Suggester, asked within an in-memory copy of our study."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.storages import InMemoryStorage

from ....spaces.domain import applies
from ....spaces.errors import Fault, StudyFileError
from ....spaces.record import TrialRecord
from ....spaces.study.goals import Objectives
from ..space_transform import SearchSpace
from ..suggester import Proposal, Suggester
from .copy import OptunaCopy


class OptunaSuggester(Suggester):
    """One of Optuna's samplers, which proposes one trial at a time.

    Args:
        seed: of the sampler; a different one after every restart, since the same one would replay its first points.

    Raises:
        StudyFileError: it cannot be imported or is not a sampler.
    """

    def __init__(self, named: str, space: SearchSpace, objectives: Objectives, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = space
        self._storage = InMemoryStorage()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = _sampler(named, seed)
            self._study = optuna.create_study(
                study_name="copy", storage=self._storage, directions=objectives.directions, sampler=sampler
            )
        self._copy = OptunaCopy(self._storage, self._storage.get_study_id_from_name("copy"), space.searched)

    def suggest(
        self, trials: Sequence[TrialRecord], count: int = 1, *, ready: Sequence[Mapping[str, Any]] = ()
    ) -> Sequence[Proposal]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._copy.update(trials)
            asked = self._study.ask()
            for name in self._space.searched:
                if applies(self._space.conditions.get(name, {}), asked.params):
                    self._suggested(asked, name)
            self._copy.expect(asked.number, asked.params)
        return [asked.params]

    def _suggested(self, trial: optuna.Trial, name: str) -> None:
        match self._space.searched[name]:
            case CategoricalDistribution(choices=choices):
                trial.suggest_categorical(name, choices)
            case IntDistribution() as whole:
                trial.suggest_int(name, whole.low, whole.high, step=whole.step, log=whole.log)
            case FloatDistribution() as number:
                trial.suggest_float(name, number.low, number.high, step=number.step, log=number.log)


def _sampler(named: str, seed: int) -> BaseSampler:
    match named:
        case "tpe":
            return optuna.samplers.TPESampler(multivariate=True, constant_liar=True, seed=seed)
        case "gp":
            return optuna.samplers.GPSampler(seed=seed)
        case "nsga2":
            return optuna.samplers.NSGAIISampler(seed=seed)
        case "qmc":
            return optuna.samplers.QMCSampler(seed=seed, warn_independent_sampling=False)
        case "random":
            return optuna.samplers.RandomSampler(seed=seed)
    module, _, name = named.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
        sampler = found() if isinstance(found, type) else found
    except Exception as error:
        raise StudyFileError(Fault("sampler", f"{named}: {type(error).__name__}: {error}")) from None
    if not isinstance(sampler, BaseSampler):
        raise StudyFileError(
            Fault("sampler", f"expected an Optuna sampler at {named}, got {type(sampler).__name__}")
        )
    return sampler
