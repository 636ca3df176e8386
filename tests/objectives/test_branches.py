"""Branches: one training gives the results of shorter ones, and neither it nor they are any different for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from bsearch.objectives.digits import Digits
from bsearch.objectives.state.branches import forks
from bsearch.objectives.task import Loss
from bsearch.objectives.training import train_task
from bsearch.objectives.trial import start_attempt
from bsearch.spaces.errors import StudyFileError
from bsearch.spaces.laws.device import DeviceProfile
from bsearch.spaces.learning_rate import OptimizerSettings
from bsearch.spaces.plan import BatchPlan
from bsearch.spaces.planning import trial_setup
from bsearch.spaces.study.file import study_from_dict
from bsearch.spaces.study.spec import StudySpec
from bsearch.spaces.trial import Measurement, Suggestion, TrialSetup
from conftest import small_study
from helpers import Net, setup
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

SAMPLES = 600
WARMUP = 0.2  # of an epoch


def trained_for(epochs: float, schedule: str, batch: int, branches: tuple[float, ...] = (), **changes: Any) -> TrialSetup:
    return setup(
        batch,
        budget=round(SAMPLES * epochs),
        epochs=epochs,
        training={"schedule": schedule, "warmup": WARMUP / epochs, "branches": True, "evaluations": 4},
        branches=tuple((one, round(SAMPLES * one)) for one in branches),
        **changes,
    )


def told(measurements: list[Measurement]) -> list[Any]:
    return [(one.samples_seen, one.scores, one.train_loss) for one in measurements]


def branches_of(measurements: list[Measurement]) -> list[Measurement]:
    return [branch for one in measurements for branch in one.branches]


@pytest.mark.parametrize("schedule", ["wsd", "constant"])
@pytest.mark.parametrize("batch", [7, 50, 64, 601])
def test_a_branch_is_the_shorter_training_and_the_longer_one_is_as_without(schedule: str, batch: int) -> None:
    measured = list(train_task(Net(), trained_for(4, schedule, batch, (2, 1))))
    assert told(measured) == told(list(train_task(Net(), trained_for(4, schedule, batch))))
    expected = (1, 2) if batch <= SAMPLES else (2,)
    assert [branch.samples_seen for branch in branches_of(measured)] == [SAMPLES * epochs for epochs in expected]
    for branch, epochs in zip(branches_of(measured), expected, strict=True):
        alone = list(train_task(Net(), trained_for(epochs, schedule, batch)))[-1]
        assert (branch.samples_seen, branch.scores) == (alone.samples_seen, alone.scores)
        left = SAMPLES * epochs - branch.facts["branched_at"]
        decays = 0.2 * (SAMPLES * epochs - WARMUP * SAMPLES) if schedule == "wsd" else batch / 2
        # It leaves after the last step whose middle is before the decay, or before its own last step, which is a shorter one.
        assert abs(left - decays) <= batch / 2 or left < batch


def test_an_attempt_that_was_cut_off_reports_its_branches_again(tmp_path: Path) -> None:
    one = trained_for(4, "wsd", 33, (2, 1), checkpoint=str(tmp_path / "kept.pt"), checkpoint_every_s=0.0)
    whole = list(train_task(Net(), replace(one, checkpoint=None)))
    cut = train_task(Net(), one)
    first = [next(cut), next(cut)]
    cut.close()
    assert branches_of(first)
    again = list(train_task(Net(), replace(one, attempt=1)))
    assert told(again) == told(whole)
    assert [told(list(some.branches)) for some in again] == [told(list(some.branches)) for some in whole]


@pytest.mark.slow
def test_two_devices_share_a_branch() -> None:
    def ended(devices: int) -> Iterator[Measurement]:
        made = trained_for(4, "wsd", 33, (2, 1), plan=BatchPlan(33, 1, devices))
        reports = start_attempt("helpers:Net", made)
        return iter(list(takewhile(lambda one: isinstance(one, Measurement), reports)))  # type: ignore[arg-type]

    one, two = list(ended(1)), list(ended(2))
    for some, other in zip(branches_of(one), branches_of(two), strict=True):
        assert some.samples_seen == other.samples_seen
        assert other.scores == pytest.approx(some.scores, rel=1e-6)
    assert two[-1].scores == pytest.approx(one[-1].scores, rel=1e-6)


def branching(**changes: Any) -> StudySpec:
    space = small_study()["space"] | {"epochs": {"low": 1, "high": 16, "log": True}} | changes.pop("space", {})
    training = {"schedule": "wsd", "branches": True} | changes.pop("training", {})
    return study_from_dict(small_study(**{"space": space, "training": training, "stopping": "none"} | changes))


@given(st.integers(1, 16) | st.floats(1, 16), st.integers(16, 400))
def test_a_branch_has_the_setup_of_the_trial_that_it_is(epochs: float, batch: int) -> None:
    continuous = isinstance(epochs, float)
    spec = branching(space={"epochs": {"low": 1.0 if continuous else 1, "high": 16, "log": True}})
    profile = DeviceProfile("cpu", "here", 1197)

    def planned(epochs: float) -> TrialSetup:
        values = {"effective_batch": batch, "reference_rate": 0.1, "rule": "sqrt", "epochs": epochs, "devices": 1}
        return trial_setup(spec, "small", Suggestion(0, {**values, "weight_decay": 0.0}), profile, "cpu")

    whole = planned(epochs)
    assert whole.training.warmup * whole.samples_budget == pytest.approx(0.05 * 1197)  # samples, as many in all
    half = epochs / 2 if continuous else epochs // 2
    assert [fewer for fewer, _ in whole.branches[:1]] == ([half] if half >= 1 else [])
    for fewer, samples in whole.branches:
        branch, alone = whole.branch(fewer, samples), planned(fewer)
        assert branch.training.warmup == pytest.approx(alone.training.warmup, rel=1e-12)
        assert replace(branch, training=alone.training) == replace(alone, branches=())
    # All of them leave the training, however its samples are rounded.
    plans = [run.plan for run in whole.steps() for _ in range(run.count)]
    assert sum(map(len, forks(whole, plans).values())) == len(whole.branches)
    assert TrialSetup.from_dict(whole.to_dict()) == whole


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"training": {"schedule": "cosine"}}, "training.schedule: expected wsd or constant with training.branches"),
        (
            {"space": {"schedule": ["wsd", "linear"]}, "training": {"schedule": "cosine"}},
            "space.schedule: expected wsd or const",
        ),
        ({"space": {"epochs": 8}}, "space.epochs: expected a range whose high is at least twice its low"),
        ({"space": {"epochs": {"low": 8, "high": 15}}}, "space.epochs: expected a range whose high is at least twice its low"),
        ({"stopping": "front"}, "stopping: expected none with training.branches"),
        ({"space": {"rule": "adamw_tau", "weight_decay": 0.1}}, "space.rule: expected another rule than adamw_tau"),
        ({"training": {"schedule": "wsd", "batch_schedule": "seesaw"}, "space": {"rule": "linear"}}, "expected constant with"),
        ({"devices": {"sharding": "zero1", "per_trial": 2}}, "devices.sharding: expected ddp with training.branches"),
    ],
)
def test_what_branches_do_not_fit_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(StudyFileError) as error:
        branching(**changes)
    assert expected in str(error.value)


def test_a_branch_knows_what_its_training_knows_and_does_not_leave_one_that_diverged() -> None:
    made = trained_for(4, "constant", 50, (2, 1))
    *_, last = measured = list(train_task(Net(), made))
    for branch in branches_of(measured):
        assert branch.facts["steps"] == branch.samples_seen / 50
        assert {name: branch.facts[name] for name in ("optimizer", "momentum", "model_parameters")} == {
            name: last.facts[name] for name in ("optimizer", "momentum", "model_parameters")
        }
    diverged = list(train_task(Net(), trained_for(4, "constant", 50, (2, 1), optimizer=OptimizerSettings(1e308))))
    assert diverged[-1].not_finite("val_loss")
    assert branches_of(diverged) == []


def test_no_branch_leaves_a_training_whose_loss_has_just_ceased_to_be_finite() -> None:
    class Breaks(Net):
        steps = 0

        def loss(self, model: nn.Module, batch: Any, setup: TrialSetup) -> Loss:
            self.steps += 1
            loss = super().loss(model, batch, setup)
            return Loss(loss.total * (math.nan if self.steps >= 10 else 1.0), loss.denominator)

    # The branch of one epoch leaves after step 12, and the loss is read at steps 8 and 16.
    made = trained_for(4, "constant", 50, (1,))
    assert [branch.facts["branched_at"] for branch in branches_of(list(train_task(Net(), made)))] == [50 * 12]
    assert branches_of(list(train_task(Breaks(), made))) == []


def test_a_repeat_has_no_branches() -> None:
    values = {"effective_batch": 32, "reference_rate": 0.1, "rule": "sqrt", "epochs": 8, "devices": 1, "weight_decay": 0.0}
    for notes, several in (({}, True), ({"repeats": 0, "seed": 3}, False), ({"repeats": 5, "seed": 3}, False)):
        made = trial_setup(branching(), "small", Suggestion(9, values, notes), DeviceProfile("cpu", "here", 1197), "cpu")
        assert bool(made.branches) == several


def test_digits_branch_to_the_bit() -> None:
    """The built-in task in single precision, over several epochs' shuffles."""
    made = setup(33, budget=1197 * 4, epochs=4, training={"schedule": "wsd", "warmup": 0.05}, branches=((2, 2394),))
    (branch,) = branches_of(list(train_task(Digits(), made)))
    alone = list(train_task(Digits(), made.branch(2, 2394)))[-1]
    assert branch.scores == alone.scores
