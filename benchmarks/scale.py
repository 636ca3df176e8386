"""How far one driver scales: the cost of an ask after thousands of trials, and the utilisation of a simulated cluster.

    .venv/bin/python benchmarks/scale.py --part ask [--finished 100 1000 10000] [--running 8] [--samplers front tpe]
    .venv/bin/python benchmarks/scale.py --part cluster [--devices 8 64 256] [--factor 6] [--rounds 6] [--cores] [--postgres]
    .venv/bin/python benchmarks/scale.py --part soak [--trials 10000] [--cores]

ask: median and p95 milliseconds of a driver's operations in a study with the given numbers of finished and running trials (a
suggestion, a trial's beginning and its end, the front, reading all trials), on SQLite and, if a PostgreSQL server is
installed, on a private instance of it; `--postgres URL` uses another.

cluster: the real driver (sampler, database, Ray Tune) on a Ray cluster whose devices are just numbers. A trial sleeps for its
known time divided by the factor, reports five measurements, and records its own start and end; between them its device is busy.
The window is from when as many trials have started as there are devices until the last one starts. `idle s` is device time
between two trials, `gap` the same for a process that takes the next trial; `busy at 60` is 60 s / (60 s + idle). A real
worker is a process of about 300 MB: with more devices than `--processes`, that many processes serve all devices in
threads, through Ray's own placement groups and calls; only the number of processes differs.

soak: thousands of trials of two seconds on 64 such devices, and what the driver holds on the way: memory, open files, threads,
and the size of its database.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
import ray
import sqlalchemy as sa
import yaml
from bsearch.cluster import worker as ray_worker
from bsearch.cluster.tune import TuneRunner
from bsearch.objectives import trial
from bsearch.objectives.loading import load_task
from bsearch.objectives.task_code import task_code_hash
from bsearch.search.analysis.pareto import study_front
from bsearch.search.run.decisions.ending import Stage
from bsearch.search.run.decisions.suggestion_queue import from_one_fit
from bsearch.search.run.driver import run_study
from bsearch.search.run.study_run import StudyRun
from bsearch.search.store.tables import Tables
from bsearch.search.store.trials import Trials
from bsearch.search.suggest.samplers import suggester_of
from bsearch.search.suggest.space_transform import SearchSpace
from bsearch.spaces.laws.device import DeviceProfile, ProfileRequest
from bsearch.spaces.laws.step_time import StepTime
from bsearch.spaces.planning import known_taken
from bsearch.spaces.record import TrialFacts, TrialRecord, TrialResult
from bsearch.spaces.study.file import read_study
from bsearch.spaces.study.spec import StudySpec
from bsearch.spaces.trial import Measurement, TrialSetup
from ray.tune.execution import tune_controller

SAMPLES = 50_000
CORES = sorted(os.sched_getaffinity(0))
# A training of 5.5 epochs, the space's middle, takes 60 s.
LAW = StepTime(((1, 0.00034), (512, 0.109)), update_s=0.0005)
PROFILE = DeviceProfile(kind="gpu", device="simulated", training_set=SAMPLES, step_times=(LAW,))
# Seconds of a trial are divided by this.
FACTOR = "BSEARCH_SCALE_FACTOR"


def score(batch: int, rate: float, epochs: float, fraction: float = 1.0) -> float:
    """A synthetic accuracy: more steps learn more, and the best rate rises with the batch."""
    steps = fraction * epochs * SAMPLES / (batch + 300)
    away = math.log(rate) - math.log(0.02 * math.sqrt(batch / 256))
    return 0.9 * (1 - math.exp(-math.sqrt(steps / 100))) / (1 + 0.02 * away**2)


def train(setup: TrialSetup) -> Iterator[Measurement]:
    """Sleep for the time of the law, and report when and on which device."""
    seconds = LAW.train_s(setup.plan, setup.samples_budget, **setup.limits)
    thread, started = threading.current_thread().name, time.time()
    device = thread if thread.startswith("device") else str(os.getpid())
    parts = setup.training.evaluations
    for part in range(1, parts + 1):
        time.sleep(max(0.0, started + seconds / float(os.environ[FACTOR]) * part / parts - time.time()))
        accuracy = score(setup.effective_batch, setup.learning_rate, float(setup.epochs), part / parts)
        yield Measurement(
            samples_seen=setup.samples_budget * part // parts,
            elapsed_s=seconds * part / parts,
            accuracy=accuracy,
            facts={"started": started, "now": time.time(), "device": device},
        )


def study(folder: Path, **changes: Any) -> StudySpec:
    path = folder / "study.yaml"
    written = {
        "study": "scale",
        "task": f"{Path(__file__).resolve()}:train",
        "space": {
            "effective_batch": {"low": 16, "high": 4096},
            "reference_rate": {"low": 0.001, "high": 1.0, "at_batch": 256},
            "rule": ["linear", "sqrt"],
            "epochs": {"low": 4, "high": 7},
        },
        "training": {"samples": SAMPLES, "evaluations": 5},
        "devices": {"kind": "cpu"},
        **changes,
    }
    path.write_text(yaml.safe_dump(written))
    return read_study(path)


# The cost of an ask


def facts(parameters: dict[str, Any], *, ended: bool) -> dict[str, Any]:
    """As many facts as a driver writes, of the same kinds."""
    start = {
        "effective_batch": parameters["effective_batch"],
        "micro_batch": 64,
        "accumulation": 2,
        "devices": 1,
        "rule": parameters["rule"],
        "learning_rate": parameters["reference_rate"],
        "weight_decay": 0.0,
        "epochs": parameters["epochs"],
        "samples_budget": SAMPLES,
        "seed": 0,
        "train_s": 60.0,
        "train_s_source": "known",
    }
    end = {
        "outcome": "complete",
        "attempts": 1,
        "device_s": 60.0,
        "measured_train_s": 61.0,
        "samples_per_s": 820.0,
    }
    return start | end if ended else start


def fill(
    tables: Tables, name: str, space: SearchSpace, law: Callable[[Any], tuple[float, ...]], finished: int
) -> None:
    """Add finished trials, a fiftieth of them failed."""
    rng, trials = random.Random(finished), Trials(tables, name)
    for number in range(finished):
        parameters = {
            key: rng.choice(one.choices)
            if isinstance(one, optuna.distributions.CategoricalDistribution)
            else type(one.low)(one.low * (one.high / one.low) ** rng.random())
            for key, one in space.searched.items()
        }
        trials.begin(parameters, TrialFacts.of(facts(parameters, ended=False)))
        accuracy = score(parameters["effective_batch"], parameters["reference_rate"], parameters["epochs"])
        ended = TrialFacts.of(facts(parameters, ended=True))
        values = (*law(parameters), accuracy + 0.01 * rng.gauss(0, 1))
        failed = number % 50 == 49
        trials.end(number, TrialResult("error", ended) if failed else TrialResult("complete", ended, values))
    trials.commit()


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[str | None]:
    """A private PostgreSQL with its default durability; None if no server is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not found:
        yield None
        return
    data, binaries = folder / "pg", found[-1]
    data.mkdir()
    user: dict[str, Any] = {}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        user = {"user": "nobody", "group": "nogroup"}
        shutil.chown(data, "nobody", "nogroup")
        folder.chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    quiet: dict[str, Any] = {"check": True, "stdout": subprocess.DEVNULL, "cwd": data, **user}
    subprocess.run([binaries / "initdb", "-D", data / "db", "-U", "bench", "-A", "trust"], **quiet)
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={data}"
    subprocess.run(
        [binaries / "pg_ctl", "-D", data / "db", "-w", "-l", data / "log", "-o", options, "start"], **quiet
    )
    try:
        yield f"postgresql+psycopg://bench@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([binaries / "pg_ctl", "-D", data / "db", "-m", "immediate", "stop"], **quiet)


