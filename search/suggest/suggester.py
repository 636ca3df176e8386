"""The bridge to Optuna: ask for what to try next, tell how it came out, read back what is known.

Everything Optuna stores is written so that its dashboard and `optuna.load_study` read it without bsearch:
both directions, metric names, parameters by their own names, derived values as user attributes.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState

from ...spaces.domain import Choices, Domain, Range, searched_of, values_of
from ...spaces.errors import Fault, StudyFileError
from ...spaces.study import Objectives
from ...spaces.trial import Suggestion
from ..store.database import Patience, patient
from ..store.optuna_storage import _door, open_storage
from ..store.single_writer_storage import OneWriterStorage
from .front_model import PastTrial
from .sampler import FrontSampler

_STATES = {"COMPLETE": TrialState.COMPLETE, "PRUNED": TrialState.PRUNED, "FAIL": TrialState.FAIL}

# What a trial was queued with, and is queued with again where its driver stopped.
_QUEUED_NOTES = {"start", "repeats", "seed", "began_as"}

# Optuna's own word for a trial's constraints; its dashboard and its samplers read this system attribute.
_CONSTRAINTS = "constraints"


def _sampler(
    named: str,
    searched: Mapping[str, BaseDistribution],
    known_seconds: Callable[[Mapping[str, Any]], float] | None,
    past: Sequence[PastTrial],
    seed: int,
    trials: int,
) -> BaseSampler:
    """The sampler of a name, in a study that has so many trials already.

    Raises:
        StudyFileError: it cannot be imported or is none.
    """
    if named == "front":
        # Its points are told apart by their trials' numbers, so its seed stays.
        return FrontSampler(space=searched, known_seconds=known_seconds, past=past, seed=seed)
    seed += trials  # one made anew with the same seed replays its first points
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
        made = getattr(importlib.import_module(module), name)
        sampler = made() if isinstance(made, type) else made
    except Exception as error:
        raise StudyFileError(Fault("sampler", f"{named}: {type(error).__name__}: {error}")) from None
    if not isinstance(sampler, BaseSampler):
        raise StudyFileError(Fault("sampler", f"expected an Optuna sampler at {named}, got {type(sampler).__name__}"))
    return sampler


def distribution(domain: Domain) -> BaseDistribution:
    """Optuna's word for a domain that holds more than one value."""
    match domain:
        case Range() if domain.whole:
            return IntDistribution(int(domain.low), int(domain.high), log=bool(domain.log))
        case Range():
            return FloatDistribution(float(domain.low), float(domain.high), log=bool(domain.log))
        case Choices():
            return CategoricalDistribution(domain.choices)
    raise AssertionError(domain)


