"""The Ray cluster that a study runs on: started on this machine, joined, or already connected; restarted or rejoined when one
of its own processes dies.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from . import ray_variables  # noqa: F401  # before Ray is imported

# isort: split

import ray
from ray._common.utils import get_default_system_temp_dir
from ray._private import auto_init_hook
from ray._private import parameter as ray_parameter
from ray._private import services as ray_services
from ray._private import worker as ray_worker
from ray.exceptions import RayError
from ray.tune.execution import class_cache

from ..objectives.machine.environment import environment
from ..objectives.machine.host import cores_here
from ..spaces.errors import ClusterError

# Ray's messages go to a file.
_QUIET: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
# What Tune sets for its workers.
_TUNE_VARIABLES = dict(class_cache.DEFAULT_ENV_VARS)
# What every worker of a Ray that we start imports as it starts: torch takes seconds, and workers start before they are needed.
_PRELOADED = ["ray.tune", "bsearch.objectives.trial"]
# Ray ends a worker that has been idle for this long.
_WAITS_S = 600
# The longest temporary folder with which Ray's socket paths still fit into Linux' 107 bytes.
_LONGEST_FOLDER = 107 - len("/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
# Used instead of a longer one, such as a job's own folder under Slurm.
_SHORT_FOLDER = "/tmp/ray"  # noqa: S108
# How often Ray's own processes are checked. Ray ends our process where a head comes back on the same port while a call to the
# old one is pending, so a dead head has to be noticed before that.
_CHECKED_S = 0.25
# Timeout of a connection to one of them.
_ANSWERS_WITHIN_S = 2.0
# A silent process of a cluster that we joined counts as lost after this time, before Ray itself would end our process.
_LOST_S = 30.0
# Restarts, within one run, of a Ray that we started.
RESTARTS = 5
# How long to wait for a cluster that we joined to come back.
WAITED_FOR_S = 3600.0
# How long Ray's processes may take to begin on an idle machine, and by how much longer at most on a busy one.
_BEGINS_S, _MOST_LOAD = 30.0, 10.0
# Ray shuts down within seconds, or never.
_ENDS_S = 40.0
# Timeout of a question to Ray's head.
_ASKED_S = 10.0
# The state of a live machine in the head's answer.
_ALIVE = 0


class RayConnection:
    """A connection to Ray. If this process is connected already, that connection is used, and left open.

    Args:
        address: `local` to start one here, `auto`, or host:port of a cluster that this machine is part of.
        threads: of a worker.
        gpus: the number of GPUs that a Ray started here manages, instead of those that it counts itself.
        log_file: where Ray's own messages go.
        say: reports restarts and waits to the user.

    Raises:
        ClusterError: Ray cannot be started or reached.

    Attributes:
        started_here: this process started it.
        found_here: this process was connected already.
        unused: not set while Tune's thread has outlived the wait for it, and may be in one of Ray's calls.
    """

    def __init__(
        self, address: str, threads: int, gpus: Callable[[], int], log_file: Path, say: Callable[[str], None]
    ) -> None:
        self._address = os.environ.get("RAY_ADDRESS", "local") if address == "local" else address
        self._threads, self._gpus, self._log_file, self._say = threads, gpus, log_file, say
        self._restarts = 0
        self.started_here = self._stuck = False
        self.unused = threading.Event()
        self.unused.set()
        _redirect_ray_logs(log_file)
        self.found_here = ray.is_initialized()
        self._connect()

    def _connect(self) -> None:
        address = self._address
        # Ray's own would end this process at once, with a dump of its stacks.
        on_sigterm = signal.getsignal(signal.SIGTERM)
        joined: dict[str, Any] = _QUIET | {"runtime_env": {"env_vars": _threads(self._threads)}}
        try:
            own = ray.get_runtime_context().gcs_address if self.found_here else ""
            if own and address in ("local", "auto", own):
                pass
            elif address == "auto":
                with contextlib.suppress(ConnectionError):
                    ray.init(address="auto", **joined)
            elif "://" in address:
                raise ValueError(
                    "expected host:port of a cluster that this machine is part of; from elsewhere, "
                    "`bsearch submit --launcher ray` sends the study there"
                )
            elif address != "local":
                _check_reachable(address)
                if own:
                    raise ConnectionError(f"this process is connected to another one already, at {own}")
                ray.init(address=address, **joined)
            if not ray.is_initialized():
                self._start()
                self.started_here = True
            node_id = ray.get_runtime_context().get_node_id()
            here = next((node for node in nodes() if node["NodeID"] == node_id), None)
            if here is None:
                raise ConnectionError("this machine has left it again")
        except (RayError, ConnectionError, RuntimeError, ValueError, OverflowError, OSError) as error:
            self.close()
            done, instead = (
                ("started", " --serial does without Ray.") if address == "local" else ("reached", "")
            )
            raise ClusterError(
                f"cluster.address {address}: Ray could not be {done}: {error}. "
                f"Its own messages are in {self._log_file}; `bsearch check` diagnoses it.{instead}"
            ) from error
        if on_sigterm is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)
        # Processes whose death ends this process's connection.
        self._needed = {
            "Ray's head": ray.get_runtime_context().gcs_address,
            "this machine's Ray": f"{here['NodeManagerAddress']}:{here['NodeManagerPort']}",
        }
        self._checked = time.monotonic()
        self._answered = dict.fromkeys(self._needed, self._checked)

    def _start(self) -> None:
        """Start Ray here, with one retry: one of its processes may be killed during startup."""
        folder = {}
        if len(usual := get_default_system_temp_dir()) > _LONGEST_FOLDER:
            self._say(f"Ray keeps its files in {_SHORT_FOLDER}: socket paths under {usual} would be too long")
            folder["_temp_dir"] = _SHORT_FOLDER
        for again in (False, True):
            try:
                with _stderr_to(self._log_file), _hangup_ignored():
                    start_local_ray(self._threads, num_cpus=cores_here(), num_gpus=self._gpus(), **folder)
            except Exception as error:  # Ray raises bare ones here
                with contextlib.suppress(Exception):
                    disconnect()
                if again:
                    raise RuntimeError(str(error)) from error
                self._say("Ray did not start: trying once more")
            else:
                return

    def keep_away(self) -> None:
        """Prevent a pending call from starting a new Ray, as any of Ray's functions would once the old one has died."""
        if hasattr(auto_init_hook, "enable_auto_connect"):
            auto_init_hook.enable_auto_connect = False

    def close(self) -> None:
        """Disconnect, and end what was started here."""
        if self._stuck:
            # Ray would block the interpreter's exit for a minute, and then abort it.
            atexit.register(_hard_exit)
        elif self.found_here or not ray.is_initialized():
            pass
        elif not self.unused.is_set():
            # The connection ends with this process, and what was started here with it.
            atexit.unregister(ray_worker.shutdown)
        else:
            disconnect()

    def lost(self, *, now: bool = False) -> str:
        """The Ray process that died, so that Ray has to be restarted or rejoined; empty while it works.

        Args:
            now: check at once, and do not wait for a silent process to answer again.
        """
        if not now and time.monotonic() - self._checked < _CHECKED_S:
            return ""
        self._checked = time.monotonic()
        patience_s = 0.0 if now or self.started_here else _LOST_S
        for name, address in self._needed.items():
            try:
                _check_reachable(address, timeout_s=_ANSWERS_WITHIN_S)
                self._answered[name] = time.monotonic()
            # The machine is up, the process is not; a restarted one would be another.
            except ConnectionRefusedError:
                return f"{name} at {address} is gone"
            except OSError as error:
                ours = error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
                if ours or time.monotonic() - self._answered[name] < patience_s:
                    continue
                return f"{name} at {address} does not respond"
        return ""

    def renew(self, lost: str, stops: Callable[[], bool] = lambda: False) -> str:
        """Restart Ray, or rejoin it once it is back; returns why that failed, or an empty string.

        Args:
            lost: the Ray process that died.
            stops: whether to give up.
        """
        if self.found_here:
            return f"{lost}. Start Ray again, then this study: it resumes after the finished trials"
        self._restarts += 1
        if self.started_here and self._restarts > RESTARTS:
            return f"{lost}, for the {self._restarts}th time in this run. Its own messages are in {self._log_file}"
        if self.started_here:
            self._say(f"{lost}: restarting Ray; what was interrupted will resume")
        else:
            self._say(f"{lost}: waiting for it to come back; what was interrupted will resume")
        # Disconnecting may block on the dead process.
        ending = threading.Thread(target=disconnect, daemon=True)
        ending.start()
        ending.join(_ENDS_S)
        if ending.is_alive():
            self._stuck = True
            return (
                f"{lost}, and Ray cannot be left. Run the study again: it resumes after the finished trials"
            )
        self.unused = threading.Event()  # Ray has been left
        self.unused.set()
        until = time.monotonic() + WAITED_FOR_S
        while not stops():
            try:
                self._connect()
            except ClusterError as error:
                if self.started_here or time.monotonic() > until:
                    return str(error)
                time.sleep(_CHECKED_S)
            else:
                self._say("Ray is back")
                return ""
        return lost


