"""The step-time law: what it is fitted to it gives back, its arithmetic is a simulated clock's, and it never guesses beyond."""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bsearch.objectives import attempts
from bsearch.objectives.machine.processor import OtherPrograms
from bsearch.objectives.profiling.fit import fit_step_time, with_uncertainty
from bsearch.objectives.profiling.step_time import Round, measured_step_time, refined_step_time, timed_rounds
from bsearch.objectives.training import TrainingRun
from bsearch.search.store.tables import Tables
from bsearch.spaces.errors import ProfilingError
from bsearch.spaces.laws.device import DeviceProfile, ProfileRequest
from bsearch.spaces.laws.step_time import StepTime, TimedPlan, fastest_plan, timing_plans
from bsearch.spaces.plan import BatchPlan, plan_batch, step_plans, step_sizes
from bsearch.spaces.study.devices import Memory
from bsearch.spaces.study.file import read_study
from conftest import BSEARCH, TASKS
from helpers import bsearch, run, setup, validated
from hypothesis import given
from hypothesis import strategies as st
from rank_jobs import plans_run
from tasks_for_tests import Points

slopes = st.lists(st.floats(0.0, 0.01), min_size=5, max_size=5)


def a_law(
    first_s: float, rising: list[float], update_s: float, sizes: list[int], devices: int = 1
) -> StepTime:
    points = [(sizes[0], first_s)]
    for (low, high), slope in zip(itertools.pairwise(sizes), rising, strict=False):
        points.append((high, points[-1][1] + slope * (high - low)))
    return StepTime(tuple(points), update_s, devices=devices)


