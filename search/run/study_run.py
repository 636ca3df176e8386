"""One study's life on the driver: what is tried, what an attempt's end means, when it is over.

A `Runner` (in this process, or over Ray Tune) takes attempts from a `StudyRun` and reports back; everything it
reports is written to the storage before anything else happens, and the storage is the only truth: a study that is
run again reads there what is left to do.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ...objectives.checkpoint import forget
from ...spaces.device import DeviceProfile
from ...spaces.errors import InfeasiblePlanError
from ...spaces.learning_rate import RULES_FOR_ADAM
from ...spaces.plan import plan_batch, step_plans
from ...spaces.planning import (
    CostKey,
    checkpoint_url,
    cost_key,
    known_train_s,
    trial_setup,
)
from ...spaces.study import StudySpec
from ...spaces.trial import COUNTED, Measurement, Outcome, ParetoFront, Suggestion, TrialSetup
from ..analysis.confirm import next_repeat, next_seed
from ..analysis.pareto import study_front
from ..store.optuna_storage import trial_record
from ..store.records import Records
from ..suggest.stopping import STOPPING, stopped_words
from ..suggest.suggester import Suggester
from .eta import Span
from .runner import Event, Wait
from .view import StudyView, span_of, study_view

# The same error this often in a row is the task's fault, not the trial's.
SAME_ERRORS = 3
# A trial whose worker dies this often, and gets no further in between, dies of the trial.
LOST_ATTEMPTS = 3
# How a runner's words begin where not the worker alone died, but the machine under it.
NODE_DIED = "its node died"
# Infeasible plans in a row after which the space is to be blamed.
INFEASIBLE_IN_A_ROW = 100
# A trial whose own time departs from the known one by more than this share had neighbours, or was timed beside some.
CONTENDED = 0.15

# The latest attempts, from which the time that is left is told.
_LATEST_SPANS = 500


@dataclass(slots=True)
class _Attempt:
    """One attempt under way: what it trains, on which kind of device, and what it told so far."""

    suggestion: Suggestion
    setup: TrialSetup
    kind: str
    known_s: float | None  # of the whole training, by the law that prices the study
    host: str = ""  # the machine it runs on
    begun_s: float = field(default_factory=time.monotonic)
    measurements: list[Measurement] = field(default_factory=list)


class StudyRun:
    """The driver's side of one study; runners call `next_attempt`, `placed`, `measured` and `ended`.

    Args:
        profiles: of every kind of device, by parameters that change cost; the first kind's laws price all trials.
        task_hash: the training code's identity.
        driven_s: seconds of earlier runs, which count towards `budget.hours`.
    """

    def __init__(
        self,
        spec: StudySpec,
        name: str,
        suggester: Suggester,
        records: Records,
        profiles: Mapping[str, Mapping[CostKey, DeviceProfile]],
        device: Literal["cpu", "gpu"],
        task_hash: str = "",
        notify: Callable[[Event], None] = lambda event: None,
        driven_s: float = 0.0,
    ) -> None:
        self.spec, self.name, self.device, self.task_hash = spec, name, device, task_hash
        self.profiles = {kind: dict(of_kind) for kind, of_kind in profiles.items()}
        self.priced_on = next(iter(self.profiles))
        self.notify = notify
        self._suggester, self._records = suggester, records
        self._running: dict[int, _Attempt] = {}
        self._sign = spec.objectives.accuracy.sign
        self._stopping = STOPPING[spec.stopping.kind](spec.stopping.risk)
        self._repeats: set[int] = set()  # trials that train a setting again, which are never stopped
        self._asked: Future[Suggestion] | None = None  # what the sampler is thinking of
        self._asker = ThreadPoolExecutor(1, thread_name_prefix="bsearch-ask")
        self._again: deque[_Attempt] = deque()  # next attempts of trials that ran out of memory or lost their worker
        self._lost: dict[int, tuple[int, int]] = {}  # samples seen before, and attempts lost since without more
        self._same_errors: tuple[str, int] = ("", 0)
        self.done = [record for record in map(trial_record, suggester.trials()) if record.outcome not in ("running", "waiting")]
        self.counted = self.counted_before = sum(record.counts for record in self.done)
        self.failed = sum(record.outcome == "error" for record in self.done)
        self._front = 0, study_front([], spec.objectives)  # of so many that are done
        self.interruptible = False  # the main thread is in the user's code, which Ctrl-C may break into
        self.stopping = ""  # why the study stops before its budget; runners look at it often
        self.failure = ""  # why it cannot go on
        self.crashed: Exception | None = None  # raised in a runner's callback, to be raised again from `run`
        self.begun_s = time.monotonic()
        self.driven_s = driven_s
        self._spans: deque[Span] = deque(maxlen=_LATEST_SPANS)  # of attempts that ended in this run
        self._remember_curves()

    # What runners call

    def next_attempt(self) -> TrialSetup | Wait | None:
        """The next attempt to run; "wait" while running ones may bring more; None when nothing is left."""
        if self.stopping:
            return None
        if self._again:
            return self._start(self._again.popleft())
        for _ in range(INFEASIBLE_IN_A_ROW):
            if self.counted + len(self._running) >= self.spec.budget.trials:
                return "wait" if self._running else None
            self._queue_repeat()
            # A sampler may think for long: the runner's loop goes on meanwhile.
            self._asked = self._asked or self._asker.submit(self._suggester.ask)
            if self._running and not self._asked.done():
                return "wait"
            suggestion = self._asked.result()
            self._asked = None
            if "repeats" in suggestion.notes:
                self._repeats.add(suggestion.number)
            try:
                setup = self._setup(suggestion, self.priced_on)
            except InfeasiblePlanError as error:
                self._infeasible(suggestion, error)
                continue
            return self._start(_Attempt(suggestion, setup, self.priced_on, self._known_s(setup)))
        self.fail(f"{INFEASIBLE_IN_A_ROW} suggestions in a row had no legal plan; the last: {self.done[-1].message}")
        return None

    def setups(self, number: int) -> dict[str, TrialSetup]:
        """An attempt that was just taken, as every kind of device would train it: the same batch in passes that fit it."""
        attempt = self._running[number]
        made = {attempt.kind: attempt.setup}
        for kind in self.profiles:
            if kind != attempt.kind:
                with contextlib.suppress(InfeasiblePlanError):
                    made[kind] = replace(self._setup(attempt.suggestion, kind), attempt=attempt.setup.attempt)
        return made

    def placed(self, number: int, kind: str, setup: TrialSetup) -> None:
        """An attempt runs on this kind of device, by this one of its setups."""
        attempt = self._running[number]
        # A kind that joined since is treated as the one that prices.
        attempt.kind, attempt.setup = kind if kind in self.profiles else self.priced_on, setup
        self._records.placed(setup)
        self._suggester.note(number, _facts(setup, attempt.known_s) | {"device_kind": kind})

    def measured(self, number: int, measurement: Measurement, host: str = "") -> bool:
        """Keep a measurement; False where the attempt is to be ended here: the study stops, or the trial, as `stopped`.

        Args:
            host: the machine it was made on, as people know it.
        """
        attempt = self._running[number]
        setup = attempt.setup
        if host != attempt.host:
            attempt.host = host
            self._suggester.note(number, {"host": host})  # whoever follows the study from elsewhere sees where it runs
        attempt.measurements.append(measurement)
        self._records.measured(setup, measurement)
        self.notify(Event("measured", setup=setup, measurement=measurement))
        accuracy = self._sign * measurement.score(setup.metric)
        hopeless = self._stopping.report(number, _fraction(setup, measurement), self._seconds(attempt, measurement), accuracy)
        return not (hopeless and number not in self._repeats) and not self.stopping

    def ended(self, number: int, outcome: Outcome) -> None:
        """Keep how an attempt ended and act on it as the outcomes table says."""
        attempt = self._running.pop(number)
        setup, measurements = attempt.setup, attempt.measurements
        self._spans.append(self._span(attempt, ended_s=time.monotonic(), counts=outcome.kind in COUNTED))
        if outcome.kind == "interrupted" and self._dies_of_itself(number, measurements, outcome):
            outcome = Outcome("error", f"its worker died {LOST_ATTEMPTS} times in a row: {outcome.message}")
        promised = self._stopping.stopped_facts(number, self._sign) if outcome.kind == "stopped" else {}
        if promised:
            outcome = Outcome("stopped", stopped_words(promised))
        again = self._next_setup(attempt, outcome)
        if again is not None:
            self._records.end(setup, outcome, {})
            self._again.append(_Attempt(attempt.suggestion, again, attempt.kind, attempt.known_s))
            self.notify(Event("message", text=f"trial {number}: {outcome.kind.replace('_', ' ')}: {outcome.message}"))
            return
        if outcome.kind == "out_of_memory":
            outcome = Outcome("error", f"one sample in a pass does not fit: {outcome.message}", outcome.traceback)
        result = _result(attempt, outcome, self._expected_s(attempt), self.spec.objectives.speed)
        result["facts"] |= promised
        self._records.end(setup, outcome, result)
        self._finish(number, result)
        if setup.checkpoint is not None:
            self._asker.submit(forget, setup.checkpoint)  # an object store may take its time
        if measurements:
            trained = outcome.kind == "complete"
            accuracy = self._sign * measurements[-1].score(setup.metric) if trained else None
            self._stopping.ended(number, self._seconds(attempt, measurements[-1]), accuracy)
        self._count_errors(outcome)

    def fail(self, why: str) -> None:
        """Stop the study because it cannot go on."""
        self.failure = self.failure or why
        self.stopping = self.stopping or why

    def crash(self, error: Exception) -> None:
        """Stop because our own code or the database failed while a runner called us."""
        self.crashed = self.crashed or error
        self.fail(str(error) or type(error).__name__)

    # What the driver does around them

    def front(self) -> ParetoFront:
        ended, front = self._front
        if ended != len(self.done):  # a live table asks several times a second
            ended = len(self.done)
            front = study_front(self.done[:ended], self.spec.objectives)
            self._front = ended, front
        return front

    def view(self) -> StudyView:
        """What a person who watches sees now; another thread may ask."""
        attempts, done = list(self._running.values()), tuple(self.done)
        return study_view(
            self.name,
            self.spec,
            self.front(),
            done,
            [(one.setup, one.measurements[-1] if one.measurements else None, one.host, self._span(one)) for one in attempts],
            list(self._spans),
            now_s=time.monotonic(),
            elapsed_s=self.elapsed_s(),
            driven_s=self.driven_s + self.elapsed_s(),
        )

    def elapsed_s(self) -> float:
        return time.monotonic() - self.begun_s

    def recover(self) -> None:
        """Settle what an earlier driver left RUNNING: tell what it had written down, queue the rest anew."""
        for trial in self._suggester.trials():
            if trial.state.name != "RUNNING":
                continue
            ended = [row for row in self._records.attempts(self.name, trial.number) if row["result"]]
            if ended:
                self._finish(trial.number, ended[-1]["result"])
            else:
                self._suggester.continue_later(trial.number, "its driver stopped before it was done")

    def sweep(self) -> None:
        """Leave nothing RUNNING behind: what was cut off is queued for the next run."""
        self._asker.shutdown()
        if not self._records.holds(self.name):
            return  # whoever took the study over has settled our trials
        why = self.stopping or "the driver stopped"
        for attempt in list(self._running.values()):
            self._records.end(attempt.setup, Outcome("interrupted", why), {})
        # We hold the study, so every trial that still runs is one of ours that nobody runs any longer.
        for trial in self._suggester.trials():
            if trial.state.name == "RUNNING":
                self._suggester.continue_later(trial.number, why)
        self._running.clear()
        self._again.clear()

    def queue_start(self) -> None:
        """Put the user's own settings first: once in a study's life, and again where they failed for an error."""
        tried = {
            trial.user_attrs.get("start") for trial in self._suggester.trials() if trial.user_attrs.get("outcome") != "error"
        }
        for index, settings in enumerate(self.spec.start):
            if index not in tried:
                self._suggester.enqueue(settings, {"start": index})

    # Inside

    def _setup(self, suggestion: Suggestion, kind: str) -> TrialSetup:
        """What a suggestion means on a kind of device.

        Raises:
            InfeasiblePlanError: no plan, or a rule that is undefined there.
        """
        profile = self.profiles[kind][cost_key(self.spec, suggestion.parameters)]
        setup = trial_setup(self.spec, self.name, suggestion, profile, self.device)
        return replace(
            setup,
            checkpoint=checkpoint_url(self.spec, self.name, self.task_hash, suggestion),
            checkpoint_every_s=float(self.spec.cluster.checkpoint_every_s),
        )

    def _profile(self, setup: TrialSetup, kind: str) -> DeviceProfile:
        return self.profiles[kind][cost_key(self.spec, {**self.spec.fixed(), **setup.parameters})]

    def _known_s(self, setup: TrialSetup) -> float | None:
        """Seconds that training by a setup takes, by the law that prices; None where trials are timed by the clock."""
        return known_train_s(self._profile(setup, self.priced_on), setup)

    def _expected_s(self, attempt: _Attempt) -> float | None:
        """Seconds that it should have taken on the device it ran on."""
        if attempt.kind == self.priced_on:
            return attempt.known_s
        return known_train_s(self._profile(attempt.setup, attempt.kind), attempt.setup)

    def _seconds(self, attempt: _Attempt, measurement: Measurement) -> float:
        """What the front counts as the time of a trial's whole training, known or reckoned from what it took so far."""
        train_s = attempt.known_s
        if train_s is None:
            train_s = measurement.elapsed_s / _fraction(attempt.setup, measurement)
        return train_s * (attempt.setup.plan.devices if self.spec.objectives.speed == "device_s" else 1)

    def _span(self, attempt: _Attempt, ended_s: float | None = None, *, counts: bool = False) -> Span:
        last = attempt.measurements[-1] if attempt.measurements else None
        return span_of(attempt.setup, last, self._expected_s(attempt), attempt.begun_s, ended_s, counts=counts)

    def _remember_curves(self) -> None:
        """Curves of trials that ended before, from the database."""
        curves = self._records.curves(self.name)
        for record in self.done:
            seconds, budget = record.seconds(self.spec.objectives.speed), record.facts.get("samples_budget")
            if record.outcome in ("complete", "stopped") and seconds is not None and budget:
                curve = [(min(seen / budget, 1.0), self._sign * accuracy) for seen, accuracy in curves.get(record.number, ())]
                self._stopping.learn(record.number, seconds, curve, done=record.outcome == "complete")

    def _queue_repeat(self) -> None:
        """In the budget's last share, have a member of the front trained again before anything new."""
        confirm, most = self.spec.confirm, self.spec.budget.trials
        if self._asked is not None or self.counted + len(self._running) < most - confirm.kept(most):
            return
        trials = [trial for trial in self._suggester.trials() if "continued_by" not in trial.user_attrs]
        if any(trial.state.name == "WAITING" for trial in trials):
            return  # what waits is asked first, and may be a repeat that was cut off
        repeats = [trial for trial in trials if "repeats" in trial.user_attrs]
        running = Counter(trial.user_attrs["repeats"] for trial in repeats if trial.state.name == "RUNNING")
        members = [trial.number for trial in self.front().trials]
        setting = next_repeat(self.done, self.spec.objectives, confirm.repeats, running, members)
        if setting is None:
            return
        used = [trial.user_attrs["seed"] for trial in repeats if trial.user_attrs["repeats"] == setting]
        notes = {"repeats": setting, "seed": next_seed(used, self.spec.training.seed)}
        self._suggester.enqueue(next(record.parameters for record in self.done if record.number == setting), notes)

    def _start(self, attempt: _Attempt) -> TrialSetup:
        setup = attempt.setup
        facts = _facts(setup, attempt.known_s)
        self._running[setup.number] = attempt
        self._records.begin(setup)
        if setup.attempt == 0:
            self._suggester.note(setup.number, facts)
        self.notify(Event("started", setup=setup))
        return setup

    def _dies_of_itself(self, number: int, measurements: list[Measurement], outcome: Outcome) -> bool:
        """Whether a trial's worker died too often without the trial getting on; what a node takes along does not count."""
        reached, times = self._lost.get(number, (0, 0))
        seen = measurements[-1].samples_seen if measurements else 0
        lost_alone = not outcome.message.startswith(NODE_DIED)
        times = int(lost_alone) if seen > reached else times + lost_alone
        self._lost[number] = (max(seen, reached), times)
        return times >= LOST_ATTEMPTS

    def _next_setup(self, attempt: _Attempt, outcome: Outcome) -> TrialSetup | None:
        """The next attempt at the same experiment, where one makes sense."""
        setup = attempt.setup
        if outcome.kind == "interrupted":
            return replace(setup, attempt=setup.attempt + 1)
        if outcome.kind != "out_of_memory":
            return None
        if outcome.micro_batch is None:
            return self._smaller_evaluation(setup)
        if setup.plan.largest_micro_batch == 1:
            return None
        # The same experiment: batch and rate stay, only the passes get smaller. And no later trial asks for so much.
        of_kind = self.profiles[attempt.kind]
        key = cost_key(self.spec, {**self.spec.fixed(), **setup.parameters})
        headroom, devices = self.spec.memory.headroom, setup.plan.devices
        profile = of_kind[key].after_out_of_memory(setup.plan.largest_micro_batch, headroom, devices)
        known = of_kind[key].largest_micro_batch
        if known is None or profile.largest_micro_batch is None or profile.largest_micro_batch <= known:
            of_kind[key] = profile
        cap = min(of_kind[key].cap_on(devices, headroom) or 1, setup.plan.largest_micro_batch - 1)
        again = replace(setup, attempt=setup.attempt + 1, largest_micro_batch=cap)
        try:
            plan = plan_batch(setup.effective_batch, devices=devices, **again.limits)
            step_plans(plan, setup.samples_budget, **again.limits)
        except InfeasiblePlanError:
            return None
        again = replace(again, plan=plan)
        if attempt.kind == self.priced_on:
            attempt.known_s = self._known_s(again)
        return again

    def _smaller_evaluation(self, setup: TrialSetup) -> TrialSetup | None:
        """The next attempt with passes of evaluation half as large; those of training were not what failed."""
        batch = setup.evaluation_batch or setup.plan.largest_micro_batch
        if batch == 1:
            return None
        return replace(setup, attempt=setup.attempt + 1, evaluation_batch=batch // 2)

    def _infeasible(self, suggestion: Suggestion, error: InfeasiblePlanError) -> None:
        facts = {"outcome": "infeasible", "message": str(error), **_searched_only(self.spec, suggestion)}
        self._finish(suggestion.number, {"state": "PRUNED", "values": None, "constraint": error.violation, "facts": facts})

    def _finish(self, number: int, result: Mapping[str, Any]) -> None:
        self._suggester.tell(number, result)
        record = trial_record(self._suggester.trials()[number])
        self.done.append(record)
        self.counted += record.counts
        self.failed += record.outcome == "error"
        self.notify(Event("ended", record=record))

    def _count_errors(self, outcome: Outcome) -> None:
        if outcome.kind != "error":
            self._same_errors = ("", 0)
            return
        # Errors that differ in their numbers alone (a batch, a rate) are the same error.
        likeness = re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", outcome.message)
        message, times = self._same_errors
        self._same_errors = (likeness, times + 1 if message == likeness else 1)
        if self._same_errors[1] >= SAME_ERRORS:
            self.fail(f"{SAME_ERRORS} trials in a row failed alike: {outcome.message}")
        elif self.failed > self.spec.budget.trials + SAME_ERRORS:
            self.fail(f"{self.failed} trials failed, more than the budget holds; the last: {outcome.message}")


def _fraction(setup: TrialSetup, measurement: Measurement) -> float:
    """The share of a trial's budget that was trained; a loop of one's own may end a little beside it."""
    return min(measurement.samples_seen / setup.samples_budget, 1.0)


def _facts(setup: TrialSetup, known_s: float | None) -> dict[str, Any]:
    """Derived values of a setup, as user attributes beside the searched parameters."""
    known = {} if known_s is None else {"train_s": known_s, "train_s_source": "known"}
    return (
        {
            "effective_batch": setup.effective_batch,
            "micro_batch": setup.plan.largest_micro_batch,
            "accumulation": setup.plan.accumulation,
            "devices": setup.plan.devices,
            "rule": setup.rule,
            "learning_rate": setup.learning_rate,
            "weight_decay": setup.weight_decay,
            "epochs": setup.epochs,
            "samples_budget": setup.samples_budget,
            "seed": setup.seed,
        }
        | ({"betas": list(setup.betas), "eps": setup.eps} if setup.rule in RULES_FOR_ADAM else {})
        | known
    )


def _searched_only(spec: StudySpec, suggestion: Suggestion) -> dict[str, Any]:
    return {key: value for key, value in suggestion.parameters.items() if key in ("effective_batch", "accumulation")}


def _result(attempt: _Attempt, outcome: Outcome, expected_s: float | None, speed: str) -> dict[str, Any]:
    """What Optuna is told of an attempt that ended a trial, and every fact we keep with it."""
    setup, measurements, known_s = attempt.setup, attempt.measurements, attempt.known_s
    facts: dict[str, Any] = {"outcome": outcome.kind, "attempts": setup.attempt + 1}
    if outcome.message:
        facts["message"] = outcome.message
    if attempt.host:
        facts["host"] = attempt.host
    if setup.attempt:
        facts |= {"micro_batch": setup.plan.largest_micro_batch, "accumulation": setup.plan.accumulation}
    last = measurements[-1] if measurements else None
    if last is not None:
        facts |= last.facts
        # A loop of one's own may have seen a few samples more or less, and a diverged trial far fewer.
        measured_s = last.elapsed_s * setup.samples_budget / last.samples_seen
        train_s = measured_s if known_s is None else known_s
        device_s = train_s * setup.plan.devices
        facts |= {
            "train_s": train_s,
            "device_s": device_s,
            "measured_train_s": measured_s,
            "train_s_source": "measured" if known_s is None else "known",
            "samples_per_s": last.samples_seen / last.elapsed_s if last.elapsed_s else None,
        }
        if expected_s:
            facts |= {"departure": measured_s / expected_s - 1, "contended": abs(measured_s / expected_s - 1) > CONTENDED}
        facts |= {name: value for name, value in last.scores.items() if name != setup.metric and math.isfinite(value)}
    if outcome.kind in ("complete", "diverged"):
        assert last is not None
        value = last.score(setup.metric)
        if math.isfinite(value):
            return {
                "state": "COMPLETE",
                "values": [device_s if speed == "device_s" else train_s, value],
                "constraint": 0.0,
                "facts": facts,
            }
        # Optuna takes no NaN: told PRUNED, the sampler still learns that this place is bad.
        return {"state": "PRUNED", "values": None, "constraint": 0.0, "facts": facts}
    if outcome.kind == "stopped":
        return {"state": "PRUNED", "values": None, "constraint": 0.0, "facts": facts}
    if outcome.kind == "infeasible":
        return {"state": "PRUNED", "values": None, "constraint": 1.0, "facts": facts}
    return {"state": "FAIL", "values": None, "constraint": None, "facts": facts}
