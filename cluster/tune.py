"""The Runner over Ray Tune: a thin Searcher that hands out attempts; `worker` holds the Trainable that runs them.

Each Tune trial is one attempt at one of our trials. Tune schedules the attempts and reuses their processes; `StudyRun` decides
what to try, how to record an outcome and when the study is over. All state is in the driver's database, none in Ray.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from . import ray_variables  # noqa: F401  # before Ray is imported

# isort: split

import ray
from ray import tune
from ray.exceptions import GetTimeoutError, RayError
from ray.tune.progress_reporter import ProgressReporter
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ..objectives.machine.environment import environment
from ..search.report.terminal.live import in_notebook
from ..search.run.study_run import StudyRun
from ..spaces.errors import ClusterError, Fault, StudyFileError, TaskError
from ..spaces.laws.device import DeviceProfile, ProfileRequest
from ..spaces.study import Cluster, Devices
from ..spaces.trial import LEFT, NODE_DIED, Measurement, Outcome, TrialSetup
from .connection import RayConnection, nodes
from .machines import shares, trials_that_fit
from .processes import keep_processes
from .worker import AttemptTrainable, ask_to_leave, attempt_here, gpu_memory, kind_of, profile_here

# Ray's resource that names a machine's kind of accelerator, and the smallest amount that can be requested.
_KIND, _KIND_AMOUNT = "accelerator_type:", 0.001
# Machines that join or leave are noticed within this time.
_REFRESH_S = 5.0
# A machine's answer about its GPUs, including the start of a process there.
_ANSWERED_S = 60.0
# The main thread wakes this often to handle signals.
_WAKE_S = 0.1
# One suggestion is always made ahead of a free slot, and one more per this many slots.
_SLOTS_FOR_ONE_AHEAD = 16
# Pending trials that Tune may hold: effectively unlimited, since the searcher limits them.
_MOST_PENDING = 100_000
# Running attempts are asked to leave again after this time: one may just have begun.
_ASKED_AGAIN_S = 2.0
# How long Tune may take to notice that Ray is gone, before it is started again all the same.
_TUNE_ENDS_S = 3.0


class _RayLostError(Exception):
    """One of Ray's own processes is gone."""