def disconnect() -> None:
    """Disconnect from Ray, and end the Ray processes that this process started.

    During shutdown Ray ends this process with exit code 1 if another thread drops a reference to one of its objects. Tune
    leaves such references in cycles, which the garbage collector may collect at any time, in any thread.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        ray.shutdown()
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _stderr_to(file: Path) -> Iterator[None]:
    """Context in which what Ray's libraries write to this process's standard error goes to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        with file.open("ab") as log:
            os.dup2(log.fileno(), 2)
        yield
    finally:
        if sys.stderr is not None:
            sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


@contextlib.contextmanager
def _hangup_ignored() -> Iterator[None]:
    """Context in which started processes ignore SIGHUP, so that workers can save checkpoints after their terminal closes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def start_local_ray(threads: int, **options: Any) -> None:
    """Start Ray on this machine, with workers that import torch as they start.

    Args:
        threads: of a worker.
        options: of `ray.init`.
    """
    _set_auth_token()
    # A worker serves what needs its environment alone. Ray starts some in advance, without variables of their own, so ours are
    # inherited instead, and Tune's with them.
    with environment(_threads(threads) | _TUNE_VARIABLES):
        # By default workers yield to every other process of the machine, which then makes their steps many times slower.
        # By default a second: then a worker that waits for the profile to end would be gone when trials start.
        config = {
            "preload_python_modules": _PRELOADED,
            "worker_niceness": 0,
            "idle_worker_killing_time_threshold_ms": 1000 * _WAITS_S,
        }
        with _unlike_rays_defaults():
            ray.init(address="local", include_dashboard=False, _system_config=config, **_QUIET, **options)
    class_cache.DEFAULT_ENV_VARS.clear()


@contextlib.contextmanager
def _unlike_rays_defaults() -> Iterator[None]:
    """Context in which the agent of a started Ray takes any free port, and a busy machine is waited for.

    By default every agent takes the same port. That of a killed driver keeps it for a minute, and that of another study as long
    as it runs; a new agent would retry for four seconds before it takes another port. And Ray gives its own processes 30 s to
    begin, however many others the cores are shared with.
    """
    parameters, get_node = ray_parameter.RayParams, ray_services.get_node
    until = time.monotonic() + _BEGINS_S * min(max(os.getloadavg()[0] / cores_here(), 1.0), _MOST_LOAD)

    def wait_for_node(*arguments: Any) -> Any:
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # it has not begun
                if time.monotonic() > until:
                    raise
                time.sleep(_CHECKED_S)

    ray_parameter.RayParams = partial(parameters, dashboard_agent_listen_port=0)  # type: ignore[assignment, misc]
    ray_services.get_node = wait_for_node
    try:
        yield
    finally:
        ray_parameter.RayParams, ray_services.get_node = parameters, get_node  # type: ignore[misc]


def _threads(count: int) -> dict[str, str]:
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(count))


def _hard_exit() -> None:
    """End the process with exit code 1, skipping other exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def nodes() -> list[dict[str, Any]]:
    """The live machines of the cluster, as `ray.nodes` describes them.

    Ray's own function ends the whole process where the cluster's head has been started anew.

    Raises:
        ConnectionError: the head does not answer.
    """
    client: Any = getattr(ray_worker.global_worker, "gcs_client", None)
    if not hasattr(client, "get_all_node_info"):
        return [node for node in ray.nodes() if node["Alive"]]
    try:
        found = client.get_all_node_info(timeout=_ASKED_S).values()
    except Exception as error:
        raise ConnectionError(f"Ray's head does not say which machines there are: {error}") from None
    return [
        {
            "NodeID": node.node_id.hex(),
            "NodeManagerAddress": node.node_manager_address,
            "NodeManagerPort": node.node_manager_port,
            "Resources": dict(node.resources_total),
        }
        for node in found
        if node.state == _ALIVE
    ]