def timed(times: int, call: Callable[[], Any]) -> tuple[str, Any]:
    """Median and p95 in milliseconds, and the result of the last call."""
    taken, answer = [], None
    for _ in range(times):
        started = time.perf_counter()
        answer = call()
        taken.append(1e3 * (time.perf_counter() - started))
    return spread(taken), answer


def spread(taken: list[float]) -> str:
    last = statistics.quantiles(taken, n=20)[-1] if len(taken) > 1 else taken[0]
    return f"{statistics.median(taken):7.1f} {last:7.1f}"


def ask_part(options: argparse.Namespace, folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        databases = {"sqlite": f"sqlite:///{folder}/ask.db"}
        url = (
            options.postgres if options.postgres not in (None, "") else stack.enter_context(postgres(folder))
        )
        if url is None:
            print("PostgreSQL: skipped, no server is installed under /usr/lib/postgresql")
        else:
            databases["postgres"] = url
        columns = ("made, CPU", "begin", "end", "front", "read all")
        print(f"{'ms, median and p95, after trials':<42}" + "".join(f"{name:>16}" for name in columns))
        for finished in options.finished:
            for kind, database in databases.items():
                spec = study(folder, storage=database)
                for running in options.running:
                    for sampler in options.samplers:
                        name = f"{kind}, {finished}, {running} running, {sampler}"
                        print(
                            f"{name:<42}" + asks(spec, sampler, finished, running, options.asks), flush=True
                        )


def asks(spec: StudySpec, sampler: str, finished: int, running: int, times: int) -> str:
    """The rest of a row: the cost of a driver's calls in a study of its own."""
    law = known_taken(spec, {(): PROFILE}, None)
    assert law is not None and spec.storage is not None

    name, space = f"{sampler}-{finished}-{running}", SearchSpace.of(spec.domains())
    tables = Tables(spec.storage)
    tables.save_study(name, name, {}, {})
    tables.lock.acquire(name)
    with tables.buffered(name):
        fill(tables, name, space, law, finished)
        trials = Trials(tables, name)
        suggester = suggester_of(sampler, space, spec.objectives, trials=finished, known_seconds=law)
        waiting: list[TrialRecord] = []
        random_ones = suggester_of("random", space, spec.objectives)
        for _ in range(running):
            (proposal,) = random_ones.suggest(trials[:0])
            assert isinstance(proposal, dict)
            waiting.append(trials.begin(proposal, TrialFacts.of(facts(proposal, ended=False))))
        suggester.suggest(trials)  # the first reads everything
        taken: dict[str, list[float]] = defaultdict(list)

        def clocked(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
            started = time.perf_counter()
            answer = call(*arguments)
            taken[what].append(1e3 * (time.perf_counter() - started))
            return answer

        ahead, ready = from_one_fit(running), []  # as a driver has them made, in another thread
        for _ in range(times):
            if not ready:
                cpu_started = time.thread_time()
                ready = list(suggester.suggest(trials, ahead))
                taken["made, CPU"] += [1e3 * (time.thread_time() - cpu_started) / len(ready)] * len(ready)
            proposal = ready.pop(0)
            started = time.perf_counter()
            trial = trials.begin(proposal)
            trials.change(trial.number, TrialFacts.of(facts(proposal, ended=False)))
            trials.commit()
            taken["begin"].append(1e3 * (time.perf_counter() - started))
            waiting.append(trial)
            oldest = waiting.pop(0)
            parameters = dict(oldest.parameters)
            accuracy = score(
                parameters["effective_batch"], parameters["reference_rate"], parameters["epochs"]
            )
            ended = TrialFacts.of(facts(parameters, ended=True))
            started = time.perf_counter()
            trials.end(oldest.number, TrialResult("complete", ended, (*law(parameters), accuracy)))
            trials.commit()
            taken["end"].append(1e3 * (time.perf_counter() - started))
        finished_trials = [trial for trial in trials if trial.has_ended]
        for _ in range(3):
            clocked("front", study_front, finished_trials, spec.objectives)
            clocked("read all", tables.trials, name)
    return "".join(f" {spread(of_one)}" for of_one in taken.values())


# The utilisation of a cluster


class Host:
    """A process that serves several devices: Tune's calls to a worker process go to one of its threads."""

    def __init__(self, task: str) -> None:
        self._workers: dict[int, Any] = {}
        load_task(task)  # before threads do so concurrently
        # Only the main thread may set a handler. No trial here is asked to leave.
        signal.signal = signal.siginterrupt = lambda *_: None  # type: ignore[assignment]
        ray_worker.start_attempt = trial.attempt  # in this process
        gc.collect()
        gc.freeze()  # a worker collects garbage after each trial; here it would wait for the imports of the others

    def create(self, device: int, worker: type, arguments: dict[str, Any]) -> None:
        self._workers[device] = worker(**arguments)

    def call(self, device: int, method: str, *args: Any, **kwargs: Any) -> Any:
        threading.current_thread().name = f"device-{device}"
        return getattr(self._workers[device], method)(*args, **kwargs)


class HostedDevice:
    """Behaves to Tune like the actor handle of a worker process."""

    def __init__(self, host: Any, device: int, worker: type, arguments: dict[str, Any]) -> None:
        self._host, self._device = host, device
        self._created = host.create.remote(device, worker, arguments)

    def __getattr__(self, method: str) -> Any:
        host, device, created = self._host, self._device, self._created

        class Method:
            def remote(self, *args: Any, **kwargs: Any) -> Any:
                if method == "__ray_ready__":
                    return created
                if method == "__ray_terminate__":
                    return ray.put(None)
                return host.call.remote(device, method, *args, **kwargs)

        return Method()


class HostedClass:
    """Behaves to Tune like the actor class of a worker process."""

    __class__ = ray.actor.ActorClass  # type: ignore[assignment]

    def __init__(self, hosts: list[Any], worker: type) -> None:
        self._hosts, self._worker, self._created = hosts, worker, 0

    def options(self, **options: Any) -> HostedClass:
        return self

    def remote(self, **arguments: Any) -> HostedDevice:
        self._created += 1
        return HostedDevice(
            self._hosts[self._created % len(self._hosts)], self._created, self._worker, arguments
        )


@contextlib.contextmanager
def hosted(processes: int, devices: int, task: str) -> Iterator[None]:
    """Let a few processes be the workers on all devices."""
    each = math.ceil(devices / processes) + 4
    hosts = [ray.remote(num_cpus=0, max_concurrency=each)(Host).remote(task) for _ in range(processes)]
    classes: dict[type, HostedClass] = {}
    before, kill = tune_controller._ActorClassCache.get, ray.kill
    tune_controller._ActorClassCache.get = lambda self, worker: classes.setdefault(
        worker, HostedClass(hosts, worker)
    )
    ray.kill = lambda actor, **how: None if isinstance(actor, HostedDevice) else kill(actor, **how)
    try:
        yield
    finally:
        tune_controller._ActorClassCache.get, ray.kill = before, kill


class SimulatedRunner(TuneRunner):
    """The Ray Tune runner, on devices whose law is known."""

    def profile(self, reference: str, request: ProfileRequest, kind: str = "") -> DeviceProfile:
        return PROFILE


def cluster_part(options: argparse.Namespace, folder: Path) -> None:
    names = (
        "trials",
        "trials/s",
        "busy",
        "gap ms",
        "p95",
        "idle s",
        "busy at 60",
        "CPU ms",
        "ask ms",
        "made ms",
        "commits",
        "RSS MB",
        "processes",
        "s",
    )
    print(f"{'devices, seconds of a trial':<28}" + "".join(f"{name:>12}" for name in names))
    with contextlib.ExitStack() as stack:
        url = options.postgres
        if url == "":
            url = stack.enter_context(postgres(folder))
        for devices in options.devices:
            print(cluster_line(options, folder / str(devices), devices, url), flush=True)


@contextlib.contextmanager
def counted_commits(count: list[int]) -> Iterator[None]:
    """Count transactions that write."""
    writing: set[int] = set()

    def execute(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        if statement.split()[0] in ("INSERT", "UPDATE", "DELETE"):
            writing.add(id(connection))

    def commit(connection: Any) -> None:
        count[0] += id(connection) in writing
        writing.discard(id(connection))

    events = ("before_cursor_execute", execute), ("commit", commit)
    for event, hearer in events:
        sa.event.listen(sa.Engine, event, hearer)
    try:
        yield
    finally:
        for event, hearer in events:
            sa.event.remove(sa.Engine, event, hearer)


def soak_part(options: argparse.Namespace, folder: Path) -> None:
    devices = 64
    os.environ[FACTOR] = "30"
    spec = study(folder, study="soak", budget={"trials": options.trials}, stopping=options.stopping)
    print(f"{'trials':>8}{'s':>8}{'RSS MB':>8}{'files':>8}{'threads':>8}{'database MB':>13}")

    def watch(run: StudyRun) -> None:
        def look() -> None:
            step = max(options.trials // 20, 1)
            shown = 0
            while run.ending.stage < Stage.STOPPED and shown < options.trials:
                if run.ended.counted >= shown + step:
                    shown = int(run.ended.counted) // step * step
                    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
                    threads = threading.active_count()
                    size = sum(path.stat().st_size for path in folder.glob("*.db*")) / 1e6
                    row = f"{shown:>8}{run.elapsed_s():>8.0f}{usage()[1]:>8.0f}{files:>8}{threads:>8}{size:>13.1f}"
                    print(row, flush=True)
                time.sleep(0.2)

        threading.Thread(target=look, daemon=True).start()

    with simulated_cluster(options, devices, spec, folder) as runner:
        result = run_study(spec, nullcontext(runner), task_code_hash(spec.task), watch=watch)
    states = defaultdict(int)
    for record in result.study.records:
        states[record.outcome] += 1
    print(
        f"{result.elapsed_s:.0f} s, {options.trials / result.elapsed_s:.1f} trials/s, outcomes {dict(states)} {result.failure}"
    )


@contextlib.contextmanager
def simulated_cluster(
    options: argparse.Namespace, devices: int, spec: StudySpec, folder: Path
) -> Iterator[SimulatedRunner]:
    """A Ray with so many devices, and its runner."""
    if options.cores:
        place_on(1)  # Ray's processes inherit it
    ray.init(
        address="local", num_cpus=devices, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    if options.cores:
        place_on(0)
    processes = (
        contextlib.nullcontext()
        if devices <= options.processes
        else hosted(options.processes, devices, spec.task)
    )
    with SimulatedRunner(spec.cluster, spec.devices, folder / "ray.log") as runner, processes:
        yield runner
    ray.shutdown()


def usage() -> tuple[float, float]:
    times = os.times()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return times.user + times.system, pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def place_on(core: int) -> None:
    """Run every thread of this process on this one of its cores."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {CORES[core]})


def cluster_line(options: argparse.Namespace, folder: Path, devices: int, url: str | None) -> str:
    folder.mkdir()
    os.environ[FACTOR] = str(options.factor)
    spec = study(
        folder,
        study=f"scale-{devices}",
        budget={"trials": round(options.rounds * devices)},
        stopping=options.stopping,
        sampler=options.samplers[0],
        **({"storage": url} if url else {}),
    )
    waits_s: list[float] = []
    written = [0]
    used: list[
        tuple[float, float]
    ] = []  # CPU seconds and resident megabytes of this process, before and after
    watched: list[StudyRun] = []

    def watch(run: StudyRun) -> None:
        take = run.suggestions.take

        def clocked(*what: Any, **which: Any) -> Any:
            started = time.perf_counter()
            suggestion = take(*what, **which)
            if not isinstance(suggestion, str):
                waits_s.append(time.perf_counter() - started)
            return suggestion

        run.suggestions.take = clocked  # type: ignore[method-assign]
        watched.append(run)
        used.append(usage())

    with simulated_cluster(options, devices, spec, folder) as runner, counted_commits(written):
        result = run_study(spec, nullcontext(runner), task_code_hash(spec.task), watch=watch)
    used.append(usage())
    if result.failure:
        return f"{devices} devices: {result.failure}"
    made, asks_s = watched[0].suggestions.asks, watched[0].suggestions.asks_s
    reports = [record.facts.extra for record in result.study.records if record.counts]
    spans = sorted((report["started"], report["now"]) for report in reports)
    of_process: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for report in reports:
        of_process[report["device"]].append((report["started"], report["now"]))
    # From when every device has started its first trial until the last trial starts.
    start, end = spans[devices - 1][0], spans[-1][0]
    busy_s = sum(max(0.0, min(b, end) - max(a, start)) for a, b in spans)
    later = len(spans) - devices
    idle_s = (devices * (end - start) - busy_s) / later
    gaps = [
        1e3 * (after[0] - before[1]) for one in of_process.values() for before, after in pairwise(sorted(one))
    ]
    length_s = statistics.fmean(b - a for a, b in spans)
    name = f"{devices}{' hosted' if devices > options.processes else ''}, {length_s:.1f} s"
    median, p95 = spread(gaps).split()
    figures = (
        str(len(spans)),
        f"{later / (end - start):.2f}",
        f"{busy_s / (end - start) / devices:.1%}",
        median,
        p95,
        f"{idle_s:.2f}",
        f"{60 / (60 + idle_s):.1%}",
        f"{1e3 * (used[1][0] - used[0][0]) / len(spans):.0f}",
        f"{1e3 * statistics.median(waits_s):.1f}",
        f"{1e3 * asks_s / max(made, 1):.0f}",
        f"{written[0] / len(spans):.1f}",
        f"{used[0][1]:.0f}-{used[1][1]:.0f}",
        str(len(of_process)),
        f"{end - start:.0f}",
    )
    return f"{name:<28}" + "".join(f"{one:>12}" for one in figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["ask", "cluster", "soak"], default="ask")
    parser.add_argument("--finished", nargs="+", type=int, default=[100, 1000])
    parser.add_argument("--running", nargs="+", type=int, default=[8])
    parser.add_argument("--samplers", nargs="+", default=["front"])
    parser.add_argument("--asks", type=int, default=30)
    parser.add_argument("--devices", nargs="+", type=int, default=[8])
    parser.add_argument("--factor", type=float, default=6.0, help="seconds of a trial are divided by this")
    parser.add_argument("--rounds", type=float, default=6.0, help="trials for each device")
    parser.add_argument("--trials", type=int, default=10_000, help="of the soak")
    parser.add_argument("--stopping", default="front", help="none: every trial trains to its end")
    parser.add_argument("--processes", type=int, default=8, help="real worker processes at most")
    parser.add_argument(
        "--cores", action="store_true", help="this process on a core of its own, Ray's on a second"
    )
    parser.add_argument(
        "--postgres", nargs="?", const="", help="a server's URL; without one, a private server"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        print(
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
        {"ask": ask_part, "cluster": cluster_part, "soak": soak_part}[options.part](options, Path(name))


if __name__ == "__main__":
    main()