class StudySearcher(Searcher):
    """Presents a StudyRun to Tune: hands out attempts and forwards what they report."""

    def __init__(self, study: StudyRun, runner: TuneRunner, most: int | None = None) -> None:
        super().__init__(metric=None, mode=None)
        self._study, self._most = study, most
        self._slots = _cached_for(lambda: runner.slots, _REFRESH_S)
        self._runner = runner
        self._numbers: dict[str, int] = {}
        # Devices of a pending or running attempt's trial, how many of them each machine has, and whether it waits for all.
        self._splits: dict[str, tuple[int, tuple[int, ...], bool]] = {}
        self.processes: dict[str, tuple[str, int]] = {}  # of running attempts: address of the machine, and process there
        self.died: dict[str, str] = {}  # why a trial's worker died; set by the scheduler, which learns of it first
        self._outcomes: dict[str, str] = {}  # outcomes reported before Tune ended the trial
        self._lock = threading.RLock()
        self.closed = False  # Ray is gone: whatever Tune says now is of no attempt any more

    def suggest(self, trial_id: str) -> Any:
        """A Tune config, `FINISHED`, or None for "ask again later"."""
        # Tune may ask for all its slots at once, so that their processes start together, and for a few more; suggestions made
        # any earlier would be based on fewer results. If several trials end during one call, Tune ends the processes without
        # a pending trial and starts others (docs/scaling.md).
        slots = self._slots()
        wanted = 1 + slots + slots // _SLOTS_FOR_ONE_AHEAD
        # Ray may have room for more than the study allows, and would start what waits.
        if len(self._numbers) >= (wanted if self._most is None else min(wanted, self._most)):
            return None
        setup = self._guarded(self._study.next_attempt)
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
        waits = sum(split) < devices and not self._study.go_on_with(setup.number, sum(split))
        if waits:
            split = (devices,)
        self._splits[trial_id] = devices, split, waits
        setups = self._study.setups(setup.number)
        return {
            "task": self._study.spec.task,
            "setups": {kind: json.dumps(one.to_dict()) for kind, one in setups.items()},
            "shares": split,
        }

    def waits_in_vain(self, trial_id: str) -> bool:
        """Whether a pending attempt waits for other machines than it would be given now, or for a study that leaves."""
        if trial_id not in self._splits or self.leaving:
            return self.leaving
        devices, split, waits = self._splits[trial_id]
        now = self._runner.placed(devices)
        return now != split and (sum(now) == devices or not waits)

    @property
    def leaving(self) -> bool:
        return bool(self._study.leaving)

    def begun(self, trial_id: str) -> None:
        if trial_id in self._numbers:
            self._guarded(lambda: self._study.begun(self._numbers[trial_id]))

    def should_stop(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Record where an attempt runs or what it measured; True if it should stop."""
        if "placed" in result and trial_id in self._numbers:
            self.processes[trial_id] = result["node_ip"], result["pid"]
            if "setup" in result:
                setup = TrialSetup.from_dict(json.loads(result["setup"]))
                self._guarded(lambda: self._study.place(self._numbers[trial_id], result["placed"], setup))
        if "measurement" not in result or trial_id not in self._numbers or trial_id in self._outcomes:
            return False
        measurement = Measurement.from_dict(json.loads(result["measurement"]))
        host = f"{result['hostname']} ({result['node_ip']})"
        should_stop = self._guarded(lambda: self._study.report(self._numbers[trial_id], measurement, host))
        if should_stop is None:  # the study crashed and stops
            return True
        if should_stop and not self._study.stop_reason:
            self._outcomes[trial_id] = json.dumps(Outcome("stopped").to_dict())
        return bool(should_stop)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if "outcome" in result:
            self._outcomes[trial_id] = result["outcome"]

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        number = self._numbers.pop(trial_id, None)
        self._splits.pop(trial_id, None)
        self.processes.pop(trial_id, None)
        if number is None:
            return
        reported = self._outcomes.pop(trial_id, None) or (result or {}).get("outcome")
        if reported:
            outcome = Outcome.from_dict(json.loads(reported))
            self._guarded(lambda: self._study.end(number, outcome))
        elif error and not self._study.stop_reason:
            died = self.died.pop(trial_id, "its worker died")
            self._guarded(lambda: self._study.end(number, Outcome("interrupted", died)))
        elif self.leaving:
            self._guarded(lambda: self._study.end(number, Outcome("interrupted", LEFT), silently=True))
        elif not self._study.stop_reason:
            self._guarded(lambda: self._study.put_back(number))  # it was pending, and waited in vain
        # The driver records attempts that were interrupted because the study stopped.

    def lost_ray(self) -> bool:
        """Whether one of Ray's own processes is gone, and not a worker alone."""
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

    def close(self) -> None:
        """Let nothing that Tune still says reach the study."""
        with self._lock:
            self.closed = True

    def set_search_properties(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save: all state is in the storage."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore, for the same reason."""

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its searcher to restore it later; a database connection cannot be pickled


class _SilentReporter(ProgressReporter):
    """In a notebook, Tune's own reporter would clear the cell's output, and with it our progress display."""

    def should_report(self, trials: list[Any], done: bool = False) -> bool:
        return False

    def report(self, trials: list[Any], done: bool, *sys_info: str) -> None: ...


class _InOrder(FIFOScheduler):
    """Starts attempts in the order of their suggestions, in processes that stay.

    It takes back those that wait for machines that have gone, and records why a trial's worker died, which Tune does not pass
    to its searcher: a dead node is not its trials' fault.
    """

    def __init__(self, searcher: StudySearcher) -> None:
        super().__init__()
        self._searcher, self._looked_at = searcher, time.monotonic()

    def on_trial_add(self, controller: Any, trial: Any) -> None:
        keep_processes(controller)
        super().on_trial_add(controller, trial)

    def choose_trial_to_run(self, controller: Any) -> Any:
        if self._searcher.leaving or time.monotonic() - self._looked_at > _REFRESH_S:
            self._looked_at = time.monotonic()
            inner = getattr(controller, "_tune_controller", controller)
            for trial in list(inner.get_live_trials()):
                if trial.status == "PENDING" and self._searcher.waits_in_vain(trial.trial_id):
                    inner.stop_trial(trial)  # as Tune itself does; `request_stop_trial` is never acted on
        return super().choose_trial_to_run(controller)

    def on_trial_error(self, controller: Any, trial: Any) -> None:
        with contextlib.suppress(OSError, TypeError):
            text = Path(trial.error_file).read_text(encoding="utf-8", errors="replace")
            dead = any(sign in text for sign in ("node has died", "node is dead", "node was terminated"))
            if dead or self._searcher.lost_ray():
                self._searcher.died[trial.trial_id] = NODE_DIED
        super().on_trial_error(controller, trial)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its scheduler too


class _StudyStopper(tune.Stopper):
    """Ends attempts that should stop, and Tune's run when the study stops.

    Tune passes every result here first; one that stops a trial reaches the searcher only when the trial ends.
    """

    def __init__(self, study: StudyRun, searcher: StudySearcher) -> None:
        self._study, self._searcher = study, searcher

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return self._searcher.should_stop(trial_id, result)

    def stop_all(self) -> bool:
        return bool(self._study.stop_reason) or self._searcher.closed

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its stopper every few seconds; a study cannot and need not be pickled


class _StartAndEnd(tune.Callback):
    """Tells when an attempt has got its devices, and drops what Tune would remember of one that has ended."""

    def __init__(self, searcher: StudySearcher) -> None:
        self._searcher = searcher

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._searcher.begun(trial.trial_id)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # Averages of every number that it reported: a third of what a driver's memory grew by.
        kept = getattr(trial, "run_metadata", None)
        for name in ("metric_analysis", "metric_n_steps"):
            getattr(kept, name, {}).clear()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its callbacks too


class TuneRunner:
    """Runs attempts on Ray: a context manager that starts a local cluster, or joins the one the study names.

    A Ray that this process is connected to already is used as it is, and left running.

    Args:
        log_file: where Ray's own messages go.
        say: is told what happens to Ray.

    Raises:
        ClusterError: Ray cannot be started or reached, or has no device of the requested kind.
    """

    def __init__(
        self, cluster: Cluster, devices: Devices, log_file: Path, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self._cluster, self._devices, self._log_file, self._say = cluster, devices, log_file, say
        self.device: Literal["cpu", "gpu"] = "cpu"
        self.cores = devices.cores("cpu")
        self._gpu_memories: dict[str, str] = {}  # by machine
        self._machines: list[dict[str, Any]] = []

    def __enter__(self) -> TuneRunner:
        self._ray = RayConnection(self._cluster.address, self.cores, self._log_file, self._say)
        self.device = self._devices.kind_with(sum(node["Resources"].get("GPU", 0) for node in self._nodes()))
        self._check_share()
        of_gpus = [resources for node in self._nodes() if (resources := node["Resources"]).get("GPU")]
        cpus = [int(resources.get("CPU", 0) // resources["GPU"]) for resources in of_gpus]
        self.cores = self._devices.cores(self.device, min(cpus, default=1))
        self._check_room(max(self._devices.counts))
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.close()

    def _nodes(self) -> list[dict[str, Any]]:
        """The live machines, or those last known while Ray does not say; the largest first, which of each kind is profiled.

        Raises:
            ConnectionError: it has named none yet.
        """

        def place(node: Mapping[str, Any]) -> tuple[float, float, str]:
            return -node["Resources"].get("GPU", 0), -node["Resources"].get("CPU", 0), node["NodeID"]

        try:
            self._machines = sorted(nodes(), key=place)
        except ConnectionError:
            if not self._machines:
                raise
        return self._machines

    def _check_room(self, most: int) -> None:
        """Raise where no machines have room for a trial on the most devices that a trial may have."""
        split = self._split(most)
        kinds = {*self._kinds_of_machines().values()} if split is not None and len(split) > 1 else set()
        if split is None:
            needed = _words(self._bundle(most))
            together = " on one machine" if most == 1 else ", on one machine or over several"
            machines = sorted({_words(node["Resources"]) for node in self._nodes()})
            message = (
                f"devices: a trial on {most} device{'s' * (most > 1)} needs {needed}{together}; there are machines with "
                f"{' and with '.join(machines)}. Lower devices.per_trial or devices.cpus, or name another cluster.address."
            )
        elif len(kinds) > 1 and self._devices.accelerator_type is None:
            message = (
                f"devices.accelerator_type: a trial on {most} devices is spread over several machines, which have to be of one "
                f"kind; there are {', '.join(sorted(kind or 'machines without a name' for kind in kinds))}. Name one of them."
            )
        else:
            return
        self.__exit__()
        raise ClusterError(message)

    def _check_share(self) -> None:
        try:
            self._devices.check_share(self.device)
        except StudyFileError:
            self.__exit__()
            raise

    @property
    def _bundle(self) -> Callable[[int], dict[str, float]]:
        """Resources of so many of a trial's devices: those of one machine."""
        share = self._devices.share if self.device == "gpu" else 0.0
        return partial(_bundle, cores=self.cores, gpus=share, kind=self._devices.accelerator_type)

    def _rooms(self) -> dict[str, int]:
        """Devices of each live machine, or trials where several share one, by the machine's id."""
        needed = self._bundle(1).items()
        return {
            node["NodeID"]: min(int(node["Resources"].get(name, 0) / amount + 1e-6) for name, amount in needed)
            for node in self._nodes()
        }

    def _split(self, devices: int) -> tuple[int, ...] | None:
        """How many of a trial's devices are on each machine; None while the machines have no room for them."""
        return shares(devices, self._rooms().values())

    def _rooms_of_kinds(self) -> dict[str, list[int]]:
        """Devices of the live machines of each kind."""
        rooms, of_kind = self._rooms(), dict[str, list[int]]()
        for machine, kind in self._kinds_of_machines().items():
            of_kind.setdefault(kind, []).append(rooms.get(machine, 0))
        return of_kind

    def placed(self, devices: int) -> tuple[int, ...]:
        """How many of a trial's devices are on each machine, all of one kind; fewer in all where no kind has that many."""
        if devices == 1:
            return (1,)
        of_kind = list(self._rooms_of_kinds().values())
        most = min(devices, max(map(sum, of_kind), default=0))
        splits = [split for rooms in of_kind if most and (split := shares(most, rooms))]
        return min(splits, key=len, default=(devices,))

    @property
    def owns_workers(self) -> bool:
        """Whether this process started Ray, rather than joined one."""
        return self._ray.started_here

    @property
    def slots(self) -> int:
        """Trials that fit now; machines may join and leave."""
        rooms, fewest = self._rooms().values(), min(self._devices.counts)
        fit = trials_that_fit(shares(fewest, rooms) or (fewest,), rooms)
        return min(fit, self._cluster.trials_at_once or fit)

    @property
    def kinds(self) -> tuple[str, ...]:
        most, of_kind = max(self._devices.counts), self._rooms_of_kinds()
        trials = {kind: trials_that_fit(split, there) for kind, there in of_kind.items() if (split := shares(most, there))}
        return tuple(sorted(trials, key=lambda kind: (-trials[kind], kind)))

    def _kinds_of_machines(self) -> dict[str, str]:
        """The kind of every live machine's devices: Ray's name, and their memory where machines of that name differ in it."""
        live = self._nodes()
        kinds = {node["NodeID"]: kind_of(node) for node in live}
        named: dict[str, list[str]] = {}
        for node in live:
            if node["Resources"].get("GPU") and kind_of(node):
                named.setdefault(kind_of(node), []).append(node["NodeID"])
        alike = [machines for machines in named.values() if len(machines) > 1]
        if unknown := [one for machines in alike for one in machines if one not in self._gpu_memories]:
            self._gpu_memories |= _gpu_memories(unknown)
        for machines in alike:
            memories = {one: self._gpu_memories.get(one, "") for one in machines}
            if len({*memories.values()} - {""}) > 1:
                kinds |= {one: f"{kinds[one]} {memory}" for one, memory in memories.items() if memory}
        return kinds

    def device_id(self, kind: str = "") -> str:
        split = self._split(max(self._devices.counts)) or ()
        spread = f" over {split}" if len(split) > 1 else ""
        return f"{self.device} {platform.machine()} {_KIND + kind if kind else platform.processor()}{spread}"

    @contextlib.contextmanager
    def _somewhere(self, devices: int, kind: str = "") -> Iterator[tuple[Any, tuple[int, ...]]]:
        """A Ray scheduling strategy for a task on so many devices, and how many of them each machine has."""
        rooms, kinds = self._rooms(), self._kinds_of_machines()
        here = [machine for machine, own in kinds.items() if own == kind]
        split = shares(devices, [rooms.get(machine, 0) for machine in here])
        if split is None:
            raise ClusterError(f"the last machine with {kind or 'a device'} left before its device was profiled")
        if len(split) == 1:
            place = next(machine for machine in here if rooms.get(machine, 0) >= devices)
            yield NodeAffinitySchedulingStrategy(place, soft=False), split
            return
        group = placement_group([self._bundle(share) for share in split], strategy="PACK")
        try:
            yield PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True), split
        finally:
            remove_placement_group(group)

    def profile(self, reference: str, request: ProfileRequest, kind: str = "") -> DeviceProfile:
        while True:
            try:
                return self._profile(reference, request, kind)
            except _RayLostError as error:
                if why := self._ray.renew(str(error)):
                    raise ClusterError(why) from None

    def _profile(self, reference: str, request: ProfileRequest, kind: str) -> DeviceProfile:
        """The same; one of Ray's processes may die meanwhile.

        Raises:
            _RayLostError: it did.
        """
        most = max(request.devices)
        with self._somewhere(most, kind) as (place, split):
            profile = ray.remote(
                num_cpus=self._bundle(split[0])["CPU"],
                # Alone: neighbours on the same GPU would be in its times.
                num_gpus=split[0] if self.device == "gpu" else 0,
                max_retries=0,
                # Its process ends with it: Ray would give it to no attempt, and its memory is wanted by those.
                max_calls=1,
                scheduling_strategy=place,
            )(profile_here)
            try:
                answer = self._answer(profile.remote(reference, request.to_dict(), split))
            except RayError as error:
                if lost := self._ray.lost(now=True):
                    raise _RayLostError(lost) from None
                raise ClusterError(
                    f"the worker that profiled the task died: {str(error).splitlines()[0]} (details in {self._log_file})"
                ) from error
        if "faults" in answer:
            raise StudyFileError([Fault(key, message) for key, message in answer["faults"]])
        if "error" in answer:
            raise TaskError(answer["error"])
        return DeviceProfile.from_dict(answer)

    def _answer(self, asked: Any) -> Any:
        while True:
            try:
                return ray.get(asked, timeout=_WAKE_S)
            except GetTimeoutError:
                if lost := self._ray.lost():
                    raise _RayLostError(lost) from None

    def attempt(self, reference: str, setup: TrialSetup) -> Iterator[Measurement | Outcome]:
        split = self.placed(setup.plan.devices)
        needed = self._bundle(split[0])
        kinds = {name: amount for name, amount in needed.items() if name not in ("CPU", "GPU")}
        group = placement_group([self._bundle(share) for share in split], strategy="PACK")
        task = ray.remote(
            num_cpus=needed["CPU"],
            num_gpus=needed.get("GPU", 0),
            resources=kinds,
            num_returns="streaming",
            max_retries=0,
            max_calls=1,  # what it holds on a GPU is freed with its process
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True),
        )(attempt_here)
        reports: Any = task.remote(reference, setup.to_dict(), split)
        try:
            for report in reports:
                of = ray.get(report)
                yield Measurement.from_dict(of["measurement"]) if "measurement" in of else Outcome.from_dict(of["outcome"])
        except RayError as error:
            yield Outcome("interrupted", f"its worker died: {str(error).splitlines()[0]} (details in {self._log_file})")
        finally:
            with contextlib.suppress(RayError, ValueError, TypeError):
                ray.cancel(reports, force=True)
            with contextlib.suppress(RayError):
                remove_placement_group(group)

    def run(self, study: StudyRun) -> None:
        while lost := self._run(study):
            # Of what ran on it nothing is left.
            study.lose_attempts(lost)
            if why := self._ray.renew(lost, lambda: bool(study.stop_reason or study.leaving)):
                study.stop_reason = study.stop_reason or study.leaving
                if not study.stop_reason:
                    study.fail(why)
                break
        if study.crashed is not None:
            raise study.crashed

    def _run(self, study: StudyRun) -> str:
        """Run attempts until there are none, or Ray is lost; returns what of it."""
        searcher, bundle = StudySearcher(study, self, self._cluster.trials_at_once), self._bundle
        with tempfile.TemporaryDirectory(prefix="bsearch-tune-", ignore_cleanup_errors=True) as folder:
            tuner = tune.Tuner(
                tune.with_resources(
                    AttemptTrainable,  # sent to the workers with this function, and what it refers to
                    lambda config: tune.PlacementGroupFactory([bundle(share) for share in config["shares"]]),
                ),
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
                    scheduler=_InOrder(searcher),
                    num_samples=-1,
                    max_concurrent_trials=None,
                    reuse_actors=True,
                    trial_name_creator=lambda trial: trial.trial_id,
                    trial_dirname_creator=lambda trial: trial.trial_id,
                ),
                run_config=tune.RunConfig(
                    name="run",
                    storage_path=folder,
                    stop=_StudyStopper(study, searcher),
                    callbacks=[_StartAndEnd(searcher)],
                    verbose=0,
                    progress_reporter=_SilentReporter() if in_notebook() else None,  # Tune warns of it elsewhere
                    failure_config=tune.FailureConfig(max_failures=0),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                ),
            )
            with environment({"TUNE_GLOBAL_CHECKPOINT_S": "3600", "TUNE_MAX_PENDING_TRIALS_PG": str(_MOST_PENDING)}):
                return self._fit(tuner, study, searcher)

    def lost_ray(self) -> str:
        """What of Ray is gone; empty while it works."""
        return self._ray.lost(now=True)

    def leave(self) -> bool:
        # `_fit` asks them, and not from a signal handler.
        return self._cluster.checkpoints is not None and sys.platform == "linux"

    def _ask_to_leave(self, processes: Mapping[str, tuple[str, int]], asked: set[str]) -> None:
        """Ask those attempts to leave that were not asked before."""
        of_machine: dict[str, list[int]] = {}
        for trial, (address, process) in processes.items():
            if trial not in asked:
                of_machine.setdefault(address, []).append(process)
                asked.add(trial)
        own = ray.util.get_node_ip_address()
        of_machine[own] = ask_to_leave(of_machine.get(own, []))
        for node in self._nodes() if any(of_machine.values()) else ():
            if there := of_machine.get(node["NodeManagerAddress"]):
                place: Any = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=place)(ask_to_leave).remote(there)

    def _fit(self, tuner: tune.Tuner, study: StudyRun, searcher: StudySearcher) -> str:
        """Run Tune in a second thread, so that this one can handle signals and check on Ray; returns what of it is gone."""
        failed: list[BaseException] = []

        def fit() -> None:
            try:
                tuner.fit()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=fit, daemon=True, name="bsearch-tune")
        thread.start()
        asked: set[str] = set()
        asked_at = time.monotonic()
        while thread.is_alive():
            thread.join(_WAKE_S)
            if lost := self._ray.lost():
                searcher.close()
                self._ray.keep_away()
                thread.join(_TUNE_ENDS_S)
                return lost
            if study.leaving and not study.stop_reason:
                if time.monotonic() - asked_at > _ASKED_AGAIN_S:
                    asked_at = time.monotonic()
                    asked.clear()
                with contextlib.suppress(RayError, ConnectionError):
                    self._ask_to_leave(dict(searcher.processes), asked)
                if not study.trains:
                    study.stop_reason = study.leaving
        if failed and (lost := self._ray.lost(now=True)):
            return lost
        if failed:
            raise failed[0]
        return ""


