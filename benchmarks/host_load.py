"""Are known times still known where the machine's cores are shared, and is it said?

    .venv/bin/python benchmarks/host_load.py [--seconds 15] [--trials 10]

Digits' steps are timed as `bsearch run` does it, then trials with random batches train for real: alone, beside a busy process
on each core, and in a control group that is limited to half a core (as root, on Linux). Printed are measured / known - 1, what
was counted meanwhile, and the line that a study begins with. Last, the rounds timed alone are replayed as if the virtual
machine's host had taken 10 to 40 % of the cores in three of four: that cannot be made from within.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from bsearch.objectives.attempts import start_attempt
from bsearch.objectives.profiling.fit import with_uncertainty
from bsearch.objectives.profiling.step_time import Round, disturbed, fitted, measured_step_time, timed_rounds
from bsearch.search.run.opening import step_time_summary
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.laws.step_time import StepTime, timing_plans
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.study.file import study_from_dict
from bsearch.spaces.trial import Measurement
from step_time import busy, setup_of

TASK = "bsearch.objectives.digits:Digits"
SETUP = setup_of({})
PLANS = timing_plans(2, 1000)
GROUPS = Path("/sys/fs/cgroup/cpu")  # version 1; of version 2, the root itself
SPACE = {"effective_batch": {"low": 8, "high": 1000}, "reference_rate": 0.1, "rule": "linear", "epochs": 1}
SPEC = study_from_dict({"study": "load", "task": TASK, "space": SPACE})


@contextmanager
def neighbours() -> Iterator[None]:
    processes = [multiprocessing.Process(target=busy, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.kill()
        process.join()


@contextmanager
def half_a_core() -> Iterator[None]:
    """This process in a control group of its own, of either version."""
    root = GROUPS if GROUPS.is_dir() else Path("/sys/fs/cgroup")
    group = root / "bsearch-benchmark"
    group.mkdir(exist_ok=True)
    file, limit = ("cpu.cfs_quota_us", "50000") if root == GROUPS else ("cpu.max", "50000 100000")
    (group / file).write_text(limit)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    yield
    (root / "cgroup.procs").write_text(str(os.getpid()))
    group.rmdir()


def said(law: StepTime) -> str:
    return next(iter(step_time_summary(SPEC, [DeviceProfile("cpu", "", None, step_times=(law,))])))


def trained(law: StepTime, trials: int) -> Iterator[tuple[float, Measurement]]:
    """Known seconds and the last measurement of trainings of about 1.5 s, by what is known."""
    rng = random.Random(1)
    for _ in range(trials):
        batch = round(8 * (1000 / 8) ** rng.random())
        plan = BatchPlan(batch, rng.choice((1, 1, 2, 3)))
        samples = max(round(1.5 * batch / law.step_s(plan)), 3 * batch)
        trial = replace(SETUP, plan=plan, samples_budget=samples, smallest_micro_batch=2)
        *_, last, outcome = start_attempt(TASK, trial)
        assert isinstance(last, Measurement), outcome
        yield law.train_s(plan, samples, smallest_micro_batch=2), last


def without_others_s(last: Measurement) -> float:
    """Its training by the clock, without the waits for a core that no limit of its own explains."""
    waited_s, throttled_s = (float(last.facts.get(name, 0.0)) for name in ("waited_s", "throttled_s"))
    return last.elapsed_s - waited_s + throttled_s


def pressure_s() -> float:
    """Seconds in which some program of this machine waited for a core; not a number where nobody counts them."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0]) / 1e6
    except (OSError, IndexError, ValueError):
        return float("nan")


def measured(name: str, seconds: float, trials: int) -> list[Round]:
    """Print one condition; returns its rounds."""
    kept: list[Round] = []
    started, pressed_s = time.monotonic(), pressure_s()

    def keeping(rounds: Iterator[Round]) -> Iterator[Round]:
        for timed_round in rounds:
            kept.append(timed_round)
            yield timed_round

    with closing(timed_rounds(TASK, SETUP, PLANS)) as rounds:  # type: ignore[type-var]  # a generator
        law = measured_step_time(keeping(rounds), PLANS, seconds, on_cpu=True)
    ends = list(trained(law, trials))
    off = sorted(last.elapsed_s / known_s - 1 for known_s, last in ends)
    names = ("waited_s", "throttled_s", "stolen_share")
    facts = {
        fact: statistics.median(float(last.facts.get(fact, "nan")) for _, last in ends) for fact in names
    }
    alone = sorted(without_others_s(last) / known_s - 1 for known_s, last in ends)
    print(
        f"{name}: {len(kept)} rounds; measured / known - 1, and without waits for others (median, lowest, highest):"
    )
    print(
        "  "
        + ", ".join(
            f"{statistics.median(each):+.1%} ({each[0]:+.0%} to {each[-1]:+.0%})" for each in (off, alone)
        )
    )
    pressure = (pressure_s() - pressed_s) / (time.monotonic() - started)
    print(
        f"  pressure {pressure:.0%}; of {statistics.median(last.elapsed_s for _, last in ends):.2f} s: {facts}\n  {said(law)}",
        flush=True,
    )
    return kept


def replayed(rounds: list[Round]) -> None:
    """Fit the rounds as if the host had taken a part of the cores, when that is counted and when it is not."""
    rng = random.Random(0)
    truth = fitted(rounds, PLANS)
    slowed = []
    for timed_round in rounds:
        taken = rng.uniform(0.1, 0.4) if rng.random() < 0.75 else 0.0
        wanted_s = (timed_round.load.busy_s or 0.0) / (1 - taken)
        load = replace(timed_round.load, stolen_s=taken * wanted_s)
        slowed.append(
            Round(
                tuple((s / (1 - taken), wait) for s, wait in timed_round.steps), timed_round.evaluations, load
            )
        )
    for name, counted in ("counted", True), ("not counted", False):
        given = (
            slowed if counted else [replace(each, load=replace(each.load, stolen_s=None)) for each in slowed]
        )
        law = with_uncertainty(fitted(given, PLANS))
        law = disturbed(law, 0.0, law.stolen)
        off = [law.step_s(plan) / truth.step_s(plan) - 1 for plan in PLANS]
        print(f"replayed, {name}: known / known alone - 1: {min(off):+.1%} to {max(off):+.1%}\n  {said(law)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="for timing steps")
    parser.add_argument("--trials", type=int, default=10)
    options = parser.parse_args()
    alone = measured("alone", options.seconds, options.trials)
    with neighbours():
        measured("beside a busy process on each core", options.seconds, options.trials)
    try:
        with half_a_core():
            measured("limited to half a core", options.seconds, options.trials)
    except OSError as error:
        print(f"limited to half a core: not here ({error})")
    replayed(alone)


if __name__ == "__main__":
    main()