@given(
    st.floats(1e-4, 1.0),
    slopes,
    st.floats(0.0, 1.0),
    st.integers(1, 3),
    st.integers(64, 5000),
    st.integers(1, 3),
)
def test_a_fit_gives_the_law_back(
    first_s: float, rising: list[float], update_s: float, low: int, high: int, devices: int
) -> None:
    plans = timing_plans(low, high, devices=devices)
    sizes = sorted({plan.largest_micro_batch for plan in plans if plan.accumulation == 1})
    law = a_law(first_s, rising, update_s, sizes, devices)
    fit = fit_step_time([TimedPlan(plan, (law.step_s(plan),)) for plan in plans])
    for plan in [*plans, BatchPlan(devices * (high // 2), 1, devices), BatchPlan(devices * high, 3, devices)]:
        assert fit.step_s(plan) == pytest.approx(law.step_s(plan), rel=1e-6)


@given(st.integers(1, 300), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3000), st.booleans(), slopes)
def test_train_s_is_the_sum_over_its_steps(
    batch: int, accumulation: int, devices: int, budget: int, capped: bool, rising: list[float]
) -> None:
    if not devices <= batch <= budget:
        return
    plan = plan_batch(batch, devices=devices, accumulation=accumulation)
    limits = {"largest_micro_batch": plan.largest_micro_batch if capped else None}
    law = a_law(0.01, rising, 0.002, [1, 7, 40, 90, 200, 400], devices)
    slow = 0.0
    for size in step_sizes(budget, batch, devices=devices, **limits):
        one = plan if size == batch else plan_batch(size, devices=devices, **limits)
        slow += sum(law.micro_batch_s(samples) for samples in one.micro_batches() if samples) + law.update_s
    assert law.train_s(plan, budget, **limits) == pytest.approx(slow)


@pytest.mark.parametrize(
    ("batch", "accumulation", "budget"), [(8, 1, 400), (8, 3, 401), (8, 4, 403), (50, 25, 401), (2, 1, 401)]
)
@pytest.mark.parametrize(("name", "smallest"), [("Points", 1), ("NeedsTwo", 2)])
def test_what_is_priced_is_what_a_worker_runs(
    name: str, smallest: int, batch: int, accumulation: int, budget: int
) -> None:
    accumulation = min(accumulation, batch // smallest)
    made = setup(batch, accumulation, budget, smallest_micro_batch=smallest, largest_micro_batch=batch + 1)
    (ran,) = plans_run(f"{TASKS}:{name}", made.to_dict())
    runs = step_plans(made.plan, budget, **made.limits)
    assert ran == [run.plan.micro_batches() for run in runs for _ in range(run.count)]
    assert sum(map(sum, ran)) == budget


def test_beyond_what_was_timed_nothing_is_said() -> None:
    law = StepTime(((1, 0.1), (100, 1.0)), update_s=0.0)
    with pytest.raises(ProfilingError, match="micro-batch 101: step time is known only up to 100 samples"):
        law.step_s(BatchPlan(101))
    with pytest.raises(ProfilingError, match="expected a plan on 1 devices, got 2"):
        law.step_s(BatchPlan(10, 1, 2))
    assert law.step_s(BatchPlan(200, 2)) == pytest.approx(2.0)


noise = st.none() | st.floats(0.0, 0.3)


@given(
    st.integers(1, 1000),
    st.integers(1, 8),
    slopes.map(sorted),
    noise,
    noise,
    st.integers(1, 2),
    st.integers(1, 5),
)
def test_the_fastest_accumulation_is_the_fastest(
    batch: int,
    fewest: int,
    rising: list[float],
    interval: float | None,
    misfit: float | None,
    devices: int,
    smallest: int,
) -> None:
    """What saves less than 3 %, or than noise, is left alone; of what saves more the best is taken."""
    law = a_law(0.001, rising, 0.0, [1, 20, 100, 400, 1000, 2000], devices)
    law = replace(law, interval=interval, misfit=None if misfit is None else (misfit, 1.0))
    plan = BatchPlan(devices * batch, min(fewest, max(batch // smallest, 1)), devices)
    chosen = fastest_plan(plan, law, smallest_micro_batch=smallest)
    more = [
        replace(plan, accumulation=each)
        for each in range(plan.accumulation + 1, 65)
        if each * smallest <= batch
    ]
    saves = law.step_s(plan) * (1 - max(0.03, 2 * (interval or 0.0), 2 * (misfit or 0.0)))
    best = min(map(law.step_s, more), default=math.inf)
    assert chosen == plan if interval is None or best > saves else chosen in more
    assert law.step_s(chosen) == pytest.approx(law.step_s(plan) if chosen == plan else best)


def noisy_rounds(plans: list[BatchPlan], noise: list[float], law: StepTime) -> Iterator[Round]:
    """A synthetic clock: the law's own seconds, a factor on each."""
    factors = itertools.cycle(noise)
    while True:
        yield Round(tuple((law.step_s(plan) * next(factors), 0.0) for plan in plans), (1e-4,))


def test_timing_ends_when_the_interval_is_narrow() -> None:
    plans = timing_plans(1, 512)
    truth = a_law(
        0.01, [1e-4] * 5, 0.004, sorted({p.largest_micro_batch for p in plans if p.accumulation == 1})
    )
    taken: list[Round] = []

    def counted(rounds: Iterator[Round]) -> Iterator[Round]:
        for one in rounds:
            taken.append(one)
            yield one

    law = measured_step_time(counted(noisy_rounds(plans, [1.0, 1.002, 0.998], truth)), plans, limit_s=60.0)
    assert law.interval is not None
    assert law.interval < 0.02
    assert len(taken) < 12
    assert law.evaluate_sample_s == 1e-4
    assert law.step_s(BatchPlan(300, 2)) == pytest.approx(truth.step_s(BatchPlan(300, 2)), rel=0.02)
    assert law.misfit is not None
    assert law.misfit[0] < 0.02


def test_a_limit_ends_timing_after_one_round_at_least() -> None:
    plans = timing_plans(1, 64)
    truth = a_law(
        0.01, [1e-4] * 5, 0.0, sorted({p.largest_micro_batch for p in plans if p.accumulation == 1})
    )
    law = measured_step_time(noisy_rounds(plans, [1.0], truth), plans, limit_s=0.0)
    assert law.interval is None
    assert law.step_s(BatchPlan(64)) == pytest.approx(truth.step_s(BatchPlan(64)))


def test_one_busy_minute_does_not_move_the_law() -> None:
    plans = timing_plans(1, 512)
    truth = a_law(
        0.01, [1e-4] * 5, 0.004, sorted({p.largest_micro_batch for p in plans if p.accumulation == 1})
    )
    timed = [TimedPlan(plan, (*(truth.step_s(plan),) * 5, truth.step_s(plan) * 9)) for plan in plans]
    law = with_uncertainty(fit_step_time(timed))
    assert law.step_s(BatchPlan(200)) == pytest.approx(truth.step_s(BatchPlan(200)), rel=1e-6)
    # Earlier versions wrote the power of devices beside it.
    written = {**law.to_dict(), "power": [[1, 50.0], [512, 80.0]], "power_spread": 0.01}
    stored = DeviceProfile("cpu", "a CPU", None).to_dict() | {
        "step_times": [written],
        "no_energy": "no counter",
    }
    assert DeviceProfile.from_dict(json.loads(json.dumps(stored))).step_times == (law,)


def test_plans_to_time_are_spread_and_few() -> None:
    for low, high in ((1, 1), (1, 2), (2, 3), (1, 10), (2, 1000), (8, 100_000)):
        plans = timing_plans(low, high)
        assert 1 <= len(plans) <= 10
        assert {low, high} <= {plan.largest_micro_batch for plan in plans}
        assert all(low <= size <= high for plan in plans for size in plan.micro_batches())
        law = fit_step_time([TimedPlan(plan, (0.01 + 0.001 * plan.effective_batch,)) for plan in plans])
        assert law.step_s(BatchPlan(high)) > 0
        for devices in (1, 2, 3):
            whole, cached = (
                timing_plans(low, high, devices=devices, embedding=how) for how in ("whole", "cached")
            )
            assert {plan.accumulation for plan in whole} == {1} and min(
                plan.accumulation for plan in cached
            ) == 2
            assert (
                {low, high}
                <= {size for plan in cached for size in plan.micro_batches()}
                <= {*range(low, high + 1)}
            )
    dense = timing_plans(1, 1000, dense=True)
    assert len({plan.largest_micro_batch for plan in dense}) == 9
    assert len(dense) <= 12


@pytest.mark.slow
@pytest.mark.parametrize("busy_from", [3, 7, 20, 45, 100, 180, 333])
@pytest.mark.parametrize("steep", [1.0, 3.0])
def test_the_corner_where_a_gpu_is_busy_is_found(busy_from: int, steep: float) -> None:
    """Time that hardly grows up to some size, and in proportion beyond; from there on kernels may even be faster at first."""

    def micro_batch_s(size: int) -> float:
        return 0.004 * max(1 + 0.05 * size / busy_from, (size / busy_from) ** (1 if steep == 1 else 1.2))

    def seconds(plan: BatchPlan) -> float:
        return 0.001 + sum(map(micro_batch_s, plan.micro_batches()))

    started: list[list[BatchPlan]] = []

    def rounds_of(plans: list[BatchPlan]) -> Iterator[Round]:
        started.append(plans)
        factors = itertools.cycle([1.0, 1.002, 0.998, 1.001])
        while True:
            yield Round(tuple((seconds(plan) * next(factors), 0.0) for plan in plans), (1e-4,))

    law = refined_step_time(rounds_of, timing_plans(1, 512, dense=True), limit_s=60.0)
    assert len(started) <= 5
    errors = [abs(law.step_s(BatchPlan(size)) / seconds(BatchPlan(size)) - 1) for size in range(1, 513)]
    assert max(errors) < 0.05
    assert sorted(errors)[len(errors) // 2] < 0.02


def test_times_fall_where_the_timings_leave_no_doubt() -> None:
    """A size that suits a kernel is faster than a smaller one; noise alone makes nothing fall."""
    plans = timing_plans(1, 512, dense=True)
    seconds = {plan.largest_micro_batch: 0.01 + 1e-4 * plan.largest_micro_batch for plan in plans}
    fast = sorted(seconds)[6]
    seconds[fast] *= 0.6
    known = StepTime(tuple(sorted(seconds.items())), 0.002)
    law = fit_step_time([TimedPlan(plan, (known.step_s(plan),)) for plan in plans])
    assert law.micro_batch_s(fast) == pytest.approx(seconds[fast], rel=0.001)
    assert law.micro_batch_s(fast) < law.micro_batch_s(sorted(seconds)[5])
    noise = itertools.cycle([1.0, 1.01, 0.99, 1.005, 0.985])
    flat = fit_step_time([TimedPlan(plan, (0.01 * plan.accumulation * next(noise),)) for plan in plans])
    values = [value for _, value in flat.points]
    assert values == sorted(values)


def test_timing_trains_nothing_away_and_tells_what_input_took() -> None:
    plans = [BatchPlan(64), BatchPlan(64, 2)]
    rounds = timed_rounds("bsearch.objectives.digits:Digits", setup(64, smallest_micro_batch=1), plans)
    seen = [next(rounds), next(rounds)]
    rounds.close()  # type: ignore[attr-defined]
    assert all(step_s > input_s > 0 for one in seen for step_s, input_s in one.steps)
    assert all(one.evaluations[0] > 0 for one in seen)
    run = TrainingRun(Points(), setup(8))
    run.rates.freeze()
    before = [parameter.detach().clone() for parameter in run.parameters]
    loader = run.loader([run.setup.plan] * 3)
    for _ in range(3):
        run.rates.set(0.5)
        run.step(run.micro_batches(run.setup.plan, loader), 8)
    assert all(torch.equal(one, other) for one, other in zip(before, run.parameters, strict=True))


@pytest.mark.slow
def test_what_loaders_cannot_deliver_is_in_the_step(tmp_path: Path) -> None:
    """Loader processes run ahead; a plan timed on what they had fetched before would look free."""
    plans = [BatchPlan(20), BatchPlan(60)]
    made = setup(20, training={"workers": 2}, parameters={"sample_s": 0.002})
    rounds = timed_rounds(f"{TASKS}:SlowInput", made, plans)
    seen = [next(rounds) for _ in range(3)]
    rounds.close()  # type: ignore[attr-defined]
    for one in seen[1:]:
        for plan, (step_s, input_s) in zip(plans, one.steps, strict=True):
            # Two processes share the work of a sample each 2 ms.
            assert step_s > 0.7 * plan.effective_batch * 0.002 / 2
            assert input_s > 0.5 * step_s


def profiled(name: str, **request: object) -> DeviceProfile:
    asked = ProfileRequest(setup(), Memory(), highest=100, timing_s=0.3, **request)  # type: ignore[arg-type]
    return attempts.profiled(f"{TASKS}:{name}", asked)


@pytest.mark.slow
@pytest.mark.long
def test_a_profile_holds_a_law_for_each_number_of_devices() -> None:
    profile = profiled("Points", devices=(1, 2))
    assert [law.devices for law in profile.step_times] == [1, 2]
    assert profile.step_times[0].largest_micro_batch == 100
    assert profile.step_times[1].largest_micro_batch == 50
    assert DeviceProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_sizes_that_run_out_of_memory_are_not_timed() -> None:
    """The task holds 50 samples and no study said so: nothing larger is known, so nothing larger is planned."""
    (law,) = profiled("SmallMemory").step_times
    assert law.largest_micro_batch == 50


@pytest.mark.slow
def test_a_parameter_that_changes_cost_is_not_priced_as_another(study_file: Callable[..., Path]) -> None:
    space = {"effective_batch": {"low": 8, "high": 64}, "reference_rate": 0.1, "epochs": 1}
    choices = {"width": [32, 64], "optimizer": ["sgd", "adam"], "label": ["a", "b"]}
    path = study_file(task=f"{TASKS}:LabelledDigits", space=space | choices, budget=KNOWN)
    refused = bsearch("run", path, "--serial")
    assert refused.exit_code == 2
    assert (
        "space.width: expected changes_cost: true, since at 64 a step's bytes or operations are 1."
        in refused.output
    )
    assert "space.optimizer: expected changes_cost: true" in refused.output
    assert "space.label" not in refused.output
    said = {"width": {"choices": [16, 64], "changes_cost": True}, "label": ["a", "b"]}
    path = study_file(task=f"{TASKS}:LabelledDigits", space=space | said, budget=KNOWN)
    result = run(path)
    spec = read_study(path)
    assert spec.storage is not None
    row = Tables(spec.storage).study("small")
    assert row is not None
    prices = row.step_times or {}
    laws = {json.loads(key)[0][1]: kept[0] for key, kept in prices.items()}
    assert set(laws) == {16, 64}
    for record in result.study.records:
        plan = BatchPlan(record.facts.effective_batch, record.facts.accumulation)
        assert record.train_s == pytest.approx(laws[record.parameters["width"]].train_s(plan, 1197))


KNOWN = {"trials": 3, "profile_s": 0.4}


@pytest.mark.slow
def test_one_study_has_one_kind_of_seconds(study_file: Callable[..., Path]) -> None:
    begun = run(study_file(task=f"{TASKS}:Points", budget=KNOWN))
    assert {record.facts.train_s_source for record in begun.study.records} == {"known"}
    later = run(study_file(task=f"{TASKS}:Points", budget={"trials": 5, "profile_s": 0}))
    assert {record.facts.train_s_source for record in later.study.records} == {"known"}
    spec = read_study(study_file(task=f"{TASKS}:Points"))
    assert spec.storage is not None
    row = Tables(spec.storage).study("small")
    assert row is not None
    (laws,) = (row.step_times or {}).values()
    law = laws[0]
    for record in later.study.records:
        plan = BatchPlan(record.facts.effective_batch, record.facts.accumulation)
        assert record.train_s == pytest.approx(law.train_s(plan, 800))


def test_a_study_that_was_timed_by_the_clock_stays_so(study_file: Callable[..., Path]) -> None:
    run(study_file(task=f"{TASKS}:Points", budget={"trials": 2, "profile_s": 0}))
    result = bsearch("run", study_file(task=f"{TASKS}:Points", budget=KNOWN), "--serial")
    assert "this study's trials are timed by wall-clock time, which cannot change now" in result.output
    assert "timing its steps" not in result.output
    later = run(study_file(task=f"{TASKS}:Points", budget=KNOWN))
    assert {record.facts.train_s_source for record in later.study.records} == {"measured"}
    assert all(record.train_s == record.facts.measured_train_s for record in later.study.records)


@pytest.mark.slow
@pytest.mark.long
def test_a_rough_law_is_timed_anew_where_there_is_more_time(study_file: Callable[..., Path]) -> None:
    changes = {
        "task": f"{TASKS}:Points",
        "space": {"effective_batch": 50, "reference_rate": 0.1, "epochs": 1},
    }
    rough = study_file(**changes, budget={"trials": 1, "profile_s": 0.001})
    assert "roughly" in bsearch("run", rough, "--serial").output
    finer = study_file(**changes, budget={"trials": 1, "profile_s": 5})
    again = bsearch("run", finer, "--serial", "--new").output
    assert "timing a Task's steps for up to 5 s" in again
    assert "of a training alone on 1 device, is known in advance to ±" in again
    once_more = bsearch("run", finer, "--serial", "--new").output
    assert "trial 0 complete" in once_more


def test_an_error_while_timing_says_so_and_what_to_do(study_file: Callable[..., Path]) -> None:
    path = study_file(task=f"{TASKS}:RaisesLarge", budget=KNOWN)
    result = bsearch("run", path, "--serial")
    assert result.exit_code == 2
    assert (
        "timing its steps (batches of up to 400; lower memory.largest_micro_batch, or write budget:"
        in result.output
    )
    assert "failed: ValueError: too many (" in result.output


def test_devices_that_the_machine_lacks_are_refused_at_once(study_file: Callable[..., Path]) -> None:
    path = study_file(task=f"{TASKS}:Points", devices={"per_trial": 999, "kind": "cpu"})
    for command in (["check"], ["run", "--serial"], ["profile"]):
        result = bsearch(*command, path)
        assert result.exit_code == 2
        assert "devices.per_trial: expected at most the " in result.output


@pytest.mark.slow
@pytest.mark.long
def test_mended_code_is_priced_anew_until_a_trial_counts(study_file: Callable[..., Path]) -> None:
    path = study_file(task="tasks.py:Mine", budget=KNOWN)
    code = "import time\nfrom tasks_for_tests import Points, Raises\n\n\n"
    tasks = path.with_name("tasks.py")
    slow = (
        "    def loss(self, model, batch, setup):\n        time.sleep(0.02)\n        return "
        "super().loss(model, batch, setup)\n"
    )
    command = [str(BSEARCH), "run", str(path), "--serial"]  # a process each: a module is read once
    environment = {**os.environ, "PYTHONPATH": str(TASKS.parent)}
    tasks.write_text(code + "class Mine(Raises):\n" + slow)
    failed = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "failed with the same error" in failed.stdout, failed.stderr
    tasks.write_text(code + "class Mine(Points):\n    pass\n")
    mended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert mended.returncode == 0, mended.stdout + mended.stderr
    counted = [
        record
        for record in Tables(f"sqlite:///{path.parent}/small.db", create=False).trials("small")
        if record.counts
    ]
    assert len(counted) == 3
    assert all(
        record.train_s is not None and record.train_s < 0.02 * record.facts.steps for record in counted
    )


@pytest.mark.slow
def test_another_device_redraws_the_front(study_file: Callable[..., Path], tmp_path: Path) -> None:
    path = study_file(task=f"{TASKS}:Points", budget={"trials": 6, "profile_s": 0.4})
    result = run(path)
    profile = tmp_path / "other.json"
    profiled = bsearch("profile", path, "--out", profile)
    assert profiled.exit_code == 0, profiled.output
    document = json.loads(profile.read_text())
    law = document["profiles"][0]["profile"]["step_times"][0]
    # A device on which a step takes a second, whatever is in it: the fewest steps are the fastest.
    law["points"], law["update_s"] = [[1, 0.0], [400, 0.0]], 1.0
    document["device"] = "Steady"
    profile.write_text(json.dumps(document))
    shown = bsearch("show", path, "--profile", profile, "--json")
    assert shown.exit_code == 0, shown.output
    retimed = validated(shown.output)
    assert retimed["device"] == "Steady"
    by_number = {record.number: record for record in result.study.records}
    assert len(retimed["was"]) == 6
    for trial in retimed["front"]:
        record = by_number[trial["trial"]]
        assert trial["train_s"] == record.facts.steps
        assert trial["accuracy"] == pytest.approx(record.accuracy, rel=1e-5)
    plain = bsearch("show", path, "--profile", profile)
    assert "on Steady" in plain.output
    assert "On both fronts:" in plain.output
    document["task"]["name"] = "Other"
    profile.write_text(json.dumps(document))
    other = bsearch("show", path, "--profile", profile)
    assert (other.exit_code, "expected a profile of the task Points, got one of Other" in other.output) == (
        2,
        True,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what Linux counts")
def test_our_own_processes_are_not_other_programs() -> None:
    def share_beside(start: str) -> float:
        """What others used while a busy process ran for a second."""
        pid = int(subprocess.run(["bash", "-c", start], stdout=subprocess.PIPE, text=True, check=True).stdout)
        others = OtherPrograms()
        time.sleep(1.5)
        try:
            return others.share()
        finally:
            os.kill(pid, signal.SIGKILL)

    # Its parent has ended, so that it is nobody's child any more.
    orphaned = share_beside("yes > /dev/null 2>&1 & echo $!")
    with subprocess.Popen(["yes"], stdout=subprocess.DEVNULL) as ours:
        others = OtherPrograms()
        time.sleep(1.5)
        beside_ours = others.share()
        ours.kill()
    assert beside_ours < orphaned
    assert orphaned > 0.5 / (os.cpu_count() or 1)


def test_a_child_that_ended_is_counted_once() -> None:
    others = OtherPrograms()
    before = others._used_s()
    subprocess.run([sys.executable, "-c", "sum(range(3 * 10**7))"], check=True)
    used = others._used_s() - before
    cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert 0.1 < used <= cpu.ru_utime + cpu.ru_stime + 1
