"""The Runner over Ray Tune: `searcher` hands out attempts, `worker` holds the Trainable that runs them."""

from __future__ import annotations

import contextlib
import platform
import re
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
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ..objectives.machine.environment import environment, working_folder
from ..objectives.machine.gpus import UsableGpus, usable_gpus
from ..search.report.terminal.live import in_notebook
from ..search.run.decisions.ending import Stage
from ..search.run.study_run import StudyRun
from ..spaces.errors import ClusterError, Fault, StudyFileError, TaskError
from ..spaces.laws.device import DeviceProfile, ProfileRequest
from ..spaces.study.cluster import Cluster
from ..spaces.study.devices import Devices
from ..spaces.trial import Measurement, Outcome, TrialSetup
from .connection import RayConnection, nodes
from .machines import KIND, resources_of, shares, trials_that_fit
from .searcher import LaunchOrder, SilentReporter, StartNotifier, StudySearcher, StudyStopper
from .tune_internals import nothing_analysed, report_no_callbacks, resources_counted_by
from .worker import AttemptTrainable, ask_to_leave, attempt_here, gpu_memory, gpus_here, kind_of, profile_here

# Timeout of a question about a machine's GPUs, including the start of a process there.
_ANSWERED_S = 60.0
# The main thread wakes this often to handle signals.
_WAKE_S = 0.1
# Pending trials that Tune may hold: effectively unlimited, since the searcher limits them.
_MOST_PENDING = 100_000
# Running attempts are asked to leave again after this time, since some may only just have begun.
_ASKED_AGAIN_S = 2.0
# How long Tune may take to notice that Ray died, before Ray is restarted in any case.
_TUNE_ENDS_S = 3.0


class _RayLostError(Exception):
    """One of Ray's own processes died."""