def _set_auth_token() -> None:
    """Protect the Ray that this process starts with a token of its own.

    Ray enables tokens for clusters it starts, but would store one permanently in the home folder. Token settings in the
    user's own environment are kept.
    """
    if not any(name.startswith("RAY_AUTH_") for name in os.environ):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _check_reachable(address: str, timeout_s: float = 10.0) -> None:
    """Fail at once if nothing listens there: Ray itself would wait for minutes.

    Raises:
        OSError: nothing answers there.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()


def _redirect_ray_logs(file: Path) -> None:
    """Send Ray's log messages to a file, so that the terminal shows only ours."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    for name in ("ray", "ray.tune", "ray.data", "ray._private"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler] if name == "ray" else []
        logger.propagate = name != "ray"
    shown = sys.unraisablehook

    def unraisable(event: Any) -> None:
        """Log what Ray's finalizers raise after its head was restarted."""
        if type(event.exc_value).__module__.startswith("ray"):
            logging.getLogger("ray").warning("in a finalizer", exc_info=event.exc_value)
        else:
            shown(event)

    if getattr(shown, "__name__", "") != unraisable.__name__:
        sys.unraisablehook = unraisable
    # What Ray's head reports of other processes would go straight to the terminal.
    if hasattr(ray_worker, "print_to_stdstream"):
        ray_worker.print_to_stdstream = lambda data, *options, **named: logging.getLogger("ray").warning(
            "(%s) %s", data["pid"], "\n".join(data["lines"])
        )
