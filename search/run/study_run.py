"""One study on the driver: which attempts run, how their outcomes are handled, and when the study ends.

A `Runner` (in this process, or over Ray Tune) takes attempts from a `StudyRun` and reports back. The end of a trial is one
transaction, written before anything else happens; the rest is written within a second. The tables are the source of truth:
running the study again reads from them what is left to do.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from ...objectives.machine.processor import OtherPrograms
from ...objectives.state.checkpoint_files import delete_checkpoint
from ...spaces.errors import InfeasiblePlanError, OutputError
from ...spaces.laws.device import DeviceProfile
from ...spaces.planning import CostKey
from ...spaces.record import TrialFacts, TrialRecord, TrialResult, taken_per_second
from ...spaces.study.spec import StudySpec
from ...spaces.trial import COUNTED, NODE_DIED, Measurement, Outcome, Suggestion, TrialSetup
from ..analysis.confirm import FOR_REPEATS, next_repeat, next_seed
from ..store.tables import Tables
from ..store.trials import Trials
from ..suggest.front_model import preload
from ..suggest.space_transform import SearchSpace
from ..suggest.stopping import stopped_sentence
from ..suggest.suggester import Suggester
from .decisions.after import Failed, History, Retry, after
from .decisions.attempt import Attempt, result_of, setup_facts, shorten, taken_by
from .decisions.ended import EndedTrials
from .decisions.ending import Ending, Stage
from .decisions.eta import ClockFactors
from .decisions.planner import Planner
from .decisions.running import RunningAttempts
from .decisions.spending import Spending, device_names, prices_of
from .decisions.suggestion_queue import SuggestionQueue
from .events import Event
from .finish import Finish
from .view import StudyView, study_view

# Infeasible plans in a row after which the space is to blame.
INFEASIBLE_IN_A_ROW = 100
# The further trials whose expected gain is told at a study's end.
WORTH_OF = 10
# So many suggestions in a row that do not fit before a deadline end the search.
_ASKED_AGAIN = 3


class StudyRun:
    """The driver's side of one study; runners call `next_attempt`, `begun`, `place`, `report` and `end`.

    Args:
        trials: the study's, so far; only this process changes them.
        space: what is searched.
        profiles: of every kind of device, by parameters that change cost; the first kind's laws time all trials.
        owns_workers: attempts run on this machine, in processes that this one started.
        finish: how it ends with a trained model; None: it ends with its search.

    Attributes:
        ended: its trials that do not train now.
        ending: how far the study has ended before its budget is met, and why. Runners check it often.
        failure: why it cannot continue; empty if it can.
        running: its attempts that train, by the trial's number.
        suggestions: what is suggested ahead.
        reported_s: when a trial last reported a measurement, by the monotonic clock.
    """

    def __init__(
        self,
        spec: StudySpec,
        name: str,
        suggester: Suggester,
        space: SearchSpace,
        trials: Trials,
        tables: Tables,
        profiles: Mapping[str, Mapping[CostKey, DeviceProfile]],
        device: Literal["cpu", "gpu"],
        task_hash: str = "",
        notify: Callable[[Event], None] = lambda event: None,
        driven_s: float = 0.0,
        *,
        owns_workers: bool = False,
        finish: Finish | None = None,
    ) -> None:
        self.finish = finish
        self.spec, self.name, self.device, self.trials = spec, name, device, trials
        self._planner = Planner(spec, name, profiles, device, task_hash, finish)
        self._owns_workers = owns_workers
        self.notify = notify
        self._suggester, self._space, self.tables = suggester, space, tables
        self.running = RunningAttempts(self._planner.expected_s)
        # A loop whose state nobody can save would begin anew.
        can_resume = all(
            profile.optimizer is not None for each in profiles.values() for profile in each.values()
        )
        self._early_stopping = suggester.early_stopping(
            spec.stopping, spec.objectives.metric, trials, pauses=spec.pauses and can_resume
        )
        self._preloaded = False
        self.suggestions = SuggestionQueue(suggester, trials, self.running.ending)
        # Next attempts of trials that ran out of memory or lost their worker.
        self._retries: deque[Attempt] = deque()
        self._interrupted: deque[int] = deque()  # trials that an earlier run left unfinished
        self._baseline: deque[int] = deque()  # of the user's own settings, those to be tried
        self._histories: dict[int, History] = {}  # of trials that have lost a worker
        records = list(trials)
        prices, self._price = prices_of(spec, device_names(profiles), device, records)
        self.spending = Spending(spec, prices, records)
        self.ended = EndedTrials(records, spec.objectives)
        failed = sum(record.outcome == "error" for record in self.ended.done)
        self._history = History(failed=failed, budget=spec.budget.trials)  # of the study
        self.own_seeds = False  # each new trial has one; otherwise they share the study's
        self.interruptible = False  # the main thread is in the user's code, which Ctrl-C may break into
        self._said_of_checkpoints: set[tuple[str, str]] = set()  # by host
        self.ending = Ending()
        self.failure = ""
        self.crashed: Exception | None = None  # raised in a runner's callback, to be raised again from `run`
        self.started_s = time.monotonic()
        self.driven_s = driven_s
        self.reported_s: float | None = None
        self._load_curves()
        if finish is not None:
            finish.follow(self.running.spans)

    # What runners call

    def next_attempt(self, free: int = 1) -> TrialSetup | Literal["wait"] | None:
        """The next attempt to run; "wait" while running ones may bring more; None when nothing is left.

        Args:
            free: how many the runner would take now, this one included.
        """
        if self.ending.stage >= Stage.LEAVING:
            return None
        if self._retries:
            return self._start(self._retries.popleft())
        for _ in range(INFEASIBLE_IN_A_ROW):
            trial = self._next_trial(free)
            if trial is None or trial == "wait":
                return "wait" if self.running else None
            suggestion = Suggestion(trial.number, self._space.whole(trial.parameters), trial.facts.to_dict())
            attempts = self._attempts_at(trial)
            try:
                return self._start(self._planner.first(suggestion, attempts))
            except InfeasiblePlanError as error:
                self._record_infeasible(suggestion, error)
                if attempts:
                    self._delete_checkpoint(trial.number)
        self.fail(
            f"{INFEASIBLE_IN_A_ROW} suggestions in a row had no feasible plan; the last: {self.ended.done[-1].message}"
        )
        return None

    def _next_trial(self, free: int) -> TrialRecord | Literal["wait"] | None:
        """The trial that trains next: one that was interrupted, the user's own, one that confirms, or a suggestion."""
        running = self.running
        room = self.spec.budget.trials - self.ended.counted - len(running)
        if room <= 0:
            return None
        while self._interrupted:
            number = self._interrupted.popleft()
            if self.finish is None or self.finish.resumes():
                return self._resumed(number)
        seed = self.spec.training.seed + len(self.trials) if self.own_seeds else None
        while self._baseline:
            index = self._baseline.popleft()
            setting = self._space.chosen(self.spec.baseline[index])
            if self.finish is None or self.finish.fits(setting):
                return self.trials.begin(setting, TrialFacts(baseline=index, seed=seed))
            self._say(f"baseline.{index} is not trained: there is not enough time left for it")
        if (repeat := self._next_repeat()) is not None:
            return repeat
        if self.ending.stage >= Stage.NO_NEW_TRIALS:
            return None
        most = room
        factors = ClockFactors.of(running.spans())
        per_second = taken_per_second(self.spec.objectives.speed, 1, self._price) or 0.0
        self._suggester.overhead = factors.overhead_s / factors.slowdown * per_second
        if self.finish is not None:
            self._suggester.longest_s = self.finish.longest_s()
            # Later there is less time.
            most = most if self.finish.deadline is None else min(most, max(free, 1))
        for _ in range(len(self.suggestions) + _ASKED_AGAIN):  # those made ahead may take too long by now
            proposal = self.suggestions.take(len(running), free, most=most)
            if isinstance(proposal, int):
                return self._resumed(proposal)
            if proposal is None or proposal == "wait":
                return proposal
            untried = proposal if self.own_seeds else self._space.untried(proposal, self.trials)
            if untried is None and self.ended.paused:
                return self._resumed(min(self.ended.paused))
            if untried is None:
                self.ending.reach(
                    Stage.NO_NEW_TRIALS, "all settings of the space were tried; widen it for more"
                )
                return self._next_repeat()
            if self.finish is None or self.finish.fits(untried):
                return self.trials.begin(untried, TrialFacts(seed=seed))
        self.ending.reach(Stage.NO_NEW_TRIALS, "no further training fits before the deadline")
        return None

    def setups(self, number: int) -> dict[str, TrialSetup]:
        """An attempt that was just taken, as every kind of device would train it: the same batch, its own micro-batches."""
        return self._planner.everywhere(self.running[number])

    def replan_for(self, number: int, devices: int) -> bool:
        """Plan an attempt that was just taken for fewer devices than its trial has, since no more are there.

        It is still timed as on its full number of devices. False if it has to wait for those (`Planner.on_fewer`).
        """
        attempt = self.running[number]
        setup = self._planner.on_fewer(attempt, devices)
        if setup is None:
            return False
        attempt.setup = setup
        self.tables.update_setup(setup)
        self._say(
            f"trial {number} continues on {devices} of its {attempt.devices} devices: no others are available"
        )
        return True

    def put_back(self, number: int) -> None:
        """Take an attempt back that never began: it is the next one again."""
        attempt = self.running.pop(number)
        self._retries.appendleft(replace(attempt, setup=self._planner.whole(attempt, attempt.setup)))

    def lose_attempts(self, why: str) -> None:
        """End all running attempts as interrupted: none of them survived what happened to the machines."""
        for number in list(self.running):
            self.end(number, Outcome("interrupted", f"{NODE_DIED}: {why}"), silently=True)

    def begun(self, number: int) -> None:
        """An attempt has got its devices."""
        self.running[number].held_since = time.monotonic()

    def place(self, number: int, kind: str, setup: TrialSetup, host: str) -> None:
        """Record that an attempt runs on this kind of device, on this machine, with this one of its setups."""
        attempt = self.running[number]
        attempt.host = host
        # A kind that joined since is treated as the one that times the study.
        planned = attempt.setup.plan.activation_checkpointing
        attempt.kind, attempt.setup = (
            kind if kind in self._planner.profiles else self._planner.timed_on,
            setup,
        )
        self.tables.update_setup(setup)
        facts = replace(self._facts(attempt), device_kind=kind, host=host)
        if planned != "none":  # said before of another kind of device
            facts = replace(facts, activation_checkpointing=setup.plan.activation_checkpointing)
        self.trials.change(number, facts)

    def report(self, number: int, measurement: Measurement, host: str = "") -> bool:
        """Record a measurement; True where the attempt should stop here, because the trial or the study does.

        Args:
            host: the name of the machine that it was taken on.
        """
        attempt = self.running[number]
        setup = attempt.setup
        if host != attempt.host:
            attempt.host = host
            self.trials.change(number, TrialFacts(host=host))  # for `bsearch show --watch` in another process
        attempt.measurements.append(measurement)
        self.reported_s = time.monotonic()
        self.tables.add_measurement(setup, measurement)
        self.notify(Event("measured", setup=setup, measurement=measurement))
        self._say_of_checkpoint(setup, str(measurement.facts.get("checkpoint", "")), host)
        fraction, taken = setup.share_of(measurement), self._taken(attempt, measurement)
        should_stop = self._early_stopping.report(number, fraction, taken, measurement.value(setup.metric))
        if self._early_stopping.pauses and "checkpoint" in measurement.facts:
            should_stop = False  # it could not be saved
        return (should_stop and not self.trials[number].is_repeat) or self.ending.stage is Stage.STOPPED

    def end(self, number: int, outcome: Outcome, *, silently: bool = False) -> None:
        """Record how an attempt ended, and do what follows from it.

        Args:
            silently: the next attempt needs no words, since whoever calls has said why.
        """
        attempt = self.running.end(number, counts=outcome.kind in COUNTED)
        self._pay(attempt)
        smaller = self._planner.smaller(attempt, outcome) if outcome.kind == "out_of_memory" else None
        if outcome.kind == "stopped" and self._early_stopping.pauses:
            self._pause(attempt)
            return
        match after(attempt, outcome, self._history_of(number), smaller):
            case Retry() as retry:
                self._retry(attempt, outcome, retry, silently=silently)
            case done:
                self._end(attempt, done.outcome)
                if isinstance(done, Failed):
                    self.fail(done.why)

    # How it is carried out

    def _history_of(self, number: int) -> History:
        lost = self._histories.get(number, self._history)
        return replace(self._history, reached=lost.reached, lost=lost.lost)

    def _retry(self, attempt: Attempt, outcome: Outcome, retry: Retry, *, silently: bool) -> None:
        number = attempt.setup.number
        if outcome.kind == "interrupted":
            self._histories[number] = self._history_of(number).after_loss(attempt, outcome)
        self.tables.end_attempt(attempt.setup, outcome)
        self._note_spent(number)
        self._retries.append(self._planner.again(attempt, retry.setup))
        if retry.words and not silently:
            self._say(retry.words)

    def _pause(self, attempt: Attempt) -> None:
        """Leave a trial at the rung, to be resumed from its checkpoint if that is found worth the time."""
        setup, last = attempt.setup, attempt.last
        assert last is not None
        facts = replace(
            self._early_stopping.facts(setup.number, stopped=False),
            expected_seconds=self._taken(attempt, last),
            train_s=last.elapsed_s / setup.share_of(last) if attempt.known_s is None else attempt.known_s,
            spent=self.spending.of(setup.number),
        )
        self.tables.end_attempt(setup, Outcome("paused"))
        record = self.trials.change(setup.number, facts, "paused")
        self.trials.commit()
        self.ended.paused[setup.number] = record
        self._history = self._history.after_end(Outcome("paused"))
        self.notify(Event("ended", record=record))

    def _end(self, attempt: Attempt, outcome: Outcome) -> None:
        """End an attempt's trial."""
        setup, number = attempt.setup, attempt.setup.number
        prediction = self._early_stopping.facts(number, stopped=outcome.kind == "stopped")
        if outcome.kind == "stopped" and prediction.stopped_fraction is not None:
            outcome = Outcome("stopped", stopped_sentence(prediction))
        by_clock = setup.is_timed_by_clock
        shortened = attempt.last is not None and "shortened_to" in attempt.last.facts
        if attempt.last is not None and (shortened or by_clock):
            shorten(attempt, attempt.last)
        if shortened:
            setup = attempt.setup
            self.tables.update_setup(setup)
        shared = self.spec.devices.share < 1
        expected_s = self._planner.expected_s(attempt)
        result = result_of(attempt, outcome, expected_s, self.spec.objectives.speed, self._price, shared)
        facts = result.facts | prediction | TrialFacts(spent=self.spending.of(number))
        if shortened or by_clock:
            facts |= TrialFacts(epochs=attempt.setup.epochs, samples_budget=attempt.setup.samples_budget)
        if outcome.kind == "complete":
            # Before the trial has ended, so that it is trained again if its model was not kept.
            self._keep(attempt)
        self.tables.end_attempt(setup, outcome)
        self._finish(number, replace(result, facts=facts))
        self._history = self._history.after_end(outcome)
        self._histories.pop(number, None)
        trained = outcome.kind == "complete"
        if trained:
            self._planner.learn_memory(attempt)
        if setup.checkpoint is not None:
            self.suggestions.submit(delete_checkpoint, setup.checkpoint)  # an object store may be slow
        if attempt.last is not None:
            value = attempt.last.value(setup.metric) if trained else None
            self._early_stopping.end(number, self._taken(attempt, attempt.last), value)

    def _keep(self, attempt: Attempt) -> None:
        """Keep a complete trial's model, if that is wanted and it is the best."""
        if self.finish is None or not attempt.measurements:
            return
        try:
            self.finish.kept.offer(attempt.setup, attempt.measurements)
        except OutputError as error:
            self._say(f"trial {attempt.setup.number}: its model was not kept: {error}")
            return
        self.check_target()

    def _finish(self, number: int, result: TrialResult) -> None:
        """End a trial: one transaction, with what its attempt has left to write."""
        record = self.trials.end(number, result)
        self.trials.commit()
        self.ended.end(record)
        if words := self.ended.far_from_floor():
            self._say(words)
        self.notify(Event("ended", record=record))

    def _record_infeasible(self, suggestion: Suggestion, error: InfeasiblePlanError) -> None:
        requested = {
            key: value
            for key, value in suggestion.parameters.items()
            if key in ("effective_batch", "accumulation")
        }
        facts = TrialFacts.of({"message": str(error), **requested})
        self._finish(suggestion.number, TrialResult("infeasible", facts, violation=error.violation))

    def _pay(self, attempt: Attempt) -> None:
        """Count what an attempt's devices cost, now that it has ended."""
        self.spending.add(attempt.setup.number, self.spending.of_attempt(attempt))
        self.check_cost()

    def _note_spent(self, number: int) -> None:
        if (spent := self.spending.of(number)) is not None:
            self.trials.change(number, TrialFacts(spent=spent))

    def check_target(self) -> None:
        """Stop a study whose kept model is as good as is wanted."""
        if self.finish is not None and self.finish.has_reached():
            target = f"{self.spec.objectives.metric.name} {self.spec.budget.until:g}"
            self.ending.reach(
                Stage.STOPPED, f"budget.until: {target} was reached by trial {self.finish.kept.trial}"
            )

    def check_cost(self) -> None:
        """Stop the study where its budget is spent."""
        if why := self.spending.over(sum(map(self.spending.of_attempt, list(self.running.values())))):
            self.ending.reach(Stage.STOPPED, why)

    def fail(self, why: str) -> None:
        """Stop the study because it cannot continue."""
        self.failure = self.failure or why
        self.ending.reach(Stage.STOPPED, why)

    def crash(self, error: Exception) -> None:
        """Stop because our own code or the database failed while a runner called us."""
        self.crashed = self.crashed or error
        self.fail(str(error) or type(error).__name__)

    # What the driver does around them

    def view(self) -> StudyView:
        """The study as displayed now; may be called from another thread."""
        attempts, done = list(self.running.values()), (*self.ended.done, *list(self.ended.paused.values()))
        return study_view(
            self.name,
            self.spec,
            self.ended.front(),
            done,
            [(attempt.setup, attempt.last, attempt.host, self.running.span(attempt)) for attempt in attempts],
            list(self.running.ended),
            now_s=time.monotonic(),
            elapsed_s=self.elapsed_s(),
            driven_s=self.driven_s + self.elapsed_s(),
            counted=self.ended.counted,
            deadline=None if self.finish is None else self.finish.deadline,
        )

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def recover(self) -> None:
        """Queue what comes before any suggestion: trials that earlier runs left unfinished, and the user's own settings.

        The latter are tried once per study, and again if they failed with an error.
        """
        self._interrupted.extend(
            record.number for record in self.trials if not record.has_ended and not record.is_paused
        )
        tried = {record.facts.baseline for record in self.trials if record.outcome != "error"}
        self._baseline.extend(index for index in range(len(self.spec.baseline)) if index not in tried)

    def sweep(self) -> None:
        """Leave nothing running behind: interrupted trials resume in the next run."""
        self.suggestions.close()
        if not self.tables.lock.held(self.name):
            # The driver that took the study over continues our trials.
            self.tables.drop_writes()
            return
        why = self.ending.why if self.ending.stage >= Stage.LEAVING else "the driver stopped"
        for attempt in list(self.running.values()):
            self.tables.end_attempt(attempt.setup, Outcome("interrupted", why))
            self._pay(attempt)
            self._note_spent(attempt.setup.number)
        for record in self.trials:
            if record.outcome == "running":
                self.trials.change(record.number, TrialFacts(), "interrupted")
        self.trials.commit()
        self.running.clear()
        self._retries.clear()

    # Inside

    def _say(self, text: str) -> None:
        self.notify(Event("message", text=text))

    def _say_of_checkpoint(self, setup: TrialSetup, error: str, host: str) -> None:
        """Say once per host why checkpoints fail: trials continue without them, but an interruption costs more."""
        if error and (host, error) not in self._said_of_checkpoints:
            self._said_of_checkpoints.add((host, error))
            where = f"{setup.checkpoint}, on {host}" if host else setup.checkpoint
            self._say(f"trial {setup.number}: {error} ({where}); training goes on")

    def _delete_checkpoint(self, number: int) -> None:
        """Delete the checkpoint of a trial that no longer runs."""
        attempts = self.tables.attempts(self.name, number)
        checkpoint = attempts[-1].setup.get("checkpoint") if attempts else None
        if isinstance(checkpoint, str):
            delete_checkpoint(checkpoint)

    def _resumed(self, number: int) -> TrialRecord:
        """A paused or interrupted trial, which trains again."""
        self.ended.paused.pop(number, None)
        record = self.trials.resume(number)
        if record.facts.stopped_fraction is not None:
            self._early_stopping.resume(number)
        return record

    def _attempts_at(self, record: TrialRecord) -> int:
        """The number of attempts at a trial so far; an attempt that its driver left open is ended as interrupted."""
        if record.facts.learning_rate is None:  # it has just begun
            return 0
        stopped = Outcome("interrupted", "its driver stopped before it was done")
        self.tables.end_left_attempts(self.name, record.number, stopped)
        return self.tables.attempts_begun(self.name, record.number)

    def _taken(self, attempt: Attempt, measurement: Measurement) -> float:
        """What a trial's full training takes as the front counts it, known or extrapolated from its share so far."""
        train_s = attempt.known_s
        if train_s is None:
            train_s = measurement.elapsed_s / attempt.setup.share_of(measurement)
        return taken_by(self.spec.objectives.speed, train_s, attempt, self._price)

    def _load_curves(self) -> None:
        """Read the curves of trials that ended before from the database."""
        curves = self.tables.curves(self.name)
        for record in (*self.ended.done, *self.ended.paused.values()):
            taken, budget = record.taken(self.spec.objectives.speed), record.facts.samples_budget
            if record.outcome in ("complete", "stopped", "paused") and taken is not None and budget:
                curve = [(min(seen / budget, 1.0), value) for seen, value in curves.get(record.number, ())]
                self._early_stopping.learn(record.number, taken, curve, done=record.outcome == "complete")
                if record.outcome == "complete" and record.facts.stopped_fraction is not None:
                    self._early_stopping.resume(record.number)

    def _next_repeat(self) -> TrialRecord | None:
        """A repeat of a member of the front, due before anything new in the last part of the budget; None if none is due."""
        most = self.spec.budget.trials
        search = most - round(FOR_REPEATS * most) if self.spec.confirm else most
        if self.ending.stage < Stage.NO_NEW_TRIALS and self.ended.counted + len(self.running) < search:
            return None
        repeats = [record for record in self.trials if record.is_repeat]
        running = Counter(record.setting for record in repeats if not record.has_ended)
        members = [trial.number for trial in self.ended.front().trials]
        setting = next_repeat(self.ended.done, self.spec.objectives, self.spec.confirm, running, members)
        if setting is None:
            return None
        # A seed of its own: one that settings shared would suit, or not, all of them alike.
        others = self.trials if self.own_seeds else repeats
        used = [record.facts.seed for record in others if record.facts.seed is not None]
        facts = TrialFacts(repeats=setting, seed=next_seed(used, self.spec.training.seed))
        return self.trials.begin(self.trials[setting].parameters, facts)

    def _start(self, attempt: Attempt) -> TrialSetup:
        setup = attempt.setup
        if self._owns_workers and self.device == "cpu":
            attempt.others = OtherPrograms()
        self.running[setup.number] = attempt
        if setup.attempt == 0:
            self.trials.change(setup.number, self._facts(attempt))
        self.tables.start_attempt(setup)
        self.trials.commit()
        self.notify(Event("started", setup=setup))
        if not self._preloaded:
            # Not while a trial is asked for, so that the first begins at once. In the thread that asks, because two threads
            # that import the same modules of SciPy at once may find them half imported.
            self._preloaded = True
            self.suggestions.submit(preload)
        return setup

    def _facts(self, attempt: Attempt) -> TrialFacts:
        """Facts of its setup, stored beside the searched parameters."""
        untrained = self._planner.untrained(attempt)
        extra = {} if untrained is None else {"untrained": untrained}
        return replace(setup_facts(attempt.setup, attempt.known_s), price=self._price, extra=extra)


def gain_sentence(gain: float) -> str:
    """What more trials would bring, at most: in 93 % of 600 cases no more than twice what was expected (docs/log.md).

    >>> gain_sentence(0.0123), gain_sentence(0.002)
    ("another 10 trials are likely to add at most 2.5% to the front's hypervolume", 'the front has probably settled: another \
10 trials are likely to add less than 1% to its hypervolume')
    """
    most = 200 * gain
    if most < 1:
        return f"the front has probably settled: another {WORTH_OF} trials are likely to add less than 1% to its hypervolume"
    return f"another {WORTH_OF} trials are likely to add at most {most:.2g}% to the front's hypervolume"