class TuneRunner:
    """Runs attempts on Ray: a context manager that starts a local cluster, or joins the one the study names.

    If this process is connected to Ray already, that Ray is used, and left running.

    Args:
        log_file: where Ray's own messages go.
        say: reports Ray's restarts, and the choice of devices, to the user.

    Raises:
        ClusterError: Ray cannot be started or reached, or has no device of the requested kind.
    """

    def __init__(
        self,
        cluster: Cluster,
        devices: Devices,
        log_file: Path,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._cluster, self._devices, self._log_file, self._say = cluster, devices, log_file, say
        self.device: Literal["cpu", "gpu"] = "cpu"
        self.cores = devices.cores("cpu")
        self._gpu_memories: dict[str, str] = {}  # by machine
        self._machines: list[dict[str, Any]] = []

    def __enter__(self) -> TuneRunner:
        here = UsableGpus if self._devices.kind == "cpu" else usable_gpus
        self._ray = RayConnection(
            self._cluster.address, self.cores, lambda: here().count, self._log_file, self._say
        )
        try:
            self.device = self._kind(here() if self._ray.started_here else None)
            self._devices.check_share(self.device)
        except StudyFileError:
            self.__exit__()
            raise
        of_gpus = [resources for node in self._nodes() if (resources := node["Resources"]).get("GPU")]
        cpus = [int(resources.get("CPU", 0) // resources["GPU"]) for resources in of_gpus]
        self.cores = self._devices.cores(self.device, min(cpus, default=1))
        self._check_room(max(self._devices.counts))
        return self

    def __exit__(self, *error: object) -> None:
        self._ray.close()

    def _nodes(self) -> list[dict[str, Any]]:
        """The live machines, or the last known ones while Ray does not answer; largest first: it is profiled for its kind.

        Raises:
            ConnectionError: Ray has not answered yet.
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
        """Raise if no machines have room for a trial on `most` devices, the largest number that a trial may use."""
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

    def _kind(self, usable: UsableGpus | None) -> Literal["cpu", "gpu"]:
        """The kind of the trials' devices; explains it where the user may expect another.

        Args:
            usable: the GPUs of this machine; None: those of the cluster's largest machine.

        Raises:
            StudyFileError: a GPU is required and cannot be used, or Ray promises more than there are.
        """
        largest = self._nodes()[0]
        of_ray = int(largest["Resources"].get("GPU", 0))
        if usable is None:
            usable = UsableGpus() if self._devices.kind == "cpu" else _gpus_of(largest["NodeID"], of_ray)
        reason = usable.reason
        if of_ray and not usable.gpus and not reason:
            reason = "no driver for one was found"
        kind, sentence = self._devices.kind_with(usable.count, reason, of_ray)
        falls_back = kind == "cpu" and self._devices.kind == "auto" and (of_ray or reason)
        if falls_back or of_ray < usable.count:
            self._say(sentence)
        return kind

    @property
    def _bundle(self) -> Callable[[int], dict[str, float]]:
        """The resources of a number of devices of one trial on one machine."""
        share = self._devices.share if self.device == "gpu" else 0.0
        return partial(resources_of, cores=self.cores, gpus=share, kind=self._devices.accelerator_type)

    def _rooms(self) -> dict[str, int]:
        """Devices of each live machine, or trials where several share a device, by the machine's id."""
        needed = self._bundle(1).items()
        return {
            node["NodeID"]: min(
                int(node["Resources"].get(name, 0) / amount + 1e-6) for name, amount in needed
            )
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
        """How many of a trial's devices are on each machine, all of one kind; fewer in total if no kind has that many."""
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
        trials = {
            kind: trials_that_fit(split, there)
            for kind, there in of_kind.items()
            if (split := shares(most, there))
        }
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
        if unknown := [
            machine for machines in alike for machine in machines if machine not in self._gpu_memories
        ]:
            self._gpu_memories |= _gpu_memories(unknown)
        for machines in alike:
            memories = {machine: self._gpu_memories.get(machine, "") for machine in machines}
            if len({*memories.values()} - {""}) > 1:
                kinds |= {
                    machine: f"{kinds[machine]} {memory}" for machine, memory in memories.items() if memory
                }
        return kinds

    def device_id(self, kind: str = "") -> str:
        split = self._split(max(self._devices.counts)) or ()
        spread = f" over {split}" if len(split) > 1 else ""
        return f"{self.device} {platform.machine()} {KIND + kind if kind else platform.processor()}{spread}"

    @contextlib.contextmanager
    def _somewhere(self, devices: int, kind: str = "") -> Iterator[tuple[Any, tuple[int, ...]]]:
        """A Ray scheduling strategy for a task on a number of devices, and how many of them each machine has."""
        rooms, kinds = self._rooms(), self._kinds_of_machines()
        here = [machine for machine, own in kinds.items() if own == kind]
        split = shares(devices, [rooms.get(machine, 0) for machine in here])
        if split is None:
            raise ClusterError(
                f"the last machine with {kind or 'a device'} left before its device was profiled"
            )
        if len(split) == 1 and len({*kinds.values()}) > 1:
            # Ray has no name for some kinds, so one machine is chosen.
            place = max(here, key=lambda machine: rooms.get(machine, 0))
            yield NodeAffinitySchedulingStrategy(place, soft=False), split
            return
        # A profile has whole GPUs.
        whole = [
            self._bundle(share) | ({"GPU": float(share)} if self.device == "gpu" else {}) for share in split
        ]
        group = placement_group(whole, strategy="PACK")
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
        """One attempt at `profile`.

        Raises:
            _RayLostError: one of Ray's processes died meanwhile.
        """
        most = max(request.devices)
        with self._somewhere(most, kind) as (place, split):
            profile = ray.remote(
                num_cpus=self._bundle(split[0])["CPU"],
                # A whole GPU: other tasks on it would distort the times.
                num_gpus=split[0] if self.device == "gpu" else 0,
                max_retries=0,
                # Its process ends with it: no attempt could reuse it, and they need its memory.
                max_calls=1,
                scheduling_strategy=place,
            )(profile_here)
            try:
                answer = self._answer(profile.remote(reference, request.to_dict(), split, working_folder()))
            except RayError as error:
                if lost := self._ray.lost(now=True):
                    raise _RayLostError(lost) from None
                raise ClusterError(
                    f"the worker that profiled the task died: {_words_of(error)} (details in {self._log_file}). Running out of "
                    "the machine's memory ends a worker like that: `bsearch check` says how much there is."
                ) from error
        if text := answer.get("traceback"):
            with contextlib.suppress(OSError), self._log_file.open("a", encoding="utf-8") as log:
                log.write(text)
        if "failed" in answer:
            raise ClusterError(f"profiling the task failed: {answer['failed']} (details in {self._log_file})")
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
            max_calls=1,  # its GPU memory is freed with its process
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, 0, placement_group_capture_child_tasks=True
            ),
        )(attempt_here)
        reports: Any = task.remote(reference, setup.to_dict(), split, working_folder())
        try:
            for report in reports:
                of = ray.get(report)
                yield (
                    Measurement.from_dict(of["measurement"])
                    if "measurement" in of
                    else Outcome.from_dict(of["outcome"])
                )
        except RayError as error:
            yield Outcome(
                "interrupted", f"its worker died: {str(error).splitlines()[0]} (details in {self._log_file})"
            )
        finally:
            with contextlib.suppress(RayError, ValueError, TypeError):
                ray.cancel(reports, force=True)
            with contextlib.suppress(RayError):
                remove_placement_group(group)

    def run(self, study: StudyRun) -> None:
        while lost := self._run(study):
            # Nothing of what ran on it survives.
            study.lose_attempts(lost)
            if why := self._ray.renew(lost, lambda: study.ending.stage >= Stage.LEAVING):
                if study.ending.stage >= Stage.LEAVING:
                    study.ending.reach(Stage.STOPPED, study.ending.why)
                else:
                    study.fail(why)
                break
        if study.crashed is not None:
            raise study.crashed

    def _run(self, study: StudyRun) -> str:
        """Run attempts until there are none, or Ray dies; returns which of its processes did."""
        report_no_callbacks()
        with tempfile.TemporaryDirectory(prefix="bsearch-tune-", ignore_cleanup_errors=True) as folder:
            searcher = StudySearcher(study, self, self._cluster.trials_at_once)
            tuner = tune.Tuner(
                trainable(self._bundle),
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
                    scheduler=LaunchOrder(searcher),
                    num_samples=-1,
                    max_concurrent_trials=None,
                    reuse_actors=True,
                    trial_name_creator=lambda trial: trial.trial_id,
                    trial_dirname_creator=lambda trial: trial.trial_id,
                ),
                run_config=tune.RunConfig(
                    name="run",
                    storage_path=folder,
                    stop=StudyStopper(study, searcher),
                    callbacks=[StartNotifier(searcher)],
                    verbose=0,
                    progress_reporter=SilentReporter()
                    if in_notebook()
                    else None,  # Tune warns of it elsewhere
                    failure_config=tune.FailureConfig(max_failures=0),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                ),
            )
            with environment(
                {"TUNE_GLOBAL_CHECKPOINT_S": "3600", "TUNE_MAX_PENDING_TRIALS_PG": str(_MOST_PENDING)}
            ):
                return self._fit(tuner, study, searcher)

    def lost_ray(self) -> str:
        """Which of Ray's processes died; empty while it works."""
        return self._ray.lost(now=True)

    def leave(self) -> bool:
        # `_fit` asks the attempts, since this runs in a signal handler.
        return self._cluster.checkpoints is not None and sys.platform == "linux"

    def _ask_to_leave(self, processes: Mapping[str, tuple[str, int]], asked: set[str]) -> None:
        """Ask the attempts that were not asked before to leave."""
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
        """Run Tune in a second thread, so that this one handles signals and checks Ray; returns which of its processes died."""
        failed: list[BaseException] = []
        # After an interrupted `Thread.join`, the thread counts as ended.
        ended = threading.Event()

        def fit() -> None:
            try:
                with resources_counted_by(nodes), nothing_analysed():
                    tuner.fit()
            except BaseException as error:
                failed.append(error)
            finally:
                ended.set()

        threading.Thread(target=fit, daemon=True, name="bsearch-tune").start()
        lost = ""
        try:
            if lost := self._until(ended, study, searcher):
                return lost
        finally:
            # After a second signal, or Ray's death: disconnecting while a thread is in one of Ray's calls would end this
            # process with SIGSEGV.
            if not ended.is_set():
                self._ray.unused = ended
                searcher.close(at_once=bool(lost) or not self._ray.found_here)
                self._ray.keep_away()
                ended.wait(_TUNE_ENDS_S)
        if failed and (lost := self._ray.lost(now=True)):
            return lost
        if failed:
            raise failed[0]
        return ""

    def _until(self, ended: threading.Event, study: StudyRun, searcher: StudySearcher) -> str:
        """Wait for the end of Tune's run; returns which of Ray's processes died meanwhile."""
        asked: set[str] = set()
        asked_at = time.monotonic()
        while not ended.wait(_WAKE_S):
            if lost := self._ray.lost():
                return lost
            if study.ending.stage is Stage.LEAVING:
                if time.monotonic() - asked_at > _ASKED_AGAIN_S:
                    asked_at = time.monotonic()
                    asked.clear()
                with contextlib.suppress(RayError, ConnectionError):
                    self._ask_to_leave(dict(searcher.processes), asked)
                if not study.running.train:
                    study.ending.reach(Stage.STOPPED, study.ending.why)
        return ""


def trainable(bundle: Callable[[int], dict[str, float]]) -> Any:
    """What Tune runs: attempts in their workers, each on its trial's resources.

    It is pickled with everything that it refers to, so it refers only to modules that workers have imported already, and not to
    this one, which imports the whole search.

    Args:
        bundle: the resources of a number of devices of one trial.
    """
    return tune.with_resources(
        AttemptTrainable,
        lambda config: tune.PlacementGroupFactory([bundle(share) for share in config["shares"]]),
    )


def _gpus_of(machine: str, of_ray: int) -> UsableGpus:
    """The GPUs that torch can use on a machine, without waiting for a free one; Ray's count if the machine does not answer."""
    place: Any = NodeAffinitySchedulingStrategy(machine, soft=False)
    try:
        asked: Any = ray.remote(num_cpus=0, max_calls=1, scheduling_strategy=place)(gpus_here).remote()
        return UsableGpus.from_dict(ray.get(asked, timeout=_ANSWERED_S))
    except RayError:
        return UsableGpus.promised(of_ray)


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


def _words_of(error: RayError) -> str:
    """The first line of Ray's error that says something, without its colours."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith("ray::")), type(error).__name__)


def _words(resources: Mapping[str, float]) -> str:
    """The CPUs, GPUs and kind of device among a machine's resources, as text."""
    counted = [
        f"{resources.get(name, 0):g} {name}s"
        for name in ("CPU", "GPU")
        if resources.get(name) or name == "CPU"
    ]
    return ", ".join(
        [*counted, *(name.removeprefix(KIND) for name in sorted(resources) if name.startswith(KIND))]
    )
