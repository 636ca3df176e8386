"""Money: a front of costs is one of device-seconds times a price, and a study ends where its budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bsearch.search.run.decisions.attempt import Attempt
from bsearch.search.run.decisions.spending import Spending, prices_of
from bsearch.search.run.driver import StudyResult
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.front import ParetoFront
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.record import TrialFacts, TrialRecord
from bsearch.spaces.study.file import parse_study, read_study
from bsearch.spaces.trial import Suggestion
from conftest import TASKS
from helpers import as_optuna, run, setup
from hypothesis import given
from hypothesis import strategies as st

StudyFile = Callable[..., Path]


@pytest.mark.slow
def test_a_front_of_costs(study_file: StudyFile) -> None:
    how: dict[str, Any] = {"task": f"{TASKS}:Points", "budget": {"trials": 6, "profile_s": 0.2}}
    path = study_file(**how, objectives={"speed": "cost"}, devices={"prices": {"cpu": 1.5}})
    study = run(path).study
    kept = as_optuna(study.url, study.name)
    assert kept.metric_names == ["cost", "accuracy"]
    for trial, record in zip(kept.trials, study.records, strict=True):
        assert trial.values[0] == pytest.approx(1.5 * (record.train_s or 0.0) / 3600)
        assert record.taken("cost") == trial.values[0]
        assert record.facts.spent is not None
        assert record.facts.spent > 1.5 * (record.facts.measured_train_s or 0.0) / 3600
    costs = [study.front.taken(trial) for trial in study.front.trials]
    assert costs == sorted(costs)
    assert study.front.takes(study.front.trials[0]).startswith("for a cost of ")
    # With other prices it goes on at those with which it began.
    how["budget"]["trials"] = 7
    more = run(study_file(**how, objectives={"speed": "cost"}, devices={"prices": {"cpu": 2}})).study
    assert [record.facts.price for record in more.records] == [1.5] * 7


def test_more_devices_cost_more() -> None:
    facts = TrialFacts(devices=4, price=1.8)
    one = TrialRecord(0, "complete", {}, facts, train_s=3600.0, accuracy=0.9)
    assert [one.taken("train_s"), one.taken("device_s"), one.taken("cost")] == pytest.approx(
        [3600, 14400, 7.2]
    )
    assert ParetoFront((one,), speed="cost").takes(one) == "for a cost of 7.2"
    assert ParetoFront((one,)).takes(one) == "in 1 h 0 min"


def test_a_study_ends_where_its_budget_is_spent_and_goes_on_with_a_larger_one(study_file: StudyFile) -> None:
    how: dict[str, Any] = {"task": f"{TASKS}:Points", "devices": {"prices": {"cpu": 3600}}}

    def within(cost: float) -> StudyResult:
        return run(study_file(**how, budget={"trials": 30, "profile_s": 0, "cost": cost}))

    def spent(result: StudyResult) -> float:
        return sum(record.facts.spent or 0.0 for record in result.study.records)

    first = within(1e-6)
    assert first.stopped == "budget.cost: 1e-06 is spent"
    assert len(first.study.records) == 1
    again = within(1e-6)
    assert again.stopped == first.stopped
    assert again.study.records == first.study.records
    more = within(3 * spent(first))
    assert 2 <= len(more.study.records) < 30
    assert spent(more) >= 3 * spent(first)


def test_prices_that_are_missing_are_named(study_file: StudyFile) -> None:
    path = study_file(devices={"prices": {"H100": 2.5, "A100 80GB": 1.8}}, objectives={"speed": "cost"})
    spec = read_study(path)
    cards = {"A100": "NVIDIA A100-SXM4-80GB", "L4": "NVIDIA L4"}
    assert prices_of(spec, cards, "gpu") == ({"A100": 1.8, "L4": None}, 1.8)
    with pytest.raises(
        StudyFileError,
        match=r"devices\.prices: expected a price for NVIDIA L4, .*; got one for H100, A100 80GB\. Write L4: ",
    ):
        prices_of(spec, {"L4": "NVIDIA L4", **cards}, "gpu")
    # A study that has begun keeps its price.
    begun = [TrialRecord(0, "complete", {}, TrialFacts(price=0.5))]
    assert prices_of(spec, {"L4": "NVIDIA L4"}, "gpu", begun) == ({"L4": None}, 0.5)
    spec = read_study(study_file(devices={"prices": {"H100": 2.5}}, budget={"trials": 3, "cost": 1}))
    with pytest.raises(StudyFileError, match="for NVIDIA L4"):
        prices_of(spec, {"H100": "NVIDIA H100 80GB HBM3", "L4": "NVIDIA L4"}, "gpu")
    for changes in ({"objectives": {"speed": "cost"}}, {"budget": {"trials": 3, "cost": 5}}):
        with pytest.raises(StudyFileError, match=r"expected devices\.prices with it, got none"):
            read_study(study_file(**changes))
    with pytest.raises(StudyFileError, match=r"objectives\.metric: expected a name that no parameter"):
        read_study(study_file(devices={"prices": {"cpu": 1}}, objectives={"metric": "cost"}))
    with pytest.raises(StudyFileError, match="expected a device's name of letters and digits"):
        read_study(study_file(devices={"prices": {"??": 1}}))


def test_a_share_of_a_device_costs_its_share(study_file: StudyFile) -> None:
    spec = read_study(
        study_file(devices={"per_trial": 0.5, "prices": {"gpu": 2}}, budget={"trials": 3, "cost": 5})
    )
    prices, compared = prices_of(spec, {"": "NVIDIA L4"}, "gpu")
    assert compared == prices[""] == 1.0
    spending = Spending(spec, prices, [TrialRecord(3, "error", {}, TrialFacts(spent=1.5))])
    assert spending.cost("", 1, 1800) == pytest.approx(0.5)
    spending.add(3, 0.5)
    assert spending.of(3) == pytest.approx(2.0)
    assert spending.over(2.9) == ""
    assert spending.over(3.0) == "budget.cost: 5 is spent"


@given(st.integers(1, 64), st.floats(0.01, 100.0), st.floats(1.0, 1e6), st.integers(2, 5))
def test_twice_the_devices_cost_twice(devices: int, price: float, seconds: float, times: int) -> None:
    """And so do twice the seconds and twice the price; each device of an attempt is paid for as long as it is held."""
    spec = parse_study("study: x\ntask: tasks.py:X\nspace: {effective_batch: 8, reference_rate: 0.1}\n")
    spending = Spending(spec, {"A": price, "B": times * price}, [])
    once = spending.cost("A", devices, seconds)
    assert once > 0
    several = spending.cost("A", times * devices, seconds), spending.cost("A", devices, times * seconds)
    assert (*several, spending.cost("B", devices, seconds)) == pytest.approx((times * once,) * 3)
    made = setup(batch=128, plan=BatchPlan(128, devices=devices))
    attempt = Attempt(Suggestion(0, {}), made, "A", None, held_since=time.monotonic() - seconds)
    assert spending.of_attempt(attempt) == pytest.approx(once, rel=0.05, abs=price * devices / 3600)
