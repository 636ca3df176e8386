"""Ask and tell: the search for users with their own scheduler and training loop, without Ray.

    search = Search({"effective_batch": {"low": 8, "high": 4096}, "learning_rate": {"low": 1e-3, "high": 1.0, "log": True}})
    while search.ended < 40:
        suggestion = search.ask()
        for fraction, train_s, accuracy in train(**suggestion.parameters):
            if search.report(suggestion.number, fraction, train_s, accuracy):
                search.tell(suggestion.number, train_s, accuracy, "stopped")
                break
        else:
            search.tell(suggestion.number, train_s, accuracy)
    print(search.front())

Several suggestions may be pending at once: each takes the others into account.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from ...spaces.domain import AnyDomain, Domain, values_of
from ...spaces.errors import Fault, StorageError, StudyFileError, TaskError, cut, near_miss
from ...spaces.front import ParetoFront
from ...spaces.learning_rate import RATE_RULES, OptimizerSettings, RuleConstants, scaled_settings
from ...spaces.names import direction_of
from ...spaces.record import TrialFacts, TrialRecord, TrialResult, counted
from ...spaces.study.goals import Metric, Objectives, Stopping
from ...spaces.trial import Suggestion
from ..analysis.pareto import study_front
from ..store.tables import Tables
from ..store.trials import Trials
from .optuna.database import OptunaDatabase
from .samplers import suggester_of
from .space_transform import SearchSpace
from .suggester import Proposal

TellOutcome = Literal["complete", "stopped", "paused", "diverged", "error"]


class Search:
    """What to try next, and whether to continue it.

    Args:
        space: domains by name, written as in a study file: `{low, high, log, prior}`, a list of choices, or one value.
        rule: scales `reference_rate`, where the space has it, to `learning_rate` in every suggestion; a searched parameter
            `rule` or `exponent` takes precedence. `reference_batch` is the batch of the reference rate.
        known_seconds: function from parameters to the seconds of a full training run; NaN for settings that do not fit in
            memory or cannot be planned, which are never proposed.
        direction: of the metric; not given, its name says it.
        floor: a value of it beyond which nothing is worth anything, as `objectives.metric.floor`.
        sampler: front, tpe, gp, nsga2, qmc, random, or module:attr of an Optuna sampler.
        stopping: front or none.
        by_time: the search is limited by time rather than by a number of trials, so fast trials are worth more.
        pauses: trials may be paused instead of stopped: tell "paused" where `report` says so and keep a checkpoint: a later
            `ask` may suggest the same trial again, with `resumes_from` above 0. That finds more early on where time limits a
            search over trainings of one length.
        storage: SQLAlchemy URL; not given, the search is in memory. A search of the same name there is resumed;
            trials without a result count as running.

    Raises:
        StudyFileError: the space or a name is wrong.
    """

    def __init__(
        self,
        space: Mapping[str, Any],
        *,
        rule: str | None = None,
        reference_batch: int = 256,
        known_seconds: Callable[[Mapping[str, Any]], float] | None = None,
        direction: Literal["minimize", "maximize"] | None = None,
        metric: str = "accuracy",
        floor: float | None = None,
        sampler: str = "front",
        stopping: str = "front",
        by_time: bool = False,
        pauses: bool = False,
        storage: str | None = None,
        name: str = "search",
        seed: int = 0,
    ) -> None:
        domains = _domains(space)
        faults = []
        direction = direction or direction_of(metric)
        rules = [name for name in RATE_RULES if name != "adamw_tau"]  # it needs a trial's samples
        named: list[tuple[str, Any, Collection[str]]] = [
            ("stopping", stopping, get_args(Stopping)),
            ("direction", direction or "none", ("minimize", "maximize")),
            *([("rule", rule, rules)] if rule is not None else []),
            *(
                [("space.rule", value, rules) for value in values_of(domains["rule"])]
                if "rule" in domains
                else []
            ),
        ]
        for where, value, known in named:
            if value not in known:
                faults.append(
                    Fault(
                        where, f"expected one of {', '.join(known)}; got {value!r}.{near_miss(value, known)}"
                    )
                )
        if pauses and sampler != "front":
            faults.append(
                Fault("pauses", f"expected sampler front, the only one that resumes trials; got {sampler!r}")
            )
        faults += [
            Fault(
                f"space.{name}", f"expected sampler front with a prior, which alone uses it; got {sampler!r}"
            )
            for name, domain in domains.items()
            if sampler != "front" and getattr(domain, "prior", None) is not None
        ]
        if rule is not None and not {"reference_rate", "effective_batch"} <= set(domains):
            faults.append(
                Fault(
                    "space",
                    f"expected reference_rate and effective_batch for rule {rule}, got {', '.join(domains)}",
                )
            )
        if faults:
            raise StudyFileError(faults)
        assert direction is not None  # else a fault
        self.rule, self.reference_batch = rule, reference_batch
        self.objectives = Objectives(
            metric=Metric.model_validate({"name": metric, "direction": direction, "floor": floor})
        )
        self._trials = Trials(None if storage is None else Tables(storage), name, objectives=self.objectives)
        self._space = SearchSpace.of(domains)
        self._suggester = suggester_of(
            sampler,
            self._space,
            self.objectives,
            trials=len(self._trials),
            seed=seed,
            known_seconds=known_seconds,
            by_time=by_time,
            pauses=pauses,
        )
        self._ready: deque[Proposal] = deque()
        self._copied_to, self._name = storage, name
        self._copy: OptunaDatabase | None = None
        self._early_stopping = self._suggester.early_stopping(
            stopping, self.objectives.metric, self._trials, pauses=pauses
        )
        for record in self._trials:
            if record.outcome == "complete":
                assert record.train_s is not None
                self._early_stopping.learn(record.number, record.train_s, record.facts.curve or (), done=True)
                if record.facts.stopped_fraction is not None:
                    self._early_stopping.resume(record.number)

    @property
    def ended(self) -> int:
        """How many trials count: complete, stopped and diverged ones."""
        return counted(self.records())

    def prepare(self, count: int = 1) -> None:
        """Have `count` suggestions ready, by one fit of the models; `ask` otherwise makes one when there is none."""
        if (missing := count - len(self._ready)) > 0:
            ready = [suggestion for suggestion in self._ready if not isinstance(suggestion, int)]
            self._ready.extend(self._suggester.suggest(self._trials, missing, ready=ready))

    def ask(self) -> Suggestion:
        """The next suggestion, with `learning_rate` among its parameters where a rule gives it."""
        self._trials.refresh()
        self.prepare()
        proposal = self._ready.popleft()
        if isinstance(proposal, int):
            self._early_stopping.resume(proposal)
            trial = self._trials.resume(proposal)
        else:
            trial = self._trials.begin(proposal)
        resumes_from = trial.facts.stopped_fraction or 0.0 if isinstance(proposal, int) else 0.0
        suggestion = Suggestion(
            trial.number, self._space.whole(trial.parameters), trial.facts.to_dict(), resumes_from
        )
        values = suggestion.parameters
        rule = str(values.get("rule", self.rule or ""))
        if "reference_rate" not in values or "effective_batch" not in values or not rule:
            return suggestion
        exponent: Any = values.get("exponent")
        noise_batch: Any = values.get("noise_batch")
        scaled = scaled_settings(
            rule,
            OptimizerSettings(float(values["reference_rate"])),
            reference_batch=self.reference_batch,
            effective_batch=int(values["effective_batch"]),
            constants=RuleConstants.at(self.reference_batch, exponent, noise_batch, 1.0),
        )
        return replace(suggestion, parameters={**values, "learning_rate": scaled.learning_rate})

    def report(self, number: int, fraction: float, train_s: float, accuracy: float) -> bool:
        """Report a trial's progress; True where it should be stopped, or paused.

        Args:
            fraction: of its training that is done, in (0, 1].
            train_s: seconds of its full training, known or extrapolated from what it took so far.

        Raises:
            TaskError: no such trial, a fraction outside (0, 1], or seconds that are not positive.
        """
        if self._record(number).outcome != "running":
            return False
        if not 0 < fraction <= 1:
            raise TaskError(f"trial {number}: expected a fraction above 0, at most 1, got {fraction!r}")
        _check_seconds(number, train_s)
        if not math.isfinite(accuracy):
            return False
        return self._early_stopping.report(number, fraction, train_s, accuracy)

    def tell(
        self,
        number: int,
        train_s: float | None = None,
        accuracy: float | None = None,
        outcome: TellOutcome = "complete",
    ) -> None:
        """Record how a trial ended; repeating it with the same values changes nothing.

        Args:
            outcome: complete and diverged trials have both values; a stopped or paused one those of its last report.

        Raises:
            TaskError: no such trial or outcome; values that are missing, not finite, or different from those recorded before.
        """
        if outcome not in get_args(TellOutcome):
            raise TaskError(
                f"trial {number}: expected one of {', '.join(get_args(TellOutcome))}; got {outcome!r}"
            )
        if (record := self._record(number)).outcome != "running":
            _check_same(record, train_s, accuracy, outcome)
            return
        if outcome != "error":
            _check_seconds(number, train_s)
            if accuracy is None or (outcome == "complete" and not math.isfinite(accuracy)):
                raise TaskError(
                    f"trial {number}: expected a finite accuracy of a trial that is {outcome}, got {accuracy!r}"
                )
        finite = accuracy is not None and math.isfinite(accuracy) and outcome in ("complete", "diverged")
        facts = TrialFacts(train_s=train_s) | self._early_stopping.facts(number, stopped=outcome == "stopped")
        if outcome == "paused":
            if facts.stopped_fraction is None:
                raise TaskError(
                    f"trial {number}: expected `report` to have said so before it is told as paused"
                )
            self._trials.change(number, replace(facts, expected_seconds=train_s), "paused")
            self._update_copy()
            return
        if outcome == "stopped":
            facts = TrialFacts(stopped_accuracy=accuracy) | facts
        if curve := self._early_stopping.end(number, train_s or 0.0, accuracy if finite else None):
            facts = replace(facts, curve=tuple(curve))
        values = (train_s, accuracy) if finite and train_s is not None and accuracy is not None else None
        self._trials.end(number, TrialResult(outcome, facts, values))
        self._update_copy()

    def records(self) -> list[TrialRecord]:
        return list(self._trials)

    def _record(self, number: int) -> TrialRecord:
        if not 0 <= number < len(self._trials):
            self._trials.refresh()
        if not 0 <= number < len(self._trials):
            raise TaskError(
                f"expected the number of a trial that was asked, 0 to {len(self._trials) - 1}, got {number!r}"
            )
        return self._trials[number]

    def _update_copy(self) -> None:
        """Bring the copy for Optuna's dashboard up to date; if that fails, warn and continue without it."""
        if self._copied_to is None:
            return
        try:
            self._copy = self._copy or OptunaDatabase(
                self._copied_to, self._name, self.objectives, self._space
            )
            self._copy.update(self._trials)
        except StorageError as error:
            warnings.warn(f"the copy for Optuna's dashboard is not kept any more: {error}", stacklevel=3)
            self._copied_to = None

    def front(self) -> ParetoFront:
        """The trials that no other beats in both objectives."""
        return study_front(self.records(), self.objectives)