def _bundle(devices: int, cores: int, gpus: float, kind: str | None) -> dict[str, float]:
    needed: dict[str, float] = {"CPU": cores * devices}
    if gpus:
        needed["GPU"] = devices * gpus
    if kind is not None:
        needed[_KIND + kind] = _KIND_AMOUNT
    return needed


def _gpu_memories(machines: Sequence[str]) -> dict[str, str]:
    """The memory of each machine's GPUs, such as 80GB; without the machines that do not answer."""

    def placed(machine: str) -> Any:
        strategy: Any = NodeAffinitySchedulingStrategy(machine, soft=False)
        return ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(gpu_memory)

    asked = {machine: placed(machine).remote() for machine in machines}
    memories: dict[str, str] = {}
    for machine, answer in asked.items():
        with contextlib.suppress(RayError):
            memories[machine] = ray.get(answer, timeout=_ANSWERED_S)
    return memories


def _cached_for(ask: Callable[[], int], seconds: float) -> Callable[[], int]:
    """The function `ask` with its answer cached for `seconds`."""
    known, at = 0, -math.inf

    def answer() -> int:
        nonlocal known, at
        if time.monotonic() - at > seconds:
            with contextlib.suppress(RayError, ConnectionError):
                known = ask()
            at = time.monotonic()
        return known

    return answer


def _words(resources: Mapping[str, float]) -> str:
    """The CPUs, GPUs and kind of device among a machine's resources, as text."""
    counted = [f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU") if resources.get(name) or name == "CPU"]
    return ", ".join([*counted, *(name.removeprefix(_KIND) for name in sorted(resources) if name.startswith(_KIND))])


__all__ = ["StudySearcher", "TuneRunner"]
