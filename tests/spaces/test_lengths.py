"""How long a training is: epochs, samples, units, steps, or seconds that are known beforehand or told by a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from bsearch.search.report.answers import event_answer
from bsearch.search.report.frameworks import FRAMEWORKS
from bsearch.search.report.frameworks.settings import chosen_settings
from bsearch.search.report.terminal.train import opening_lines
from bsearch.search.run.decisions.attempt import setup_facts
from bsearch.search.run.events import Event
from bsearch.search.run.train import planned_trainings
from bsearch.search.store.stored import StoredStudy
from bsearch.spaces.errors import InfeasiblePlanError, StudyFileError
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.laws.step_time import StepTime
from bsearch.spaces.planning import known_taken, known_train_s, trial_setup
from bsearch.spaces.profile_request import profiling_setup
from bsearch.spaces.readable import number, seconds
from bsearch.spaces.record import TrialFacts, TrialRecord, TrialResult
from bsearch.spaces.study.file import read_study
from bsearch.spaces.study.space import LENGTHS
from bsearch.spaces.trial import UNTIMED_SAMPLES, Measurement, Suggestion, TrialSetup
from conftest import TASKS
from helpers import run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tasks_for_tests import Points
from torch import nn

HERE = Path(__file__)
LAW = StepTime(((1, 0.002), (64, 0.06), (400, 0.5)), update_s=0.001, interval=0.01)
PROFILE = DeviceProfile("cpu", "none", 1000, step_times=(LAW,), unit="tokens", units_per_sample=7.0)
SPACE = {
    "effective_batch": {"low": 1, "high": 400},
    "reference_rate": 0.1,
    "accumulation": {"low": 1, "high": 4},
}


def studies(study_file: Callable[..., Path], length: str, value: object) -> Path:
    return study_file(space={**SPACE, length: value})


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.sampled_from(LENGTHS),
    batch=st.integers(1, 400),
    much=st.floats(0.01, 1.0),
    parts=st.integers(1, 4),
)
def test_a_length_is_so_many_samples(
    study_file: Callable[..., Path], length: str, batch: int, much: float, parts: int
) -> None:
    most = {"epochs": 9.0, "samples": 5000, "tokens": 40000, "steps": 60, "train_s": 30.0}[length]
    value = most * much if isinstance(most, float) else max(int(most * much), 1)
    spec = read_study(studies(study_file, length, value))
    profiled = profiling_setup(spec, "cpu")
    assert profiled.epochs == (value if length == "epochs" else 1)
    assert (profiled.train_s is None) == (length != "train_s")
    suggestion = Suggestion(0, {**spec.fixed(), "effective_batch": batch, "accumulation": parts})
    try:
        setup = trial_setup(spec, "lengths", suggestion, PROFILE, "cpu")
    except InfeasiblePlanError:
        law = known_taken(spec, {(): PROFILE}, None)
        assert law is not None
        assert law({"effective_batch": batch, "accumulation": parts}) != law(
            {"effective_batch": batch, "accumulation": parts}
        )
        return
    step_s, samples = LAW.step_s(setup.plan), setup.samples_budget
    wanted = {"epochs": value * 1000, "samples": value, "tokens": value / 7, "steps": value * batch}
    if length == "train_s":
        assert samples % batch == 0
        assert samples / batch * step_s <= value * (1 + 1e-6) < (samples / batch + 1) * step_s * (1 + 1e-6)
    else:
        assert samples == round(wanted[length])
    assert setup.epochs == pytest.approx(samples / 1000, abs=5e-4)
    law = known_taken(spec, {(): PROFILE}, None)
    assert law is not None
    known = law({"effective_batch": batch, "accumulation": parts})
    assert known == (value if length == "train_s" else known_train_s(PROFILE, setup))


def test_one_thing_says_how_long_a_training_is(study_file: Callable[..., Path]) -> None:
    assert read_study(study_file(space={**SPACE})).space.length == "epochs"
    assert read_study(studies(study_file, "steps", 10)).space.epochs is None
    for wrong, expected in (
        (
            {"epochs": 3, "train_s": 20},
            "expected one of epochs, samples, tokens, steps, train_s, got epochs and train_s",
        ),
        ({"train_s": 0}, "expected a number above 0"),
        ({"steps": 1.5}, "expected an integer >= 1"),
        ({"train_s": 20, "rule": "adamw_tau", "weight_decay": 0.1}, "expected epochs, of which the longest"),
    ):
        with pytest.raises(StudyFileError, match=expected):
            read_study(study_file(space={**SPACE, **wrong}))


def weights_told(setup: TrialSetup) -> Iterator[Measurement]:
    """A generator that trains by the clock, in measurements of a twentieth."""
    started, seen = time.perf_counter(), 0
    assert setup.train_s is not None
    while True:
        time.sleep(setup.train_s / 20)
        seen += setup.effective_batch
        yield Measurement(seen, time.perf_counter() - started, accuracy=min(seen / 1e4, 1.0))


def stops_early(setup: TrialSetup) -> Iterator[Measurement]:
    yield Measurement(setup.effective_batch, 0.01, accuracy=0.5)


@pytest.mark.slow
def test_where_steps_are_not_timed_the_clock_ends_a_training(study_file: Callable[..., Path]) -> None:
    space = {"effective_batch": {"low": 16, "high": 400}, "reference_rate": 0.1, "train_s": 0.2}
    path = study_file(task=f"{HERE}:weights_told", space=space, training={"samples": 1000}, stopping="none")
    assert not run(path).failure
    records = StoredStudy.open(str(path)).records
    assert {record.outcome for record in records} == {"complete"}
    for record in records:
        facts = record.facts
        assert facts.measured_train_s is not None
        assert 0.2 <= facts.measured_train_s < 2
        assert facts.samples_budget is not None
        assert 16 <= facts.samples_budget < 20 * 400 + 1 < UNTIMED_SAMPLES
        assert facts.epochs == pytest.approx(facts.samples_budget / 1000)
        assert record.settings["train_s"] == record.train_s == facts.measured_train_s
    study, record = StoredStudy.open(str(path)), records[0]
    samples, by_clock = record.facts.samples_budget, study.setup_of(record)
    chosen = chosen_settings(study, record, "as asked")
    assert yaml.safe_load(FRAMEWORKS["yaml"](chosen).text)["samples_budget"] == samples
    assert f"max_steps={chosen.even_steps}" in FRAMEWORKS["hf"](chosen).text
    assert chosen.even_steps < 100
    # It has the trial's code and clock.
    assert f"'samples_budget': {UNTIMED_SAMPLES}" in FRAMEWORKS["pytorch"](chosen).text
    assert "samples" not in event_answer(Event("started", setup=by_clock), "accuracy")
    assert setup_facts(by_clock, None).epochs is None
    (again,) = planned_trainings(study, record, path.parent / "again")
    assert again.setup.is_timed_by_clock
    (line,) = opening_lines(study, record, "", [again], study.identity["task"]["code"])
    assert f" {number(record.facts.epochs)} epochs" in line
    assert f"about {seconds(record.train_s)}" in line
    (longer,) = planned_trainings(study, record, path.parent / "longer", epochs=3)
    assert (longer.setup.samples_budget, longer.setup.train_s) == (3000, None)
    path = study_file(study="early", task=f"{HERE}:stops_early", space=space, training={"samples": 1000})
    result = run(path)
    assert "after setup.train_s = 0.2 seconds" in (result.failure or result.study.records[0].message)


@pytest.mark.slow
def test_trainings_of_equal_seconds_are_the_same_whatever_else_runs(study_file: Callable[..., Path]) -> None:
    """The samples follow from the law that the study began with, whichever process trains."""
    space = {
        "effective_batch": {"low": 16, "high": 64},
        "reference_rate": {"low": 0.01, "high": 1},
        "train_s": 0.05,
    }
    path = study_file(
        task=f"{TASKS}:Points", space=space, budget={"trials": 6, "profile_s": 2}, stopping="none"
    )
    assert not run(path).failure
    study = StoredStudy.open(str(path))
    assert [record.train_s for record in study.records] == [0.05] * 6
    assert len({member.accuracy for member in study.front.trials}) == 1
    law = next(law for profile in study_profiles(study) for law in profile.step_times)
    for record in study.records:
        batch, samples = record.facts.effective_batch, record.facts.samples_budget
        assert batch is not None and samples is not None and samples % batch == 0
        taken = samples / batch * law.micro_batch_s(batch) + samples / batch * law.update_s
        assert 0.05 - law.micro_batch_s(batch) - law.update_s < taken <= 0.05 * (1 + 1e-6)


def study_profiles(study: StoredStudy) -> list[DeviceProfile]:
    from bsearch.search.run.profiles import stored_profiles

    return [*stored_profiles(study, study.tables()).values()]


def test_times_have_to_be_known(study_file: Callable[..., Path]) -> None:
    space = {"effective_batch": {"low": 16, "high": 64}, "reference_rate": 0.1, "train_s": 0.05}
    path = study_file(task=f"{TASKS}:Points", space=space)
    with pytest.raises(StudyFileError, match=r"space.train_s: expected budget.profile_s above 0"):
        run(path)
    space = {**{name: space[name] for name in ("effective_batch", "reference_rate")}, "tokens": 1000}
    with pytest.raises(
        StudyFileError, match=r"space.tokens: expected data that say how many each sample has"
    ):
        run(study_file(task=f"{TASKS}:Points", space=space))


def test_rates_of_groups_are_ratios_under_one_rule(study_file: Callable[..., Path]) -> None:
    rates = {"head": {"low": 0.1, "high": 10}, "body": 1}
    spec = read_study(study_file(space={**SPACE, "rule": "linear", "rates": rates}))
    assert list(spec.searched()) == ["effective_batch", "accumulation", "rates.head"]
    values = {**spec.fixed(), "effective_batch": 128, "accumulation": 1, "rates.head": 3.0}
    setup = trial_setup(spec, "rates", Suggestion(0, values), PROFILE, "cpu")
    assert (setup.rate("body"), setup.rate("head")) == (
        setup.learning_rate,
        pytest.approx(3 * setup.learning_rate),
    )
    assert setup.learning_rate == pytest.approx(0.1 * 128 / 256)
    with pytest.raises(Exception, match=r"space.rates: expected 'tail'"):
        setup.rate("tail")
    with pytest.raises(StudyFileError, match="rates"):
        read_study(study_file(space={**SPACE, "rates": {"no name": 1}}))
    priors = [{"head": {"low": 0.1, "high": 10, "prior": best}} for best in (1, 2)]
    same = [read_study(study_file(space={**SPACE, "rates": rates})).identity() for rates in priors]
    assert same[0] == same[1]  # a prior says where trials are tried, not what they are


class TwoRates(Points):
    """The bias has a rate of its own."""

    def optimizer(self, model: nn.Module, setup: TrialSetup) -> torch.optim.Optimizer:
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": setup.rate("bias")}]
        return torch.optim.SGD(groups, lr=setup.learning_rate)


@pytest.mark.slow
def test_a_study_searches_ratios_of_rates(study_file: Callable[..., Path]) -> None:
    space = {
        "effective_batch": {"low": 16, "high": 64},
        "reference_rate": {"low": 0.01, "high": 1},
        "epochs": 1,
    }
    path = study_file(task=f"{HERE}:TwoRates", space={**space, "rates": {"bias": {"low": 0.1, "high": 10}}})
    assert not run(path).failure
    records = StoredStudy.open(str(path)).records
    assert all(0.1 <= record.parameters["rates.bias"] <= 10 for record in records)
    assert len({record.parameters["rates.bias"] for record in records}) > 1
    with pytest.raises(StudyFileError, match=r"rates.head: expected a parameter that the task reads"):
        run(
            study_file(
                task=f"{HERE}:TwoRates", study="unread", space={**space, "rates": {"bias": 1, "head": [1, 2]}}
            )
        )


@pytest.mark.parametrize(
    ("length", "was"), [("epochs", 0.3), ("train_s", 0.3), ("samples", 1), ("steps", 1), ("tokens", 1)]
)
def test_a_shortened_training_has_the_length_that_it_had(length: str, was: float) -> None:
    record = TrialRecord(0, "running", {length: 3})
    ended = record.ended(TrialResult("complete", TrialFacts(shortened_to=0.1), (1.0, 0.9)), "")
    assert ended.parameters[length] == pytest.approx(was)
    assert ended.facts.planned_length == 3


def test_so_many_samples_are_no_clock(study_file: Callable[..., Path]) -> None:
    """The number that stands for a training without known samples is one that a study may write."""
    spec = read_study(studies(study_file, "samples", UNTIMED_SAMPLES))
    setup = trial_setup(
        spec, "many", Suggestion(0, {**spec.fixed(), "effective_batch": 8, "accumulation": 1}), PROFILE, "cpu"
    )
    assert (setup.samples_budget, setup.is_timed_by_clock) == (UNTIMED_SAMPLES, False)
