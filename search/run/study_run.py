"""One study on the driver: which attempts run, how their outcomes are handled, and when the study ends.

A `Runner` (in this process, or over Ray Tune) takes attempts from a `StudyRun` and reports back. The end of a trial is written
to the storage before anything else happens, the rest within a second. The storage is the source of truth: running the study
again reads from it what is left to do.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from ...objectives.machine.processor import OtherPrograms
from ...objectives.state.checkpoint_files import delete_checkpoint
from ...spaces.errors import InfeasiblePlanError
from ...spaces.laws.device import DeviceProfile
from ...spaces.plan import plan_batch
from ...spaces.planning import (
    CostKey,
    checkpoint_url,
    cost_key,
    known_train_s,
    known_watts,
    largest_timed_micro_batch,
    plan_limits,
    trial_setup,
)
from ...spaces.study.spec import StudySpec
from ...spaces.trial import (
    COUNTED,
    EVALUATION_BATCH,
    LEFT,
    NODE_DIED,
    TRAINER_EVALUATION_BATCH,
    Measurement,
    Outcome,
    ParetoFront,
    Suggestion,
    TrialFacts,
    TrialRecord,
    TrialResult,
    TrialSetup,
    counted,
)
from ..analysis.confirm import next_repeat, next_seed
from ..analysis.pareto import study_front
from ..store.optuna_storage import frozen_record
from ..store.records import Records
from ..suggest.front_model import preload
from ..suggest.pausing import RUNG
from ..suggest.stopping import early_stopping, stopped_sentence
from ..suggest.suggester import Suggester
from .attempt import Attempt, fraction_of, result_of, setup_facts, taken_by
from .eta import ClockFactors, Span
from .runner import Event
from .spending import Spending, device_names, prices_of
from .suggestion_queue import SuggestionQueue
from .view import StudyView, span_of, study_view

# This many equal errors in a row are the task's fault, not the trial's.
SAME_ERRORS = 3
# A trial whose worker dies this often without progress in between is itself the cause.
LOST_ATTEMPTS = 3
# Infeasible plans in a row after which the space is to blame.
INFEASIBLE_IN_A_ROW = 100
# Trials whose worth decides whether to go on, and how many end between two such decisions.
WORTH_OF, _WORTH_EVERY = 10, 5
# The latest attempts, from which the remaining time is estimated.
_LATEST_SPANS = 500


class StudyRun:
    """The driver's side of one study; runners call `next_attempt`, `begun`, `place`, `report` and `end`.

    Args:
        profiles: of every kind of device, by parameters that change cost; the first kind's laws time all trials.
        owns_workers: attempts run on this machine, in processes that this one started.

    Attributes:
        stop_reason: why the study stops before its budget; empty while it runs. Runners check it often.
        leaving: why it stops as soon as running attempts have written their checkpoints; empty unless it does.
        enough: why no new trials are started, though running ones go on.
        failure: why it cannot continue; empty if it can.
        suggestions: what the sampler makes ahead.
        reported_s: when a trial last reported a measurement, by the monotonic clock.
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
        *,
        owns_workers: bool = False,
    ) -> None:
        self.spec, self.name, self.device, self.task_hash = spec, name, device, task_hash
        self.profiles = {kind: dict(of_kind) for kind, of_kind in profiles.items()}
        self.timed_on = next(iter(self.profiles))
        self._owns_workers = owns_workers
        self.notify = notify
        self._suggester, self._records = suggester, records
        self._running: dict[int, Attempt] = {}
        self._sign = spec.objectives.metric.sign
        self._early_stopping = early_stopping(spec.stopping.kind, spec.stopping.risk, suggester.is_new_ground)
        self._repeats: set[int] = set()  # trials that repeat a setting, which are never stopped early
        self._preloaded = False
        self.suggestions = SuggestionQueue(suggester, self._ending)
        self._retries: deque[Attempt] = deque()  # next attempts of trials that ran out of memory or lost their worker
        self._lost: dict[int, tuple[int, int]] = {}  # samples seen before, and attempts lost since without more
        self._same_errors: tuple[str, int] = ("", 0)
        records_so_far = list(map(frozen_record, suggester.trials()))
        prices, self._price = prices_of(spec, device_names(self.profiles), device, records_so_far)
        self.spending = Spending(spec, prices, records_so_far)
        self.done = [record for record in records_so_far if record.has_ended]
        self._paused = {
            record.number: record for record in records_so_far if record.outcome == "paused" and not record.has_ended
        }
        self._shares = {number: record.counts for number, record in self._paused.items()}  # of those, and of resumed ones
        self._of_ended = counted(self.done)
        self.counted_before = self.counted
        self.failed = sum(record.outcome == "error" for record in self.done)
        self._front = 0, study_front([], spec.objectives)  # of the first so many of `done`
        self.interruptible = False  # the main thread is in the user's code, which Ctrl-C may break into
        self._said_of_checkpoints: set[tuple[str, str]] = set()  # by host
        self.stop_reason = self.leaving = self.enough = ""
        self._worth_known_at = 0  # trials that had ended when more trials' worth was last computed
        self.failure = ""
        self.crashed: Exception | None = None  # raised in a runner's callback, to be raised again from `run`
        self.started_s = time.monotonic()
        self.driven_s = driven_s
        self.reported_s: float | None = None
        self._spans: deque[Span] = deque(maxlen=_LATEST_SPANS)  # of attempts that ended in this run
        self._load_curves()

    @property
    def counted(self) -> float:
        """What trials count towards the budget so far, paused ones by the share of their training that they have had."""
        return round(self._of_ended + sum(list(self._shares.values())), 6)

    # What runners call

    def next_attempt(self, free: int = 1) -> TrialSetup | Literal["wait"] | None:
        """The next attempt to run; "wait" while running ones may bring more; None when nothing is left.

        Args:
            free: how many the runner would take now, this one included.
        """
        if self.stop_reason or self.leaving:
            return None
        if self._retries:
            return self._start(self._retries.popleft())
        if self.enough:
            self._queue_repeat()
            if not self._suggester.has_queued:
                return "wait" if self._running else None
        for _ in range(INFEASIBLE_IN_A_ROW):
            running = self._running.items()
            to_train = sum(1.0 - self._shares.get(number, 0.0) for number, one in running)
            room = self.spec.budget.trials - self.counted - to_train
            if room <= 0:
                return "wait" if self._running else None
            self._queue_repeat()
            # What is left of a budget finishes paused trials.
            new = room >= 1 or not self._paused
            suggestion = self.suggestions.take(len(self._running), free, most=math.ceil(room), new=new)
            if suggestion == "wait":
                return "wait"
            if suggestion is None:
                return "wait" if self._running else None
            if "repeats" in suggestion.notes:
                self._repeats.add(suggestion.number)
            try:
                setup = self._setup(suggestion, self.timed_on)
            except InfeasiblePlanError as error:
                self._record_infeasible(suggestion, error)
                continue
            if "rung_fraction" in suggestion.notes:  # it goes on, here or as the one that continues it
                self._early_stopping.resume(suggestion.number)
                self._shares[suggestion.number] = suggestion.notes["rung_fraction"]
            if suggestion.resumes_from:
                setup = self._resumed(setup)
            watts = known_watts(self._profile(setup, self.timed_on), setup)
            return self._start(Attempt(suggestion, setup, self.timed_on, self._known_s(setup), watts=watts))
        self.fail(f"{INFEASIBLE_IN_A_ROW} suggestions in a row had no feasible plan; the last: {self.done[-1].message}")
        return None

    @property
    def trains(self) -> bool:
        """Whether some attempt has its devices."""
        return any(attempt.held_since is not None for attempt in list(self._running.values()))

    @property
    def devices_busy(self) -> int:
        """Devices that trials train on now."""
        return sum(attempt.setup.plan.devices for attempt in list(self._running.values()))

    def _ending(self, seconds: float) -> int:
        """How many running attempts are expected to end within so many seconds."""
        now_s, factors = time.monotonic(), ClockFactors.of(list(self._spans))
        left = (factors.left_s(self._span(one, counts=1.0), now_s) for one in list(self._running.values()))
        return sum(left_s is not None and left_s <= seconds for left_s in left)

    def setups(self, number: int) -> dict[str, TrialSetup]:
        """An attempt that was just taken, as every kind of device would train it: the same batch, its own micro-batches."""
        attempt = self._running[number]
        setups = {attempt.kind: attempt.setup}
        if attempt.setup.plan.devices != attempt.devices:
            return setups
        for kind in self.profiles:
            if kind != attempt.kind:
                with contextlib.suppress(InfeasiblePlanError):
                    setups[kind] = replace(self._setup(attempt.suggestion, kind), attempt=attempt.setup.attempt)
        return setups

    def replan_for(self, number: int, devices: int) -> bool:
        """Plan an attempt that was just taken for fewer devices than its trial has, since no more are there.

        Each step is that of the same samples, and the trial counts as what it takes on its own number of devices. False where
        that is not known, where memory depends on that number, or where what is trained does: then it has to wait.
        """
        attempt = self._running[number]
        setup, profile = attempt.setup, self._profile(attempt.setup, attempt.kind)
        if attempt.known_s is None or setup.sharding != "ddp" or profile.batch_statistics:
            return False
        used = profile.under(setup.plan)
        limits = plan_limits(self.spec, used, devices, setup.effective_batch)
        try:
            plan = plan_batch(setup.effective_batch, devices=devices, **limits)
        except InfeasiblePlanError:
            return False
        attempt.setup = replace(setup, plan=plan, largest_micro_batch=limits["largest_micro_batch"])
        self._records.update_setup(attempt.setup)
        self.notify(
            Event(
                "message",
                text=f"trial {number} continues on {devices} of its {attempt.devices} devices: no others are available",
            )
        )
        return True

    def put_back(self, number: int) -> None:
        """Take an attempt back that never began: it is the next one again."""
        attempt = self._running.pop(number)
        self._retries.appendleft(replace(attempt, setup=self._whole(attempt, attempt.setup)))

    def lose_attempts(self, why: str) -> None:
        """Interrupt all running attempts, of which nothing is left because of what happened to all machines."""
        for number in list(self._running):
            self.end(number, Outcome("interrupted", f"{NODE_DIED}: {why}"), silently=True)

    def begun(self, number: int) -> None:
        """An attempt has got its devices."""
        self._running[number].held_since = time.monotonic()

    def place(self, number: int, kind: str, setup: TrialSetup) -> None:
        """Record that an attempt runs on this kind of device, with this one of its setups."""
        attempt = self._running[number]
        # A kind that joined since is treated as the one that times the study.
        planned = attempt.setup.plan.activation_checkpointing
        attempt.kind, attempt.setup = kind if kind in self.profiles else self.timed_on, setup
        self._records.update_setup(setup)
        facts = replace(self._facts(attempt), device_kind=kind)
        if planned != "none":  # said before of another kind of device
            facts = replace(facts, activation_checkpointing=setup.plan.activation_checkpointing)
        self._suggester.annotate(number, facts.to_dict())

    def report(self, number: int, measurement: Measurement, host: str = "") -> bool:
        """Record a measurement; True where the attempt should stop here, because the trial or the study does.

        Args:
            host: the name of the machine that it was taken on.
        """
        attempt = self._running[number]
        setup = attempt.setup
        if host != attempt.host:
            attempt.host = host
            self._suggester.annotate(number, {"host": host})  # for `bsearch show --watch` in another process
        attempt.measurements.append(measurement)
        self.reported_s = time.monotonic()
        self._records.add_measurement(setup, measurement)
        self.notify(Event("measured", setup=setup, measurement=measurement))
        self._say_of_checkpoint(setup, str(measurement.facts.get("checkpoint", "")), host)
        accuracy = self._sign * measurement.score(setup.metric)
        fraction, taken = fraction_of(setup, measurement), self._taken(attempt, measurement)
        should_stop = self._early_stopping.report(number, fraction, taken, accuracy)
        return (should_stop and number not in self._repeats) or bool(self.stop_reason)

    def end(self, number: int, outcome: Outcome, *, silently: bool = False) -> None:
        """Record how an attempt ended, and act on it as the table of outcomes says (docs/faults.md).

        Args:
            silently: the next attempt needs no words, since whoever calls has said why.
        """
        attempt = self._running.pop(number)
        setup, measurements = attempt.setup, attempt.measurements
        self._spans.append(self._span(attempt, ended_s=time.monotonic(), counts=float(outcome.kind in COUNTED)))
        self._pay(attempt)
        left = outcome.kind == "interrupted" and outcome.message == LEFT
        if outcome.kind == "interrupted" and not left and self._kills_its_workers(number, measurements, outcome):
            outcome = Outcome("error", f"its worker died {LOST_ATTEMPTS} times in a row: {outcome.message}")
        if outcome.kind == "stopped" and self._early_stopping.pauses:
            self._pause(attempt)
            return
        prediction = self._early_stopping.rung_facts(number, self._sign)
        if outcome.kind == "stopped":
            prediction = self._early_stopping.stopped_facts(number, self._sign)
            if prediction.stopped_fraction is not None:
                outcome = Outcome("stopped", stopped_sentence(prediction))
        retry = self._next_setup(attempt, outcome)
        if retry is not None:
            self._records.end_attempt(setup, outcome, {})
            self._note_spent(number)
            if retry.plan.devices != attempt.devices:
                retry = self._whole(attempt, retry)
                if attempt.kind == self.timed_on:
                    attempt.known_s = self._known_s(retry)
                    attempt.watts = known_watts(self._profile(retry, self.timed_on), retry)
            self._retries.append(Attempt(attempt.suggestion, retry, attempt.kind, attempt.known_s, watts=attempt.watts))
            if not (left or silently):
                self.notify(Event("message", text=f"trial {number}: {outcome.kind.replace('_', ' ')}: {outcome.message}"))
            return
        if outcome.kind == "out_of_memory":
            outcome = Outcome("error", f"a micro-batch of one sample does not fit: {outcome.message}", outcome.traceback)
        shared = self.spec.devices.share < 1
        result = result_of(attempt, outcome, self._expected_s(attempt), self.spec.objectives.speeds, self._price, shared)
        result = replace(result, facts=result.facts | prediction | TrialFacts(spent=self.spending.of(number)))
        self._records.end_attempt(setup, outcome, result.to_dict())
        self._finish(number, result)
        if outcome.kind == "complete":
            self._learn_memory(attempt)
        if setup.checkpoint is not None:
            self.suggestions.submit(delete_checkpoint, setup.checkpoint)  # an object store may be slow
        if measurements:
            trained = outcome.kind == "complete"
            accuracy = self._sign * measurements[-1].score(setup.metric) if trained else None
            self._early_stopping.end(number, self._taken(attempt, measurements[-1]), accuracy)
        self._count_errors(outcome)
        if self.spec.budget.min_gain is not None and len(self.done) >= self._worth_known_at + _WORTH_EVERY:
            self._worth_known_at = len(self.done)
            self.suggestions.submit(self.check_worth)

    def check_worth(self) -> None:
        """Start no more trials where they are no longer expected to be worth it."""
        least, gain = self.spec.budget.min_gain, self._suggester.expected_gain(WORTH_OF)
        if least is not None and gain is not None and self.counted >= WORTH_OF and gain < least:
            self.enough = f"budget.min_gain: {gain_sentence(gain)}, less than {100 * least:g}%"

    def _pay(self, attempt: Attempt) -> None:
        """Count what an attempt's devices cost, now that it has ended."""
        self.spending.add(attempt.setup.number, self._cost(attempt))
        self.check_cost()

    def _note_spent(self, number: int) -> None:
        if (spent := self.spending.of(number)) is not None:
            self._suggester.annotate(number, {"spent": spent})

    def _cost(self, attempt: Attempt) -> float:
        held_s = 0.0 if attempt.held_since is None else time.monotonic() - attempt.held_since
        return self.spending.cost(attempt.kind, attempt.setup.plan.devices, held_s)

    def check_cost(self) -> None:
        """Stop the study where its budget is spent."""
        if why := self.spending.over(sum(self._cost(attempt) for attempt in list(self._running.values()))):
            self.stop_reason = self.stop_reason or why

    def _pause(self, attempt: Attempt) -> None:
        """Leave a trial at the rung, to be resumed from its checkpoint if the sampler finds it worth the time."""
        setup, last = attempt.setup, attempt.last
        assert last is not None
        facts = replace(
            self._early_stopping.rung_facts(setup.number, self._sign),
            expected_seconds=self._taken(attempt, last)[0],
            train_s=last.elapsed_s / fraction_of(setup, last) if attempt.known_s is None else attempt.known_s,
            spent=self.spending.of(setup.number),
        )
        self._records.end_attempt(setup, Outcome("paused"), {})
        self._suggester.pause(setup.number, facts)
        record = frozen_record(self._suggester.trials()[setup.number])
        self._paused[setup.number], self._shares[setup.number] = record, record.counts
        self._count_errors(Outcome("paused"))
        self.notify(Event("ended", record=record))

    def _resumed(self, setup: TrialSetup) -> TrialSetup:
        """The next attempt at a paused trial."""
        self._suggester.resume(setup.number)
        del self._paused[setup.number]
        before = self._records.attempts(self.name, setup.number)
        return replace(setup, attempt=1 + max((row["attempt"] for row in before), default=-1))

    def fail(self, why: str) -> None:
        """Stop the study because it cannot continue."""
        self.failure = self.failure or why
        self.stop_reason = self.stop_reason or why

    def crash(self, error: Exception) -> None:
        """Stop because our own code or the database failed while a runner called us."""
        self.crashed = self.crashed or error
        self.fail(str(error) or type(error).__name__)

    # What the driver does around them

    def front(self) -> ParetoFront:
        ended, front = self._front
        if ended != len(self.done):  # a live view asks several times a second
            ended = len(self.done)
            front = study_front(self.done[:ended], self.spec.objectives)
            self._front = ended, front
        return front

    def view(self) -> StudyView:
        """The study as displayed now; may be called from another thread."""
        attempts, done = list(self._running.values()), (*self.done, *list(self._paused.values()))
        return study_view(
            self.name,
            self.spec,
            self.front(),
            done,
            [(one.setup, one.last, one.host, self._span(one, counts=1.0)) for one in attempts],
            list(self._spans),
            now_s=time.monotonic(),
            elapsed_s=self.elapsed_s(),
            driven_s=self.driven_s + self.elapsed_s(),
            counted=self.counted,
        )

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def recover(self) -> None:
        """Settle trials that an earlier driver left RUNNING: report to Optuna those it had recorded, queue the rest again."""
        for trial in self._suggester.trials():
            if trial.state.name != "RUNNING" or trial.number in self._paused:
                continue
            if trial.user_attrs.get("outcome") == "paused":  # killed while it was given up
                self._give_up(frozen_record(trial))
                continue
            ended = [row for row in self._records.attempts(self.name, trial.number) if row["result"]]
            if ended:
                self._finish(trial.number, TrialResult.from_dict(ended[-1]["result"]))
            else:
                self._suggester.continue_later(trial.number, "its driver stopped before it was done")

    def sweep(self) -> None:
        """Leave nothing RUNNING behind: interrupted trials are queued for the next run."""
        self.suggestions.close()
        if not self._records.lock.held(self.name):
            # The driver that took the study over has settled our trials.
            self._records.drop_writes()
            return
        why = self.stop_reason or self.leaving or "the driver stopped"
        for attempt in list(self._running.values()):
            self._records.end_attempt(attempt.setup, Outcome("interrupted", why), {})
            self._pay(attempt)
            self._note_spent(attempt.setup.number)
        # We hold the study, so every trial still RUNNING is one of ours that no process runs any longer.
        for trial in self._suggester.trials():
            if trial.state.name == "RUNNING" and trial.number not in self._paused:
                self._suggester.continue_later(trial.number, why)
        if self.counted >= self.spec.budget.trials:
            for record in list(self._paused.values()):
                self._give_up(record)
        self._running.clear()
        self._retries.clear()

    def _give_up(self, record: TrialRecord) -> None:
        """End a paused trial whose study has met its budget."""
        facts = replace(self._early_stopping.stopped_facts(record.number, self._sign), paused=False)
        message = f"paused after {record.trained_share:.0%} of its training, and never resumed"
        result = TrialResult("PRUNED", "paused", replace(facts, message=message), constraint=0.0)
        self._finish(record.number, result, again=True)
        self._delete_checkpoint(record.number)

    def _say_of_checkpoint(self, setup: TrialSetup, error: str, host: str) -> None:
        """Say why checkpoints fail on a host, once: trials go on without, but an interruption costs more than before."""
        if error and (host, error) not in self._said_of_checkpoints:
            self._said_of_checkpoints.add((host, error))
            where = f"{setup.checkpoint}, on {host}" if host else setup.checkpoint
            self.notify(Event("message", text=f"trial {setup.number}: {error} ({where}); training goes on"))

    def _delete_checkpoint(self, number: int) -> None:
        """Delete that of a trial that no longer runs."""
        attempts = self._records.attempts(self.name, number)
        if attempts and (checkpoint := attempts[-1]["setup"]["checkpoint"]) is not None:
            delete_checkpoint(checkpoint)

    def queue_baseline(self) -> None:
        """Queue the user's own settings first: once in a study's life, and again where they failed with an error."""
        trials = self._suggester.trials()
        tried = {trial.user_attrs.get("baseline") for trial in trials if trial.user_attrs.get("outcome") != "error"}
        for index, settings in enumerate(self.spec.baseline):
            if index not in tried:
                self._suggester.enqueue(settings, {"baseline": index})

    # Inside

    def _setup(self, suggestion: Suggestion, kind: str) -> TrialSetup:
        """A suggestion as a setup for a kind of device.

        Raises:
            InfeasiblePlanError: no plan, or a rule that is undefined there.
        """
        profile = self.profiles[kind][cost_key(self.spec, suggestion.parameters)]
        setup = trial_setup(self.spec, self.name, suggestion, profile, self.device)
        return replace(
            setup,
            checkpoint=checkpoint_url(self.spec, self.name, self.task_hash, suggestion),
            checkpoint_every_s=float(self.spec.cluster.checkpoint_every_s),
            pauses_at=RUNG if self._early_stopping.pauses else None,
            counts_energy="energy_j" in self.spec.objectives.speeds,
        )

    def _profile(self, setup: TrialSetup, kind: str) -> DeviceProfile:
        return self.profiles[kind][cost_key(self.spec, {**self.spec.fixed(), **setup.cost_parameters})]

    def _known_s(self, setup: TrialSetup) -> float | None:
        """Seconds of a setup's training by the law that times the study; None where trials are timed by the clock."""
        return known_train_s(self._profile(setup, self.timed_on), setup)

    def _expected_s(self, attempt: Attempt) -> float | None:
        """Expected seconds of its training on the devices it ran on; None where that is not known."""
        if attempt.setup.plan.devices != attempt.devices:
            return None
        if attempt.kind == self.timed_on:
            return attempt.known_s
        return known_train_s(self._profile(attempt.setup, attempt.kind), attempt.setup)

    def _taken(self, attempt: Attempt, measurement: Measurement) -> list[float]:
        """What a trial's full training takes as the front counts it, known or extrapolated from its share so far."""
        train_s = attempt.known_s
        if train_s is None:
            train_s = measurement.elapsed_s / fraction_of(attempt.setup, measurement)
        return taken_by(self.spec.objectives.speeds, train_s, attempt, self._price)

    def _span(self, attempt: Attempt, ended_s: float | None = None, *, counts: float) -> Span:
        expected_s = self._expected_s(attempt)
        return span_of(attempt.setup, attempt.last, expected_s, attempt.started_s, ended_s, counts=counts)

    def _load_curves(self) -> None:
        """Read the curves of trials that ended before from the database."""
        curves = self._records.curves(self.name)
        for record in (*self.done, *self._paused.values()):
            measured, budget = map(record.taken, self.spec.objectives.speeds), record.facts.samples_budget
            taken = [one for one in measured if one is not None]
            known = len(taken) == len(self.spec.objectives.speeds)
            if record.outcome in ("complete", "stopped", "paused") and known and budget:
                curve = [(min(seen / budget, 1.0), self._sign * accuracy) for seen, accuracy in curves.get(record.number, ())]
                self._early_stopping.learn(record.number, taken, curve, done=record.outcome == "complete")
                if record.outcome == "complete" and record.facts.rung_fraction is not None:
                    self._early_stopping.resume(record.number)

    def _queue_repeat(self) -> None:
        """In the budget's last share, repeat a member of the front before anything new."""
        confirm, most = self.spec.confirm, self.spec.budget.trials
        to_end = len(self._running)
        if self.suggestions.is_settled or (not self.enough and self.counted + to_end < most - confirm.reserved(most)):
            return
        trials = [trial for trial in self._suggester.trials() if "continued_by" not in trial.user_attrs]
        if any(trial.state.name == "WAITING" for trial in trials):
            return  # queued trials come first, and may be interrupted repeats
        repeats = [trial for trial in trials if "repeats" in trial.user_attrs]
        running = Counter(trial.user_attrs["repeats"] for trial in repeats if trial.state.name == "RUNNING")
        members = [trial.number for trial in self.front().trials]
        setting = next_repeat(self.done, self.spec.objectives, confirm.repeats, running, members)
        if setting is None:
            return
        # A seed of its own: one that settings shared would suit, or not, all of them alike.
        used = [trial.user_attrs["seed"] for trial in repeats]
        notes = {"repeats": setting, "seed": next_seed(used, self.spec.training.seed)}
        self._suggester.enqueue(next(record.parameters for record in self.done if record.number == setting), notes)

    def _start(self, attempt: Attempt) -> TrialSetup:
        setup = attempt.setup
        if self._owns_workers and self.device == "cpu":
            attempt.others = OtherPrograms()
        self._running[setup.number] = attempt
        self._records.start_attempt(setup)
        if setup.attempt == 0:
            self._suggester.annotate(setup.number, self._facts(attempt).to_dict())
        self.notify(Event("started", setup=setup))
        if not self._preloaded:
            # Not while a trial is asked for: killed then, it would be RUNNING without its parameters. In the thread that asks,
            # because two threads that import the same modules of SciPy at once may find them half imported.
            self._preloaded = True
            self.suggestions.submit(preload)
        return setup

    def _facts(self, attempt: Attempt) -> TrialFacts:
        """Facts of its setup, stored beside the searched parameters."""
        return replace(setup_facts(attempt.setup, attempt.known_s), price=self._price, watts=attempt.watts)

    def _learn_memory(self, attempt: Attempt) -> None:
        """Let a measured peak correct the memory law of the kind of device it was measured on, in either direction."""
        # What a GPU's limit applies to, and a virtual device's.
        name = "peak_reserved_bytes" if self.device == "gpu" else "peak_bytes"
        peak_bytes = attempt.last.facts.get(name) if attempt.last else None
        if not isinstance(peak_bytes, int | float):
            return
        plan, of_kind = attempt.setup.plan, self.profiles[attempt.kind]
        key = cost_key(self.spec, {**self.spec.fixed(), **attempt.setup.cost_parameters})
        profile = of_kind[key]
        of_kind[key] = profile.updated(
            profile.under(plan).after_measurement(
                attempt.setup.plan.largest_micro_batch,
                peak_bytes,
                self.spec.memory.headroom,
                plan.devices,
                plan.effective_batch,
            )
        )

    def _kills_its_workers(self, number: int, measurements: list[Measurement], outcome: Outcome) -> bool:
        """Whether a trial's worker died too often without progress; deaths of a whole node do not count."""
        reached, times = self._lost.get(number, (0, 0))
        seen = measurements[-1].samples_seen if measurements else 0
        lost_alone = not outcome.message.startswith(NODE_DIED)
        times = int(lost_alone) if seen > reached else times + lost_alone
        self._lost[number] = (max(seen, reached), times)
        return times >= LOST_ATTEMPTS

    def _whole(self, attempt: Attempt, setup: TrialSetup) -> TrialSetup:
        """A setup of an attempt planned for all devices of its trial, where it was planned for fewer."""
        if setup.plan.devices != attempt.devices:
            with contextlib.suppress(InfeasiblePlanError):
                whole = self._setup(attempt.suggestion, attempt.kind)
                return replace(whole, attempt=setup.attempt, evaluation_batch=setup.evaluation_batch)
        return setup

    def _next_setup(self, attempt: Attempt, outcome: Outcome) -> TrialSetup | None:
        """The next attempt at the same experiment, where one makes sense."""
        setup = attempt.setup
        if outcome.kind == "interrupted":
            return replace(setup, attempt=setup.attempt + 1)
        if outcome.kind != "out_of_memory":
            return None
        if outcome.micro_batch is None:
            return self._smaller_evaluation(setup)
        # The same experiment: batch and rate stay, only micro-batches shrink. No later trial gets as large a micro-batch.
        of_kind = self.profiles[attempt.kind]
        key = cost_key(self.spec, {**self.spec.fixed(), **setup.cost_parameters})
        failed, profile = setup.plan.largest_micro_batch, of_kind[key]
        now = profile.under(setup.plan).after_out_of_memory(failed)
        of_kind[key] = profile = profile.updated(now)
        devices = setup.plan.devices
        # With as much recomputed, or else with more.
        kinds = [one.recomputes for one in profile.each]
        for one in profile.each[kinds.index(now.recomputes) :]:
            cap = largest_timed_micro_batch(self.spec, one, devices, setup.effective_batch)
            if one.recomputes == now.recomputes:
                cap = min(failed - 1 if cap is None else cap, failed - 1)
                if cap == 0:
                    continue  # one sample has run out of memory: nothing smaller is left to try
            with contextlib.suppress(InfeasiblePlanError):
                limits = {**plan_limits(self.spec, one, devices, setup.effective_batch), "largest_micro_batch": cap or 1}
                plan = plan_batch(setup.effective_batch, devices=devices, **limits)
                retry = replace(
                    setup,
                    attempt=setup.attempt + 1,
                    plan=plan,
                    largest_micro_batch=limits["largest_micro_batch"],
                    embedding=one.embedding,
                )
                retry.steps()
                if attempt.kind == self.timed_on and devices == attempt.devices:
                    attempt.known_s = self._known_s(retry)
                return retry
        return None

    def _smaller_evaluation(self, setup: TrialSetup) -> TrialSetup | None:
        """The next attempt with half the evaluation batch; training's micro-batches were not what failed.

        None if a score depends on the evaluation batch.
        """
        everywhere = [profile for of_kind in self.profiles.values() for profile in of_kind.values()]
        is_loop = any(profile.validation_set is None for profile in everywhere)
        batch = setup.evaluation_batch or (TRAINER_EVALUATION_BATCH if is_loop else EVALUATION_BATCH)
        found = [finding for one in everywhere if one.examination for finding in one.examination.refusals]
        if batch == 1 or any(finding.kind == "score" for finding in found):
            return None
        return replace(setup, attempt=setup.attempt + 1, evaluation_batch=batch // 2)

    def _record_infeasible(self, suggestion: Suggestion, error: InfeasiblePlanError) -> None:
        requested = {key: value for key, value in suggestion.parameters.items() if key in ("effective_batch", "accumulation")}
        facts = TrialFacts.of({"message": str(error), **requested})
        if suggestion.resumes_from:
            facts = replace(facts, paused=False)
            self._delete_checkpoint(suggestion.number)
        self._finish(suggestion.number, TrialResult("PRUNED", "infeasible", facts, constraint=error.violation))

    def _finish(self, number: int, result: TrialResult, *, again: bool = False) -> None:
        """End a trial.

        Args:
            again: it was shown as ended before.
        """
        self._suggester.tell(number, result)
        record = frozen_record(self._suggester.trials()[number])
        self.done.append(record)
        self._paused.pop(number, None)
        self._shares.pop(number, None)
        self._of_ended += record.counts
        self.failed += record.outcome == "error"
        if not again:
            self.notify(Event("ended", record=record))

    def _count_errors(self, outcome: Outcome) -> None:
        if outcome.kind != "error":
            self._same_errors = ("", 0)
            return
        # Errors that differ only in numbers (a batch, a rate), addresses and paths are the same error.
        pattern = re.sub(r"0x[0-9a-f]+|(?<!\w)/\S+|\d+(\.\d+)?(e[-+]?\d+)?", "#", outcome.message)
        message, times = self._same_errors
        self._same_errors = (pattern, times + 1 if message == pattern else 1)
        if self._same_errors[1] >= SAME_ERRORS:
            self.fail(f"{SAME_ERRORS} trials in a row failed with the same error: {outcome.message}")
        elif self.failed > self.spec.budget.trials + SAME_ERRORS:
            self.fail(f"{self.failed} trials failed, more than budget.trials allows; the last: {outcome.message}")


def gain_sentence(gain: float) -> str:
    """What more trials would bring.

    >>> gain_sentence(0.0123)
    "another 10 trials are expected to add 1.2% to the front's hypervolume"
    """
    return f"another {WORTH_OF} trials are expected to add {100 * gain:.2g}% to the front's hypervolume"
