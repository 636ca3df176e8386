"""The bridge to Optuna: ask for the next trial, tell its result.

Everything is stored so that optuna-dashboard and `optuna.load_study` read it without bsearch: both directions, metric names,
parameters by their own names, derived values as user attributes.
"""

from __future__ import annotations

import importlib
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from ...spaces.domain import Choices, Domain, Range, applies, applying, searched_of, values_of
from ...spaces.errors import Fault, StudyFileError
from ...spaces.study.goals import Objectives
from ...spaces.trial import Suggestion, TrialFacts, TrialResult
from ..store.database import RetryPolicy, retrying
from ..store.optuna_storage import open_storage, translate_optuna_errors
from ..store.single_writer_storage import SingleWriterStorage
from ..store.write_buffer import WriteBuffer
from .sampler import FrontSampler
from .trial_history import PAUSED, PriorTrial

_STATES = {"COMPLETE": TrialState.COMPLETE, "PRUNED": TrialState.PRUNED, "FAIL": TrialState.FAIL}

# Notes of a queued trial that stay with it when it is queued again because its driver stopped.
_QUEUED_NOTES = {"baseline", "repeats", "seed", "began_as", *PAUSED}

# Optuna's own key for a trial's constraints; its dashboard and its samplers read this system attribute.
_CONSTRAINTS = "constraints"


def _sampler(
    named: str,
    searched: Mapping[str, BaseDistribution],
    known_seconds: Callable[[Mapping[str, Any]], float | tuple[float, ...]] | None,
    prior_trials: Sequence[PriorTrial],
    seed: int,
    trials: int,
    conditions: Mapping[str, Mapping[str, Sequence[Any]]],
    scaled: bool,
    by_time: bool,
    pauses: bool,
) -> BaseSampler:
    """The named sampler, for a study that already has `trials` trials.

    Args:
        scaled: a rule scales the rate with the batch.

    Raises:
        StudyFileError: it cannot be imported or is not a sampler.
    """
    if named == "front":
        # It seeds each proposal with the trial's number, so its seed stays the same.
        return FrontSampler(
            space=searched,
            conditions=conditions,
            known_seconds=known_seconds,
            prior_trials=prior_trials,
            scaled=scaled,
            by_time=by_time,
            pauses=pauses,
            seed=seed,
        )
    seed += trials  # a new sampler with the same seed would replay its first points
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
        raise StudyFileError(Fault("sampler", f"expected an Optuna sampler at {named}, got {type(sampler).__name__}"))
    return sampler


def distribution(domain: Domain) -> BaseDistribution:
    """Optuna's distribution for a domain of more than one value."""
    match domain:
        case Range() if domain.whole:
            return IntDistribution(int(domain.low), int(domain.high), log=bool(domain.log), step=int(domain.step or 1))
        case Range():
            return FloatDistribution(float(domain.low), float(domain.high), log=bool(domain.log), step=domain.step)
        case Choices():
            return CategoricalDistribution(domain.choices)
    raise AssertionError(domain)


def _is_paused(trial: FrozenTrial) -> bool:
    return bool(trial.user_attrs.get("paused")) and not trial.state.is_finished()


