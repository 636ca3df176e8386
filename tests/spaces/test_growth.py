"""A batch that grows as the rate falls: exact in samples, with rates that the rule gives, and a known time."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from bsearch.objectives.digits import Digits
from bsearch.objectives.training import TrainingRun
from bsearch.search.preview.forecast import growth_savings
from bsearch.spaces.errors import InfeasiblePlanError, StudyFileError
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.laws.step_time import StepTime
from bsearch.spaces.plan import plan_batch, step_plans
from bsearch.spaces.planning import known_taken, known_train_s, trial_setup
from bsearch.spaces.schedule import batch_stages, rate_factor
from bsearch.spaces.study.file import study_from_dict
from bsearch.spaces.trial import Suggestion
from conftest import small_study
from helpers import setup
from hypothesis import example, given
from hypothesis import strategies as st

schedules = st.sampled_from(["cosine", "linear"])
warmups = st.floats(0, 0.9)


@given(schedules, warmups)
def test_the_batch_doubles_where_the_rate_has_halved(schedule: str, warmup: float) -> None:
    for begin, factor in batch_stages("seesaw", schedule, warmup):
        assert rate_factor(schedule, warmup, begin) == pytest.approx(1 / factor, abs=1e-6)
    assert batch_stages("constant", schedule, warmup) == ()


# Where the batch grows in a real schedule, or anywhere: within one step too.
stages_of_a_training = st.builds(batch_stages, st.just("seesaw"), schedules, warmups) | st.lists(
    st.floats(0, 1), max_size=3
).map(lambda begins: tuple((begin, 2 ** (place + 1)) for place, begin in enumerate(sorted(begins))))


@given(stages_of_a_training, st.integers(1, 400), st.integers(1, 5000), st.integers(1, 64), st.integers(1, 3))
@example(((0.51, 2), (0.52, 4)), 10, 200, 64, 1)
def test_steps_hold_the_budget_exactly_and_grow_in_time(
    stages: tuple[tuple[float, int], ...], batch: int, budget: int, cap: int, devices: int
) -> None:
    batch, budget = max(batch, devices), max(budget, batch, devices)
    limits = {"largest_micro_batch": cap}
    plan = plan_batch(batch, devices=devices, largest_micro_batch=cap)
    runs = step_plans(plan, budget, stages=stages, **limits)
    sizes = [run.plan.effective_batch for run in runs for _ in range(run.count)]
    assert sum(sizes) == budget
    assert all(run.plan.largest_micro_batch <= cap for run in runs)
    growths = [run.growth for run in runs]
    assert growths == sorted(growths)
    # The slow twin, a step at a time: a stage is skipped, with all after it, if no step of it is left.
    seen, growth, expected, left = 0, 1, [], list(stages)
    while seen < budget:
        while left and seen >= math.ceil(left[0][0] * budget):
            factor = left.pop(0)[1]
            if budget - seen < factor * batch:
                left = []
                break
            growth = factor
        expected.append(growth)
        seen += sizes[len(expected) - 1]
    assert [run.growth for run in runs for _ in range(run.count)] == expected
    # All but the last step have the batch of their stage.
    assert all(size == batch * grown for size, grown in zip(sizes[:-1], expected[:-1], strict=True))


@pytest.mark.parametrize(("rule", "exponent"), [("linear", 1.0), ("sqrt", 0.5)])
def test_rates_are_the_schedules_times_what_the_rule_says_of_the_larger_batch(rule: str, exponent: float) -> None:
    made = setup(16, 1, 1000, 0.1, training={"batch_schedule": "seesaw", "schedule": "cosine", "warmup": 0.1}, rule=rule)
    run, rates = TrainingRun(Digits(), made), []
    step = run.step

    def noted(micro_batches: Any, size: int) -> torch.Tensor:
        rates.append((run.optimizer.param_groups[0]["lr"], size))
        return step(micro_batches, size)

    run.step = noted  # type: ignore[method-assign]
    *_, last = run.measurements()
    assert last.samples_seen == sum(size for _, size in rates) == 1000
    assert last.facts["steps"] == len(rates) < 1000 // 16
    assert max(size for _, size in rates) == 128
    seen = 0
    for (rate, size), steps in zip(rates, [one for one in made.steps() for _ in range(one.count)], strict=True):
        plain = 0.1 * rate_factor("cosine", 0.1, (seen + size / 2) / 1000)
        assert rate == pytest.approx(plain * steps.growth**exponent)
        seen += size


def study(**changes: Any) -> Any:
    space = {
        "effective_batch": {"low": 4, "high": 64},
        "reference_rate": {"low": 0.01, "high": 0.1},
        "rule": "sqrt",
        "epochs": 2,
        **changes.pop("space", {}),
    }
    return study_from_dict(small_study(space=space, **{"budget": {"trials": 20, "profile_s": 1}, **changes}))


LAW = StepTime(((1, 0.001), (64, 0.0011), (512, 0.01)), update_s=0.0, interval=0.01)
PROFILE = DeviceProfile("cpu", "here", 1000, optimizer="SGD", step_times=(LAW,), memory=None)


def test_its_time_is_known_and_shorter_where_steps_take_as_long() -> None:
    spec = study(space={"batch_schedule": ["constant", "seesaw"]})
    known = known_taken(spec, {(): PROFILE})
    assert known is not None
    seconds = {}
    for kind in ("constant", "seesaw"):
        parameters = {"effective_batch": 8, "reference_rate": 0.05, "batch_schedule": kind}
        made = trial_setup(spec, "s", Suggestion(0, {**spec.fixed(), **parameters}), PROFILE, "cpu")
        assert made.training.batch_schedule == kind
        seconds[kind] = known_train_s(PROFILE, made)
        assert known(parameters) == (seconds[kind],)
        assert seconds[kind] == pytest.approx(sum(run.count * LAW.step_s(run.plan) for run in made.steps()))
    assert seconds["seesaw"] < 0.75 * seconds["constant"]


def test_check_offers_it_where_the_law_predicts_a_gain() -> None:
    savings = growth_savings(study(), PROFILE)
    assert savings[4] > 0.25
    slow = replace(PROFILE, step_times=(replace(LAW, points=((1, 0.001), (512, 0.512))),))
    assert all(saving == 0 for saving in growth_savings(study(), slow).values())
    assert growth_savings(study(training={"batch_schedule": "seesaw"}), PROFILE) == {}
    assert growth_savings(study(space={"rule": "constant"}), PROFILE) == {}
    assert growth_savings(study(space={"schedule": ["cosine", "constant"]}), PROFILE) == {}


def test_stages_have_at_least_the_micro_batches_of_the_first_and_memory_is_that_of_the_largest() -> None:
    made = setup(64, 4, 4000, 0.1, training={"batch_schedule": "seesaw"}, rule="linear", largest_micro_batch=64)
    assert [run.plan.accumulation for run in made.steps() if run.plan.effective_batch == 64 * run.growth] == [4, 4, 4, 8]
    assert made.plan.largest_micro_batch == 16
    assert made.largest_run_micro_batch == 64
    assert replace(made, training=made.training.model_copy(update={"batch_schedule": "constant"})).largest_run_micro_batch == 16


def test_batch_norm_wants_as_many_micro_batches_in_every_stage() -> None:
    spec = study(training={"batch_schedule": "seesaw"})
    norms = replace(PROFILE, batch_statistics=True, largest_micro_batch=64, smallest_micro_batch=2)
    parameters = {**spec.fixed(), "effective_batch": 32, "reference_rate": 0.05}
    with pytest.raises(InfeasiblePlanError, match="expected as many micro-batches in every stage"):
        trial_setup(spec, "s", Suggestion(0, parameters), norms, "cpu")
    assert trial_setup(spec, "s", Suggestion(0, {**parameters, "effective_batch": 8}), norms, "cpu").steps()[-1].growth == 8
    assert trial_setup(study(), "s", Suggestion(0, parameters), norms, "cpu").stages == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"training": {"batch_schedule": "seesaw"}, "budget": {"trials": 3, "profile_s": 0}},
            "training.batch_schedule: expected constant with budget.profile_s: 0",
        ),
        (
            {"training": {"batch_schedule": "seesaw", "schedule": "constant"}},
            "training.batch_schedule: expected constant with schedule: constant, whose rate never falls; got seesaw",
        ),
        (
            {"space": {"batch_schedule": ["constant", "seesaw"], "rule": ["sqrt", "adam_sde"]}},
            "space.batch_schedule: expected constant with rule adam_sde, which does not say how the rate follows",
        ),
        ({"training": {"batch_schedule": "seasaw"}}, "training.batch_schedule: expected one of constant, seesaw; got 'seasaw'"),
        (
            {"space": {"batch_schedule": "seesaw"}, "training": {"batch_schedule": "seesaw"}},
            "space.batch_schedule: expected it or training.batch_schedule, got both. Remove one.",
        ),
    ],
)
def test_what_does_not_go_together_is_told(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StudyFileError) as told:
        study(**changes)
    assert message in str(told.value)


@pytest.mark.slow
def test_an_attempt_goes_on_in_the_middle_of_a_stage(tmp_path: Any) -> None:
    made = setup(16, 1, 2000, 0.1, training={"batch_schedule": "seesaw", "evaluations": 8}, rule="linear")
    made = replace(made, checkpoint=f"file://{tmp_path}/c.pt", checkpoint_every_s=0.0)
    whole = TrainingRun(Digits(), replace(made, checkpoint=None))
    for _ in whole.measurements():
        pass
    first = TrainingRun(Digits(), made).measurements()
    for _ in range(6):
        next(first)
    second = TrainingRun(Digits(), replace(made, attempt=1))
    *_, last = second.measurements()
    assert last.facts["resumed_at"] > 1000
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters, second.parameters, strict=True))
