"""A study as Tune sees it: a Searcher that hands out attempts, and a scheduler and a stopper that follow its decisions.

Each Tune trial is one attempt at one of our trials. Tune schedules the attempts and reuses their processes; `StudyRun` decides
what to try, how to record an outcome and when the study is over. All state is in the driver's database, none in Ray.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import ray_variables  # noqa: F401  # before Ray is imported

# isort: split

from ray import tune
from ray.exceptions import RayError
from ray.tune.progress_reporter import ProgressReporter, TrialProgressCallback
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from ..objectives.machine.environment import working_folder
from ..search.run.decisions.ending import Stage
from ..search.run.study_run import StudyRun
from ..spaces.trial import LEFT, NODE_DIED, Measurement, Outcome, TrialSetup
from .tune_internals import end_at_once, forget_ended, keep_processes, unstage

if TYPE_CHECKING:
    from .tune import TuneRunner

_T = TypeVar("_T")
# Machines that join or leave, and other studies, are noticed within this time.
REFRESH_S = 5.0
# One suggestion is always made ahead of a free slot, and one more per this many slots.
_SLOTS_FOR_ONE_AHEAD = 16


class _NotSaved:
    """Part of a Tune run that Tune pickles every few seconds, to restore it later: all our state is in the storage."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class StudySearcher(_NotSaved, Searcher):
    """Presents a StudyRun to Tune: hands out attempts and forwards what they report.

    Args:
        runner: says what room the cluster has.
        most: trials that run side by side, where there is room for more.
    """

    def __init__(self, study: StudyRun, runner: TuneRunner, most: int | None = None) -> None:
        super().__init__(metric=None, mode=None)
        self._study, self._most = study, most
        self._slots = _cached_for(lambda: runner.slots, 0, REFRESH_S)
        self._runner = runner
        self._numbers: dict[str, int] = {}
        # Devices of a pending or running attempt's trial, how many of them each machine has, and whether it waits for all.
        self._splits: dict[str, tuple[int, tuple[int, ...], bool]] = {}
        self.processes: dict[
            str, tuple[str, int]
        ] = {}  # of running attempts: address of the machine, and process there
        self.died: dict[
            str, str
        ] = {}  # why a trial's worker died; set by the scheduler, which learns of it first
        self._outcomes: dict[str, str] = {}  # outcomes reported before Tune ended the trial
        self._lock = threading.RLock()
        self.closed = self.ends_at_once = False  # once closed, Tune's reports are ignored

    def suggest(self, trial_id: str) -> Any:
        """A Tune config, `FINISHED`, or None for "ask again later"."""
        # Tune may ask for all its slots at once, so that their processes start together, and for a few more; suggestions made
        # any earlier would be based on fewer results. If several trials end during one call, Tune ends the processes without
        # a pending trial and starts others (docs/scaling.md).
        slots = self._slots()
        wanted = 1 + slots + slots // _SLOTS_FOR_ONE_AHEAD
        # Ray may have room for more than the study allows, and would start what waits.
        free = (wanted if self._most is None else min(wanted, self._most)) - len(self._numbers)
        if free <= 0:
            return None
        setup = self._guarded(lambda: self._study.next_attempt(free))
        if setup is None:
            return Searcher.FINISHED
        if setup == "wait":
            return None
        self._numbers[trial_id] = setup.number
        return self._guarded(lambda: self._config(trial_id, setup))

    def _config(self, trial_id: str, setup: TrialSetup) -> dict[str, Any]:
        """What Tune is to start for an attempt, on the machines that are there."""
        devices = setup.plan.devices
        split = self._runner.placed(devices)
        waits = sum(split) < devices and not self._study.replan_for(setup.number, sum(split))
        if waits:
            split = (devices,)
        self._splits[trial_id] = devices, split, waits
        setups = self._study.setups(setup.number)
        return {
            "task": self._study.spec.task,
            "setups": {kind: json.dumps(own_setup.to_dict()) for kind, own_setup in setups.items()},
            "shares": split,
            "folder": working_folder(),
        }

    def should_withdraw(self, trial_id: str) -> bool:
        """Whether a pending attempt should not start: it waits for machines other than those it would get now, or the study is
        leaving.
        """
        if trial_id not in self._splits or self.leaving:
            return self.leaving
        devices, split, waits = self._splits[trial_id]
        now = self._runner.placed(devices)
        return now != split and (sum(now) == devices or not waits)

    def takes_back(self, trials: Iterable[Any]) -> Iterator[Any]:
        """Those of Tune's pending trials that are not to start, the latest first."""
        order = {trial_id: place for place, trial_id in enumerate(self._splits)}
        for trial in sorted(trials, key=lambda candidate: -order.get(candidate.trial_id, -1)):
            if trial.status == "PENDING" and self.should_withdraw(trial.trial_id):
                yield trial

    @property
    def leaving(self) -> bool:
        return self._study.ending.stage >= Stage.LEAVING

    @property
    def _stopped(self) -> bool:
        return self._study.ending.stage is Stage.STOPPED

    def begun(self, trial_id: str) -> None:
        if trial_id in self._numbers:
            self._guarded(lambda: self._study.begun(self._numbers[trial_id]))

    def should_stop(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Record where an attempt runs or what it measured; True if it should stop."""
        host = f"{result.get('hostname')} ({result.get('node_ip')})"
        if "placed" in result and trial_id in self._numbers:
            self.processes[trial_id] = result["node_ip"], result["pid"]
            if "setup" in result:
                setup = TrialSetup.from_dict(json.loads(result["setup"]))
                self._guarded(
                    lambda: self._study.place(self._numbers[trial_id], result["placed"], setup, host)
                )
        if "measurement" not in result or trial_id not in self._numbers or trial_id in self._outcomes:
            return False
        measurement = Measurement.from_dict(json.loads(result["measurement"]))
        should_stop = self._guarded(lambda: self._study.report(self._numbers[trial_id], measurement, host))
        if should_stop is None:  # the study crashed and stops
            return True
        if should_stop and not self._stopped:
            self._outcomes[trial_id] = json.dumps(Outcome("stopped").to_dict())
        return bool(should_stop)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if "outcome" in result:
            self._outcomes[trial_id] = result["outcome"]

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        number = self._numbers.pop(trial_id, None)
        self._splits.pop(trial_id, None)
        self.processes.pop(trial_id, None)
        if number is None:
            return
        reported = self._outcomes.pop(trial_id, None) or (result or {}).get("outcome")
        if reported:
            outcome = Outcome.from_dict(json.loads(reported))
            self._guarded(lambda: self._study.end(number, outcome))
        elif error and not self._stopped:
            died = self.died.pop(trial_id, "") or "its worker died"
            self._guarded(lambda: self._study.end(number, Outcome("interrupted", died)))
        elif self.leaving:
            self._guarded(lambda: self._study.end(number, Outcome("interrupted", LEFT), silently=True))
        elif not self._stopped:
            self._guarded(lambda: self._study.put_back(number))  # it was pending, and waited in vain
        # The driver records attempts that were interrupted because the study stopped.

    def lost_ray(self) -> bool:
        """Whether one of Ray's own processes has died, rather than a worker alone."""
        return bool(self._runner.lost_ray())

    def _guarded(self, call: Any) -> Any:
        """Tune logs a searcher's exceptions and continues; ours stop the study and reach the user."""
        with self._lock:
            if self.closed:
                return None
            try:
                return call()
            except Exception as error:
                self._study.crash(error)
                return None

    def close(self, *, at_once: bool) -> None:
        """Ignore all further reports of Tune.

        Args:
            at_once: Tune does not end its processes one by one, since Ray has died or is about to be disconnected.
        """
        with self._lock:
            self.closed, self.ends_at_once = True, at_once

    def set_search_properties(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: all state is in the storage."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore, for the same reason."""


class SilentReporter(ProgressReporter):
    """In a notebook, Tune's own reporter would clear the cell's output, and with it our progress display."""

    def should_report(self, trials: list[Any], done: bool = False) -> bool:
        return False

    def report(self, trials: list[Any], done: bool, *sys_info: str) -> None: ...


class RayIsGoneError(Exception):
    """Ends Tune's run after Ray has died, or after a second signal."""


class LaunchOrder(_NotSaved, FIFOScheduler):
    """Starts attempts in the order of their suggestions, in processes that are kept.

    It withdraws those that wait for machines that have left, and records why a trial's worker died, which Tune does not pass
    to its searcher: a dead node is not its trials' fault.
    """

    def __init__(self, searcher: StudySearcher) -> None:
        super().__init__()
        self._searcher, self._looked_at = searcher, time.monotonic()

    def on_trial_add(self, controller: Any, trial: Any) -> None:
        keep_processes(controller)
        end_at_once(controller, lambda: self._searcher.ends_at_once)
        super().on_trial_add(controller, trial)

    def choose_trial_to_run(self, controller: Any) -> Any:
        if self._searcher.closed:
            # Tune would stop its trials one by one, and wait for a dead head at each.
            raise RayIsGoneError
        inner = getattr(controller, "_tune_controller", controller)
        forget_ended(inner)
        if self._searcher.leaving or time.monotonic() - self._looked_at > REFRESH_S:
            self._looked_at = time.monotonic()
            for trial in self._searcher.takes_back(list(inner.get_live_trials())):
                unstage(inner, trial)
                inner.stop_trial(trial)  # as Tune itself does; `request_stop_trial` is never acted on
        return super().choose_trial_to_run(controller)

    def on_trial_error(self, controller: Any, trial: Any) -> None:
        with contextlib.suppress(OSError, TypeError):
            text = Path(trial.error_file).read_text(encoding="utf-8", errors="replace")
            dead = any(sign in text for sign in ("node has died", "node is dead", "node was terminated"))
            if dead or self._searcher.lost_ray():
                self._searcher.died[trial.trial_id] = NODE_DIED
        super().on_trial_error(controller, trial)


class StudyStopper(_NotSaved, tune.Stopper):
    """Ends attempts that should stop, and Tune's run when the study stops.

    Tune passes every result here first; one that stops a trial reaches the searcher only when the trial ends.
    """

    def __init__(self, study: StudyRun, searcher: StudySearcher) -> None:
        self._study, self._searcher = study, searcher

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return self._searcher.should_stop(trial_id, result)

    def stop_all(self) -> bool:
        return self._study.ending.stage is Stage.STOPPED


class StartNotifier(_NotSaved, TrialProgressCallback):
    """Reports that an attempt has started on its devices.

    It replaces the progress callback that Tune would add, which keeps every trial and its last result in memory.
    """

    def __init__(self, searcher: StudySearcher) -> None:
        self._searcher = searcher

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._searcher.begun(trial.trial_id)

    def on_trial_result(self, *arguments: Any, **info: Any) -> None: ...

    def on_trial_error(self, *arguments: Any, **info: Any) -> None: ...

    def on_trial_complete(self, *arguments: Any, **info: Any) -> None: ...


def _cached_for(ask: Callable[[], _T], first: _T, seconds: float) -> Callable[[], _T]:
    """The function `ask` with its answer cached for `seconds`; `first` until there is one."""
    known, at = first, -math.inf

    def answer() -> _T:
        nonlocal known, at
        if time.monotonic() - at > seconds:
            with contextlib.suppress(RayError, ConnectionError):
                known = ask()
            at = time.monotonic()
        return known

    return answer
