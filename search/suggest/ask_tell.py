"""Ask and tell: the search for people with a scheduler and a training loop of their own, without Ray.

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

Several suggestions may be asked before the first is told: each knows of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args

from pydantic import TypeAdapter, ValidationError

from ...spaces.domain import AnyDomain, Domain, values_of
from ...spaces.errors import Fault, ObjectiveError, StudyFileError
from ...spaces.learning_rate import RATE_RULES, OptimizerSettings, RuleConstants, scaled_settings
from ...spaces.study import Metric, Objectives, near_miss
from ...spaces.trial import ParetoFront, Suggestion, TrialRecord
from ..analysis.pareto import study_front
from ..store.optuna_storage import trial_record
from .stopping import STOPPING, Stopping
from .suggester import Suggester

ToldOutcome = Literal["complete", "stopped", "diverged", "error"]


class Search:
    """What to try next, and whether to go on with it.

    Args:
        space: domains by name, written as in a study file: `{low, high, log}`, a list of choices, or one value.
        rule: carries `reference_rate`, where the space has it, to `learning_rate` in every suggestion; a searched parameter
            `rule` or `exponent` comes before it. `reference_batch` is where the reference rate is meant.
        known_seconds: seconds of whole training by parameters, where a law knows them; NaN for what does not fit memory or
            cannot be planned, which is then not proposed.
        direction: of the accuracy, or of any metric in its place.
        sampler: front, tpe, gp, nsga2, qmc, random, or module:attr of an Optuna sampler.
        stopping: front, halving or none; `risk` is the share of trials that would have risen above the front that may be
            stopped.
        storage: SQLAlchemy URL; not given, the search lives in this process. A search of the same name there goes on; what was
            asked before and never told counts as running until it is told.

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
        direction: Literal["minimize", "maximize"] = "maximize",
        metric: str = "accuracy",
        sampler: str = "front",
        stopping: str = "front",
        risk: float = 0.05,
        storage: str | None = None,
        name: str = "search",
        seed: int = 0,
    ) -> None:
        domains = _domains(space)
        faults = []
        rules = [name for name in RATE_RULES if name != "adamw_tau"]  # it needs a trial's samples
        named: list[tuple[str, Any, Collection[str]]] = [
            ("stopping", stopping, STOPPING),
            ("direction", direction, ("minimize", "maximize")),
            *([("rule", rule, rules)] if rule is not None else []),
            *([("space.rule", value, rules) for value in values_of(domains["rule"])] if "rule" in domains else []),
        ]
        for where, value, known in named:
            if value not in known:
                faults.append(Fault(where, f"expected one of {', '.join(known)}; got {value!r}.{near_miss(value, known)}"))
        if not 0 < risk < 1:
            faults.append(Fault("risk", f"expected a share above 0 and below 1, got {risk!r}"))
        if rule is not None and not {"reference_rate", "effective_batch"} <= set(domains):
            faults.append(
                Fault("space", f"expected reference_rate and effective_batch for rule {rule}, got {', '.join(domains)}")
            )
        if faults:
            raise StudyFileError(faults)
        self.rule, self.reference_batch = rule, reference_batch
        self.objectives = Objectives(accuracy=Metric(metric=metric, direction=direction))
        self._sign = self.objectives.accuracy.sign
        self._suggester = Suggester(
            storage, name, domains, self.objectives, sampler=sampler, seed=seed, known_seconds=known_seconds
        )
        self._stopping: Stopping = STOPPING[stopping](risk)
        for record in self.records():
            if record.outcome == "complete":
                assert record.train_s is not None
                curve = [(fraction, self._sign * accuracy) for fraction, accuracy in record.facts.get("curve", ())]
                self._stopping.learn(record.number, record.train_s, curve, done=True)

    @property
    def ended(self) -> int:
        """Trials that count: complete, stopped and diverged ones."""
        return sum(record.counts for record in self.records())

    def ask(self) -> Suggestion:
        """The next thing to try, with `learning_rate` among its parameters where a rule makes it."""
        suggestion = self._suggester.ask()
        values = suggestion.parameters
        rule = str(values.get("rule", self.rule or ""))
        if "reference_rate" not in values or "effective_batch" not in values or not rule:
            return suggestion
        made = scaled_settings(
            rule,
            OptimizerSettings(float(values["reference_rate"])),
            reference_batch=self.reference_batch,
            effective_batch=int(values["effective_batch"]),
            constants=RuleConstants.at(self.reference_batch, values.get("exponent"), values.get("noise_batch")),  # type: ignore[arg-type]
        )
        return Suggestion(suggestion.number, {**values, "learning_rate": made.learning_rate})

    def report(self, number: int, fraction: float, train_s: float, accuracy: float) -> bool:
        """Tell how far a trial is; True where it should be stopped.

        Args:
            fraction: share of its training that is done, in (0, 1].
            train_s: seconds that its whole training takes, known or reckoned from what it took so far.

        Raises:
            ObjectiveError: no such trial, a fraction outside (0, 1], or seconds that are none.
        """
        if self._record(number).outcome != "running":
            return False
        if not 0 < fraction <= 1:
            raise ObjectiveError(f"trial {number}: expected a fraction above 0, at most 1, got {fraction!r}")
        _check_seconds(number, train_s)
        if not math.isfinite(accuracy):
            return False
        return self._stopping.report(number, fraction, train_s, self._sign * accuracy)

    def tell(
        self, number: int, train_s: float | None = None, accuracy: float | None = None, outcome: ToldOutcome = "complete"
    ) -> None:
        """Tell how a trial ended; twice is once.

        Args:
            outcome: complete and diverged trials have both values; a stopped one has those of its last report.

        Raises:
            ObjectiveError: no such trial or outcome, or values that are missing or none.
        """
        if outcome not in get_args(ToldOutcome):
            raise ObjectiveError(f"trial {number}: expected one of {', '.join(get_args(ToldOutcome))}; got {outcome!r}")
        if self._record(number).outcome != "running":
            return
        if outcome != "error":
            _check_seconds(number, train_s)
            if accuracy is None or (outcome == "complete" and not math.isfinite(accuracy)):
                raise ObjectiveError(
                    f"trial {number}: expected a finite accuracy of a trial that is {outcome}, got {accuracy!r}"
                )
        finite = accuracy is not None and math.isfinite(accuracy) and outcome in ("complete", "diverged")
        facts: dict[str, Any] = {"outcome": outcome, "train_s": train_s}
        if outcome == "stopped":
            facts |= {"stopped_accuracy": accuracy} | self._stopping.stopped_facts(number, self._sign)
        self._stopping.ended(number, train_s or 0.0, self._sign * accuracy if finite and accuracy is not None else None)
        if finite:
            facts["curve"] = [(fraction, self._sign * one) for fraction, one in self._stopping.curve_of(number)]
        result = {
            # As a study's trials: what has no values to learn from is PRUNED, and what failed FAIL.
            "state": "COMPLETE" if finite else "FAIL" if outcome == "error" else "PRUNED",
            "values": [train_s, accuracy] if finite else None,
            "constraint": None,
            "facts": {key: value for key, value in facts.items() if value is not None},
        }
        self._suggester.tell(number, result)

    def records(self) -> list[TrialRecord]:
        return [trial_record(trial) for trial in self._suggester.trials()]

    def _record(self, number: int) -> TrialRecord:
        records = self.records()
        if not 0 <= number < len(records):
            raise ObjectiveError(f"expected the number of a trial that was asked, 0 to {len(records) - 1}, got {number!r}")
        return records[number]

    def front(self) -> ParetoFront:
        """The trials that no other beats in both."""
        return study_front(self.records(), self.objectives)


def _check_seconds(number: int, train_s: float | None) -> None:
    if train_s is None or not 0 < train_s < math.inf:
        raise ObjectiveError(f"trial {number}: expected seconds above 0 that its whole training takes, got {train_s!r}")


def _domains(space: Mapping[str, Any]) -> dict[str, Domain]:
    adapter: TypeAdapter[Domain] = TypeAdapter(AnyDomain)
    domains, faults = {}, []
    for name, written in space.items():
        try:
            domains[name] = adapter.validate_python(written)
        except ValidationError as error:
            faults += [Fault(f"space.{name}", one["msg"]) for one in error.errors()]
    if faults:
        raise StudyFileError(faults)
    return domains