class Suggester:
    """One Optuna study, with our samplers, retries and stored facts.

    Args:
        url: of its storage; None stores it in memory.
        name: its full name there.
        domains: of every parameter; those of one value are not searched.
        feasible: the effective batches that can be planned, lowest and highest.
        known_seconds: of parameters, where a law knows them; with three objectives, the other measure as well.
        prior_trials: trials of earlier studies that the sampler `front` learns from.
        retry_policy: for when the storage is unavailable; not given, nothing is retried.
        writes: given, no other process writes to this study, so it is cached in memory, and attributes are written with these.
        by_time: the search is limited by time rather than by a number of trials; only the sampler `front` uses it.
        pauses: trials are paused and resumed, which only the sampler `front` can do.
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
        feasible: tuple[int, int] | None = None,
        known_seconds: Callable[[Mapping[str, Any]], float | tuple[float, ...]] | None = None,
        prior_trials: Sequence[PriorTrial] = (),
        retry_policy: RetryPolicy | None = None,
        writes: WriteBuffer | None = None,
        by_time: bool = False,
        pauses: bool = False,
    ) -> None:
        self._pauses = pauses
        # What `ask` returns next: trials that have begun, numbers of paused ones, and parameters of new ones.
        self._ready: deque[Suggestion | int | dict[str, Any]] = deque()
        self._none_queued = 0  # among the first so many trials
        self._sampling = threading.Lock()  # a sampler serves one thread at a time
        self.url = url or "memory"
        self.retry_policy = retry_policy or RetryPolicy(self.url)
        self.storage = open_storage(url)
        several = searched_of(domains)
        self._domains = dict(domains)
        conditions = {name: domain.when for name, domain in several.items() if domain.when}
        self.fixed = {key: next(values_of(domain)) for key, domain in domains.items() if key not in several}
        # Those that others depend on come first, as their values are known when the others are asked for.
        self.searched = {key: distribution(several[key]) for key in sorted(several, key=conditions.__contains__)}
        batches = self.searched.get("effective_batch")
        if feasible is not None and isinstance(batches, IntDistribution):
            # Nothing is suggested that memory, data or the accumulation range forbid.
            low, high = (
                batches.low + batches.step * round_to((end - batches.low) / batches.step)
                for end, round_to in zip(feasible, (math.ceil, math.floor), strict=True)
            )
            self.searched["effective_batch"] = IntDistribution(low, max(low, high), log=batches.log, step=batches.step)
        self.study = self._open_study(name, objectives, writes)
        trials = self.trials()
        # Trials that are RUNNING and not among these were started by an `ask` of ours whose reply was lost.
        self._known = {trial.number for trial in trials if trial.state == TrialState.RUNNING}
        with translate_optuna_errors(self.url):
            scaled = self.fixed.get("rule") != "constant"
            self.study.sampler = _sampler(
                sampler,
                self.searched,
                known_seconds,
                prior_trials,
                seed,
                len(trials),
                conditions,
                scaled,
                by_time,
                pauses,
            )

    @retrying
    def _open_study(self, name: str, objectives: Objectives, writes: WriteBuffer | None) -> optuna.Study:
        expected = objectives.directions
        with translate_optuna_errors(self.url):
            study = optuna.create_study(
                study_name=name,
                storage=self.storage,
                directions=expected,
                load_if_exists=True,
            )
            directions = [direction.name.lower() for direction in study.directions]
            if directions != expected:
                message = (
                    f"the storage holds another Optuna study of this name, with directions {directions}. Choose another name."
                )
                raise StudyFileError(Fault("study", message))
            if writes is not None and isinstance(self.storage, RDBStorage):
                self.storage = SingleWriterStorage(self.storage, self.storage.get_study_id_from_name(name), writes)
                study = optuna.load_study(study_name=name, storage=self.storage)
            if not study.get_trials(deepcopy=False):
                study.set_metric_names(objectives.names)
        return study

    def ask(self, *, new: bool = True) -> Suggestion | None:
        """The next suggestion; its trial is RUNNING from here on.

        Queued trials come before what else is `ready`, and that before what the sampler proposes now.

        Args:
            new: a new trial may be started; else a paused one is resumed, and where none is paused there is no suggestion.
        """
        if self.has_queued and not self.has_begun:
            return self._asked()
        while True:
            if not self._ready:
                self.prepare(new=new)
            if not self._ready:
                return None
            proposal = self._ready.popleft()
            match proposal:
                case Suggestion():
                    return proposal
                case int():
                    if (resumed := self._paused(proposal)) is not None:
                        return resumed
                case _ if new:
                    number = self._add(proposal, {})
                    return Suggestion(number, applying(self._domains, {**self.fixed, **proposal}))

    def prepare(self, count: int = 1, *, new: bool = True) -> int:
        """Have `count` more suggestions ready for `ask`, or fewer where the sampler makes one at a time; it may take seconds.

        Args:
            new: as for `ask`.

        Returns:
            How many more there are.
        """
        sampler = self.study.sampler
        proposed: Sequence[int | dict[str, Any] | None] = ()
        paused = [trial.number for trial in self.trials() if _is_paused(trial)] if self._pauses else []
        if not (paused or new):
            return 0
        if isinstance(sampler, FrontSampler):
            with self._sampling, translate_optuna_errors(self.url):
                if paused:
                    number, values = sampler.paused_or_new(self.study, or_new=new)
                    if number is None and not new:
                        number = paused[0]  # too little is known to choose
                    proposed = [number if number is not None else values]
                else:
                    # Another thread takes them meanwhile.
                    others = [one for one in list(self._ready) if isinstance(one, dict)]
                    proposed = sampler.proposals(self.study, count, others=others)
        whole = [one for one in proposed if isinstance(one, int) or (one is not None and self._is_whole(one))]
        self._ready.extend(whole)
        if not whole:  # another sampler, or objectives or conditions that ours does not know
            self._ready.append(self._asked())
        return len(whole) or 1

    @property
    def ready(self) -> int:
        """Suggestions that `ask` returns without asking the sampler."""
        return len(self._ready) or int(self.has_queued)

    @property
    def has_begun(self) -> bool:
        """Whether what `ask` returns next is a trial that has begun: other samplers than ours make those."""
        return bool(self._ready) and isinstance(self._ready[0], Suggestion)

    @property
    def begins_ahead(self) -> bool:
        """Whether `prepare` begins trials."""
        return not isinstance(self.study.sampler, FrontSampler)

    @property
    def has_queued(self) -> bool:
        """Whether a trial is queued."""
        trials = self.trials()
        for number in range(self._none_queued, len(trials)):
            if trials[number].state == TrialState.WAITING:
                return True
        self._none_queued = len(trials)
        return False

    def _is_whole(self, values: Mapping[str, Any]) -> bool:
        """Whether every parameter that applies has a value."""
        given = {**self.fixed, **values}
        return all(name in given for name in self.searched if applies(self._domains[name].when, given))

    def _asked(self) -> Suggestion:
        """A queued trial, or one with what the sampler proposes now."""
        tries = itertools.count()
        with self._sampling:
            trial = self.retry_policy(lambda: self._ask(again=next(tries) > 0))
        self._known.add(trial.number)
        return Suggestion(trial.number, applying(self._domains, {**self.fixed, **trial.params}), dict(trial.user_attrs))

    def _paused(self, number: int) -> Suggestion | None:
        """A paused trial as a suggestion to go on with it; None if it is not paused."""
        trial = self.trials()[number]
        if not _is_paused(trial):
            return None
        parameters = applying(self._domains, {**self.fixed, **trial.params})
        return Suggestion(number, parameters, dict(trial.user_attrs), trial.user_attrs["rung_fraction"])

    def resume(self, number: int) -> None:
        """A paused trial trains again."""
        self.annotate(number, {"paused": False})

    def pause(self, number: int, facts: TrialFacts) -> None:
        """Leave a RUNNING trial paused, to be resumed by a later `ask`.

        Args:
            facts: its expected seconds, and its fraction and accuracy at the rung.
        """
        self.annotate(number, {**facts.to_dict(), "paused": True})

    def expected_gain(self, trials: int) -> float | None:
        """The share by which so many more trials are expected to enlarge the front's hypervolume; None if it is unknown."""
        sampler = self.study.sampler
        if not isinstance(sampler, FrontSampler):
            return None
        with self._sampling, translate_optuna_errors(self.url):
            return sampler.expected_gain(self.study, trials)

    def is_new_ground(self, number: int, others: Collection[int]) -> bool:
        """Whether too little is known of how a trial's curve goes on, from those of others, to pause it."""
        sampler = self.study.sampler
        return isinstance(sampler, FrontSampler) and sampler.is_new_ground(self.study, number, others)

    def _ask(self, *, again: bool) -> Trial:
        with translate_optuna_errors(self.url):
            if again:
                self._reread()
                for running in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                    if running.number not in self._known:
                        return self._suggested(Trial(self.study, running._trial_id))  # keeps values set before
            return self._suggested(self.study.ask())

    def _suggested(self, trial: Trial) -> Trial:
        """The trial with a value for every parameter that applies."""
        for name, distribution in self.searched.items():
            if applies(self._domains[name].when, {**self.fixed, **trial.params}):
                trial._suggest(name, distribution)
        return trial

    def enqueue(self, parameters: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        """Queue parameters, to be suggested before the sampler's own."""
        chosen = {key: value for key, value in parameters.items() if key in self.searched}
        before = len(self.trials())
        tries = itertools.count()

        def once() -> None:
            with translate_optuna_errors(self.url):
                if next(tries) > 0:
                    self._reread()
                # The reply to an earlier try may have been lost; no other process queues trials.
                if not any(dict(notes) == trial.user_attrs for trial in self.trials()[before:]):
                    self.study.enqueue_trial(chosen, user_attrs=dict(notes))

        self.retry_policy(once)

    def begin(self, parameters: Mapping[str, Any], notes: Mapping[str, Any]) -> int:
        """The number of the trial with these notes: one that has not failed, or a new one, RUNNING from here on."""
        for trial in self.trials():
            if trial.state != TrialState.FAIL and dict(notes).items() <= trial.user_attrs.items():
                return trial.number
        return self._add(parameters, notes)

    def _add(self, parameters: Mapping[str, Any], notes: Mapping[str, Any]) -> int:
        """The number of a new trial, RUNNING from here on."""
        chosen = {key: value for key, value in parameters.items() if key in self.searched}
        tries = itertools.count()

        def once() -> int:
            with translate_optuna_errors(self.url):
                if next(tries) > 0:
                    self._reread()
                    # The reply to an earlier try may have been lost.
                    for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                        if trial.number not in self._known and trial.params == chosen and trial.user_attrs == dict(notes):
                            return trial.number
                distributions = {key: self.searched[key] for key in chosen}
                template = create_trial(
                    state=TrialState.RUNNING, params=chosen, distributions=distributions, user_attrs=dict(notes)
                )
                trial_id = self.storage.create_new_trial(self.study._study_id, template)
                return self.storage.get_trial_number_from_id(trial_id)

        number = self.retry_policy(once)
        self._known.add(number)
        return number

    @retrying
    def annotate(self, number: int, facts: Mapping[str, Any]) -> None:
        """Store derived values as user attributes."""
        trial_id = self._id(number)
        with translate_optuna_errors(self.url):
            if isinstance(self.storage, SingleWriterStorage):
                self.storage.set_trial_user_attrs(trial_id, facts)
                return
            for key, value in facts.items():
                self.storage.set_trial_user_attr(trial_id, key, value)

    def tell(self, number: int, result: TrialResult) -> None:
        """End a trial with its result; idempotent."""
        tries = itertools.count()
        self.retry_policy(lambda: self._tell(number, result, again=next(tries) > 0))

    def _tell(self, number: int, result: TrialResult, *, again: bool) -> None:
        with translate_optuna_errors(self.url):
            if again:
                self._reread()  # it may have ended, and only the reply was lost
            if self.storage.get_trial(self._id(number)).state.is_finished():
                return
        self.annotate(number, result.attributes)
        with translate_optuna_errors(self.url):
            if result.constraint is not None:
                self.storage.set_trial_system_attr(self._id(number), _CONSTRAINTS, [result.constraint])
            self.study.tell(number, result.values, _STATES[result.state], skip_if_finished=True)

    def continue_later(self, number: int, why: str) -> None:
        """Fail a RUNNING trial whose driver stopped, and queue its parameters again; idempotent."""
        trials = self.trials()
        trial = trials[number]
        if not any(other.user_attrs.get("continues") == number for other in trials):
            notes = {key: value for key, value in trial.user_attrs.items() if key in _QUEUED_NOTES}
            # Where the driver was killed while it began a queued trial, only some of the parameters have been written.
            queued = trial.system_attrs.get("fixed_params", {})
            self.enqueue({**queued, **trial.params}, {"continues": number, "began_as": number, **notes})
        follower = next(other.number for other in self.trials() if other.user_attrs.get("continues") == number)
        self.tell(number, TrialResult("FAIL", "interrupted", TrialFacts(message=why, continued_by=follower)))

    @retrying
    def trials(self) -> list[FrozenTrial]:
        with translate_optuna_errors(self.url):
            return self.study.get_trials(deepcopy=False)

    @retrying
    def reread_trials(self) -> list[FrozenTrial]:
        """The trials, read from the database again."""
        with translate_optuna_errors(self.url):
            self._reread()
            return self.study.get_trials(deepcopy=False)

    def _reread(self) -> None:
        """Read the trials from the database again: the reply to a write was lost. Does nothing if there is no cache."""
        self._none_queued = 0
        if isinstance(self.storage, SingleWriterStorage):
            self.storage.reread()

    def close(self) -> None:
        """Close the connections; the next use opens new ones."""
        if isinstance(self.storage, RDBStorage | SingleWriterStorage):
            self.storage.engine.dispose()

    def _id(self, number: int) -> int:
        with translate_optuna_errors(self.url):
            return self.storage.get_trial_id_from_study_id_trial_number(self.study._study_id, number)