class Suggester:
    """One Optuna study under our rules.

    Args:
        url: of its storage; None keeps it in this process.
        name: its full name there.
        domains: of every parameter; those of one value are not searched.
        legal: the effective batches that can be planned.
        known_seconds: of parameters, where a law knows them.
        past: trials of earlier studies that the sampler `front` learns from.
        patience: waits where the storage goes away; not given, nothing waits.
        alone: nobody else writes to this study, so that what is known of it need not be read again.
    """

    def __init__(
        self,
        url: str | None,
        name: str,
        domains: Mapping[str, Domain],
        objectives: Objectives,
        *,
        sampler: str = "front",
        seed: int = 0,
        legal: tuple[int, int] | None = None,
        known_seconds: Callable[[Mapping[str, Any]], float] | None = None,
        past: Sequence[PastTrial] = (),
        patience: Patience | None = None,
        alone: bool = False,
    ) -> None:
        self.url = url or "memory"
        self.patience = patience or Patience(self.url)
        self.storage = open_storage(url)
        several = searched_of(domains)
        self.fixed = {key: next(values_of(domain)) for key, domain in domains.items() if key not in several}
        self.searched = {key: distribution(domain) for key, domain in several.items()}
        batches = self.searched.get("effective_batch")
        if legal is not None and isinstance(batches, IntDistribution):
            # No suggestion is made that memory, data or the wished passes forbid.
            self.searched["effective_batch"] = IntDistribution(*legal, log=batches.log)
        self.study = self._opened(name, objectives, alone)
        trials = self.trials()
        # Trials that are RUNNING and not among these were begun by an `ask` of ours whose answer was lost.
        self._known = {trial.number for trial in trials if trial.state == TrialState.RUNNING}
        with _door(self.url):
            self.study.sampler = _sampler(sampler, self.searched, known_seconds, past, seed, len(trials))

    @patient
    def _opened(self, name: str, objectives: Objectives, alone: bool) -> optuna.Study:
        metric = objectives.accuracy
        with _door(self.url):
            study = optuna.create_study(
                study_name=name,
                storage=self.storage,
                directions=["minimize", metric.direction],
                load_if_exists=True,
            )
            directions = [direction.name.lower() for direction in study.directions]
            if directions != ["minimize", metric.direction]:
                message = (
                    f"the storage holds another Optuna study of this name, with directions {directions}. Choose another name."
                )
                raise StudyFileError(Fault("study", message))
            if alone and isinstance(self.storage, RDBStorage):
                self.storage = OneWriterStorage(self.storage, self.storage.get_study_id_from_name(name))
                study = optuna.load_study(study_name=name, storage=self.storage)
            if not study.get_trials(deepcopy=False):
                study.set_metric_names([objectives.speed, metric.metric])
        return study

    def ask(self) -> Suggestion:
        """The next thing to try; the trial is RUNNING from here on."""
        tries = itertools.count()
        trial = self.patience(lambda: self._asked(again=next(tries) > 0))
        self._known.add(trial.number)
        return Suggestion(trial.number, {**self.fixed, **trial.params}, dict(trial.user_attrs))

    def _asked(self, *, again: bool) -> Trial:
        with _door(self.url):
            if again:
                self._read_again()
                for begun in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                    if begun.number not in self._known:
                        trial = Trial(self.study, begun._trial_id)
                        for name, domain in self.searched.items():
                            trial._suggest(name, domain)  # what it was given before the connection was lost, it keeps
                        return trial
            return self.study.ask(self.searched)

    def enqueue(self, parameters: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        """Have these parameters asked before the sampler's own."""
        chosen = {key: value for key, value in parameters.items() if key in self.searched}
        before = len(self.trials())
        tries = itertools.count()

        def once() -> None:
            with _door(self.url):
                if next(tries) > 0:
                    self._read_again()
                # The answer to an earlier try may have been lost; nobody else queues.
                if not any(dict(notes) == trial.user_attrs for trial in self.trials()[before:]):
                    self.study.enqueue_trial(chosen, user_attrs=dict(notes))

        self.patience(once)

    @patient
    def note(self, number: int, facts: Mapping[str, Any]) -> None:
        """Write derived values down as user attributes."""
        trial_id = self._id(number)
        with _door(self.url):
            if isinstance(self.storage, OneWriterStorage):
                self.storage.set_trial_user_attrs(trial_id, facts)
                return
            for key, value in facts.items():
                self.storage.set_trial_user_attr(trial_id, key, value)

    @patient
    def tell(self, number: int, result: Mapping[str, Any]) -> None:
        """End a trial as `result` says: its state, values, constraint and facts. Twice is once."""
        with _door(self.url):
            if self.storage.get_trial(self._id(number)).state.is_finished():
                return
        self.note(number, result["facts"])
        with _door(self.url):
            if result["constraint"] is not None:
                self.storage.set_trial_system_attr(self._id(number), _CONSTRAINTS, [result["constraint"]])
            self.study.tell(number, result["values"], _STATES[result["state"]], skip_if_finished=True)

    def continue_later(self, number: int, why: str) -> None:
        """Fail a RUNNING trial whose driver stopped, and queue its parameters; twice is once."""
        trials = self.trials()
        trial = trials[number]
        if not any(other.user_attrs.get("continues") == number for other in trials):
            kept = {key: value for key, value in trial.user_attrs.items() if key in _QUEUED_NOTES}
            self.enqueue(trial.params, {"continues": number, "began_as": number, **kept})
        follower = next(other.number for other in self.trials() if other.user_attrs.get("continues") == number)
        facts = {"outcome": "interrupted", "message": why, "continued_by": follower}
        self.tell(number, {"state": "FAIL", "values": None, "constraint": None, "facts": facts})

    @patient
    def trials(self) -> list[FrozenTrial]:
        with _door(self.url):
            return self.study.get_trials(deepcopy=False)

    @patient
    def kept_trials(self) -> list[FrozenTrial]:
        """The trials as the database holds them, which is the only truth."""
        with _door(self.url):
            self._read_again()
            return self.study.get_trials(deepcopy=False)

    def _read_again(self) -> None:
        """What a writing whose answer was lost came to; nothing where the database is asked every time."""
        if isinstance(self.storage, OneWriterStorage):
            self.storage.read_again()

    def close(self) -> None:
        """Close the connections; the next use opens new ones."""
        if isinstance(self.storage, RDBStorage | OneWriterStorage):
            self.storage.engine.dispose()

    def _id(self, number: int) -> int:
        with _door(self.url):
            return self.storage.get_trial_id_from_study_id_trial_number(self.study._study_id, number)