def _check_same(record: TrialRecord, train_s: float | None, accuracy: float | None, outcome: str) -> None:
    """Check that values told again for an ended trial are those recorded."""
    recorded = {"outcome": record.outcome, "train_s": record.train_s, "accuracy": record.accuracy}
    now = {"outcome": outcome, "train_s": train_s, "accuracy": accuracy}
    for name, value in now.items():
        if recorded[name] is not None and value is not None and value != recorded[name]:
            raise TaskError(
                f"trial {record.number}: {name}: expected {recorded[name]!r}, as recorded, got {value!r}. An ended trial "
                "cannot change; ask for another."
            )


def _check_seconds(number: int, train_s: float | None) -> None:
    if train_s is None or not 0 < train_s < math.inf:
        raise TaskError(
            f"trial {number}: expected the seconds of its full training, above 0, got {train_s!r}"
        )


def _domains(space: Mapping[str, Any]) -> dict[str, Domain]:
    adapter: TypeAdapter[Domain] = TypeAdapter(AnyDomain)
    domains, faults = {}, [] if space else [Fault("space", "expected at least one parameter, got none")]
    for name, written in space.items():
        try:
            domains[name] = adapter.validate_python(written)
        except ValidationError as error:
            for detail in error.errors():
                key = ".".join(("space", name, *map(str, detail["loc"][1:])))
                known = {"missing": "missing required key", "extra_forbidden": "unknown key"}.get(
                    detail["type"]
                )
                faults.append(Fault(key, known or f"{detail['msg']}, got {cut(repr(detail['input']), 60)}"))
    if faults:
        raise StudyFileError(faults)
    return domains
