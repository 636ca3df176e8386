"""The Runner over Ray Tune: a thin Searcher that hands out attempts; `worker` holds the Trainable that runs them.

One Tune trial is one attempt at a trial of ours. Tune schedules them and keeps their processes alive from one to
the next; what to try, what an end means and when it is over stays with `StudyRun`, in the driver's database.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import secrets
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

# Before Ray is imported: it reads these once.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("TUNE_WARN_THRESHOLD_S", "60")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# A Ray that we start listens on the loopback alone. `_node_ip_address="127.0.0.1"` would not do it, for Ray replaces it by the
# machine's own address; this switch does, named after the systems where it is the default. Joining a cluster takes that one's.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Ctrl-C is ours (search.driver): Tune would stop by itself and tell nobody.
os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"

import ray
from ray import tune
from ray.exceptions import RayError
from ray.tune.search import Searcher

from ..objectives.data_parallel import environment
from ..search.study_run import StudyRun
from ..spaces.device import DeviceProfile, ProfileRequest
from ..spaces.errors import Fault, LauncherError, ObjectiveError, StudyFileError
from ..spaces.study import Cluster, Devices
from ..spaces.trial import Measurement, Outcome
from .worker import AttemptTrainable, profile_here


class StudySearcher(Searcher):
    """Tune's view of a StudyRun: gives out attempts, and passes on what comes back."""

    def __init__(self, study: StudyRun, task: str, slots: int) -> None:
        super().__init__(metric=None, mode=None)
        self._study, self._task, self._slots = study, task, slots
        self._numbers: dict[str, int] = {}
        self._told: dict[str, str] = {}  # outcomes that came before their trial's end

    def suggest(self, trial_id: str) -> Any:
        """A Tune config, `FINISHED`, or None for "ask again later"."""
        # Tune may ask for all its slots at once, so that their processes start together, and one ahead; a suggestion
        # made earlier than that would know less than it could.
        if len(self._numbers) > self._slots:
            return None
        setup = self._guarded(self._study.next_attempt)
        if setup is None:
            return Searcher.FINISHED
        if setup == "wait":
            return None
        self._numbers[trial_id] = setup.number
        return {"task": self._task, "setup": json.dumps(setup.to_dict()), "devices": setup.plan.devices}

    def hopeless(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Pass a measurement on; True where its attempt is to be ended there."""
        if "measurement" not in result or trial_id not in self._numbers or trial_id in self._told:
            return False
        measurement = Measurement.from_dict(json.loads(result["measurement"]))
        go_on = self._guarded(lambda: self._study.measured(self._numbers[trial_id], measurement))
        if not go_on and not self._study.stopping:
            self._told[trial_id] = json.dumps(Outcome("stopped").to_dict())
        return not go_on

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        if "outcome" in result:
            self._told[trial_id] = result["outcome"]

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        number = self._numbers.pop(trial_id, None)
        if number is None:
            return
        told = self._told.pop(trial_id, None) or (result or {}).get("outcome")
        if told:
            outcome = Outcome.from_dict(json.loads(told))
            self._guarded(lambda: self._study.ended(number, outcome))
        elif error and not self._study.stopping:
            self._guarded(lambda: self._study.ended(number, Outcome("interrupted", "its worker died")))
        # What the study's stop cut off is swept by the driver.

    def _guarded(self, call: Any) -> Any:
        """Tune logs what a searcher raises and goes on; ours is to stop the study and be told to the user."""
        try:
            return call()
        except Exception as error:
            self._study.crash(error)
            return None

    def set_search_properties(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the storage is the only truth."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing, likewise."""

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its searcher to restore from; a database connection cannot travel


class _StudyStopper(tune.Stopper):
    """Ends an attempt that the study gives up, and Tune's run when the study stops, whoever stopped it.

    Tune shows every result here first, and one that ends a trial to nobody else before the trial's end.
    """

    def __init__(self, study: StudyRun, searcher: StudySearcher) -> None:
        self._study, self._searcher = study, searcher

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return self._searcher.hopeless(trial_id, result)

    def stop_all(self) -> bool:
        return bool(self._study.stopping)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune saves its stopper every few seconds; a study cannot and need not be pickled


class TuneRunner:
    """Runs attempts on Ray: a context manager that starts a local one, or joins the one the study names.

    Args:
        log_file: where Ray's own messages go.

    Raises:
        LauncherError: Ray cannot be started or reached, or has no device of the asked kind.
    """

    def __init__(self, cluster: Cluster, devices: Devices, log_file: Path) -> None:
        self._cluster, self._devices, self._log_file = cluster, devices, log_file
        self.device: Literal["cpu", "gpu"] = "cpu"
        self._mine = False

    def __enter__(self) -> TuneRunner:
        _log_to(self._log_file)
        address = self._cluster.address
        if address == "local":
            address = os.environ.get("RAY_ADDRESS", "local")
        threads = str(self._devices.cpus)
        quiet: dict[str, Any] = {
            "logging_level": logging.WARNING,
            "log_to_driver": False,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}},
        }
        try:
            if address == "auto":
                with contextlib.suppress(ConnectionError):
                    ray.init(address="auto", **quiet)
            elif address != "local":
                _knock(address)
                ray.init(address=address, **quiet)
            if not ray.is_initialized():
                _take_token()
                # Ray counts the machine's cores; a study that wants more at once than that says so itself.
                ray.init(address="local", include_dashboard=False, **quiet)
                self._mine = True
        except (RayError, ConnectionError, RuntimeError, ValueError, OverflowError, OSError) as error:
            raise LauncherError(
                f"cluster.address {address}: Ray could not be {'started' if address == 'local' else 'reached'}: {error}. "
                f"Its own messages are in {self._log_file}."
            ) from error
        self.device = self._devices.kind_with(ray.cluster_resources().get("GPU", 0))
        if not self._fits:
            most = max(self._devices.counts)
            needed = _words(self._resources(most))
            machines = sorted({_words(node["Resources"]) for node in ray.nodes() if node["Alive"]})
            self.__exit__()
            raise LauncherError(
                f"devices: a trial on {most} device{'s' * (most > 1)} needs {needed} on one machine; there are machines with "
                f"{' and with '.join(machines)}. Lower devices.per_trial or devices.cpus, or name another cluster.address."
            )
        return self

    def __exit__(self, *error: object) -> None:
        if ray.is_initialized():
            ray.shutdown()

    def _resources(self, devices: int) -> dict[str, float]:
        """What a trial on so many devices needs: one bundle, for its ranks talk inside one machine."""
        return {"CPU": self._devices.cpus * devices, **({"GPU": devices} if self.device == "gpu" else {})}

    @property
    def _fits(self) -> bool:
        """Whether some machine has room for the largest trial."""
        needed = self._resources(max(self._devices.counts)).items()
        return any(
            all(node["Resources"].get(name, 0) >= amount for name, amount in needed) for node in ray.nodes() if node["Alive"]
        )

    @property
    def slots(self) -> int:
        needed = self._resources(min(self._devices.counts)).items()
        have = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fit = sum(min(int(one.get(name, 0) // amount) for name, amount in needed) for one in have)
        return min(fit, self._cluster.trials_at_once or fit)

    @property
    def device_id(self) -> str:
        kinds = sorted(name for name in ray.cluster_resources() if name.startswith("accelerator_type:"))
        return f"{self.device} {platform.machine()} {' '.join(kinds) or platform.processor()}"

    def profile(self, reference: str, request: ProfileRequest) -> DeviceProfile:
        # One call a process: whatever runs out of memory there leaves nothing behind for the trials.
        needed = self._resources(max(request.devices))
        profile = ray.remote(num_cpus=needed["CPU"], num_gpus=needed.get("GPU", 0), max_retries=0, max_calls=1)(profile_here)
        try:
            answer = ray.get(profile.remote(reference, request.to_dict()))
        except RayError as error:
            raise LauncherError(
                f"the worker that tried the training code died: {str(error).splitlines()[0]} (details in {self._log_file})"
            ) from error
        if "faults" in answer:
            raise StudyFileError([Fault(key, message) for key, message in answer["faults"]])
        if "error" in answer:
            raise ObjectiveError(answer["error"])
        return DeviceProfile.from_dict(answer)

    def run(self, study: StudyRun) -> None:
        searcher = StudySearcher(study, study.spec.task, self.slots)
        with tempfile.TemporaryDirectory(prefix="bsearch-tune-", ignore_cleanup_errors=True) as folder:
            tuner = tune.Tuner(
                tune.with_resources(
                    AttemptTrainable, lambda config: tune.PlacementGroupFactory([self._resources(config["devices"])])
                ),
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
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
                    verbose=0,
                    failure_config=tune.FailureConfig(max_failures=0),
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                ),
            )
            with environment({"TUNE_GLOBAL_CHECKPOINT_S": "3600", "TUNE_MAX_PENDING_TRIALS_PG": str(self.slots + 1)}):
                tuner.fit()
        if study.crashed is not None:
            raise study.crashed


def _words(resources: Mapping[str, float]) -> str:
    """The CPUs and GPUs among a machine's resources."""
    return ", ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU") if resources.get(name) or name == "CPU")


def _take_token() -> None:
    """Give the Ray that this process starts a secret of its own, without which it answers nobody.

    Ray switches tokens on for clusters it starts, but would keep one for ever in the home folder. What the user's own
    environment says of tokens stays.
    """
    if not any(name.startswith("RAY_AUTH_") for name in os.environ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _knock(address: str) -> None:
    """Fail at once where nobody listens: Ray itself would wait for minutes.

    Raises:
        OSError: nothing answers there.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _log_to(file: Path) -> None:
    """Ray's chatter goes to a file: the terminal shows ours."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    for name in ("ray", "ray.tune", "ray.data", "ray._private"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler] if name == "ray" else []
        logger.propagate = name != "ray"


__all__ = ["StudySearcher", "TuneRunner"]
